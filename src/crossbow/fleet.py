"""Fleet: the user's model and optimizer, put to sea.

    fleet = Fleet(model, optimizer, sync=sma())
    for inputs, targets in fleet.batches(train_set, batch_size=16, epochs=10):
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()

Every rank runs the same program and owns one learner or several. `optimizer.step()` makes the local
move of the learner aboard, averages, and takes the rank's next learner aboard; so any loop that
steps an optimizer is a fleet's loop. Without a launcher and with one learner this is plain PyTorch.
"""

import atexit
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from crossbow.averaging.adaptive import Centered
from crossbow.averaging.adoption import Together, adopt, process
from crossbow.averaging.allreduce import AllReduce
from crossbow.averaging.alone import Alone
from crossbow.averaging.asynchronous import Asynchronous
from crossbow.averaging.family import Averaging, Pulled, adaptive
from crossbow.averaging.gain import Gain
from crossbow.averaging.guard import Guard
from crossbow.averaging.partition import Curve
from crossbow.averaging.partition import partition as partition_of
from crossbow.averaging.resizing import at_rest, reassign
from crossbow.averaging.synchronous import Synchronous
from crossbow.averaging.weights import MovingAverage
from crossbow.checkpoint.model import save_model
from crossbow.checkpoint.tree import copied, difference
from crossbow.comm.compress import parse as parse_compression
from crossbow.comm.topology import parse as parse_topology
from crossbow.comm.wire import Route, Traffic
from crossbow.comm.world import World
from crossbow.config import PARTITIONS
from crossbow.data.augment import Prepare
from crossbow.data.loader import Batch, Stretch, read
from crossbow.engines.optimizers import load_options, named_own, options_of, own_by_name
from crossbow.engines.sequential import Sequential
from crossbow.errors import InputError, check_choice
from crossbow.pace import Pace, Stopwatch, Times, sized_rounds
from crossbow.stats.divergence import Divergence, divergence, square_distance, unit_sum
from crossbow.stats.watch import COMPUTE, Watch

Round = tuple[int, Stretch | None]
"""Samples read by all learners before a round, and what one learner reads in it."""

Reader = tuple[Iterator[Round], "Ahead"]
"""One learner's rounds, and its batches in those in which it reads."""


class Captured(NamedTuple):
    """What it takes to go on from between two rounds: trees of tensors and plain values."""

    shared: dict[str, Any]
    learners: dict[int, dict[str, Any]]


