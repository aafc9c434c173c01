"""Quality and cost of a monitor: false alarms, detection of wrong answers, time per token."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
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
from sharpmax.models.scoring import Reply, batches, encode, reply_losses
from sharpmax.monitoring.learning import (
    LEAST_LEARNED,
    Reference,
    check_rate,
    learned,
    least_examples,
    read,
    tokens_at_once,
)
from sharpmax.monitoring.monitor import Monitor
from sharpmax.monitoring.observer import heads_of
from sharpmax.monitoring.requests import Pass
from sharpmax.monitoring.scores import DEFAULT, RULES, Learned
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

OWN: Mapping[str, str] = {
    "confidence": "largest probability of a next token",
    "entropy": "entropy of the next token",
    "energy": "−ln Σ exp of the output logits",
}
"""The model's own signals; of each, more is more suspicious (of the probability, less)."""

SIGNALS: Mapping[str, str] = {
    "monitor": "attention entropies against the reference",
    **OWN,
    "length": "tokens read",
    "both": "monitor and entropy, each in standard deviations of the reference, added",
}

_EVERY = 16
_TARGET = {"overhead_percent": 3.0}
_SEEDS = {"reference": 1000, "validation": 2000, "evaluation": 3000}
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
    plain: list[float] = []
    watched: list[float] = []
    reports: list[float] = []
    with torch.no_grad(), Monitor(model, known, false_alarms=0.5, every=_EVERY, generated=1) as monitor:
        monitor.pause()
        readers = CachedReader(twin), CachedReader(model)
        for reader in readers:
            reader.read(ids)
        monitor.resume()
        for number in range(rounds + 1):
            note(f"cost, round {number} of {rounds}")
            with ExitStack() as request:
                request.enter_context(monitor.request())
                turns = []
                for turn in range(_EVERY):
                    # The second one finds the machine as the first left it: they take turns at being first.
                    first, second = readers if turn % 2 == 0 else readers[::-1]
                    spent = {first: first.read(ids[:, :1]), second: second.read(ids[:, :1])}
                    turns.append([spent[reader] for reader in readers])
                began = time.perf_counter()
                request.close()
                reports.append(1e3 * (time.perf_counter() - began))
            plain.append(sum(turn[0] for turn in turns) / _EVERY)
            watched.append(sum(turn[1] for turn in turns) / _EVERY)
    # The first round warms both up.
    ratios = [with_it / without for with_it, without in zip(watched[1:], plain[1:], strict=True)]
    entry = {
        "plain_ms": statistics.median(plain[1:]),
        "watched_ms": statistics.median(watched[1:]),
        "overhead_percent": 100.0 * (statistics.median(ratios) - 1.0),
        "quickest_percent": 100.0 * (min(watched[1:]) / min(plain[1:]) - 1.0),
        "report_ms": statistics.median(reports[1:]),
        "context": context,
        "every": _EVERY,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
    }
    return {**entry, "targets": targets(_TARGET, entry, judged=context >= CONTEXT)}


@dataclass(frozen=True, eq=False)
class Answered:
    """N answered prompts; all but `right` is of the row that predicts the first token of the answer."""

    right: np.ndarray  # [N], whether greedy decoding gives the right answer
    own: Mapping[str, np.ndarray]  # [N], suspicion by each of the model's own signals
    entropy: Tensor  # [N, heads]
    count: Tensor  # [N], tokens read so far

    @classmethod
    def together(cls, parts: Sequence[Answered]) -> Answered:
        """Concatenate."""
        return cls(
            np.concatenate([part.right for part in parts]),
            {name: np.concatenate([part.own[name] for part in parts]) for name in OWN},
            torch.cat([part.entropy for part in parts]),
            torch.cat([part.count for part in parts]),
        )

    def as_reference(self, heads: Sequence[tuple[int, int]]) -> Reference:
        """The rows as reference data."""
        found = Reference(len(self.right), 0, heads)
        found.entropy, found.count = self.entropy.double(), self.count
        return found


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
    """Let the model answer, each prompt in one pass."""
    parts: list[Answered] = []
    order: list[int] = []
    seeing: list[Pass] = []
    logits: list[Tensor] = []
    hook = model.register_forward_hook(lambda module, args, out: logits.append(out.logits))
    with hook, observed(model, lambda seen: seeing[-1].see(seen)), torch.no_grad():
        for batch in batches(replies, tokens_at_once(model)):
            chosen = [replies[place] for place in batch]
            seeing[:] = [Pass(torch.tensor([reply.start - 1 for reply in chosen], device=model.device))]
            logits.clear()
            right = reply_losses(model, chosen)[1].all(-1)
            parts.append(_read_off(chosen, right, logits[-1], seeing[-1]))
            order += batch
    found = Answered.together(parts)
    back = np.argsort(order)
    own = {name: values[back] for name, values in found.own.items()}
    return Answered(found.right[back], own, found.entropy[back], found.count[back])


