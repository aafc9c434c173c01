"""Which rules a running forward pass uses: those that were installed when it began, in all of its layers.

A pass is noted by hooks of the model, per thread. A pass without a note either began before the first rules were
installed, and then computes the baseline to its end, or does not go through the model itself (an encoder that
`generate` calls, a layer called by hand), and then uses what is installed at each call. Compiled code is not noted: its
guards look at everything before it starts.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from sharpmax.integrations.transformers.support import LAYER

if TYPE_CHECKING:
    from sharpmax.integrations.transformers.attention import Layer

_CALL = nn.Module._call_impl.__code__


class State(Protocol):
    """What is installed in a model, as far as passes are concerned."""

    @property
    def by_module(self) -> Mapping[nn.Module, Layer]:
        """What each attention module uses."""

    @property
    def passes(self) -> set[Pass]:
        """The passes that began with it and have not ended, as far as is known."""


@dataclass(frozen=True, eq=False)
class Pass:
    """A forward pass through a model, for as long as it runs."""

    state: State
    """What was installed when it began."""

    frame: FrameType
    """The call of the model: it is on the stack of its thread exactly while the pass runs."""

    thread: int

    def runs(self) -> bool:
        """Whether the pass still runs; an interrupt may have ended it without a word."""
        frame = sys._current_frames().get(self.thread)
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is not None


class _Here(threading.local):
    """The passes of this thread, the innermost last."""

    def __init__(self) -> None:
        self.passes: list[Pass] = []


_here = _Here()


def begin(model: nn.Module, state: State) -> None:
    """Note the pass that calls this from a hook, unless its call cannot be found on the stack."""
    frame = _call_of(model)
    if frame is None:
        return
    for one in [one for one in _here.passes if not one.runs()]:
        _forget(one)
    _here.passes.append(Pass(state, frame, threading.get_ident()))
    state.passes.add(_here.passes[-1])


def end(model: nn.Module) -> State | None:
    """What the pass that calls this from a hook has used, as it ends; None if it was not noted."""
    frame = _call_of(model)
    for one in _here.passes:
        if one.frame is frame:
            _forget(one)
            return one.state
    return None


def _forget(one: Pass) -> None:
    _here.passes.remove(one)
    one.state.passes.discard(one)


def layer_of(module: nn.Module) -> Layer | None:
    """What an attention module is to use in the pass that calls this; None for the model's own attention."""
    now: Layer | None = getattr(module, LAYER, None)
    if torch.compiler.is_compiling():
        return now
    for one in reversed(_here.passes):
        if one in one.state.passes and module in one.state.by_module:
            return one.state.by_module[module]
    if now is not None and now.noted and _call_of(now.model) is not None:
        return None
    return now


def _call_of(model: nn.Module | None) -> FrameType | None:
    """The innermost call of a model on the stack of this thread, if there is one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL and frame.f_locals["self"] is model:
            return frame
        frame = frame.f_back
    return None
