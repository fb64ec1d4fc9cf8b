"""hvd: Horovod's face, so that a PyTorch script written for Horovod runs with one line changed.

    import crossbow.hvd as hvd                # in the place of: import horovod.torch as hvd

Underneath is torch.distributed, and `torchrun` in the place of `horovodrun`. Names, arguments and
what they mean are Horovod's (https://horovod.readthedocs.io); docs/guide/horovod.md says what is
missing. State is the process's, as Horovod's is: `init` begins and `shutdown` ends it.
"""

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from crossbow.comm.world import World, join
from crossbow.errors import InputError

BUCKET_BYTES = 2**20
"""Gradients of about so many bytes are reduced in one go, while the next are computed."""


class Op(enum.Enum):
    """What becomes of all ranks' values."""

    AVERAGE = "Average"
    SUM = "Sum"
    MIN = "Min"
    MAX = "Max"
    ADASUM = "Adasum"


Average, Sum, Min, Max, Adasum = Op
_REDUCTIONS = {Op.MIN: dist.ReduceOp.MIN, Op.MAX: dist.ReduceOp.MAX}


class Compression(enum.Enum):
    """In which type values travel: their own, or a narrower one."""

    none = None
    fp16 = torch.float16
    bf16 = torch.bfloat16


class _Process:
    """Which rank this is, between `init` and `shutdown`."""

    world: World | None = None
    joined = False


def init() -> None:
    """Be a rank, as the launcher said; alone, a world of one."""
    if _Process.world is None:
        world = World.from_environment()
        _Process.joined = join(world)
        _Process.world = world


def shutdown() -> None:
    """Be none any more."""
    if _Process.joined:
        dist.destroy_process_group()
    _Process.world, _Process.joined = None, False


def is_initialized() -> bool:
    """Whether `init` was called."""
    return _Process.world is not None


def _world() -> World:
    if _Process.world is None:
        raise InputError("hvd is not initialized: call hvd.init() first")
    return _Process.world


def rank() -> int:
    """This rank's number among all."""
    return _world().rank


def size() -> int:
    """How many ranks there are."""
    return _world().size


def local_rank() -> int:
    """This rank's number among those of its host."""
    return _world().local_rank


def local_size() -> int:
    """How many ranks this host has."""
    return _world().local_size


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compression = Compression.none,
    op: Op | None = None,
) -> Tensor:
    """Return all ranks' values as one, on every rank.

    Args:
        tensor: of the same shape on each.
        average: an older way to say op: Average or Sum.
        name: for people.
        compression: in which type values travel.
        op: Average if left out.
    """
    return allreduce_(tensor.detach().clone(), average, name, compression, op)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compression = Compression.none,
    op: Op | None = None,
) -> Tensor:
    """Reduce like `allreduce`, in place."""
    with torch.no_grad():
        _Reduction(tensor, _chosen(op, average), compression).finish()
    return tensor


def _chosen(op: Op | None, average: bool | None = None) -> Op:
    """Return the operation that was asked for; refuse what isn't offered."""
    if op is not None and average is not None:
        raise InputError("average and op say the same: give one of them")
    chosen = op or (Average if average in (None, True) else Sum)
    if chosen is Adasum:
        raise InputError("op Adasum is not offered: give Average, Sum, Min or Max")
    return chosen


class _Reduction:
    """One that is under way."""

    def __init__(self, tensor: Tensor, op: Op, compression: Compression) -> None:
        world, self._tensor, self._op = _world(), tensor, op
        self._size, self._work = world.size, None
        kind = compression.value if tensor.is_floating_point() else None
        scaled = tensor / world.size if op is Average and kind else tensor  # or it may overflow
        self._sent = scaled.to(kind or tensor.dtype).contiguous()
        self._is_scaled = scaled is not tensor
        if world.size > 1:
            reduction = _REDUCTIONS.get(op, dist.ReduceOp.SUM)
            self._work = dist.all_reduce(self._sent, reduction, async_op=True)

    def finish(self) -> None:
        """Return when the tensor holds the result."""
        if self._work is not None:
            self._work.wait()
        if self._sent is not self._tensor:
            self._tensor.copy_(self._sent)
        if self._op is Average and not self._is_scaled:
            if self._tensor.is_floating_point():
                self._tensor.div_(self._size)
            else:
                self._tensor.div_(self._size, rounding_mode="trunc")


def allgather(tensor: Tensor, name: str | None = None) -> Tensor:
    """Return all ranks' tensors, one after another; their first dimensions may differ."""
    world, own = _world(), tensor.detach()
    if not own.dim():
        own = own[None]
    counts = world.gather(own.shape[0])
    if world.size == 1:
        return own.clone()
    widest = own.new_zeros((max(counts), *own.shape[1:]))
    widest[: own.shape[0]] = own
    found = [torch.empty_like(widest) for _ in counts]
    dist.all_gather([_bytes(f) for f in found], _bytes(widest))
    return torch.cat([f[:count] for f, count in zip(found, counts, strict=True)])


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """Return one rank's values on every rank."""
    return broadcast_(tensor.detach().clone(), root_rank, name)


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """Take one rank's values, in place."""
    _check_root(root_rank)
    if size() > 1 and tensor.numel():
        values = tensor.detach().contiguous()
        dist.broadcast(_bytes(values), src=root_rank)
        tensor.data.copy_(values)
    return tensor


