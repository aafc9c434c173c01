"""`monitor`: score every request of a language model and raise alarms."""

from __future__ import annotations

import json
import logging
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from sharpmax.errors import FileFormatError, reject, reject_type
from sharpmax.files import read_json, write_text
from sharpmax.models.language import has_weights, weights_fingerprint
from sharpmax.monitoring.learning import check_rate, learned, observed, split, token_lists
from sharpmax.monitoring.observer import Lookout, heads_of
from sharpmax.monitoring.requests import Report, Request, metrics_of
from sharpmax.monitoring.scores import DEFAULT, RULES, Learned

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SCHEMA, _KIND = 1, "sharpmax.monitor"


def save_learned(path: str | Path, model: PreTrainedModel, settings: Mapping[str, Any], known: Learned) -> Path:
    """Write what was learned with the weights of a model, and the settings of the monitor, as JSON."""
    weights = weights_fingerprint(model)
    body = {"schema": _SCHEMA, "kind": _KIND, "weights": weights, **settings, "learned": known.to_dict()}
    return write_text(path, json.dumps(body, allow_nan=False) + "\n")


def load_learned(path: str | Path, model: PreTrainedModel, settings: Sequence[str]) -> tuple[dict[str, Any], Learned]:
    """The settings and what was learned, from a file for the weights of a model."""
    name = repr(str(path))
    body = read_json(path, "monitor")
    if not isinstance(body, dict) or body.get("kind") != _KIND:
        raise FileFormatError(f"monitor: {name} is not what Monitor.save writes")
    if body.get("schema") != _SCHEMA:
        raise FileFormatError(f"monitor: {name} has schema {body.get('schema')!r}; allowed: {_SCHEMA}")
    if not has_weights(model, body.get("weights")):
        given = f"{name}, learned with the weights {body.get('weights')}"
        allowed = f"a file for the weights of this model, {weights_fingerprint(model)}"
        reject("path", given, allowed, "learn again: sharpmax.monitor")
    field = _Field(name, "", body)
    field["false_alarms"].number(above=0.0, below=1.0)
    field["every"].whole(1)
    field["generated"].whole(0)
    _check_learned(field["learned"])
    return {one: body[one] for one in settings}, Learned.from_dict(body["learned"])


def _check_learned(learned: _Field) -> None:
    heads = learned["heads"].items(None)
    if not heads:
        learned["heads"].wrong("one or more heads")
    for head in heads:
        for number in head.items(2):
            number.whole(0)
    _check_kind(learned["prompt"], len(heads))
    if learned["generated"].value is not None:
        _check_kind(learned["generated"], len(heads))


def _check_kind(kind: _Field, heads: int) -> None:
    kind["threshold"].number()
    for limit in kind["limits"].items(heads):
        if limit.value is not None:
            limit.number()
    baseline = kind["baseline"]
    if not isinstance(baseline["rule"].value, str) or baseline["rule"].value not in RULES:
        baseline["rule"].wrong(f"one of {list(RULES)}")
    for number in baseline["mean"].items(heads):
        number.number()
    for number in baseline["scale"].items(heads):
        number.number(above=0.0)
    mean, spread = baseline["range"].items(2)
    mean.number()
    spread.number(above=0.0)
    part = baseline["part"]
    if baseline["rule"].value == "highest":
        part.number(above=0.0, below=heads + 1.0)
        return
    for row in part.items(None) if baseline["rule"].value == "distance" else [part]:
        for number in row.items(heads):
            number.number()


@dataclass(frozen=True)
class _Field:
    """A value in a file, and its place there: what it must be is asked of it, and an error names both."""

    file: str
    place: str
    value: Any

    def __getitem__(self, name: str) -> _Field:
        if not isinstance(self.value, dict):
            self.wrong("an object")
        if name not in self.value:
            raise FileFormatError(f"monitor: {self.file} is damaged: it has no {self._inside(name)!r}; learn again")
        return _Field(self.file, self._inside(name), self.value[name])

    def items(self, count: int | None) -> list[_Field]:
        """The entries of a list of this length, or of any."""
        if not isinstance(self.value, list) or (count is not None and len(self.value) != count):
            self.wrong("a list" if count is None else f"a list of {count}")
        return [_Field(self.file, f"{self.place}[{at}]", one) for at, one in enumerate(self.value)]

    def number(self, above: float = -math.inf, below: float = math.inf) -> None:
        """A finite number between two ends."""
        fine = type(self.value) in (int, float) and above < self.value < below
        if not (fine and math.isfinite(self.value)):
            ends = [f"above {above:g}"] * (above > -math.inf) + [f"below {below:g}"] * (below < math.inf)
            self.wrong(" ".join(["a finite number", " and ".join(ends)]).strip())

    def whole(self, least: int) -> None:
        """A whole number of at least so much."""
        if type(self.value) is not int or not least <= self.value < 2**31:
            self.wrong(f"a whole number of at least {least}")

    def wrong(self, allowed: str) -> NoReturn:
        """Say what stands here and what is allowed."""
        given = f"a list of {len(self.value)}" if isinstance(self.value, list) else reprlib.repr(self.value)
        raise FileFormatError(
            f"monitor: {self.file} is damaged: {self.place!r} is {given}; allowed: {allowed}; learn again"
        )

    def _inside(self, name: str) -> str:
        return f"{self.place}.{name}" if self.place else name


