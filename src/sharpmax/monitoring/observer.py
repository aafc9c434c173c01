"""Observe a transformers model: which passes belong to a request, and the entropies of the rows that count in it."""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sharpmax.errors import UnsupportedError, reject
from sharpmax.integrations.transformers.interface import modules_of, observe
from sharpmax.stats.call import AttentionCall, Logits, without_autocast

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sharpmax.monitoring.scores import Head, Report

_AT_ONCE, _AT_ONCE_CPU = 1 << 22, 1 << 16
"""Logits kept until they are measured together: many, to launch few kernels, or what a core's cache holds."""

_MASKS = 2
"""How many masks the layers of one model share: most have one, some another for layers with a sliding window."""


@dataclass(frozen=True, eq=False)
class Row:
    """One row of every sequence of a batch: entropies `[B, heads]` over all layers, and visible keys `[B]`."""

    entropy: Tensor
    count: Tensor
    valid: Tensor  # which sequences have it `[B]`: not padding alone, and not ended before


class Pass:
    """One pass through a model, measured layer by layer; `places` `[B]` are the rows to measure, None the last."""

    def __init__(self, places: Tensor | None = None, valid: Tensor | None = None, generates: bool = False) -> None:
        self.generates = generates
        self._places, self._valid = places, valid
        self._logits: dict[int, Tensor] = {}
        self._kept = 0
        self._entropy: dict[int, Tensor] = {}
        # Layers with a sliding window see less than the others: the count is that of the layer that sees most.
        self._keys = 0
        self._visible: Tensor | None = None
        self._counted: deque[Tensor] = deque(maxlen=_MASKS)

    def see(self, call: AttentionCall) -> None:
        """Measure the row of every sequence in one layer."""
        if call.queries == 0 or call.keys == 0:
            return
        with without_autocast(call.q.device):
            logits = (call if self._places is None else call.of_rows(self._places)).logits(slice(-1, None))
            # Every operation here delays a generated token, so the rest is done for all layers at once.
            self._logits[call.layer] = logits.scaled(None)
        self._kept += logits.values.numel()
        if self._kept > (_AT_ONCE_CPU if call.q.device.type == "cpu" else _AT_ONCE):
            self._measure()
        if logits.hidden is None:
            self._keys = max(self._keys, call.keys)
        elif not any(call.mask is one for one in self._counted):
            count = (~logits.hidden).expand(call.batch, -1, 1, call.keys).sum(-1).amax((1, 2))
            self._visible = count if self._visible is None else self._visible.maximum(count.to(self._visible.device))
            if call.mask is not None:
                self._counted.append(call.mask)

    def _measure(self) -> None:
        """The entropy of the rows whose logits are kept, those of equal shape at once."""
        self._kept = 0
        alike: dict[Any, list[int]] = {}
        for layer, logits in self._logits.items():
            alike.setdefault((logits.shape[-1], logits.device, logits.dtype), []).append(layer)
        for (_, device, _), layers in alike.items():
            rows = [self._logits.pop(layer) for layer in layers]
            with without_autocast(device):
                stats = Logits(torch.cat(rows, dim=1), None).measure(frozenset({"mean"}))
                found = stats.entropy[:, :, 0].split([one.shape[1] for one in rows], dim=1)
            self._entropy.update(zip(layers, found, strict=True))

    def row(self) -> Row | None:
        """The measured row, layers in their order; None if no layer was measured."""
        self._measure()
        if not self._entropy:
            return None
        found = [self._entropy[layer] for layer in sorted(self._entropy)]
        entropy = torch.cat([one.to(found[0].device) for one in found], dim=1)
        count = torch.full((len(entropy),), self._keys, device=entropy.device)
        if self._visible is not None:
            count = self._visible.to(count.device).clamp_min(count)
        return Row(entropy, count, torch.ones_like(count, dtype=torch.bool) if self._valid is None else self._valid)


