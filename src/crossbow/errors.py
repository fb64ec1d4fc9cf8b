"""What can go wrong, as a user sees it.

    CrossbowError
    ├── InputError        what was given can't be used: exit code 2
    │   └── DivergedError the loss left the numbers at these settings
    └── DataError is an InputError too: a data set is missing, damaged or not what it claims

A message is one line: the offending value, the legal ones, the remedy.
"""

import difflib
from collections.abc import Iterable


class CrossbowError(Exception):
    """Any failure that Crossbow explains; exit code 1 unless a subclass says otherwise."""

    exit_code = 1


class InputError(CrossbowError):
    """A value that can't be used."""

    exit_code = 2


class DataError(InputError):
    """A data set that is missing, damaged, or not what its name says."""


class DivergedError(InputError):
    """A loss that is no longer a finite number."""


def check_choice(kind: str, value: str, legal: Iterable[str]) -> str:
    """Return `value` if it is one of `legal`, else say which name was probably meant.

    >>> check_choice("schedule", "cosine", ["constant", "cosine"])
    'cosine'
    """
    names = list(legal)
    if value in names:
        return value
    near = difflib.get_close_matches(str(value), names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise InputError(f"unknown {kind} {value!r}{hint} (legal: {', '.join(names)})")
