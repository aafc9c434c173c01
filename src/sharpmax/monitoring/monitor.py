"""`monitor`: score every request of a language model and raise alarms."""

from __future__ import annotations

import json
import logging
import math
import reprlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from sharpmax.errors import FileFormatError, reject, reject_type
from sharpmax.files import read_json, write_text
from sharpmax.models.language import has_weights, weights_fingerprint
from sharpmax.monitoring.learning import check_rate, learned, observed, split, token_lists
from sharpmax.monitoring.observer import Observer, heads_of
from sharpmax.monitoring.requests import Report, Request, metrics_of
from sharpmax.monitoring.scores import DEFAULT, RULES, Learned

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SCHEMA, _KIND = 1, "sharpmax.monitor"


@dataclass(frozen=True)
class _Fields:
    """The fields of a monitor's file by their path. Errors name the file, the field, its value and what is allowed."""

    file: str
    body: Any

    def get(self, path: str) -> Any:
        """The value at a path such as `learned.prompt`."""
        value, names = self.body, path.split(".")
        for place, name in enumerate(names):
            if not isinstance(value, dict):
                self.refuse(".".join(names[:place]), value, "an object")
            if name not in value:
                raise FileFormatError(f"monitor: {self.file} is damaged: it has no {path!r}; learn again")
            value = value[name]
        return value

    def check(self, path: str, shape: Sequence[int | None], **limits: Any) -> None:
        """Check a number, or nested lists of numbers of this shape (None: any length)."""
        self._check(path, self.get(path), shape, **limits)

    def _check(
        self,
        place: str,
        value: Any,
        shape: Sequence[int | None],
        above: float = -math.inf,
        below: float = math.inf,
        whole: bool = False,
        optional: bool = False,
    ) -> None:
        if shape:
            if not isinstance(value, list) or (shape[0] is not None and len(value) != shape[0]):
                self.refuse(place, value, "a list" if shape[0] is None else f"a list of {shape[0]}")
            for number, one in enumerate(value):
                self._check(f"{place}[{number}]", one, shape[1:], above, below, whole, optional)
            return
        kinds = (int,) if whole else (int, float)
        if not (optional and value is None) and not (
            type(value) in kinds and above < value < below and math.isfinite(value)
        ):
            ends = [f"above {above:g}"] * (above > -math.inf) + [f"below {below:g}"] * (below < math.inf)
            self.refuse(place, value, " ".join([f"a {'whole' if whole else 'finite'} number", " and ".join(ends)]))

    def refuse(self, place: str, value: Any, allowed: str) -> NoReturn:
        """Raise the error."""
        given = f"a list of {len(value)}" if isinstance(value, list) else reprlib.repr(value)
        raise FileFormatError(
            f"monitor: {self.file} is damaged: {place!r} is {given}; allowed: {allowed.strip()}; learn again"
        )


def _read(path: str | Path, model: PreTrainedModel) -> dict[str, Any]:
    """The content of a file that `Monitor.save` wrote for these weights, every field checked."""
    name, body = repr(str(path)), read_json(path, "monitor")
    if not isinstance(body, dict) or body.get("kind") != _KIND:
        raise FileFormatError(f"monitor: {name} is not what Monitor.save writes")
    if body.get("schema") != _SCHEMA:
        raise FileFormatError(f"monitor: {name} has schema {body.get('schema')!r}; allowed: {_SCHEMA}")
    if not has_weights(model, body.get("weights")):
        given = f"{name}, learned with the weights {body.get('weights')}"
        allowed = f"a file for the weights of this model, {weights_fingerprint(model)}"
        reject("path", given, allowed, "learn again: sharpmax.monitor")
    fields = _Fields(name, body)
    fields.check("false_alarms", (), above=0.0, below=1.0)
    fields.check("every", (), above=0, below=2**31, whole=True)
    fields.check("generated", (), above=-1, below=2**31, whole=True)
    fields.check("learned.heads", (None, 2), above=-1, below=2**31, whole=True)
    if fields.get("learned.heads") != [list(one) for one in heads_of(model)]:
        raise FileFormatError(
            f"monitor: {name} is damaged: 'learned.heads' are not the heads of this model; learn again"
        )
    heads = len(body["learned"]["heads"])
    for row in ("learned.prompt", "learned.generated"):
        if row == "learned.generated" and fields.get(row) is None:
            continue
        fields.check(f"{row}.threshold", ())
        fields.check(f"{row}.limits", (heads,), optional=True)
        baseline = f"{row}.baseline"
        rule = fields.get(f"{baseline}.rule")
        if not isinstance(rule, str) or rule not in RULES:
            fields.refuse(f"{baseline}.rule", rule, f"one of {list(RULES)}")
        fields.check(f"{baseline}.mean", (heads,))
        fields.check(f"{baseline}.scale", (heads,), above=0.0)
        fields.check(f"{baseline}.range", (2,))
        spread = fields.get(f"{baseline}.range")[1]
        if spread <= 0.0:
            fields.refuse(f"{baseline}.range[1]", spread, "a finite number above 0")
        shapes = {"highest": (), "distance": (None, heads)}
        limits = {"above": 0.0, "below": heads + 1.0} if rule == "highest" else {}
        fields.check(f"{baseline}.part", shapes.get(rule, (heads,)), **limits)
    return body


