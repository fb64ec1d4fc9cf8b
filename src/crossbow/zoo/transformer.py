"""Transformer: an encoder reads a sentence, a decoder writes its translation.

Vaswani et al., Attention Is All You Need, 2017, with norms before the layers, learned positions and
weights drawn as GPT-2 does. Both languages share a vocabulary, and by default one matrix is both
embeddings and the head (Press and Wolf, 2017).

Sentences come as rows [source | START target], in two halves. Padding beyond the longest sentence
of a batch is cut off on either side, so the logits may be shorter than the half.
"""

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crossbow.data.sentences import END, PAD, START
from crossbow.errors import InputError


def transformer(
    vocab_size: int,
    length: int = 48,
    num_layers: int = 3,
    width: int = 128,
    num_heads: int = 4,
    dropout: float = 0.1,
    tied: bool = True,
) -> nn.Module:
    """Build a translator from rows (B, 2 T) to logits (B, up to T, V).

    The defaults make 1.9 M parameters at 4,000 tokens.

    Args:
        vocab_size: of both languages.
        length: most tokens of a sentence.
        num_layers: of the encoder, and of the decoder.
        width: of the residual stream.
        num_heads: share the width.
        dropout: on what each layer adds.
        tied: whether embeddings and head are one matrix.
    """
    if width % num_heads:
        raise InputError(f"width {width} is not possible: give a multiple of the {num_heads} heads")
    return Transformer(vocab_size, length, num_layers, width, num_heads, dropout, tied)


class Transformer(nn.Module):
    """An encoder, a decoder, and the matrix that both languages share."""

    def __init__(
        self,
        vocab_size: int,
        length: int,
        num_layers: int,
        width: int,
        num_heads: int,
        dropout: float,
        tied: bool,
    ) -> None:
        super().__init__()
        self.length = length
        self.source = Embedding(vocab_size, length, width, dropout)
        self.target = Embedding(vocab_size, length, width, dropout)
        self.encoder = nn.ModuleList(
            EncoderLayer(width, num_heads, dropout) for _ in range(num_layers)
        )
        self.decoder = nn.ModuleList(
            DecoderLayer(width, num_heads, dropout) for _ in range(num_layers)
        )
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        if tied:
            self.target.tokens.weight = self.source.tokens.weight
            self.head.weight = self.source.tokens.weight
        _init_layers(self, num_layers)

    def forward(self, pairs: Tensor) -> Tensor:
        """Score every next token of the target halves."""
        source, target = pairs.chunk(2, dim=1)
        states, is_seen = self.encode(source)
        return self.decode(_without_padding(target), states, is_seen)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Read sentences (B, S): their states (B, S, width), and which of them are no padding."""
        source = _without_padding(source)
        is_seen = (source != PAD)[:, None, None]  # (B, 1, 1, S)
        x = self.source(source)
        for layer in self.encoder:
            x = layer(x, is_seen)
        return self.encoder_norm(x), is_seen

    def decode(self, target: Tensor, states: Tensor, is_seen: Tensor) -> Tensor:
        """Score what follows each of the tokens (B, T): (B, T, V)."""
        x = self.target(target)
        for layer in self.decoder:
            x = layer(x, states, is_seen)
        return cast(Tensor, self.head(self.decoder_norm(x)))

    def generate(self, pairs: Tensor) -> Tensor:
        """Translate the source halves, each time by the likeliest token: tokens (B, T)."""
        states, is_seen = self.encode(pairs.chunk(2, dim=1)[0])
        said = pairs.new_full((len(pairs), self.length + 1), PAD)
        said[:, 0] = START
        going_on = torch.arange(len(pairs), device=pairs.device)
        for place in range(self.length):
            so_far = said[going_on, : place + 1]
            best = self.decode(so_far, states[going_on], is_seen[going_on])[:, -1].argmax(-1)
            said[going_on, place + 1] = best
            going_on = going_on[best != END]
            if not len(going_on):
                break
        return said[:, 1:]


class Embedding(nn.Module):
    """Tokens and their positions."""

    def __init__(self, vocab_size: int, length: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Parameter(torch.empty(length, width))
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (B, T) to (B, T, width)."""
        length, longest = tokens.shape[1], self.positions.shape[0]
        if length > longest:
            raise InputError(f"a sentence of {length} tokens is too long: give at most {longest}")
        return cast(Tensor, self.dropout(self.tokens(tokens) + self.positions[:length]))


class EncoderLayer(nn.Module):
    """Attention to the whole sentence, then a perceptron."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.perceptron = Perceptron(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, is_seen: Tensor) -> Tensor:
        """Map (B, S, width) to (B, S, width)."""
        seen = self.norm1(x)
        x = x + self.dropout(self.attention(seen, seen, is_seen))
        return cast(Tensor, x + self.dropout(self.perceptron(self.norm2(x))))


class DecoderLayer(nn.Module):
    """Attention to what was said so far, then to what is translated, then a perceptron."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.attention, self.cross = Attention(width, num_heads), Attention(width, num_heads)
        self.perceptron = Perceptron(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, states: Tensor, is_seen: Tensor) -> Tensor:
        """Map (B, T, width) to (B, T, width)."""
        said = self.norm1(x)
        # no mask but the causal one: padding stands after all that counts
        x = x + self.dropout(self.attention(said, said, None))
        x = x + self.dropout(self.cross(self.norm2(x), states, is_seen))
        return cast(Tensor, x + self.dropout(self.perceptron(self.norm3(x))))


class Attention(nn.Module):
    """Attention with several heads."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.memory = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, states: Tensor, is_seen: Tensor | None) -> Tensor:
        """Let each place of x (B, T, width) see states (B, S, width).

        It sees those that are marked (B, 1, 1, S), or without marks those up to its own.
        """
        q = self.query(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        memory = self.memory(states).unflatten(-1, (2, self.num_heads, -1))
        k, v = memory.permute(2, 0, 3, 1, 4)  # (B, heads, S, width / heads) each
        seen = F.scaled_dot_product_attention(q, k, v, is_seen, is_causal=is_seen is None)
        return cast(Tensor, self.out(seen.transpose(1, 2).flatten(2)))


class Perceptron(nn.Module):
    """Two layers, four times as wide between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, width) to (B, T, width)."""
        return cast(Tensor, self.narrow(F.gelu(self.widen(x), approximate="tanh")))


def _without_padding(tokens: Tensor) -> Tensor:
    """The columns in which a sentence of the batch has a token; the first one at least."""
    return tokens[:, : max(1, int((tokens != PAD).any(0).sum()))]


def _init_layers(model: Transformer, num_layers: int) -> None:
    """Draw the matrices as GPT-2 does: those that write into a stream smaller, by their number."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            writers = 3 * num_layers if name.startswith("decoder") else 2 * num_layers
            writes = name.endswith((".out", ".narrow"))
            nn.init.normal_(module.weight, std=0.02 / math.sqrt(writers if writes else 1))
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
