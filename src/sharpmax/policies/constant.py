"""The same inverse temperature for every row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from sharpmax.arrays import Array
from sharpmax.policies.base import Policy, Remeasure, check_number

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