def broadcast_object(value: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Return one rank's object on every rank."""
    _check_root(root_rank)
    values = [value]
    if size() > 1:
        dist.broadcast_object_list(values, src=root_rank)
    return values[0]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Tensor]], root_rank: int = 0
) -> None:
    """Take one rank's tensors, given as a state_dict or as named parameters, in place."""
    named = params.items() if isinstance(params, Mapping) else params
    for _, value in named:
        if isinstance(value, Tensor):
            broadcast_(value, root_rank)


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int = 0) -> None:
    """Take one rank's optimizer state and settings."""
    state = broadcast_object(optimizer.state_dict(), root_rank)
    if rank() != root_rank:
        optimizer.load_state_dict(state)


def _check_root(root_rank: int) -> None:
    if root_rank not in range(size()):
        raise InputError(f"root_rank {root_rank} is not possible: give 0 to {size() - 1}")


def _bytes(tensor: Tensor) -> Tensor:
    """The tensor's memory: backends lack some types, but none lacks bytes."""
    return tensor.view(-1).view(torch.uint8)


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
    compression: Compression = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op = Average,
) -> Optimizer:
    """Reduce gradients over ranks before each `optimizer.step()`; return the optimizer.

    It is the optimizer that was given, which from now on also has Horovod's `synchronize()` and
    `skip_synchronize()`.

    Args:
        optimizer: of torch.optim.
        named_parameters: of the model; must hold the optimizer's, each once.
        compression: in which type gradients travel.
        backward_passes_per_step: how many add up, on each rank, before they are reduced.
        op: Average or Sum.
    """
    if backward_passes_per_step < 1:
        raise InputError(
            f"backward_passes_per_step {backward_passes_per_step} is not possible: give 1 or more"
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    _check_names(parameters, named_parameters)
    learning = [p for p in parameters if p.requires_grad]
    gradients = _Gradients(learning, compression, backward_passes_per_step, _chosen(op))
    for number, parameter in enumerate(learning):
        parameter.register_post_accumulate_grad_hook(
            lambda _, number=number: gradients.passed(number)
        )
    optimizer.register_step_pre_hook(gradients.before_step)
    added: Any = optimizer
    added.synchronize = gradients.synchronize
    added.skip_synchronize = gradients.skip_synchronize
    return optimizer


def _check_names(
    parameters: Sequence[nn.Parameter], named: Iterable[tuple[str, nn.Parameter]] | None
) -> None:
    if named is None:
        return
    pairs = list(named)
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"named_parameters holds {', '.join(twice)} twice: give each name once")
    known = {id(parameter) for _, parameter in pairs}
    if any(id(parameter) not in known for parameter in parameters):
        raise InputError(
            "named_parameters lacks a parameter of the optimizer: give all of the model's"
        )


class _Gradients:
    """The gradients of a model's parameters, reduced in buckets, each as soon as it is complete.

    Backward reaches the last layers first, so buckets are filled from the last parameter on. They
    are reduced in this order on every rank, whatever the order in which they are complete.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        compression: Compression,
        passes: int,
        op: Op,
    ) -> None:
        self._parameters, self._compression = parameters, compression
        self._passes, self._op = passes, op
        self._seen = [0] * len(parameters)
        self._buckets = _buckets(parameters)
        self._under_way: list[tuple[_Reduction, Tensor]] = []
        self._is_synchronized = self._skips = False

    def passed(self, number: int) -> None:
        """Note that backward has added to a gradient; start to reduce what is complete."""
        if self._is_synchronized or self._seen[number] == self._passes:
            raise InputError(
                f"a gradient was computed more than {self._passes} times before optimizer.step(): "
                "set backward_passes_per_step"
            )
        self._seen[number] += 1
        while len(self._under_way) < len(self._buckets):
            bucket = self._buckets[len(self._under_way)]
            if any(self._seen[other] < self._passes for other in bucket):
                break
            self._start(bucket)

    def synchronize(self) -> None:
        """Return when all gradients are reduced; what has none has zeros then."""
        for bucket in self._buckets[len(self._under_way) :]:
            self._start(bucket)
        for (reduction, row), bucket in zip(self._under_way, self._buckets, strict=True):
            reduction.finish()
            gradients = [self._gradient(number) for number in bucket]
            pieces = row.split_with_sizes([gradient.numel() for gradient in gradients])
            for gradient, piece in zip(gradients, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))
        self._under_way.clear()
        self._seen = [0] * len(self._seen)
        self._is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `optimizer.step()` take gradients as they are: after a `synchronize()`."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def before_step(self, _: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Reduce, unless that was done."""
        if named.get("closure") or arguments[1:]:
            raise InputError(
                "gradients are reduced before optimizer.step(): call backward() and then step() "
                "without a closure"
            )
        if not self._skips:
            if self._is_synchronized:
                raise InputError(
                    "optimizer.step() after synchronize() would reduce twice: "
                    "step within optimizer.skip_synchronize()"
                )
            self.synchronize()
        self._is_synchronized = False

    @torch.no_grad()
    def _start(self, bucket: Sequence[int]) -> None:
        row = torch.cat([self._gradient(number).reshape(-1) for number in bucket])
        self._under_way.append((_Reduction(row, self._op, self._compression), row))

    def _gradient(self, number: int) -> Tensor:
        parameter = self._parameters[number]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad.is_sparse:
            raise InputError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse: "
                "make its layer with sparse=False"
            )
        return parameter.grad


def _buckets(parameters: Sequence[nn.Parameter]) -> list[list[int]]:
    """Parameters of one type and about one size, by number, from the last one on."""
    buckets: list[list[int]] = []
    filled = BUCKET_BYTES
    for number in reversed(range(len(parameters))):
        parameter = parameters[number]
        fits = buckets and parameters[buckets[-1][0]].dtype == parameter.dtype
        if filled >= BUCKET_BYTES or not fits:
            buckets.append([])
            filled = 0
        buckets[-1].append(number)
        filled += parameter.nbytes
    return buckets
