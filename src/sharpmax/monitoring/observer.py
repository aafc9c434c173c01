"""Observe requests to a transformers model and the rows in them."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sharpmax.errors import UnsupportedError, reject
from sharpmax.integrations.transformers.interface import modules_of, observe
from sharpmax.monitoring.requests import Pass, Request, Run
from sharpmax.stats.call import AttentionCall

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MARK = "_sharpmax_attached"
_GENERATE = "generate"

Arguments = tuple[Any, ...]
Options = dict[str, Any]


def check_free(model: PreTrainedModel) -> None:
    """Refuse a model that is monitored already."""
    if _MARK in vars(model):
        reject("model", "a model that is monitored already", "one monitor at a time", "close the other one first")


def attach(
    model: PreTrainedModel,
    before: Callable[[Arguments, Options], None],
    after: Callable[[Any], None],
    generating: Callable[[Arguments, Options], AbstractContextManager[Any]],
) -> list[Callable[[], Any]]:
    """Call `before` and `after` each pass (with its output, None for an error), and `generate` inside `generating`.

    Returns functions that undo this, to be called last first. The hooks are functions, not methods: a deep copy of the
    model shares them and they ignore it.
    """
    check_free(model)
    vars(model)[_MARK] = True

    def entering(this: Any, args: Arguments, kwargs: Options) -> None:
        if this is model:
            before(args, kwargs)

    def leaving(this: Any, args: Arguments, kwargs: Options, out: Any) -> None:
        if this is model:
            after(out)

    undo = [
        lambda: vars(model).pop(_MARK, None),
        model.register_forward_pre_hook(entering, with_kwargs=True).remove,
        model.register_forward_hook(leaving, with_kwargs=True, always_call=True).remove,
    ]
    if not hasattr(model, _GENERATE):
        return undo
    own = vars(model).get(_GENERATE)
    kind: Any = type(model)

    @functools.wraps(kind.generate)
    def generate(this: Any, *args: Any, **kwargs: Any) -> Any:
        if this is not model:
            return type(this).generate(this, *args, **kwargs)
        with generating(args, kwargs):
            return kind.generate(this, *args, **kwargs) if own is None else own(*args, **kwargs)

    vars(model)[_GENERATE] = bound = MethodType(generate, model)

    def restore() -> None:
        if vars(model).get(_GENERATE) is bound:  # other code may have wrapped it meanwhile
            del vars(model)[_GENERATE]
            vars(model).update({} if own is None else {_GENERATE: own})

    return [*undo, restore]


def heads_of(model: PreTrainedModel) -> list[tuple[int, int]]:
    """Layer and head of every column of a row."""
    return [(number, head) for number, one in enumerate(modules_of(model)) for head in range(one.heads)]


@dataclass(frozen=True, eq=False)
class _Scope:
    """The request that passes in this context belong to. Only runs of the same scope are continued in it."""

    observer: Observer
    request: Request
    ends: frozenset[int] = frozenset()
    length: int | None = None  # tokens of each prompt, where known
    runs: list[Run] = field(default_factory=list)


_SCOPES: ContextVar[tuple[_Scope, ...]] = ContextVar("sharpmax_scopes", default=())


@dataclass(frozen=True, eq=False)
class _ActivePass:
    """A pass that this thread is in."""

    request: Request
    run: Run
    measuring: Pass
    generates: bool
    alone: bool  # whether the pass is a request by itself


class Observer:
    """Observes one model: `begun()` makes a request, `ended(request)` is called when one is over.

    `failed(error)` is called with errors of the observer itself; they never reach the caller of the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        every: int,
        window: int,
        begun: Callable[[], Request],
        ended: Callable[[Request], None],
        failed: Callable[[Exception], str],
    ) -> None:
        self.heads = heads_of(model)
        if model.config.is_encoder_decoder:
            raise UnsupportedError(
                f"model: {type(model).__name__} has an encoder and a decoder, of which no single row says where it "
                "looks; allowed: models with one stack of layers"
            )
        check_free(model)
        self.on = True
        self._model, self._every, self._window = model, every, window
        self._begun, self._ended, self._failed = begun, ended, failed
        self._names = tuple(inspect.signature(model.forward).parameters)
        self._local = threading.local()
        self._lock, self._closed = threading.Lock(), False
        self._inside: set[int] = set()
        self._undo = [observe(model, self), *attach(model, self._before, self._after, self._generating)]

    def close(self) -> None:
        """Detach from the model as soon as no thread is inside a pass through it."""
        with self._lock:
            self._closed = True
            self._inside.discard(threading.get_ident())  # an interrupt may have skipped the hook after the pass
            self._detach_if_idle()

    def _detach_if_idle(self) -> None:
        while self._closed and not self._inside and self._undo:
            self._undo.pop()()

    @contextmanager
    def request(
        self, ends: frozenset[int] | None = None, length: int | None = None, *, within: bool = False
    ) -> Iterator[Request]:
        """Everything this context runs is one request; `within` another it is a part of that one.

        `ends` are tokens that end a sequence, by default the model's; `length` is that of the prompts, where known. A
        request that an error ends has no report.
        """
        around = self._scope() if within else None
        request = self._begun() if around is None else around.request
        scope = _Scope(self, request, self._generation_arguments((), {})[0] if ends is None else ends, length)
        _SCOPES.set((*_SCOPES.get(), scope))
        try:
            yield request
        finally:
            _SCOPES.set(tuple(one for one in _SCOPES.get() if one is not scope))
        if around is None and (self._active or not within):
            self._ended(request)

    @property
    def _active(self) -> bool:
        return self.on and not self._closed

    def _scope(self) -> _Scope | None:
        return next((one for one in reversed(_SCOPES.get()) if one.observer is self), None)

    def _generating(self, args: Arguments, kwargs: Options) -> AbstractContextManager[Request]:
        return self.request(*self._generation_arguments(args, kwargs), within=True)

    def _generation_arguments(self, args: Arguments, options: Options) -> tuple[frozenset[int], int | None]:
        """Tokens that end a sequence and the length of prompts, from the arguments of `generate`."""
        config = options.get("generation_config") or getattr(self._model, "generation_config", None)
        ends = options.get("eos_token_id", getattr(config, "eos_token_id", None))
        ids = args[0] if args else options.get("input_ids", options.get("inputs"))
        return (
            frozenset(one for one in (ends if isinstance(ends, list) else [ends]) if isinstance(one, int)),
            ids.shape[1] if isinstance(ids, Tensor) and ids.ndim == 2 else None,
        )

    def wants_call(self) -> bool:
        """Whether the pass that this thread is in is measured."""
        return getattr(self._local, "active", None) is not None

    def __call__(self, call: AttentionCall) -> None:
        """Measure one layer of a pass."""
        active: _ActivePass | None = getattr(self._local, "active", None)
        if active is not None:
            try:
                active.measuring.see(call)
            except Exception as problem:
                self._fail(active.request, problem)

    def _before(self, args: Arguments, kwargs: Options) -> None:
        with self._lock:
            self._inside.add(threading.get_ident())
        self._local.active = None
        if self._active:
            scope = self._scope()
            try:
                self._local.active = self._begin(scope, dict(zip(self._names, args, strict=False)) | kwargs)
            except Exception as problem:
                self._fail(None if scope is None else scope.request, problem)

    def _begin(self, scope: _Scope | None, given: Options) -> _ActivePass | None:
        cache, alone = given.get("past_key_values"), scope is None
        if scope is None:
            if cache is not None:
                return None  # it continues an unknown request
            scope = _Scope(self, self._begun())
        run = None if cache is None else next((one for one in scope.runs if one.holds(cache)), None)
        if run is None:
            read = 0 if cache is None or scope.length is None else int(cache.get_seq_length())
            run = Run(scope.ends, self._window, None if scope.length is None else scope.length - read)
            run.keep(cache)
            scope.runs.append(run)
            scope.request.runs.append(run)
        measuring, generates = run.begin(given, self._every)
        return None if measuring is None else _ActivePass(scope.request, run, measuring, generates, alone)

    def _after(self, out: Any) -> None:
        active: _ActivePass | None = getattr(self._local, "active", None)
        self._local.active = None
        if active is not None and out is not None:
            try:
                row, cache = active.measuring.row(), getattr(out, "past_key_values", None)
                if row is not None:
                    active.run.end(row, active.generates)
                if cache is not None:
                    active.run.keep(cache)
            except Exception as problem:
                self._fail(active.request, problem)
            if active.alone:
                self._ended(active.request)
        with self._lock:
            self._inside.discard(threading.get_ident())
            self._detach_if_idle()

    def _fail(self, request: Request | None, problem: Exception) -> None:
        message = self._failed(problem)
        if request is not None and request.problem is None:  # later errors may follow from the first
            request.problem = message
