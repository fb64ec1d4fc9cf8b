"""Asynchronous: learners that don't wait for each other, around a central model in shared memory.

asgd      w_j is a copy of z; its optimizer moves it by d_j; then, as one event,
              z <- z + d_j,  w_j <- z
          as a parameter server does whose clients send steps. In between z took tau steps of
          others: the staleness of d_j. With `aware` it is d_j / max(tau, 1) that counts (Zhang et
          al., 2016, arXiv:1511.05950).
aeasgd    every so many steps of its own learner j and z pull each other, as one event:
              e = alpha * (w_j - z),  w_j <- w_j + d_j - e,  z <- z + e
          with w_j as it was before its step (Zhang et al., 2015, arXiv:1412.6651).
hogwild   all learners stand in one row, and step in it at any time (Recht et al., 2011).

Events of asgd and aeasgd happen under a lock: they are one after another, and what happened can be
told, and repeated, as a sequence of learners. Steps of hogwild overlap, which is its idea.

asgd may have a bound s: no learner begins a round before all have ended the one s + 1 rounds before
(stale-synchronous; Ho et al., 2013). With s = 0 all see the same model, and none moves it before
all have seen it: synchronous SGD with the sum of the steps.

Steps are those of the learners' own optimizers, so each has its momentum to itself.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from crossbow.arena import Arena
from crossbow.averaging.family import Unordered
from crossbow.averaging.gathering import mean_of
from crossbow.averaging.learners import Learners
from crossbow.comm.lock import Lock
from crossbow.comm.shared import Carver, Clocks
from crossbow.engines.sequential import Sequential
from crossbow.errors import InputError


class Store:
    """The central model of a host, and how often each learner has moved it."""

    def __init__(self, arena: Arena, carver: Carver, *, is_row: bool) -> None:
        """Lay it out; all ranks do so alike.

        Args:
            arena: of this host.
            carver: cuts the memory.
            is_row: whether the central model is the row in which all stand.
        """
        blocks = arena.parameters
        self.events = carver.cut((arena.shares[-1].stop,), torch.int64)
        self.central = [
            block.rows[0, 0] if is_row else carver.cut((block.layout.width,), block.layout.dtype)
            for block in blocks
        ]

    def fill(self, rows: Sequence[Tensor]) -> None:
        """Begin where these rows are."""
        for central, row in zip(self.central, rows, strict=True):
            central.copy_(row)


class Asynchronous(Learners):
    """The learners of a rank."""

    def __init__(
        self,
        arena: Arena,
        engine: Sequential,
        mine: Sequence[int],
        store: Store,
        lock: Lock,
        clocks: Clocks,
        settings: Unordered,
        alpha: float,
        *,
        barrier: Callable[[], object],
    ) -> None:
        """Begin at step 0.

        Args:
            arena: of this host.
            engine: runs this rank's learners.
            mine: the rows of these.
            store: of this host.
            lock: of this host.
            clocks: of its ranks.
            settings: which of the methods, and how.
            alpha: the elastic pull.
            barrier: returns when all ranks have called it.
        """
        super().__init__(arena, engine, mine, 0)
        self._store, self._lock, self._clocks, self._barrier = store, lock, clocks, barrier
        self._settings, self._alpha = settings, alpha
        self._order: Iterator[int] | None = None
        self._events = [0] * len(mine)
        self._seen = [0] * len(mine)
        """How many events there were when the learner last saw the central model."""
        self._before = (
            [] if settings.shares_row else [[row.clone() for row in rows] for rows in self.rows]
        )
        self._staleness: list[int] = []
        clocks.advance(1)

    def repeat(self, events: Iterable[int]) -> None:
        """Let this rank's learners step in this order, by their places in it, to repeat a run."""
        self._order = iter(events)
        self._go_on()

    def before_move(self, *, pulls_first: bool) -> None:
        """Keep where the learner stands, if that will be asked for."""
        self.tell_follower()
        self.engine.check()
        if self._settings.is_elastic and self._is_due:
            self._look_back()
        if self._settings.shares_row:
            self._check_gradients()
        if self._bound == 0 and self.turn == 0:
            self._clocks.wait(2 * self.step + 1)  # all have seen the central model

    def after_move(self) -> None:
        """Let the learner and the central model meet; take the next learner aboard."""
        self.engine.reclaim_buffers()
        own = self.turn
        if not (self._settings.shares_row or self.is_well()):
            self._reseed()
        self.put_buffers_down(0)
        if self._settings.shares_row:
            self._count(own)
        elif not self._settings.is_elastic:
            with self._lock:
                self._push(own)
                if self._bound is None:
                    self._pull(own)
        elif self._is_due:
            with self._lock:
                self._stretch(own)
        self._events[own] += 1
        self._go_on()

    def rest(self) -> None:
        """Sit out a batch."""
        self._go_on()

    def settle(self) -> None:
        """Return when all learners have made their steps."""
        self._barrier()

    def central_rows(self) -> list[Tensor]:
        """A copy of the central model, a row for each block."""
        with self._lock:
            return [row.clone() for row in self._store.central]

    def central_buffers(self) -> list[Tensor]:
        """The mean of the learners' buffers as they are now, a row for each block."""
        found = []
        for block in self.arena.buffers:
            rows = [letter.right[0] for letter in block.letters]
            found.append(mean_of(rows, torch.empty_like(rows[0])))
        return found

    def learners(self) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Where each learner of this rank stands, and the central model; nothing, if it is that."""
        if self._settings.shares_row:
            return []
        central = self.central_rows()
        return [(rows, central) for rows in self.rows]

    def state_dict(self) -> dict[str, Any]:
        """The central model."""
        return {"central": self.central_rows()}

    def learner_states(self) -> list[dict[str, Any]]:
        """Where each learner stands and what it remembers; staleness is counted anew."""
        return [
            {
                "rows": self.rows[own],
                "before": self._before[own] if self._before else [],
                "buffers": self.live(own),
                "events": self._events[own],
            }
            for own in range(len(self.mine))
        ]

    def load_state_dict(
        self, shared: Mapping[str, Any], learners: Sequence[Mapping[str, Any]]
    ) -> None:
        """Go on from there, before the first step; all ranks together."""
        for own, (learner, state) in enumerate(zip(self.mine, learners, strict=True)):
            before = self._before[own] if self._before else []
            places = [*self._store.central, *self.rows[own], *before, *self.live(own)]
            values = [*shared["central"], *state["rows"], *state["before"], *state["buffers"]]
            for place, value in zip(places, values, strict=True):
                place.copy_(value)
            for block, value in zip(self.arena.buffers, state["buffers"], strict=True):
                block.letters[learner].right[0].copy_(value)
            self._events[own] = state["events"]
        self._barrier()

    def _check_gradients(self) -> None:
        """Let a learner whose gradient is no number make no move in the row in which all stand."""
        found = [p.grad for p in self.engine.parameters if p.grad is not None]
        if not self.guard.passes(self.turn, [*found, *self.live(self.turn)]):
            for parameter in self.engine.parameters:
                parameter.grad = None

    def _reseed(self) -> None:
        """Put the learner aboard, which went bad, where it saw the central model last."""
        for row, before in zip(self.rows[self.turn], self._before[self.turn], strict=True):
            row.copy_(before)
        for live, mean in zip(self.live(self.turn), self.central_buffers(), strict=True):
            live.copy_(mean)
        self.engine.forget_one(self.turn)

    def restart(self) -> None:
        """Put all learners at the central model, with optimizers at rest; all ranks together."""
        if self.turn:
            raise InputError("a restart is possible between rounds only: see is_between_rounds")
        self._barrier()
        for own in range(len(self.mine)):
            self._pull(own)
        self.engine.forget()
        self._barrier()

    def take_staleness(self) -> list[int]:
        """How stale each step of this rank was since the last time this was asked."""
        found, self._staleness = self._staleness, []
        return found

    @property
    def _bound(self) -> int | None:
        return self._settings.staleness

    @property
    def _is_due(self) -> bool:
        return self._events[self.turn] % self._settings.period == 0

    def _go_on(self) -> None:
        """Take the next learner aboard; at the end of a round wait, if others are far behind."""
        if self._order is not None:
            self.turn = next(self._order, 0)
            self.engine.board(self.turn, 0)
            return
        self.turn += 1
        if self.turn == len(self.mine):
            self.turn = 0
            self.step += 1
            self._end_round()
        self.engine.board(self.turn, 0)

    def _end_round(self) -> None:
        bound = self._bound
        self._clocks.advance(2 * self.step)
        if bound is None:
            return
        self._clocks.wait(2 * max(self.step - bound, 0))
        with self._lock:
            for own in range(len(self.mine)):
                self._pull(own)
        self._clocks.advance(2 * self.step + 1)

    def _count(self, own: int) -> int:
        """Note an event of a learner; return how many others there were since it last looked."""
        store, learner = self._store, self.mine[own]
        total = int(store.events.sum())
        stale = max(total - self._seen[own], 0)
        self._staleness.append(stale)
        store.events[learner] += 1
        self._seen[own] = total + 1
        return stale

    def _push(self, own: int) -> None:
        """Add the learner's step to the central model."""
        stale = self._count(own)
        share = 1 / max(stale, 1) if self._settings.aware else 1.0
        for central, row, before in zip(
            self._store.central, self.rows[own], self._before[own], strict=True
        ):
            central.add_(row.sub_(before), alpha=share)

    def _pull(self, own: int) -> None:
        """Set the learner to the central model."""
        if self._settings.shares_row:
            return
        self._seen[own] = int(self._store.events.sum())
        for central, row, before in zip(
            self._store.central, self.rows[own], self._before[own], strict=True
        ):
            row.copy_(central)
            before.copy_(central)

    def _look_back(self) -> None:
        for row, before in zip(self.rows[self.turn], self._before[self.turn], strict=True):
            before.copy_(row)

    def _stretch(self, own: int) -> None:
        """Let the learner and the central model pull each other."""
        self._count(own)
        for central, row, before in zip(
            self._store.central, self.rows[own], self._before[own], strict=True
        ):
            pull = before.sub_(central).mul_(self._alpha)
            row.sub_(pull)
            central.add_(pull)
