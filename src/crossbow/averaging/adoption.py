"""Adoption: from a user's model and optimizer to learners in an arena."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from crossbow.arena import Arena, Layout, adoptable_buffers, adoptable_parameters, plan
from crossbow.averaging.adaptive import Centered, Terms
from crossbow.averaging.allreduce import AllReduce, number_of_words
from crossbow.averaging.asynchronous import Asynchronous, Store
from crossbow.averaging.family import (
    Adaptive,
    Averaging,
    Periods,
    Pulled,
    Queued,
    Reduced,
    Unordered,
)
from crossbow.averaging.gain import Gain
from crossbow.averaging.gathering import BetweenHosts, Letters, MeanOfHosts, WithinHost
from crossbow.averaging.hosts import CentralOfHosts, Exchange, Reduction
from crossbow.averaging.meeting import BetweenHosts as MeetsOthers
from crossbow.averaging.meeting import Meeting, MeetingOfHosts, Papers, regions_of
from crossbow.averaging.meeting import WithinHost as MeetsHere
from crossbow.averaging.periodic import Outer, Periodic
from crossbow.averaging.pipeline import Pipeline, Sheets
from crossbow.averaging.synchronous import Synchronous
from crossbow.comm.lock import Lock
from crossbow.comm.shared import Carver, Clocks, Peer, map_block
from crossbow.comm.wire import Route, Traffic, Wire
from crossbow.comm.world import World, join
from crossbow.data.order import hash64
from crossbow.engines.sequential import Sequential
from crossbow.errors import InputError
from crossbow.stats.noise import NoiseMeter, Pieces
from crossbow.stats.watch import AVERAGING, COMPUTE, Watch

_RANDOM = 3  # the hash stream of the learners' random streams; 1 and 2 are data/order.py's

_BLIND_OPTIMIZERS = (
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.SGD,
)
"""Without weight decay, their move doesn't depend on the weights that it is added to."""


Together = Synchronous | Centered | AllReduce | Periodic | Asynchronous


def adopt(
    model: nn.Module,
    optimizer: Optimizer,
    averaging: Averaging,
    world: World,
    shares: Sequence[range],
    name: str,
    route: Route,
    traffic: Traffic,
    watch: Watch,
) -> tuple[Together, ExitStack]:
    """Move the model into an arena; return its averaging, and a stack that undoes it all.

    Args:
        model: becomes views of the first of this rank's learners.
        optimizer: of the model.
        averaging: the settings.
        world: this rank's place; all ranks adopt together.
        shares: the learners of every rank.
        name: of the run.
        route: to other hosts.
        traffic: counts what passes there.
        watch: sees where time goes.
    """
    parameters, buffers = adoptable_parameters(model), adoptable_buffers(model)
    _check_optimizer(optimizer, model, parameters)
    device = _only_device([*parameters, *buffers])
    # a GPU's rows lie in its own memory: to the averaging, each is a host
    house = world if device.type == "cpu" else replace(world, local_rank=0, local_size=1)
    layouts = plan(parameters), plan(buffers)
    plans = {
        Pulled: _PulledPlan,
        Adaptive: _AdaptivePlan,
        Reduced: _ReducedPlan,
        Periods: _PeriodicPlan,
        Unordered: _UnorderedPlan,
        Queued: _QueuedPlan,
    }
    kind: _Plan = plans[type(averaging)](averaging, optimizer, layouts, world, house, shares, route)
    with ExitStack() as stack:
        stack.enter_context(process.held(world, device))
        world.share([*model.parameters(), *model.buffers()])
        _broadcast_state(optimizer, world)
        needed = Carver()
        kind.lay_out(needed)
        clock_block, rows = _allocate(house, needed.used, device, name)
        kind.lay_out(Carver(rows))
        arena = kind.arena
        if house.local_rank == 0:
            arena.fill({name: tensor.detach() for name, tensor in (*parameters, *buffers)})
        states = _random_states(shares[world.rank], world)  # no rank goes on before rows are filled
        engine = Sequential(model, optimizer, arena, arena.shares[house.local_rank], states)
        stack.callback(engine.leave)

        def connect(group: dist.ProcessGroup) -> Reduction:
            like = max((b.rows[0, 0] for b in arena.parameters), key=lambda row: row.nbytes)
            return kind.reduction(Wire(group, route, like, traffic))

        clocks, exchange = stack.enter_context(
            _in_order(world, house, clock_block, device, route, connect)
        )
        clocks.on_wait = watch.waited
        average = kind.start(engine, clocks, exchange, stack)
        for handle in _hook(optimizer, average, watch):
            stack.callback(handle.remove)
        return average, stack.pop_all()


