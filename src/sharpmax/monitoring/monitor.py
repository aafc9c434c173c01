"""`monitor`: score every request of a language model and raise alarms."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sharpmax.errors import FileFormatError, reject, reject_type
from sharpmax.files import read_json, write_text
from sharpmax.lazy import require
from sharpmax.models.language import context_of, weights_fingerprint
from sharpmax.models.scoring import Reply, batches
from sharpmax.monitoring.observer import Observer, Request, heads_of
from sharpmax.monitoring.scores import Baseline, Learned, Report, learn, split
from sharpmax.probing.measurement import call_model

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SCHEMA, _EVENT = 2, "sharpmax.monitor"
_SETTINGS = ("false_alarms", "every", "generated")
_PROMPTS = "a list of prompts, each a text or a list of tokens"
_AT_ONCE, _AT_ONCE_ON_CPU = 16_384, 2_048
_BUCKETS = (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)

# Without a handler of the caller's, alarms do not appear on stderr.
logging.getLogger(_EVENT).addHandler(logging.NullHandler())


class Monitor:
    """Monitors a model until `close()`; made by `sharpmax.monitor`, or loaded by `Monitor.load`.

    A call of `model.generate` is a request, a plain forward pass without a cache is one, and everything inside
    `with monitor.request() as r:` is one. Each gets a `Report`, which goes to the callback, as one line of JSON to the
    logger (a warning if there is an alarm) and to the metrics. Nothing the model computes changes. An error inside the
    monitor is logged once and leaves the request without a score.

    Threads may use the model at the same time. A compiled model cannot be observed, and the reports say so.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        known: Learned,
        *,
        false_alarms: float,
        every: int,
        generated: int,
        callback: Callable[[Report], None] | None = None,
        logger: logging.Logger | None = None,
        metrics: CollectorRegistry | bool | None = None,
    ) -> None:
        self.false_alarms, self.every = false_alarms, every
        self.generated = generated if known.generated is not None else 0
        self._known, self._model = known, model
        self._name = str(model.name_or_path or type(model).__name__)
        self._logger = logging.getLogger(_EVENT) if logger is None else logger
        counts = metrics_of(metrics)
        if counts is not None:
            counts.watch(self._name, self.thresholds)
        count = None if counts is None else lambda report: counts.add(self._name, report)
        self._outputs = [one for one in (count, self._log, callback) if one is not None]
        self._failed_before = False
        self._observer = Observer(
            model, every=every, window=self.generated, judge=self._judge, ended=self._ended, failed=self._failed
        )

    @property
    def thresholds(self) -> dict[str, float]:
        """The score above which there is an alarm: of a prompt alone, and of a request that generates."""
        return dict(self._known.thresholds)

    def request(self) -> AbstractContextManager[Request]:
        """Everything that this thread lets the model compute inside `with monitor.request() as r:` is one request.

        `r.scores`, `r.alarm`, `r.heads` and `r.why` may be read inside, about the rows so far, and afterwards.
        """
        return self._observer.request()

    def pause(self) -> None:
        """Measure nothing until `resume()`."""
        self._observer.on = False

    def resume(self) -> None:
        """Measure again, from the next pass through the model on."""
        self._observer.on = True

    def close(self) -> None:
        """Detach from the model; passes that run in other threads end first."""
        self._observer.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def save(self, path: str | Path) -> Path:
        """Write baselines and thresholds as JSON to the file `path`, for `Monitor.load`."""
        known = self._known
        body = {
            "schema": _SCHEMA, "kind": _EVENT, "weights": weights_fingerprint(self._model),
            **{name: getattr(self, name) for name in _SETTINGS},
            "prompt": known.prompt.to_dict(),
            "later": None if known.generated is None else known.generated.to_dict(),
        }  # fmt: skip
        return write_text(path, json.dumps(body, allow_nan=False) + "\n")

    @classmethod
    def load(
        cls,
        model: PreTrainedModel,
        path: str | Path,
        *,
        callback: Callable[[Report], None] | None = None,
        logger: logging.Logger | None = None,
        metrics: CollectorRegistry | bool | None = None,
    ) -> Monitor:
        """Load the monitor that `save` wrote for a model with the same weights."""
        body = read_json(path, "monitor")
        if not isinstance(body, dict) or body.get("kind") != _EVENT or body.get("schema") != _SCHEMA:
            raise FileFormatError(f"monitor: {str(path)!r} is not a file of Monitor.save, schema {_SCHEMA}")
        if body.get("weights") != (own := weights_fingerprint(model)):
            given = f"{str(path)!r}, learned with the weights {body.get('weights')}"
            reject("path", given, f"a file for the weights of this model, {own}", "learn again: sharpmax.monitor")
        try:
            settings = {name: body[name] for name in _SETTINGS}
            check_settings(**settings)
            heads = heads_of(model)
            prompt, generated = (Baseline.from_dict(body[name], len(heads)) for name in ("prompt", "later"))
        except (KeyError, TypeError, ValueError, RuntimeError) as problem:
            raise FileFormatError(f"monitor: {str(path)!r} is damaged: {problem}; learn again") from None
        if prompt is None:
            raise FileFormatError(f"monitor: {str(path)!r} is damaged: it knows no prompts; learn again")
        known = Learned(heads, prompt, generated)
        return cls(model, known, **settings, callback=callback, logger=logger, metrics=metrics)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)}" for name in _SETTINGS)
        return f"Monitor({self._name!r}, {shown})"

    def _judge(self, request: Request) -> Report:
        try:
            return self._known.report(request)
        except Exception as problem:
            return Report((), why=f"the monitor failed: {self._failed(problem)}")

    def _ended(self, request: Request) -> None:
        report = request.finish()
        for publish in self._outputs:
            self._publish(publish, report)

    def _publish(self, publish: Callable[[Report], None], report: Report) -> None:
        try:
            publish(report)
        except Exception as problem:
            self._failed(problem)

    def _log(self, report: Report) -> None:
        level = logging.WARNING if report.alarm else logging.INFO
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", report.to_line(event=_EVENT, model=self._name))

    def _failed(self, problem: Exception) -> str:
        if not self._failed_before:
            self._failed_before = True
            self._logger.error("the monitor failed; the model goes on without it", exc_info=problem)
        return f"{type(problem).__name__}: {problem}"


