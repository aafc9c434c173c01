"""Policies whose coefficients are trained, by calibration or together with the weights (`learnable`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sharpmax.arrays import ops_for
from sharpmax.errors import reject
from sharpmax.integrations.transformers.application import apply, restore
from sharpmax.integrations.transformers.attention import OutputGain
from sharpmax.integrations.transformers.interface import install, modules_of, restoring
from sharpmax.ops.sharpen import QueryScale, Rule
from sharpmax.policies.base import Policy, Remeasure, with_columns
from sharpmax.policies.basic import Constant, LogScale, OutputScale, PerFrequency
from sharpmax.policies.log_linear import LogLinear
from sharpmax.policies.per_head import PerHead
from sharpmax.stats.statistics import RowStats

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FREQUENCY = "frequency"
"""The kind with one β per rotary frequency of every head."""

OUTPUT = "output"
"""The kind with a scale of every head's output, as in SEAL."""

BOTH = f"{FREQUENCY}+{OUTPUT}"

KINDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        FREQUENCY: (),
        "constant": ("level",),
        "length": ("level", "length"),
        "entropy": ("level", "length", "entropy", "entropy2", "entropy_length"),
        "rows": LogLinear.COEFFICIENTS,
        OUTPUT: (),
        BOTH: (),
    }
)
"""Each kind with its coefficients of `LogLinear` per head; kinds without any learn factors."""

FOLDABLE = (FREQUENCY, "constant")
"""The kinds that can be folded into the weights."""

SSMAX = "ssmax"
LEARNABLE = (*KINDS, SSMAX)
"""The kinds of `learnable`: those of calibration, and the s of SSMax."""

PARAMETER = "sharpmax_policy"
"""The name of the coefficients among the parameters of the model."""

_MAX_LOG_FACTOR = 3.0
_SSMAX_START = 0.43  # the initial value of Scalable-Softmax
_DIGITS = 5

_INTERLEAVED = ("cohere", "cohere2", "codegen", "ernie4_5", "glm", "glm4", "gptj", "helium", "llama4_text")
"""Models that rotate neighbouring dimensions together; `PerFrequency` assumes pairs that are half a head apart."""


def policy_from(kind: str, coefficients: Tensor, strength: float = 1.0) -> PerHead:
    """The policy of `coefficients` `[layers, heads, coefficients of the kind]`; ln β is multiplied by `strength`.

    Coefficients are rounded here, so that the policy equals the one read back from its file.
    """
    grid = (coefficients.detach().cpu().double() * strength).tolist()
    return PerHead(tuple(tuple(_policy_of_head(kind, head) for head in layer) for layer in grid))


def _policy_of_head(kind: str, values: list[float]) -> Policy:
    if kind == SSMAX:
        return LogScale(round(values[0], _DIGITS), bias=0.0)
    if kind in (FREQUENCY, OUTPUT, BOTH):
        factors = [round(math.exp(min(max(one, -_MAX_LOG_FACTOR), _MAX_LOG_FACTOR)), 4) for one in values]
        if kind == FREQUENCY:
            return PerFrequency(tuple(factors))
        scale = factors.pop()
        return OutputScale(scale, PerFrequency(tuple(factors))) if kind == BOTH else OutputScale(scale)
    policy = LogLinear(**{name: round(value, _DIGITS) for name, value in zip(KINDS[kind], values, strict=True)})
    if kind not in FOLDABLE:
        return policy
    level = min(max(policy.level, math.log(policy.floor)), math.log(policy.ceiling))
    return Constant(round(math.exp(level), _DIGITS))


def grid_of(model: PreTrainedModel) -> tuple[int, int]:
    """The number of layers and the number of heads per layer."""
    heads = [one.heads for one in modules_of(model)]
    if len(set(heads)) > 1:
        reject("model", f"layers of {sorted(set(heads))} heads", "a model with as many heads in every layer")
    return len(heads), heads[0]


def frequencies_of(model: PreTrainedModel) -> int:
    """The number of rotary frequencies per head; 0 unless there is one for every two dimensions of a head."""
    config = model.config.get_text_config()
    rotary = getattr(config, "rope_parameters", None) or {}
    if not rotary or getattr(config, "model_type", "") in _INTERLEAVED:
        return 0
    share = getattr(config, "partial_rotary_factor", None) or rotary.get("partial_rotary_factor") or 1.0
    width = getattr(config, "head_dim", None) or int(config.hidden_size) // int(config.num_attention_heads)
    return int(width) // 2 if share == 1.0 else 0


