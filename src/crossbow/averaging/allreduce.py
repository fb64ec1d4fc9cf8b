"""All-reduce: one model, moved by the mean of all learners' gradients.

Learner j has a batch of b_j samples and their mean gradient g_j. All take the same step, with

    g = sum_j b_j * g_j / sum_j b_j

which is the gradient of all their samples. So learners hold the same weights at all times, and
those of one rank share a row and the optimizer's state. It is synchronous SGD, what
DistributedDataParallel does, and has a barrier in each step.

`optimizer.step()` of a learner hands in its gradient. The one that makes a step complete moves the
model; for the others no parameter has a gradient, and so optimizers leave everything as it is.

With a scale r the learning rate of a step is r times what it is for one learner: k or sqrt(k), or
the gain that the noise of the gradients says (AdaScale; Johnson et al., 2020, arXiv:2007.05105).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from crossbow.arena import Block
from crossbow.averaging.gain import Gain
from crossbow.averaging.learners import Learners
from crossbow.averaging.meeting import Meeting, Papers
from crossbow.engines.sequential import Own, Sequential
from crossbow.errors import InputError
from crossbow.stats.noise import Pieces


class AllReduce(Learners):
    """The learners of a rank, which are one model with those of all others."""

    takes_closures = False

    def __init__(
        self,
        papers: Papers,
        engine: Sequential,
        optimizer: Optimizer,
        meeting: Meeting,
        mine: Sequence[int],
        *,
        first_learner: int,
        accumulate: int,
        lag: int,
        gain: Gain | None,
        pieces: Pieces,
        barrier: Callable[[], object],
        share_state: Callable[[], None],
    ) -> None:
        """Begin at step 0.

        Args:
            papers: of this host.
            engine: runs this rank's learners.
            optimizer: of the model.
            meeting: reduces.
            mine: this rank's learners.
            first_learner: of this host, among those of all hosts.
            accumulate: rounds whose gradients make a step.
            lag: steps after which a gradient comes out of the meeting.
            gain: scales the learning rate.
            pieces: of gradients, for the gain.
            barrier: returns when all ranks have called it.
            share_state: gives all ranks the optimizer state of the first.
        """
        super().__init__(papers.arena, engine, mine, first_learner)
        self.gain = gain
        self._papers, self._optimizer, self._meeting = papers, optimizer, meeting
        self._accumulate, self._lag, self._pieces = accumulate, lag, pieces
        self._barrier, self._share_state = barrier, share_state
        self._round, self._is_moving = 0, False
        self._first_step = 0
        """Steps that were made before these letters: since when pieces of gradients take turns."""
        blocks = papers.arena.parameters
        self._gradients = [
            [view for n, b in enumerate(blocks) for view in b.layout.views(papers.letter(n, j))]
            for j in mine
        ]
        self._weights = [0.0] * len(mine)
        self._present = [[False] * len(engine.parameters) for _ in mine]
        self._rates: list[float | Tensor] = []
        engine.share_state()

    def before_move(self, *, pulls_first: bool) -> None:
        """Hand the learner's gradient in; with the last one, show all the same; else, none."""
        self.engine.check()
        self.tell_follower()
        self._hand_in()
        is_last = self.turn == len(self.mine) - 1
        self._is_moving = is_last and self._round == self._accumulate - 1
        if self._is_moving:
            self._reduce()
        else:
            for parameter in self.engine.parameters:
                parameter.grad = None

    def after_move(self) -> None:
        """Take the next learner aboard."""
        if self._is_moving:
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate
            self._is_moving = False
            self.step += 1
        self.turn += 1
        if self.turn == len(self.mine):
            self.turn = 0
            self._round = (self._round + 1) % self._accumulate
        self.engine.board(self.turn, 0)

    def rest(self) -> None:
        """Sit out a batch, and move with the others if it is time to."""
        self.weight = 0.0
        self._optimizer.step()
        self.weight = 1.0

    def central_rows(self) -> list[Tensor]:
        """A copy of the weights, a row for each block."""
        return [row.clone() for row in self.rows[0]]

    def central_buffers(self) -> list[Tensor]:
        """The mean of the learners' buffers, a row for each block."""
        return self._meeting.buffers()

    def settle(self) -> None:
        """Make the steps of all gradients that were handed in."""
        if self._round:
            self._round = self._accumulate - 1
            for _ in self.mine:
                self.rest()
        for _ in range(self._lag * len(self.mine)):
            self.rest()

    def learners(self) -> list[tuple[list[Tensor], list[Tensor]]]:
        """None stands apart."""
        return []

    def take_owns(self, owns: Sequence[Own]) -> None:
        """Give each learner of this rank a random stream, and all ranks the first one's state."""
        super().take_owns(owns)
        self._share_state()
        self.engine.share_state()

    def state_dict(self) -> dict[str, Any]:
        """The model, the gain's statistics, and how many rounds of a step have been made."""
        means = self._papers.buffer_means
        return {
            "rows": self.rows[0],
            "step": self._first_step + self.step,
            "round": self._round,
            "noise": self.gain.meter.state_dict() if self.gain else None,
            "buffers": [mean[self._meeting.met % 2] for mean in means],
        }

    def learner_states(self) -> list[dict[str, Any]]:
        """Each learner's buffers, and what it has handed in of a step that is not complete."""
        papers, goes_round = self._papers, self._accumulate > 1
        met, blocks = self._meeting.met % 2, range(len(self.rows[0]))
        return [
            {
                "buffers": [_live(block)[learner] for block in papers.arena.buffers],
                "met": [block.letters[learner].right[met] for block in papers.arena.buffers],
                "letter": [papers.letter(n, learner) for n in blocks if goes_round],
                "kept": self._meeting.kept(learner),
                "pieces": [pieces[learner] for pieces in papers.pieces if goes_round],
                "weight": self._weights[own],
                "present": self._present[own],
            }
            for own, learner in enumerate(self.mine)
        ]

    def load_state_dict(
        self, shared: Mapping[str, Any], learners: Sequence[Mapping[str, Any]]
    ) -> None:
        """Go on from there, before the first step; all ranks together."""
        papers = self._papers
        self._first_step, self._round = shared["step"], shared["round"]
        self._meeting.go_on(self._first_step)
        for row, value in zip(self.rows[0], shared["rows"], strict=True):
            row.copy_(value)
        for mean, value in zip(papers.buffer_means, shared["buffers"], strict=True):
            mean.copy_(value.expand_as(mean))
        if self.gain:
            self.gain.meter.load_state_dict(shared["noise"])
        for own, (learner, state) in enumerate(zip(self.mine, learners, strict=True)):
            buffers = zip(papers.arena.buffers, state["buffers"], state["met"], strict=True)
            for block, value, met in buffers:
                letter = block.letters[learner].right
                _live(block)[learner].copy_(value)
                letter.copy_(met.expand_as(letter))
            for number, value in enumerate(state["letter"]):
                papers.letter(number, learner).copy_(value)
            for place, value in zip(self._meeting.kept(learner), state["kept"], strict=True):
                place.copy_(value)
            for number, value in enumerate(state["pieces"]):
                papers.pieces[number, learner].copy_(value)
            self._weights[own], self._present[own] = state["weight"], state["present"]
        self._barrier()

    def restart(self) -> None:
        """Start the optimizer anew; all ranks together."""
        if self.turn:
            raise InputError("a restart is possible between rounds only: see is_between_rounds")
        self.engine.forget()
        self._barrier()

    def _hand_in(self) -> None:
        """Put the gradient of the learner aboard into its letter, with those of rounds before."""
        self.engine.reclaim_buffers()
        own, learner = self.turn, self.mine[self.turn]
        self.put_buffers_down((self.step + 1) % 2)
        if self._round == 0:
            self._weights[own] = 0.0
            self._present[own] = [False] * len(self.engine.parameters)
        piece = self._pieces.due(self._first_step + self.step) if self.gain else None
        if piece is not None:
            self._show_piece(piece, self._papers.pieces[self._round, learner])
        if self.weight:
            self._add_gradient(own)
        groups, has_any = self._optimizer.param_groups, bool(self._weights[own])
        rates = [float(group["lr"]) if has_any else 0.0 for group in groups]
        words = torch.tensor([self._weights[own], *rates, *self._present[own]], dtype=torch.float64)
        self._papers.words[learner].copy_(words)

    def _add_gradient(self, own: int) -> None:
        """Keep the mean of the gradients of the learner aboard, by weight."""
        parameters, letter = self.engine.parameters, self._gradients[own]
        held = [p.grad for p in parameters]
        _check_dense(held, self.engine.names)
        found = [
            torch.zeros_like(place) if gradient is None else gradient
            for gradient, place in zip(held, letter, strict=True)
        ]
        if not self.guard.passes(own, found):
            self._reseed_buffers(own)
            return
        before, self._weights[own] = self._weights[own], self._weights[own] + self.weight
        if before:
            torch._foreach_lerp_(letter, found, self.weight / self._weights[own])
        else:
            torch._foreach_copy_(letter, found)
        self._present[own] = [
            seen or gradient is not None
            for seen, gradient in zip(self._present[own], held, strict=True)
        ]

    def _reseed_buffers(self, own: int) -> None:
        """Give a learner whose gradient is no number its buffers of the last meeting."""
        for block, mean in zip(self._papers.arena.buffers, self._meeting.buffers(), strict=True):
            _live(block)[self.mine[own]].copy_(mean)
            block.letters[self.mine[own]].right[(self.step + 1) % 2].copy_(mean)

    def _show_piece(self, piece: int, place: Tensor) -> None:
        if self.weight:
            self._pieces.copy(piece, place)
        else:
            place.fill_(torch.nan)  # which the meter passes over

    def _reduce(self) -> None:
        """Give the parameters the mean gradient, and the optimizer the rate for it."""
        _, *said = self._meeting.gather()
        groups = self._optimizer.param_groups
        rates, present = said[: len(groups)], said[len(groups) :]
        piece = self._pieces.due(self._first_step + self.step)
        if self.gain and piece is not None:
            self.gain.meter.add(piece, *self._meeting.noise())
        self._meeting.close()
        for parameter, gradient, share in zip(
            self.engine.parameters, self._gradients[0], present, strict=True
        ):
            parameter.grad = gradient if share else None
        self._rates = [group["lr"] for group in groups]
        scale = self.gain.value if self.gain else 1.0
        for group, rate in zip(groups, rates, strict=True):
            # who rests may not know the rate of now, and what comes later had the rate of then
            own = group["lr"] if self.weight and not self._lag else rate
            group["lr"] = own if scale == 1 else own * scale


def _live(block: Block) -> Tensor:
    assert block.live is not None
    return block.live


def _check_dense(gradients: Sequence[Tensor | None], names: Sequence[str]) -> None:
    for gradient, name in zip(gradients, names, strict=True):
        if gradient is not None and gradient.layout != torch.strided:
            raise InputError(
                f"the gradient of {name!r} is {gradient.layout}: all-reduce averages dense ones "
                "only; make its layer with sparse=False"
            )


def number_of_words(parameters: Sequence[nn.Parameter], optimizer: Optimizer) -> int:
    """How many numbers a learner says: its weight, its rates, and which gradients it has."""
    return 1 + len(optimizer.param_groups) + len(parameters)
