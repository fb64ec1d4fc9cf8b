"""Alone: one learner, which is its own average."""

from collections.abc import Iterator
from contextlib import contextmanager


class Alone:
    """Plain PyTorch: the model is left as it is, and so is every step."""

    turn = 0

    def rest(self) -> None:
        """Nothing to average."""

    @contextmanager
    def central_aboard(self) -> Iterator[None]:
        """The model is the central model."""
        yield

    def restart(self) -> None:
        """The learner is at the central model already."""
