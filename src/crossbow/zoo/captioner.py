"""Captioner: a convolutional network sees an image, an LSTM says what is on it.

Vinyals et al., Show and Tell, 2015, at a small size, and with the image as the recurrent network's
first state in the place of its first word.

Images come as rows [3 x side x side pixels | START caption] of floats, which hold tokens exactly.
"""

from typing import cast

import torch
from torch import Tensor, nn

from crossbow.data.sentences import END, PAD, START
from crossbow.errors import InputError


def captioner(vocab_size: int, side: int, length: int, width: int = 256) -> nn.Module:
    """Build a captioner from rows (B, 3 side^2 + T) to logits (B, T, V).

    Args:
        vocab_size: words.
        side: of the images, in pixels, 8 or more.
        length: most words of a caption, its end among them.
        width: of word embeddings and of the recurrent state.
    """
    if side < 8:
        raise InputError(f"side {side} is not possible: give 8 pixels or more")
    return Captioner(vocab_size, side, length, width)


class Captioner(nn.Module):
    """An encoder of images and a decoder of words."""

    def __init__(self, vocab_size: int, side: int, length: int, width: int) -> None:
        super().__init__()
        self.side, self.length = side, length
        self.see = _encoder(side, 2 * width)
        self.words = nn.Embedding(vocab_size, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab_size)
        nn.init.normal_(self.words.weight, std=0.1)

    def forward(self, rows: Tensor) -> Tensor:
        """Score every next word."""
        images, told = self._parts(rows)
        states, _ = self.lstm(self.words(told), self._first_state(images))
        return cast(Tensor, self.head(states))

    def generate(self, rows: Tensor) -> Tensor:
        """Caption the images, each time by the likeliest word: tokens (B, T)."""
        state = self._first_state(self._parts(rows)[0])
        word = torch.full((len(rows), 1), START, device=rows.device)
        said = []
        for _ in range(self.length):
            seen, state = self.lstm(self.words(word), state)
            word = self.head(seen).argmax(-1)  # (B, 1)
            said.append(word)
        words = torch.cat(said, dim=1)
        has_ended = (words == END).cumsum(1) - (words == END).long() > 0
        return words.masked_fill(has_ended, PAD)

    def _parts(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Images (B, 3, side, side) and words told (B, T)."""
        num_pixels = 3 * self.side**2
        images = rows[:, :num_pixels].reshape(-1, 3, self.side, self.side)
        return images, rows[:, num_pixels:].long()

    def _first_state(self, images: Tensor) -> tuple[Tensor, Tensor]:
        hidden, cell = self.see(images)[None].chunk(2, dim=2)  # (1, B, width) each
        return hidden.tanh().contiguous(), cell.contiguous()


def _encoder(side: int, width: int) -> nn.Sequential:
    """Halve the image and widen its channels until four by four places or less are left."""
    layers: list[nn.Module] = []
    channels, wider = 3, 32
    while side > 4:
        layers += [
            nn.Conv2d(channels, wider, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(wider),
            nn.ReLU(),
        ]
        channels, wider, side = wider, min(2 * wider, 256), -(-side // 2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * side**2, width))