def _read_off(replies: Sequence[Reply], right: Tensor, logits: Tensor, seeing: Pass) -> Answered:
    """The row that predicts the first token of each reply, among the computed rows `[B, places, V]`."""
    predicted = sorted({place for reply in replies for place in range(reply.start, len(reply.ids))})
    whole = logits.shape[1] > len(predicted)  # a model that cannot leave rows out
    columns = [reply.start - 1 if whole else predicted.index(reply.start) for reply in replies]
    rows = logits[torch.arange(len(replies)), torch.tensor(columns)].float()
    log_p = rows.log_softmax(-1)
    own = {
        "confidence": -log_p.amax(-1).exp(),
        "entropy": torch.special.entr(log_p.exp()).sum(-1),
        "energy": -rows.logsumexp(-1),
    }
    row = seeing.row()
    if row is None:
        raise UnsupportedError("model: its attention was not seen; allowed: a model that is not compiled")
    numbers = {name: values.cpu().double().numpy() for name, values in own.items()}
    return Answered(right.cpu().numpy(), numbers, row.entropy.cpu(), row.count.cpu())


Cells = Mapping[tuple[str, int], Answered]
"""Answers by task and size."""


def _scores(known: Learned, one: Answered) -> np.ndarray:
    return np.asarray(known.prompt.baseline.score(one.entropy))


def alarms_of(known: Learned, one: Answered) -> np.ndarray:
    """Which prompts raise an alarm."""
    return np.asarray(_scores(known, one) > known.prompt.threshold)


def by_size(cells: Cells, task: str, what: Callable[[Answered], np.ndarray]) -> dict[str, Accuracy]:
    """The share for which `what` holds, at each size of a task, in percent."""
    return {str(size): accuracy([int(x) for x in what(one)]) for (name, size), one in cells.items() if name == task}


def _of(cells: Cells, task: str) -> Answered:
    return Answered.together([one for (name, _), one in cells.items() if task in (name, ALL)])


