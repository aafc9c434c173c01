"""Quality and cost of a monitor: false alarms, detection of wrong answers, time per token."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sharpmax.errors import UnsupportedError, reject
from sharpmax.experiments.benchmarks.measuring import CachedReader, Note, random_tokens, silent, targets
from sharpmax.experiments.statistics import Accuracy, accuracy, auroc
from sharpmax.files import display_name
from sharpmax.integrations.transformers.interface import observed
from sharpmax.models.language import LanguageModel, context_of
from sharpmax.models.scoring import Places, Reply, batches, encode
from sharpmax.monitoring.monitor import Monitor, check_settings, tokens_at_once
from sharpmax.monitoring.observer import Pass, heads_of
from sharpmax.monitoring.scores import LEAST_LEARNED, Learned, learn, least_examples
from sharpmax.provenance import check_amounts, check_seed
from sharpmax.results import json_values
from sharpmax.tasks.prompt import Task
from sharpmax.tasks.registry import get_task

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONTEXT = 2048
"""Tokens read before the timed ones; the target holds for this context."""

ROUNDS = 12
ALL, POOLED = "all", "pooled"
"""All tasks, all sizes."""

SIGNALS: Mapping[str, str] = {
    "monitor": "attention entropies against the reference",
    "confidence": "largest probability of a next token",
    "entropy": "entropy of the next token",
    "energy": "−ln Σ exp of the output logits",
    "length": "tokens read",
    "both": "monitor and entropy, each in standard deviations of the reference, added",
}
"""Of each, more is more suspicious (of the probability, less)."""

_EVERY = 16
_TARGET = {"overhead_percent": 3.0}
_SEEDS = {"reference": 1000, "evaluation": 3000}
_SAMPLE, _SLACK = 4, 1.1
_MARGIN = 1.0  # percentage points by which the false-alarm rate may be off


def monitor_cost(
    model: PreTrainedModel, known: Learned, *, context: int = CONTEXT, rounds: int = ROUNDS, note: Note = silent
) -> dict[str, Any]:
    """Milliseconds per token with and without a monitor that measures every sixteenth.

    The model and an unmonitored copy that shares its weights take turns at every token, so that noise of the machine
    affects both alike. A round is sixteen tokens of each; ratios are taken within a round. The report at the end of a
    request is timed apart.
    """
    check_amounts(context, rounds, least=_EVERY)
    # The monitor may know prompts alone; the cost of a row does not depend on its baseline.
    known = replace(known, generated=known.generated or known.prompt)
    ids = random_tokens(model, context)
    twin = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    times: list[tuple[float, float, float]] = []
    """Of each round: milliseconds per token without and with a monitor, and of the report."""

    with torch.no_grad(), Monitor(model, known, false_alarms=0.5, every=_EVERY, generated=1) as monitor:
        monitor.pause()
        readers = CachedReader(twin), CachedReader(model)
        for reader in readers:
            reader.read(ids)
        monitor.resume()
        for number in range(rounds + 1):
            note(f"cost, round {number} of {rounds}")
            spent = dict.fromkeys(readers, 0.0)
            with ExitStack() as request:
                request.enter_context(monitor.request())
                for turn in range(_EVERY):
                    # The second one finds the machine as the first left it: they take turns at being first.
                    for reader in readers if turn % 2 == 0 else readers[::-1]:
                        spent[reader] += reader.read(ids[:, :1]) / _EVERY
                began = time.perf_counter()
                request.close()
                times.append((spent[readers[0]], spent[readers[1]], 1e3 * (time.perf_counter() - began)))
    plain, watched, reports = zip(*times[1:], strict=True)  # the first round warms both up
    ratios = [with_it / without for with_it, without in zip(watched, plain, strict=True)]
    entry = {
        "plain_ms": statistics.median(plain),
        "watched_ms": statistics.median(watched),
        "overhead_percent": 100.0 * (statistics.median(ratios) - 1.0),
        "quickest_percent": 100.0 * (min(watched) / min(plain) - 1.0),
        "report_ms": statistics.median(reports),
        "context": context,
        "every": _EVERY,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
    }
    return {**entry, "targets": targets(_TARGET, entry, judged=context >= CONTEXT)}


@dataclass(frozen=True, eq=False)
class Answered:
    """N answered prompts: `right` `[N]`, and of the row that predicts the first token of the answer the entropies
    `[N, heads]` and the signals `[N]`."""

    right: np.ndarray
    rows: Tensor
    signals: Mapping[str, np.ndarray]

    @classmethod
    def together(cls, parts: Sequence[Answered]) -> Answered:
        """Concatenate."""
        signals = {name: np.concatenate([part.signals[name] for part in parts]) for name in parts[0].signals}
        return cls(np.concatenate([part.right for part in parts]), torch.cat([part.rows for part in parts]), signals)


def replies_of(language: LanguageModel, task: Task, size: int, count: int, seed: int) -> list[Reply]:
    """Prompts that the model reads up to the first token of the answer that is not blank."""
    found = []
    for prompt in task.prompts(size, count, seed):
        reply = encode(language.tokenizer, prompt)
        start = reply.start
        while start < len(reply.ids) - 1 and not str(language.tokenizer.decode([reply.ids[start]])).strip():
            start += 1
        found.append(Reply(reply.ids, start))
    return found


def answered(model: PreTrainedModel, replies: Sequence[Reply]) -> Answered:
    """Let the model answer, each prompt in one pass; those of a batch are of similar length."""
    return Answered.together(
        [_answered(model, [replies[place] for place in batch]) for batch in batches(replies, tokens_at_once(model))]
    )


def _answered(model: PreTrainedModel, replies: Sequence[Reply]) -> Answered:
    places = Places.of(replies, model.device)
    first = torch.tensor([reply.start - 1 for reply in replies], device=model.device)
    seeing = Pass(first)
    with observed(model, seeing.see), torch.no_grad():
        logits = places.logits(model)
    row = seeing.row()
    if row is None:
        raise UnsupportedError("model: its attention was not seen; allowed: a model that is not compiled")
    right = (logits.argmax(-1) == places.wanted) | (places.wanted < 0)
    rows = logits[torch.arange(len(replies), device=model.device), torch.searchsorted(places.rows, first)]
    log_p = rows.log_softmax(-1)
    signals = {
        "confidence": -log_p.amax(-1).exp(),
        "entropy": torch.special.entr(log_p.exp()).sum(-1),
        "energy": -rows.logsumexp(-1),
        "length": row.count,
    }
    numbers = {name: values.cpu().double().numpy() for name, values in signals.items()}
    return Answered(right.all(-1).cpu().numpy(), row.entropy.cpu().double(), numbers)


@dataclass(frozen=True)
class TaskPlan:
    """A task, its sizes, and the largest size that the monitor learns from."""

    task: Task
    sizes: tuple[int, ...]
    known: int

    def reference(self) -> list[int]:
        """The sizes to learn from."""
        return [size for size in self.sizes if size <= self.known]


TASK_PLANS = (
    TaskPlan(get_task("kv"), (8, 16, 32, 64, 128, 256, 512), 32),
    TaskPlan(get_task("max"), (8, 16, 32, 64, 128), 16),
    TaskPlan(get_task("needle"), (8, 16, 32, 64), 16),
)


def monitor_tables(
    language: LanguageModel,
    plans: Sequence[TaskPlan] = TASK_PLANS,
    *,
    limit: int = 100,
    false_alarms: float = 0.01,
    seed: int = 0,
    context: int = CONTEXT,
    rounds: int = ROUNDS,
    note: Note = silent,
) -> dict[str, Any]:
    """All tables; `limit` is the number of evaluation prompts of each size; `note` is called with progress.

    There are twice as many of the small sizes, to learn from and to count false alarms.
    """
    check_seed(seed)
    check_settings(false_alarms)
    check_amounts(context, rounds, least=_EVERY)
    model, plans = language.model, _readable(language, plans)
    needed = -(-(least_examples(false_alarms) + LEAST_LEARNED) // (2 * sum(len(plan.reference()) for plan in plans)))
    if limit < max(2, needed):
        reject("limit", limit, f"{max(2, needed)} or more for a false-alarm rate of {false_alarms:g}")

    def read(part: str, plan: TaskPlan, size: int, count: int) -> Answered:
        """Prompts of one size, from seeds that the other part does not use, answered."""
        note(f"{part}: {plan.task.name}, size {size}")
        return answered(model, replies_of(language, plan.task, size, count, _SEEDS[part] + seed))

    small = [(plan, size) for plan in plans for size in plan.reference()]
    typical = Answered.together([read("reference", plan, size, 2 * limit) for plan, size in small])
    exist = torch.ones(len(typical.rows), 1, dtype=torch.bool)
    known = learn(typical.rows[:, None], exist, heads_of(model), false_alarms)

    def alarms(one: Answered) -> Accuracy:
        return accuracy((known.prompt.score(one.rows) > known.prompt.threshold).int().tolist())

    fresh = {f"{plan.task.name}/{size}": read("evaluation", plan, size, 2 * limit) for plan, size in small}
    pooled = alarms(Answered.together(list(fresh.values())))
    off = abs(pooled.mean - 100.0 * false_alarms)
    tables: dict[str, Any] = {
        "setting": {
            "model": display_name(language.name),
            "tasks": {plan.task.name: plan.task.version for plan in plans},
            "sizes": {plan.task.name: list(plan.sizes) for plan in plans},
            "reference": {plan.task.name: plan.reference() for plan in plans},
            "prompts": limit,
            "false_alarms": false_alarms,
            "signals": dict(SIGNALS),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": model.device.type,
            "seed": seed,
        },
        "false_alarms": {
            "asked": 100.0 * false_alarms,
            POOLED: asdict(pooled) | {"off": off, "targets": {"off": {"at_most": _MARGIN, "reached": off <= _MARGIN}}},
            **{name: alarms(one) for name, one in fresh.items()},
        },
    }
    everything: list[Answered] = []
    for plan in plans:
        cells = {str(size): read("evaluation", plan, size, limit) for size in plan.sizes}
        everything += cells.values()
        right = {size: accuracy(one.right.astype(int).tolist()) for size, one in cells.items()}
        tables[f"accuracy/{plan.task.name}"] = right
        tables[f"alarms/{plan.task.name}"] = {size: alarms(one) for size, one in cells.items()}
        cells[POOLED] = Answered.together(list(cells.values()))
        tables[f"auroc/{plan.task.name}"] = _aurocs(cells, known, typical, seed)
    tables[f"auroc/{ALL}"] = _aurocs({POOLED: Answered.together(everything)}, known, typical, seed)
    tables["overhead"] = monitor_cost(model, known, context=context, rounds=rounds, note=note)
    return json_values(tables)


def _aurocs(cells: Mapping[str, Answered], known: Learned, typical: Answered, seed: int) -> dict[str, Any]:
    """AUROC of every signal in each cell; `typical` is the reference."""
    usual = typical.signals["entropy"]
    table: dict[str, Any] = {signal: {} for signal in SIGNALS}
    for name, one in cells.items():
        score = known.prompt.score(one.rows).numpy()
        both = score + (one.signals["entropy"] - usual.mean()) / max(usual.std(), 1e-9)
        for signal, suspicion in {"monitor": score, **one.signals, "both": both}.items():
            table[signal][name] = auroc(suspicion[None], one.right[None], seed)
    return table


def _readable(language: LanguageModel, plans: Sequence[TaskPlan]) -> list[TaskPlan]:
    """The plans with the sizes that fit the model's context; an error if nothing is left to learn from."""
    context = context_of(language.model)

    def fits(plan: TaskPlan, size: int) -> bool:
        longest = max(len(reply.ids) for reply in replies_of(language, plan.task, size, _SAMPLE, _SEEDS["reference"]))
        return context is None or longest * _SLACK <= context

    found = [replace(plan, sizes=tuple(size for size in plan.sizes if fits(plan, size))) for plan in plans]
    found = [plan for plan in found if plan.reference()]
    if not found:
        given = f"{language.name}, with a context of {context} tokens"
        reject("model", given, "a model that can read the smallest prompts")
    return found