_EVENT = "sharpmax.monitor"
_SETTINGS = ("false_alarms", "every", "generated")

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
        self.false_alarms = false_alarms
        self.every = every
        self.generated = generated if known.generated is not None else 0
        self._known = known
        self._model = model
        self._name = str(model.name_or_path or type(model).__name__)
        self._callback = callback
        self._logger = logging.getLogger(_EVENT) if logger is None else logger
        self._metrics = metrics_of(metrics)
        self._failed_before = False
        if self._metrics is not None:
            self._metrics.watch(self._name, self.thresholds)
        calls: Any = {"begun": lambda: Request(self._judge), "ended": self._ended, "failed": self._failed}
        self._observer = Observer(model, every=every, window=self.generated, **calls)

    @property
    def thresholds(self) -> dict[str, float]:
        """The score above which there is an alarm: of a prompt alone, and of a request that generates."""
        kinds = {"prompt": self._known.prompt, "generated": self._known.generated}
        return {name: kind.threshold for name, kind in kinds.items() if kind is not None}

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
        settings = {name: getattr(self, name) for name in _SETTINGS}
        about = {"schema": _SCHEMA, "kind": _KIND, "weights": weights_fingerprint(self._model)}
        body = {**about, **settings, "learned": self._known.to_dict()}
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
        body = _read(path, model)
        known, settings = Learned.from_dict(body["learned"]), {name: body[name] for name in _SETTINGS}
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
        for publish in (self._count, self._log, self._callback):
            if publish is not None:
                self._publish(publish, report)

    def _publish(self, publish: Callable[[Report], None], report: Report) -> None:
        try:
            publish(report)
        except Exception as problem:
            self._failed(problem)

    def _count(self, report: Report) -> None:
        if self._metrics is not None:
            self._metrics.add(self._name, report)

    def _log(self, report: Report) -> None:
        level = logging.WARNING if report.alarm else logging.INFO
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", report.to_line(event=_EVENT, model=self._name))

    def _failed(self, problem: Exception) -> str:
        if not self._failed_before:
            self._failed_before = True
            self._logger.error("the monitor failed; the model goes on without it", exc_info=problem)
        return f"{type(problem).__name__}: {problem}"


def monitor(
    model: PreTrainedModel,
    reference: Iterable[str] | Iterable[Sequence[int]],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    false_alarms: float = 0.01,
    every: int = 16,
    generated: int = 2,
    score: str = DEFAULT,
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
    score counts, of the prompt and the `generated` latest. `score` names one of the rules in
    `sharpmax.monitoring.scores.RULES`.

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
    check_rate(false_alarms)
    for name, value, least in (("every", every, 1), ("generated", generated, 0)):
        if type(value) is not int:
            reject_type(name, repr(value), "a whole number")
        if value < least:
            reject(name, value, f"{least} or more")
    if score not in RULES:
        reject("score", repr(score), f"one of {list(RULES)}")
    rows = generated if getattr(model, "can_generate", bool)() else 0
    prompts = token_lists(reference, tokenizer)
    split(len(prompts), false_alarms)  # refuses too few prompts before the work
    seen = observed(model, prompts, every=every, generated=rows)
    outputs: dict[str, Any] = {"callback": callback, "logger": logger, "metrics": metrics}
    known = learned(seen, false_alarms, score)
    return Monitor(model, known, false_alarms=false_alarms, every=every, generated=rows, **outputs)
