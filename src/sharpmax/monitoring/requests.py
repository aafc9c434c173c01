"""Monitored requests: the rows measured in them, their reports, and Prometheus metrics."""

from __future__ import annotations

import json
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sharpmax.errors import UnsupportedError, reject_type
from sharpmax.lazy import require
from sharpmax.stats.call import AttentionCall, Logits, without_autocast

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_LAST = slice(-1, None)
_AT_ONCE, _AT_ONCE_CPU = 1 << 22, 1 << 16
"""Logits kept until they are measured together: many, to launch few kernels, or what a core's cache holds."""

_NEEDS = frozenset({"mean"})

_MASKS = 2
"""How many masks the layers of one model share: most have one, some another for layers with a sliding window."""


@dataclass(frozen=True, eq=False)
class Row:
    """One row of every sequence of a batch: entropies `[B, heads]` over all layers, and visible keys `[B]`."""

    entropy: Tensor
    count: Tensor
    counts: Tensor | None = None
    """Which sequences it is valid for `[B]`: not padding alone, and not ended before. None: all."""


class Pass:
    """One pass through a model, measured layer by layer; `places` `[B]` are the rows to measure, None the last."""

    def __init__(self, places: Tensor | None = None, counts: Tensor | None = None) -> None:
        self._places, self._counts = places, counts
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
            logits = (call if self._places is None else call.of_rows(self._places)).logits(_LAST)
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
                stats = Logits(torch.cat(rows, dim=1), None).measure(_NEEDS)
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
        return Row(entropy, count, self._counts)


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
    _real: Tensor | None = None
    _ended: Tensor | None = None
    _cache: Any = None

    def holds(self, cache: object) -> bool:
        """Whether these are the sequences of a cache."""
        return self._cache is not None and self._cache() is cache

    def keep(self, cache: object) -> None:
        """Remember the cache that goes on with these sequences, without keeping it alive."""
        self._cache = None if cache is None else weakref.ref(cache)

    def begin(self, given: Mapping[str, Any], every: int) -> tuple[Pass | None, bool]:
        """Begin a pass with these arguments: what measures it (None: nothing), and whether it generates."""
        tokens, length = _input(given)
        # Several tokens after a prompt and before any generated one are the prompt's next part.
        generates = self.prompt is not None and (length == 1 or self._steps > 0)
        if not generates:
            guessed = 0 if self.unread is None else max(0, length - self.unread)
            self.unread = None if self.unread is None else max(0, self.unread - length)
            places, self._real = _last_places(given.get("attention_mask"), tokens, guessed)
            return Pass(places, self._real), False
        self._steps += 1
        ids = given.get("input_ids")
        if self.window and self.ends and isinstance(ids, Tensor) and len(ids) > 1:
            over = torch.isin(ids[:, 0], torch.tensor(sorted(self.ends), device=ids.device))
            self._ended = over if self._ended is None else self._ended | over
        if self.window == 0 or self._steps % every:
            return None, True
        # Of several tokens the first is the model's own; the others are guesses of speculative decoding.
        places = None if length == 1 else torch.zeros(len(tokens), dtype=torch.long, device=tokens.device)
        return Pass(places, _both(self._real, None if self._ended is None else ~self._ended)), True

    def end(self, row: Row, generates: bool) -> None:
        """Keep the row of a pass."""
        if not generates:
            self.prompt = row
        elif self.prompt is not None and len(row.entropy) == len(self.prompt.entropy):
            self.generated.append(row)
            while len(self.generated) > self.window:
                self.generated.popleft()


def _input(given: Mapping[str, Any]) -> tuple[Tensor, int]:
    """The tokens that a pass reads, as they are or embedded `[B, L, …]`, and how many of each sequence."""
    found = given.get("input_ids")
    found = given.get("inputs_embeds") if found is None else found
    if not isinstance(found, Tensor) or found.ndim < 2:
        raise UnsupportedError("the model was given neither input_ids [B, L] nor inputs_embeds [B, L, D]")
    return found, found.shape[1]


def _last_places(mask: object, tokens: Tensor, guessed: int) -> tuple[Tensor | None, Tensor | None]:
    """The last place of each sequence that is neither padding nor guessed, and whether it has one; None: the last."""
    batch, length = tokens.shape[:2]
    if not isinstance(mask, Tensor) or mask.ndim != 2 or length == 0 or mask.shape[1] < length:
        return (torch.full((batch,), length - 1 - guessed, device=tokens.device) if guessed else None), None
    real = mask[:, mask.shape[1] - length : mask.shape[1] - guessed] > 0
    last = real.shape[1] - 1 - real.flip(-1).to(torch.uint8).argmax(-1)
    return last, real.any(-1)


def _both(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other.to(one.device)


_HEADS_LOGGED = 8


@dataclass(frozen=True)
class Head:
    """A head whose entropy exceeds the threshold that it has learned for itself."""

    sequence: int
    layer: int
    head: int
    entropy: float
    threshold: float
    excess: float
    """How far above the threshold, in standard deviations of the reference."""


@dataclass(frozen=True)
class Verdict:
    """The outcome for one sequence of a request."""

    score: float | None
    """How far its attention was from the reference, in standard deviations; None where there is no score."""

    threshold: float
    tokens: int
    """Tokens that its last row could see."""

    rows: int
    """How many of its rows were measured."""

    why: str | None = None
    """Why it has no score."""

    @property
    def alarm(self) -> bool:
        """Whether the score exceeds its threshold."""
        return self.score is not None and self.score > self.threshold


@dataclass(frozen=True)
class Report:
    """The outcome of a request."""

    sequences: tuple[Verdict, ...]
    heads: tuple[Head, ...] = ()
    """Heads above their own thresholds, worst first."""

    why: str | None = None
    """Why there is no score, if any sequence has none."""

    @property
    def scores(self) -> list[float | None]:
        """The score of each sequence."""
        return [one.score for one in self.sequences]

    @property
    def alarm(self) -> bool:
        """Whether a sequence is above its threshold."""
        return any(one.alarm for one in self.sequences)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values, rounded, with the worst heads alone."""
        return {
            "alarm": self.alarm,
            "why": self.why,
            "sequences": [_short(one) | {"alarm": one.alarm} for one in self.sequences],
            "heads": [_short(one) for one in self.heads[:_HEADS_LOGGED]],
            "heads_above": len(self.heads),
        }

    def to_line(self, **more: Any) -> str:
        """The report as one line of JSON."""
        return json.dumps({**more, **self.to_dict()}, ensure_ascii=False)


def _short(one: Verdict | Head) -> dict[str, Any]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(one).items()}


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


_BUCKETS = (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)


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
        outcome = "alarm" if report.alarm else "ok" if known else "no_score"
        self._requests.labels(model, outcome).inc()
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
