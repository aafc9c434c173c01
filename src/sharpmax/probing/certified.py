"""The certified horizon: from weights alone, the number of tokens beyond which no input stays sharp."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from sharpmax.errors import UnsupportedError, reject
from sharpmax.integrations.transformers.application import policy_of
from sharpmax.integrations.transformers.projections import exact
from sharpmax.models.language import context_of
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import Constant, Curve
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.log_linear import LogLinear
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.polynomial import Polynomial
from sharpmax.probing.projections import Family, LayerProjections, Side, family_of, layers_of
from sharpmax.theory.rotary import common_basis, spread_from_rotary
from sharpmax.theory.spread import spread_from_weights, spread_over_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def ceilings_of(policy: Policy | None, layer: int, heads: int) -> list[float]:
    """The largest β in each head of a layer."""
    if policy is None:
        return [1.0] * heads
    if isinstance(policy, PerHead):
        return [beta_ceiling(one) for one in policy.policies[layer]]
    return [beta_ceiling(policy)] * heads


def beta_ceiling(policy: Policy) -> float:
    """The largest β of a policy for one head; a constant's own value, though it may be under 1.

    >>> from sharpmax.policies import PAPER
    >>> beta_ceiling(Constant(0.5)), round(beta_ceiling(PAPER), 3)
    (0.5, 2.421)
    """
    if isinstance(policy, Constant):
        return policy.value
    if isinstance(policy, Curve):
        return max(policy.values)
    if isinstance(policy, LogLinear):
        level = math.exp(min(max(policy.level, math.log(policy.floor)), math.log(policy.ceiling)))
        return policy.ceiling if policy.needs else level
    if isinstance(policy, EntropyTarget):
        return policy.ceiling
    if isinstance(policy, Polynomial):
        return _highest(policy)
    raise UnsupportedError(
        f"policy: {policy.describe()} has no largest β, so that no number of tokens can be certified; "
        "allowed: policies with a ceiling"
    )


def _highest(policy: Polynomial) -> float:
    low, high = policy.fitted_on if policy.outside_is == "clamp" else (policy.threshold, math.inf)
    slopes = np.polynomial.Polynomial(policy.coefficients[::-1]).deriv()
    if math.isinf(high) and slopes(1e9) > 0:
        raise UnsupportedError(
            f"policy: {policy.describe()} grows with the entropy and so with the number of tokens, so that none can be "
            "certified; allowed: policies with a ceiling"
        )
    turns = slopes.roots()
    where = [low, *(end for end in (high,) if math.isfinite(end)), *turns[np.isreal(turns)].real]
    inside = [h for h in where if low <= h <= high]
    return max(1.0, *(float(np.polyval(policy.coefficients, h)) for h in inside))


_AT_ONCE = 1 << 21
"""Pairs of a token and a position that are held at a time."""


@dataclass(frozen=True, eq=False)
class Embeddings:
    """All that a first layer can be given: the vector of a token, plus that of a position where these are learned."""

    tokens: Tensor
    positions: Tensor | None

    @classmethod
    def of(cls, model: PreTrainedModel, family: Family) -> Embeddings | None:
        """Those of a model, or None where it does more with them than is known here."""
        table: Any = model.get_input_embeddings()
        if not isinstance(table, nn.Embedding) or table.embedding_dim != model.config.hidden_size:
            return None
        with torch.no_grad():
            # Some tables scale what they give.
            tokens = exact(table(torch.arange(table.num_embeddings, device=table.weight.device)))
        positions: Tensor | None = None
        for name, part in model.named_modules():
            if isinstance(part, nn.Embedding) and name.endswith(family.positions or ("-",)):
                more = exact(part.weight)
                positions = more if positions is None else (positions[:, None] + more).flatten(0, 1)
        return cls(tokens, positions)


def spread_of_first_layer(layer: LayerProjections, given: Embeddings) -> list[float]:
    """A bound on the spread of each head over every text there is."""
    if given.positions is None:
        return [_over_tokens(layer, given.tokens, head) for head in range(layer.heads)]
    return [_over_sums(layer, given.tokens, given.positions, head) for head in range(layer.heads)]


def _over_tokens(layer: LayerProjections, tokens: Tensor, head: int) -> float:
    sides = (layer.query, layer.key)
    # Where lengths alone count, they are safe without epsilon, even if a model scales its embeddings elsewhere.
    lengths = 2 * layer.pairs == layer.query.bounded()[0].shape[1] and not any(side.constant for side in sides)
    queries, keys = (side.of(tokens, head, 0.0 if lengths else None).numpy() for side in sides)
    return spread_over_inputs(queries, keys, layer.scale, pairs=layer.pairs)


def _over_sums(layer: LayerProjections, tokens: Tensor, positions: Tensor, head: int) -> float:
    """2·scale·max‖F q‖·max‖G k‖ over all queries and keys, in the basis in which they meet evenly.

    It holds as q·k = (F q)·(G k); and as F and G come from the whole ball, it never exceeds the bound of the ball.
    """
    query, key = layer.query, layer.key
    left = torch.cat((query.matrix[head] * query.ball.radius, query.bias[head, :, None]), 1)
    right = key.matrix[head] * key.ball.radius
    of_query, of_key = common_basis(torch, left, right)
    # A constant in the keys moves all logits of a row alike.
    longest_query = _longest(query, of_query @ query.matrix[head], of_query @ query.bias[head], tokens, positions)
    still = torch.zeros(len(of_key), dtype=torch.float64)
    longest_key = _longest(key, of_key @ key.matrix[head], still, tokens, positions)
    return 2.0 * layer.scale * longest_query * longest_key


def _longest(side: Side, matrix: Tensor, bias: Tensor, tokens: Tensor, positions: Tensor) -> float:
    """The largest ‖matrix·z + bias‖ over z, the normalised sum of any token and any position."""
    ball = side.ball
    by_position = positions - positions.mean(1, keepdim=True) if ball.centred else positions
    through_position, width = by_position @ matrix.T, positions.shape[1]
    best = 0.0
    for some in torch.split(tokens, max(1, _AT_ONCE // len(positions))):
        by_token = some - some.mean(1, keepdim=True) if ball.centred else some
        through_token = by_token @ matrix.T
        deviation = (_squares(by_token, by_position) / width + ball.epsilon).clamp_min(1e-300).sqrt()
        linear = (through_token @ bias)[:, None] + through_position @ bias
        square = _squares(through_token, through_position) / deviation**2 + 2.0 * linear / deviation
        best = max(best, float(square.max() + bias.square().sum()))
    return math.sqrt(max(best, 0.0))


def _squares(tokens: Tensor, positions: Tensor) -> Tensor:
    """‖t + p‖² of every pair."""
    return (tokens.square().sum(1)[:, None] + 2.0 * tokens @ positions.T + positions.square().sum(1)).clamp_min(0.0)


REACH = 10
"""A certificate is informative if it speaks of inputs of up to so many times the context the model was made for."""

_UNKNOWN_CONTEXT = 100_000
_ROUNDING = 1.0 + 1e-9
"""What the arithmetic of the bounds themselves, in float64, may round away."""


@dataclass(frozen=True)
class HeadCertificate:
    """The certified horizon of one head."""

    layer: int
    head: int
    spread: float
    """A bound on the largest minus the smallest logit of any row, in nats, the ceiling of a policy included."""

    by: str  # the argument that gave it
    bounds: Mapping[str, float]  # what every argument gave
    log10_tokens: float  # the decimal logarithm of the certified horizon
    reach: int
    """The most tokens a row will ever see: `REACH` contexts, a sliding window, or the table of learned positions."""

    @property
    def informative(self) -> bool:
        """Whether a row could ever see as many tokens as the horizon; a certificate that is not is vacuous."""
        return self.log10_tokens <= math.log10(self.reach)

    @property
    def tokens(self) -> int | None:
        """The certified horizon, or None where it is vacuous: among more visible tokens no key holds the mass."""
        return math.floor(10.0**self.log10_tokens * _ROUNDING) if self.informative else None


@dataclass(frozen=True)
class Certificate:
    """The certified horizons of every head of a model."""

    family: str
    mass: float
    context: int | None
    policy: str | None
    heads: tuple[HeadCertificate, ...]

    def of_layer(self, number: int) -> tuple[HeadCertificate, ...]:
        """The heads of one layer."""
        return tuple(one for one in self.heads if one.layer == number)

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return 1 + max(one.layer for one in self.heads)

    @property
    def informative(self) -> tuple[HeadCertificate, ...]:
        """The heads whose certificate is not vacuous."""
        return tuple(one for one in self.heads if one.informative)

    def median_by(self) -> dict[str, float]:
        """The median over heads of what each argument gave, where it speaks."""
        names = dict.fromkeys(name for one in self.heads for name in one.bounds)
        found = {name: [one.bounds[name] for one in self.heads if name in one.bounds] for name in names}
        return {name: statistics.median(values) for name, values in found.items()}


def certify(
    model: PreTrainedModel, mass: float = 0.5, progress: Callable[[int, int], None] | None = None
) -> Certificate:
    """The certified horizon of every head of a transformers model, for the policy applied to it, if any.

    `mass` is the weight p that no key can hold beyond the horizon. A family without a certificate, and a policy without
    a largest β, are refused. `progress` is called with the layers done and the layers in all.
    """
    if not isinstance(mass, float) or not 0.0 < mass < 1.0:
        reject("mass", repr(mass), "a number strictly between 0 and 1")
    policy, context = policy_of(model), context_of(model)
    layers, kind = layers_of(model), str(model.config.model_type)
    embeddings = Embeddings.of(model, family_of(kind))
    learned = embeddings is not None and embeddings.positions is not None
    longest = (1 if learned else REACH) * (context or _UNKNOWN_CONTEXT)
    heads: list[HeadCertificate] = []
    for done, layer in enumerate(layers):
        if progress is not None:
            progress(done, len(layers))
        reach = min(longest, layer.window or longest)
        bounds, bias = _bounds(layer, embeddings), layer.bias_spread.tolist()
        for head, beta in enumerate(ceilings_of(policy, layer.number, layer.heads)):
            found = {name: beta * (values[head] + bias[head]) * _ROUNDING for name, values in bounds.items()}
            by = min(found, key=lambda name: found[name])
            tokens = _log10_horizon(found[by], mass)
            heads.append(HeadCertificate(layer.number, head, found[by], by, found, tokens, reach))
    described = None if policy is None or policy.is_identity else policy.describe()
    return Certificate(kind, mass, context, described, tuple(heads))


def _bounds(layer: LayerProjections, embeddings: Embeddings | None) -> dict[str, list[float]]:
    """The bound of every argument for the heads of a layer, before biases by distance and policies."""
    (query, query_norm, query_bias), (key, key_norm, key_bias) = layer.query.bounded(), layer.key.bounded()
    found = {
        # A bias is a column that meets an input which is always 1.
        "norms": spread_from_weights(
            torch.cat((query, query_bias[..., None]), -1),
            torch.cat((key, key_bias[..., None]), -1),
            math.hypot(query_norm, 1.0),
            math.hypot(key_norm, 1.0),
            layer.scale,
        ).tolist(),
        "blocks": spread_from_rotary(
            query, key, query_norm, key_norm, layer.scale, pairs=layer.pairs, query_bias=query_bias, key_bias=key_bias
        ).tolist(),
    }
    if layer.first and embeddings is not None:
        found["vocabulary"] = spread_of_first_layer(layer, embeddings)
    if layer.cap is not None:
        smallest = (min(values) for values in zip(*found.values(), strict=True))
        # A tanh spreads most what lies evenly around 0.
        found["cap"] = [2.0 * layer.cap * math.tanh(spread / 2.0 / layer.cap) for spread in smallest]
    return found


def _log10_horizon(spread: float, mass: float) -> float:
    """log₁₀(1 + e^spread·(1 − p)/p), which itself may leave float64."""
    odds = spread + math.log1p(-mass) - math.log(mass)
    return (odds + math.log1p(math.exp(-odds)) if odds > 0 else math.log1p(math.exp(odds))) / math.log(10.0)
