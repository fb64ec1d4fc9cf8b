from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crossbow.errors import InputError
from crossbow.zoo.models import (
    gpt,
    lenet5,
    lstm_lm,
    mlp,
    resnet50,
    resnet_cifar,
    vgg16_bn_cifar,
)

Build = Callable[[], nn.Module]

IMAGE_MODELS: dict[str, tuple[Build, tuple[int, ...], int]] = {
    "lenet5": (lenet5, (1, 28, 28), 10),
    "mlp": (mlp, (1, 28, 28), 10),
    "resnet8": (lambda: resnet_cifar(8), (3, 32, 32), 10),
    "resnet8-digits": (lambda: resnet_cifar(8, in_channels=1), (1, 8, 8), 10),
    "resnet20-100": (lambda: resnet_cifar(20, num_classes=100), (3, 32, 32), 100),
    "vgg16": (vgg16_bn_cifar, (3, 32, 32), 100),
    "resnet50": (resnet50, (3, 64, 64), 1000),
}
LANGUAGE_MODELS: dict[str, Build] = {
    "gpt": lambda: gpt(65),
    "gpt-dropout": lambda: gpt(65, context_length=16, num_layers=2, width=32, dropout=0.1),
    "lstm": lambda: lstm_lm(65, width=32),
    "lstm-one-layer-dropout": lambda: lstm_lm(65, width=32, num_layers=1, dropout=0.5),
}
BUILDS: dict[str, Build] = {k: v[0] for k, v in IMAGE_MODELS.items()} | LANGUAGE_MODELS

each_model = pytest.mark.parametrize("name", BUILDS)
each_language_model = pytest.mark.parametrize("name", LANGUAGE_MODELS)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def random_input(name: str, batch: int = 4) -> Tensor:
    if name in LANGUAGE_MODELS:
        return torch.randint(65, (batch, 16))
    return torch.randn(batch, *IMAGE_MODELS[name][1])


@pytest.mark.parametrize(
    ("build", "count"),
    [
        (lenet5, 431_080),
        (mlp, 269_322),
        (lambda: mlp((2, 3, 4)), 25),
        (lambda: resnet_cifar(8), 75_290),
        (lambda: resnet_cifar(20), 269_722),
        (lambda: resnet_cifar(32), 464_154),
        (lambda: resnet_cifar(44), 658_586),
        (lambda: resnet_cifar(56), 853_018),
        (lambda: resnet_cifar(110), 1_727_962),
        (vgg16_bn_cifar, 14_718_912 + 51_300),
        (resnet50, 25_557_032),
        (lambda: gpt(65), 818_176),
        (lambda: gpt(100), 827_136),
        (lambda: lstm_lm(10_000), 4_653_200),
    ],
)
def test_parameters_count_as_published(build: Build, count: int) -> None:
    assert num_parameters(build()) == count


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_images_become_logits(name: str) -> None:
    build, _, classes = IMAGE_MODELS[name]
    assert build()(random_input(name)).shape == (4, classes)


@each_language_model
def test_tokens_become_logits(name: str) -> None:
    model = BUILDS[name]()
    assert model(random_input(name)).shape == (4, 16, 65)
    assert model(random_input(name)[:, :5]).shape == (4, 5, 65)


@each_model
def test_every_parameter_gets_a_gradient(name: str) -> None:
    model = BUILDS[name]()
    logits = model(random_input(name)).flatten(0, -2)
    F.cross_entropy(logits, torch.arange(len(logits)) % logits.shape[1]).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.any(), key


@each_model
def test_the_seed_decides_the_weights(name: str) -> None:
    states = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        states.append(BUILDS[name]().state_dict())
    first, same, other = states
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


@each_model
def test_logits_start_near_a_uniform_guess(name: str) -> None:
    logits = BUILDS[name]()(random_input(name, batch=16)).flatten(0, -2)
    assert logits.std(dim=1).mean() < 1


@each_language_model
def test_a_future_token_changes_no_earlier_logits(name: str) -> None:
    model = BUILDS[name]().eval()
    tokens = random_input(name)
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 65
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-6)
    assert ((before[:, 9:] - after[:, 9:]).abs().amax(-1) > 1e-6).all()


@pytest.mark.parametrize("name", ["lenet5", "mlp", "resnet8", "vgg16", "gpt"])
def test_a_model_compiles_into_one_graph(name: str) -> None:
    torch.compile(BUILDS[name](), backend="eager", fullgraph=True)(random_input(name))


@pytest.mark.parametrize("name", ["resnet8", "vgg16", "resnet50"])
def test_the_memory_format_changes_no_logits(name: str) -> None:
    model, images = BUILDS[name]().eval(), random_input(name)
    expected = model(images)
    model.to(memory_format=torch.channels_last)
    last = model(images.to(memory_format=torch.channels_last))
    torch.testing.assert_close(last, expected, rtol=1e-3, atol=1e-4)


def test_a_shortcut_without_parameters_subsamples_and_pads_with_zeros() -> None:
    block = resnet_cifar(8).layer2[0]
    x = torch.randn(2, 16, 8, 8)
    nn.init.zeros_(block.bn2.weight)  # silence the convolutions
    out = block(x)
    assert torch.equal(out[:, :16], x[:, :, ::2, ::2].relu())
    assert not out[:, 16:].any()


def test_gpt_starts_as_gpt2_does() -> None:
    model = gpt(1000, width=256)
    block = model.blocks[0]
    deviations = [model.tokens.weight.std(), block.widen.weight.std(), block.narrow.weight.std()]
    assert [deviation.item() for deviation in deviations] == pytest.approx(
        [0.02, 0.02, 0.02 / 8**0.5], rel=0.02
    )
    assert not block.narrow.bias.any()


@pytest.mark.parametrize("depth", [2, 1, -4, 18, 34])
def test_an_impossible_depth_is_refused(depth: int) -> None:
    with pytest.raises(InputError, match=f"depth {depth} "):
        resnet_cifar(depth)


def test_a_width_that_heads_can_not_share_is_refused() -> None:
    with pytest.raises(InputError, match="multiple of the 3 heads"):
        gpt(65, num_heads=3)


def test_a_sequence_beyond_the_context_is_refused() -> None:
    with pytest.raises(InputError, match="at most 8"):
        gpt(65, context_length=8)(torch.zeros(1, 9, dtype=torch.long))
