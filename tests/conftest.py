"""Fixtures that fail a test which leaves something behind."""

import threading
from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)  # as a learner computes; and tests may share the cores with others


def pytest_addoption(parser: pytest.Parser) -> None:
    """What a person may ask for."""
    parser.addoption(
        "--screenshots", metavar="FOLDER", help="where to write pictures for the documentation"
    )


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No threads, and torch's own thread count as it was."""
    threads, intra_op = set(threading.enumerate()), torch.get_num_threads()
    yield
    left = [t.name for t in threading.enumerate() if t not in threads and not t.daemon]
    assert not left, f"threads left behind: {left}"
    assert torch.get_num_threads() == intra_op


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute as a learner does, so that bits can be compared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
