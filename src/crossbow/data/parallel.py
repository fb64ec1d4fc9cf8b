"""Parallel text: a line of one file says what the same line of the other says.

Both languages share one vocabulary of sub-words, learned by byte-pair encoding (Sennrich et al.,
Neural Machine Translation of Rare Words with Subword Units, 2016) from the training part. A sample
is the row [source END | START target], two halves of one length, and its target [target END].
"""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from crossbow.data.catalog import find_entry, how_to_get
from crossbow.data.datasets import Arrays
from crossbow.data.order import permutation
from crossbow.data.sentences import END, MOST_TOKENS, PAD, START, UNKNOWN, Sentences, rows, told
from crossbow.errors import DataError, InputError

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

LENGTH = 48
"""Tokens of a sentence, END among them."""
VOCABULARY = 4000
MOST_TESTED = 1000
_READ_BY_TOKENIZER = 200_000  # pairs: more teach it little and take it long

Pair = tuple[str, str]


def parallel(
    source: Path, target: Path, *, length: int = LENGTH, vocabulary: int = VOCABULARY
) -> Sentences:
    """Read two files of lines that say the same in two languages.

    Empty lines are left out, and a source line that stands in several places counts once. Of the
    rest every twentieth in a fixed hashed order is for testing, 1,000 at most. Pairs that are too
    long are not learned from; in testing the model sees as much of them as it can.

    Args:
        source: UTF-8, a sentence or paragraph a line.
        target: the same in another language.
        length: most tokens of a sentence.
        vocabulary: most tokens to tell apart.
    """
    if not END < vocabulary <= MOST_TOKENS:
        raise InputError(
            f"a vocabulary of {vocabulary} is not possible: give {END + 1} to {MOST_TOKENS}"
        )
    train, test = _split(_pairs(source, target))
    pieces = _learn_pieces(train[:_READ_BY_TOKENIZER], vocabulary)
    kept = _encode(pieces, train)
    kept = [pair for pair in kept if max(map(len, pair)) < length]
    if not kept:
        raise DataError(
            f"{source}: every pair has more than {length - 1} tokens; give a longer length"
        )
    return Sentences(
        train=_arrays(kept, length, len(pieces)),
        test=_arrays(_encode(pieces, test), length, len(pieces)),
        decode=lambda tokens: str(pieces.decode(list(tokens))),
        references={i: [sentence] for i, (_, sentence) in enumerate(test)},
    )


def help_texts(data_dir: Path) -> Sentences:
    """LibreOffice's help, from English to German."""
    entry = find_entry("libreoffice-help")
    source, target = (data_dir / entry.name / member.name for member in entry.members)
    if not (source.is_file() and target.is_file()):
        raise DataError(f"{entry.name} is not in {data_dir}: run `{how_to_get(entry, data_dir)}`")
    return parallel(source, target)


def _pairs(source: Path, target: Path) -> list[Pair]:
    """The pairs of lines, each source once."""
    ours, theirs = _lines(source), _lines(target)
    if len(ours) != len(theirs):
        raise DataError(
            f"{source} has {len(ours)} lines and {target} {len(theirs)}: "
            "give two files whose lines say the same"
        )
    pairs: dict[str, str] = {}
    for one, other in zip(ours, theirs, strict=True):
        if one and other:
            pairs.setdefault(one, other)
    if len(pairs) < 2:
        raise DataError(f"{source}: no two pairs of lines; one is needed to learn and one to test")
    return list(pairs.items())


def _lines(path: Path) -> list[str]:
    try:
        # not splitlines, which also cuts at rarer marks that stand inside paragraphs
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise DataError(f"{path}: {reason}") from error
    return [" ".join(line.split()) for line in (lines if lines[-1] else lines[:-1])]


def _split(pairs: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
    """What is for training and what for testing."""
    num_tested = min(MOST_TESTED, max(1, len(pairs) // 20))
    tested = np.zeros(len(pairs), bool)
    tested[permutation(seed=2016, epoch=0, n=len(pairs))[:num_tested]] = True
    return (
        [pair for pair, is_tested in zip(pairs, tested, strict=True) if not is_tested],
        [pair for pair, is_tested in zip(pairs, tested, strict=True) if is_tested],
    )


def _learn_pieces(pairs: Sequence[Pair], vocabulary: int) -> "SentencePieceProcessor":
    """Learn the sub-words of both languages; one thread, so that every rank learns the same."""
    try:
        from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
    except ImportError:
        raise InputError(
            "reading parallel text takes sentencepiece: pip install 'crossbow[translation]'"
        ) from None
    model = BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=(sentence for pair in pairs for sentence in pair),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocabulary,
        hard_vocab_limit=False,
        pad_id=PAD,
        unk_id=UNKNOWN,
        bos_id=START,
        eos_id=END,
        num_threads=1,
        minloglevel=2,
    )
    return SentencePieceProcessor(model_proto=model.getvalue())


def _encode(
    pieces: "SentencePieceProcessor", pairs: Sequence[Pair]
) -> list[tuple[list[int], list[int]]]:
    ours, theirs = (pieces.encode(list(side)) for side in zip(*pairs, strict=True))
    return list(zip(ours, theirs, strict=True))


def _arrays(pairs: Sequence[tuple[list[int], list[int]]], length: int, vocabulary: int) -> Arrays:
    source, target = (rows(side, length) for side in zip(*pairs, strict=True))
    return Arrays(torch.cat([source, told(target)], dim=1), target, vocabulary)