class _Plan(Protocol):
    """What an averaging needs, and how it begins."""

    arena: Arena

    def lay_out(self, carver: Carver) -> None:
        """Lay out its memory; called twice, the first time to count."""

    def reduction(self, wire: Wire) -> Reduction:
        """What the first rank of a host does between hosts."""

    def start(
        self, engine: Sequential, clocks: Clocks, exchange: Exchange | None, stack: ExitStack
    ) -> Together:
        """Begin; what is on the stack is undone at the end."""


class _PulledPlan:
    """What averagings with a central model that pulls and lags need."""

    def __init__(
        self,
        averaging: Pulled,
        optimizer: Optimizer,
        layouts: tuple[list[Layout], list[Layout]],
        world: World,
        house: World,
        shares: Sequence[range],
        route: Route,
    ) -> None:
        self._k, self._momentum = shares[-1].stop, averaging.momentum
        self._alpha, self._period = averaging.pull(self._k), averaging.period
        if averaging.wants_momentum and not momentum_of(optimizer):
            raise InputError(
                "eamsgd averages learners with momentum of their own: give the optimizer some, "
                "such as sgd:momentum=0.9,nesterov=true, or use easgd"
            )
        self._layouts, self._world, self._house = layouts, world, house
        self._shares = _rows_of(house, shares)
        self._first_learner = shares[house.first_local].start

    def lay_out(self, carver: Carver) -> None:
        self.arena = Arena(
            *self._layouts, self._shares, carver, ranks_keep=not self._house.spans_hosts
        )

    def reduction(self, wire: Wire) -> Reduction:
        return CentralOfHosts(self.arena, wire, self._k, self._alpha, self._momentum)

    def start(
        self, engine: Sequential, clocks: Clocks, exchange: Exchange | None, stack: ExitStack
    ) -> Together:
        return Synchronous(
            self.arena,
            engine,
            clocks,
            self._house.local_rank,
            self._k,
            self._alpha,
            self._momentum,
            self._period,
            first_learner=self._first_learner,
            exchange=exchange,
            barrier=lambda: self._world.gather(None),
        )


class _AdaptivePlan:
    """What learners at their mean need."""

    def __init__(
        self,
        averaging: Adaptive,
        optimizer: Optimizer,
        layouts: tuple[list[Layout], list[Layout]],
        world: World,
        house: World,
        shares: Sequence[range],
        route: Route,
    ) -> None:
        self._k = shares[-1].stop
        self._layouts, self._world, self._house = layouts, world, house
        self._shares = _rows_of(house, shares)
        self._first_learner = shares[house.first_local].start
        learning = [p for group in optimizer.param_groups for p in group["params"]]
        self._pieces = Pieces(
            [p for p in learning if p.requires_grad],
            self._k,
            narrow=house.spans_hosts and not route.compression.is_exact,
        )
        self._terms = Terms(
            gain=Gain(averaging.gain, NoiseMeter(self._pieces.count, self._k, self._pieces.every)),
            lead=momentum_of(optimizer) if averaging.lead is None else averaging.lead,
            lag=averaging.lag_of(self._k),
        )

    def lay_out(self, carver: Carver) -> None:
        self.arena = Arena(*self._layouts, self._shares, carver, ranks_keep=False, copies=1)
        self._letters = Letters(
            self.arena, self._pieces.width, carver, spans_hosts=self._house.spans_hosts
        )

    def reduction(self, wire: Wire) -> Reduction:
        self._reduction = MeanOfHosts(self._letters, wire, self._k)
        return self._reduction

    def start(
        self, engine: Sequential, clocks: Clocks, exchange: Exchange | None, stack: ExitStack
    ) -> Together:
        gather = BetweenHosts if self._house.spans_hosts else WithinHost
        average = Centered(
            self._letters,
            engine,
            clocks,
            self._house.local_rank,
            gather(self._letters, clocks.wait),
            self._pieces,
            self._terms,
            first_learner=self._first_learner,
            exchange=exchange,
            barrier=lambda: self._world.gather(None),
        )
        if exchange and not self._terms.lag:
            self._reduction.centers = average.centers
        return average


