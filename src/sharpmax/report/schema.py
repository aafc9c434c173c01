"""Refusing damaged results in one line: values of the wrong type are named, and so is whatever else stops a page."""

from __future__ import annotations

import math
import reprlib
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sharpmax.errors import FileFormatError, SharpmaxError

_NUMBERS = {
    "mean", "low", "high", "sem", "n", "p", "count", "effective", "slope", "slope_low", "slope_high", "gain", "gained",
    "lost", "of_ceiling", "median", "p90", "bias", "tokens", "rank", "auroc", "right", "wrong", "parameters", "memory",
    "beyond", "prefill_ms", "prefill_ratio", "decode_ms", "decode_ratio", "peak_mib", "steps", "validation", "strength",
}  # fmt: skip
"""Keys whose values are numbers or null in every table."""


@contextmanager
def readable(tables: Mapping[str, Any]) -> Iterator[None]:
    """Raise FileFormatError, with the place, for tables that cannot be read as those of their command."""
    for place, value in _leaves(tables, ()):
        wrong = isinstance(value, float) and not math.isfinite(value)
        if place[-1] in _NUMBERS and (isinstance(value, bool | str | list) or wrong):
            raise _damaged(f"{'/'.join(place)} is {reprlib.repr(value)} and not a finite number")
    try:
        yield
    except SharpmaxError:
        raise
    except (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError) as problem:
        frame = traceback.extract_tb(problem.__traceback__)[-1]
        words = " ".join(f"{type(problem).__name__}: {problem}".split())
        raise _damaged(f"{words}, in {Path(frame.filename).name} line {frame.lineno}") from problem


def _damaged(what: str) -> FileFormatError:
    return FileFormatError(f"results: the tables are damaged or of another version ({what}); run their command again")


def _leaves(value: Any, place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from _leaves(one, (*place, str(name)))
    else:
        yield place, value
