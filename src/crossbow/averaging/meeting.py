"""Meeting: each learner puts a row down, and all leave with one that is made of their mean.

What a learner puts down, a gradient or where it stands, is its letter, beside a few words about it.
Each rank keeps a region of the row. When all letters are there it makes the mean of its region in
learner order, so that ranks don't show in the bits, has the center make of it what it will, and
writes that over its region of every rank's first letter. In meeting i,

    clock 2i + 1    what this rank's learners put down is in their letters
    clock 2i + 2    this rank's region of the answer is in the first letters of all ranks

and a rank waits for all clocks to show either. Between two meetings nobody but its rank touches a
letter: so each is needed once. A line that two cores use is written by them in turn, as in
docs/design/clocks.md.

Between hosts the first rank's exchange (averaging/hosts.py) sums the letters of its host, and
all-reduces and answers them; the regions are empty.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from crossbow.arena import Arena
from crossbow.averaging.gathering import mean_of
from crossbow.averaging.hosts import moves_of
from crossbow.comm.shared import Carver, Clocks
from crossbow.comm.wire import Wire
from crossbow.stats.noise import sums_of

Make = Callable[[int, Tensor, Sequence[float]], None]
"""Turns the mean of a block's region, in place, into what all leave with; given all words."""


class Papers:
    """What learners of this host put down; their rows are in the arena's letters."""

    def __init__(
        self,
        arena: Arena,
        carver: Carver,
        num_words: int,
        piece: tuple[int, int],
        *,
        spans_hosts: bool,
    ) -> None:
        """Lay them out; all ranks do so alike.

        Args:
            arena: whose letters hold whole rows, once.
            carver: cuts the memory.
            num_words: numbers that a learner says, the first of which is its weight.
            piece: pieces of gradients that a learner puts down, and their width.
            spans_hosts: whether answers come from several hosts.
        """
        self.arena = arena
        k, (count, width) = arena.shares[-1].stop, piece
        self.words = carver.cut((k, num_words), torch.float64)
        self.pieces = carver.cut((count, k, width), torch.float32)
        self.heard = self.words[0, :0]
        """Between hosts only, as are the next two: what is made of the words of all."""
        self.totals = self.pieces[0, 0, :0]
        """The pieces' sum, and the sum of their squares."""
        self.buffer_means: list[Tensor] = []
        """(2, n) of each block."""
        if spans_hosts:
            self.heard = carver.cut((num_words,), torch.float64)
            self.totals = carver.cut((width + 1,), torch.float32)
            self.buffer_means = [
                carver.cut((2, block.layout.width), block.layout.dtype) for block in arena.buffers
            ]

    def letter(self, number: int, learner: int) -> Tensor:
        """The letter of a learner, of a block of parameters."""
        return self.arena.parameters[number].letters[learner].right[0]


class Meeting(Protocol):
    """Where all ranks come together."""

    met: int
    """How often they have."""

    def gather(self) -> list[float]:
        """Return when all letters are there: the sum of weights, and the largest of other words."""

    def noise(self) -> tuple[float, float]:
        """After gathering: sum of the squares and square of the sum of all pieces."""

    def kept(self, learner: int) -> list[Tensor]:
        """What is kept of what a learner put down, until later meetings."""

    def go_on(self, met: int) -> None:
        """Go on after so many meetings, with what was kept of them."""

    def close(self) -> None:
        """Return when all letters are answered."""

    def buffers(self) -> list[Tensor]:
        """The mean of each block of buffers at the last meeting, as new tensors."""


class WithinHost:
    """The ranks of one host keep a region each."""

    def __init__(self, papers: Papers, clocks: Clocks, rank: int, make: Make | None) -> None:
        """Begin before the first meeting.

        Args:
            papers: of this host.
            clocks: of its ranks.
            rank: of this host's.
            make: what the center makes of the mean.
        """
        self._papers, self._clocks, self._make = papers, clocks, make
        self.met = 0
        shares = papers.arena.shares
        self._firsts = [share.start for share in shares]
        regions = regions_of(papers.arena, rank)
        self._rows = [
            [papers.letter(number, learner)[region] for learner in range(shares[-1].stop)]
            for number, region in enumerate(regions)
        ]
        self._shares: list[float] = []
        self._heard: list[float] = []

    def gather(self) -> list[float]:
        """Return when all letters are there: the sum of weights, and the largest of other words."""
        self._clocks.advance(2 * self.met + 1)
        self._clocks.wait(2 * self.met + 1)
        weights, *others = zip(*self._papers.words.tolist(), strict=True)
        total = sum(weights)
        self._shares = [weight / (total or 1.0) for weight in weights]
        self._heard = [total, *map(max, others)]
        return self._heard

    def kept(self, learner: int) -> list[Tensor]:
        """Nothing is."""
        return []

    def go_on(self, met: int) -> None:
        """Each meeting is a new one."""

    def noise(self) -> tuple[float, float]:
        """After gathering: sum of the squares and square of the sum of all pieces."""
        return sums_of(self._papers.pieces.flatten(0, 1))

    def close(self) -> None:
        """Return when all letters are answered."""
        for number, rows in enumerate(self._rows):
            mean = weighted_mean(rows, self._shares)
            if self._make:
                self._make(number, mean, self._heard)
            for first in self._firsts[1:]:
                rows[first].copy_(mean)
        self._clocks.advance(2 * self.met + 2)
        self._clocks.wait(2 * self.met + 2)
        self.met += 1

    def buffers(self) -> list[Tensor]:
        """The mean of each block of buffers at the last meeting, as new tensors."""
        found = []
        for block in self._papers.arena.buffers:
            rows = [letter.right[self.met % 2] for letter in block.letters]
            found.append(mean_of(rows, torch.empty_like(rows[0])))
        return found


