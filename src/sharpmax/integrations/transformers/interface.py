"""Attention with a temperature per row behind transformers' attention interface.

`install(model, rules_of_layer)` gives every attention module of the model the `Rule`s (see `sharpmax.ops.sharpen`) of
its layer, counted over the modules that attend in the order of `model.modules()`; none leaves the layer alone. β may
require gradients: whatever it is computed from learns. Heads without a rule keep β = 1. `apply` installs the rules of a
policy; calibration installs rules whose parameters are trained.

Nothing of transformers is patched: an attention function and its mask function are registered under names of our own,
each attention module gets a copy of its configuration that names them, and the call is handed on to the implementation
the model used before, with β·q for q. What a mask hides does not count: under a sliding window n is at most the window.

Rules change between forward passes, never inside of one: while a thread runs the model, a change is refused.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sharpmax.errors import UnsupportedError
from sharpmax.integrations.transformers.attention import (
    Layer,
    Observer,
    Observers,
    OutputGain,
    Repeated,
    sharp_attention,
)
from sharpmax.integrations.transformers.support import (
    NAMES,
    AttentionModule,
    attention_modules,
    check_model,
    require_transformers,
)
from sharpmax.ops.sharpen import QueryScale, Rule
from sharpmax.policies.base import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_INSTALLED = "_sharpmax_installed"
_OBSERVERS = "_sharpmax_observers"
_changing = threading.RLock()
"""Held by the thread that changes what is installed in a model."""


@dataclass(frozen=True, eq=False)
class Installed:
    """What is installed in a model: enough to put it in place again."""

    modules: Sequence[AttentionModule]
    layers: Sequence[Layer]
    policy: Policy | None  # what the rules were made of, if anything
    methods: Mapping[str, Any]  # what the model has instead of its own methods for as long
    own: dict[str, Any] = field(default_factory=dict)  # what the model itself (not its class) had under these names
    observed_only: bool = False  # whether it is there for observers alone, and goes with the last of them
    hooks: list[RemovableHandle] = field(default_factory=list)  # the hook before each pass, while this is in place

    def __setstate__(self, values: dict[str, Any]) -> None:
        """A process that reads a pickle has not registered our names yet."""
        vars(self).update(values)
        _register()


def installed(model: PreTrainedModel) -> Installed | None:
    """What is installed in a model, or None."""
    return vars(model).get(_INSTALLED)


def modules_of(model: PreTrainedModel, *, skip_unsupported: bool = False) -> Sequence[AttentionModule]:
    """The attention modules of a model, as they are without rules; or an error that says why it cannot have any.

    Of a model with rules these are the modules that got them: what was left out then is left out here.
    """
    before = installed(check_model(model))
    return attention_modules(model, skip_unsupported=skip_unsupported) if before is None else before.modules


def install(
    model: PreTrainedModel,
    rules_of_layer: Callable[[int], Sequence[Rule | QueryScale | OutputGain]],
    *,
    policy: Policy | None = None,
    methods: Mapping[str, Callable[..., Any]] | None = None,
    skip_unsupported: bool = False,
) -> None:
    """Let the rules of each layer choose β in the model's attention; what was installed before is replaced.

    Every check comes before the first change. `put(model, None)` takes everything out again. `methods` stand in for
    the model's own for as long.
    """
    modules = modules_of(model, skip_unsupported=skip_unsupported)
    layers = _layers(modules, rules_of_layer)
    for one, layer in zip(modules, layers, strict=True):
        parameter = next(one.module.parameters(), None)
        if parameter is not None and parameter.is_cuda:
            layer.sharpener.prepare(parameter.device)
    bound = {name: partial(method, model) for name, method in (methods or {}).items()}
    put(model, Installed(modules, layers, policy, bound))


def _layers(modules: Sequence[AttentionModule], rules_of_layer: Callable[[int], Sequence[Any]]) -> list[Layer]:
    return [
        Layer(one.inner, one.function, one.heads, tuple(rules_of_layer(number)), number)
        for number, one in enumerate(modules)
    ]


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


def observe(model: PreTrainedModel, observer: Observer) -> Callable[[], None]:
    """Show `observer` every call of attention in the model, until the function returned is called.

    Policies may come and go meanwhile. What a observer sees is what the model computes, in the thread that computes it;
    an error of its own ends the call. A compiled model shows nothing.
    """
    with _changing:
        before = installed(check_model(model))
        if before is None:
            modules_of(model)  # what cannot be observed is refused before anything changes
        observers = _observers(model)
        observers.active += (observer,)
        if before is None:
            _put(model, None)

    def remove() -> None:
        with _changing:
            observers.active = tuple(one for one in observers.active if one is not observer)
            state = installed(model)
            if not observers.active and state is not None and state.observed_only:
                _put(model, None)

    return remove


@contextmanager
def observed(model: PreTrainedModel, observer: Observer) -> Iterator[None]:
    """`observe` for a `with` block."""
    remove = observe(model, observer)
    try:
        yield
    finally:
        remove()


def _observers(model: PreTrainedModel) -> Observers:
    found: Observers = vars(model).setdefault(_OBSERVERS, Observers())
    return found


def put(model: PreTrainedModel, state: Installed | None) -> None:
    """Make `state`, of this model, the one installed; None leaves the model as it was before anything was."""
    with _changing:
        _check_inside(model)
        hook = model.register_forward_pre_hook(_enter)  # a pass that begins from here on waits for the change
        try:
            _check_not_running(model)
            _put(model, state)
        finally:
            hook.remove()


_CALL = nn.Module._call_impl.__code__


def _check_not_running(model: PreTrainedModel) -> None:
    """Refuse a change inside a forward pass, whose layers would not all have the same policy."""
    parts = set(model.modules())
    for thread, innermost in sys._current_frames().items():
        frame: FrameType | None = innermost
        while frame is not None:
            if frame.f_code is _CALL and frame.f_locals["self"] in parts:
                name = next((one.name for one in threading.enumerate() if one.ident == thread), str(thread))
                raise UnsupportedError(
                    f"model: a forward pass is running in the thread {name!r}, and its policy cannot change before the "
                    "end; change it between passes, or give each thread a copy of the model (copy.deepcopy)"
                )
            frame = frame.f_back


@dataclass(eq=False)
class _Block:
    """A `with` block at whose end a model gets back what was installed before."""

    before: Installed | None
    thread: str


# The open blocks of each model, the innermost last.
_blocks: weakref.WeakKeyDictionary[nn.Module, list[_Block]] = weakref.WeakKeyDictionary()
# A thread has a context of its own, and so has a task of asyncio; a task that a block starts is inside of that block.
_inside: ContextVar[tuple[_Block, ...]] = ContextVar("sharpmax_blocks", default=())


@contextmanager
def kept(model: PreTrainedModel) -> Iterator[None]:
    """Whatever is installed inside the block, at its end the model has what it had before.

    Until then, nothing can be installed from outside the block, that is by another thread or task.
    """
    with _changing:
        _check_inside(model)
        block = _Block(installed(model), threading.current_thread().name)
        blocks = _blocks.setdefault(model, [])
        blocks.append(block)
    _inside.set((*_inside.get(), block))
    try:
        yield
    finally:
        _inside.set(tuple(one for one in _inside.get() if one is not block))
        with _changing:
            place = blocks.index(block)
            del blocks[place]
            in_order = place == len(blocks)
            if not in_order:
                blocks[place].before = block.before  # the block opened inside of this one is to give it back
            elif installed(model) is not block.before:
                _put(model, block.before)
    if not in_order:
        raise UnsupportedError(
            "applied: a block ended before one that was opened inside it, whose policy is still in place; "
            "allowed: blocks that end in the reverse of the order in which they began"
        )
    _check_not_running(model)


def _check_inside(model: PreTrainedModel) -> None:
    """Refuse a change from outside the innermost block, which would take its policy away or outlive it."""
    blocks = _blocks.get(model)
    if blocks and blocks[-1] not in _inside.get():
        raise UnsupportedError(
            f"model: a block of another thread or task has put a policy in it (`with applied(…)`, in the thread "
            f"{blocks[-1].thread!r}), and two that overlap would undo each other; allowed: one after the other, "
            "or a copy of the model for each (copy.deepcopy)"
        )


def _put(model: PreTrainedModel, state: Installed | None) -> None:
    _register()
    before = installed(model)
    if state is None or state.observed_only:  # nobody asks for rules: nothing is there, unless someone observes
        state = None
        if _observers(model).active:
            modules = modules_of(model)
            state = Installed(modules, _layers(modules, lambda number: ()), None, {}, observed_only=True)
        else:
            del vars(model)[_OBSERVERS]
    if before is not None:
        del vars(model)[_INSTALLED]
        for one in before.modules:
            one.let_go()
        for name in before.methods:
            del vars(model)[name]
        vars(model).update(before.own)
        before.hooks.pop().remove()
    if state is not None:
        state.own.update({name: vars(model)[name] for name in state.methods if name in vars(model)})
        vars(model).update(state.methods)
        state.hooks.append(model.register_forward_pre_hook(_enter))
        changes = any(one.rules or one.query_scale or one.output_gain for one in state.layers)
        for one, layer in zip(state.modules, state.layers, strict=True):
            layer.observers = _observers(model)
            one.hold(layer, without_rule=changes)
        vars(model)[_INSTALLED] = state


def _enter(model: PreTrainedModel, args: Any) -> None:
    """Before each pass: wait for a change that another thread has begun, and check that our attention is in use.

    Something else may have changed the attention meanwhile, as Whisper's token timestamps do.
    """
    if not torch.compiler.is_compiling():
        with _changing:
            pass
    state = installed(model)
    for one in () if state is None else state.modules:
        if one.config._attn_implementation != one.inner:
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
