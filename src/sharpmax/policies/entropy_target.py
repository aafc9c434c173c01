"""β solved per row for a target entropy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from sharpmax.arrays import Array
from sharpmax.errors import reject
from sharpmax.policies.base import Checks, Policy, Remeasure, check_number, number

if TYPE_CHECKING:
    from sharpmax.stats.statistics import RowStats

_TOLERANCE = 1e-6
_STEPS = 24


@dataclass(frozen=True)
class EntropyTarget(Policy):
    """The β at which the row's entropy is `target` nats; rows whose entropy is already lower get β = `floor`.

    `floor` is 1 by default. With a floor below 1, rows sharper than the target are flattened towards it. `ceiling`
    bounds β if the target cannot be reached (exact ties at the top).

    H(β) = target is solved in u = ln β, where dH/du = −Var[β·s], by Newton steps inside a bracket, which is halved when
    a step leaves it. Each step measures the rows again. First and second derivatives are those of the solution.

    >>> EntropyTarget(0.5).describe()
    'β such that H = 0.5 nat, 1 ≤ β ≤ 10000'
    """

    kind: ClassVar[str] = "entropy-target"
    needs: ClassVar[frozenset[str]] = frozenset({"entropy", "var"})
    checks: ClassVar[Checks] = {"target": number(at_least=0.0), "floor": number(above=0.0)}

    target: float
    floor: float = 1.0
    ceiling: float = 1e4

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "ceiling", check_number("ceiling", self.ceiling, above=self.floor))

    def describe(self) -> str:
        return f"β such that H = {self.target:g} nat, {self.floor:g} ≤ β ≤ {self.ceiling:g}"

    def rule(self, xp: Any, stats: RowStats, remeasure: Remeasure | None) -> Array:
        """Safeguarded Newton in ln β, with the gradient from the implicit function theorem."""
        if remeasure is None:
            reject(
                "remeasure", None, "a function that measures the rows at another β", "use sm.attention or sm.softmax"
            )
        entropy, var = xp.stop_gradient(stats.entropy), xp.stop_gradient(stats.var)
        target, floor, ceiling = (xp.param(v, entropy) for v in (self.target, self.floor, self.ceiling))
        low = xp.zeros_like(entropy) + xp.log(floor)
        high = xp.zeros_like(entropy) + xp.log(ceiling)
        u = xp.zeros_like(entropy)
        settled = _settled(xp, entropy, target, u, low, high)
        for _ in range(_STEPS):
            above = entropy > target
            low, high = xp.where(above, u, low), xp.where(above, high, u)
            newton = u + (entropy - target) / xp.at_least(var, 1e-30)
            inside = (newton > low) & (newton < high)
            u = xp.where(settled, u, xp.where(inside, newton, 0.5 * (low + high)))
            now = remeasure(xp.exp(u))
            entropy, var = xp.stop_gradient(now.entropy), xp.stop_gradient(now.var)
            settled = _settled(xp, entropy, target, u, low, high)
            if xp.concrete(settled) and bool(settled.all()):
                break
        u = xp.at_most(xp.at_least(u, xp.log(floor)), xp.log(ceiling))
        # One more Newton step, with u constant and gradients into the logits. Its value is the solution, and its
        # derivative −(∂H/∂s)/(∂H/∂u) that of the solution. Rows at an end of the range have no derivative.
        step, slope, free = _newton(xp, remeasure, u, target)
        if not xp.concrete(step) or getattr(step, "requires_grad", True):
            # A solution accurate to 1e-6 has derivatives of that accuracy. One more step makes it 1e-12.
            u = u + xp.stop_gradient(step)
            step, slope, free = _newton(xp, remeasure, u, target)
            step = step + _bend(xp, step, slope, xp.where(free, remeasure(xp.exp(u + step)).var, 1.0))
        polished = u + step
        polished = xp.at_most(xp.at_least(polished, xp.log(floor)), xp.log(ceiling))
        # A row of NaN fails every comparison above and would get a finite β.
        return xp.where(xp.isnan(stats.entropy), math.nan, xp.exp(polished))


def _newton(xp: Any, remeasure: Remeasure, u: Array, target: Array) -> tuple[Array, Array, Array]:
    """The Newton step from a u close to the solution, −dH/du there, and which rows have a slope."""
    now = remeasure(xp.exp(u))
    free = xp.stop_gradient(now.var) > 1e-12
    slope = xp.where(free, now.var, 1.0)
    step = xp.where(free, (now.entropy - target) / slope, 0.0)
    return xp.where(abs(xp.stop_gradient(step)) < 1e-2, step, 0.0), slope, free


def _bend(xp: Any, step: Array, slope: Array, slope_there: Array) -> Array:
    """The correction that gives a Newton step the second derivative of the solution. Value and first derivative are 0.

    The exact step divides H − target by the mean slope along the step; Newton takes the slope at its start. Half the
    change of slope, times a step of value 0, has the missing second derivative and no first derivative.
    """
    bend = -0.5 * step * (slope_there - slope) / slope
    return bend - xp.stop_gradient(bend)


def _settled(xp: Any, entropy: Array, target: Array, u: Array, low: Array, high: Array) -> Array:
    """Rows that need no further step: on target, held at an end of the range, or NaN."""
    at_floor = (entropy <= target) & (u <= low)
    at_ceiling = (entropy > target) & (u >= high)
    return (abs(entropy - target) < _TOLERANCE) | at_floor | at_ceiling | (high - low < 1e-9) | xp.isnan(entropy)
