"""The certified horizon: from weights alone, the number of tokens beyond which no input stays sharp.

The queries and keys of a head are linear maps of a ball, the outputs of a normalisation. That bounds how far the logits
of any row can spread, and a spread bounds the weight that one of n keys can hold (`sharpmax.theory`).
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from sharpmax.errors import UnsupportedError, reject
from sharpmax.integrations.transformers.application import policy_of
from sharpmax.integrations.transformers.interface import modules_of
from sharpmax.integrations.transformers.projections import Projection, exact, projections
from sharpmax.integrations.transformers.support import AttentionModule
from sharpmax.models.language import context_of
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import Constant, Curve
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.log_linear import LogLinear
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.polynomial import Polynomial
from sharpmax.theory.rotary import spread_from_rotary
from sharpmax.theory.spread import spread_from_weights, spread_over_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
    layers, kind = list(layers_of(model)), str(model.config.model_type)
    longest = (1 if FAMILIES[kind].learned_positions else REACH) * (context or _UNKNOWN_CONTEXT)
    vocabulary = _vocabulary(model)
    heads: list[HeadCertificate] = []
    for done, layer in enumerate(layers):
        if progress is not None:
            progress(done, len(layers))
        reach = min(longest, layer.window or longest)
        bounds, bias = _bounds(layer, vocabulary), layer.bias_spread.tolist()
        for head, beta in enumerate(ceilings_of(policy, layer.number, layer.heads)):
            found = {name: beta * (values[head] + bias[head]) * _ROUNDING for name, values in bounds.items()}
            by = min(found, key=lambda name: found[name])
            tokens = _log10_horizon(found[by], mass)
            heads.append(HeadCertificate(layer.number, head, found[by], by, found, tokens, reach))
    described = None if policy is None or policy.is_identity else policy.describe()
    return Certificate(kind, mass, context, described, tuple(heads))


def _bounds(layer: LayerProjections, tokens: Tensor | None) -> dict[str, list[float]]:
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
    if layer.first and tokens is not None:
        found["vocabulary"] = [_spread_over_vocabulary(layer, tokens, head) for head in range(layer.heads)]
    if layer.cap is not None:
        smallest = (min(values) for values in zip(*found.values(), strict=True))
        # A tanh spreads most what lies evenly around 0.
        found["cap"] = [2.0 * layer.cap * math.tanh(spread / 2.0 / layer.cap) for spread in smallest]
    return found


def _log10_horizon(spread: float, mass: float) -> float:
    """log₁₀(1 + e^spread·(1 − p)/p), which itself may leave float64."""
    odds = spread + math.log1p(-mass) - math.log(mass)
    return float(np.logaddexp(0.0, odds)) / math.log(10.0)


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


@dataclass(frozen=True, eq=False)
class Ball:
    """Every output of a normalisation of d numbers: gain·z + bias with ‖z‖ ≤ √d, and z of mean 0 if `centred`."""

    gain: Tensor
    bias: Tensor
    centred: bool
    epsilon: float

    @classmethod
    def of(cls, norm: nn.Module, where: str) -> Ball:
        """The outputs of a module; UnsupportedError for one that is not known."""
        weight: Any = getattr(norm, "weight", None)
        if isinstance(norm, nn.LayerNorm) and len(norm.normalized_shape) == 1:
            ones = torch.ones(norm.normalized_shape, dtype=torch.float64)
            gain = ones if weight is None else exact(weight)
            bias: Any = norm.bias
            return cls(gain, torch.zeros_like(ones) if bias is None else exact(bias), True, norm.eps)
        epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if isinstance(weight, Tensor) and weight.ndim == 1 and isinstance(epsilon, float):
            gain = exact(weight)
            with torch.no_grad():
                output = exact(norm(torch.ones_like(weight)))
            # Some families store the gain, some the gain minus 1: the output tells which.
            for offset in (0.0, 1.0):
                if torch.allclose(output * math.sqrt(1.0 + epsilon), gain + offset, rtol=1e-2, atol=1e-2):
                    return cls(gain + offset, torch.zeros_like(gain), False, epsilon)
        raise UnsupportedError(
            f"model: {where} has a normalisation {type(norm).__name__} that no certificate knows; "
            "allowed: LayerNorm and RMSNorm with a gain"
        )

    @property
    def radius(self) -> float:
        """The largest ‖z‖."""
        return math.sqrt(len(self.gain))

    def _centred(self, inputs: Tensor) -> Tensor:
        return inputs - inputs.mean(-1, keepdim=True) if self.centred else inputs

    def folded(self, matrix: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """A linear map of the output, matrix `[..., D, d]` and bias `[..., D]`, as one of z."""
        return self._centred(matrix * self.gain), bias + matrix @ self.bias

    def points(self, inputs: Tensor, epsilon: float | None = None) -> Tensor:
        """z for inputs `[..., d]`; with an epsilon of 0 instead of the module's own, z is never shorter."""
        inputs = self._centred(inputs)
        square = inputs.square().mean(-1, keepdim=True) + (self.epsilon if epsilon is None else epsilon)
        return inputs / torch.where(square > 0, square, 1.0).sqrt()