class _PeriodicPlan:
    """What learners that meet once a period need."""

    def __init__(
        self,
        averaging: Periods,
        optimizer: Optimizer,
        layouts: tuple[list[Layout], list[Layout]],
        world: World,
        house: World,
        shares: Sequence[range],
        route: Route,
    ) -> None:
        self._k, self._averaging, self._optimizer = shares[-1].stop, averaging, optimizer
        self._layouts, self._world, self._house = layouts, world, house
        self._shares = _rows_of(house, shares)
        self._first_learner = shares[house.first_local].start

    def lay_out(self, carver: Carver) -> None:
        self.arena = Arena(
            *self._layouts, self._shares, carver, ranks_keep=False, copies=1, papers=1
        )
        words = 2  # weight and learning rate
        spans_hosts = self._house.spans_hosts
        self._papers = Papers(self.arena, carver, words, (1, 0), spans_hosts=spans_hosts)

    def reduction(self, wire: Wire) -> Reduction:
        rows = [block.rows[0, 0] for block in self.arena.parameters]
        self._outer = Outer(self._averaging, rows)
        return MeetingOfHosts(self._papers, wire, self._k, self._outer, centers=rows)

    def start(
        self, engine: Sequential, clocks: Clocks, exchange: Exchange | None, stack: ExitStack
    ) -> Together:
        rank = self._house.local_rank
        mine = self._shares[rank]
        meeting: Meeting
        if self._house.spans_hosts:
            outer = self._outer if exchange else None
            meeting = MeetsOthers(self._papers, clocks)
        else:
            blocks, regions = self.arena.parameters, regions_of(self.arena, rank)
            outer = Outer(
                self._averaging,
                [b.rows[0, mine.start, r] for b, r in zip(blocks, regions, strict=True)],
            )
            meeting = MeetsHere(self._papers, clocks, rank, outer)
        return Periodic(
            self._papers,
            engine,
            self._optimizer,
            meeting,
            mine,
            self._first_learner,
            self._averaging,
            outer,
            spans_hosts=self._house.spans_hosts,
            barrier=lambda: self._world.gather(None),
        )


class _UnorderedPlan:
    """What learners that don't wait for each other need."""

    def __init__(
        self,
        averaging: Unordered,
        optimizer: Optimizer,
        layouts: tuple[list[Layout], list[Layout]],
        world: World,
        house: World,
        shares: Sequence[range],
        route: Route,
    ) -> None:
        _check_one_host(averaging.name, house)
        self._averaging, self._layouts, self._world, self._house = averaging, layouts, world, house
        self._shares, k = shares, shares[-1].stop
        self._alpha = 1 / k if averaging.alpha is None else averaging.alpha

    def lay_out(self, carver: Carver) -> None:
        shares_row, k = self._averaging.shares_row, self._shares[-1].stop
        self.arena = Arena(
            *self._layouts,
            self._shares,
            carver,
            ranks_keep=False,
            copies=1,
            papers=0,
            places=[0] * k if shares_row else None,
        )
        self._store = Store(self.arena, carver, is_row=shares_row)

    def reduction(self, wire: Wire) -> Reduction:
        raise AssertionError("there is one host")

    def start(
        self, engine: Sequential, clocks: Clocks, exchange: Exchange | None, stack: ExitStack
    ) -> Together:
        rank = self._house.local_rank
        if rank == 0:
            self._store.fill([block.rows[0, 0] for block in self.arena.parameters])
        lock = stack.enter_context(
            closing(Lock(self._world))
        )  # no rank goes on before it is filled
        return Asynchronous(
            self.arena,
            engine,
            self._shares[rank],
            self._store,
            lock,
            clocks,
            self._averaging,
            self._alpha,
            barrier=lambda: self._world.gather(None),
        )


def _check_one_host(name: str, house: World) -> None:
    if house.spans_hosts:
        raise InputError(
            f"{name} works within one host and on CPUs, where ranks share memory: "
            "run it on one, or choose sma, adaptive, allreduce, local_sgd or diloco"
        )


class _QueuedPlan:
    """What learners that are one model, moved by gradients of before, need."""

    def __init__(
        self,
        averaging: Queued,
        optimizer: Optimizer,
        layouts: tuple[list[Layout], list[Layout]],
        world: World,
        house: World,
        shares: Sequence[range],
        route: Route,
    ) -> None:
        _check_one_host("pipelined", house)
        self._house = house
        self._reduced = _ReducedPlan(
            Reduced(None, 1), optimizer, layouts, world, house, shares, route
        )
        self._lag = averaging.lag

    def lay_out(self, carver: Carver) -> None:
        self._reduced.lay_out(carver)
        self.arena = self._reduced.arena
        self._sheets = Sheets(self._reduced.papers, self._lag, carver)

    def reduction(self, wire: Wire) -> Reduction:
        raise AssertionError("there is one host")

    def start(
        self, engine: Sequential, clocks: Clocks, exchange: Exchange | None, stack: ExitStack
    ) -> Together:
        if self._house.local_rank == 0:
            self._sheets.fill(self._reduced.papers)
        self._reduced.wait_for_all()
        return self._reduced.begin(
            engine,
            lambda papers, rank: Pipeline(papers, self._sheets, clocks, rank),
            lag=self._lag,
        )