@dataclass(eq=False)
class Run:
    """The sequences of one batch from their prompt on, as one cache holds them."""

    ends: frozenset[int] = frozenset()
    """Tokens that end a sequence: what a model computes after one, while others of the batch go on, is padding."""

    window: int = 1  # how many of the latest rows of generated tokens to keep
    unread: int | None = None
    """Tokens of the prompt that are still to be read, where that is known: what follows them is guessed."""

    prompt: Row | None = None
    generated: deque[Row] = field(default_factory=deque)
    _steps: int = 0
    _valid: Tensor | None = None
    _cache: Any = None

    def holds(self, cache: object) -> bool:
        """Whether these are the sequences of a cache."""
        return self._cache is not None and self._cache() is cache

    def keep(self, cache: object) -> None:
        """Remember the cache that goes on with these sequences, without keeping it alive."""
        self._cache = None if cache is None else weakref.ref(cache)

    def begin(self, given: Mapping[str, Any], every: int) -> Pass | None:
        """Begin a pass with these arguments of the model: what measures it (None: nothing)."""
        ids = given.get("input_ids")
        tokens = given.get("inputs_embeds") if ids is None else ids
        if not isinstance(tokens, Tensor) or tokens.ndim < 2:
            raise UnsupportedError("the model was given neither input_ids [B, L] nor inputs_embeds [B, L, D]")
        length = tokens.shape[1]
        # Several tokens after a prompt and before any generated one are the prompt's next part.
        if self.prompt is None or (length > 1 and self._steps == 0):
            guessed = 0 if self.unread is None else max(0, length - self.unread)
            self.unread = None if self.unread is None else max(0, self.unread - length)
            places, self._valid = _last_places(given.get("attention_mask"), tokens, guessed)
            return Pass(places, self._valid)
        self._steps += 1
        if self.window and self.ends and isinstance(ids, Tensor) and len(ids) > 1:
            going_on = ~torch.isin(ids[:, 0], torch.tensor(sorted(self.ends), device=ids.device))
            self._valid = going_on if self._valid is None else going_on & self._valid.to(going_on.device)
        if self.window == 0 or self._steps % every:
            return None
        # Of several tokens the first is the model's own; the others are guesses of speculative decoding.
        places = None if length == 1 else torch.zeros(len(tokens), dtype=torch.long, device=tokens.device)
        return Pass(places, self._valid, generates=True)

    def end(self, measured: Pass) -> None:
        """Keep the row of a pass."""
        row = measured.row()
        if row is not None and not measured.generates:
            self.prompt = row
        elif row is not None and self.prompt is not None and len(row.entropy) == len(self.prompt.entropy):
            self.generated.append(row)
            while len(self.generated) > self.window:
                self.generated.popleft()


def _last_places(mask: object, tokens: Tensor, guessed: int) -> tuple[Tensor | None, Tensor | None]:
    """The last place of each sequence that is neither padding nor guessed, and whether it has one; None: the last."""
    batch, length = tokens.shape[:2]
    if not isinstance(mask, Tensor) or mask.ndim != 2 or length == 0 or mask.shape[1] < length:
        return (torch.full((batch,), length - 1 - guessed, device=tokens.device) if guessed else None), None
    real = mask[:, mask.shape[1] - length : mask.shape[1] - guessed] > 0
    last = real.shape[1] - 1 - real.flip(-1).to(torch.uint8).argmax(-1)
    return last, real.any(-1)


class Request:
    """A request that is being answered or has been; its properties are about the rows measured so far."""

    def __init__(self, judge: Callable[[Request], Report]) -> None:
        self.runs: list[Run] = []
        self.problem: str | None = None
        """What went wrong inside the monitor, if anything did."""

        self._judge = judge
        self._report: Report | None = None

    @property
    def report(self) -> Report:
        """The report about the rows so far."""
        return self._judge(self) if self._report is None else self._report

    def finish(self) -> Report:
        """The report, which stays as it is from now on; the rows it was made from are let go."""
        self._report = self.report
        self.runs.clear()
        return self._report

    @property
    def scores(self) -> list[float | None]:
        """The score of each sequence, in the order of the batch; None where there is none."""
        return self.report.scores

    @property
    def alarm(self) -> bool:
        """Whether a sequence is less focused than the reference allows."""
        return self.report.alarm

    @property
    def heads(self) -> tuple[Head, ...]:
        """Heads above their own thresholds, worst first."""
        return self.report.heads

    @property
    def why(self) -> str | None:
        """Why there is no score, if there is none."""
        return self.report.why


_MARK = "_sharpmax_attached"
_GENERATE = "generate"


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
    alone: bool = False  # whether one pass is the whole request


_SCOPES: ContextVar[tuple[_Scope, ...]] = ContextVar("sharpmax_scopes", default=())


