"""Which models a policy can be applied to, found out before anything is changed."""

from __future__ import annotations

import copy
import dis
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch import nn

from sharpmax.errors import UnsupportedError, reject_type
from sharpmax.lazy import require

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

F = TypeVar("F", bound=Callable[..., Any])


def _cached(function: F) -> F:
    """`functools.cache`, whose type does not accept classes as arguments."""
    return cast("F", functools.cache(function))


LAYER = "_sharpmax_layer"
"""The attribute of an attention module that holds its `Layer` (see `attention`) while rules are installed."""

# "sdpa", "flash" and a slash in a name have a meaning in transformers: "flash" has to be in names of flash attention.
NAMES = {
    "sdpa": "sharpmax",
    "eager": "sharpmax-eager",
    "flex_attention": "sharpmax-flex",
    "flash_attention_2": "sharpmax-flash_attention_2",
    "flash_attention_3": "sharpmax-flash_attention_3",
}
"""The supported attention implementations, and the name that a configuration holds while a policy is applied."""

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""The registry where modules look up their attention function."""

# The known parameters of eager attention functions. Any other may change the logits in an unknown way.
_UNDERSTOOD = {
    "module", "query", "key", "value", "attention_mask", "scaling", "dropout", "softcap", "position_bias",
    "sliding_window", "s_aux", "kwargs",
}  # fmt: skip
# Attention as one function, and the parts of attention written out.
_ATTENTION = {
    "scaled_dot_product_attention", "multi_head_attention_forward", "flex_attention", "memory_efficient_attention",
    "flash_attn_func", "flash_attn_varlen_func", "flash_attn_qkvpacked_func",
}  # fmt: skip
_SOFTMAX = {"softmax", "_softmax", "Softmax"}
_PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum", "@"}
_LOGARITHMS = {"log", "log1p", "log2", "log10"}
_SCALES = ("scale", "scaling", "temperature", "tau")
# Options of a configuration or of its `rope_parameters` that turn on a temperature by position.
_TEMPERATURES = ("attn_temperature_tuning", "llama_4_scaling_beta", "log_scaling_n_floor", "use_logn_attn")


@dataclass(frozen=True, eq=False)
class AttentionModule:
    """A module that calls transformers' attention interface."""

    module: nn.Module
    config: PreTrainedConfig
    heads: int
    inner: str  # the implementation it uses without a policy, one of `NAMES`
    function: Callable[..., Any]  # that implementation
    arguments: frozenset[str]  # of its eager attention: with `position_bias`, a logit is more than query times key
    rule_off: Mapping[str, Any]  # attributes of the module or its configuration that switch its own rule off
    published: Mapping[str, Any]  # the attributes that `attach` changes, as they are without a policy

    def attach(self, layer: Any, *, without_rule: bool) -> None:
        """Install `layer` in the module, with a copy of its configuration that names our attention function."""
        own: dict[str, Any] = vars(self.module)
        config = copy.copy(self.config)
        config._attn_implementation_internal = NAMES[self.inner]
        for name, value in self.rule_off.items() if without_rule else ():
            (own if name in own else vars(config))[name] = value
        own.update({LAYER: layer, "config": config})

    def detach(self) -> None:
        """Undo `attach`."""
        vars(self.module).update(self.published)
        vars(self.module).pop(LAYER, None)


def require_transformers(part: str = "") -> Any:
    """The package transformers or a module of it, or an error that says how to install it."""
    return require(f"transformers.{part}".rstrip("."), "hf", "a policy in a transformers model")


def check_model(model: object) -> PreTrainedModel:
    """Return `model` if it is a transformers model; an ArgumentTypeError otherwise."""
    base: type[PreTrainedModel] = require_transformers().PreTrainedModel
    if not isinstance(model, base):
        inside = "of a wrapper (PEFT, torch.compile, DDP) pass the model inside"
        reject_type("model", type(model).__name__, "a transformers PreTrainedModel", inside)
    return model


def is_torch_module(model: object) -> bool:
    """Whether this is a torch module without a transformers model in it."""
    if not isinstance(model, nn.Module):
        return False
    loaded = sys.modules.get("transformers.modeling_utils")
    return loaded is None or not any(isinstance(part, loaded.PreTrainedModel) for part in model.modules())


def attention_modules(model: PreTrainedModel, *, skip_unsupported: bool = False) -> list[AttentionModule]:
    """The attention modules of a model in the order of `model.modules()`; an UnsupportedError if one is not supported.

    In a decoder-only model that is the order of layers, `module.layer_idx`. Encoder–decoder models have the encoder's
    layers first, then self-attention and cross-attention of each decoder layer. A module that several layers share
    (ALBERT) is listed once. With `skip_unsupported`, modules that attend without transformers' attention interface are
    left out; otherwise the error names them.
    """
    family = type(model).__name__
    if not skip_unsupported:
        check_all_reached(model)
    found = [
        _described(part, uses, family) for part in model.modules() if (uses := interface_call(type(part))) is not None
    ]
    if not found:
        raise UnsupportedError(f"model: {family} has no attention layer that a policy could act on")
    return found


