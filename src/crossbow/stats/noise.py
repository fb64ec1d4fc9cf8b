"""Noise: how much of a small batch's gradient is signal.

A gradient g_j of a batch of b samples is the true gradient plus noise. Of k gradients taken at one
place, with mean g,

    s2 = sum_j |g_j - g|^2 / (k - 1)        variance of one of them
    g2 = |g|^2 - s2 / k                     squared length of the true gradient

are unbiased for any k >= 2. s2 / g2 is the gradient noise scale in units of b (McCandlish et al.,
An Empirical Model of Large-Batch Training, 2018, arXiv:1812.06162): b * s2 / g2 samples are the
critical batch size, beyond which a larger batch mostly repeats what a smaller one said.

Gradients are long, so each time only one piece of them is looked at, another one each time, and the
sums of all pieces are added up. Each is smoothed on its own, over a span that is counted in small
batches: so what a piece is worth doesn't depend on how many learners read it.

Learners that stand apart see gradients that differ for that reason, too, which counts as noise
here; docs/algorithms/adaptive.md says how much that is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

SPAN = 1000.0
"""Small batches over which estimates are smoothed."""

MOST_PIECES, MOST_STEPS = 4, 16
"""A gradient is seen whole every so many steps, in so many looks: a look has a fixed cost."""

LOOKS_A_SPAN = 4
"""Each piece is seen at least so often within the span."""

SMALLEST_PIECE = 1024

OUTLIER = 10.0
"""An observation counts for at most so many times what was seen before it."""


@dataclass(frozen=True)
class Noise:
    """Estimates, each with its standard error."""

    variance: float
    """s2: of the gradient of one small batch."""
    signal: float
    """g2: the squared length of the true gradient."""
    scale: float
    """s2 / g2; infinite where no signal shows."""
    scale_error: float

    def critical_batch(self, batch_size: int) -> tuple[float, float]:
        """Samples beyond which a larger batch is mostly waste, and the error of that."""
        return batch_size * self.scale, batch_size * self.scale_error

    def to_json(self) -> dict[str, float | None]:
        """Plain values; JSON knows no infinity."""
        return {key: value if math.isfinite(value) else None for key, value in asdict(self).items()}


def gain_of(variance: float, signal: float, k: int) -> float:
    """How many steps of one learner a step with the mean gradient of k learners is worth.

    1 where there is no noise, k where there is nothing else, 1 where there is neither. Johnson et
    al., AdaScale SGD, 2020, arXiv:2007.05105.

    >>> gain_of(variance=0.0, signal=1.0, k=4), gain_of(variance=1.0, signal=0.0, k=4)
    (1.0, 4.0)
    """
    variance, signal = max(variance, 0.0), max(signal, 0.0)
    if variance + signal == 0:
        return 1.0
    return (variance + signal) / (variance / k + signal)


def split(squares: float, square_of_sum: float, k: int) -> tuple[float, float]:
    """Return (s2, g2), given sum_j |g_j|^2 and |sum_j g_j|^2 of k gradients.

    >>> split(squares=2.0, square_of_sum=4.0, k=2)  # both are (1,)
    (0.0, 1.0)
    """
    variance = (squares - square_of_sum / k) / (k - 1)
    return variance, square_of_sum / k**2 - variance / k


class Pieces:
    """Cuts gradients into pieces that are looked at in turn."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        k: int,
        *,
        narrow: bool = False,
        num_pieces: int = MOST_PIECES,
    ) -> None:
        """Plan the pieces.

        Args:
            parameters: whose gradients are looked at.
            k: how many gradients are seen at a time.
            narrow: whether pieces are as small as the span allows, because they travel far.
            num_pieces: at most so many, where they aren't narrow.
        """
        self._parameters = list(parameters)
        sizes = [p.numel() for p in self._parameters]
        total = sum(sizes)
        often = int(SPAN / LOOKS_A_SPAN / k)
        most = often if narrow else MOST_STEPS
        steps = max(1, min(most, often, total // SMALLEST_PIECE))
        self.every = 1 if narrow else max(1, steps // num_pieces)
        """Steps from one look to the next."""
        self.count = steps // self.every
        edges = [total * piece // self.count for piece in range(self.count + 1)]
        self.width = max(b - a for a, b in pairwise(edges))
        """Numbers in the longest piece."""
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self._places = [
            [
                (i, max(a - start, 0), min(b - start, size))
                for i, (start, size) in enumerate(zip(starts, sizes, strict=True))
                if a < start + size and start < b
            ]
            for a, b in pairwise(edges)
        ]

    def due(self, step: int) -> int | None:
        """The piece to look at in this step, if any."""
        look, rest = divmod(step, self.every)
        return None if rest else look % self.count

    def copy(self, piece: int, out: Tensor) -> None:
        """Copy a piece of the parameters' gradients to `out`; what has no gradient is zero."""
        end = 0
        for i, start, stop in self._places[piece]:
            parameter = self._parameters[i]
            begin, end = end, end + stop - start
            if parameter.grad is None:
                out[begin:end].zero_()
            else:
                out[begin:end].copy_(parameter.grad.reshape(-1)[start:stop])
        out[end:].zero_()


class _Piece:
    """What was seen of one piece: smoothed means of variance and signal, and how they scatter."""

    def __init__(self) -> None:
        self.weight = self.square_weight = 0.0
        self.sums = [0.0] * 5  # variance, signal, their squares, their product

    def add(self, variance: float, signal: float, keep: float) -> None:
        """Take an observation; what was seen before keeps so much of its weight."""
        seen = (variance, signal, variance * variance, signal * signal, variance * signal)
        new = 1 - keep
        self.sums = [keep * old + new * value for old, value in zip(self.sums, seen, strict=True)]
        self.weight = keep * self.weight + new
        self.square_weight = keep * keep * self.square_weight + new * new

    def means(self) -> list[float]:
        """The five means; zeros before anything was seen."""
        return [value / self.weight for value in self.sums] if self.weight else self.sums

    def error_factor(self) -> float:
        """Variance of a weighted mean over the weighted scatter of what it is the mean of."""
        share = self.square_weight / self.weight**2
        return share / (1 - share)


class NoiseMeter:
    """Smoothed estimates from pieces of gradients."""

    def __init__(self, pieces: int, k: int, every: int = 1) -> None:
        """Begin with nothing seen.

        Args:
            pieces: that a gradient is cut into.
            k: gradients seen at a time.
            every: steps from one look to the next.
        """
        self.k = k
        self.gain = 1.0
        """Of k learners, by what was seen so far; 1 as long as that is nothing."""
        self._keep = math.exp(-pieces * every * k / SPAN)
        self._pieces = [_Piece() for _ in range(pieces)]
        self._found = [(0.0, 0.0)] * pieces  # variance and signal of each

    def add(self, piece: int, squares: float, square_of_sum: float) -> None:
        """Take sum_j |g_j|^2 and |sum_j g_j|^2 of a piece; what isn't finite is passed over."""
        if not (math.isfinite(squares) and math.isfinite(square_of_sum)):
            return
        variance, signal = split(squares, square_of_sum, self.k)
        before = self._found[piece]
        most = OUTLIER * (before[0] + max(before[1], 0.0))
        if 0 < most < (size := squares / self.k):
            variance, signal = variance * most / size, signal * most / size
        self._pieces[piece].add(variance, signal, self._keep)
        self._see(piece)

    def read(self) -> Noise | None:
        """The estimates; None before every piece was seen twice."""
        if any(piece.weight < 1.5 * (1 - self._keep) for piece in self._pieces):
            return None
        variance, signal = (max(total, 0.0) for total in self._totals())
        if not (signal and variance):
            scale = math.inf if variance else 0.0
            return Noise(variance, signal, scale, scale)
        scale = variance / signal
        return Noise(variance, signal, scale, scale * self._relative_error(variance, signal))

    def _see(self, piece: int) -> None:
        """Let the gain follow what was found of a piece."""
        variance, signal, *_ = self._pieces[piece].means()
        self._found[piece] = variance, signal
        self.gain = gain_of(*self._totals(), self.k)

    def _totals(self) -> tuple[float, float]:
        return sum(found[0] for found in self._found), sum(found[1] for found in self._found)

    def _relative_error(self, variance: float, signal: float) -> float:
        """Of the ratio, by the delta method, from how much the observations scatter."""
        total = 0.0
        for piece in self._pieces:
            v, s, vv, ss, vs = piece.means()
            a, b = 1 / variance, -1 / signal
            scatter = a * a * (vv - v * v) + b * b * (ss - s * s) + 2 * a * b * (vs - v * s)
            total += piece.error_factor() * max(scatter, 0.0)
        return math.sqrt(total)

    def inherit(self, other: "NoiseMeter") -> None:
        """Go on from what another one saw, of any number of gradients at a time, in its pieces."""
        share = len(other._pieces) / len(self._pieces)
        for number, piece in enumerate(self._pieces):
            found = other._pieces[int(number * share)]
            piece.weight, piece.square_weight = found.weight, found.square_weight
            powers = (1, 1, 2, 2, 2)
            piece.sums = [s * share**power for s, power in zip(found.sums, powers, strict=True)]
            self._see(number)

    def state_dict(self) -> dict[str, list[list[float]]]:
        """All that was seen."""
        return {"pieces": [[p.weight, p.square_weight, *p.sums] for p in self._pieces]}

    def load_state_dict(self, state: Mapping[str, list[list[float]]]) -> None:
        """Go on from what was seen before."""
        pairs = zip(self._pieces, state["pieces"], strict=True)
        for number, (piece, (weight, square_weight, *sums)) in enumerate(pairs):
            piece.weight, piece.square_weight, piece.sums = weight, square_weight, sums
            self._see(number)


class OneLearnersNoise:
    """The noise that one learner sees, from the gradients of two steps in a row.

    It hardly moves in between, so they are two micro-batches of one place, at no pass of their own.
    """

    EVERY = 8
    """Steps between two looks, of two steps each, in the beginning."""

    EARLY, RARER = 1024, 8
    """After so many steps looks come so many times as rarely: small models feel them."""

    def __init__(self, parameters: Sequence[Tensor], every: int = EVERY) -> None:
        parameters, self._every = list(parameters), every
        self._pieces = Pieces(parameters, 2, num_pieces=MOST_STEPS)
        device = parameters[0].device
        self._pair = torch.zeros(2, self._pieces.width, dtype=torch.float32, device=device)
        self.meter = NoiseMeter(self._pieces.count, 2, self._pieces.every)
        self._step = 0

    def look(self) -> None:
        """Take note of the gradients that are there, if it is time to; call this in each step."""
        look, place = self._place(self._step)
        self._step += 1
        if place < 2:
            piece = look % self._pieces.count
            self._pieces.copy(piece, self._pair[place])
            if place == 1:
                self.meter.add(piece, *sums_of(self._pair))

    def _place(self, step: int) -> tuple[int, int]:
        """The number of the look that a step belongs to, and its place in it."""
        if step < self.EARLY:
            return divmod(step, self._every)
        look, place = divmod(step - self.EARLY, self.RARER * self._every)
        return look + self.EARLY // self._every, place

    def state_dict(self) -> dict[str, Any]:
        """All that was seen."""
        return {"step": self._step, "pair": self._pair, **self.meter.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what was seen before."""
        self._step = state["step"]
        self._pair.copy_(state["pair"])
        self.meter.load_state_dict({"pieces": state["pieces"]})


def sums_of(gradients: Tensor) -> tuple[float, float]:
    """sum_j |g_j|^2 and |sum_j g_j|^2 of gradients (k, n)."""
    flat = gradients.reshape(-1)
    total = gradients.new_ones(len(gradients)) @ gradients  # several times as fast as sum(0)
    return float(flat.dot(flat)), float(total.dot(total))
