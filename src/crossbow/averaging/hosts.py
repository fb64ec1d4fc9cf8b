"""Hosts: what passes between hosts, in the background.

The first rank of each host runs a thread. As soon as all learners of its host hold their rows of
step t, it sums them, all-reduces the sum with the other hosts, and makes of it what the ranks wait
for. For SMA that is the central model of step t + 1, which learners want at the end of step t + 1;
for learners at their mean it is the mean at step t, which those with a lag of 1 want at the end of
step t: so a whole step hides what the links take.

What travels is a sum over learners, so a host weighs in by its learners. All hosts complete the
same steps, and so run the same reductions, the last one after the last step.

With compression (comm/compress.py), what travels is what this sum changed by, for a compressed
weight would be off by what the codec is. Then all hosts know the sum of what was said, which
follows the sum itself: what a message leaves out is kept by its host, and said later.
"""

import threading
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from crossbow.arena import Arena, Layout
from crossbow.averaging.family import advance, average
from crossbow.comm.shared import Clocks, Peer
from crossbow.comm.wire import Moves, Wire
from crossbow.comm.world import PeerError


class Reduction(Protocol):
    """What the thread does in a step."""

    def __call__(self, parity: int) -> None:
        """Make of the letters of this parity what the ranks wait for."""

    def restart(self, parity: int) -> None:
        """Forget what was gathered, while the thread waits for the next step."""

    def state_dict(self, parity: int) -> dict[str, Any]:
        """What it made of the letters of this parity, while the thread waits for the next step."""

    def load_state_dict(self, state: Mapping[str, Any], parity: int) -> None:
        """Put that in the place of what it made of the letters of this parity."""


class Exchange:
    """The thread of a host's first rank."""

    def __init__(
        self,
        reduce: Reduction,
        clock_block: Tensor,
        mine: int,
        ranks: Mapping[int, Peer],
    ) -> None:
        """Start it.

        Args:
            reduce: what it does in a step.
            clock_block: the clocks of this host.
            mine: the thread's own clock.
            ranks: the clocks of this host's ranks.
        """
        self.reduce = reduce
        self._clocks = Clocks(clock_block, mine, ranks, self.has_finished)
        self._last: int | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="crossbow-exchange", daemon=True)
        self._thread.start()

    def check(self, step: int) -> bool:
        """Raise what ended the thread before it could make this step; False otherwise."""
        if self._failure:
            raise PeerError(f"the exchange with other hosts failed: {self._failure}")
        return False

    def finish(self, last: int) -> None:
        """Return once the reduction after the last step is done."""
        self._last = last
        self._thread.join()

    def has_finished(self, step: int) -> bool:
        """Whether `step` lies after the last one."""
        return self._last is not None and step > self._last

    def _run(self) -> None:
        torch.set_num_threads(1)  # of this thread; the learners need the cores
        try:
            step = 0
            while not self.has_finished(step) and self._clocks.wait(step):
                self.reduce(step % 2)
                step += 1
                self._clocks.advance(step)
        except (RuntimeError, PeerError) as error:
            self._failure = error


class CentralOfHosts:
    """SMA's central model, kept by the threads of all hosts alike."""

    def __init__(
        self,
        arena: Arena,
        wire: Wire,
        num_learners: int,
        alpha: float,
        momentum: float,
    ) -> None:
        """Begin where the learners are.

        Args:
            arena: the rows of this host.
            wire: to the other hosts.
            num_learners: of all hosts.
            alpha: the pull.
            momentum: of the central model.
        """
        self._arena = arena
        self._num_learners, self._alpha, self._momentum = num_learners, alpha, momentum
        first = arena.shares[0].start
        self._sums = [torch.empty_like(block.rows[0, 0]) for block in arena.blocks]
        self._central = [block.rows[:, first].clone() for block in arena.blocks]  # (2, n) each
        self._over_hosts = [
            Tracked(wire, block.layout) if block.is_pulled and not wire.is_exact else wire
            for block in arena.blocks
        ]

    def restart(self, parity: int) -> None:
        """Take the central model's velocity."""
        for block, central in zip(self._arena.blocks, self._central, strict=True):
            if block.is_pulled:
                central[1 - parity].copy_(central[parity])

    def state_dict(self, parity: int) -> dict[str, Any]:
        """The central model that comes next."""
        return {"next": [central[1 - parity] for central in self._central]}

    def load_state_dict(self, state: Mapping[str, Any], parity: int) -> None:
        """Take the central model and the one that comes next, and answer with it."""
        models = zip(
            self._arena.blocks, self._central, state["central"], state["next"], strict=True
        )
        for block, central, now, following in models:
            central[parity].copy_(now)
            central[1 - parity].copy_(following)
            for letter in block.letters:
                letter.right[parity].copy_(following)
        for wire in self._over_hosts:
            if isinstance(wire, Tracked):
                wire.begin_anew()

    def __call__(self, parity: int) -> None:
        """Make the central model of the other parity."""
        k, alpha, momentum = self._num_learners, self._alpha, self._momentum
        for block, total, wire in zip(
            self._arena.blocks, self._sums, self._over_hosts, strict=True
        ):
            first, *others = (letter.right[parity] for letter in block.letters)
            total.copy_(first)
            if total.is_floating_point():
                for row in others:
                    total.add_(row)
                wire.add_up(total)
        for block, total, central in zip(
            self._arena.blocks, self._sums, self._central, strict=True
        ):
            if block.is_pulled:
                advance(central[1 - parity], central[parity], [total], k, alpha, momentum)
            else:
                average(central[1 - parity], [total], k)
            for letter in block.letters:
                letter.right[parity].copy_(central[1 - parity])


class Tracked:
    """Sums over hosts of a row of weights: the first time whole, and then as they move.

    All hosts hold the sum of what was said, in double precision: an error in it would stay.
    """

    def __init__(self, wire: Wire, layout: Layout) -> None:
        """Begin with nothing said."""
        self._wire, self._layout = wire, layout
        self._moves: Moves | None = None
        self._last = self._agreed = torch.empty(0)

    def begin_anew(self) -> None:
        """Say the next row whole: it is no move away from the last one."""
        self._moves = None

    def add_up(self, total: Tensor) -> None:
        """Set the row of this host, in place, to what is known of the sum of all hosts'."""
        if self._moves is None:
            self._moves = moves_of(self._layout, self._wire, total)
            self._last = total.clone()
            self._wire.add_up(total)
            self._agreed = total.double()
            return
        moves = total - self._last
        self._last.copy_(total)
        self._moves.add_up(self._layout.views(moves))
        total.copy_(self._agreed.add_(moves))


def moves_of(layout: Layout, wire: Wire, like: Tensor) -> Moves:
    """The way of the moves of a row's tensors."""
    return wire.channel([slot.shape for slot in layout.slots], like)
