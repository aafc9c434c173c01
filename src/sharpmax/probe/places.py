"""Which rows of an attention call are looked at."""

from __future__ import annotations

import torch
from torch import Tensor

from sharpmax.errors import reject

__all__ = ["CHOICES", "check_choice", "places"]

CHOICES = ("last", "log", "all")
"""The last row; about three rows per doubling of the length, the last included; every row."""

_PER_DOUBLING = 3


def places(choice: str, queries: int) -> Tensor:
    """The rows of `choice` among so many, ascending and from 0, `[R]` in int64 on the CPU.

    >>> places("last", 50).tolist(), places("log", 50).tolist()
    ([49], [0, 1, 2, 3, 4, 5, 7, 9, 12, 15, 19, 24, 31, 39, 49])
    """
    check_choice(choice)
    if choice == "all" or queries == 0:
        return torch.arange(queries)
    if choice == "last":
        return torch.tensor([queries - 1])
    steps = range(_PER_DOUBLING * queries.bit_length())
    numbers = {round(2 ** (step / _PER_DOUBLING)) for step in steps}
    return torch.tensor(sorted({n - 1 for n in numbers if n <= queries} | {queries - 1}))


def check_choice(choice: object) -> None:
    """Refuse what is not one of `CHOICES`."""
    if choice not in CHOICES:
        reject("rows", repr(choice), f"one of {list(CHOICES)}")
