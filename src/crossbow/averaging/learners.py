"""Learners: what averagings of one copy a row have in common.

A learner moves where it stands. What the rank has to know of the others it learned when all met, or
reads where it lies.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from crossbow.arena import Arena
from crossbow.averaging.guard import Guard
from crossbow.engines.sequential import Own, Sequential


class Learners(ABC):
    """The learners of a rank."""

    takes_closures = True
    weight = 1.0
    """How much the batch of the learner aboard counts, where it matters."""

    def __init__(
        self, arena: Arena, engine: Sequential, mine: Sequence[int], first_learner: int
    ) -> None:
        """Begin at step 0.

        Args:
            arena: of this host.
            engine: runs this rank's learners.
            mine: the rows of these.
            first_learner: of this host, among those of all hosts.
        """
        self.guard = Guard([learner + first_learner for learner in mine])
        self.arena, self.engine, self.mine = arena, engine, mine
        self.step, self.turn = 0, 0
        self.follow: Callable[[Callable[[], list[Tensor]]], None] | None = None
        """Told once a round of the central model's rows, for those who want them."""
        self.rows = [[b.rows[0, arena.places[j]] for b in arena.parameters] for j in mine]
        """Of each learner, one a block."""

    @abstractmethod
    def before_move(self, *, pulls_first: bool) -> None:
        """The optimizer of the learner aboard is about to move."""

    @abstractmethod
    def after_move(self) -> None:
        """It has moved."""

    @abstractmethod
    def rest(self) -> None:
        """Sit out a batch."""

    @abstractmethod
    def settle(self) -> None:
        """Average what was learned since the last time; all ranks together, between rounds."""

    @abstractmethod
    def central_rows(self) -> list[Tensor]:
        """A copy of the central model, a row for each block."""

    @abstractmethod
    def central_buffers(self) -> list[Tensor]:
        """A copy of its buffers, a row for each block."""

    @abstractmethod
    def learners(self) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Where each learner of this rank stands, and stood before; nothing, if at one place."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What the learners share, between two rounds."""

    @abstractmethod
    def learner_states(self) -> list[dict[str, Any]]:
        """What each learner of this rank has."""

    @abstractmethod
    def load_state_dict(
        self, shared: Mapping[str, Any], learners: Sequence[Mapping[str, Any]]
    ) -> None:
        """Go on from there, before the first step; all ranks together."""

    @abstractmethod
    def restart(self) -> None:
        """Put all learners at the central model, at rest; all ranks together, between rounds."""

    @contextmanager
    def central_aboard(self, rows: Sequence[Tensor] | None = None) -> Iterator[None]:
        """Let the model hold a copy of the central model.

        Args:
            rows: weights to hold in the place of the central model's, a row for each block.
        """
        if self.engine.is_holding:  # save() inside central(), say
            yield
            return
        parameters = [
            view
            for block, row in zip(self.arena.parameters, rows or self.central_rows(), strict=True)
            for view in block.layout.views(row)
        ]
        buffers = [
            view
            for block, row in zip(self.arena.buffers, self.central_buffers(), strict=True)
            for view in block.layout.views(row)
        ]
        with self.engine.holding(parameters, buffers):
            yield

    def round_begins(self) -> None:  # noqa: B027
        """Followers hear of the central model when a round's first learner moves."""

    def owns(self) -> list[Own]:
        """What each learner of this rank has to itself."""
        return self.engine.owns()

    def take_owns(self, owns: Sequence[Own]) -> None:
        """Give each learner of this rank something to itself."""
        self.engine.take_owns(owns)

    def pack(self, weights: Mapping[str, Tensor]) -> list[Tensor]:
        """Rows of these weights."""
        return [block.pack(weights) for block in self.arena.parameters]

    def live(self, own: int) -> list[Tensor]:
        """The buffers of a learner of this rank, a row for each block."""
        found = []
        for block in self.arena.buffers:
            assert block.live is not None
            found.append(block.live[self.mine[own]])
        return found

    def is_well(self) -> bool:
        """Whether the learner aboard holds numbers, after its move."""
        return self.guard.passes(self.turn, [*self.rows[self.turn], *self.live(self.turn)])

    def tell_follower(self) -> None:
        """Let the follower see the central model, once a round."""
        if self.turn == 0 and self.follow:
            self.follow(self.central_rows)

    def put_buffers_down(self, parity: int) -> None:
        """Copy the buffers of the learner aboard into its letter."""
        learner = self.mine[self.turn]
        for block, live in zip(self.arena.buffers, self.live(self.turn), strict=True):
            block.letters[learner].right[parity].copy_(live)
