"""Gathering: the mean of all learners, and what their gradients add up to.

Each learner writes its row into its letter, and a piece of its gradient beside it; letters exist
twice, by the parity of the step. Within a host every rank reads all letters and adds them up in
learner order. Between hosts the thread of the first rank does so and all-reduces the sums
(averaging/hosts.py), and the ranks read what it wrote down.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from crossbow.arena import Arena, Block
from crossbow.averaging.hosts import moves_of
from crossbow.comm.shared import Carver
from crossbow.comm.wire import Wire
from crossbow.stats.noise import sums_of


class Letters:
    """What learners of this host say, and what is made of it between hosts."""

    def __init__(
        self, arena: Arena, piece_width: int, carver: Carver, *, spans_hosts: bool
    ) -> None:
        """Lay them out; all ranks do so alike.

        Args:
            arena: whose letters hold whole rows.
            piece_width: of gradients.
            carver: cuts the memory.
            spans_hosts: whether sums come from several hosts.
        """
        self.arena = arena
        k = arena.shares[-1].stop
        self.pieces = carver.cut((2, k, piece_width), torch.float32)
        self.looked = carver.cut((2,), torch.int64)
        """Whether there are pieces: what the first rank says to the thread that sums them."""
        self.means: list[Tensor] = []
        """(2, n) of each block: between hosts only, as are the totals."""
        self.totals = self.pieces[:, :0]
        """(2, width + 1): the gradients' sum, and the sum of their squares."""
        if spans_hosts:
            self.means = [
                carver.cut((2, block.layout.width), block.layout.dtype) for block in arena.blocks
            ]
            self.totals = carver.cut((2, piece_width + 1), torch.float32)

    def rows(self, block: Block, parity: int) -> list[Tensor]:
        """All learners' rows of a block, in learner order."""
        return [letter.right[parity] for letter in block.letters]


class WithinHost:
    """Each rank adds up for itself."""

    def __init__(self, letters: Letters, wait: Callable[[int], object]) -> None:
        """Begin; `wait` returns once all learners' letters of a step are there."""
        self._letters, self._wait = letters, wait
        self._means = [torch.empty_like(b.rows[0, 0]) for b in letters.arena.parameters]

    def means(self, step: int) -> list[Tensor]:
        """Of each block of parameters, when all have written theirs of this step."""
        self._wait(step)
        for block, mean in zip(self._letters.arena.parameters, self._means, strict=True):
            mean_of(self._letters.rows(block, step % 2), mean)
        return self._means

    def buffers(self, step: int) -> list[Tensor]:
        """Of each block of buffers, as new tensors."""
        found = []
        for block in self._letters.arena.buffers:
            rows = self._letters.rows(block, step % 2)
            found.append(mean_of(rows, torch.empty_like(rows[0])))
        return found

    def gradients(self, step: int) -> tuple[float, float]:
        """Sum of the squares and square of the sum of all learners' pieces."""
        return sums_of(self._letters.pieces[step % 2])


class BetweenHosts:
    """Each rank reads what its host's thread wrote down."""

    def __init__(self, letters: Letters, wait: Callable[[int], object]) -> None:
        """Begin; `wait` returns once the thread's clock shows a step."""
        self._letters, self._wait = letters, wait

    def means(self, step: int) -> list[Tensor]:
        """Of each block of parameters, when all have written theirs of this step."""
        self._wait(step + 1)
        parameters = self._letters.means[: len(self._letters.arena.parameters)]
        return [mean[step % 2] for mean in parameters]

    def buffers(self, step: int) -> list[Tensor]:
        """Of each block of buffers, as new tensors."""
        buffers = self._letters.means[len(self._letters.arena.parameters) :]
        return [mean[step % 2].clone() for mean in buffers]

    def gradients(self, step: int) -> tuple[float, float]:
        """Sum of the squares and square of the sum of all learners' pieces."""
        totals = self._letters.totals[step % 2]
        return float(totals[-1]), float(totals[:-1].dot(totals[:-1]))


Gathering = WithinHost | BetweenHosts


class MeanOfHosts:
    """What the thread of a host's first rank does in a step.

    With compression, what travels is how far learners moved from where all stood together.
    """

    def __init__(self, letters: Letters, wire: Wire, num_learners: int) -> None:
        """Begin where the learners are.

        Args:
            letters: of this host.
            wire: to the other hosts.
            num_learners: of all hosts.
        """
        self._letters, self._wire, self._num_learners = letters, wire, num_learners
        self.centers: list[Tensor] | None = None
        """Where learners began their step, if not at the mean of the step before."""
        if not wire.is_exact:
            blocks = letters.arena.parameters
            self._moves = [moves_of(b.layout, wire, b.rows[0, 0]) for b in blocks]
            for block, means in zip(blocks, letters.means, strict=False):
                means.copy_(block.letters[0].right)

    def __call__(self, parity: int) -> None:
        """Write down the means and the gradients' sums."""
        letters = self._letters
        for number, block in enumerate(letters.arena.blocks):
            mean = letters.means[number][parity]
            first, *others = letters.rows(block, parity)
            mean.copy_(first)
            if mean.is_floating_point():
                for row in others:
                    mean.add_(row)
                if block.is_pulled and not self._wire.is_exact:
                    self._add_moves(number, mean, parity)
                else:
                    self._wire.add_up(mean)
                    mean.div_(self._num_learners)
        if not letters.looked[parity]:
            return
        pieces, totals = letters.pieces[parity], letters.totals[parity]
        torch.sum(pieces, 0, out=totals[:-1])
        totals[-1] = pieces.reshape(-1).dot(pieces.reshape(-1))
        self._wire.add_up(totals)

    def _add_moves(self, number: int, total: Tensor, parity: int) -> None:
        """Turn the sum over this host, in place, into the mean of all."""
        center = self.centers[number] if self.centers else self._letters.means[number][1 - parity]
        block = self._letters.arena.parameters[number]
        total.sub_(center, alpha=len(block.letters))
        self._moves[number].add_up(block.layout.views(total))
        torch.add(center, total, alpha=1 / self._num_learners, out=total)

    def restart(self, parity: int) -> None:
        """Nothing is kept from step to step."""

    def state_dict(self, parity: int) -> dict[str, Any]:
        """The means: the ranks may read them again."""
        return {"means": [mean[parity] for mean in self._letters.means]}

    def load_state_dict(self, state: Mapping[str, Any], parity: int) -> None:
        """Write these means down."""
        for mean, saved in zip(self._letters.means, state["means"], strict=True):
            mean[parity].copy_(saved)

    def unsaid(self) -> list[Tensor]:
        """Moves that this host has yet to say, a row for each block."""
        return [] if self._wire.is_exact else [moves.unsaid() for moves in self._moves]

    def keep(self, unsaid: Sequence[Tensor]) -> None:
        """Say these later, too; without compression nothing is left to be said later."""
        if not self._wire.is_exact:
            for moves, row in zip(self._moves, unsaid, strict=False):
                moves.keep(row)


def mean_of(rows: list[Tensor], out: Tensor) -> Tensor:
    """Set out to the mean of rows, learner by learner; integers are the same for all.

    A running mean passes over memory once for each row after the first.
    """
    first, *others = rows
    if not others or not out.is_floating_point():
        return out.copy_(first)
    torch.lerp(first, others[0], 0.5, out=out)
    for number, row in enumerate(others[1:], start=3):
        out.lerp_(row, 1 / number)
    return out
