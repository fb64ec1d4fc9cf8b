"""LSTM language model: an embedding, recurrent layers, and a linear head.

Zaremba et al., Recurrent Neural Network Regularization, 2014 (arXiv:1409.2329): dropout on all
connections but the recurrent ones. Every sequence starts from a zero state, because samples come
shuffled.
"""

import math
from typing import cast

from torch import Tensor, nn


def lstm_lm(
    vocab_size: int, width: int = 200, num_layers: int = 2, dropout: float = 0.0
) -> nn.Module:
    """Build a language model from tokens (B, T) to logits (B, T, V); by default the small one."""
    return LSTMLanguageModel(vocab_size, width, num_layers, dropout)


class LSTMLanguageModel(nn.Module):
    """The classic recurrent language model, one width throughout."""

    def __init__(self, vocab_size: int, width: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        between = dropout if num_layers > 1 else 0.0  # torch warns where nothing is between
        self.tokens = nn.Embedding(vocab_size, width)
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(width, width, num_layers, batch_first=True, dropout=between)
        self.head = nn.Linear(width, vocab_size)
        for parameter in self.parameters():
            # the paper's 0.1, 0.05 and 0.04 at 200, 650 and 1500 units, nearly
            nn.init.uniform_(parameter, -1 / math.sqrt(width), 1 / math.sqrt(width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Score every next token: (B, T) to (B, T, V)."""
        states, _ = self.lstm(self.dropout(self.tokens(tokens)))  # (B, T, width)
        return cast(Tensor, self.head(self.dropout(states)))
