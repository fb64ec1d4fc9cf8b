"""Trees come back as they were, and what is no state is refused by its name."""

import json
import math

import pytest
import torch

from crossbow.checkpoint.tree import UnsavableError, copied, pack, unpack

TREE = {
    "plain": [1, -2.5, True, None, "text", math.inf, 2**70, 0.1 + 0.2],
    "tuple": (0.9, 0.95),
    "empty": [{}, [], ()],
    "nested": {"weights": torch.arange(3), "deep": [torch.ones(2, 2), {"none": torch.empty(0)}]},
}


def test_a_tree_comes_back_as_it_was():
    tensors = {}
    plain = json.loads(json.dumps(pack(TREE, "it", tensors), allow_nan=False))
    assert list(tensors) == ["it/nested/weights", "it/nested/deep/0", "it/nested/deep/1/none"]
    again = unpack(plain, tensors.__getitem__)
    assert str(again) == str(TREE)
    assert isinstance(again["tuple"], tuple)
    assert math.isnan(unpack(json.loads(json.dumps(pack(math.nan, "it", {}))), None))


def test_a_copy_shares_no_memory():
    weights = torch.zeros(2, requires_grad=True)
    copy = copied({"weights": [weights]})["weights"][0]
    copy.add_(1)
    assert not weights.any()


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": {"b": [1, {2, 3}]}}, r"'a/b/1' is a set, which a checkpoint can't hold"),
        ({"a": {1: 2}}, r"'a' has the key 1"),
        ({"a": {"$tensor": 2}}, r"'a' has the key '\$tensor'"),
        ({"a": {"b/c": 2}}, r"'a' has the key 'b/c'"),
    ],
)
def test_what_is_no_state_is_refused_by_its_name(tree, message):
    with pytest.raises(UnsavableError, match=message):
        copied(tree)
