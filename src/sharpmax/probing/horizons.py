"""Horizons: the number of tokens beyond which no token holds a given share of the weight of a head.

A certified horizon holds for every input and follows from the weights alone. Queries and keys are linear maps of the
output of a normalisation, whose norm is bounded, and rotary positions do not change norms. That bounds the spread of
the logits of any row (`theory.spread_from_weights`), and the spread bounds the weight of one key among n
(`theory.horizon`).

A measured horizon is where the top weight of a head, in the last row and averaged over prompts, falls below that share
and stays below it. It is an estimate and says nothing about other inputs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
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
from sharpmax.policies.basic import Constant, Curve, PerFrequency
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.log_linear import LogLinear
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.polynomial import Polynomial
from sharpmax.probing.measurement import finite_or_none, fit, measure, task_inputs
from sharpmax.theory.bounds import spread_from_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

REACH = 10
"""A certificate is informative if its horizon is at most this many times the context of the model."""

_UNKNOWN_CONTEXT = 100_000
_ROUNDING = 1.0 + 1e-9
"""Covers the rounding errors of computing the bounds in float64."""

FAMILIES = ("gemma", "gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3")
"""Values of `config.model_type` with an RMSNorm, `input_layernorm`, before each attention module."""


@dataclass(frozen=True)
class HeadCertificate:
    """The certified horizon of one head."""

    layer: int
    head: int
    spread: float
    """A bound on the largest minus the smallest logit of any row, in nats, times the largest β of a policy."""

    log10_tokens: float  # log₁₀ of the certified horizon, which may exceed float64
    reach: int
    """The most tokens a row can see: `REACH` contexts, or a sliding window."""

    @property
    def informative(self) -> bool:
        """Whether a row can see as many tokens as the horizon. Otherwise the certificate is vacuous."""
        return self.log10_tokens <= math.log10(self.reach)

    @property
    def tokens(self) -> int | None:
        """The certified horizon: no key holds the mass among more visible tokens. None if it is vacuous."""
        return math.floor(10.0**self.log10_tokens * _ROUNDING) if self.informative else None


@dataclass(frozen=True)
class Certificate:
    """The certified horizons of every head of a model."""

    family: str
    mass: float
    context: int | None
    heads: tuple[HeadCertificate, ...]


def certify(
    model: PreTrainedModel, mass: float = 0.5, progress: Callable[[int, int], None] | None = None
) -> Certificate:
    """Certify the horizon of every head of a transformers model, including the policy applied to it, if any.

    `mass` is the weight that no key can hold beyond the horizon. `progress` is called with the number of layers done
    and the number of layers. Raises UnsupportedError for other families and for policies without a largest β.
    """
    if not isinstance(mass, float) or not 0.0 < mass < 1.0:
        reject("mass", repr(mass), "a number strictly between 0 and 1")
    policy, context, kind = policy_of(model), context_of(model), str(model.config.model_type)
    if kind not in FAMILIES:
        raise UnsupportedError(
            f"model: horizons of the family {kind!r} cannot be certified; allowed: {', '.join(FAMILIES)}"
        )
    parts, modules = dict(model.named_modules()), modules_of(model)
    longest = REACH * (context or _UNKNOWN_CONTEXT)
    # YaRN multiplies queries and keys by this factor.
    rotary = [vars(part) for name, part in parts.items() if name.endswith("rotary_emb")]
    turned = [float(of[name]) ** 2 for of in rotary for name in of if name.endswith("attention_scaling")]
    heads: list[HeadCertificate] = []
    for layer, one in enumerate(modules):
        if progress is not None:
            progress(layer, len(modules))
        around = next(name for name, part in parts.items() if part is one.module).rpartition(".")[0]
        spreads = _spreads(one, parts[f"{around}.input_layernorm"], f"layer {layer} of {kind}") * max(
            turned, default=1.0
        )
        # Mistral has one window for all layers.
        window = getattr(one.config if kind == "mistral" else one.module, "sliding_window", None)
        reach = min(longest, window) if isinstance(window, int) and window > 0 else longest
        policies = policy.policies[layer] if isinstance(policy, PerHead) else [policy] * one.heads
        for head, each in enumerate(policies):
            beta = 1.0 if each is None else beta_ceiling(each)
            spread = beta * float(spreads[head]) * _ROUNDING
            # ln(1 + e^spread·(1 − p)/p); the horizon itself may overflow.
            log_tokens = float(np.logaddexp(0.0, spread + math.log1p(-mass) - math.log(mass)))
            heads.append(HeadCertificate(layer, head, spread, log_tokens / math.log(10.0), reach))
    return Certificate(kind, mass, context, tuple(heads))


def _spreads(one: AttentionModule, norm: nn.Module, where: str) -> Tensor:
    """A bound on the spread of the logits of each head `[heads]`, before a policy."""
    query, key = projections(one, where)
    query_map, query_norm = _linear_map(query, getattr(one.module, "q_norm", None), norm, where)
    key_map, key_norm = _linear_map(key, getattr(one.module, "k_norm", None), norm, where)
    if len(key_map) > 1:  # several heads may share their keys
        key_map = key_map.repeat_interleave(one.heads // len(key_map), 0)
    scale: Any = one.module.scaling
    spread: Tensor = spread_from_weights(query_map, key_map, query_norm, key_norm, scale)
    return spread.expand(one.heads)


def _linear_map(projection: Projection, own: nn.Module | None, outer: nn.Module, where: str) -> tuple[Tensor, float]:
    """Return queries or keys as a linear map `[heads, D, d + 1]` of (z, 1), and the largest norm of (z, 1).

    z has norm √d after a normalisation: `outer` before the projection, or the module's `own` after it.
    """
    norm: Any = own or outer
    if not type(norm).__name__.endswith("RMSNorm"):
        raise UnsupportedError(
            f"model: {where} has a normalisation {type(norm).__name__}, for which there is no bound; allowed: RMSNorm"
        )
    # Gemma stores the gain minus 1.
    gain = exact(norm.weight) + (1.0 if type(norm).__name__.startswith("Gemma") else 0.0)
    if own is None:
        matrix, bias = projection.matrix() * gain, projection.bias()
    else:
        matrix, bias = torch.diag(gain)[None], gain.new_zeros(1, len(gain))
    return torch.cat((matrix, bias[..., None]), -1), math.sqrt(len(gain) + 1)


def beta_ceiling(policy: Policy) -> float:
    """Return the largest β that a policy can give one head. Raises UnsupportedError if there is none.

    >>> from sharpmax.policies import PAPER
    >>> beta_ceiling(Constant(0.5)), round(beta_ceiling(PAPER), 3)
    (0.5, 2.421)
    """
    if isinstance(policy, Constant):
        return policy.value
    if isinstance(policy, Curve):
        return max(policy.values)
    if isinstance(policy, PerFrequency):
        return max(1.0, *policy.values)  # a bias is not scaled
    if isinstance(policy, (EntropyTarget, LogLinear)):
        return policy.ceiling
    if isinstance(policy, Polynomial):
        low, high = policy.fitted_on if policy.outside_is == "clamp" else (policy.threshold, math.inf)
        slopes = np.polynomial.Polynomial(policy.coefficients[::-1]).deriv()
        if math.isfinite(high) or slopes(1e9) <= 0:
            turns = slopes.roots()
            where = [low, *turns[np.isreal(turns)].real, *([high] if math.isfinite(high) else [])]
            return max(1.0, *(float(np.polyval(policy.coefficients, h)) for h in where if low <= h <= high))
    raise UnsupportedError(
        f"policy: {policy.describe()} has no largest β, so horizons cannot be certified; "
        "allowed: policies with a ceiling"
    )


KINDS = ("before", "at", "beyond")
"""Where a measured horizon lies: before the shortest prompt, at a number of keys, or beyond the longest prompt."""

LONGEST = 1024
"""The longest prompts measured, in tokens. Longer ones take minutes on a CPU; `sharpmax probe` reads them."""

_TASK = "kv"


@dataclass(frozen=True)
class MeasuredHead:
    """Measurements of one head; `low` and `high` are a 95% interval, None where it ends before or beyond."""

    layer: int
    head: int
    spread: float  # the mean spread of the logits in the longest prompts, in nats
    widest: float  # the largest spread in any prompt
    slope: float | None  # of entropy against ln n: 1 for uniform weights, 0 for none; None where n did not grow
    slope_low: float | None
    slope_high: float | None
    kind: str  # one of `KINDS`
    tokens: float | None  # the measured horizon, where `kind` is "at"
    low: float | None
    high: float | None


@dataclass(frozen=True)
class MeasuredHorizons:
    """Measurements of every head on the prompts of a task."""

    mass: float
    task: str
    sizes: tuple[int, ...]
    prompts: int
    shortest: int  # keys of the shortest and of the longest row
    longest: int
    heads: tuple[MeasuredHead, ...]


def measure_horizons(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    mass: float = 0.5,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> MeasuredHorizons:
    """Measure the horizon of every head, with 95% intervals, on prompts of the task kv of up to `LONGEST` tokens."""
    inputs = task_inputs(_TASK, tokenizer, context_of(model), seed=seed)
    short = {size: ones for size, ones in inputs.passages.items() if ones[0].length <= LONGEST}
    if len(short) < 2:
        given = f"{_TASK} prompts of {[ones[0].length for ones in inputs.passages.values()]} tokens"
        allowed = f"prompts of two sizes that fit, up to {LONGEST}"
        reject("model", given, allowed, "certify it alone (--certified-only)")
    inputs, done = replace(inputs, passages=short), itertools.count(1)

    def after(size: int) -> None:
        if progress is not None:
            progress(next(done), inputs.reads)

    readings = measure(model, inputs, "last", after)
    curves, slopes, horizons = fit(readings, nested=False, mass=mass, seed=seed)
    spread, widest = curves["spread"][-1], np.max([one["spread"].max(0) for one in readings.values()], axis=0)
    heads = []
    for layer, head in np.argwhere(np.isfinite(spread)).tolist():  # NaN where a layer has fewer heads than others
        at = layer, head
        rise, rise_low, rise_high = (finite_or_none(one[at]) for one in slopes)
        tokens, low, high = (finite_or_none(one[at]) for one in horizons)
        kind = "at" if tokens is not None else "before" if horizons[0][at] < 0 else "beyond"
        spreads = float(spread[at]), float(widest[at])
        heads.append(MeasuredHead(layer, head, *spreads, rise, rise_low, rise_high, kind, tokens, low, high))
    counts = [one["count"] for one in readings.values()]
    ends = int(np.nanmin(counts[0])), int(np.nanmax(counts[-1]))
    return MeasuredHorizons(mass, _TASK, tuple(readings), inputs.reads, *ends, tuple(heads))
