"""Which models a policy can be applied to, found out before anything is changed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sharpmax.errors import UnsupportedError, reject_type
from sharpmax.lazy import require

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = [
    "INNER",
    "LAYER",
    "NAMES",
    "AttentionModule",
    "attention_modules",
    "check_model",
    "own_attention",
    "require_transformers",
]

LAYER = "_sharpmax_layer"
"""The attribute of an attention module that holds its `Layer` (`sharpmax.hf.attention`) while rules are installed."""

INNER = ("sdpa", "eager")
"""The attention implementations of transformers that a sharpened call is handed on to."""


class _Name(str):
    """The name of an attention of ours. A copy of a configuration, or its pickle, says the one behind it instead."""

    inner: str

    def __new__(cls, name: str, inner: str) -> _Name:
        made = super().__new__(cls, name)
        made.inner = inner
        return made

    def __deepcopy__(self, memo: Any) -> str:
        return self.inner

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.inner,)


# Neither "sdpa" nor "flash" nor a slash may be part of these: transformers reads meaning into them.
NAMES = {"sdpa": _Name("sharpmax", "sdpa"), "eager": _Name("sharpmax-eager", "eager")}
"""What a configuration says instead of each of them while rules are installed."""

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
# What an eager attention function may take; a further argument would be part of the logit in a way unknown here.
_UNDERSTOOD = {
    "module", "query", "key", "value", "attention_mask", "scaling", "dropout", "softcap", "position_bias",
    "sliding_window", "kwargs",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class AttentionModule:
    """A module that calls transformers' attention interface."""

    module: nn.Module
    config: PreTrainedConfig
    heads: int
    inner: str
    """The implementation it uses without a policy, one of `INNER`."""

    function: Callable[..., Any]
    """That implementation."""

    arguments: frozenset[str]
    """What the module's eager attention takes: with `position_bias`, a logit is more than query times key."""


def require_transformers(part: str = "") -> Any:
    """The package transformers or a module of it, or an error that says how to install it."""
    return require(f"transformers.{part}".rstrip("."), "hf", "a policy in a transformers model")


def check_model(model: object) -> PreTrainedModel:
    """`model` as what it has to be."""
    base: type[PreTrainedModel] = require_transformers().PreTrainedModel
    if not isinstance(model, base):
        reject_type(
            "model",
            type(model).__name__,
            "a transformers PreTrainedModel",
            "of a wrapper (PEFT, torch.compile, DDP) pass the model inside",
        )
    return model


def attention_modules(model: PreTrainedModel) -> list[AttentionModule]:
    """Every module of the model that attends, in the order of `model.modules()`, or an error that says why not.

    In a decoder-only model that order is the order of layers, `module.layer_idx`. Encoder–decoder models have the
    encoder's layers first, then each decoder layer's self-attention and cross-attention. A module that several layers
    share (ALBERT) is there once.
    """
    family = type(model).__name__
    for part in model.modules():
        _refuse_other_ways(part, family)
    found = [
        _described(part, uses, family) for part in model.modules() if (uses := _interface_call(type(part))) is not None
    ]
    if not found:
        raise UnsupportedError(f"model: {family} has no attention layer that a policy could act on")
    return found


