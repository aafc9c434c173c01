"""The certified horizon: from weights alone, a number of tokens beyond which no input keeps a head sharp.

A head whose logits spread over at most δ nats gives no key more than 1/(1 + (n − 1)·e^−δ) of its weight, so that beyond
n = 1 + e^δ·(1 − p)/p keys none holds p (`sharpmax.theory.horizon`). Here δ is bounded for every input whatever, by
several arguments that all hold, of which the smallest counts:

- `norms`: the product of the spectral norms of queries and keys, over the ball that normalisation leaves;
- `blocks`: how queries and keys are aligned, over the same ball, pair by pair where positions turn them
  (`sharpmax.theory.rotary`);
- `vocabulary`: in the first layer, every token there is, and every position where positions are learned;
- `cap`: logits that a tanh caps.

All of this is about exact arithmetic; a model's own rounding comes on top.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sharpmax.errors import reject
from sharpmax.hf.application import policy_of
from sharpmax.models.language import context_of
from sharpmax.probe.horizons.ceilings import ceilings_of
from sharpmax.probe.horizons.families import family_of
from sharpmax.probe.horizons.projections import Layer, layers_of
from sharpmax.probe.horizons.vocabulary import Embeddings, spread_of_first_layer
from sharpmax.theory import spread_from_rotary, spread_from_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["REACH", "Certificate", "HeadCertificate", "certify"]

REACH = 10
"""A certificate is informative if it speaks of inputs of up to so many times the context the model was made for."""

_UNKNOWN_CONTEXT = 100_000
_ROUNDING = 1.0 + 1e-9
"""What the arithmetic of the bounds themselves, in float64, may round away."""


@dataclass(frozen=True)
class HeadCertificate:
    """What is certain about one head."""

    layer: int
    head: int
    spread: float
    """A bound on the largest minus the smallest logit of any row, in nats, the ceiling of a policy included."""

    by: str
    """The argument that gave it."""

    bounds: Mapping[str, float]
    """What every argument gave."""

    log10_tokens: float
    """The decimal logarithm of the certified horizon."""

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
    """What is certain about every head of a model."""

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
    a largest β, are refused. `progress` is told how many layers of how many are done.
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


def _bounds(layer: Layer, embeddings: Embeddings | None) -> dict[str, list[float]]:
    """What every argument says of the heads of a layer, before biases by distance and policies."""
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