class Metrics:
    """The metrics of all monitors that share a registry; the label `model` tells them apart."""

    def __init__(self, registry: CollectorRegistry) -> None:
        client = require("prometheus_client", "monitor", "metrics of a monitor")

        def metric(kind: str, name: str, text: str, *labels: str, **options: Any) -> Any:
            return getattr(client, kind)(f"sharpmax_monitor_{name}", text, labels, registry=registry, **options)

        self._requests = metric("Counter", "requests", "Requests, by outcome: ok, alarm, no_score", "model", "outcome")
        self._scores = metric("Histogram", "score", "Scores of sequences", "model", buckets=_BUCKETS)
        self._threshold = metric("Gauge", "threshold", "Score above which there is an alarm", "model", "rows")
        self._heads = metric("Counter", "heads_above", "Heads above their own thresholds", "model", "layer")

    def watch(self, model: str, thresholds: dict[str, float]) -> None:
        """Show the thresholds of a monitor, and its counts from zero on."""
        for rows, threshold in thresholds.items():
            self._threshold.labels(model, rows).set(threshold)
        for outcome in ("ok", "alarm", "no_score"):
            self._requests.labels(model, outcome)

    def add(self, model: str, report: Report) -> None:
        """Count a request."""
        known = [score for score in report.scores if score is not None]
        self._requests.labels(model, "alarm" if report.alarm else "ok" if known else "no_score").inc()
        for score in known:
            self._scores.labels(model).observe(score)
        for head in report.heads:
            self._heads.labels(model, str(head.layer)).inc()


_OF_REGISTRY: WeakKeyDictionary[Any, Metrics] = WeakKeyDictionary()


def metrics_of(given: CollectorRegistry | bool | None) -> Metrics | None:
    """The metrics in a registry (True: the client's own), made once for each; None for none."""
    if given is None or given is False:
        return None
    client = require("prometheus_client", "monitor", "metrics of a monitor")
    registry = client.REGISTRY if given is True else given
    if not isinstance(registry, client.CollectorRegistry):
        reject_type("metrics", type(registry).__name__, "True, None or a prometheus_client.CollectorRegistry")
    if registry not in _OF_REGISTRY:
        _OF_REGISTRY[registry] = Metrics(registry)
    return _OF_REGISTRY[registry]


def monitor(
    model: PreTrainedModel,
    reference: Iterable[str] | Iterable[Sequence[int]],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    false_alarms: float = 0.01,
    every: int = 16,
    generated: int = 2,
    callback: Callable[[Report], None] | None = None,
    logger: logging.Logger | None = None,
    metrics: CollectorRegistry | bool | None = None,
) -> Monitor:
    """Learn how focused a model is on in-distribution prompts, and monitor it from then on.

    `reference` holds prompts like those the model is meant for, as texts (with its `tokenizer`) or lists of tokens. The
    model reads each, goes on until `generated` of its own tokens, each the `every`-th, were read too (0: judge prompts
    alone), and the entropy of every head is noted in these rows. One part of the reference gives a baseline per head
    and the weights of the score; the other gives thresholds: a conformal quantile for each head by itself, and one for
    the score of a request, which a further request like those of the reference exceeds with a probability of at most
    `false_alarms`. That takes at least 1/`false_alarms` + 7 prompts; twice as many give more even halves.

    Requests are judged by the last row of their prompt and that of every `every`-th token they generate: the highest
    score counts, of the prompt and the `generated` latest. The score is the mean excess of entropy over all heads,
    beyond what the reference itself varies by.

    >>> import torch, sharpmax as sm
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    ...                      num_attention_heads=4)
    >>> model = LlamaForCausalLM(config).eval()
    >>> known = [torch.randint(97, (20,)).tolist() for _ in range(30)]
    >>> with sm.monitor(model, known, false_alarms=0.1, generated=0) as watched, watched.request() as r:
    ...     out = model(torch.randint(97, (2, 20)))
    >>> len(r.scores), r.why
    (2, None)
    """
    check_settings(false_alarms, every, generated)
    if isinstance(reference, (str, bytes)) or not isinstance(reference, Iterable):
        reject_type("reference", type(reference).__name__, _PROMPTS)
    prompts = [_tokens(number, prompt, tokenizer) for number, prompt in enumerate(reference)]
    split(len(prompts), false_alarms)  # refuses too few prompts before the work
    rows = generated if getattr(model, "can_generate", bool)() else 0
    known = learn(*reference_rows(model, prompts, every=every, generated=rows), heads_of(model), false_alarms)
    return Monitor(
        model, known, false_alarms=float(false_alarms), every=every, generated=rows, callback=callback, logger=logger,
        metrics=metrics,
    )  # fmt: skip


