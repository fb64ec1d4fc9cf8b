"""Tasks by name: a model, its data, its loss and its published hyper-parameters.

    task = tasks.get("resnet32-cifar10")

A recipe's fused optimizers are torch's own, one pass over memory instead of several; they differ
from the unfused ones by rounding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import nn
from torch.nn import functional as F

from crossbow.config import Config
from crossbow.data import augment, datasets
from crossbow.data.augment import Prepare
from crossbow.data.datasets import Split
from crossbow.errors import InputError, check_choice
from crossbow.task import ACCURACY, TOKEN_LOSS, Loss, Metric, Task, token_cross_entropy
from crossbow.zoo import models

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


def _resnet(depth: int, in_channels: int = 3) -> Callable[[int], nn.Module]:
    return lambda classes: models.resnet_cifar(depth, classes, in_channels)


_text = partial(
    Entry,
    data="text",
    prepare=augment.tokens(),
    loss=token_cross_entropy,
    metric=TOKEN_LOSS,
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
}


def get(name: str, *, data_dir: Path | None = None, text: Path | None = None) -> Task:
    """Return the named task with its data loaded.

    Sets are looked for under `data_dir`, or in the user's cache; text tasks read the file `text`.
    """
    entry = TASKS[check_choice("task", name, TASKS)]
    split = _load(name, entry, data_dir or datasets.default_data_dir(), text)
    return Task(
        name=name,
        model=partial(entry.build, split.train.classes),
        loss=entry.loss,
        train=split.train,
        test=split.test,
        metric=entry.metric,
        prepare=entry.prepare,
        recipe=entry.recipe,
    )


def _load(name: str, entry: Entry, data_dir: Path, text: Path | None) -> Split:
    if entry.data == "text":
        if text is None:
            raise InputError(f"task {name} reads a text file of yours: name it with --text FILE")
        return datasets.text(text, CONTEXT_LENGTH)
    if text is not None:
        raise InputError(f"task {name} reads {entry.data}, not a text: leave out --text {text}")
    if entry.data == "imagenet":
        return datasets.image_folder(data_dir / "imagenet")
    return datasets.load(entry.data, data_dir)