class Fleet:
    """k learners over all ranks, of which this process runs some, and their central model."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        sync: Averaging | None = None,
        *,
        learners: int | None = None,
        speeds: Sequence[float] | None = None,
        ema: float | None = None,
        compress: str = "none",
        topology: str = "flat",
        name: str = "fleet",
    ) -> None:
        """Adopt the model and its optimizer; every rank does so, with the same arguments.

        Args:
            model: of any kind; its trainable parameters become views of a learner's row.
            optimizer: of torch.optim, holding just these parameters.
            sync: how learners are averaged; adaptive() if left out.
            learners: of all ranks together; one a rank if left out.
            speeds: of the ranks, relative to each other: faster ones run more of the learners.
            ema: half-life, in samples, of a moving average of the central model.
            compress: what passes between hosts: none, bf16, fp16, onebit, topk:share=0.01 or
                powersgd:rank=2.
            topology: by which ways: flat, ring, hierarchical:group=G, torus:rows=R or auto.
            name: what the shared memory is called while the ranks find each other.
        """
        self.model, self.optimizer = model, optimizer
        self.world = World.from_environment()
        self.learners = self.world.size if learners is None else learners
        self.samples = 0
        """How many samples all learners together had read when this round began."""
        self.reading: Stretch = (0, 0)
        """The part of the stream that the learner aboard was given last."""
        self.averaging = adaptive() if sync is None else sync
        self.name, self._speeds = name, speeds
        self._route = Route(parse_compression(compress), parse_topology(topology))
        self.traffic = Traffic()
        """What this host has sent to others; counted on its first rank."""
        self.watch = Watch()
        """Sees where the time of a step goes."""
        self._stopwatch = Stopwatch()
        self._ema = None if ema is None else _moving_average(ema)
        self._readers: Sequence[Reader] = ()
        self._adopt(self.learners)
        self._is_closed = False

    def _adopt(self, learners: int) -> None:
        """Put so many learners where the model is."""
        self.learners = learners
        self.shares = shares = share(learners, self.world.size, self._speeds)
        """The learners of each rank."""
        self.mine = shares[self.world.rank]
        model, optimizer, averaging = self.model, self.optimizer, self.averaging
        self._average: Alone | Together
        if learners == 1 and not averaging.changes_one:
            self._average, self._leave = Alone(model, optimizer), ExitStack()
        else:
            self._average, self._leave = adopt(
                model,
                optimizer,
                averaging,
                self.world,
                shares,
                self.name,
                self._route,
                self.traffic,
                self.watch,
            )
        if self._ema:
            self._average.follow = self._look
        atexit.register(self._leave.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def batches(
        self,
        data: Any,
        batch_size: int,
        epochs: float = 1,
        *,
        seed: int = 0,
        start: int = 0,
        prepare: Prepare | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        partition: str = "equal",
    ) -> Iterator[Batch]:
        """Yield the batches of this rank's learners in turn; all ranks together read every sample.

        Args:
            data: a map-style data set, the same on every rank.
            batch_size: of one learner.
            epochs: how often to read the data.
            seed: of the order and of augmentation.
            start: where in the stream to begin, in samples.
            prepare: see `crossbow.data.augment`.
            collate: makes a batch from a list of samples.
            num_workers: processes that read ahead.
            partition: "equal" batches, or such as follow the "speed" of their ranks.
        """
        check_reading(data, batch_size, epochs, start)
        self._check_partition(partition)
        stop = start + max(1, round(epochs * len(data)))
        reading: dict[str, Any] = {
            "seed": seed,
            "prepare": prepare,
            "collate": collate,
            "num_workers": num_workers,
        }
        if partition == "speed":
            return self._at_pace(data, start, stop, batch_size, reading)

        def readers(position: int) -> list[Reader]:
            plans = [(position, stop, batch_size, self.learners, j) for j in self.mine]
            return [_reader(partial(rounds, *plan), data, reading) for plan in plans]

        return self._in_turn(readers, start, stop, batch_size)

    def _at_pace(
        self, data: Any, start: int, stop: int, batch_size: int, reading: Mapping[str, Any]
    ) -> Iterator[Batch]:
        """Yield batches whose sizes stay for a span of rounds, and then follow what it took."""
        position, shares = start, list[range]()
        while position < stop:
            if shares != self.shares:
                shares = self.shares
                pace = Pace(shares, batch_size, self.world)
            sizes, first = pace.sizes, position
            position = min(stop, first + pace.rounds * sum(sizes))
            plans = [partial(sized_rounds, first, position, sizes, j) for j in self.mine]
            span = [_reader(plan, data, reading) for plan in plans]
            for batch in self._in_turn(partial(_given, span), first, position, 0):
                yield batch
                if shares != self.shares and self.is_between_rounds:
                    position = min(stop, self.samples + sum(sizes))
                    break
            else:
                pace.follow(self.times)
                self._stopwatch.forget_round()

    def _check_partition(self, partition: str) -> None:
        check_choice("partition", partition, PARTITIONS)
        if partition == "speed" and not isinstance(self._average, Alone | AllReduce):
            raise InputError(
                "batches that follow speed need sync=allreduce(): "
                "take it, or leave partition='equal'"
            )

    def batches_ahead(self) -> list[Batch]:
        """The batches of this rank's other learners in a round whose first one was just given."""
        found = [batches.peek() for _, batches in self._readers[1:]]
        return [batch for batch in found if batch is not None]

    def _in_turn(
        self, make_readers: Callable[[int], list[Reader]], start: int, stop: int, batch_size: int
    ) -> Iterator[Batch]:
        """Yield a batch for the learner aboard, until there are no more rounds."""
        readers, shares = make_readers(start), self.shares
        while True:
            self._readers = readers
            if shares != self.shares:  # resized after a round, whose end is where to go on
                readers = make_readers(min(self.samples + shares[-1].stop * batch_size, stop))
                self._readers, shares = readers, self.shares
            schedule, batches = readers[self._average.turn]
            now = next(schedule, None)
            if now is None:
                break
            self.samples, stretch = now
            if self._average.turn == 0:
                self.watch.round_begins()
                self._average.round_begins()
                self._stopwatch.round_begins(self.watch.waited_s)
            if stretch:
                self.watch.step_begins(self.mine[self._average.turn])
                self.reading, batch = stretch, next(batches)
                self._average.weight = stretch[1] - stretch[0]
                self._stopwatch.reads(stretch[1] - stretch[0])
                self.watch.mark(COMPUTE)
                yield batch
            else:
                self._average.rest()
        for schedule, batches in readers:  # what is left if the loop didn't step after each batch
            for self.samples, stretch in schedule:
                if stretch:
                    self.reading = stretch
                    yield next(batches)
        self._average.settle()
        self.samples = stop

    @contextmanager
    def central(self) -> Iterator[nn.Module]:
        """Let the model hold the central model; other ranks may have to wait meanwhile."""
        if self._is_closed:
            raise InputError("the fleet is closed: ask for the central model before close()")
        self._stopwatch.forget_round()
        with self._average.central_aboard():
            yield self.model

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Let the model hold the moving average of the central model; all ranks call this together.

        Before the first step that is the central model itself. Buffers are the central model's.
        """
        if self._ema is None:
            raise InputError("this fleet keeps no moving average: give ema=SAMPLES to the Fleet")
        if self._is_closed:
            raise InputError("the fleet is closed: ask for the average before close()")
        self._stopwatch.forget_round()
        rows = self._average.central_rows()
        for row, mean in zip(rows, self._ema.rows, strict=False):  # which the first rank alone has
            row.copy_(mean)
        self.world.share(rows)
        with self._average.central_aboard(rows):
            yield self.model

    def divergence(self) -> Divergence | None:
        """How far learners stand apart; None for one. All ranks call this between two rounds."""
        pairs = self._average.learners()
        if self.learners == 1 or not pairs:  # or if they are one and the same
            return None
        mean = self._average.central_rows()
        moves = [[now - before for now, before in zip(*places, strict=True)] for places in pairs]
        units = unit_sum(moves)
        self.world.add_up(units)
        own = square_distance([now for now, _ in pairs], mean)
        return divergence(math.fsum(self.world.gather(own)), units, mean, self.learners)

    @property
    def gain(self) -> Gain | None:
        """The gain on the learners' common move, where the averaging has one."""
        if isinstance(self._average, AllReduce):
            return self._average.gain
        return self._average.terms.gain if isinstance(self._average, Centered) else None

    def take_staleness(self) -> float | None:
        """How stale this rank's steps were since this was last asked, where they may be stale."""
        if not isinstance(self._average, Asynchronous):
            return None
        found = self._average.take_staleness()
        return sum(found) / len(found) if found else None

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the central model, with the keys of the model itself."""
        with self.central():
            return {key: value.detach().clone() for key, value in self.model.state_dict().items()}

    @property
    def guard(self) -> Guard:
        """Which of this rank's learners went bad, and were put back at the central model."""
        return self._average.guard

    def capture(self) -> "Captured":
        """Copy the state of this rank's learners, and on the first rank what all have in common.

        Between two rounds; nothing that is computed later changes by it.
        """
        if not self.is_between_rounds:
            raise InputError("a fleet can be captured between rounds only: see is_between_rounds")
        states = zip(self._average.learner_states(), self._average.owns(), strict=True)
        learners = {
            learner: copied({**state, **own_by_name(own, self.model)})
            for learner, (state, own) in zip(self.mine, states, strict=True)
        }
        if self.world.rank:
            return Captured({}, learners)
        shared = {
            "learners": self.learners,
            "spans_hosts": self._spans_hosts,
            "averaging": self._average.state_dict(),
            "options": options_of(self.optimizer),
            "ema": self._ema.state_dict() if self._ema else None,
        }
        return Captured(copied(shared), learners)

    def restore(self, captured: Captured, samples: int) -> list[str]:
        """Go on where a fleet was captured, before the first step; all ranks together.

        With as many learners, on one host or several as before, that is bit for bit. Else all begin
        where the model is, which has to be the central model of that fleet, and the answer says
        what begins anew.

        Args:
            captured: what was in common, and this rank's learners, those that were there.
            samples: that had been read.
        """
        shared = captured.shared
        load_options(self.optimizer, shared["options"])
        before, now = (
            (shared["learners"], shared["spans_hosts"]),
            (self.learners, self._spans_hosts),
        )
        if is_same := before == now:
            own = [captured.learners[learner] for learner in self.mine]
            self.world.agree(lambda: self._check_fit(captured))
            with torch.no_grad():
                self._average.load_state_dict(shared["averaging"], own)
        seed = self.world.broadcast(torch.initial_seed())
        self._average.take_owns(
            [
                named_own(captured.learners[learner], self.model, self.optimizer)
                if learner in captured.learners
                else at_rest(seed, learner, samples)
                for learner in self.mine
            ]
        )
        if self._ema and is_same:
            self._ema.load_state_dict(shared["ema"])
        if is_same:
            is_exact = self._route.compression.is_exact or not self._spans_hosts
            return [] if is_exact else ["residuals of compression"]
        anew = ["the central model's velocity", "the gain", "random streams of new learners"]
        return [*anew, "the moving average"] if self._ema else anew

    @property
    def _spans_hosts(self) -> bool:
        """Whether an exchange reduces; to the averaging, each GPU is a host."""
        on_cpu = next(self.model.parameters()).device.type == "cpu"
        return self.world.spans_hosts or (self.world.size > 1 and not on_cpu)

    def _check_fit(self, captured: Captured) -> None:
        """Refuse what was captured of a fleet that isn't like this one."""
        mine = self.capture()
        pairs = [(captured.learners[n], state) for n, state in mine.learners.items()]
        if self.world.rank == 0:
            pairs.append((captured.shared, mine.shared))
        for saved, fresh in pairs:
            if found := difference(saved, fresh, but=("optimizer", "options", "ema", "unsaid")):
                raise InputError(f"what was saved doesn't fit this model and fleet: {found}")

    def save(self, path: str | Path) -> None:
        """Write the central model to a safetensors file; of all ranks, the first one does."""
        if self.world.rank == 0:
            with self.central():
                save_model(self.model.state_dict(), Path(path))

    @property
    def is_between_rounds(self) -> bool:
        """Whether all learners of this rank have made the same number of steps."""
        return self._average.turn == 0

    def resize(self, learners: int, speeds: Sequence[float] | None = None) -> None:
        """Go on with so many learners; all ranks call this between the same two rounds.

        With speeds, ranks share them by these from now on.

        All begin where the central model stands, which loses its velocity. Old ones keep the state
        of their optimizers and their random streams, new ones begin with an optimizer at rest.
        Batches go on where they were: rounds are of the new number from now on.
        """
        if self._is_closed:
            raise InputError("the fleet is closed: change the number of learners before close()")
        if not self.is_between_rounds:
            raise InputError("learners come and go between rounds only: see is_between_rounds")
        speeds = self._speeds if speeds is None else speeds
        shares = share(learners, self.world.size, speeds)
        if isinstance(self.averaging, Pulled):
            self.averaging.pull(learners)  # which may be unstable
        self._speeds = speeds
        if shares == self.shares:
            return
        self._average.settle()
        before, first = self._average, self.mine.start
        owns = {first + index: own for index, own in enumerate(before.owns())}
        owns = reassign(owns, self.optimizer, shares, self.world)
        seed = self.world.broadcast(torch.initial_seed())
        mean = self._weights_of(self._ema.rows) if self._ema and self._ema.rows else None
        with self.central():
            central = {key: value.clone() for key, value in _tensors(self.model)}
        device = next(self.model.parameters()).device
        with process.held(self.world, device):  # or the ranks would part, and meet again
            self.close()
            for key, tensor in _tensors(self.model):
                tensor.data.copy_(central[key])
            self.optimizer.state = defaultdict(dict)
            self._adopt(learners)
            self._is_closed = False
        self._average.take_owns(
            [owns.get(number) or at_rest(seed, number, self.samples) for number in self.mine]
        )
        if isinstance(before, Centered) and isinstance(self._average, Centered):
            self._average.go_on(before.terms.gain.meter)
        if self._ema and mean:
            self._ema.rows = self._average.pack(mean)

    def _weights_of(self, rows: Sequence[Tensor]) -> dict[str, Tensor]:
        """A copy of what the rows of an averaging hold, by name."""
        with self._average.central_aboard(rows):
            return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def rest(self) -> None:
        """In the place of the optimizer's step: the learner aboard sits out a move of its own."""
        self._average.rest()

    @property
    def crew(self) -> Sequential | None:
        """The learners of this rank, if there are several whose gradients may be taken at once."""
        average = self._average
        if isinstance(average, Synchronous | Centered) and len(self.mine) > 1:
            return average.engine
        return None

    def restart(self) -> None:
        """Put all learners at the central model, at rest; all ranks call this at the same step.

        The central model loses its velocity and the optimizers their state. It is what the paper
        does when the learning rate drops: what was gathered at the old rate is forgotten.
        """
        self._average.restart()

    @property
    def times(self) -> Times:
        """What this rank's rounds took so far, without those that were interrupted."""
        return self._stopwatch.times

    def _look(self, rows: Callable[[], list[Tensor]]) -> None:
        """Let the moving average see the central model, if it is time to."""
        if self._ema and self.world.rank == 0 and self._ema.is_due(self.samples):
            self._ema.take(rows(), self.samples)

    def close(self) -> None:
        """Leave the other ranks; the model keeps the weights of the learner aboard."""
        self._is_closed = True
        atexit.unregister(self._leave.close)
        self._leave.close()


