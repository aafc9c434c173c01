"""`PerHead`: one policy for each head of each layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from sharpmax.arrays import Array
from sharpmax.errors import reject, reject_type
from sharpmax.policies.base import Policy, Remeasure, with_columns

if TYPE_CHECKING:
    from sharpmax.stats.statistics import RowStats


@dataclass(frozen=True)
class PerHead(Policy):
    """`policies[layer][head]`. Rows are `[..., H, Lq]`: heads are the axis before the rows.

    Heads with policies of the same kind are computed together.

    >>> from sharpmax.policies import Constant
    >>> PerHead.of(Constant, value=[[1.0, 2.0]])
    PerHead(1 layer × 2 heads, kinds: constant, 1 head left alone)
    """

    kind: ClassVar[str] = "per-head"

    policies: tuple[tuple[Policy, ...], ...]

    def __post_init__(self) -> None:
        grid = self.policies
        shape = "a tuple of layers, each a tuple of one policy per head"
        if not isinstance(grid, (tuple, list)) or not grid:
            reject("policies", repr(grid), shape)
        for layer in grid:
            if not isinstance(layer, (tuple, list)) or not layer:
                reject("policies", repr(layer), shape)
            for policy in layer:
                if not isinstance(policy, Policy) or isinstance(policy, PerHead):
                    reject_type("policies", type(policy).__name__, "any policy but PerHead itself")
        widths = {len(layer) for layer in grid}
        if len(widths) > 1:
            reject("policies", f"layers of {sorted(widths)} heads", "the same number of heads in every layer")
        object.__setattr__(self, "policies", tuple(tuple(layer) for layer in grid))

    @classmethod
    def of(cls, kind: type[Policy], **parameters: Sequence[Sequence[Any]]) -> PerHead:
        """Policies of one kind, with parameters given as `[layer][head]` grids."""
        if not parameters:
            reject("parameters", "none", f"one or more of {[f.name for f in dataclasses.fields(kind)]}")
        try:
            shapes = {name: [len(row) for row in grid] for name, grid in parameters.items()}
        except TypeError:
            reject_type("parameters", repr(parameters), "a grid [layer][head] of values for each")
        first = next(iter(shapes.values()))
        if any(shape != first for shape in shapes.values()):
            reject("parameters", f"grids of shapes {shapes}", "grids of the same shape, [layer][head]")
        return cls(
            tuple(
                tuple(kind(**{name: grid[i][j] for name, grid in parameters.items()}) for j in range(heads))
                for i, heads in enumerate(first)
            )
        )

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset().union(*(policy.needs for layer in self.policies for policy in layer), {"count"})

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.policies)

    @property
    def heads(self) -> int:
        """Number of heads per layer."""
        return len(self.policies[0])

    @property
    def is_identity(self) -> bool:
        return all(policy.is_identity for layer in self.policies for policy in layer)

    @property
    def modified_heads(self) -> int:
        """Number of heads whose policy is not the identity."""
        return sum(not policy.is_identity for layer in self.policies for policy in layer)

    def for_layer(self, index: int) -> PerHead:
        """The policy of one layer."""
        if not -self.layers <= index < self.layers:
            reject("index", index, f"0 … {self.layers - 1}")
        return PerHead((self.policies[index],))

    def describe(self) -> str:
        flat = [policy for layer in self.policies for policy in layer]
        kinds = ", ".join(sorted({policy.kind for policy in flat}))
        still = len(flat) - self.modified_heads
        alone = f", {still} head{'s' * (still != 1)} left alone" if still else ""
        return f"{self.layers} layer{'s' * (self.layers != 1)} × {self.heads} heads, kinds: {kinds}{alone}"

    def __repr__(self) -> str:
        return f"PerHead({self.describe()})"

    def warn_outside(self, stats: RowStats, warned: set[Any] | None = None) -> None:
        if self.layers == 1 and stats.count.ndim >= 2 and stats.count.shape[-2] == self.heads:
            for head, policy in enumerate(self.policies[0]):
                policy.warn_outside(of_head(stats, head), warned)

    def rule(self, xp: Any, stats: RowStats, remeasure: Remeasure | None) -> Array:
        """β of all heads: at once if their policies are of one kind, else head by head."""
        if self.layers != 1:
            reject("policy", self.describe(), "the policy of one layer", "choose it with policy.for_layer(index)")
        rows = tuple(stats.count.shape)
        if len(rows) < 2 or rows[-2] != self.heads:
            reject("policy", f"{self.heads} heads for rows of shape {rows}", "rows [..., H, Lq] with as many heads")
        together = stack_heads(xp, self.policies[0], xp.cast(stats.count, xp.widest))
        if together is not None:
            return together.rule(xp, stats, remeasure)
        betas = []
        for head, policy in enumerate(self.policies[0]):
            one = None if remeasure is None else _remeasure_head(xp, remeasure, stats, head)
            betas.append(policy.rule(xp, of_head(stats, head), one))
        return xp.stack([xp.cast(beta, xp.widest) for beta in betas], -2)


def of_head(stats: RowStats, head: int) -> RowStats:
    """The rows of one head. An array with a single head serves all."""
    return stats.map(lambda array: array[..., min(head, array.shape[-2] - 1), :])


def _remeasure_head(xp: Any, remeasure: Remeasure, stats: RowStats, head: int) -> Remeasure:
    def one(beta: Array) -> RowStats:
        ones = xp.ones_like(xp.cast(stats.count, beta.dtype))
        here = (xp.positions(stats.count.shape[-2], beta) == head)[:, None]
        return of_head(remeasure(xp.where(here, beta[..., None, :], ones)), head)

    return one


def stack_heads(xp: Any, policies: tuple[Policy, ...], like: Array) -> Policy | None:
    """One policy with columns of all heads' numbers in its fields; None if more than numbers differ."""
    first = policies[0]
    if any(type(policy) is not type(first) for policy in policies):
        return None
    columns: dict[str, Any] = {}
    for field in dataclasses.fields(first):
        values = [getattr(policy, field.name) for policy in policies]
        if all(value == values[0] for value in values):
            continue
        if isinstance(values[0], float):
            columns[field.name] = xp.param([[v] for v in values], like)
        elif all(isinstance(value, tuple) and len(value) == len(values[0]) for value in values):
            columns[field.name] = tuple(xp.param([[value[i]] for value in values], like) for i in range(len(values[0])))
        else:
            return None
    return with_columns(first, columns)


def check_shape(policy: Policy, layers: Sequence[int], model: str) -> None:
    """Refuse a grid of policies for another architecture. `layers` holds the number of heads of each layer."""
    if not isinstance(policy, PerHead):
        return
    if policy.layers != len(layers) or any(heads != policy.heads for heads in layers):
        found = f"{len(layers)} × {'/'.join(str(h) for h in sorted(set(layers)))}"
        reject(
            "policy",
            f"{policy.layers} layers × {policy.heads} heads",
            f"{found}, the attention layers × heads of {model}",
            "calibrate a policy for this model",
        )
