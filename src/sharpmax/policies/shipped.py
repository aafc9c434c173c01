"""Temperature rules that public models ship: their names, their formulas, and the one a configuration asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from sharpmax.arrays import Array
from sharpmax.errors import UnsupportedError, reject
from sharpmax.policies.base import Policy, Remeasure, check_number
from sharpmax.policies.basic import Constant, LogLength
from sharpmax.policies.per_head import PerHead

if TYPE_CHECKING:
    from sharpmax.stats.statistics import RowStats


@dataclass(frozen=True)
class LogScale(Policy):
    """β = bias + scale·ln(max(1, n/reference)), n being the keys the row can see.

    With `steps`, β = bias + scale·ln(1 + ⌊(n − shift)/reference⌋): it rises once per `reference` tokens. In causal
    attention a row at position i, counted from 0, sees n = i + 1 keys; rules that read i itself have a `shift` of 1.

    - Scalable-Softmax (SSMax): scale s per head, reference 1, bias 0 or b
    - Llama 4: scale 0.1, reference 8192, steps; Ministral 3 and Mistral 4: likewise with shift 1
    - Inkling: scale α, reference `log_scaling_n_floor`; Qwen2.5-1M: scale 0.1, reference 262144. Qwen2.5-1M's engine
      gives all rows of a prompt the β of its last one.

    >>> LogScale(0.1, 8192.0, steps=True).describe()
    'β = 1 + 0.1·ln(1 + ⌊n/8192⌋)'
    >>> LogScale(0.4, bias=0.0).describe()
    'β = 0.4·ln n'
    """

    kind: ClassVar[str] = "log-scale"
    needs: ClassVar[frozenset[str]] = frozenset({"count"})

    scale: float
    reference: float = 1.0
    bias: float = 1.0
    steps: bool = False
    shift: float = 0.0

    def __post_init__(self) -> None:
        for name in ("scale", "bias", "shift"):
            object.__setattr__(self, name, check_number(name, getattr(self, name)))
        object.__setattr__(self, "reference", check_number("reference", self.reference, at_least=1.0))
        if not isinstance(self.steps, bool):
            reject("steps", repr(self.steps), "True or False")
        if self.shift and not self.steps:
            reject("shift", self.shift, "0 without steps")

    @property
    def is_identity(self) -> bool:
        """Whether β is 1 for every number of keys."""
        return (self.scale, self.bias) == (0.0, 1.0)

    def describe(self) -> str:
        """The rule in one line."""
        n = "n" if not self.shift else f"(n − {self.shift:g})"
        inside = n if self.reference == 1.0 else f"{n}/{self.reference:g}"
        grows = f"ln(1 + ⌊{inside}⌋)" if self.steps else f"ln⁺({inside})" if inside != "n" else "ln n"
        return "β = " + (f"{self.bias:g} + " if self.bias else "") + f"{self.scale:g}·{grows}"

    def rule(self, xp: Any, stats: RowStats, remeasure: Remeasure | None) -> Array:
        """bias + scale·ln of the length in units of the reference."""
        n = xp.cast(xp.at_least(stats.count, 1), xp.widest)
        if self.steps:
            return self.bias + self.scale * xp.log1p(xp.library.floor((n - self.shift) / self.reference))
        return self.bias + self.scale * xp.log(xp.at_least(n / self.reference, 1.0))


def yarn(factor: float) -> Constant:
    """YaRN's constant (1 + 0.1·ln factor)², for a model whose rotary positions do not have it yet.

    >>> yarn(4.0).describe()
    'β = 1.29648'
    """
    return Constant((1.0 + 0.1 * math.log(check_number("factor", factor, at_least=1.0))) ** 2)


BY_NUMBER: Mapping[str, tuple[Callable[[float], Policy], float | None]] = MappingProxyType(
    {
        "constant": (Constant, None),
        "log-length": (LogLength, None),
        "ssmax": (lambda scale: LogScale(scale, bias=0.0), None),
        "llama4": (lambda reference: LogScale(0.1, reference, steps=True), 8192.0),
        "ministral3": (lambda reference: LogScale(0.1, reference, steps=True, shift=1.0), 16384.0),
        "inkling": (lambda reference: LogScale(0.1, reference), None),
        "qwen2.5-1m": (lambda reference: LogScale(0.1, reference), 262144.0),
        "qwen": (LogLength, 8192.0),
        "grok2": (LogLength, 1024.0),
        "yarn": (yarn, None),
    }
)
"""Rules with one number: how a policy is made of it, and the number of the published model where there is one."""


def from_config(config: Any) -> Policy | None:
    """The temperature rule that a model's configuration asks for; None if it has none.

    `config` is the configuration of a transformers model, or any object with the same attributes. Known are the rules
    of Llama 4 (the layers without rotary positions), Ministral 3 and Mistral 4, Inkling (the full-attention layers),
    Qwen (`use_logn_attn`), Qwen2.5-1M (`dual_chunk_attention_config`) and Grok-2 (`attn_temperature_len`). A constant
    in the rotary positions (YaRN, LongRoPE) is part of the model's logits, which every policy multiplies, and no rule.

    The models count positions and policies count visible keys: with left padding Llama 4 counts the padding too.
    """
    config = getattr(config, "text_config", None) or config

    def read(name: str) -> Any:
        return getattr(config, name, None)

    rotary = read("rope_parameters") or {}
    if read("attn_temperature_tuning"):
        rule = LogScale(float(read("attn_scale")), float(read("floor_scale")), steps=True)
        return _in_layers(config, rule, [not rotary for rotary in read("no_rope_layers")])
    if rotary.get("llama_4_scaling_beta"):
        if read("sliding_window"):
            raise UnsupportedError(
                "config: llama_4_scaling_beta with sliding_window scales by position, which a row of a window does not "
                "show; allowed: sliding_window=None"
            )
        length = float(rotary["original_max_position_embeddings"])
        return LogScale(float(rotary["llama_4_scaling_beta"]), length, steps=True, shift=1.0)
    if read("log_scaling_n_floor"):
        rule = LogScale(float(read("log_scaling_alpha")), float(read("log_scaling_n_floor")))
        return _in_layers(config, rule, ["sliding" not in kind for kind in read("layer_types")])
    if read("use_logn_attn"):
        return LogLength(float(read("seq_length")))
    if read("dual_chunk_attention_config"):
        return LogScale(0.1, float(read("dual_chunk_attention_config")["original_max_position_embeddings"]))
    if read("attn_temperature_len"):
        return LogLength(float(read("attn_temperature_len")))
    return None


def _in_layers(config: Any, rule: Policy, there: list[bool]) -> Policy:
    """A rule in some layers of a model and β = 1 in the others."""
    heads = config.num_attention_heads
    return rule if all(there) else PerHead(tuple((rule if here else Constant(),) * heads for here in there))