def _refuse_other_ways(module: nn.Module, family: str) -> None:
    """Refuse what would silently stay unsharpened, or change for another reason than β."""
    can_set = getattr(type(module), "_can_set_attn_implementation", None)
    if can_set is not None and not can_set():
        raise UnsupportedError(
            f"model: {type(module).__name__} does not use transformers' attention interface, so its layers would stay "
            "unsharpened; allowed: families that do (Llama, Qwen, Gemma, Mistral, GPT-2, BERT, T5, …)"
        )
    config = getattr(module, "config", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if getattr(config, "attn_temperature_tuning", False) or "llama_4_scaling_beta" in rope:
        raise UnsupportedError(
            f"model: {family} scales its queries by position already, so a policy would sharpen long inputs twice; "
            "allowed: families without a temperature of their own"
        )
    if getattr(module, "sinks", None) is not None:
        raise UnsupportedError(
            f"model: {family} has attention sinks ({type(module).__name__}.sinks): logits that scaling the query does "
            "not scale; allowed: families without sinks"
        )
    for function in _functions_of(type(module)):
        asks = "_attn_implementation" in function.__code__.co_names and _names_one(function.__code__.co_consts)
        # GPT-2 asks only for a variant of eager attention that is refused below; what happens before the model is
        # called (building it, Whisper's `generate`) is caught when it is.
        harmless = hasattr(module, "reorder_and_upcast_attn") or function.__name__ in ("__init__", "generate")
        if asks and not harmless:
            raise UnsupportedError(
                f"model: {family} treats attention implementations differently by name ({function.__qualname__}), so "
                "it would compute something else under a policy; allowed: families that do not"
            )
        attends = {"softmax", "scaled_dot_product_attention"} & set(function.__code__.co_names)
        if attends and "Attention" in type(module).__name__ and _interface_call(type(module)) is None:
            raise UnsupportedError(
                f"model: {family} has layers that attend without transformers' attention interface "
                f"({function.__qualname__}), which would stay unsharpened; allowed: families without such layers"
            )


def _names_one(constants: tuple[Any, ...]) -> bool:
    return any(
        one in INNER if isinstance(one, str) else isinstance(one, tuple) and _names_one(one) for one in constants
    )


def _functions_of(kind: type) -> Iterator[FunctionType]:
    """The methods of a class and of its bases, but for those of torch and Python."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in ("torch", "builtins") or base.__name__ == "PreTrainedModel":
            continue
        for member in vars(base).values():
            function = inspect.unwrap(member) if callable(member) else None
            if isinstance(function, FunctionType):
                yield function


def _interface_call(kind: type[nn.Module]) -> FunctionType | None:
    """The method of a kind of module that looks its attention function up, if it has one."""
    for function in _functions_of(kind):
        if _INTERFACE in function.__code__.co_names:
            return function
    return None


def _eager_of(uses: FunctionType) -> Callable[..., Any] | None:
    return next((uses.__globals__[n] for n in uses.__code__.co_names if n.endswith("eager_attention_forward")), None)


def _plain(name: str) -> str:
    """The attention that a configuration names without rules."""
    return next((inner for inner, ours in NAMES.items() if ours == name), name)


class _Own:
    """The attention functions that `own_attention` has found: a compiler follows attributes of a class one by one."""


def own_attention(kind: type[nn.Module], name: str) -> Callable[..., Any]:
    """The attention function that a kind of module uses without rules, where its configuration says `name`."""
    key: str = _find_own(kind, name)
    found: Callable[..., Any] = getattr(_Own, key)
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _find_own(kind: type[nn.Module], name: str) -> str:
    key = f"{kind.__name__}_{id(kind)}_{_plain(name)}"  # without a dot, which the compiler does not take
    if not hasattr(_Own, key):
        uses = _interface_call(kind)
        if uses is None:
            raise UnsupportedError(f"model: {kind.__name__} does not use transformers' attention interface")
        function = uses.__globals__[_INTERFACE].get_interface(_plain(name), _eager_of(uses))
        setattr(_Own, key, staticmethod(function))
    return key


def _described(module: nn.Module, uses: FunctionType, family: str) -> AttentionModule:
    name = type(module).__name__
    config = getattr(module, "config", None)
    inner = getattr(config, "_attn_implementation", None)
    if config is None or inner is None:
        raise UnsupportedError(f"model: {name} of {family} does not say which attention it uses; allowed: {INNER}")
    if inner in NAMES.values():
        if LAYER in vars(module):
            raise UnsupportedError(
                f"model: a policy is applied to a model that shares layers with this {family}; restore that one first"
            )
        inner = _plain(inner)  # the policy is in another model, with which this one shares its configuration
    if inner not in INNER:
        raise UnsupportedError(
            f"model: {family} uses attn_implementation={inner!r}, over which policies are not proven; allowed: "
            f"{' and '.join(INNER)}; do model.set_attn_implementation('sdpa') first"
        )
    if inner == "eager" and getattr(module, "reorder_and_upcast_attn", False):
        raise UnsupportedError(
            f"model: {family} has reorder_and_upcast_attn, an eager attention of its own; allowed: sdpa; "
            "do model.set_attn_implementation('sdpa') first"
        )
    eager = _eager_of(uses)
    if eager is None:
        raise UnsupportedError(f"model: {name} of {family} has no eager attention function to compare with")
    arguments = frozenset(inspect.signature(eager).parameters)
    if unknown := arguments - _UNDERSTOOD:
        raise UnsupportedError(
            f"model: the attention of {family} takes {sorted(unknown)}, which a policy does not know how to treat"
        )
    function = eager if inner == "eager" else uses.__globals__[_INTERFACE][inner]
    return AttentionModule(module, config, _heads_of(module, config, family), inner, function, arguments)


def _heads_of(module: nn.Module, config: Any, family: str) -> int:
    for holder, name in (
        (module, "num_heads"), (module, "num_attention_heads"), (module, "n_heads"), (config, "num_attention_heads"),
    ):  # fmt: skip
        heads = getattr(holder, name, None)
        if isinstance(heads, int) and heads > 0:
            return heads
    raise UnsupportedError(f"model: {type(module).__name__} of {family} does not say how many heads it has")
