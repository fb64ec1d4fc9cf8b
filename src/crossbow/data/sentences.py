"""Sentences as numbers: rows of tokens, and the words or pieces that they stand for.

A sentence is a row of fixed length: its tokens, END, then padding. What a decoder reads in training
is START and the sentence without its last token; what it is to say is the sentence.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from crossbow.errors import DataError

PAD, UNKNOWN, START, END = range(4)
"""The first four tokens of every vocabulary."""

MOST_TOKENS = 2**15
"""A vocabulary's limit: tokens are kept as int16."""

_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")


@final
@dataclass(frozen=True, eq=False)
class Sentences:
    """What a model learns from that writes sentences, and what they are judged by."""

    train: Any
    test: Any
    decode: Callable[[Sequence[int]], str]
    """Tokens without START and END -> the sentence."""
    references: dict[int, list[str]]
    """Test sample -> all sentences that are right for it."""


@final
class Words:
    """A vocabulary of whole words."""

    def __init__(self, words: Iterable[str]) -> None:
        self.words = ["", "?", "", "", *words]
        self._tokens = {word: token for token, word in enumerate(self.words) if token > END}
        if len(self.words) > MOST_TOKENS:
            raise DataError(
                f"{len(self.words)} words are too many: keep {MOST_TOKENS} of the most frequent"
            )

    def __len__(self) -> int:
        return len(self.words)

    @classmethod
    def of(cls, sentences: Iterable[str], at_least: int = 1) -> "Words":
        """All words that occur so often, in alphabetical order."""
        counts = Counter(word for sentence in sentences for word in split(sentence))
        return cls(sorted(word for word, count in counts.items() if count >= at_least))

    def encode(self, sentence: str) -> list[int]:
        """The tokens of a sentence's words.

        >>> Words(["a", "circle", "red"]).encode("A red square.")
        [4, 6, 1]
        """
        return [self._tokens.get(word, UNKNOWN) for word in split(sentence)]

    def decode(self, tokens: Sequence[int]) -> str:
        """The words of these tokens."""
        return " ".join(self.words[token] for token in tokens)


def split(sentence: str) -> list[str]:
    """Cut a sentence into lower-case words, without punctuation.

    >>> split("It's a RED circle.")
    ["it's", 'a', 'red', 'circle']
    """
    return _WORD.findall(sentence.lower())


def rows(sentences: Sequence[Sequence[int]], length: int) -> Tensor:
    """Lay sentences out as int16 rows; what doesn't fit is cut off.

    >>> rows([[7, 8], [7, 8, 9, 9]], length=3).tolist()
    [[7, 8, 3], [7, 8, 9]]
    """
    laid = torch.full((len(sentences), length), PAD, dtype=torch.int16)
    for row, tokens in zip(laid, sentences, strict=True):
        ended = [*tokens, END][:length]
        row[: len(ended)] = torch.tensor(ended, dtype=torch.int16)
    return laid


def told(sentences: Tensor) -> Tensor:
    """What a decoder reads to say these rows: START, and each row without its last place."""
    return torch.cat([torch.full_like(sentences[:, :1], START), sentences[:, :-1]], dim=1)


def said(row: Sequence[int]) -> list[int]:
    """The tokens of a row before its END.

    >>> said([7, 8, 3, 0])
    [7, 8]
    """
    tokens = list(row)
    return tokens[: tokens.index(END)] if END in tokens else [t for t in tokens if t != PAD]
