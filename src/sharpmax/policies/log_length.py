"""β that grows with the logarithm of the number of visible keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from sharpmax.arrays import Array
from sharpmax.policies.base import Policy, Remeasure, check_number, check_range

if TYPE_CHECKING:
    from sharpmax.stats.statistics import RowStats


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
