"""Attention with a temperature per row behind transformers' attention interface.

`install(model, rules_of_layer)` is the seam everything else is built on. It gives every attention module of the model
the rules for its layer: `rules_of_layer(number)` returns the `Rule`s (`sharpmax.hf.rules`) of the layer with that
number, counted over the modules that attend in the order of `model.modules()`; none leaves the layer alone. A rule
names the heads it speaks for, the statistics it needs, and gives β, which may require gradients: whatever it is
computed from learns. Heads without a rule keep β = 1. `apply` installs the rules of a policy; calibration installs
rules whose parameters are trained.

Nothing of transformers is patched: an attention function and its mask function are registered under names of our own,
the configurations of the model name them, and the call is handed on to the implementation the model used before, with
β·q for q. What a mask hides does not count: under a sliding window n is at most the window.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from sharpmax.errors import UnsupportedError
from sharpmax.hf.attention import LAYER, LEFT, Layer, Repeated, sharp_attention
from sharpmax.hf.rules import Rule
from sharpmax.hf.support import NAMES, AttentionModule, attention_modules, check_model, require_transformers
from sharpmax.hf.watching import Watcher, Watchers
from sharpmax.policies import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "Installed",
    "install",
    "installed",
    "modules_of",
    "put",
    "repeated",
    "repeating",
    "watch",
    "watched",
]

_INSTALLED = "_sharpmax_installed"
_WATCHERS = "_sharpmax_watchers"
_changing = threading.RLock()
"""Held by the thread that changes what is installed in a model; others may be in the middle of a pass."""


@dataclass(frozen=True, eq=False)
class Installed:
    """What is installed in a model: enough to put it in place again."""

    modules: Sequence[AttentionModule]
    layers: Sequence[Layer]
    policy: Policy | None
    """The policy the rules were made of, if any."""

    methods: Mapping[str, Any]
    """Methods that the model has instead of its own for as long."""

    own: dict[str, Any] = field(default_factory=dict)
    """What the model itself (not its class) had under the names of those methods."""

    watched_only: bool = False
    """Whether it is there for watchers alone, and goes with the last of them."""

    guard: list[RemovableHandle] = field(default_factory=list)
    """The check before each call that the model still uses this attention, while it is in place."""


def modules_of(model: PreTrainedModel, *, skip_unsupported: bool = False) -> Sequence[AttentionModule]:
    """The attention modules of a model, as they are without rules; or an error that says why it cannot have any.

    Of a model with rules these are the modules that got them: what was left out then is left out here.
    """
    before = installed(check_model(model))
    return attention_modules(model, skip_unsupported=skip_unsupported) if before is None else before.modules


def install(
    model: PreTrainedModel,
    rules_of_layer: Callable[[int], Sequence[Rule]],
    *,
    policy: Policy | None = None,
    methods: Mapping[str, Callable[..., Any]] | None = None,
    skip_unsupported: bool = False,
) -> Installed:
    """Let the rules of each layer choose β in the model's attention; what was installed before is replaced.

    Every check comes before the first change. `put(model, None)` takes everything out again. `methods` stand in for
    the model's own for as long.
    """
    modules = modules_of(model, skip_unsupported=skip_unsupported)
    layers = [
        Layer(one.inner, one.function, one.heads, tuple(rules_of_layer(number)), number)
        for number, one in enumerate(modules)
    ]
    bound = {name: MethodType(method, model) for name, method in (methods or {}).items()}
    now = Installed(modules, layers, policy, bound)
    put(model, now)
    return now


def repeated(model: PreTrainedModel, places: Tensor) -> AbstractContextManager[None]:
    """Let every layer of a model with rules see its keys at `places` `[B, Lk']`, in that order, −1 being none.

    A key may be there several times: attention is then what it would be among so many alike. For causal
    self-attention to whole sequences without a mask, that is without a cache and without padding before the end.
    """
    same = Repeated(places)
    return repeating(model, lambda layer: same)


@contextmanager
def repeating(model: PreTrainedModel, how: Callable[[Layer], Repeated]) -> Iterator[None]:
    """Let each layer of a model with rules see the keys that `how` gives it."""
    state = installed(model)
    if state is None:
        raise UnsupportedError("repeated: the model has no rules installed; apply a policy first, None being one")
    for layer in state.layers:
        layer.repeated = how(layer)
    try:
        yield
    finally:
        for layer in state.layers:
            layer.repeated = None


def installed(model: PreTrainedModel) -> Installed | None:
    """What is installed in a model, or None."""
    return vars(model).get(_INSTALLED)


def watch(model: PreTrainedModel, watcher: Watcher) -> Callable[[], None]:
    """Show `watcher` every call of attention in the model, until the function returned is called.

    Policies may come and go meanwhile. What a watcher sees is what the model computes, in the thread that computes it;
    an error of its own ends the call. A compiled model shows nothing.
    """
    with _changing:
        before = installed(check_model(model))
        watchers = _watchers(model)
        watchers.active += (watcher,)
        if before is None:
            put(model, None)

    def remove() -> None:
        with _changing:
            watchers.active = tuple(one for one in watchers.active if one is not watcher)
            state = installed(model)
            if not watchers.active and state is not None and state.watched_only:
                put(model, None)

    return remove


@contextmanager
def watched(model: PreTrainedModel, watcher: Watcher) -> Iterator[None]:
    """`watch` for a `with` block."""
    remove = watch(model, watcher)
    try:
        yield
    finally:
        remove()


def _watchers(model: PreTrainedModel) -> Watchers:
    found: Watchers = vars(model).setdefault(_WATCHERS, Watchers())
    return found


def _for_watchers(model: PreTrainedModel) -> Installed | None:
    """What is installed where nobody asks for rules: nothing, unless someone watches."""
    if not _watchers(model).active:
        del vars(model)[_WATCHERS]
        return None
    modules = modules_of(model)
    layers = [Layer(one.inner, one.function, one.heads, (), number) for number, one in enumerate(modules)]
    return Installed(modules, layers, None, {}, watched_only=True)


def put(model: PreTrainedModel, state: Installed | None) -> None:
    """Make `state`, of this model, the one installed; None leaves the model as it was before anything was."""
    with _changing:
        _put(model, state)


def _put(model: PreTrainedModel, state: Installed | None) -> None:
    _register()
    before = installed(model)
    if state is None or state.watched_only:
        state = _for_watchers(model)
    if before is not None:
        del vars(model)[_INSTALLED]
        for one in before.modules:
            one.config._attn_implementation_internal = one.inner
        for one in before.modules:
            LEFT[one.module] = Layer(one.inner, one.function, one.heads, ())
            vars(one.module).pop(LAYER, None)
        for name in before.methods:
            del vars(model)[name]
        vars(model).update(before.own)
        before.guard.pop().remove()
    if state is not None:
        state.own.update({name: vars(model)[name] for name in state.methods if name in vars(model)})
        vars(model).update(state.methods)
        state.guard.append(model.register_forward_pre_hook(_check_in_use))
        for one, layer in zip(state.modules, state.layers, strict=True):
            layer.watchers = _watchers(model)
            vars(one.module)[LAYER] = layer
            one.config._attn_implementation_internal = NAMES[one.inner]
        vars(model)[_INSTALLED] = state


def _check_in_use(model: PreTrainedModel, args: Any) -> None:
    """Something else may have changed the attention meanwhile (Whisper's token timestamps do): not silently."""
    state = installed(model)
    for one in () if state is None else state.modules:
        # Unless it is another thread that has just put something else in place.
        if one.config._attn_implementation != NAMES[one.inner] and installed(model) is state:
            raise UnsupportedError(
                f"attn_implementation: it became {one.config._attn_implementation!r} while a policy was applied, which "
                "would be ignored; restore the model, change it there, and apply the policy again"
            )


def _register() -> None:
    """Tell transformers our names, each with the mask function of the implementation that is called in the end."""
    transformers, masking = require_transformers(), require_transformers("masking_utils")
    for inner, name in NAMES.items():
        transformers.AttentionInterface.register(name, sharp_attention)
        transformers.AttentionMaskInterface.register(name, masking.ALL_MASK_ATTENTION_FUNCTIONS[inner])
