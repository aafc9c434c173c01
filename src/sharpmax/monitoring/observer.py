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
from sharpmax.integrations.transformers.interface import modules_of, watch
from sharpmax.integrations.transformers.observers import Seen
from sharpmax.monitoring.passes import Pass, Run
from sharpmax.monitoring.requests import Request

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MARK = "_sharpmax_attached"
_GENERATE = "generate"

Arguments = tuple[Any, ...]
Options = dict[str, Any]


def check_free(model: PreTrainedModel) -> None:
    """Refuse a model that somebody is beside already."""
    if _MARK in vars(model):
        reject("model", "a model that is watched already", "one monitor at a time", "close the other one first")


def attach(
    model: PreTrainedModel,
    before: Callable[[Arguments, Options], None],
    after: Callable[[Any], None],
    generating: Callable[[Arguments, Options], AbstractContextManager[Any]],
) -> list[Callable[[], Any]]:
    """Call `before` and `after` each pass (with its outcome, None for an error), and `generate` inside `generating`.

    Returns what to call, last first, to leave the model as it was. Copies of the model are left alone: these are
    functions, which a copy shares, and not methods of an object that it would copy too.
    """
    check_free(model)
    vars(model)[_MARK] = True

    def entering(this: Any, args: Arguments, kwargs: Options) -> None:
        if this is model:
            before(args, kwargs)

    def leaving(this: Any, args: Arguments, kwargs: Options, out: Any) -> None:
        if this is model:
            after(out)

    return [
        lambda: vars(model).pop(_MARK, None),
        model.register_forward_pre_hook(entering, with_kwargs=True).remove,
        model.register_forward_hook(leaving, with_kwargs=True, always_call=True).remove,
        *_around_generate(model, generating),
    ]


def _around_generate(
    model: PreTrainedModel, generating: Callable[[Arguments, Options], AbstractContextManager[Any]]
) -> list[Callable[[], Any]]:
    if not hasattr(model, _GENERATE):
        return []
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
        if vars(model).get(_GENERATE) is bound:  # somebody else may have wrapped it meanwhile
            del vars(model)[_GENERATE]
            vars(model).update({} if own is None else {_GENERATE: own})

    return [restore]


def heads_of(model: PreTrainedModel) -> list[tuple[int, int]]:
    """Layer and head of every column of a row."""
    return [(number, head) for number, one in enumerate(modules_of(model)) for head in range(one.heads)]


@dataclass(frozen=True, eq=False)
class _Scope:
    """What runs here and now belongs to this request. Its runs alone may go on in it, not those of scopes around."""

    lookout: Lookout
    request: Request
    ends: frozenset[int] = frozenset()
    length: int | None = None  # how many tokens each prompt has, where that is known
    runs: list[Run] = field(default_factory=list)


_SCOPES: ContextVar[tuple[_Scope, ...]] = ContextVar("sharpmax_scopes", default=())


@dataclass(frozen=True, eq=False)
class _Looking:
    """A pass that this thread is in."""

    request: Request
    run: Run
    seeing: Pass
    generates: bool
    alone: bool  # whether the pass is a request by itself