Feed = tuple[str, str, bool]
"""The names of the normalisations whose outputs make the queries and the keys of an attention module, and whether what
they normalise is the embedding of the input and nothing else."""


@dataclass(frozen=True)
class Family:
    """How the models of a family are put together."""

    feed: Callable[[str], Feed | None]  # from the name of an attention module; None where it is not known
    rotary: bool = False
    learned_positions: bool = False  # whether a vector of the position is added to the embedding of a token


def _just_before(norm: str) -> Callable[[str], Feed | None]:
    """A normalisation beside the attention module, in the layer of the last number in its name."""

    def feed(name: str) -> Feed | None:
        layer = re.fullmatch(r"((?:.*\.|)(\d+)\.)[^.\d]+", name)
        return None if layer is None else (layer[1] + norm, layer[1] + norm, layer[2] == "0")

    return feed


def _layer_before(name: str) -> Feed | None:
    """The last normalisation of the layer before, or that of the embeddings."""
    layer = re.fullmatch(r"(.*\.|)encoder\.layer\.(\d+)\.attention\.self", name)
    if layer is None:
        return None
    number = int(layer[2])
    norm = f"{layer[1]}encoder.layer.{number - 1}.output.LayerNorm" if number else f"{layer[1]}embeddings.LayerNorm"
    return norm, norm, number == 0


def _t5(name: str) -> Feed | None:
    layer = re.fullmatch(r"(.*\.|)(encoder|decoder)\.block\.(\d+)\.layer\.\d+\.(SelfAttention|EncDecAttention)", name)
    if layer is None:
        return None
    own = f"{name.rpartition('.')[0]}.layer_norm"
    crossed = layer[4] == "EncDecAttention"
    return own, f"{layer[1]}encoder.final_layer_norm" if crossed else own, not crossed and layer[3] == "0"


_ROTARY = Family(_just_before("input_layernorm"), rotary=True)
_BERT = Family(_layer_before, learned_positions=True)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"), _ROTARY),
        **dict.fromkeys(("gpt_neox", "phi"), _ROTARY),
        "gpt2": Family(_just_before("ln_1"), learned_positions=True),
        "opt": Family(_just_before("self_attn_layer_norm"), learned_positions=True),
        "t5": Family(_t5),
        "bert": _BERT,
        "roberta": _BERT,
    }
)
"""Families by `config.model_type`."""

_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))


@dataclass(frozen=True, eq=False)
class Side:
    """The queries, or the keys, of a layer: matrix·z + bias with z from a ball, then perhaps normalised once more."""

    ball: Ball
    matrix: Tensor  # `[heads, D, d]` in float64, the gain of the normalisation before it included
    bias: Tensor  # `[heads, D]`
    after: Ball | None  # the normalisation of each head, where there is one

    @property
    def constant(self) -> bool:
        """Whether there is anything in it that does not shrink with z."""
        return bool(self.bias.any()) or (self.after is not None and bool(self.after.bias.any()))

    def bounded(self) -> tuple[Tensor, float, Tensor]:
        """Matrix, largest norm of its input and bias: what comes out whatever goes in."""
        if self.after is None:
            return self.matrix, self.ball.radius, self.bias
        width = len(self.after.gain)
        matrix, bias = self.after.folded(torch.eye(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64))
        heads = len(self.matrix)
        return matrix.expand(heads, -1, -1), self.after.radius, bias.expand(heads, -1)

    def of(self, inputs: Tensor, head: int, epsilon: float | None) -> Tensor:
        """What a head makes `[N, D]` of inputs `[N, d]` that are not normalised yet; `epsilon` as in `Ball.points`."""
        made = self.ball.points(inputs, epsilon) @ self.matrix[head].T + self.bias[head]
        if self.after is None:
            return made
        return self.after.points(made, epsilon) * self.after.gain + self.after.bias


@dataclass(frozen=True, eq=False)
class LayerProjections:
    """An attention layer: logits scale·q·k of turned queries and keys, perhaps capped, perhaps with a bias added."""

    number: int
    heads: int
    query: Side
    key: Side
    first: bool  # whether its inputs are normalised embeddings
    scale: float
    pairs: int  # entries i and i + pairs of queries and keys are turned together by their position, for i < pairs
    cap: float | None
    bias_spread: Tensor  # `[heads]`, the largest minus the smallest number that positions add to a logit
    window: int | None  # the most keys a row can see


