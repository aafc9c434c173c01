"""Quality and cost of a monitor: false alarms, detection of wrong answers, time per token."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from sharpmax.errors import reject
from sharpmax.experiments.benchmarks.measuring import CachedReader, Note, median_ratio, random_tokens, silent, targets
from sharpmax.experiments.statistics import accuracy, auroc
from sharpmax.files import display_name
from sharpmax.integrations.transformers.interface import observed
from sharpmax.models.language import LanguageModel
from sharpmax.models.scoring import Places, Reply, batches, encode
from sharpmax.monitoring.monitor import Monitor, check_settings, heads_of, tokens_at_once
from sharpmax.monitoring.requests import Row
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

SIGNALS = ("monitor", "confidence", "entropy", "energy", "length", "both")
"""What may predict a wrong answer; more is more suspicious.

`monitor` is its score. Of the next token: `confidence` is the negative of the largest probability, `entropy` the
entropy, `energy` −ln Σ exp of the logits. `length` is the number of tokens read. `both` is the sum of monitor and
entropy, each in standard deviations of the reference.
"""

_EVERY = 16
_SEEDS = {"reference": 1000, "evaluation": 3000}
_MARGIN = 1.0  # largest error of the false-alarm rate, in percentage points


class TaskPlan(NamedTuple):
    """A task, its sizes, and the largest size that the monitor learns from."""

    task: Task
    sizes: tuple[int, ...]
    known: int


TASK_PLANS = (
    TaskPlan(get_task("kv"), (8, 16, 32, 64, 128, 256, 512), 32),
    TaskPlan(get_task("max"), (8, 16, 32, 64, 128), 16),
    TaskPlan(get_task("needle"), (8, 16, 32, 64), 16),
)


def monitor_cost(
    model: PreTrainedModel, known: Learned, *, context: int = CONTEXT, rounds: int = ROUNDS, note: Note = silent
) -> dict[str, Any]:
    """Milliseconds per token with and without a monitor that measures every sixteenth token.

    The model and an unmonitored copy with shared weights take turns at every token, so that noise of the machine
    affects both alike. A round is sixteen tokens of each; ratios are taken in a round.
    """
    check_amounts(context, rounds, least=_EVERY)
    # The baseline may be of prompts only; the cost of a row does not depend on it.
    known = replace(known, generated=known.generated or known.prompt)
    ids = random_tokens(model, context)
    twin = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    plain: list[float] = []
    watched: list[float] = []
    with torch.no_grad(), Monitor(model, known, false_alarms=0.5, every=_EVERY, generated=1) as monitor:
        monitor.pause()
        readers = CachedReader(twin), CachedReader(model)
        for reader in readers:
            reader.read(ids)
        monitor.resume()
        for number in range(rounds + 1):
            note(f"cost, round {number} of {rounds}")
            spent = dict.fromkeys(readers, 0.0)
            with monitor.request():
                for turn in range(_EVERY):
                    # The first one affects the caches of the second, so they take turns.
                    for reader in readers if turn % 2 == 0 else readers[::-1]:
                        spent[reader] += reader.read(ids[:, :1]) / _EVERY
            if number > 0:  # the first round is a warm-up
                plain.append(spent[readers[0]])
                watched.append(spent[readers[1]])
    entry = {
        "plain_ms": statistics.median(plain), "watched_ms": statistics.median(watched),
        "overhead_percent": 100.0 * (median_ratio(watched, plain) - 1.0),
        "context": context, "every": _EVERY, "rounds": rounds, "threads": torch.get_num_threads(),
    }  # fmt: skip
    return {**entry, "targets": targets({"overhead_percent": 3.0}, entry, judged=context >= CONTEXT)}


Answered = dict[str, np.ndarray]
"""N answered prompts: `right` `[N]`, and for the row that predicts the first token of the answer the entropies of heads
(`rows`, `[N, heads]`) and the signals `[N]`."""


def together(parts: Iterable[Answered]) -> Answered:
    """Concatenate answered prompts."""
    first, *others = parts
    return {name: np.concatenate([values, *(other[name] for other in others)]) for name, values in first.items()}


def replies_of(language: LanguageModel, task: Task, size: int, count: int, seed: int) -> list[Reply]:
    """Prompts, read up to the first token of the answer that is not blank."""
    found = []
    for prompt in task.prompts(size, count, seed):
        reply = encode(language.tokenizer, prompt)
        start = reply.start
        while start < len(reply.ids) - 1 and not str(language.tokenizer.decode([reply.ids[start]])).strip():
            start += 1
        found.append(Reply(reply.ids, start))
    return found


def answered(model: PreTrainedModel, replies: Sequence[Reply]) -> Answered:
    """Let the model answer, in one pass per batch of prompts of similar length."""
    groups = batches(replies, tokens_at_once(model))
    return together([_answered(model, [replies[place] for place in group]) for group in groups])


def _answered(model: PreTrainedModel, replies: Sequence[Reply]) -> Answered:
    places = Places.of(replies, model.device)
    first = torch.tensor([reply.start - 1 for reply in replies], device=model.device)
    row = Row(first)
    with observed(model, row.see), torch.no_grad():
        logits = places.logits(model)
    row.finish()
    right = (logits.argmax(-1) == places.wanted) | (places.wanted < 0)
    rows = logits[torch.arange(len(replies), device=model.device), torch.searchsorted(places.rows, first)]
    log_p = rows.log_softmax(-1)
    found = {
        "right": right.all(-1),
        "rows": row.entropy,
        "confidence": -log_p.amax(-1).exp(),
        "entropy": torch.special.entr(log_p.exp()).sum(-1),
        "energy": -rows.logsumexp(-1),
        "length": row.count,
    }
    return {name: (values if name == "right" else values.double()).cpu().numpy() for name, values in found.items()}


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
    """All tables. `limit` is the number of evaluation prompts per size; `note` is called with progress.

    Small sizes have twice as many prompts for the baseline, and again for counting false alarms.
    """
    check_seed(seed)
    check_settings(false_alarms)
    check_amounts(context, rounds, least=_EVERY)
    model = language.model
    small = [(plan, size) for plan in plans for size in plan.sizes if size <= plan.known]
    needed = -(-(least_examples(false_alarms) + LEAST_LEARNED) // (2 * len(small)))
    if limit < max(2, needed):
        reject("limit", limit, f"{max(2, needed)} or more for a false-alarm rate of {false_alarms:g}")

    def read(part: str, plan: TaskPlan, size: int, count: int) -> Answered:
        """Answer prompts of one size. Seeds differ between the parts."""
        note(f"{part}: {plan.task.name}, size {size}")
        return answered(model, replies_of(language, plan.task, size, count, _SEEDS[part] + seed))

    typical = together([read("reference", plan, size, 2 * limit) for plan, size in small])
    rows, usual = torch.from_numpy(typical["rows"]), typical["entropy"]
    known = learn(rows[:, None], torch.ones(len(rows), 1, dtype=torch.bool), heads_of(model), false_alarms)

    def scored(one: Answered) -> Answered:
        """Add the signals that need the baseline."""
        score = known.prompt.score(torch.from_numpy(one["rows"])).numpy()
        return one | {"monitor": score, "both": score + (one["entropy"] - usual.mean()) / max(usual.std(), 1e-9)}

    fresh = scored(together([read("evaluation", plan, size, 2 * limit) for plan, size in small]))
    alarms = accuracy((fresh["monitor"] > float(known.prompt.threshold)).astype(int).tolist())
    found = {
        plan.task.name: scored(together([read("evaluation", plan, size, limit) for size in plan.sizes]))
        for plan in plans
    }
    found["all"] = together(found.values())
    off = {"off": abs(alarms.mean - 100.0 * false_alarms)}
    setting = {
        "model": display_name(language.name), "tasks": {plan.task.name: plan.task.version for plan in plans},
        "sizes": {plan.task.name: list(plan.sizes) for plan in plans}, "prompts": limit, "false_alarms": false_alarms,
        "signals": list(SIGNALS), "dtype": str(model.dtype).removeprefix("torch."), "device": model.device.type,
        "seed": seed,
    }  # fmt: skip
    pooled = asdict(alarms) | off | {"targets": targets({"off": _MARGIN}, off)}
    tables: dict[str, Any] = {"setting": setting, "false_alarms": {"asked": 100.0 * false_alarms, "pooled": pooled}}
    for name, one in found.items():
        tables[f"auroc/{name}"] = {
            signal: {"pooled": auroc(one[signal][None], one["right"][None], seed)} for signal in SIGNALS
        }
    tables["overhead"] = monitor_cost(model, known, context=context, rounds=rounds, note=note)
    return json_values(tables)
