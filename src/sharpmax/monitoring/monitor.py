"""`monitor`: score every request to a model, log it and raise alarms."""

from __future__ import annotations

import inspect
import json
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial, wraps
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from sharpmax.errors import FileFormatError, UnsupportedError, reject, reject_type
from sharpmax.files import read_json, write_text
from sharpmax.integrations import torch_modules
from sharpmax.integrations.transformers.interface import modules_of, observed
from sharpmax.integrations.transformers.support import check_model, is_torch_module
from sharpmax.models.language import context_of, weights_fingerprint
from sharpmax.models.scoring import Reply, batches
from sharpmax.monitoring.requests import Request, Row
from sharpmax.monitoring.scores import Baseline, Learned, Report, learn, split
from sharpmax.probing.capture import check_choice
from sharpmax.probing.measurement import call_model
from sharpmax.stats.call import AttentionCall

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SCHEMA, _EVENT = 3, "sharpmax.monitor"
_SETTINGS = ("false_alarms", "every", "generated", "rows")
_PROMPTS = "a list of prompts, each a text or a list of tokens"
_INPUTS = "a list of inputs, each a tensor, a tuple of arguments or a mapping of keyword arguments"
_AT_ONCE, _AT_ONCE_ON_CPU = 16_384, 2_048
_MARK, _GENERATE = "_sharpmax_attached", "generate"

# Without this handler, Python would print alarms on stderr if the caller configures no logging.
logging.getLogger(_EVENT).addHandler(logging.NullHandler())


_REQUESTS: ContextVar[tuple[Request, ...]] = ContextVar("sharpmax_requests", default=())