def aurocs(cells: Cells, task: str, known: Learned, typical: Answered, seed: int) -> dict[str, Any]:
    """AUROC of every signal at each size of a task and over all of them; `typical` is the reference."""

    def signals(one: Answered) -> dict[str, np.ndarray]:
        score, usual = _scores(known, one), typical.own["entropy"]
        both = score + (one.own["entropy"] - usual.mean()) / max(usual.std(), 1e-9)
        return {"monitor": score, **one.own, "length": one.count.numpy().astype(float), "both": both}

    groups = {str(size): one for (name, size), one in cells.items() if name == task} | {POOLED: _of(cells, task)}
    table: dict[str, Any] = {signal: {} for signal in SIGNALS}
    for group, one in groups.items():
        for signal, suspicion in signals(one).items():
            table[signal][group] = auroc(suspicion[None], one.right[None], seed)
    return table


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

    There are half as many for validation, and twice as many of the small sizes to learn from and to count false alarms.
    """
    check_seed(seed)
    check_rate(false_alarms)
    check_amounts(context, rounds, least=_EVERY)
    plans = _readable(language, plans)
    cells = sum(len(plan.reference()) for plan in plans)
    needed = -(-(least_examples(false_alarms) + LEAST_LEARNED) // (2 * cells))
    if limit < max(2, needed):
        reject("limit", limit, f"{max(2, needed)} or more for a false-alarm rate of {false_alarms:g}")
    bench = _Bench(language, tuple(plans), seed, note)
    typical = Answered.together(list(bench.cells("reference", 2 * limit, known=True).values()))
    reference = typical.as_reference(heads_of(language.model))
    rule, validation = bench.choose(reference, limit // 2, false_alarms)
    found = learned(reference, false_alarms, rule)
    fresh = bench.cells("evaluation", limit)
    return json_values(
        {
            "setting": bench.setting(limit, false_alarms, rule),
            "validation": validation,
            "false_alarms": bench.false_alarms(found, 2 * limit, false_alarms),
            **{f"accuracy/{task}": by_size(fresh, task, lambda one: one.right) for task in bench.tasks},
            **{f"alarms/{task}": by_size(fresh, task, lambda one: alarms_of(found, one)) for task in bench.tasks},
            **{f"auroc/{task}": aurocs(fresh, task, found, typical, seed) for task in (*bench.tasks, ALL)},
            "overhead": monitor_cost(language.model, found, context=context, rounds=rounds, note=note),
        }
    )


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


@dataclass(frozen=True, eq=False)
class _Bench:
    """The model, the plans, and the source of prompts."""

    language: LanguageModel
    plans: tuple[TaskPlan, ...]
    seed: int
    note: Note

    @property
    def tasks(self) -> list[str]:
        return [plan.task.name for plan in self.plans]

    def replies(self, part: str, plan: TaskPlan, size: int, count: int) -> list[Reply]:
        """Prompts of one size, from seeds that no other part uses."""
        self.note(f"{part}: {plan.task.name}, size {size}")
        return replies_of(self.language, plan.task, size, count, _SEEDS[part] + self.seed)

    def cells(self, part: str, count: int, *, known: bool = False) -> Cells:
        """Every task and size (those to learn from alone), answered."""
        found = {}
        for plan in self.plans:
            for size in plan.reference() if known else plan.sizes:
                replies = self.replies(part, plan, size, count)
                found[plan.task.name, size] = answered(self.language.model, replies)
        return found

    def choose(self, reference: Reference, count: int, rate: float) -> tuple[str, dict[str, Any]]:
        """The rule with the highest AUROC over all validation prompts, and the AUROC of each."""
        cells = self.cells("validation", count)
        table: dict[str, Any] = {}
        for rule in RULES:
            made = learned(reference, rate, rule)
            whole = {task: _of(cells, task) for task in (*self.tasks, ALL)}
            table[rule] = {
                task: auroc(_scores(made, one)[None], one.right[None], self.seed) for task, one in whole.items()
            }
        scores = {rule: table[rule][ALL].auroc for rule in RULES}
        best = DEFAULT if None in scores.values() else max(RULES, key=lambda rule: scores[rule])
        return best, table

    def false_alarms(self, known: Learned, count: int, rate: float) -> dict[str, Any]:
        """Alarms on new prompts like those of the reference, as in a service."""
        model = self.language.model
        found: dict[str, list[int]] = {}
        with Monitor(model, known, false_alarms=rate, every=1, generated=0) as monitor, torch.no_grad():
            for plan in self.plans:
                for size in plan.reference():
                    replies = self.replies("evaluation", plan, size, count)
                    alarms = found.setdefault(f"{plan.task.name}/{size}", [])
                    prompts = [Reply(one.ids[: one.start], one.start) for one in replies]
                    for batch in batches(prompts, tokens_at_once(model)):
                        with monitor.request() as request:
                            read(model, [prompts[place].ids for place in batch])
                        alarms += [int(one.alarm) for one in request.report.sequences]
        pooled = accuracy([one for alarms in found.values() for one in alarms])
        off = abs(pooled.mean - 100.0 * rate)
        return {
            "asked": 100.0 * rate,
            POOLED: asdict(pooled) | {"off": off, "targets": {"off": {"at_most": _MARGIN, "reached": off <= _MARGIN}}},
            **{cell: accuracy(alarms) for cell, alarms in found.items()},
        }

    def setting(self, limit: int, rate: float, rule: str) -> dict[str, Any]:
        model, name = self.language.model, self.language.name
        return {
            "model": display_name(name),
            "tasks": {plan.task.name: plan.task.version for plan in self.plans},
            "sizes": {plan.task.name: list(plan.sizes) for plan in self.plans},
            "reference": {plan.task.name: plan.reference() for plan in self.plans},
            "prompts": limit,
            "false_alarms": rate,
            "rule": rule,
            "rules": {name: one.what for name, one in RULES.items()},
            "signals": dict(SIGNALS),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": model.device.type,
            "seed": self.seed,
        }
