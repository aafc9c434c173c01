"""`Policy`: a frozen value that maps the statistics of a row to its inverse temperature β."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from sharpmax.arrays import Array, ops_for
from sharpmax.errors import ArgumentError, ArgumentTypeError, FileFormatError, OutOfRangeWarning, reject, reject_type
from sharpmax.files import write_text

if TYPE_CHECKING:
    from sharpmax.stats.statistics import RowStats

SCHEMA = 1
"""Version of the JSON form. Other versions are refused."""

Remeasure = Callable[[Array], "RowStats"]
"""Measures the same rows again with their logits multiplied by β (one value per row)."""

Checks = Mapping[str, Callable[[str, Any], Any]]

_kinds: dict[str, type[Policy]] = {}


class Warned(set[Any]):
    """The policies that a model has warned about. A copy of the model starts without any."""

    def __reduce__(self) -> tuple[type[Warned], tuple[()]]:
        return Warned, ()


WARNED = Warned()
"""The policies that were warned about outside of models."""


@dataclass(frozen=True)
class Policy(ABC):
    """A rule for the inverse temperature β of each row. β > 1 sharpens, β = 1 changes nothing."""

    kind: ClassVar[str]
    """The name of this kind of policy in JSON."""

    needs: ClassVar[frozenset[str]]
    """The row statistics that the rule reads. Nothing else is measured."""

    reads: ClassVar[str] = ""
    """The statistic that `fitted_range` is about; empty without a range."""

    checks: ClassVar[Checks] = {}
    """By field, a function of its name and value that returns the value to store, or raises."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" in cls.__dict__:
            _kinds[cls.kind] = cls

    def __post_init__(self) -> None:
        for name, check in self.checks.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))

    @abstractmethod
    def describe(self) -> str:
        """The rule in one line."""

    @abstractmethod
    def rule(self, xp: Any, stats: RowStats, remeasure: Remeasure | None) -> Array:
        """β per row, computed with the operations `xp`. Numeric fields may be arrays `[H, 1]` (one value per head)."""

    @property
    def fitted_range(self) -> tuple[float, float] | None:
        """The range of the statistic `reads` that the policy was fitted on: its field `fitted_on`, or None."""
        found: tuple[float, float] | None = getattr(self, "fitted_on", None)
        return found

    @property
    def is_identity(self) -> bool:
        """Whether β is 1 for every possible row."""
        return False

    def beta(self, stats: RowStats, remeasure: Remeasure | None = None) -> Array:
        """β for each row of `stats`; 1 for a row of fewer than two keys, NaN for a row of NaN.

        Policies that read the row at other temperatures need `remeasure`.
        """
        xp = ops_for(stats.count)
        self.warn_outside(stats)
        beta = self.rule(xp, stats, remeasure)
        return xp.where(stats.count <= 1, xp.ones_like(beta), beta)

    def warn_outside(self, stats: RowStats, warned: set[Any] | None = None) -> None:
        """Warn if rows lie outside the fitted range, once per policy and set `warned`."""
        warned = WARNED if warned is None else warned
        if self.fitted_range is None or self in warned:
            return
        values = getattr(stats, self.reads)
        if not ops_for(values).concrete(values):
            return
        low, high = self.fitted_range
        outside = self.outside(values, stats)
        if bool(outside.any()):
            warned.add(self)
            share = 100.0 * float(outside.sum()) / math.prod(outside.shape)
            caller = sys._getframe(1)
            # Not `warnings.warn`, which would suppress the same text for a second model.
            warnings.warn_explicit(
                f"{share:.1f}% of the rows have {self.reads} outside {low:g} … {high:g}, the range this policy is "
                f"made for ({self.describe()}); shown once per policy",
                OutOfRangeWarning,
                caller.f_code.co_filename,
                caller.f_lineno,
                module=caller.f_globals["__name__"],
            )

    def outside(self, values: Array, stats: RowStats) -> Array:
        """Which rows of two or more keys lie outside the fitted range."""
        low, high = self.fitted_range or (-math.inf, math.inf)
        return ((values < low) | (values > high)) & (stats.count > 1)

    def to_dict(self) -> dict[str, Any]:
        """The policy as JSON values."""
        body = {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}
        return {"schema": SCHEMA, "kind": self.kind, **body}

    def to_json(self) -> str:
        """The policy as JSON text. Reading it back gives the same floats, bit for bit."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def save(self, path: str | Path) -> Path:
        """Write the policy as JSON; `sharpmax.load_policy` reads it back."""
        return write_text(path, self.to_json() + "\n")

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> Policy:
        """The inverse of `to_dict`, without schema and kind."""
        fields = dataclasses.fields(cls)
        names = sorted(field.name for field in fields)
        if unknown := sorted(set(body) - set(names)):
            raise FileFormatError(f"policy: unknown field {unknown[0]!r} for kind {cls.kind!r}; allowed: {names}")
        required = sorted(field.name for field in fields if field.default is dataclasses.MISSING)
        if missing := [name for name in required if name not in body]:
            raise FileFormatError(
                f"policy: kind {cls.kind!r} is incomplete, without {missing[0]!r}; needed: {required}"
            )
        try:
            return cls(**{name: _frozen(value) for name, value in body.items()})
        except (ArgumentError, ArgumentTypeError) as wrong:
            raise FileFormatError(f"policy: kind {cls.kind!r} has a bad value: {wrong}") from None


def policy_from_dict(body: Any) -> Policy:
    """The policy that `Policy.to_dict` wrote."""
    if not isinstance(body, dict) or "kind" not in body:
        raise FileFormatError("policy: not a sharpmax policy; allowed: a JSON object with 'schema' and 'kind'")
    rest = dict(body)
    schema, kind = rest.pop("schema", None), rest.pop("kind")
    if schema != SCHEMA:
        raise FileFormatError(f"policy: got schema {schema!r}; allowed: {SCHEMA}; a newer file needs a newer sharpmax")
    if not isinstance(kind, str) or kind not in _kinds:
        raise FileFormatError(f"policy: got kind {kind!r}; allowed: {sorted(_kinds)}")
    return _kinds[kind].from_dict(rest)


P = TypeVar("P", bound=Policy)


def with_columns(policy: P, columns: Mapping[str, Any]) -> P:
    """The same policy with arrays `[H, 1]` (one number per head) in some fields. Only its `rule` can be used."""
    joined = object.__new__(type(policy))  # compilers can trace this, but not copy.copy
    for field in dataclasses.fields(policy):
        value = columns[field.name] if field.name in columns else getattr(policy, field.name)
        object.__setattr__(joined, field.name, value)
    return joined


def _plain(value: Any) -> Any:
    if isinstance(value, Policy):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return policy_from_dict(value)
    if isinstance(value, list):
        return tuple(_frozen(item) for item in value)
    return value


def check_number(name: str, value: object, *, above: float = -math.inf, at_least: float = -math.inf) -> float:
    """`value` as a float; raises an error that names the allowed numbers."""
    allowed = "a finite number"
    if above > -math.inf:
        allowed += f" above {above:g}"
    if at_least > -math.inf:
        allowed += f" of at least {at_least:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        reject_type(name, f"{type(value).__name__} {value!r}", allowed)
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the range of floats
        number = math.inf
    if not (math.isfinite(number) and number > above and number >= at_least):
        reject(name, repr(value), allowed)
    return number


def number(*, above: float = -math.inf, at_least: float = -math.inf) -> Callable[[str, Any], float]:
    """The check of a field that holds a number."""
    return functools.partial(check_number, above=above, at_least=at_least)


def numbers(what: str, least: int = 1, *, at_least: float = -math.inf) -> Callable[[str, Any], tuple[float, ...]]:
    """The check of a field that holds a tuple of `least` numbers or more; `what` describes it in an error."""

    def check(name: str, value: Any) -> tuple[float, ...]:
        if not isinstance(value, (tuple, list)) or len(value) < least:
            reject(name, repr(value), what)
        return tuple(check_number(name, item, at_least=at_least) for item in value)

    return check


def check_range(name: str, value: Any) -> tuple[float, float]:
    """`value` as a pair low < high; raises an error otherwise."""
    allowed = "a pair (low, high) with low < high"
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        reject(name, repr(value), allowed)
    low, high = (check_number(name, item) for item in value)
    if not low < high:
        reject(name, repr(value), allowed)
    return low, high