def check_all_reached(model: PreTrainedModel) -> None:
    """Refuse a model in which some modules attend without the attention interface: their β would stay 1."""
    inside: set[nn.Module] = set()
    unreached = []
    for name, part in model.named_modules():
        can_set = getattr(part, "_can_set_attn_implementation", None)
        if part not in inside and (_attends_alone(type(part)) or (can_set is not None and not can_set())):
            inside.update(part.modules())  # name the outermost of nested modules
            unreached.append(f"{name or 'the model'} ({type(part).__name__})")
    if unreached:
        shown = ", ".join(unreached[:4]) + (f" and {len(unreached) - 4} more" if len(unreached) > 4 else "")
        raise UnsupportedError(
            f"model: {type(model).__name__} attends without transformers' attention interface in {shown}, where β "
            "would stay 1; allowed: families that attend through it everywhere (Llama, Qwen, Gemma, Mistral, GPT-2, "
            "BERT, T5, …); to leave these modules out, sharpmax.apply(model, policy, skip_unsupported=True), where the "
            "policy None changes nothing"
        )


@_cached
def _attends_alone(kind: type[nn.Module]) -> bool:
    """Whether modules of a class attend without the attention interface."""
    if issubclass(kind, nn.MultiheadAttention) or interface_call(kind) is not None:
        return issubclass(kind, nn.MultiheadAttention)
    # The softmax of a whole model belongs to its head or to a loss.
    part_of_model = not hasattr(kind, "_can_set_attn_implementation")
    return any(_ATTENTION & set(names) for names in _scopes(kind)) or (part_of_model and attends_by_hand(kind))


@_cached
def attends_by_hand(kind: type[nn.Module]) -> bool:
    """Whether the code of a class appears to contain attention: a softmax between two products."""
    # A router or a loss has at most one product.
    return any(
        not _SOFTMAX.isdisjoint(names) and ("Attention" in kind.__name__ or sum(n in _PRODUCTS for n in names) > 1)
        for names in _scopes(kind)
    )


def _scopes(kind: type) -> list[list[str]]:
    """The names in all methods of a class, followed by those in each function that the methods call."""
    functions = [function for function in _functions_of(kind) if function.__name__ != "generate"]
    methods = [name for function in functions for name in _names_in(function.__code__)]
    return [methods, *([*_names_in(one.__code__)] for function in functions for one in _helpers_of(function))]


def _own_rule(config: Any, uses: FunctionType) -> tuple[str | None, dict[str, Any]]:
    """The temperature by position of an attention module, if it has one, and the attributes that switch it off.

    It is found by an option of the configuration or in the code of attention: a logarithm, or a scale among its
    parameters. An option can switch it off if the code of attention reads the option at every call.
    """
    rotary = getattr(config, "rope_parameters", None) or {}
    options = {**rotary, **{name: getattr(config, name) for name in _TEMPERATURES if hasattr(config, name)}}
    rule = next((name for name in _TEMPERATURES if options.get(name)), None)
    if rule is None:
        return _temperature_in(uses), {}
    ways: dict[str, dict[str, Any]] = {
        "attn_temperature_tuning": {"attn_temperature_tuning": False},
        "llama_4_scaling_beta": {"rope_parameters": {**rotary, "llama_4_scaling_beta": 0.0}},
        "log_scaling_n_floor": {"log_scaling_n_floor": None},
    }
    return rule, ways.get(rule, {}) if rule in _names_in(uses.__code__) else {}


@_cached
def _temperature_in(uses: FunctionType) -> str | None:
    """A temperature by position in the code of attention that has no option in `_TEMPERATURES`."""
    names = {name for function in (uses, *_helpers_of(uses)) for name in _names_in(function.__code__)}
    if _LOGARITHMS & names and not names.intersection(_TEMPERATURES):
        return f"a logarithm in {uses.__qualname__}"
    given = [name for name in inspect.signature(uses).parameters if any(word in name for word in _SCALES)]
    return f"{given[0]} of {uses.__qualname__}" if given else None


def _names_one(constants: tuple[Any, ...], name: str) -> bool:
    return any(one == name or (isinstance(one, tuple) and _names_one(one, name)) for one in constants)


