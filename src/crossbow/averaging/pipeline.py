"""Pipeline: a meeting whose answers come some steps later, when nobody waits for them any more.

Gradients of step t are put down in step t, and what moves the model in step t is the mean of those
of step t - lag: stale by the same number of steps on all ranks, so learners stay one model. It is
pipelined, stale-synchronous SGD (Li et al., Pipe-SGD, 2018, arXiv:1811.03619).

What a learner puts down is copied to one of 2 * lag sheets, in turn. Each rank adds up all
learners' sheets for itself, in learner order. In step t a rank waits for all clocks to show
t - lag + 1, so for all ranks to have ended step t - lag. Then the sheets of step t - lag are
written, and those that it is about to write on, of step t - 2 * lag, have been read by all: in
their step t - lag. So a rank stands only if another is `lag` whole steps behind.
"""

import torch
from torch import Tensor

from crossbow.averaging.gathering import mean_of
from crossbow.averaging.meeting import Papers, weighted_mean
from crossbow.comm.shared import Carver, Clocks


class Sheets:
    """Copies of what learners of a host put down, by step."""

    def __init__(self, papers: Papers, lag: int, carver: Carver) -> None:
        """Lay them out; all ranks do so alike.

        Args:
            papers: what is put down.
            lag: steps until it is read.
            carver: cuts the memory.
        """
        arena = papers.arena
        k, self.count, self.lag = arena.shares[-1].stop, 2 * lag, lag
        self.words = carver.cut((self.count, *papers.words.shape), torch.float64)
        self.rows, self.buffers = (
            [carver.cut((self.count, k, b.layout.width), b.layout.dtype) for b in blocks]
            for blocks in (arena.parameters, arena.buffers)
        )

    def fill(self, papers: Papers) -> None:
        """Let the buffers be those that the learners begin with."""
        for block, sheets in zip(papers.arena.buffers, self.buffers, strict=True):
            sheets.copy_(block.letters[0].right[0].expand_as(sheets))


class Pipeline:
    """The meetings of a rank."""

    def __init__(self, papers: Papers, sheets: Sheets, clocks: Clocks, rank: int) -> None:
        """Begin before the first meeting.

        Args:
            papers: what is put down.
            sheets: where it is kept.
            clocks: of the ranks of this host.
            rank: of this host's.
        """
        self._papers, self._sheets, self._clocks = papers, sheets, clocks
        self._mine = papers.arena.shares[rank]
        self._blocks = range(len(papers.arena.parameters))
        self.met = self._met_before = 0

    def kept(self, learner: int) -> list[Tensor]:
        """A learner's sheets."""
        sheets = [self._sheets.words, *self._sheets.rows, *self._sheets.buffers]
        return [sheet[:, learner] for sheet in sheets]

    def go_on(self, met: int) -> None:
        """Go on after so many meetings, whose sheets are there."""
        self._met_before = met

    def gather(self) -> list[float]:
        """Put down this step's, and wait for those of `lag` steps before: their words."""
        sheets, papers = self._sheets, self._papers
        self._clocks.wait(self.met - sheets.lag + 1)
        here = (self._met_before + self.met) % sheets.count
        for learner in self._mine:
            sheets.words[here, learner].copy_(papers.words[learner])
            for number in self._blocks:
                sheets.rows[number][here, learner].copy_(papers.letter(number, learner))
            for block, kept in zip(papers.arena.buffers, sheets.buffers, strict=True):
                kept[here, learner].copy_(block.letters[learner].right[(self.met + 1) % 2])
        if self._met_before + self.met < sheets.lag:
            return [0.0] * papers.words.shape[1]
        weights, *others = zip(*sheets.words[self._there].tolist(), strict=True)
        return [sum(weights), *map(max, others)]

    def noise(self) -> tuple[float, float]:
        """Nothing is known of it."""
        return torch.nan, torch.nan

    def close(self) -> None:
        """Answer this rank's first letter."""
        sheets, first = self._sheets, self._mine[0]
        if self._met_before + self.met >= sheets.lag:
            weights = sheets.words[self._there, :, 0].tolist()
            total = sum(weights)
            shares = [weight / total for weight in weights] if total else weights
            for number in self._blocks:
                answer = self._papers.letter(number, first)
                rows = [answer, *sheets.rows[number][self._there]]
                weighted_mean(rows, [0.0, *shares])
        self.met += 1
        self._clocks.advance(self.met)

    def buffers(self) -> list[Tensor]:
        """The mean of each block of buffers at the last meeting, as new tensors."""
        last = (self._met_before + self.met - 1) % self._sheets.count
        return [
            mean_of(list(sheets[last]), torch.empty_like(sheets[last, 0]))
            for sheets in self._sheets.buffers
        ]

    @property
    def _there(self) -> int:
        return (self._met_before + self.met - self._sheets.lag) % self._sheets.count