class _ReducedPlan:
    """What learners that are one model need."""

    def __init__(
        self,
        averaging: Reduced,
        optimizer: Optimizer,
        layouts: tuple[list[Layout], list[Layout]],
        world: World,
        house: World,
        shares: Sequence[range],
        route: Route,
    ) -> None:
        self._k, self._averaging, self._optimizer = shares[-1].stop, averaging, optimizer
        self._layouts, self._world, self._house = layouts, world, house
        self._shares = _rows_of(house, shares)
        self._first_learner = shares[house.first_local].start
        learning = [p for group in optimizer.param_groups for p in group["params"]]
        self._learning = [p for p in learning if p.requires_grad]
        batches = self._k * averaging.accumulate
        far = house.spans_hosts and not route.compression.is_exact
        self._pieces = Pieces(self._learning, batches, narrow=far)
        self._gain: Gain | None = None
        if averaging.gain is not None and batches > 1:
            self._gain = Gain(averaging.gain, NoiseMeter(self._pieces.count, batches))

    def lay_out(self, carver: Carver) -> None:
        places = [rank for rank, share in enumerate(self._shares) for _ in share]
        self.arena = Arena(
            *self._layouts,
            self._shares,
            carver,
            ranks_keep=False,
            copies=1,
            papers=1,
            places=places,
        )
        width = self._pieces.width if self._gain else 0
        self.papers = Papers(
            self.arena,
            carver,
            number_of_words(self._learning, self._optimizer),
            (self._averaging.accumulate, width),
            spans_hosts=self._house.spans_hosts,
        )

    def reduction(self, wire: Wire) -> Reduction:
        return MeetingOfHosts(self.papers, wire, self._k, None)

    def start(
        self, engine: Sequential, clocks: Clocks, exchange: Exchange | None, stack: ExitStack
    ) -> Together:
        def meet(papers: Papers, rank: int) -> Meeting:
            if self._house.spans_hosts:
                return MeetsOthers(papers, clocks)
            return MeetsHere(papers, clocks, rank, None)

        return self.begin(engine, meet)

    def wait_for_all(self) -> None:
        """Return when all ranks have called it."""
        self._world.gather(None)

    def begin(
        self, engine: Sequential, meet: Callable[[Papers, int], Meeting], lag: int = 0
    ) -> Together:
        """Let the learners meet in this way."""
        rank = self._house.local_rank
        return AllReduce(
            self.papers,
            engine,
            self._optimizer,
            meet(self.papers, rank),
            self._shares[rank],
            first_learner=self._first_learner,
            lag=lag,
            accumulate=self._averaging.accumulate,
            gain=self._gain,
            pieces=self._pieces,
            barrier=self.wait_for_all,
            share_state=lambda: _broadcast_state(self._optimizer, self._world),
        )


def momentum_of(optimizer: Optimizer) -> float:
    """How much of a move the next one repeats: momentum, or Adam's first beta; 0 if it has none."""
    group = optimizer.param_groups[0]
    found = group.get("momentum") or (group.get("betas") or (0.0,))[0]
    return float(found)