class Monitor:
    """Monitors a model until `close()`. `sharpmax.monitor` creates it, `Monitor.load` loads it.

    A request is a call of `model.generate`, a forward pass without a cache, or everything inside
    `with monitor.request() as r:`. Inside the block `r.report` is about the rows so far, afterwards about all of them.
    Each report goes to the callback and, as one line of JSON, to the logger: a warning if there is an alarm. The
    outputs of the model do not change. An error inside the monitor is logged once; the request then has no score.

    Several threads may use the model at once. The attention of a compiled model cannot be observed; its reports say so.
    Without baselines (`known` None) rows are measured and nothing is reported.
    """

    def __init__(
        self,
        model: nn.Module,
        known: Learned | None,
        *,
        false_alarms: float = 0.01,
        every: int = 16,
        generated: int = 0,
        rows: str = "last",
        callback: Callable[[Report], None] | None = None,
        logger: logging.Logger | None = None,
    ) -> None:
        module = is_torch_module(model)
        if not module and check_model(model).config.is_encoder_decoder:
            raise UnsupportedError(
                f"model: {type(model).__name__} has an encoder and a decoder; allowed: models with one stack of layers"
            )
        if _MARK in vars(model):
            reject("model", "a model that has a monitor", "one monitor at a time", "close the other one first")
        self.false_alarms, self.every, self.rows = false_alarms, every, rows
        self.generated = 0 if known is not None and known.generated is None else generated
        self.problem: Exception | None = None  # the first error inside the monitor
        self._on, self._module = True, module
        self._model = model
        self._known: Any = known
        self._name = str(getattr(model, "name_or_path", None) or type(model).__name__)
        self._logger = logging.getLogger(_EVENT) if logger is None else logger
        self._callback = callback
        self._parameters = tuple(inspect.signature(model.forward).parameters)
        self._local = threading.local()
        self._attached = ExitStack()
        self._attach(model)

    @property
    def thresholds(self) -> dict[str, float]:
        """The scores above which there is an alarm, for requests without and with measured generated tokens."""
        kinds = {"prompt": self._known.prompt, "generated": self._known.generated}
        return {name: float(kind.threshold) for name, kind in kinds.items() if kind is not None}

    def pause(self) -> None:
        """Stop measuring until `resume()`."""
        self._on = False

    def resume(self) -> None:
        """Start measuring again, with the next forward pass."""
        self._on = True

    def close(self) -> None:
        """Detach from the model. A pass still running in another thread ends without a report."""
        self._on = False
        self._attached.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in _SETTINGS)
        return f"Monitor({self._name!r}, {shown})"

    def save(self, path: str | Path) -> Path:
        """Save baselines and thresholds to the JSON file `path`, for `Monitor.load`."""
        known = self._known
        body = {
            "schema": _SCHEMA, "kind": _EVENT, "weights": weights_fingerprint(self._model),
            **{name: getattr(self, name) for name in _SETTINGS},
            "heads": list(known.heads),
            "prompt": known.prompt.to_dict(),
            "later": None if known.generated is None else known.generated.to_dict(),
        }  # fmt: skip
        return write_text(path, json.dumps(body, allow_nan=False) + "\n")

    @classmethod
    def load(
        cls,
        model: nn.Module,
        path: str | Path,
        *,
        callback: Callable[[Report], None] | None = None,
        logger: logging.Logger | None = None,
    ) -> Monitor:
        """Load a monitor saved by `save` for a model with the same weights.

        Raises FileFormatError for a damaged file and ArgumentError for other weights.
        """
        body = read_json(path, "monitor")
        if not isinstance(body, dict) or body.get("kind") != _EVENT or body.get("schema") != _SCHEMA:
            raise FileFormatError(f"monitor: {str(path)!r} was not saved by Monitor.save (schema {_SCHEMA})")
        if body.get("weights") != (own := weights_fingerprint(model)):
            given = f"{str(path)!r}, learned with the weights {body.get('weights')}"
            reject("path", given, f"a file for the weights of this model, {own}", "learn again: sharpmax.monitor")
        try:
            settings = {name: body[name] for name in _SETTINGS}
            check_settings(**settings)
            heads = [(int(layer), int(head)) for layer, head in body["heads"]]
            prompt = Baseline.from_dict(body["prompt"], len(heads))
            generated = None if body["later"] is None else Baseline.from_dict(body["later"], len(heads))
        except (KeyError, TypeError, ValueError, RuntimeError) as problem:
            raise FileFormatError(f"monitor: {str(path)!r} is damaged: {problem}; learn again") from None
        return cls(model, Learned(heads, prompt, generated), **settings, callback=callback, logger=logger)

    @contextmanager
    def request(self) -> Iterator[Request]:
        """Treat everything inside the block as one request. An error that leaves the block leaves no report."""
        request = Request(self, self._ends({}))
        _REQUESTS.set((*_REQUESTS.get(), request))
        try:
            yield request
        finally:
            _REQUESTS.set(tuple(one for one in _REQUESTS.get() if one is not request))
        self._publish(request)

    def judge(self, request: Request) -> Report:
        """The report about the rows of a request so far."""
        found: Report | None = None
        with self._caught(request):
            found = self._known.report(request.runs, request.problem)
        return found or Report((), why=f"the monitor failed: {request.problem}")

    def _publish(self, request: Request) -> None:
        if self._known is None:
            return
        report = request.finish()
        with self._caught(request):
            level = logging.WARNING if report.alarm else logging.INFO
            if self._logger.isEnabledFor(level):
                self._logger.log(level, "%s", report.to_line(event=_EVENT, model=self._name))
            if self._callback is not None:
                self._callback(report)

    @contextmanager
    def _caught(self, request: Request) -> Iterator[None]:
        """Keep errors of the monitor away from the caller of the model. Only the first is logged."""
        try:
            yield
        except Exception as problem:
            request.problem = request.problem or f"{type(problem).__name__}: {problem}"
            if self.problem is None:
                self.problem = problem
                if self._known is not None:
                    self._logger.error("the monitor failed; the model continues without it", exc_info=problem)

    def _attach(self, model: Any) -> None:
        """Hook forward passes and `generate`. A deep copy of the model keeps these hooks, so they check for `model`."""
        self._attached.enter_context(torch_modules.observed(model, self) if self._module else observed(model, self))
        vars(model)[_MARK] = True
        self._attached.callback(vars(model).pop, _MARK)

        def entering(this: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if this is model:
                self._before(args, kwargs)

        def leaving(this: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            if this is model:
                self._after(out)

        self._attached.callback(model.register_forward_pre_hook(entering, with_kwargs=True).remove)
        self._attached.callback(model.register_forward_hook(leaving, with_kwargs=True, always_call=True).remove)
        if self._module or not hasattr(model, _GENERATE):
            return
        before, own = vars(model).get(_GENERATE), model.generate

        @wraps(type(model).generate)
        def generate(this: Any, *args: Any, **kwargs: Any) -> Any:
            return self._generate(own, args, kwargs) if this is model else type(this).generate(this, *args, **kwargs)

        vars(model)[_GENERATE] = bound = MethodType(generate, model)

        def restore() -> None:
            if vars(model).get(_GENERATE) is bound:  # other code may have wrapped it since
                del vars(model)[_GENERATE]
                vars(model).update({} if before is None else {_GENERATE: before})

        self._attached.callback(restore)

    def _current(self) -> Request | None:
        return next((one for one in reversed(_REQUESTS.get()) if one.monitor is self), None)

    def _generate(self, generate: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run `generate` as a request, or as a part of the request around it."""
        around = self._current()
        if around is None and not self._on:
            return generate(*args, **options)
        with self.request() if around is None else nullcontext(around) as request:
            ids = args[0] if args else options.get("input_ids", options.get("inputs"))
            request.length = ids.shape[1] if isinstance(ids, Tensor) and ids.ndim == 2 else None
            request.ends, request.fresh = self._ends(options), True
            return generate(*args, **options)

    def _ends(self, options: Mapping[str, Any]) -> frozenset[int]:
        """The end-of-sequence tokens of a call of `generate`."""
        config = options.get("generation_config") or getattr(self._model, "generation_config", None)
        ends = options.get("eos_token_id", getattr(config, "eos_token_id", None))
        return frozenset(one for one in (ends if isinstance(ends, list) else [ends]) if isinstance(one, int))

    def wants_call(self) -> bool:
        """Whether the current pass of this thread is measured."""
        return getattr(self._local, "active", None) is not None

    def __call__(self, call: AttentionCall) -> None:
        """Measure one layer of a pass."""
        if self.wants_call():
            request, _, row = self._local.active
            with self._caught(request):
                row.see(call)

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._local.active = None
        given = dict(zip(self._parameters, args, strict=False)) | kwargs
        cache, request = given.get("past_key_values"), self._current()
        if not self._on or (request is None and cache is not None):
            return  # outside a request, the owner of a cache is unknown
        request = Request(self) if request is None else request
        with self._caught(request):
            run = request.run_of(cache)
            row = Row(rows=self.rows) if self._module else run.begin(given, self.every)
            self._local.active = None if row is None else (request, run, row)

    def _after(self, out: Any) -> None:
        active, self._local.active = getattr(self._local, "active", None), None
        if active is None or out is None:
            return
        request, run, row = active
        with self._caught(request):
            found = row.finish()
            if found and not row.generated:
                run.prompt = row
            elif found and run.prompt is not None and len(row.entropy) == len(run.prompt.entropy):
                run.generated.append(row)
            if (cache := getattr(out, "past_key_values", None)) is not None:
                run.cache = weakref.ref(cache)
        if self._current() is None:  # the request is this one pass
            self._publish(request)


def monitor(
    model: nn.Module,
    reference: Iterable[Any],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    rows: str = "last",
    false_alarms: float = 0.01,
    every: int = 16,
    generated: int = 2,
    callback: Callable[[Report], None] | None = None,
    logger: logging.Logger | None = None,
) -> Monitor:
    """Learn how focused a model is on typical prompts, and monitor it from then on.

    `reference` holds prompts like those the model is meant for, as texts (with its `tokenizer`) or lists of tokens. The
    entropy of every head is measured in the last row of each prompt and of every `every`-th token that the model
    generates next, `generated` of them (0: prompts only). One part of the reference gives a baseline per head and the
    weights of the score. The other part gives the threshold: a new request from the same distribution exceeds it with
    probability at most `false_alarms`. That takes at least 1/`false_alarms` + 7 prompts.

    The score of a request is the highest score of its rows: the last row of the prompt and the `generated` latest of
    every `every`-th generated token. The score of a row is its mean excess of entropy over all heads, less the main
    directions in which the reference varies, in standard deviations of the reference.

    Any other torch module that attends by `scaled_dot_product_attention` or `nn.MultiheadAttention` is monitored pass
    by pass. Its `reference` holds inputs of forward passes, each a tensor, a tuple of arguments or a mapping of keyword
    arguments; every sequence of a batch is an example. `rows` selects the rows whose mean entropy counts, "last", "log"
    or "all", as in `sharpmax.capture`. Fused inference paths are off while the module is monitored.

    >>> import torch, sharpmax as sm
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    ...                      num_attention_heads=4)
    >>> model = LlamaForCausalLM(config).eval()
    >>> known = [torch.randint(97, (20,)).tolist() for _ in range(30)]
    >>> with sm.monitor(model, known, false_alarms=0.1, generated=0) as watched, watched.request() as r:
    ...     out = model(torch.randint(97, (2, 20)))
    >>> len(r.report.scores), r.report.why
    (2, None)
    """
    check_settings(false_alarms, every, generated, rows)
    module = is_torch_module(model)
    if isinstance(reference, (str, bytes, Tensor, Mapping)) or not isinstance(reference, Iterable):
        reject_type("reference", type(reference).__name__, _INPUTS if module else _PROMPTS)
    if module:
        generated, read = 0, list(reference)
        if not read:
            reject("reference", "no inputs", _INPUTS)
        sites = torch_modules.observable_sites(model, read[0])
        heads = [(number, head) for number, site in enumerate(sites) for head in range(site.heads)]
    else:
        if rows != "last":
            reject("rows", repr(rows), "'last' for a transformers model")
        read = [_tokens(number, prompt, tokenizer) for number, prompt in enumerate(reference)]
        split(len(read), false_alarms)  # rejects too few prompts before the model reads any
        generated = generated if getattr(model, "can_generate", bool)() else 0
        heads = heads_of(model)
    found = reference_rows(model, read, every=every, generated=generated, rows=rows)
    return Monitor(
        model, learn(*found, heads, false_alarms), false_alarms=false_alarms, every=every, generated=generated,
        rows=rows, callback=callback, logger=logger,
    )  # fmt: skip


def check_settings(false_alarms: object, every: object = 1, generated: object = 0, rows: object = "last") -> None:
    """Raise ArgumentError for settings out of range."""
    check_choice(rows)
    if not isinstance(false_alarms, float) or not 0.0 < false_alarms < 1.0:
        reject("false_alarms", repr(false_alarms), "a number above 0 and below 1, such as 0.01")
    for name, value, least in (("every", every, 1), ("generated", generated, 0)):
        if type(value) is not int or value < least:
            reject(name, repr(value), f"a whole number from {least}")


def heads_of(model: Any) -> list[tuple[int, int]]:
    """The (layer, head) of every column of the entropies that a `Row` measures in a transformers model."""
    return [(number, head) for number, one in enumerate(modules_of(model)) for head in range(one.heads)]


def tokens_at_once(model: PreTrainedModel) -> int:
    """The number of tokens per batch: many for a GPU, what fits the cache for a CPU."""
    return _AT_ONCE_ON_CPU if model.device.type == "cpu" else _AT_ONCE


def _tokens(number: int, prompt: Any, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            reject("tokenizer", None, "the model's tokenizer if prompts are texts")
        prompt = tokenizer(prompt).input_ids
    ids = prompt.tolist() if isinstance(prompt, Tensor) else prompt
    if not isinstance(ids, (list, tuple)) or not all(type(one) is int for one in ids):
        reject_type("reference", f"{type(prompt).__name__} as prompt {number}", _PROMPTS)
    if not ids:
        reject("reference", f"prompt {number} with no tokens", "prompts with at least one token")
    return list(ids)


def reference_rows(
    model: Any, reference: Sequence[Any], *, every: int = 8, generated: int = 0, rows: str = "last"
) -> tuple[Tensor, Tensor]:
    """Measure the last row of every prompt, and that of every `every`-th token the model then generates.

    Returns entropies `[N, 1 + generated, heads]` on the CPU, and which of these rows exist. A torch module reads inputs
    of its forward pass, every sequence of which counts, and generates nothing.
    """
    order: list[int] | None = None
    if is_torch_module(model):
        calls = [partial(torch_modules.run_example, model, one) for one in reference]
    else:
        context, longest = context_of(model), max(map(len, reference), default=0)
        new = generated * every + 1 if generated else 0
        if context is not None and longest + new > context:
            given = f"a prompt of {longest} tokens" + (f" and {new} to generate" if new else "")
            hint = "leave out the longest prompts"
            reject("reference", given, f"up to {context} tokens, the model's context", hint)
        groups = list(batches([Reply(tuple(ids), len(ids)) for ids in reference], tokens_at_once(model)))
        calls = [partial(_read, model, [reference[place] for place in group], new) for group in groups]
        order = [place for group in groups for place in group]
    found = []
    with Monitor(model, None, every=every, generated=generated, rows=rows) as watching, torch.no_grad():
        for call in calls:
            with watching.request() as request:
                call()
            if watching.problem is not None:
                raise watching.problem
            run = request.runs[0]
            if run.prompt is None:
                reject("model", "a model whose attention was not observed", "a model that is not compiled")
            read = [run.prompt, *run.generated]
            missing = 1 + generated - len(read)
            entropy = pad(torch.stack([row.entropy.cpu().double() for row in read], 1), (0, 0, 0, missing))
            found.append((entropy, pad(torch.stack([row.valid.cpu() for row in read], 1), (0, missing))))
    if len({one.shape[2] for one, _ in found}) > 1:
        reject("reference", "inputs with different numbers of heads", "inputs with the same attention calls")
    entropy, valid = (torch.cat(parts) for parts in zip(*found, strict=True))
    if order is not None:
        place_of = torch.tensor(order).argsort()
        entropy, valid = entropy[place_of], valid[place_of]
    wrong = (~entropy.isfinite()).any(-1).any(-1).nonzero()
    if len(wrong):
        given = f"prompt {int(wrong[0])}, for which attention is NaN"
        reject("reference", given, "prompts without NaN")
    return entropy, valid


def _read(model: Any, prompts: Sequence[Sequence[int]], new: int) -> None:
    """Let a language model read prompts as one batch and generate `new` tokens."""
    # Padding is on the left to generate and on the right otherwise, so that positions need not be passed.
    padded = partial(pad_sequence, batch_first=True, padding_side="left" if new else "right")
    ids = [torch.tensor(one, device=model.device) for one in prompts]
    given = {"input_ids": padded(ids), "attention_mask": padded([torch.ones_like(one) for one in ids])}
    if new:
        model.generate(**given, max_new_tokens=new, do_sample=False, pad_token_id=0)
    else:
        call_model(model, given)
