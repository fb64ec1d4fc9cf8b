"""Tasks by name: a model, its data, its loss and its published hyper-parameters.

    task = tasks.get("resnet32-cifar10")

A recipe's fused optimizers are torch's own, one pass over memory instead of several; they differ
from the unfused ones by rounding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import nn
from torch.nn import functional as F

from crossbow.config import Config
from crossbow.data import augment, captions, datasets, shapes
from crossbow.data.augment import Prepare
from crossbow.data.datasets import Split
from crossbow.data.parallel import help_texts, parallel
from crossbow.data.sentences import Sentences
from crossbow.errors import InputError, check_choice
from crossbow.task import (
    ACCURACY,
    SENTENCE_LOSS,
    TOKEN_LOSS,
    Loss,
    Metric,
    Task,
    sentence_cross_entropy,
    token_cross_entropy,
)
from crossbow.zoo import models, scores

CONTEXT_LENGTH = 64
"""Characters a text model sees at once."""

_DIGITS = augment.images((0.305,), (0.376,))
_MNIST = augment.images((0.1307,), (0.3081,))
_FASHION = augment.images((0.2860,), (0.3530,))
_CIFAR10 = augment.images((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), pad=4, flip=True)
_CIFAR100 = augment.images((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), pad=4, flip=True)
_IMAGENET = augment.images((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), crop=224, flip=True)

_SGD = "sgd:momentum=0.9,fused=true"
_SGD_DECAY = "sgd:momentum=0.9,weight_decay=1e-4,fused=true"

_SMALL = Config(batch_size=16, lr=0.01, optimizer=_SGD, epochs=10)
_DIGITS_RECIPE = Config(
    batch_size=16, lr=0.05, optimizer=_SGD_DECAY, schedule="cosine:warmup=1", epochs=12
)
_HE_2015 = (
    Config(  # He et al., "Deep residual learning", 2015: 64,000 steps, drops at 32,000, 48,000
        batch_size=128,
        lr=0.1,
        optimizer=_SGD_DECAY,
        schedule="multistep:at=82/123,factor=0.1",
        epochs=164,
    )
)
_VGG = Config(
    batch_size=128,
    lr=0.05,
    optimizer="sgd:momentum=0.9,weight_decay=5e-4,nesterov=true,fused=true",
    schedule="multistep:at=60/120/160,factor=0.2,warmup=1",
    epochs=200,
)
_GOYAL_2017 = Config(  # Goyal et al., "Accurate, large minibatch SGD", 2017, for one worker
    batch_size=32,
    lr=0.0125,
    optimizer=_SGD_DECAY,
    schedule="multistep:at=30/60/80,factor=0.1",
    epochs=90,
)
_GPT = Config(
    batch_size=16,
    lr=1e-3,
    optimizer="adamw:weight_decay=0.1,betas=0.9/0.95,fused=true",
    schedule="cosine:warmup=0.05,final=0.1",
    epochs=1,
)
_TRANSFORMER = Config(
    batch_size=16,
    lr=1e-3,
    optimizer="adamw:weight_decay=0.01,betas=0.9/0.98,fused=true",
    schedule="cosine:warmup=1,final=0.01",
    label_smoothing=0.1,
    epochs=10,
)
_CAPTIONER = Config(
    batch_size=16,
    lr=1e-3,
    optimizer="adamw:weight_decay=0.01,fused=true",
    schedule="cosine:warmup=0.5",
    epochs=10,
)
_LSTM = Config(batch_size=16, lr=2e-3, optimizer="adamw:weight_decay=0.01,fused=true", epochs=1)


@dataclass(frozen=True)
class Entry:
    """A task before its data is loaded."""

    build: Callable[[int], nn.Module]
    """Number of classes -> model."""
    data: str
    prepare: Prepare
    recipe: Config
    loss: Loss = F.cross_entropy
    metric: Metric = ACCURACY
    score: scores.Score | None = None
    """Of what a model writes by itself, where it writes sentences."""


def _resnet(depth: int, in_channels: int = 3) -> Callable[[int], nn.Module]:
    return lambda classes: models.resnet_cifar(depth, classes, in_channels)


_text = partial(
    Entry,
    data="text",
    prepare=augment.tokens(),
    loss=token_cross_entropy,
    metric=TOKEN_LOSS,
)

_sentences = partial(Entry, loss=sentence_cross_entropy, metric=SENTENCE_LOSS)
_translation = partial(
    _sentences,
    models.transformer,
    prepare=augment.tokens(),
    recipe=_TRANSFORMER,
    score=scores.bleu,
)


def _captions(data: str, side: int, length: int, score: scores.Score) -> Entry:
    return _sentences(
        partial(models.captioner, side=side, length=length),
        data,
        augment.pixels_and_tokens(3 * side**2),
        _CAPTIONER,
        score=score,
    )


TASKS: dict[str, Entry] = {
    "resnet8-digits": Entry(_resnet(8, in_channels=1), "digits", _DIGITS, _DIGITS_RECIPE),
    "mlp-digits": Entry(lambda n: models.mlp((64, 64, n)), "digits", _DIGITS, _DIGITS_RECIPE),
    "lenet-mnist": Entry(lambda _: models.lenet5(), "mnist", _MNIST, _SMALL),
    "lenet-fashion": Entry(lambda _: models.lenet5(), "fashion-mnist", _FASHION, _SMALL),
    "mlp-mnist": Entry(lambda _: models.mlp(), "mnist", _MNIST, _SMALL),
    "mlp-fashion": Entry(lambda _: models.mlp(), "fashion-mnist", _FASHION, _SMALL),
    **{
        f"resnet{depth}-cifar10": Entry(_resnet(depth), "cifar10", _CIFAR10, _HE_2015)
        for depth in (8, 20, 32, 56)
    },
    "resnet32-cifar100": Entry(_resnet(32), "cifar100", _CIFAR100, _HE_2015),
    "vgg16-cifar100": Entry(models.vgg16_bn_cifar, "cifar100", _CIFAR100, _VGG),
    "resnet50-imagenet": Entry(models.resnet50, "imagenet", _IMAGENET, _GOYAL_2017),
    "gpt-text": _text(partial(models.gpt, context_length=CONTEXT_LENGTH), recipe=_GPT),
    "lstm-text": _text(models.lstm_lm, recipe=_LSTM),
    "transformer-help": _translation(data="libreoffice-help"),
    "transformer-parallel": _translation(data="parallel"),
    "captioner-shapes": _captions("shapes", shapes.SIDE, shapes.LENGTH, scores.exact_match),
    "captioner-coco": _captions("coco", captions.SIDE, captions.LENGTH, scores.bleu),
}


def get(
    name: str, *, data_dir: Path | None = None, text: Path | Sequence[Path] | None = None
) -> Task:
    """Return the named task with its data loaded.

    Args:
        name: of a task.
        data_dir: where sets are, if not in the user's cache.
        text: the file of a text task, or the two of a translation.
    """
    entry = TASKS[check_choice("task", name, TASKS)]
    texts = [text] if isinstance(text, Path) else list(text or ())
    data = _load(name, entry, data_dir or datasets.default_data_dir(), texts)
    final = None
    if entry.score and isinstance(data, Sentences):
        final = scores.final_metrics(data, entry.prepare, entry.score)
    return Task(
        name=name,
        model=partial(entry.build, data.train.classes),
        loss=entry.loss,
        train=data.train,
        test=data.test,
        metric=entry.metric,
        prepare=entry.prepare,
        final_metrics=final,
        recipe=entry.recipe,
    )


def _load(name: str, entry: Entry, data_dir: Path, texts: Sequence[Path]) -> Split | Sentences:
    if entry.score is scores.bleu:
        scores.require_sacrebleu()  # now, and not at the end of a long run
    wanted = {"text": 1, "parallel": 2}.get(entry.data, 0)
    if len(texts) != wanted:
        raise _wrong_texts(name, entry, wanted, texts)
    if entry.data == "text":
        return datasets.text(texts[0], CONTEXT_LENGTH)
    if entry.data == "parallel":
        return parallel(texts[0], texts[1])
    if entry.data == "libreoffice-help":
        return help_texts(data_dir)
    if entry.data == "shapes":
        return shapes.shapes()
    if entry.data == "coco":
        return captions.coco(data_dir / "coco")
    if entry.data == "imagenet":
        return datasets.image_folder(data_dir / "imagenet")
    return datasets.load(entry.data, data_dir)


def _wrong_texts(name: str, entry: Entry, wanted: int, texts: Sequence[Path]) -> InputError:
    given = " ".join(f"--text {text}" for text in texts)
    if wanted == 2:
        return InputError(
            f"task {name} reads a text and its translation: name them with --text FILE --text FILE"
        )
    if wanted == 1:
        return InputError(f"task {name} reads one text file of yours: name it with --text FILE")
    return InputError(f"task {name} reads {entry.data}, not a text: leave out {given}")
