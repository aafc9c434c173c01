"""Requests to a transformers model and the rows in them, seen from beside it: nothing it computes depends on this."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sharpmax.errors import UnsupportedError
from sharpmax.hf.interface import modules_of, watch
from sharpmax.hf.watching import Seen
from sharpmax.probe.watch.attaching import attach, check_free
from sharpmax.probe.watch.passes import Pass, Run
from sharpmax.probe.watch.requests import Request

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Lookout", "heads_of"]


def heads_of(model: PreTrainedModel) -> list[tuple[int, int]]:
    """Layer and head of every column of a row."""
    return [(number, head) for number, one in enumerate(modules_of(model)) for head in range(one.heads)]


@dataclass(frozen=True, eq=False)
class _Scope:
    """What runs here and now belongs to this request. Its runs alone may go on in it, not those of scopes around."""

    lookout: Lookout
    request: Request
    ends: frozenset[int] = frozenset()
    length: int | None = None
    """How many tokens each prompt has, where that is known."""

    runs: list[Run] = field(default_factory=list)


_SCOPES: ContextVar[tuple[_Scope, ...]] = ContextVar("sharpmax_scopes", default=())


@dataclass(frozen=True, eq=False)
class _Looking:
    """A pass that this thread is in."""

    request: Request
    run: Run
    seeing: Pass
    generates: bool
    alone: bool
    """Whether the pass is a request by itself."""


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
