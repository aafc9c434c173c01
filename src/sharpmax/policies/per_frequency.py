"""One β per rotary frequency: a scaling of the query that every engine can hold in its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from sharpmax.arrays import Array
from sharpmax.errors import UnsupportedError, reject
from sharpmax.policies.base import Policy, Remeasure, check_number
from sharpmax.policies.basic import Constant

if TYPE_CHECKING:
    from sharpmax.stats.statistics import RowStats


@dataclass(frozen=True)
class PerFrequency(Policy):
    """A logit is a sum over rotary frequencies; the part of frequency i is multiplied by `values[i]`.

    Query dimensions i and i + D/2 share a frequency (the layout of Llama, Qwen, Mistral and Gemma in transformers), so
    both are multiplied by `values[i]`: D/2 numbers for a head of size D. Equal values are `Constant`. Only the query is
    scaled, never a bias, a cap or a sink, so an applied policy and a folded one compute the same. Row statistics are
    those of the scaled query.

    >>> PerFrequency((0.8, 1.0, 1.5)).describe()
    'β per rotary frequency, 0.8 … 1.5 (3 frequencies)'
    """

    kind: ClassVar[str] = "per-frequency"
    needs: ClassVar[frozenset[str]] = frozenset()

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.values, (tuple, list)) or not self.values:
            reject("values", repr(self.values), "a tuple of one or more numbers, one per rotary frequency")
        object.__setattr__(self, "values", tuple(check_number("values", one, at_least=0.0) for one in self.values))

    @property
    def is_identity(self) -> bool:
        """True if every β is 1."""
        return all(value == 1.0 for value in self.values)

    def describe(self) -> str:
        """The rule in one line."""
        return f"β per rotary frequency, {min(self.values):g} … {max(self.values):g} ({len(self.values)} frequencies)"

    def rule(self, xp: Any, stats: RowStats, remeasure: Remeasure | None) -> Array:
        """Refused: a row has no single β."""
        raise UnsupportedError(
            "policy: a β per rotary frequency scales the query, and logits alone have none; "
            "use it in attention, decode or a model"
        )


def query_factors(policies: Sequence[Policy]) -> list[list[float]] | None:
    """What `PerFrequency` policies multiply the query by, `[heads][D]`, 1 in other heads; None without any.

    `policies` are those of a layer: one per head, or one for all heads.
    """
    sizes = {len(one.values) for one in policies if isinstance(one, PerFrequency)}
    if len(sizes) > 1:
        reject("policy", f"heads of {sorted(sizes)} rotary frequencies", "as many in every head of a layer")
    if not sizes:
        return None
    (size,) = sizes
    return [2 * list(one.values if isinstance(one, PerFrequency) else [1.0] * size) for one in policies]


def check_frequencies(given: int, width: int) -> None:
    """Refuse factors for heads of another size; one factor goes with any."""
    if given not in (1, width):
        reject("policy", f"{given // 2} rotary frequencies for heads of size {width}", f"{width // 2} frequencies")


def without_frequencies(policies: Sequence[Policy]) -> tuple[Policy, ...]:
    """The policies that remain once `query_factors` has multiplied the query."""
    return tuple(Constant(1.0) if isinstance(one, PerFrequency) else one for one in policies)


def constant_factors(policies: Sequence[Policy]) -> list[list[float]]:
    """β `[heads][1]` of constants, or `[heads][D]` if some are `PerFrequency`: what a weight can hold."""
    wrong = next((one for one in policies if not isinstance(one, (Constant, PerFrequency))), None)
    if wrong is not None:
        reject("policy", wrong.describe(), "constants, or a β per rotary frequency")
    factors = query_factors(policies) or [[1.0]] * len(policies)
    constants = [one.value if isinstance(one, Constant) else 1.0 for one in policies]
    return [[beta * factor for factor in row] for beta, row in zip(constants, factors, strict=True)]
