"""A task: model, loss, data and metric under one name.

    task = Task(model=build, loss=F.cross_entropy, train=train_set, test=test_set, metric=ACCURACY)

`train` and `test` are any map-style data sets whose samples are (input, target). Batches of a task
that brings `prepare` pass through it: that is where bytes become normalized floats and where
augmentation happens, a whole batch at a time.
"""

from collections.abc import Callable, Sized
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn import functional as F

from crossbow.comm.world import World
from crossbow.config import Config
from crossbow.data.augment import Prepare
from crossbow.data.sentences import PAD


class Dataset(Sized, Protocol):
    """Any map-style data set."""

    def __getitem__(self, index: int, /) -> Any: ...


Loss = Callable[..., Tensor]
Collate = Callable[[list[Any]], Any]
FinalMetrics = Callable[[nn.Module, World], dict[str, float]]
"""(model in evaluation mode, ranks that share the work) -> numbers by name"""


@dataclass(frozen=True)
class Metric:
    """A number that says how good a model is, as a mean over samples."""

    name: str
    compute: Callable[[Tensor, Tensor], Tensor]
    """(outputs, targets) -> the batch's mean."""
    higher_is_better: bool

    def reached(self, value: float, target: float) -> bool:
        """Whether the value is at least as good as the target."""
        return value >= target if self.higher_is_better else value <= target


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Share of the targets (...) that the logits (..., classes) rank first."""
    return (outputs.argmax(-1) == targets).float().mean()


def token_cross_entropy(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy a token, for logits (B, T, V) and targets (B, T)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=label_smoothing)


def sentence_cross_entropy(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy a token, for logits (B, T, V) and targets (B, T or more) that end in padding.

    A model may leave out places at which every sentence of the batch has ended.
    """
    return F.cross_entropy(
        logits.flatten(0, 1),
        targets[:, : logits.shape[1]].flatten(),
        ignore_index=PAD,
        label_smoothing=label_smoothing,
    )


ACCURACY = Metric("accuracy", accuracy, higher_is_better=True)
TOKEN_LOSS = Metric("loss", token_cross_entropy, higher_is_better=False)
SENTENCE_LOSS = Metric("loss", sentence_cross_entropy, higher_is_better=False)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is learned: the model, its data, its loss, and how it is judged."""

    model: nn.Module | Callable[[], nn.Module]
    """A module, trained in place; or a function that builds one from torch's random stream."""
    loss: Loss
    train: Dataset
    test: Dataset
    metric: Metric = ACCURACY
    name: str = "custom"
    prepare: Prepare | None = None
    collate: Collate | None = None
    final_metrics: FinalMetrics | None = None
    """What is computed once, of the final model: what is too slow to be the metric."""
    recipe: Config = field(default_factory=Config)

    def build_model(self) -> nn.Module:
        """The model to train."""
        return self.model if isinstance(self.model, nn.Module) else self.model()
