"""Trees: state as dicts and lists, whose leaves are tensors and plain values.

`pack` turns a tree into JSON and named tensors, `unpack` does the reverse. What is neither is
refused by its name: nothing is pickled, so nothing that is read can run.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import Tensor

from crossbow.errors import CrossbowError

_TENSOR, _TUPLE, _NUMBER = "$tensor", "$tuple", "$number"


class UnsavableError(CrossbowError):
    """A state that can't be written without running code when it is read."""


def copied(tree: Any, path: str = "") -> Any:
    """A tree that shares no memory with this one, on the CPU."""
    match tree:
        case Tensor():
            return tree.detach().to("cpu", copy=True)
        case Mapping():
            return {_checked(key, path): copied(v, f"{path}/{key}") for key, v in tree.items()}
        case list() | tuple():
            return type(tree)([copied(v, f"{path}/{i}") for i, v in enumerate(tree)])
        case bool() | int() | float() | str() | None:
            return tree
    raise UnsavableError(f"{path[1:]!r} is a {type(tree).__name__}, which a checkpoint can't hold")


def pack(tree: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return the tree as JSON that names its tensors, which are added to `tensors`.

    >>> pack({"step": 3, "betas": (0.9, math.inf)}, "adam", {})
    {'step': 3, 'betas': {'$tuple': [0.9, {'$number': 'inf'}]}}
    """
    match tree:
        case Tensor():
            assert name not in tensors, name
            tensors[name] = tree
            return {_TENSOR: name}
        case Mapping():
            return {key: pack(value, f"{name}/{key}", tensors) for key, value in tree.items()}
        case list():
            return [pack(value, f"{name}/{i}", tensors) for i, value in enumerate(tree)]
        case tuple():
            return {_TUPLE: [pack(v, f"{name}/{i}", tensors) for i, v in enumerate(tree)]}
        case float() if not math.isfinite(tree):
            return {_NUMBER: str(tree)}  # which JSON doesn't know
    return tree


def unpack(plain: Any, fetch: Callable[[str], Tensor]) -> Any:
    """Return the tree that `pack` made this of.

    >>> unpack({'$tuple': [0.9, {'$number': 'inf'}]}, fetch={}.__getitem__)
    (0.9, inf)
    """
    match plain:
        case {"$tensor": str(name), **rest} if not rest:
            return fetch(name)
        case {"$tuple": list(values), **rest} if not rest:
            return tuple(unpack(value, fetch) for value in values)
        case {"$number": str(text), **rest} if not rest:
            return float(text)
        case dict():
            return {key: unpack(value, fetch) for key, value in plain.items()}
        case list():
            return [unpack(value, fetch) for value in plain]
    return plain


def difference(one: Any, other: Any, but: Collection[str] = (), path: str = "") -> str | None:
    """Where two trees differ in keys, lengths, types, shapes or dtypes; None if nowhere.

    >>> difference({"a": [1, 2.5]}, {"a": [1, "text"]})
    'a/1 is float in the place of str'
    """
    kinds = _kind(one), _kind(other)
    if kinds[0] != kinds[1]:
        return f"{path[1:] or 'it'} is {kinds[0]} in the place of {kinds[1]}"
    places: Iterable[Any] = ()
    if isinstance(one, Mapping):
        places = (key for key in one if key not in but)
    elif isinstance(one, list | tuple):
        places = range(len(one))
    found = (difference(one[place], other[place], but, f"{path}/{place}") for place in places)
    return next((text for text in found if text), None)


def _kind(tree: Any) -> str:
    """What has to be the same."""
    match tree:
        case Tensor():
            return f"{str(tree.dtype).removeprefix('torch.')} {tuple(tree.shape)}"
        case Mapping():
            return f"a dict of {', '.join(sorted(tree))}"
        case list() | tuple():
            return f"a {type(tree).__name__} of {len(tree)}"
    return type(tree).__name__


def _checked(key: Any, path: str) -> str:
    """Refuse a key that JSON would change, or that means something to `unpack`."""
    if isinstance(key, str) and not key.startswith("$") and "/" not in key:
        return key
    raise UnsavableError(f"{path[1:]!r} has the key {key!r}, which a checkpoint can't hold")
