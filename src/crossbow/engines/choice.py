"""Choice: which engine runs the learners of a rank, and why not another one."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from crossbow.engines.objective import AtOnce, Batch, Engine, Objective, fits
from crossbow.engines.sequential import InTurn, Sequential
from crossbow.engines.stacked import Stacked
from crossbow.engines.streams import Streams
from crossbow.engines.trial import why_not


def choose(
    name: str,
    objective: Objective,
    forward: Callable[[Tensor, Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    crew: Sequential | None,
    batches: Sequence[Batch],
    *,
    compiles: bool,
) -> tuple[Engine, str]:
    """Return the engine, and if it is not the one that was asked for, why.

    Args:
        name: of the engine that is asked for; "auto" is the sequential one, whose bits don't depend
            on how many learners share a rank.
        objective: the loss of a batch, plainly.
        forward: the same as a learner by itself computes it: compiled, say.
        optimizer: of the model.
        crew: the learners of this rank; None if they can't be looked at all at once.
        batches: of the first round.
        compiles: whether to compile.
    """
    in_turn = InTurn(forward, optimizer)
    if name in ("auto", "sequential"):
        return in_turn, ""
    if crew is None:
        return in_turn, "it needs several learners on a rank, kept together by sma or adaptive"
    if not fits(batches, len(crew)):
        return in_turn, "the batches of the first round are not all of one size"
    if name == "streams" and not batches[0][0].is_cuda:
        return in_turn, f"streams are CUDA's, and the model is on {batches[0][0].device}"
    engine: AtOnce = (
        Streams(objective, crew, in_turn)
        if name == "streams"
        else Stacked(objective, crew, in_turn, compiles=compiles)
    )
    reason = why_not(engine, in_turn, crew, batches)
    return (in_turn, reason) if reason else (engine, "")
