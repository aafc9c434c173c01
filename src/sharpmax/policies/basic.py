"""Simple rules: constants (per row, frequency or output), logarithms of the length, and a curve over entropy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from sharpmax.arrays import Array
from sharpmax.errors import UnsupportedError, reject, reject_type
from sharpmax.policies.base import Checks, Policy, Remeasure, check_range, number, numbers

if TYPE_CHECKING:
    from sharpmax.stats.statistics import RowStats


@dataclass(frozen=True)
class Constant(Policy):
    """β = value in every row. `Constant(1)` changes nothing.

    >>> Constant(2.0).describe()
    'β = 2'
    """

    kind: ClassVar[str] = "constant"
    needs: ClassVar[frozenset[str]] = frozenset()
    checks: ClassVar[Checks] = {"value": number(at_least=0.0)}

    value: float = 1.0

    @property
    def is_identity(self) -> bool:
        return self.value == 1.0

    def describe(self) -> str:
        return f"β = {self.value:g}"

    def rule(self, xp: Any, stats: RowStats, remeasure: Remeasure | None) -> Array:
        return xp.ones_like(xp.cast(stats.count, xp.widest)) * self.value


IDENTITY = Constant(1.0)
"""The policy that changes nothing."""


@dataclass(frozen=True)
class PerFrequency(Policy):
    """One β per rotary frequency: the part of each logit with frequency i is multiplied by `values[i]`.

    Query dimensions i and i + D/2 share a frequency (the layout of Llama, Qwen, Mistral and Gemma in transformers), so
    both are multiplied by `values[i]`; a head of size D has D/2 values. With equal values it is `Constant`. Only the
    query is scaled, never a bias, a cap or a sink, so applied and folded policies compute the same. Row statistics are
    those of the scaled query.

    >>> PerFrequency((0.8, 1.0, 1.5)).describe()
    'β per rotary frequency, 0.8 … 1.5 (3 frequencies)'
    """

    kind: ClassVar[str] = "per-frequency"
    needs: ClassVar[frozenset[str]] = frozenset()
    checks: ClassVar[Checks] = {
        "values": numbers("a tuple of one or more numbers, one per rotary frequency", at_least=0.0)
    }

    values: tuple[float, ...]

    @property
    def is_identity(self) -> bool:
        return all(value == 1.0 for value in self.values)

    def describe(self) -> str:
        return f"β per rotary frequency, {min(self.values):g} … {max(self.values):g} ({len(self.values)} frequencies)"

    def __repr__(self) -> str:
        return f"PerFrequency({self.describe()})"

    def rule(self, xp: Any, stats: RowStats, remeasure: Remeasure | None) -> Array:
        raise UnsupportedError(
            "policy: a β per rotary frequency scales the query, and logits alone have none; "
            "use it in attention, decode or a model"
        )


def query_factors(policies: Sequence[Policy]) -> list[list[float]] | None:
    """The factors `[heads][D]` of the query in a layer with `PerFrequency` policies, 1 in other heads; else None.

    `policies` has one policy per head, or one for all heads.
    """
    sizes = {len(one.values) for one in policies if isinstance(one, PerFrequency)}
    if len(sizes) > 1:
        reject("policy", f"heads of {sorted(sizes)} rotary frequencies", "as many in every head of a layer")
    if not sizes:
        return None
    (size,) = sizes
    return [2 * list(one.values if isinstance(one, PerFrequency) else [1.0] * size) for one in policies]


def check_frequencies(given: int, width: int) -> None:
    """Refuse factors for heads of another size. A single factor fits any size."""
    if given > 1 and given != width:  # not `in (1, width)`, as the width may be symbolic
        reject("policy", f"{given // 2} rotary frequencies for heads of size {width}", f"{width // 2} frequencies")


def without_frequencies(policies: Sequence[Policy]) -> tuple[Policy, ...]:
    """The policies that remain after the query was multiplied by `query_factors`."""
    return tuple(IDENTITY if isinstance(one, PerFrequency) else one for one in policies)


def constant_factors(policies: Sequence[Policy]) -> list[list[float]]:
    """The factors that a weight can hold: β `[heads][1]` of constants, or `[heads][D]` with `PerFrequency`."""
    wrong = next((one for one in policies if not isinstance(one, (Constant, PerFrequency))), None)
    if wrong is not None:
        reject("policy", wrong.describe(), "constants, or a β per rotary frequency")
    factors = query_factors(policies) or [[1.0]] * len(policies)
    constants = [one.value if isinstance(one, Constant) else 1.0 for one in policies]
    return [[beta * factor for factor in row] for beta, row in zip(constants, factors, strict=True)]


@dataclass(frozen=True)
class OutputScale(Policy):
    """Multiply the output of a head by `scale`, as SEAL (arXiv 2501.15225) does. `policy` chooses β.

    Only transformers models have an output to scale: use it with `sharpmax.apply`.

    >>> OutputScale(1.2, Constant(1.5)).describe()
    'output × 1.2, β = 1.5'
    """

    kind: ClassVar[str] = "output-scale"
    checks: ClassVar[Checks] = {"scale": number(at_least=0.0)}

    scale: float
    policy: Policy = IDENTITY

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.policy, Policy) or isinstance(self.policy, OutputScale):
            reject_type("policy", type(self.policy).__name__, "a policy that chooses β")

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return self.policy.needs

    @property
    def is_identity(self) -> bool:
        return self.scale == 1.0 and self.policy.is_identity

    def describe(self) -> str:
        return f"output × {self.scale:g}, {self.policy.describe()}"

    def rule(self, xp: Any, stats: RowStats, remeasure: Remeasure | None) -> Array:
        raise UnsupportedError(NO_OUTPUT)


NO_OUTPUT = "policy: a scale of a head's output acts only in a transformers model; use sharpmax.apply(model, policy)"


@dataclass(frozen=True)
class LogLength(Policy):
    """β = max(floor, ln n / ln reference), where n is the number of visible keys (padding does not count).

    At n = `reference`, usually the largest size in training, β is 1.

    >>> LogLength(reference=16).describe()
    'β = max(1, ln n / ln 16)'
    """

    kind: ClassVar[str] = "log-length"
    needs: ClassVar[frozenset[str]] = frozenset({"count"})
    reads: ClassVar[str] = "count"
    checks: ClassVar[Checks] = {
        "reference": number(above=1.0),
        "floor": number(at_least=0.0),
        "fitted_on": lambda name, value: None if value is None else check_range(name, value),
    }

    reference: float
    floor: float = 1.0
    fitted_on: tuple[float, float] | None = None

    def describe(self) -> str:
        return f"β = max({self.floor:g}, ln n / ln {self.reference:g})"

    def rule(self, xp: Any, stats: RowStats, remeasure: Remeasure | None) -> Array:
        n = xp.cast(xp.at_least(stats.count, 1), xp.widest)
        return xp.at_least(xp.log(n) / xp.log(xp.param(self.reference, n)), self.floor)


@dataclass(frozen=True)
class LogScale(Policy):
    """β = bias + scale·ln(max(1, n/reference)), where n is the number of visible keys.

    With `steps`, β = bias + scale·ln(1 + ⌊(n − shift)/reference⌋), which rises once per `reference` tokens. In causal
    attention the row at position i, counted from 0, sees n = i + 1 keys; rules written in i have `shift` 1.

    - Scalable-Softmax (SSMax): scale s per head, reference 1, bias 0 or b
    - Llama 4: scale 0.1, reference 8192, steps; Ministral 3 and Mistral 4: likewise with shift 1
    - Inkling: scale α, reference `log_scaling_n_floor`; Qwen2.5-1M: scale 0.1, reference 262144. Qwen2.5-1M's engine
      gives all rows of a prompt the β of the last row.

    >>> LogScale(0.1, 8192.0, steps=True).describe()
    'β = 1 + 0.1·ln(1 + ⌊n/8192⌋)'
    >>> LogScale(0.4, bias=0.0).describe()
    'β = 0.4·ln n'
    """

    kind: ClassVar[str] = "log-scale"
    needs: ClassVar[frozenset[str]] = frozenset({"count"})
    checks: ClassVar[Checks] = {
        "scale": number(),
        "bias": number(),
        "shift": number(),
        "reference": number(at_least=1.0),
    }

    scale: float
    reference: float = 1.0
    bias: float = 1.0
    steps: bool = False
    shift: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.steps, bool):
            reject("steps", repr(self.steps), "True or False")
        if self.shift and not self.steps:
            reject("shift", self.shift, "0 without steps")

    @property
    def is_identity(self) -> bool:
        return (self.scale, self.bias) == (0.0, 1.0)

    def describe(self) -> str:
        n = "n" if not self.shift else f"(n − {self.shift:g})"
        inside = n if self.reference == 1.0 else f"{n}/{self.reference:g}"
        grows = f"ln(1 + ⌊{inside}⌋)" if self.steps else f"ln⁺({inside})" if inside != "n" else "ln n"
        return "β = " + (f"{self.bias:g} + " if self.bias else "") + f"{self.scale:g}·{grows}"

    def rule(self, xp: Any, stats: RowStats, remeasure: Remeasure | None) -> Array:
        n = xp.cast(xp.at_least(stats.count, 1), xp.widest)
        if self.steps:
            return self.bias + self.scale * xp.log1p(xp.library.floor((n - self.shift) / self.reference))
        return self.bias + self.scale * xp.log(xp.at_least(n / self.reference, 1.0))


@dataclass(frozen=True)
class Curve(Policy):
    """β as a piecewise linear function of entropy through (`knots`, `values`), constant outside the knots.

    Knots rise strictly; values only rise or only fall.

    >>> Curve(knots=(1.0, 3.0), values=(1.0, 2.0)).describe()
    'β from 1 at H = 1 to 2 at H = 3, 2 knots, flat outside'
    """

    kind: ClassVar[str] = "curve"
    needs: ClassVar[frozenset[str]] = frozenset({"entropy"})
    reads: ClassVar[str] = "entropy"
    checks: ClassVar[Checks] = dict.fromkeys(
        ("knots", "values"), numbers("a tuple of two or more numbers", 2, at_least=0.0)
    )

    knots: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.knots) != len(self.values):
            reject("values", f"{len(self.values)} numbers for {len(self.knots)} knots", "one value per knot")
        if not all(a < b for a, b in zip(self.knots, self.knots[1:], strict=False)):
            reject("knots", repr(self.knots), "strictly rising entropies")
        steps = [b - a for a, b in zip(self.values, self.values[1:], strict=False)]
        if min(steps) < 0.0 < max(steps):
            reject("values", repr(self.values), "values that only rise or only fall")

    @property
    def fitted_range(self) -> tuple[float, float]:
        """The first and last knot."""
        return self.knots[0], self.knots[-1]

    def describe(self) -> str:
        (x0, x1), (y0, y1) = self.fitted_range, (self.values[0], self.values[-1])
        return f"β from {y0:g} at H = {x0:g} to {y1:g} at H = {x1:g}, {len(self.knots)} knots, flat outside"

    def rule(self, xp: Any, stats: RowStats, remeasure: Remeasure | None) -> Array:
        """From left to right, each segment overwrites β for entropies above its first knot."""
        h = stats.entropy
        beta = 0.0 * h + self.values[0]  # NaN stays NaN
        for x0, x1, y0, y1 in zip(self.knots, self.knots[1:], self.values, self.values[1:], strict=False):
            along = xp.at_most((h - x0) / (x1 - x0), 1.0)
            beta = xp.where(h > x0, y0 + (y1 - y0) * along, beta)
        return beta
