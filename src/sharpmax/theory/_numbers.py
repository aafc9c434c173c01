"""Numbers, numpy arrays and torch tensors read into float64 and checked, for formulas written once."""

from __future__ import annotations

import math
import numbers
import sys
from typing import Any

import numpy as np

from sharpmax.errors import reject, reject_type

Number = Any
"""A Python number, a (nested) sequence of them, a `numpy.ndarray` or a `torch.Tensor`."""


def read(**given: Number) -> tuple[Any, list[Any]]:
    """The library to compute with (torch once an argument is a tensor, else numpy) and the values in float64.

    >>> read(n=3)[1]
    [array(3.)]
    """
    # Whoever passes a tensor has imported torch, so numbers and arrays never pay for that import.
    torch = sys.modules.get("torch")
    tensors = [] if torch is None else [v for v in given.values() if isinstance(v, torch.Tensor)]
    if torch is None or not tensors:
        return np, [_from_numbers(name, value) for name, value in given.items()]
    return torch, [
        _from_tensor(name, value, torch)
        if isinstance(value, torch.Tensor)
        else torch.as_tensor(_from_numbers(name, value), device=tensors[0].device)
        for name, value in given.items()
    ]


def _from_numbers(name: str, value: Number) -> Any:
    try:
        array = np.asarray(value)
        # An integer beyond 64 bits arrives as an object, and so does None, which numpy would turn into NaN.
        if array.dtype.kind in "iuf" or (array.dtype.kind == "O" and all(map(_is_real, array.flat))):
            return array.astype(np.float64)
    except OverflowError:
        reject(name, "an integer too large for float64", f"at most {sys.float_info.max:.3g}")
    except (TypeError, ValueError):
        pass
    reject_type(name, repr(value), "a real number, a numpy array or a torch tensor of real numbers")


def _is_real(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _from_tensor(name: str, value: Any, torch: Any) -> Any:
    if value.dtype == torch.bool or value.is_complex():
        reject_type(name, f"a tensor of {value.dtype}", "a tensor of real numbers")
    return value.to(torch.float64)


def broadcast(**shapes: Any) -> tuple[int, ...]:
    """The common shape of all arguments.

    >>> broadcast(spread=(2, 1), n=(3,))
    (2, 3)
    """
    try:
        return np.broadcast_shapes(*(tuple(shape) for shape in shapes.values()))
    except ValueError:
        given = " and ".join(str(tuple(shape)) for shape in shapes.values())
        reject(", ".join(shapes), f"shapes {given}", "shapes that broadcast")


def check(argument: str, value: Any, fine: Any, allowed: str, todo: str = "") -> None:
    """Reject the argument unless `fine` holds everywhere, quoting the first value where it does not."""
    if not bool(fine.all()):
        reject(argument, repr(float(value[~fine].reshape(-1)[0])), allowed, todo)


def check_at_least(argument: str, value: Any, least: float, todo: str = "") -> None:
    """Reject the argument unless every value is finite and not under `least`; NaN is rejected too."""
    check(argument, value, (value >= least) & (value < math.inf), f"finite numbers of at least {least:g}", todo)


def give(value: Any) -> Any:
    """The result as the caller expects it: tensors and arrays as they are, one numpy value as a float."""
    return float(value) if isinstance(value, (np.ndarray, np.generic)) and value.ndim == 0 else value