def rounds(start: int, stop: int, batch_size: int, learners: int, learner: int) -> Iterator[Round]:
    """What one of k learners reads of the stream from start to stop, a round at a time.

    A round is k batches. What is left at the very end is shared out evenly, and a learner for whom
    nothing is left reads None.

    >>> list(rounds(0, 10, batch_size=2, learners=3, learner=0))
    [(0, (0, 2)), (6, (6, 8))]
    >>> list(rounds(0, 7, batch_size=2, learners=3, learner=2))
    [(0, (4, 6)), (6, None)]
    """
    whole = learners * batch_size
    for before in range(start, stop, whole):
        size, longer = divmod(min(whole, stop - before), learners)
        begin = before + learner * size + min(learner, longer)
        end = begin + size + (learner < longer)
        yield before, ((begin, end) if begin < end else None)


def _given(readers: list[Reader], position: int) -> list[Reader]:
    return readers


class Ahead:
    """An iterator whose next item may be looked at before it is taken."""

    def __init__(self, items: Iterator[Batch]) -> None:
        self._items, self._seen = items, list[Batch]()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        return self._seen.pop() if self._seen else next(self._items)

    def peek(self) -> Batch | None:
        """The next item, if there is one."""
        if not self._seen:
            self._seen = list(islice(self._items, 1))
        return self._seen[0] if self._seen else None


