"""ln β as a weighted sum of features of the row."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from sharpmax.arrays import Array
from sharpmax.policies.base import Checks, Policy, Remeasure, check_number, number

if TYPE_CHECKING:
    from sharpmax.stats.statistics import RowStats


@dataclass(frozen=True)
class LogLinear(Policy):
    """ln β = Σ coefficient × feature, clamped to ln floor … ln ceiling.

    The features of a row with n visible keys, entropy H, largest weight p and variance v of its logits:
    1 (`level`), ℓ = max(0, ln(n/reference)) (`length`), h = H/ln n (`entropy`) and h² (`entropy2`), p (`top`) and p²
    (`top2`), ln(1 + v) (`var`), h·ℓ (`entropy_length`) and p·ℓ (`top_length`). So a policy can sharpen the rows of a
    head that need it and not the others. Only statistics with a coefficient other than 0 are measured.

    Gradients flow through every feature in `sharpmax.softmax`, in JAX, and in `sharpmax.attention` with
    `impl="reference"`. The other implementations of `sharpmax.attention` never hold a whole row. There p is a constant,
    so gradients with respect to queries and keys leave out the three `top` terms.

    >>> LogLinear(level=0.5, length=0.1).describe()
    'ln β = 0.5 +0.1·ln⁺(n/32), 0.2 ≤ β ≤ 12'
    """

    kind: ClassVar[str] = "log-linear"

    level: float = 0.0
    length: float = 0.0
    entropy: float = 0.0
    entropy2: float = 0.0
    top: float = 0.0
    top2: float = 0.0
    var: float = 0.0
    entropy_length: float = 0.0
    top_length: float = 0.0
    reference: float = 32.0
    floor: float = 0.2
    ceiling: float = 12.0

    COEFFICIENTS: ClassVar[tuple[str, ...]] = (
        "level", "length", "entropy", "entropy2", "top", "top2", "var", "entropy_length", "top_length",
    )  # fmt: skip
    checks: ClassVar[Checks] = {
        # + 0.0 turns −0 into 0, which files leave out.
        **dict.fromkeys(COEFFICIENTS, lambda name, value: check_number(name, value) + 0.0),
        "reference": number(at_least=1.0),
        "floor": number(above=0.0),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "ceiling", check_number("ceiling", self.ceiling, above=self.floor))

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        read = {
            "count": ("length", "entropy", "entropy2", "entropy_length", "top_length"),
            "entropy": ("entropy", "entropy2", "entropy_length"),
            "max": ("top", "top2", "top_length"),
            "lse": ("top", "top2", "top_length"),
            "var": ("var",),
        }
        return frozenset(name for name, users in read.items() if any(self._has(user) for user in users))

    @property
    def is_identity(self) -> bool:
        return not any(self._has(name) for name in self.COEFFICIENTS)

    def _has(self, name: str) -> bool:
        value = getattr(self, name)
        return not isinstance(value, float) or value != 0.0

    def strengthened(self, strength: float) -> LogLinear:
        """The policy with `strength` times this policy's ln β, before floor and ceiling."""
        return dataclasses.replace(self, **{name: strength * getattr(self, name) for name in self.COEFFICIENTS})

    def to_dict(self) -> dict[str, Any]:
        """Without default values, so that a grid of heads stays readable."""
        usual = {field.name: field.default for field in dataclasses.fields(self)}
        return {key: value for key, value in super().to_dict().items() if key not in usual or value != usual[key]}

    def describe(self) -> str:
        shown = ("", "·ln⁺(n/{0:g})", "·h", "·h²", "·p", "·p²", "·ln(1+v)", "·h·ln⁺(n/{0:g})", "·p·ln⁺(n/{0:g})")
        terms = [
            f"{getattr(self, name):+.3g}{feature.format(self.reference)}"
            for name, feature in zip(self.COEFFICIENTS, shown, strict=True)
            if self._has(name)
        ]
        return f"ln β = {' '.join(terms).removeprefix('+') or '0'}, {self.floor:g} ≤ β ≤ {self.ceiling:g}"

    def rule(self, xp: Any, stats: RowStats, remeasure: Remeasure | None) -> Array:
        n = xp.cast(xp.at_least(stats.count, 1), xp.statistics_dtype(_measured(stats)))
        total = xp.zeros_like(n) + self.level
        longer = xp.log(xp.at_least(n / self.reference, 1.0))
        if self._has("length"):
            total = total + self.length * longer
        if any(map(self._has, ("entropy", "entropy2", "entropy_length"))):
            # The entropy of a row of one key is 0; dividing by ln 2 avoids 0/0.
            h = stats.entropy / xp.log(xp.at_least(n, 2.0))
            total = total + h * (self.entropy + h * self.entropy2 + longer * self.entropy_length)
        if any(map(self._has, ("top", "top2", "top_length"))):
            p = stats.top_weight
            total = total + p * (self.top + p * self.top2 + longer * self.top_length)
        if self._has("var"):
            total = total + self.var * xp.log1p(stats.var)
        low, high = (math.log(b) if isinstance(b, float) else xp.log(b) for b in (self.floor, self.ceiling))
        return xp.exp(xp.at_most(xp.at_least(total, low), high))


def _measured(stats: RowStats) -> Array:
    """A measured array, which has the dtype of the statistics, or the counts if there is none."""
    arrays, _ = stats.flatten()
    return arrays[-1]
