"""Compression: messages of the size they claim, and nothing lost over time."""

import math

import pytest
import torch
from torch import Tensor

from crossbow.comm import compress
from crossbow.comm.compress import Cast, OneBit, PowerSGD, Speaker, TopK
from crossbow.errors import InputError

SHAPES = [(6, 3, 2, 2), (5,), (1, 7), (4, 1), (), (0, 3)]
N = sum(math.prod(shape) for shape in SHAPES)
CODECS = {
    "bf16": Cast(torch.bfloat16),
    "fp16": Cast(torch.float16),
    "onebit": OneBit(SHAPES),
    "topk": TopK(0.1),
}
SIZES = {"bf16": 2 * N, "fp16": 2 * N, "onebit": math.ceil(N / 8) + 4 * 13, "topk": 8 * 9}


def moves_of(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    stream = torch.Generator().manual_seed(step)
    return torch.randn(N, generator=stream, dtype=torch.float64).to(dtype)


def alone(values: Tensor) -> int:
    """The sum over one host."""
    return values.nbytes


@pytest.mark.parametrize("name", CODECS)
def test_messages_have_the_size_that_is_claimed(name):
    assert SIZES[name] == CODECS[name].encode(moves_of(0)).nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CODECS)
def test_what_was_heard_and_what_is_kept_add_up_to_the_moves(name, dtype):
    codec = CODECS[name]
    speaker, heard, moved = Speaker(codec, moves_of(0, dtype)), *torch.zeros(2, N, dtype=dtype)
    for step in range(50):
        moved += moves_of(step, dtype)
        codec.add(speaker.say(moves_of(step, dtype)), heard)
    assert torch.allclose(
        heard + speaker.kept, moved, atol=1e-4 if dtype == torch.float32 else 1e-12
    )
    if name in ("bf16", "fp16"):
        assert speaker.kept.abs().max() < 0.02
    else:
        assert speaker.kept.abs().max() > 0.02  # it is lossy


def test_powersgd_loses_nothing_over_time():
    heard, moved = torch.zeros(2, N, dtype=torch.float64)
    channel = PowerSGD(SHAPES, heard, 2, alone)
    for step in range(50):
        moves = moves_of(step, torch.float64)
        moved += moves
        channel.add_up(moves)
        heard += moves
    assert torch.allclose(heard + channel.kept, moved, atol=1e-12)
    assert channel.kept.abs().max() > 0.02


def test_powersgd_is_exact_for_matrices_of_its_rank():
    left, right = torch.randn(9, 2), torch.randn(2, 11)
    moves = torch.cat([(left @ right).reshape(-1), torch.ones(3)])
    heard = moves.clone()
    channel = PowerSGD([(9, 11), (3,)], moves, 2, alone)
    assert channel.add_up(heard) == 4 * (2 * (9 + 11) + 3)
    assert torch.allclose(heard, moves, atol=1e-5)


def test_powersgd_wakes_up_after_moves_of_nothing():
    channel = PowerSGD([(9, 11)], torch.zeros(99), 1, alone)
    channel.add_up(torch.zeros(99))
    moves = torch.ones(99)
    channel.add_up(moves)
    assert torch.allclose(moves, torch.ones(99))


@pytest.mark.parametrize("count", [1, 7, 8, 9, 64, 1001])
def test_bits_come_back(count):
    bits = torch.rand(count) < 0.5
    packed = compress._pack(bits)
    assert packed.nbytes == math.ceil(count / 8)
    assert torch.equal(compress._unpack(packed, count), bits)


def test_casts_bring_what_their_type_can_not_reach_in_several_steps():
    codec, heard = Cast(torch.float16), torch.zeros(1)
    speaker = Speaker(codec, heard)
    for step in range(3):
        codec.add(speaker.say(torch.tensor([2e5 * (step == 0)])), heard)
    assert heard.item() + speaker.kept.item() == 2e5
    assert heard.item() > 1.9e5


@pytest.mark.parametrize("name", CODECS)
def test_numbers_that_are_no_more_numbers_are_heard(name):
    heard = torch.zeros(N)
    CODECS[name].add(CODECS[name].encode(torch.full((N,), torch.nan)), heard)
    assert heard.isnan().any()


def test_states_go_on_where_they_were():
    for make in (
        lambda: Speaker(OneBit(SHAPES), moves_of(0)),
        lambda: PowerSGD(SHAPES, moves_of(0), 2, alone),
    ):
        one, other = make(), make()
        act = (
            (lambda c, m: c.say(m))
            if isinstance(one, Speaker)
            else (lambda c, m: (c.add_up(m), m)[1])
        )
        for step in range(3):
            act(one, moves_of(step))
        other.load_state_dict({key: value.clone() for key, value in one.state_dict().items()})
        assert torch.equal(act(one, moves_of(3)), act(other, moves_of(3)))


@pytest.mark.parametrize(
    "spec",
    ["zip", "topk:share=0", "topk:share=1.5", "topk:share=nan", "topk:share=true", "topk:rank=1",
     "powersgd:rank=0", "powersgd:rank=1.5", "bf16:share=1", "topk:share=much", "onebit:x=1/2"],
)  # fmt: skip
def test_what_can_not_be_said_is_refused(spec):
    with pytest.raises(InputError):
        compress.parse(spec)
