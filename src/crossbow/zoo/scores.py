"""Scores of what a model writes by itself: BLEU, and exact matches.

A loss tells how well a model goes on with what others wrote. These let it write whole sentences, by
its `generate`, and compare them with references. Ranks share the writing.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor, nn

from crossbow.comm.world import World
from crossbow.data.augment import Prepare
from crossbow.data.loader import scan
from crossbow.data.sentences import Sentences, said
from crossbow.errors import InputError

if TYPE_CHECKING:
    from sacrebleu.metrics.bleu import BLEUScore

BATCH = 64

Score = Callable[[Sequence[str], Sequence[Sequence[str]]], dict[str, float]]
"""(what was written, what would be right for each) -> numbers by name"""


class Writer(Protocol):
    """A model that writes sentences."""

    def generate(self, inputs: Tensor) -> Tensor:
        """Write for each input: tokens (B, T)."""


def final_metrics(
    data: Sentences, prepare: Prepare, score: Score
) -> Callable[[nn.Module, World], dict[str, float]]:
    """Make what a task reports at its end: the score of what the model writes on the test set."""

    def compute(model: nn.Module, world: World) -> dict[str, float]:
        return score(write(model, data, prepare, world), list(data.references.values()))

    return compute


def write(model: nn.Module, data: Sentences, prepare: Prepare, world: World) -> list[str]:
    """What the model writes for each test sample that has references, in their order."""
    device = next(model.parameters()).device
    mine: list[str] = []
    for inputs in _batches(data, prepare, list(data.references)[world.rank :: world.size]):
        written = cast(Writer, model).generate(inputs.to(device))
        mine += [data.decode(said(row)) for row in written.tolist()]
    everyone: list[list[str]] = world.gather(mine)
    whole = [""] * len(data.references)
    for rank, theirs in enumerate(everyone):
        whole[rank :: world.size] = theirs
    return whole


def _batches(data: Sentences, prepare: Prepare, samples: Sequence[int]) -> Iterator[Tensor]:
    """Test samples that need not be neighbors: of an image with five captions one is enough."""
    rows = (row for row, _ in scan(data.test, [(i, i + 1) for i in samples], prepare=prepare))
    while batch := list(islice(rows, BATCH)):
        yield torch.cat(batch)


def bleu(written: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """BLEU of the whole corpus, 0 to 100 (Papineni et al., 2002), as sacrebleu computes it.

    Post, A Call for Clarity in Reporting BLEU Scores, 2018.
    """
    most = max(map(len, references))
    # sacrebleu wants columns: the first reference of every sentence, then the second
    columns = [[r[i] if i < len(r) else None for r in references] for i in range(most)]
    return {"bleu": require_sacrebleu()(list(written), columns).score}


def exact_match(written: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Share of the sentences that are one of their references, word for word.

    >>> exact_match(["a red circle", "a cross"], [["a red circle"], ["a circle", "a red circle"]])
    {'exact_match': 0.5}
    """
    hits = (one in right for one, right in zip(written, references, strict=True))
    return {"exact_match": sum(hits) / len(references)}


def require_sacrebleu() -> "Callable[..., BLEUScore]":
    """Sacrebleu's score of a corpus, or how to get it."""
    try:
        from sacrebleu import corpus_bleu
    except ImportError:
        raise InputError("BLEU takes sacrebleu: pip install 'crossbow[translation]'") from None
    return corpus_bleu