def check_settings(false_alarms: object, every: object = 1, generated: object = 0) -> None:
    """Refuse a false-alarm rate and numbers of tokens that mean nothing."""
    share = "a share above 0 and below 1, as 0.01"
    if isinstance(false_alarms, bool) or not isinstance(false_alarms, (int, float)):
        reject_type("false_alarms", repr(false_alarms), share)
    if not 0.0 < false_alarms < 1.0:
        reject("false_alarms", false_alarms, share)
    for name, value, least in (("every", every, 1), ("generated", generated, 0)):
        if type(value) is not int:
            reject_type(name, repr(value), "a whole number")
        if value < least:
            reject(name, value, f"{least} or more")


def _tokens(number: int, prompt: Any, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            reject("tokenizer", None, "the model's tokenizer, where prompts are texts")
        prompt = tokenizer(prompt).input_ids
    ids = prompt.tolist() if isinstance(prompt, Tensor) else prompt
    if not isinstance(ids, (list, tuple)) or not all(type(one) is int for one in ids):
        reject_type("reference", f"{type(prompt).__name__} as prompt {number}", _PROMPTS)
    if not ids:
        reject("reference", f"prompt {number} without a token", "prompts of one token or more")
    return list(ids)


def reference_rows(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], *, every: int = 8, generated: int = 0
) -> tuple[Tensor, Tensor]:
    """Let the model read prompts and generate until `generated` of its own tokens, each the `every`-th, were read.

    Returns the entropies `[N, 1 + generated, heads]` of these rows on the CPU, and which of them exist.
    """
    context, longest = context_of(model), max(map(len, prompts), default=0)
    new = generated * every + 1 if generated else 0
    if context is not None and longest + new > context:
        hint = "leave out the longest, or learn from fewer generated rows" if new else "leave out the longest"
        given = f"a prompt of {longest} tokens" + (f" and {new} to generate" if new else "")
        reject("reference", given, f"up to {context} tokens, what the model can read", hint)
    problems: list[Exception] = []

    def failed(problem: Exception) -> str:
        problems.append(problem)
        return str(problem)

    observer = Observer(
        model, every=every, window=generated, judge=lambda one: Report(()), ended=lambda one: None, failed=failed
    )
    entropy = torch.zeros(len(prompts), 1 + generated, len(observer.heads), dtype=torch.float64)
    valid = torch.zeros(len(prompts), 1 + generated, dtype=torch.bool)
    try:
        for batch in batches([Reply(tuple(ids), len(ids)) for ids in prompts], tokens_at_once(model)):
            with torch.no_grad(), observer.request() as request:
                _read(model, [prompts[place] for place in batch], new)
            if problems:
                raise problems[0]
            run = request.runs[0]
            if run.prompt is None:
                reject("model", "a model whose attention was not observed (compiled?)", "a model that is not compiled")
            for number, row in enumerate([run.prompt, *run.generated]):
                entropy[batch, number], valid[batch, number] = row.entropy.cpu().double(), row.valid.cpu()
    finally:
        observer.close()
    wrong = (~entropy.isfinite()).any(-1).any(-1).nonzero()
    if len(wrong):
        given = f"prompt {int(wrong[0])}, whose attention is not a number (NaN)"
        reject("reference", given, "prompts a model can read")
    return entropy, valid


def tokens_at_once(model: PreTrainedModel) -> int:
    """How many tokens a batch may have: a GPU is fastest with many, a CPU with what its cache holds."""
    return _AT_ONCE_ON_CPU if model.device.type == "cpu" else _AT_ONCE


def _read(model: Any, prompts: Sequence[Sequence[int]], new: int) -> None:
    """Let a model read prompts as one batch, and generate `new` tokens.

    Padding is on the left to generate and on the right otherwise, so that positions need not be passed.
    """
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, one in enumerate(prompts):
        place = slice(longest - len(one), longest) if new else slice(len(one))
        ids[row, place], mask[row, place] = torch.tensor(one), 1
    given = {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}
    if new:
        model.generate(**given, max_new_tokens=new, do_sample=False, pad_token_id=0)
    else:
        call_model(model, given)