class BetweenHosts:
    """The exchange of each host's first rank keeps everything."""

    def __init__(self, papers: Papers, clocks: Clocks) -> None:
        """Begin before the first meeting, with the clock of the exchange."""
        self._papers, self._clocks = papers, clocks
        self.met = 0

    def gather(self) -> list[float]:
        """Return when all letters are there: the sum of weights, and the largest of other words."""
        self.met += 1
        self._clocks.advance(self.met)
        self._clocks.wait(self.met + 1)  # its step 0 came before the first letters
        heard: list[float] = self._papers.heard.tolist()
        return heard

    def kept(self, learner: int) -> list[Tensor]:
        """Nothing is."""
        return []

    def go_on(self, met: int) -> None:
        """Each meeting is a new one."""

    def noise(self) -> tuple[float, float]:
        """After gathering: sum of the squares and square of the sum of all pieces."""
        totals = self._papers.totals
        return float(totals[-1]), float(totals[:-1].dot(totals[:-1]))

    def close(self) -> None:
        """The letters are answered already."""

    def buffers(self) -> list[Tensor]:
        """The mean of each block of buffers at the last meeting, as new tensors."""
        return [mean[self.met % 2].clone() for mean in self._papers.buffer_means]


class MeetingOfHosts:
    """What the exchange does: weighted means over the letters of all hosts.

    With compression, what travels is a gradient, or how far learners moved from where all began.
    """

    def __init__(
        self,
        papers: Papers,
        wire: Wire,
        num_learners: int,
        make: Make | None,
        *,
        centers: Sequence[Tensor] | None = None,
    ) -> None:
        """Begin.

        Args:
            papers: of this host.
            wire: to the other hosts.
            num_learners: of all hosts.
            make: what the center makes of the mean.
            centers: where all learners begin, if letters say where they stand.
        """
        self._papers, self._wire, self._make = papers, wire, make
        if not wire.is_exact:
            blocks = papers.arena.parameters
            self._moves = [moves_of(b.layout, wire, b.rows[0, 0]) for b in blocks]
            self._centers = [row.clone() for row in centers] if centers else None
        self._num_learners = num_learners
        for block, means in zip(papers.arena.buffers, papers.buffer_means, strict=True):
            means.copy_(block.letters[0].right)
        self._has_met = False

    def __call__(self, parity: int) -> None:
        """Answer the letters; the first time there are none."""
        if not self._has_met:
            self._has_met = True
            return
        papers = self._papers
        weights = papers.words[:, 0]
        torch.sum(weights, 0, keepdim=True, out=papers.heard[:1])
        torch.amax(papers.words[:, 1:], 0, out=papers.heard[1:])
        self._wire.add_up(papers.heard[:1])
        dist.all_reduce(papers.heard[1:], dist.ReduceOp.MAX, group=self._wire.group)
        heard = papers.heard.tolist()
        shares = (weights / (heard[0] or 1.0)).tolist()
        firsts = [share.start for share in papers.arena.shares]
        for number in range(len(papers.arena.parameters)):
            rows = [papers.letter(number, j) for j in range(len(shares))]
            mean = weighted_mean(rows, shares)
            if self._wire.is_exact:
                self._wire.add_up(mean)
            else:
                self._add_moves(number, mean, sum(shares))
            if self._make:
                self._make(number, mean, heard)
            if not self._wire.is_exact and self._centers:
                self._centers[number].copy_(mean)
            for first in firsts[1:]:
                rows[first].copy_(mean)
        self._add_up_pieces()
        self._average_buffers(parity)

    def restart(self, parity: int) -> None:
        """Nothing is kept from step to step."""

    def state_dict(self, parity: int) -> dict[str, Any]:
        """Nothing is."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], parity: int) -> None:
        """There is nothing to load."""

    def _add_moves(self, number: int, part: Tensor, share: float) -> None:
        """Turn this host's part of the mean, in place, into the mean of all."""
        center = self._centers[number] if self._centers else None
        if center is not None:
            part.sub_(center, alpha=share)
        self._moves[number].add_up(self._papers.arena.parameters[number].layout.views(part))
        if center is not None:
            part.add_(center)

    def _add_up_pieces(self) -> None:
        pieces, totals = self._papers.pieces.flatten(0, 1), self._papers.totals
        torch.sum(pieces, 0, out=totals[:-1])
        totals[-1] = pieces.reshape(-1).dot(pieces.reshape(-1))
        self._wire.add_up(totals)

    def _average_buffers(self, parity: int) -> None:
        for block, means in zip(self._papers.arena.buffers, self._papers.buffer_means, strict=True):
            mean = means[parity]
            first, *others = (letter.right[parity] for letter in block.letters)
            mean.copy_(first)
            if mean.is_floating_point():
                for row in others:
                    mean.add_(row)
                self._wire.add_up(mean)
                mean.div_(self._num_learners)


def regions_of(arena: Arena, rank: int) -> list[slice]:
    """What a rank keeps of each block of parameters: the slices of its learners."""
    mine, found = arena.shares[rank], []
    for block in arena.parameters:
        slices = block.layout.slices(arena.shares[-1].stop)
        found.append(slice(slices[mine.start].start, slices[mine.stop - 1].stop))
    return found


def weighted_mean(rows: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Make the first row the sum of all, by their shares; what has none isn't looked at.

    >>> weighted_mean([torch.tensor([1.0]), torch.tensor([5.0])], [0.25, 0.75])
    tensor([4.])
    """
    first = rows[0]
    if shares[0]:
        first.mul_(shares[0])
    else:
        first.zero_()
    for row, share in zip(rows[1:], shares[1:], strict=True):
        if share:
            first.add_(row, alpha=share)
    return first
