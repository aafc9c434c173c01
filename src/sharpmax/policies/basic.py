"""Simple rules for β: a constant, one that grows with the logarithm of the length, and a monotone curve of entropy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from sharpmax.arrays import Array
from sharpmax.errors import reject
from sharpmax.lazy import require
from sharpmax.policies.base import Policy, Remeasure, check_number, check_range

if TYPE_CHECKING:
    from sharpmax.stats.statistics import RowStats


@dataclass(frozen=True)
class Constant(Policy):
    """β = value in every row; `Constant(1)` changes nothing.

    >>> Constant(2.0).describe()
    'β = 2'
    """

    kind: ClassVar[str] = "constant"
    needs: ClassVar[frozenset[str]] = frozenset()

    value: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", check_number("value", self.value, at_least=0.0))

    @property
    def is_identity(self) -> bool:
        """True for β = 1."""
        return self.value == 1.0

    def describe(self) -> str:
        """The rule in one line."""
        return f"β = {self.value:g}"

    def rule(self, xp: Any, stats: RowStats, remeasure: Remeasure | None) -> Array:
        """β = value."""
        return xp.ones_like(xp.cast(stats.count, xp.widest)) * self.value


@dataclass(frozen=True)
class LogLength(Policy):
    """β = max(floor, ln n / ln reference), n being the keys the row can see (padding does not count).

    `reference` is the size at which nothing changes: the largest one seen in training.

    >>> LogLength(reference=16).describe()
    'β = max(1, ln n / ln 16)'
    """

    kind: ClassVar[str] = "log-length"
    needs: ClassVar[frozenset[str]] = frozenset({"count"})
    reads: ClassVar[str] = "count"

    reference: float
    floor: float = 1.0
    fitted_on: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "reference", check_number("reference", self.reference, above=1.0))
        object.__setattr__(self, "floor", check_number("floor", self.floor, at_least=0.0))
        if self.fitted_on is not None:
            object.__setattr__(self, "fitted_on", check_range("fitted_on", self.fitted_on))

    @property
    def fitted_range(self) -> tuple[float, float] | None:
        """The numbers of keys the reference was chosen on, if it was fitted."""
        return self.fitted_on

    def describe(self) -> str:
        """The rule in one line."""
        return f"β = max({self.floor:g}, ln n / ln {self.reference:g})"

    def rule(self, xp: Any, stats: RowStats, remeasure: Remeasure | None) -> Array:
        """ln n / ln reference, not under the floor."""
        n = xp.cast(xp.at_least(stats.count, 1), xp.widest)
        return xp.at_least(xp.log(n) / xp.log(xp.param(self.reference, n)), self.floor)


@dataclass(frozen=True)
class Curve(Policy):
    """β as straight lines through `knots` (entropies, rising) and `values` (β, monotone), flat outside.

    >>> Curve(knots=(1.0, 3.0), values=(1.0, 2.0)).describe()
    'β from 1 at H = 1 to 2 at H = 3, 2 knots, flat outside'
    """

    kind: ClassVar[str] = "curve"
    needs: ClassVar[frozenset[str]] = frozenset({"entropy"})
    reads: ClassVar[str] = "entropy"

    knots: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("knots", "values"):
            given = getattr(self, name)
            if not isinstance(given, (tuple, list)) or len(given) < 2:
                reject(name, repr(given), "a tuple of two or more numbers")
            object.__setattr__(self, name, tuple(check_number(name, v, at_least=0.0) for v in given))
        if len(self.knots) != len(self.values):
            reject("values", f"{len(self.values)} numbers for {len(self.knots)} knots", "one value per knot")
        if not all(a < b for a, b in zip(self.knots, self.knots[1:], strict=False)):
            reject("knots", repr(self.knots), "strictly rising entropies")
        steps = [b - a for a, b in zip(self.values, self.values[1:], strict=False)]
        if min(steps) < 0.0 < max(steps):
            reject("values", repr(self.values), "values that only rise or only fall", "fit with Curve.fit")

    @classmethod
    def fit(cls, entropy: Any, beta: Any, knots: int = 12, increasing: bool = True) -> Curve:
        """Isotonic regression of β on entropy, thinned to `knots` points at equal shares of the data."""
        x, y = np.asarray(entropy, dtype=np.float64).ravel(), np.asarray(beta, dtype=np.float64).ravel()
        if x.shape != y.shape or x.size < 2 or not (np.isfinite(x).all() and np.isfinite(y).all()):
            reject("entropy, beta", f"{x.size} and {y.size} values", "equally many finite numbers, two or more")
        if knots < 2:
            reject("knots", knots, "2 or more")
        isotonic = require("scipy.optimize", "fit", "Curve.fit").isotonic_regression
        ends = np.unique(np.quantile(x, np.linspace(0.0, 1.0, knots)))
        if ends.size < 2:
            reject("entropy", f"{x.size} equal values", "at least two different entropies")
        # A curve has one value per entropy: rows that share theirs count together.
        x, place, share = np.unique(x, return_inverse=True, return_counts=True)
        smooth = isotonic(np.bincount(place, y) / share, weights=share, increasing=increasing).x
        # Interpolation rounds, and one unit in the last place is enough to break the order.
        in_order = np.maximum if increasing else np.minimum
        values = in_order.accumulate(np.interp(ends, x, smooth))
        return cls(tuple(float(v) for v in ends), tuple(float(v) for v in values))

    @property
    def fitted_range(self) -> tuple[float, float]:
        """The first and last knot."""
        return self.knots[0], self.knots[-1]

    def describe(self) -> str:
        """The rule in one line."""
        (x0, x1), (y0, y1) = self.fitted_range, (self.values[0], self.values[-1])
        return f"β from {y0:g} at H = {x0:g} to {y1:g} at H = {x1:g}, {len(self.knots)} knots, flat outside"

    def rule(self, xp: Any, stats: RowStats, remeasure: Remeasure | None) -> Array:
        """From the left, each pair of neighbouring knots speaks for everything above the first of them."""
        h = stats.entropy
        beta = 0.0 * h + self.values[0]  # a NaN stays one
        for x0, x1, y0, y1 in zip(self.knots, self.knots[1:], self.values, self.values[1:], strict=False):
            along = xp.at_most((h - x0) / (x1 - x0), 1.0)
            beta = xp.where(h > x0, y0 + (y1 - y0) * along, beta)
        return beta