class Observer:
    """Observes one model: `judge` reports on a request, `ended` is called with each request that is over.

    `failed` is called with errors of the observer itself; they never reach the caller of the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        every: int,
        window: int,
        judge: Callable[[Request], Report],
        ended: Callable[[Request], None],
        failed: Callable[[Exception], str],
    ) -> None:
        self.heads = heads_of(model)
        if model.config.is_encoder_decoder:
            raise UnsupportedError(
                f"model: {type(model).__name__} has an encoder and a decoder, of which no single row says where it "
                "looks; allowed: models with one stack of layers"
            )
        if _MARK in vars(model):
            reject("model", "a model that is monitored already", "one monitor at a time", "close the other one first")
        self.on = True
        self._model, self._every, self._window = model, every, window
        self._judge, self._ended, self._failed = judge, ended, failed
        self._names = tuple(inspect.signature(model.forward).parameters)
        self._local = threading.local()
        self._lock, self._closed = threading.Lock(), False
        self._inside: set[int] = set()
        self._undo = [observe(model, self), *self._attach(model)]

    def _attach(self, model: PreTrainedModel) -> Iterator[Callable[[], Any]]:
        """Hook passes and `generate`; yields functions that undo this, to be called last first.

        The hooks are functions, not methods: a deep copy of the model shares them and they ignore it.
        """
        vars(model)[_MARK] = True
        yield lambda: vars(model).pop(_MARK, None)

        def entering(this: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if this is model:
                self._before(args, kwargs)

        def leaving(this: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            if this is model:
                self._after(out)

        yield model.register_forward_pre_hook(entering, with_kwargs=True).remove
        yield model.register_forward_hook(leaving, with_kwargs=True, always_call=True).remove
        if not hasattr(model, _GENERATE):
            return
        own = vars(model).get(_GENERATE)
        kind: Any = type(model)

        @functools.wraps(kind.generate)
        def generate(this: Any, *args: Any, **kwargs: Any) -> Any:
            if this is not model:
                return type(this).generate(this, *args, **kwargs)
            with self.request(*self._generation_arguments(args, kwargs), within=True):
                return kind.generate(this, *args, **kwargs) if own is None else own(*args, **kwargs)

        vars(model)[_GENERATE] = bound = MethodType(generate, model)

        def restore() -> None:
            if vars(model).get(_GENERATE) is bound:  # other code may have wrapped it meanwhile
                del vars(model)[_GENERATE]
                vars(model).update({} if own is None else {_GENERATE: own})

        yield restore

    def close(self) -> None:
        """Detach from the model as soon as no thread is inside a pass through it."""
        self._closed = True
        self._leave()  # an interrupt may have skipped the hook after the pass

    def _leave(self) -> None:
        with self._lock:
            self._inside.discard(threading.get_ident())
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
        request = Request(self._judge) if around is None else around.request
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

    def _generation_arguments(
        self, args: tuple[Any, ...], options: Mapping[str, Any]
    ) -> tuple[frozenset[int], int | None]:
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
        if self.wants_call():
            scope, _, measured = self._local.active
            try:
                measured.see(call)
            except Exception as problem:
                self._fail(scope, problem)

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self._lock:
            self._inside.add(threading.get_ident())
        self._local.active = None
        given = dict(zip(self._names, args, strict=False)) | kwargs
        cache, scope = given.get("past_key_values"), self._scope()
        if not self._active or (scope is None and cache is not None):
            return  # a pass with a cache and without a scope continues an unknown request
        scope = _Scope(self, Request(self._judge), alone=True) if scope is None else scope
        try:
            run = None if cache is None else next((one for one in scope.runs if one.holds(cache)), None)
            if run is None:
                read = 0 if cache is None or scope.length is None else int(cache.get_seq_length())
                run = Run(scope.ends, self._window, None if scope.length is None else scope.length - read)
                run.keep(cache)
                scope.runs.append(run)
                scope.request.runs.append(run)
            measured = run.begin(given, self._every)
            self._local.active = None if measured is None else (scope, run, measured)
        except Exception as problem:
            self._fail(scope, problem)

    def _after(self, out: Any) -> None:
        active, self._local.active = getattr(self._local, "active", None), None
        if active is not None and out is not None:
            scope, run, measured = active
            try:
                run.end(measured)
                if (cache := getattr(out, "past_key_values", None)) is not None:
                    run.keep(cache)
            except Exception as problem:
                self._fail(scope, problem)
            if scope.alone:
                self._ended(scope.request)
        self._leave()

    def _fail(self, scope: _Scope, problem: Exception) -> None:
        message = self._failed(problem)
        if scope.request.problem is None:  # later errors may follow from the first
            scope.request.problem = message