class Lookout:
    """Watches one model: `begun()` makes a request, `ended(request)` is told when one is over.

    `trouble(error)` is told what went wrong in here; it never reaches whoever runs the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        every: int,
        window: int,
        begun: Callable[[], Request],
        ended: Callable[[Request], None],
        trouble: Callable[[Exception], str],
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
        self._begun, self._ended, self._trouble = begun, ended, trouble
        self._names = tuple(inspect.signature(model.forward).parameters)
        self._here = threading.local()
        self._lock, self._closed = threading.Lock(), False
        self._inside: set[int] = set()
        self._ways_out = [watch(model, self), *attach(model, self._before, self._after, self._generating)]

    def close(self) -> None:
        """Leave the model as it was, as soon as no thread is inside a pass through it."""
        with self._lock:
            self._closed = True
            self._inside.discard(threading.get_ident())  # an interrupt may have ended a pass without a word
            self._leave()

    def _leave(self) -> None:
        while self._closed and not self._inside and self._ways_out:
            self._ways_out.pop()()

    @contextmanager
    def request(
        self, ends: frozenset[int] | None = None, length: int | None = None, *, within: bool = False
    ) -> Iterator[Request]:
        """Everything this context runs is one request; `within` another it is a part of that one.

        `ends` are tokens that end a sequence, by default the model's; `length` is that of the prompts, where it is
        known. A request that an error ends has no report.
        """
        around = self._scope() if within else None
        request = self._begun() if around is None else around.request
        scope = _Scope(self, request, self._told((), {})[0] if ends is None else ends, length)
        _SCOPES.set((*_SCOPES.get(), scope))
        try:
            yield request
        finally:
            _SCOPES.set(tuple(one for one in _SCOPES.get() if one is not scope))
        if around is None and (self._watching or not within):
            self._ended(request)

    @property
    def _watching(self) -> bool:
        return self.on and not self._closed

    def _scope(self) -> _Scope | None:
        return next((one for one in reversed(_SCOPES.get()) if one.lookout is self), None)

    def _generating(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[Request]:
        return self.request(*self._told(args, kwargs), within=True)

    def _told(self, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[frozenset[int], int | None]:
        """Tokens that end a sequence and the length of prompts, from the arguments of `generate`."""
        settings = options.get("generation_config") or getattr(self._model, "generation_config", None)
        ends = options.get("eos_token_id", getattr(settings, "eos_token_id", None))
        ids = args[0] if args else options.get("input_ids", options.get("inputs"))
        return (
            frozenset(one for one in (ends if isinstance(ends, list) else [ends]) if isinstance(one, int)),
            ids.shape[1] if isinstance(ids, Tensor) and ids.ndim == 2 else None,
        )

    def looks(self) -> bool:
        """Whether the pass that this thread is in is to be looked at."""
        return getattr(self._here, "looking", None) is not None

    def __call__(self, seen: Seen) -> None:
        """See one layer of a pass."""
        looking: _Looking | None = getattr(self._here, "looking", None)
        if looking is not None:
            try:
                looking.seeing.see(seen)
            except Exception as problem:
                self._failed(looking.request, problem)

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self._lock:
            self._inside.add(threading.get_ident())
        self._here.looking = None
        if self._watching:
            scope = self._scope()
            try:
                self._here.looking = self._begin(scope, dict(zip(self._names, args, strict=False)) | kwargs)
            except Exception as problem:
                self._failed(None if scope is None else scope.request, problem)

    def _begin(self, scope: _Scope | None, given: dict[str, Any]) -> _Looking | None:
        cache, alone = given.get("past_key_values"), scope is None
        if scope is None:
            if cache is not None:
                return None  # nobody says which request it goes on with
            scope = _Scope(self, self._begun())
        run = None if cache is None else next((one for one in scope.runs if one.holds(cache)), None)
        if run is None:
            read = 0 if cache is None or scope.length is None else int(cache.get_seq_length())
            run = Run(scope.ends, self._window, None if scope.length is None else scope.length - read)
            run.keep(cache)
            scope.runs.append(run)
            scope.request.runs.append(run)
        seeing, generates = run.begin(given, self._every)
        return None if seeing is None else _Looking(scope.request, run, seeing, generates, alone)

    def _after(self, out: Any) -> None:
        looking: _Looking | None = getattr(self._here, "looking", None)
        self._here.looking = None
        if looking is not None and out is not None:
            try:
                self._end(looking, getattr(out, "past_key_values", None))
            except Exception as problem:
                self._failed(looking.request, problem)
            if looking.alone:
                self._ended(looking.request)
        with self._lock:
            self._inside.discard(threading.get_ident())
            self._leave()

    def _end(self, looking: _Looking, cache: object) -> None:
        row = looking.seeing.row()
        if row is not None:
            looking.run.end(row, looking.generates)
        if cache is not None:
            looking.run.keep(cache)

    def _failed(self, request: Request | None, problem: Exception) -> None:
        said = self._trouble(problem)
        if request is not None and request.problem is None:  # what fails later may fail because of the first
            request.problem = said
