import pytest
import torch
from tests.ranks import run_ranks
from torch import Tensor, nn

from crossbow.comm.world import World, joined
from crossbow.data import shapes
from crossbow.data.augment import pixels_and_tokens
from crossbow.data.sentences import Sentences
from crossbow.zoo.scores import bleu, exact_match, final_metrics, write

PREPARE = pixels_and_tokens(3 * shapes.SIDE**2)


class Parrot(nn.Module):
    """Says what it was told, and so what is right."""

    def __init__(self, mistakes: int = 0) -> None:
        super().__init__()
        self.weight, self.mistakes = nn.Parameter(torch.zeros(1)), mistakes

    def generate(self, inputs: Tensor) -> Tensor:
        words = inputs[:, 3 * shapes.SIDE**2 + 1 :].long()
        words[: self.mistakes, 1] = 3
        return words


def set_of(n: int) -> Sentences:
    return shapes.shapes(1, n)


def test_what_is_right_scores_all() -> None:
    data = set_of(70)
    for score, name, best in ((exact_match, "exact_match", 1.0), (bleu, "bleu", 100.0)):
        found = final_metrics(data, PREPARE, score)(Parrot(), World())
        assert found == {name: pytest.approx(best)}


def test_each_mistake_counts() -> None:
    found = final_metrics(set_of(50), PREPARE, exact_match)(Parrot(mistakes=5), World())
    assert found == {"exact_match": 0.9}


def test_a_sentence_may_match_any_of_its_references() -> None:
    references = [["a red cat sits here", "the cat is red and sits"], ["one dog runs over there"]]
    assert bleu(["the cat is red and sits", "one dog runs over there"], references)[
        "bleu"
    ] == pytest.approx(100)
    assert bleu(["a blue cat sits here", "one dog runs over there"], references)["bleu"] < 90


def write_in_ranks() -> list[str]:
    world = World.from_environment()
    with joined(world):
        return write(Parrot(), set_of(67), PREPARE, world)


@pytest.mark.slow
def test_ranks_write_what_one_writes() -> None:
    alone = write(Parrot(), set_of(67), PREPARE, World())
    assert alone == [right for (right,) in set_of(67).references.values()]
    assert run_ranks(write_in_ranks, 2) == [alone, alone]