class TrainablePolicy:
    """Trainable coefficients `[layers, heads, coefficients of the kind]`, and a mask of the heads they modify.

    With `shared` all heads of a layer have the same coefficients. Those of the kind `frequency` are ln β of each
    rotary frequency. The logarithm of an output scale is the last coefficient.
    """

    def __init__(self, model: PreTrainedModel, kind: str, *, shared: bool = False) -> None:
        layers, self.heads = grid_of(model)
        self.kind = kind
        frequencies = frequencies_of(model)
        counts = {FREQUENCY: frequencies, OUTPUT: 1, BOTH: frequencies + 1, SSMAX: 1}
        shape = layers, 1 if shared else self.heads, counts.get(kind) or len(KINDS[kind])
        start = _SSMAX_START if kind == SSMAX else 0.0
        self.coefficients = torch.full(shape, start, device=model.device, requires_grad=True)
        self.modified = torch.ones(shape[:2], dtype=torch.bool, device=model.device)

    def values(self) -> Tensor:
        """The coefficients, `[layers, heads, coefficients of the kind]`, with 0 in heads that are not modified."""
        return (self.coefficients * self.modified[..., None]).expand(-1, self.heads, -1)

    @contextmanager
    def installed(self, model: PreTrainedModel) -> Iterator[None]:
        """Let the coefficients choose β in the model's attention inside the block."""
        with restoring(model):
            install(model, self.rules)
            yield

    def factors(self, layer: int) -> Tensor:
        """exp(coefficients) of one layer, `[heads, coefficients of the kind]`."""
        return self.values()[layer].clamp(-_MAX_LOG_FACTOR, _MAX_LOG_FACTOR).exp()

    def rules(self, layer: int) -> Sequence[Rule | QueryScale | OutputGain]:
        """The rules of one layer."""
        scale, gain = _LayerScale(self, layer), _LayerGain(self, layer)
        factors: dict[str, list[Any]] = {FREQUENCY: [scale], OUTPUT: [gain], BOTH: [scale, gain]}
        return factors[self.kind] if self.kind in factors else [_LayerRule(self, layer)]


@dataclass(eq=False)
class _LayerScale(QueryScale):
    """The β per frequency of one layer."""

    trainable: TrainablePolicy
    layer: int

    def factors(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """β of every dimension of a head; two dimensions share a frequency."""
        beta = self.trainable.factors(self.layer).to(device, dtype)
        beta = beta[:, :-1] if self.trainable.kind == BOTH else beta
        return torch.cat([beta, beta], dim=-1)[:, None]


@dataclass(eq=False)
class _LayerGain(OutputGain):
    """The output scales of one layer."""

    trainable: TrainablePolicy
    layer: int

    def factors(self, device: torch.device) -> Tensor:
        """The last coefficient of every head."""
        return self.trainable.factors(self.layer)[:, -1].to(device)


@dataclass(eq=False)
class _LayerRule:
    """The rule of one layer with coefficients of `LogLinear` or of SSMax."""

    trainable: TrainablePolicy
    layer: int
    needs: frozenset[str] = field(init=False)
    heads = None

    def __post_init__(self) -> None:
        self.needs = self._policy(self.trainable.coefficients.device).needs

    def _policy(self, device: torch.device) -> Policy:
        columns = self.trainable.values()[self.layer].to(device)  # layers may be on several devices
        if self.trainable.kind == SSMAX:
            return with_columns(LogScale(1.0, bias=0.0), {"scale": columns})
        return with_columns(
            LogLinear(), {name: columns[:, i, None] for i, name in enumerate(KINDS[self.trainable.kind])}
        )

    def beta(self, stats: RowStats, remeasure: Remeasure | None) -> Tensor:
        """β of every row, 1 in rows of one key. Only the coefficients get a gradient.

        A gradient through the statistics would take as long as attention itself, and would only add how earlier layers
        change the statistics of later ones.
        """
        detached = stats.map(torch.detach)
        count = detached.count
        beta: Tensor = self._policy(count.device).rule(ops_for(count), detached, None)
        return beta.masked_fill(count <= 1, 1.0) if self.trainable.kind == SSMAX else beta


class LearnablePolicy:
    """A policy whose coefficients, `[layers, heads, coefficients]`, are a parameter of the model.

    Optimizers, checkpoints (`state_dict`) and several devices treat it as any other weight. `policy()` is the
    policy learned so far; `finish()` removes the parameter and applies that policy.
    """

    def __init__(self, model: PreTrainedModel, kind: str) -> None:
        if kind not in LEARNABLE:
            reject("kind", repr(kind), f"one of {list(LEARNABLE)}")
        if kind in (FREQUENCY, BOTH) and not frequencies_of(model):
            reject("kind", f"{kind!r} for a {type(model).__name__}", "a model with rotary frequencies", "constant")
        self.model, self.kind = model, kind
        trainable = TrainablePolicy(model, kind)
        trainable.coefficients = self.parameter = nn.Parameter(trainable.coefficients.detach())
        install(model, trainable.rules)
        model.register_parameter(PARAMETER, self.parameter)

    def policy(self) -> PerHead:
        """The policy learned so far, rounded to five digits."""
        return policy_from(self.kind, self.parameter)

    def remove(self) -> None:
        """Remove the parameter and its rules from the model."""
        delattr(self.model, PARAMETER)
        restore(self.model)

    def finish(self) -> PerHead:
        """Replace the parameter by the learned policy, and return the policy; constants can then be folded."""
        found = self.policy()
        self.remove()
        apply(self.model, found)
        return found

    def __repr__(self) -> str:
        return f"LearnablePolicy(kind={self.kind!r}, layers × heads = {' × '.join(map(str, self.parameter.shape[:2]))})"


def learnable(model: PreTrainedModel, kind: str) -> LearnablePolicy:
    """Give every head of a transformers model a policy whose coefficients train with the weights.

    `kind` is "frequency" (one β per rotary frequency), "constant", "length", "entropy" or "rows" (coefficients of
    `LogLinear`), all starting at β = 1, or "ssmax" (β = s·ln n, starting at s = 0.43). Call it before the optimizer is
    created. It replaces a policy applied before.

    >>> import sharpmax as sm  # doctest: +SKIP
    >>> learned = sm.learnable(model, "ssmax")  # doctest: +SKIP
    >>> policy = learned.finish()  # doctest: +SKIP
    """
    return LearnablePolicy(model, kind)