_EVENT = "sharpmax.monitor"
_SETTINGS = ("false_alarms", "every", "generated")

# Whoever wants the lines sets up logging; until then alarms are not to appear on stderr by themselves.
logging.getLogger(_EVENT).addHandler(logging.NullHandler())


class Monitor:
    """Watches a model until `close()`; made by `sharpmax.monitor`, or read back by `Monitor.load`.

    `model.generate` as a whole is a request, a plain forward pass without a cache is one, and everything inside
    `with monitor.request() as r:` is one. Each gets a `Report`, which goes to the callback, as one line of JSON to the
    logger (a warning if there is an alarm) and to the metrics. Nothing the model computes changes. An error inside the
    monitor is logged once and leaves the request without a score.

    Threads may use the model at the same time. A compiled model shows nothing, and such requests say so.
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
        self._lookout = Lookout(
            model,
            every=every,
            window=self.generated,
            begun=lambda: Request(self._judge),
            ended=self._ended,
            trouble=self._trouble,
        )

    @property
    def thresholds(self) -> dict[str, float]:
        """The score that requests exceed as rarely as asked for: those of a prompt alone, those that generate too."""
        kinds = {"prompt": self._known.prompt, "generated": self._known.generated}
        return {name: kind.threshold for name, kind in kinds.items() if kind is not None}

    def request(self) -> AbstractContextManager[Request]:
        """Everything that this thread lets the model compute inside `with monitor.request() as r:` is one request.

        `r.scores`, `r.alarm`, `r.heads` and `r.why` may be read inside, about what was seen so far, and afterwards.
        """
        return self._lookout.request()

    def pause(self) -> None:
        """Look away until `resume()`."""
        self._lookout.on = False

    def resume(self) -> None:
        """Look again, from the next pass through the model on."""
        self._lookout.on = True

    def close(self) -> None:
        """Leave the model as it was before; passes that run in other threads end first."""
        self._lookout.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def save(self, path: str | Path) -> Path:
        """Write what was learned as JSON to the file `path`: `Monitor.load` needs no reference."""
        settings = {name: getattr(self, name) for name in _SETTINGS}
        return save_learned(path, self._model, settings, self._known)

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
        """The monitor that `save` wrote, beside a model with the same weights."""
        settings, known = load_learned(path, model, _SETTINGS)
        if heads_of(model) != list(known.heads):
            raise FileFormatError(
                f"monitor: {str(path)!r} is damaged: 'learned.heads' are not the heads of this model; learn again"
            )
        return cls(model, known, **settings, callback=callback, logger=logger, metrics=metrics)

    def _judge(self, request: Request) -> Report:
        try:
            return self._known.report(request)
        except Exception as problem:
            return Report((), why=f"the monitor failed: {self._trouble(problem)}")

    def _ended(self, request: Request) -> None:
        report = request.finish()
        for tell in (self._count, self._log, self._callback):
            if tell is not None:
                self._tell(tell, report)

    def _tell(self, tell: Callable[[Report], None], report: Report) -> None:
        try:
            tell(report)
        except Exception as problem:
            self._trouble(problem)

    def _count(self, report: Report) -> None:
        if self._metrics is not None:
            self._metrics.add(self._name, report)

    def _log(self, report: Report) -> None:
        level = logging.WARNING if report.alarm else logging.INFO
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", report.to_line(event=_EVENT, model=self._name))

    def _trouble(self, problem: Exception) -> str:
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
    """Learn how focused a model is on in-distribution prompts, and watch it from then on.

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
    split(len(prompts), false_alarms)  # too few are to be refused before the work, not after it
    seen = observed(model, prompts, every=every, generated=rows)
    return Monitor(
        model,
        learned(seen, false_alarms, score),
        false_alarms=false_alarms,
        every=every,
        generated=rows,
        callback=callback,
        logger=logger,
        metrics=metrics,
    )
