"""Attention with a temperature per row behind transformers' attention interface.

`install(model, rules_of_layer)` gives every attention module of the model the `Rule`s (see `sharpmax.ops.sharpen`) of
its layer; layers are numbered in the order of `model.modules()`. Heads without a rule keep β = 1. β may require
gradients. `apply` installs the rules of a policy; calibration installs rules whose parameters are trained.

Nothing of transformers is patched: an attention function and its mask function are registered under names of our own,
and each attention module gets a copy of its configuration that names them. Our function calls the implementation that
the model used before, with β·q for q. Masked keys do not count: under a sliding window n is at most the window.

Rules change between forward passes: while a thread runs the model, a change is an `UnsupportedError`.
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
"""Held by the thread that changes the rules of a model."""


@dataclass(frozen=True, eq=False)
class Installed:
    """The rules in a model and everything that is needed to install them again."""

    modules: Sequence[AttentionModule]
    layers: Sequence[Layer]
    policy: Policy | None  # the policy that the rules come from, if any
    methods: Mapping[str, Any]  # methods of the model instance while this is installed
    own: dict[str, Any] = field(default_factory=dict)  # attributes of the instance that `methods` replaced
    observed_only: bool = False  # whether there are only observers; removed together with the last one
    hooks: list[RemovableHandle] = field(default_factory=list)  # the forward pre-hook while this is installed

    def __setstate__(self, values: dict[str, Any]) -> None:
        """A process that reads a pickle may not have registered our names yet."""
        vars(self).update(values)
        _register()


def installed(model: PreTrainedModel) -> Installed | None:
    """The rules installed in a model, or None."""
    return vars(model).get(_INSTALLED)


def modules_of(model: PreTrainedModel, *, skip_unsupported: bool = False) -> Sequence[AttentionModule]:
    """The attention modules of a model; an UnsupportedError if it cannot have a policy.

    In a model with rules these are the modules that have them, without those that `skip_unsupported` left out.
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
    """Let the rules of each layer choose β in the model's attention, in place of rules installed before.

    All checks precede the first change. `put(model, None)` removes the rules. `methods` replace the methods of the
    model instance until then.
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
    """Inside the block, each layer of a model with rules attends to the keys that `how` returns for it."""
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
    """Pass every attention call of the model to `observer` until the returned function is called.

    The policy of the model may change meanwhile. The observer runs in the thread of the call, and an error that it
    raises ends the forward pass. Compiled code has no observable calls.
    """
    with _changing:
        before = installed(check_model(model))
        if before is None:
            modules_of(model)  # refuse an unsupported model before the first change
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
    """Install `state`, which belongs to this model; None removes everything."""
    with _changing:
        _check_inside(model)
        hook = model.register_forward_pre_hook(_enter)  # passes that begin now wait for the change
        try:
            _check_not_running(model)
            _put(model, state)
        finally:
            hook.remove()


_CALL = nn.Module._call_impl.__code__


def _check_not_running(model: PreTrainedModel) -> None:
    """Refuse a change during a forward pass, in which some layers would have another policy than others."""
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
    """A `with` block, at whose end `before` is installed again."""

    before: Installed | None
    thread: str


# The open blocks of each model, the innermost last.
_blocks: weakref.WeakKeyDictionary[nn.Module, list[_Block]] = weakref.WeakKeyDictionary()
# Each thread and each asyncio task has its own context; a task started inside a block inherits it.
_inside: ContextVar[tuple[_Block, ...]] = ContextVar("sharpmax_blocks", default=())


@contextmanager
def restoring(model: PreTrainedModel) -> Iterator[None]:
    """Restore at the end of the block what is installed now.

    Until then, no other thread or task can install anything.
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
                blocks[place].before = block.before  # the block opened inside this one restores it
            elif installed(model) is not block.before:
                _put(model, block.before)
    if not in_order:
        raise UnsupportedError(
            "applied: a block ended before one that was opened inside it, whose policy is still in place; "
            "allowed: blocks that end in the reverse of the order in which they began"
        )
    _check_not_running(model)


def _check_inside(model: PreTrainedModel) -> None:
    """Refuse a change by a thread or task that is not inside the innermost block."""
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
    if state is None or state.observed_only:  # without rules, install only what observers need
        state = None
        if _observers(model).active:
            modules = modules_of(model)
            state = Installed(modules, _layers(modules, lambda number: ()), None, {}, observed_only=True)
        else:
            del vars(model)[_OBSERVERS]
    if before is not None:
        del vars(model)[_INSTALLED]
        for one in before.modules:
            one.detach()
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
            one.attach(layer, without_rule=changes)
        vars(model)[_INSTALLED] = state


def _enter(model: PreTrainedModel, args: Any) -> None:
    """Before each pass: wait until no other thread changes the model, and check that our attention is in use.

    Other code may have changed the attention implementation, as Whisper's token timestamps do.
    """
    if not torch.compiler.is_compiling():
        with _changing:
            pass
    state = installed(model)
    for one in () if state is None else state.modules:
        if one.config._attn_implementation != one.inner:
            raise UnsupportedError(
                f"attn_implementation: it became {one.config._attn_implementation!r} while a policy was applied, which "
                "would be ignored; restore the model, change it, and apply the policy again"
            )


def _register() -> None:
    """Register our names, each with the mask function of the implementation behind it."""
    transformers, masking = require_transformers(), require_transformers("masking_utils")
    for inner, name in NAMES.items():
        transformers.AttentionInterface.register(name, sharp_attention)
        transformers.AttentionMaskInterface.register(name, masking.ALL_MASK_ATTENTION_FUNCTIONS[inner])