def _functions_of(kind: type) -> Iterator[FunctionType]:
    """The methods of a class and of its bases, without those of torch and Python."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in ("torch", "builtins") or base.__name__ == "PreTrainedModel":
            continue
        for member in vars(base).values():
            function = inspect.unwrap(member) if callable(member) else None
            if isinstance(function, FunctionType):
                yield function


def _helpers_of(function: FunctionType) -> Iterator[FunctionType]:
    """The functions that a function names and that are defined in the same module."""
    for name in set(_names_in(function.__code__)):
        helper = function.__globals__.get(name)
        helper = inspect.unwrap(helper) if callable(helper) else None
        if isinstance(helper, FunctionType) and helper.__module__ == function.__module__:
            yield helper


def _names_in(code: CodeType) -> Iterator[str]:
    """Names and strings in code and in the code nested in it, once per use; "@" is a matrix product."""
    for step in dis.get_instructions(code):
        if step.opname == "BINARY_MATRIX_MULTIPLY" or (step.opname == "BINARY_OP" and step.argrepr.startswith("@")):
            yield "@"
        elif isinstance(step.argval, str):
            yield step.argval
        elif isinstance(step.argval, CodeType):
            yield from _names_in(step.argval)


@_cached
def interface_call(kind: type[nn.Module]) -> FunctionType | None:
    """The method of a class that looks up its attention function, if there is one."""
    return next((one for one in _functions_of(kind) if INTERFACE in one.__code__.co_names), None)


def eager_of(uses: FunctionType) -> Callable[..., Any] | None:
    """The eager attention function that a method uses as its default."""
    return next((uses.__globals__[n] for n in uses.__code__.co_names if n.endswith("eager_attention_forward")), None)


def _described(module: nn.Module, uses: FunctionType, family: str) -> AttentionModule:
    name = type(module).__name__
    config = getattr(module, "config", None)
    inner = getattr(config, "_attn_implementation", None)
    if config is None or inner is None:
        raise UnsupportedError(f"model: {name} of {family} does not say which attention it uses")
    if LAYER in vars(module):
        raise UnsupportedError(
            f"model: a policy is applied to a model that shares layers with this {family}; restore that one first"
        )
    if inner not in NAMES:
        raise UnsupportedError(
            f"model: {family} uses attn_implementation={inner!r}, which policies do not support; allowed: "
            f"{', '.join(NAMES)}; do model.set_attn_implementation('sdpa') first"
        )
    rule, off = _own_rule(config, uses)
    if rule is not None and not off:
        raise UnsupportedError(
            f"model: {family} scales its queries by position already ({rule}) in a way that cannot be switched off, so "
            "a policy would sharpen long inputs twice; allowed: families without a temperature of their own, Llama 4, "
            "Ministral 3, Mistral 4 and Inkling"
        )
    if inner == "sdpa" and getattr(module, "sinks", None) is not None:
        raise UnsupportedError(
            f"model: {family} has attention sinks ({name}.sinks), which sdpa leaves out; allowed: eager; do "
            "model.set_attn_implementation('eager') first"
        )
    for method in _functions_of(type(module)):
        asks = "_attn_implementation" in method.__code__.co_names and _names_one(method.__code__.co_consts, inner)
        # GPT-2 asks only for a variant of eager attention that is refused below.
        if asks and not hasattr(module, "reorder_and_upcast_attn") and method.__name__ != "__init__":
            raise UnsupportedError(
                f"model: {family} treats attention implementations differently by name ({method.__qualname__}), so "
                "it would compute something else under a policy; allowed: families that do not"
            )
    if inner == "eager" and getattr(module, "reorder_and_upcast_attn", False):
        raise UnsupportedError(
            f"model: {family} has reorder_and_upcast_attn, an eager attention of its own; allowed: sdpa; "
            "do model.set_attn_implementation('sdpa') first"
        )
    eager = eager_of(uses)
    if eager is None:
        raise UnsupportedError(f"model: {name} of {family} has no eager attention function to compare with")
    arguments = frozenset(inspect.signature(eager).parameters)
    if unknown := arguments - _UNDERSTOOD:
        raise UnsupportedError(
            f"model: the attention of {family} takes {sorted(unknown)}, which a policy does not know how to treat"
        )
    names = ("num_heads", "num_attention_heads", "n_heads")
    given = [*(getattr(module, key, None) for key in names), getattr(config, "num_attention_heads", None)]
    heads = next((one for one in given if isinstance(one, int) and one > 0), None)
    if heads is None:
        raise UnsupportedError(f"model: {name} of {family} does not say how many heads it has")
    function = eager if inner == "eager" else uses.__globals__[INTERFACE][inner]
    published = {key: value for key, value in vars(module).items() if key == "config" or key in off}
    return AttentionModule(module, config, heads, inner, function, arguments, off, published)
