"""Models that write sentences: what holds for the translator and the captioner."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crossbow.data.sentences import END, PAD, rows, told
from crossbow.errors import InputError
from crossbow.task import sentence_cross_entropy
from crossbow.zoo.models import captioner, transformer

VOCABULARY, LENGTH, SIDE = 30, 9, 12


def small_transformer(tied: bool = True) -> nn.Module:
    return transformer(
        VOCABULARY, LENGTH, num_layers=2, width=16, num_heads=2, dropout=0.0, tied=tied
    )


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "transformer": small_transformer,
    "transformer-untied": lambda: small_transformer(tied=False),
    "captioner": lambda: captioner(VOCABULARY, SIDE, LENGTH, width=16),
}
each_model = pytest.mark.parametrize("name", BUILDS)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def sentences(*lengths: int, length: int = LENGTH) -> Tensor:
    return rows([torch.randint(4, VOCABULARY, (n,)).tolist() for n in lengths], length).long()


def inputs_for(name: str, target: Tensor) -> Tensor:
    if name == "captioner":
        return torch.cat([torch.randn(len(target), 3 * SIDE**2), told(target).float()], dim=1)
    return torch.cat([sentences(*range(1, len(target) + 1)), told(target)], dim=1)


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_parameters_count_as_said() -> None:
    assert num_parameters(transformer(4000)) == 1_913_344
    assert num_parameters(captioner(20, 24, 11)) == 1_220_404


@each_model
def test_a_later_word_changes_no_earlier_logits(name: str) -> None:
    model, target = BUILDS[name]().eval(), sentences(8, 8)
    inputs = inputs_for(name, target)
    changed = inputs.clone()
    changed[:, -4] = (inputs[:, -4] - 4 + 1) % (VOCABULARY - 4) + 4
    before, after = model(inputs), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=0, atol=1e-6)
    assert ((before[:, 5:] - after[:, 5:]).abs().amax(-1) > 1e-7).all()


@each_model
def test_a_sentence_is_scored_alike_alone_and_among_longer_ones(name: str) -> None:
    model, target = BUILDS[name]().eval(), sentences(2, 7, 4)
    inputs = inputs_for(name, target)
    together, alone = model(inputs), model(inputs[:1])
    torch.testing.assert_close(together[:1, : alone.shape[1]], alone, rtol=1e-4, atol=1e-5)


@each_model
def test_what_is_generated_is_the_likeliest_by_the_model_s_own_scores(name: str) -> None:
    model, target = BUILDS[name]().eval(), sentences(2, 7, 4, 5)
    inputs = inputs_for(name, target)
    with torch.no_grad():
        said = model.generate(inputs)
        again = model(torch.cat([inputs[:, :-LENGTH], told(said)], dim=1)).argmax(-1)
    for row, best in zip(said.tolist(), again.tolist(), strict=True):
        stop = row.index(END) + 1 if END in row else min(len(row), len(best))
        assert row[:stop] == best[:stop]
        assert set(row[stop:]) <= {PAD}


@each_model
def test_a_few_sentences_can_be_learned_by_heart(name: str) -> None:
    model, target = BUILDS[name](), sentences(2, 7, 4, 5)
    inputs = inputs_for(name, target)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(150):
        optimizer.zero_grad()
        sentence_cross_entropy(model(inputs), target).backward()
        optimizer.step()
    with torch.no_grad():
        assert model.eval().generate(inputs).tolist() == target.tolist()


@each_model
def test_every_parameter_gets_a_gradient(name: str) -> None:
    model, target = BUILDS[name](), sentences(8, 8, 3)
    sentence_cross_entropy(model(inputs_for(name, target)), target).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.any(), key


@each_model
def test_scores_start_near_a_uniform_guess(name: str) -> None:
    model = BUILDS[name]()
    assert model(inputs_for(name, sentences(8, 8, 3))).std(dim=-1).mean() < 1


def test_a_tied_matrix_is_one_parameter() -> None:
    tied, untied = small_transformer(), small_transformer(tied=False)
    assert num_parameters(untied) - num_parameters(tied) == 2 * VOCABULARY * 16
    assert tied.head.weight is tied.source.tokens.weight


def test_the_loss_is_a_mean_over_tokens_that_are_not_padding() -> None:
    logits, targets = torch.randn(3, 5, VOCABULARY), sentences(2, 4, 1, length=LENGTH)
    kept = [(i, t) for i in range(3) for t in range(5) if targets[i, t] != PAD]
    losses = [F.cross_entropy(logits[i, t], targets[i, t]) for i, t in kept]
    assert sentence_cross_entropy(logits, targets).item() == pytest.approx(
        torch.stack(losses).mean().item()
    )
    assert sentence_cross_entropy(logits, targets, label_smoothing=0.1).isfinite()


def test_what_can_not_be_built_or_read_is_refused() -> None:
    with pytest.raises(InputError, match="multiple of the 3 heads"):
        transformer(VOCABULARY, num_heads=3)
    with pytest.raises(InputError, match="side 7 "):
        captioner(VOCABULARY, 7, LENGTH)
    with pytest.raises(InputError, match="give at most 9"):
        small_transformer()(torch.ones(1, 20, dtype=torch.long))
