"""The paper's rule: β as a polynomial of the row's entropy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from sharpmax.arrays import Array
from sharpmax.errors import reject
from sharpmax.policies.base import Checks, Policy, Remeasure, check_range, number, numbers

if TYPE_CHECKING:
    from sharpmax.stats.statistics import RowStats

Outside = Literal["clamp", "extrapolate"]


@dataclass(frozen=True)
class Polynomial(Policy):
    """β(H) = max(1, c₀·Hᵈ + … + c_d) for rows with entropy H above `threshold`, else 1.

    Coefficients come **highest power first**. For entropies outside `fitted_on`, β is that of the nearest end
    (`outside_is="clamp"`) or the polynomial is extrapolated (`outside_is="extrapolate"`).

    >>> round(float(PAPER.value_at(4.0)), 3)
    2.389
    """

    kind: ClassVar[str] = "polynomial"
    needs: ClassVar[frozenset[str]] = frozenset({"entropy"})
    reads: ClassVar[str] = "entropy"
    checks: ClassVar[Checks] = {
        "coefficients": numbers("a tuple of one or more numbers, highest power first"),
        "fitted_on": check_range,
        "threshold": number(at_least=0.0),
    }

    coefficients: tuple[float, ...]
    fitted_on: tuple[float, float]
    threshold: float = 0.5
    outside_is: Outside = "clamp"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.outside_is not in ("clamp", "extrapolate"):
            reject("outside_is", repr(self.outside_is), "'clamp' or 'extrapolate'")

    @classmethod
    def fit(cls, entropy: Any, beta: Any, degree: int = 4, threshold: float = 0.5) -> Polynomial:
        """Least-squares polynomial through pairs of (entropy, best β), as the paper fits its own."""
        x, y = np.asarray(entropy, dtype=np.float64).ravel(), np.asarray(beta, dtype=np.float64).ravel()
        if x.shape != y.shape or x.size <= degree:
            reject("entropy, beta", f"{x.size} and {y.size} values", f"equally many, more than the degree {degree}")
        if (different := np.unique(x).size) <= degree:
            reject("entropy", f"{different} different values", f"more different ones than the degree {degree}")
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            reject("entropy, beta", "values that are not finite", "finite numbers", "drop such rows first")
        coefficients = np.polynomial.Polynomial.fit(x, y, degree).convert().coef[::-1]
        return cls(tuple(float(c) for c in coefficients), (float(x.min()), float(x.max())), threshold)

    @property
    def fitted_range(self) -> tuple[float, float]:
        """The range of entropies, in nats, that the polynomial was fitted on."""
        return self.fitted_on

    @property
    def acts_on(self) -> tuple[float, float] | None:
        """The lowest and highest entropy at which β exceeds 1 (∞ if it never stops), or None if it never does."""
        crossings = np.roots([*self.coefficients[:-1], self.coefficients[-1] - 1.0])
        changes = {*crossings[np.isreal(crossings)].real.tolist(), *self.fitted_on}
        starts = [self.threshold, *sorted(h for h in changes if h > self.threshold)]
        pieces = list(zip(starts, [*starts[1:], np.inf], strict=True))
        # Between two changes β stays on one side of 1, so one point decides for the whole piece.
        acting = [piece for piece in pieces if self.value_at(min(piece[0] + 1.0, sum(piece) / 2.0)) > 1.0]
        return (acting[0][0], acting[-1][1]) if acting else None

    def value_at(self, entropy: Any) -> Any:
        """β at the given entropies (numpy)."""
        h = np.asarray(entropy, dtype=np.float64)
        inside = np.clip(h, *self.fitted_on) if self.outside_is == "clamp" else h
        return np.where(h > self.threshold, np.maximum(1.0, np.polyval(self.coefficients, inside)), 1.0)

    def describe(self) -> str:
        degree = len(self.coefficients) - 1
        terms = [
            f"{c:+g}" + (f"·H^{p}" if p > 1 else "·H" if p else "")
            for p, c in zip(range(degree, -1, -1), self.coefficients, strict=True)
        ]
        return f"β = max(1, {' '.join(terms).lstrip('+')}) for H > {self.threshold:g}, {self.outside_is} outside"

    def outside(self, values: Array, stats: RowStats) -> Array:
        """Rows below the threshold have β = 1 by definition, so they are never outside."""
        low, high = self.fitted_on
        return ((values < low) | (values > high)) & (values > self.threshold) & (stats.count > 1)

    def rule(self, xp: Any, stats: RowStats, remeasure: Remeasure | None) -> Array:
        entropy = stats.entropy
        low, high = self.fitted_on
        h = xp.at_most(xp.at_least(entropy, low), high) if self.outside_is == "clamp" else entropy
        beta = xp.zeros_like(h)
        for c in self.coefficients:
            beta = beta * h + c
        # "1 if H ≤ threshold", not "polynomial if H > threshold": a NaN entropy has to give NaN.
        return xp.where(entropy <= self.threshold, xp.ones_like(beta), xp.at_least(beta, 1.0))


PAPER = Polynomial(
    coefficients=(-0.037, 0.481, -2.3, 4.917, -1.791),
    # The paper does not say which entropies it was fitted on. Its β exceeds 1 only up to H = 5.9445. This range ends
    # there, so that a warning reports rows beyond it, which are not sharpened.
    fitted_on=(0.5, 5.9445),
    threshold=0.5,
    outside_is="extrapolate",
)
"""The polynomial of "Softmax is not Enough (for Sharp Size Generalisation)", as published."""
