"""GPT: a decoder-only transformer language model, GPT-2's at any size.

Radford et al., Language Models are Unsupervised Multitask Learners, 2019: norms before the layers,
learned positions, and weights from N(0, 0.02), those that write into the residual stream divided by
the square root of their number. Head and embedding are *not* tied, unlike GPT-2's: tying saves
parameters where vocabularies are large, and the small ones here have none to save.
"""

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crossbow.errors import InputError


def gpt(
    vocab_size: int,
    context_length: int = 64,
    num_layers: int = 4,
    width: int = 128,
    num_heads: int = 4,
    dropout: float = 0.0,
) -> nn.Module:
    """Build a language model from tokens (B, T) to logits (B, T, V).

    The defaults make 0.83 M parameters at 100 tokens.
    """
    if width % num_heads:
        raise InputError(f"width {width} is not possible: give a multiple of the {num_heads} heads")
    return GPT(vocab_size, context_length, num_layers, width, num_heads, dropout)


class GPT(nn.Module):
    """Token and position embeddings, transformer blocks, and a linear head."""

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        num_layers: int,
        width: int,
        num_heads: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Parameter(torch.empty(context_length, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, num_heads, dropout) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        nn.init.normal_(self.positions, std=0.02)
        _init_layers(self, num_writers=2 * num_layers)

    def forward(self, tokens: Tensor) -> Tensor:
        """Score every next token: (B, T) to (B, T, V), T up to the context length."""
        length, longest = tokens.shape[1], self.positions.shape[0]
        if length > longest:
            raise InputError(f"a sequence of {length} tokens is too long: give at most {longest}")
        x = self.dropout(self.tokens(tokens) + self.positions[:length])  # (B, T, width)
        return cast(Tensor, self.head(self.norm(self.blocks(x))))


class Block(nn.Module):
    """Attention, then a perceptron, each adding to the residual stream."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, width) to (B, T, width)."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        hidden = F.gelu(self.widen(self.norm2(x)), approximate="tanh")
        x = x + self.dropout(self.narrow(hidden))
        return x


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, width) to (B, T, width); a token sees itself and those before it."""
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, heads, T, width / heads) each
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return cast(Tensor, self.out(seen.transpose(1, 2).flatten(2)))


def _init_layers(model: nn.Module, num_writers: int) -> None:
    """Draw the matrices as GPT-2 does; `num_writers` of them write into the residual stream."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            writes = name.endswith((".out", ".narrow"))
            nn.init.normal_(module.weight, std=0.02 / math.sqrt(num_writers if writes else 1))
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