def _hook(optimizer: Optimizer, average: Together, watch: Watch) -> Iterator[RemovableHandle]:
    @torch.no_grad()
    def before(_: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        closure = named.get("closure") or (arguments[1] if len(arguments) > 1 else None)
        if closure is not None and not average.takes_closures:
            raise InputError(
                "this averaging needs the gradient before the optimizer's step: call backward() "
                "and then step() without a closure"
            )
        # a closure computes gradients inside the step, which must be those at the unpulled weights
        watch.mark(AVERAGING)
        average.before_move(pulls_first=closure is None and _is_blind(optimizer))
        watch.mark(COMPUTE)

    @torch.no_grad()
    def after(*_: Any) -> None:
        watch.mark(AVERAGING)
        average.after_move()
        watch.step_ended()

    yield optimizer.register_step_pre_hook(before)
    yield optimizer.register_step_post_hook(after)


class _Process:
    """What is the process's and not a fleet's; fleets that overlap in time hold it together."""

    def __init__(self) -> None:
        self._fleets, self._stack = 0, ExitStack()

    @contextmanager
    def held(self, world: World, device: torch.device) -> Iterator[None]:
        """Be a rank, and compute on one thread, until the last fleet is closed."""
        self._fleets += 1
        try:
            if join(world):
                self._stack.callback(dist.destroy_process_group)
            if device.type == "cpu":  # with more threads, a sum's bits depend on how many they are
                self._stack.callback(torch.set_num_threads, torch.get_num_threads())
                torch.set_num_threads(1)
            yield
        finally:
            self._fleets -= 1
            if not self._fleets:
                self._stack.close()


process = _Process()


def _rows_of(house: World, shares: Sequence[range]) -> list[range]:
    """The rows that each rank of this house runs, counted from the house's first."""
    local = shares[house.first_local :][: house.local_size]
    return [range(share.start - local[0].start, share.stop - local[0].start) for share in local]


@contextmanager
def _in_order(
    world: World,
    house: World,
    clock_block: Tensor,
    device: torch.device,
    route: Route,
    reduction: Callable[[dist.ProcessGroup], Reduction],
) -> Iterator[tuple[Clocks, Exchange | None]]:
    """Give this rank its clock, and between hosts the thread that reduces."""
    central_clock = house.local_size
    pids = world.gather(os.getpid())[house.first_local :][: house.local_size]
    with ExitStack() as stack:
        peers = {
            rank: stack.enter_context(closing(Peer(f"rank {house.first_local + rank}", pid)))
            for rank, pid in enumerate(pids)
        }
        if not house.spans_hosts:
            others = {rank: peer for rank, peer in peers.items() if rank != house.local_rank}
            yield Clocks(clock_block, house.local_rank, others), None
            return
        firsts = sorted(set(world.gather(house.first_local)))
        route.topology.check(len(firsts))
        group = dist.new_group(firsts, backend="gloo" if device.type == "cpu" else "nccl")
        watched = {central_clock: peers[0]}
        if house.local_rank != 0:
            yield Clocks(clock_block, house.local_rank, watched), None
            return
        exchange = Exchange(reduction(group), clock_block, central_clock, peers)
        clocks = Clocks(clock_block, 0, watched, exchange.check)
        stack.callback(lambda: exchange.finish(clocks.now()))
        yield clocks, exchange


def _allocate(
    house: World, row_bytes: int, device: torch.device, name: str
) -> tuple[Tensor, Tensor]:
    """Memory for the clocks and for the rows; both are shared, but for the rows of a GPU."""
    clock_bytes = Clocks.BYTES_EACH * (house.local_size + 1)
    if device.type == "cpu":
        block = map_block(house, clock_bytes + row_bytes, name)
        return block[:clock_bytes], block[clock_bytes:]
    rows = torch.zeros(row_bytes, dtype=torch.uint8, device=device)
    return map_block(house, clock_bytes, name), rows


def _broadcast_state(optimizer: Optimizer, world: World) -> None:
    """Let every learner begin with the optimizer state of rank 0, if it has one already."""
    state = world.broadcast(optimizer.state_dict() if optimizer.state else None)
    if state is None:
        optimizer.state.clear()
    elif world.rank:
        optimizer.load_state_dict(state)


def _random_states(learners: range, world: World) -> list[Tensor]:
    """Where the random stream of each learner begins: the first goes on with rank 0's."""
    seed, state = world.broadcast((torch.initial_seed(), torch.get_rng_state()))
    seeds = hash64(np.arange(learners.start, learners.stop), seed, _RANDOM).tolist()
    return [
        torch.Generator().manual_seed(own % 2**63).get_state() if learner else state
        for learner, own in zip(learners, seeds, strict=True)
    ]


def _is_blind(optimizer: Optimizer) -> bool:
    decays = any(group.get("weight_decay", 0) for group in optimizer.param_groups)
    return type(optimizer) in _BLIND_OPTIMIZERS and not decays


def _check_optimizer(
    optimizer: Optimizer, model: nn.Module, adopted: Sequence[tuple[str, nn.Parameter]]
) -> None:
    """Refuse an optimizer that holds more or less than what learns in the model."""
    held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    known = {id(p) for p in model.parameters()}
    for number, parameter in held.items():
        if number not in known:
            raise InputError(
                f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that the model "
                "doesn't have: make it from this model's parameters()"
            )
    for name, parameter in adopted:
        if id(parameter) not in held:
            raise InputError(
                f"parameter {name!r} learns, but the optimizer doesn't hold it: "
                "give it to the optimizer, or freeze it with requires_grad_(False)"
            )


def _only_device(tensors: Sequence[tuple[str, Tensor]]) -> torch.device:
    first_name, first = tensors[0]
    for name, tensor in tensors:
        if tensor.device != first.device:
            raise InputError(
                f"{name!r} is on {tensor.device} and {first_name!r} on {first.device}: "
                "a learner lives on one device"
            )
    return first.device