def _reader(plan: Callable[[], Iterator[Round]], data: Any, reading: Mapping[str, Any]) -> Reader:
    """A learner's rounds, and the batches of those in which it reads."""
    wanted = (stretch for _, stretch in plan() if stretch)
    return plan(), Ahead(read(data, wanted, **reading))


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _moving_average(half_life: float) -> MovingAverage:
    if not (math.isfinite(half_life) and half_life > 0):
        raise InputError(f"ema {half_life} is not possible: give a half-life in samples, above 0")
    return MovingAverage(half_life)


def check_reading(data: Any, batch_size: int, epochs: float, start: int) -> None:
    """Refuse what can't be read."""
    if not hasattr(data, "__len__") or not len(data):
        kind = type(data).__name__
        raise InputError(f"this {kind} can't be read: give a map-style data set that isn't empty")
    if not isinstance(batch_size, int) or batch_size < 1:
        raise InputError(f"batch size {batch_size} is not possible: give 1 or more")
    if not (math.isfinite(epochs) and epochs > 0):
        raise InputError(f"{epochs} epochs are not possible: give a finite number above 0")
    if start < 0:
        raise InputError(f"start {start} is not possible: give 0 or more samples")


def share(learners: int, ranks: int, speeds: Sequence[float] | None = None) -> list[range]:
    """Return which learners each rank runs: in order, the first ranks one more if need be.

    With speeds given, in the numbers with which the slowest rank ends a round soonest.

    >>> share(5, ranks=2)
    [range(0, 3), range(3, 5)]
    >>> share(5, ranks=2, speeds=[1, 0.25])
    [range(0, 4), range(4, 5)]
    """
    if learners < ranks:
        raise InputError(
            f"{learners} learners can't be shared by {ranks} ranks: "
            f"give {ranks} learners or more, or fewer ranks"
        )
    paces = [1.0] * ranks if speeds is None else list(speeds)
    if len(paces) != ranks or not all(math.isfinite(s) and s > 0 for s in paces):
        raise InputError(
            f"speeds {paces} are not possible: give {ranks} numbers above 0, one a rank"
        )
    counts = partition_of(learners, [Curve(0.0, 1 / pace) for pace in paces], [1] * ranks)
    return [range(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]