def layers_of(model: PreTrainedModel) -> Iterator[LayerProjections]:
    """The attention layers of a model, in the order of policies, or an error that says why it has no certificate."""
    kind = str(model.config.model_type)
    if kind not in FAMILIES:
        raise UnsupportedError(
            f"model: no certificate is known for the family {kind!r}; allowed: {', '.join(sorted(FAMILIES))}"
        )
    if getattr(model.config, "do_layer_norm_before", True) is False:
        raise UnsupportedError(
            f"model: this {kind} normalises after attention, so nothing bounds its first layer; allowed: "
            "do_layer_norm_before=True"
        )
    parts = dict(model.named_modules())
    names = {part: name for name, part in parts.items()}
    for number, one in enumerate(modules_of(model)):
        where, name = f"layer {number} of {kind}", names[one.module]
        feed = FAMILIES[kind].feed(name)
        if feed is None or not {feed[0], feed[1]} <= set(parts):
            raise UnsupportedError(
                f"model: what {where} attends to is not known ({name}); allowed: plain self-attention"
            )
        made = projections(one, where)
        query, key = _sides(one, made, [parts[norm] for norm in feed[:2]], where)
        group = one.heads // len(key.matrix)  # several heads may share their keys
        key = replace(key, matrix=key.matrix.repeat_interleave(group, 0), bias=key.bias.repeat_interleave(group, 0))
        width = made[0].rows.shape[1]
        pairs, turned = _rotary(kind, parts.values(), width) if FAMILIES[kind].rotary else (0, 1.0)
        scale = _scale(one, width) * turned
        # Only eager attention caps logits; the others of transformers leave the cap out.
        cap = getattr(one.module, "attn_logit_softcapping", None) if kind == "gemma2" and one.inner == "eager" else None
        # Mistral has one window for all layers.
        window = getattr(one.config if kind == "mistral" else one.module, "sliding_window", None)
        window = window if isinstance(window, int) and window > 0 else None
        bias = _bias_spread(parts, name, one.heads)
        yield LayerProjections(number, one.heads, query, key, feed[2], scale, pairs, cap, bias, window)


def _sides(
    one: AttentionModule, made: Sequence[Projection], norms: Sequence[nn.Module], where: str
) -> tuple[Side, Side]:
    after = next((names for names in _NORMS if hasattr(one.module, names[0])), None)
    sides = []
    for place, (projection, norm) in enumerate(zip(made, norms, strict=True)):
        ball, own = Ball.of(norm, where), None
        if after is not None:
            own = Ball.of(getattr(one.module, after[place]), where)
            if len(own.gain) != projection.rows.shape[1]:
                raise UnsupportedError(
                    f"model: {where} normalises all heads of its queries together; allowed: each alone"
                )
        sides.append(Side(ball, *ball.folded(projection.matrix(), projection.bias()), own))
    return sides[0], sides[1]


def _rotary(kind: str, parts: Iterable[nn.Module], width: int) -> tuple[int, float]:
    """How many pairs turn, and what the rotation multiplies logits by."""
    turning = [part for part in parts if "RotaryEmbedding" in type(part).__name__]
    buffers = [pair for part in turning for pair in part.named_buffers()]
    pairs = {len(tensor) for name, tensor in buffers if name.endswith("inv_freq") and "original" not in name}
    if len(pairs) != 1 or 2 * max(pairs) > width:
        raise UnsupportedError(f"model: how positions turn the queries of {kind} is not known; allowed: one way")
    values = [value for part in turning for name, value in vars(part).items() if name.endswith("attention_scaling")]
    return pairs.pop(), max((float(value) ** 2 for value in values), default=1.0)


def _bias_spread(parts: Mapping[str, nn.Module], name: str, heads: int) -> Tensor:
    """T5 adds a table of numbers by distance, that of the first block of its stack in every self-attention."""
    table = parts.get(f"{name.partition('.block.')[0]}.block.0.layer.0.SelfAttention.relative_attention_bias")
    if not isinstance(table, nn.Embedding) or not name.endswith("SelfAttention"):
        return torch.zeros(heads, dtype=torch.float64)
    weight = exact(table.weight)
    return weight.amax(0) - weight.amin(0)


def _scale(one: AttentionModule, width: int) -> float:
    scaling = getattr(one.module, "scaling", None)
    if isinstance(scaling, float):
        return scaling
    unscaled = "position_bias" in one.arguments or getattr(one.module, "scale_attn_weights", True) is False
    return 1.0 if unscaled else 1.0 / math.sqrt(width)


def _vocabulary(model: PreTrainedModel) -> Tensor | None:
    """All that a first layer can be given, `[tokens, d]`; None where a model does more with it than is known here."""
    table: Any = model.get_input_embeddings()
    known = isinstance(table, nn.Embedding) and table.embedding_dim == model.config.hidden_size
    if not known or FAMILIES[str(model.config.model_type)].learned_positions:
        return None
    with torch.no_grad():
        # Some tables scale what they give.
        return exact(table(torch.arange(table.num_embeddings, device=table.weight.device)))


def _spread_over_vocabulary(layer: LayerProjections, tokens: Tensor, head: int) -> float:
    """A bound on the spread of a head of the first layer over every text there is."""
    sides = (layer.query, layer.key)
    # Where lengths alone count, they are safe without epsilon, even if a model scales its embeddings elsewhere.
    lengths = 2 * layer.pairs == layer.query.bounded()[0].shape[1] and not any(side.constant for side in sides)
    queries, keys = (side.of(tokens, head, 0.0 if lengths else None).numpy() for side in sides)
    return spread_over_inputs(queries, keys, layer.scale, pairs=layer.pairs)
