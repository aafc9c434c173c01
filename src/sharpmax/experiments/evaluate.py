"""Evaluate a language model with and without policies, on the same prompts, text and machine.

`prepare` validates a plan against the model. `evaluate_tables` stores each measurement, so that a run can resume, and
returns the tables.
"""

from __future__ import annotations

import functools
import math
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import torch

from sharpmax.errors import SharpmaxError, reject
from sharpmax.experiments import statistics
from sharpmax.experiments.benchmarks.measuring import (
    CachedReader,
    Note,
    in_rounds,
    median_ratio,
    peak_mib,
    random_tokens,
    reset_peak,
)
from sharpmax.experiments.engine import Job, Progress, run
from sharpmax.experiments.run_folder import Outcome, RunStore
from sharpmax.experiments.variants import Harness, describe, shape_of, under
from sharpmax.files import display_name
from sharpmax.models.language import LanguageModel, context_of, load_language_model, weights_fingerprint
from sharpmax.models.scoring import Reply, encode, generated_texts, judge, own_answers, special_tokens, window_losses
from sharpmax.policies.base import Policy
from sharpmax.results import json_values
from sharpmax.tasks.prompt import Prompt, Task
from sharpmax.tasks.text import chat_questions, fingerprint, plain_text, text_from_file, windows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BASE = "baseline"
"""The name of the variant without a policy, which is part of every evaluation."""

LENGTHS = (2048, 6144)
"""Default lengths of text windows in tokens, up to the model's context."""


@dataclass(frozen=True)
class Plan:
    """What to evaluate: variants, tasks, sizes and amounts."""

    variants: Mapping[str, Policy]
    tasks: tuple[Task, ...]
    sizes: tuple[int, ...]
    prompts: int
    seed: int = 0
    with_text: bool = True
    with_cost: bool = True  # time and memory; only meaningful on an otherwise idle machine
    text: Path | None = None  # a file to read instead of the test part of Python's documentation
    lengths: tuple[int, ...] | None = None
    windows: int = 3
    questions: int = 8  # chat questions that the model answers itself
    harness: tuple[str, ...] = ()  # tasks of EleutherAI's harness
    harness_path: Path | None = None

    def sizes_of(self, task: Task) -> tuple[int, ...]:
        """The sizes of a task. For RULER these are the lengths, if given."""
        return self.lengths if self.lengths and task.name.startswith("ruler/") else self.sizes

    def for_tokenizer(self, tokenizer: Any) -> Plan:
        """The plan with RULER tasks of the given lengths in tokens, if there are lengths."""

        def tokens(prompt: Prompt) -> int:
            return len(encode(tokenizer, prompt).ids)

        if not self.lengths:
            return self
        tasks = (one.of_length(tokens) if one.name.startswith("ruler/") else one for one in self.tasks)
        return replace(self, tasks=tuple(tasks))


@dataclass(frozen=True)
class Material:
    """The data of a plan (windows of text, questions, the harness) and the settings that identify the run."""

    windows: Mapping[int, list[list[int]]]
    questions: tuple[str, ...]
    harness: Harness | None
    identity: Mapping[str, Any]


def prepare(language: LanguageModel, plan: Plan) -> Material:
    """Validate variants, sizes and lengths against the model, and load the text."""
    for policy in plan.variants.values():
        with under(language.model, policy):
            pass  # raises if the policy is for another architecture
    context = context_of(language.model)
    for task, size in [(one, size) for one in plan.tasks for size in plan.sizes_of(one)]:
        task.check_size(size)
        tokens = len(encode(language.tokenizer, task.prompts(size, 1, plan.seed)[0]).ids)
        if context is not None and tokens > context:
            given = f"{size} for the task {task.name!r}, a prompt of {tokens} tokens"
            allowed = f"prompts of up to {context} tokens, the context of {language.name}"
            reject("--sizes", given, allowed, "leave out the largest sizes")
    source, cut = _text(language, plan, context) if plan.with_text else (None, {})
    questions = tuple(chat_questions("test")[: plan.questions]) if plan.with_text else ()
    harness = Harness.ready(plan.harness, plan.harness_path) if plan.harness else None
    identity = {
        "schema": 2,  # of the measurements
        "model": display_name(language.name),
        "weights": weights_fingerprint(language.model),
        "dtype": str(language.model.dtype).removeprefix("torch."),
        "device": language.model.device.type,
        "seed": plan.seed,
        "prompts": plan.prompts,
        "sizes": list(plan.sizes),
        "tasks": {task.name: task.version for task in plan.tasks},
        "variants": {name: policy.to_dict() for name, policy in plan.variants.items()},
        "text": source,
        "lengths": list(cut),
        "windows": plan.windows,
        "questions": plan.questions if plan.with_text else 0,
        "harness": list(plan.harness),
    }
    return Material(cut, questions, harness, identity)


def _text(
    language: LanguageModel, plan: Plan, context: int | None
) -> tuple[dict[str, Any], dict[int, list[list[int]]]]:
    lengths = plan.lengths
    if lengths is None:
        lengths = tuple(n for n in LENGTHS if context is None or n <= context) or (context or min(LENGTHS),)
    for length in lengths:
        if context is not None and length > context:
            reject("--lengths", length, f"up to {context} tokens, the context of {language.name}")
    text = plain_text("test") if plan.text is None else text_from_file(plan.text)
    ids = language.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    name = "Python's own documentation, test part" if plan.text is None else plan.text.name
    source = {"source": name, "fingerprint": fingerprint(text), "tokens": len(ids)}
    before = special_tokens(language.tokenizer)[0]
    return source, {length: windows(ids, length, plan.windows, before) for length in lengths}


FILE_NAME = "answers.jsonl"

CHAT = "chat"
"""The column of the model's own answers, beside the lengths of windows."""

CONTEXT = 2048
"""Tokens read before decoding is timed."""

ROUNDS = 5

_FINISHED, _COST, _HARNESS, _OWN_ANSWERS = "finished", "cost", "harness/", "own answers"
_ANSWER_TOKENS = 48
_DECODED = 24

Measure = Callable[[LanguageModel, list[Any]], list[Any]]
"""Returns, for each prompt or text: the score of the answer, its summed loss in nats, its number of tokens."""


def judged(language: LanguageModel, replies: list[Reply]) -> list[Any]:
    """Score replies, with one forward pass each."""
    return [[int(one.right), one.nll, one.tokens] for one in judge(language.model, replies)]


def generated(language: LanguageModel, prompts: list[tuple[Prompt, int]]) -> list[Any]:
    """The share of references found in what is generated for each prompt. Its loss is not measured."""
    asked, (new_tokens, *_) = zip(*prompts, strict=True)
    texts = generated_texts(language.model, language.tokenizer, asked, new_tokens)
    pairs = zip(texts, asked, strict=True)
    return [[fmean(one.lower() in text.lower() for one in prompt.references), 0.0, 0] for text, prompt in pairs]


def windows_read(language: LanguageModel, windows: list[list[int]]) -> list[Any]:
    """The loss of windows of text."""
    with torch.no_grad():
        means = [float(window_losses(language.model, [window])[0]) for window in windows]
    return [[0, mean * (len(window) - 1), len(window) - 1] for mean, window in zip(means, windows, strict=True)]


def questions_answered(language: LanguageModel, questions: list[str]) -> list[Any]:
    """Tokens and start of the model's own answer to each question. All variants are scored on these answers."""
    replies = own_answers(language.model, language.tokenizer, questions, _ANSWER_TOKENS)
    return [[list(reply.ids), reply.start] for reply in replies]


def _answer_key(task: Task, size: int, variant: str) -> str:
    return f"answers/{task.name}/{size}/{variant}"


def _loss_key(column: int | str, variant: str) -> str:
    return f"text/{column}/{variant}"


def _cells(language: LanguageModel, plan: Plan, material: Material, own: list[Reply]) -> Iterator[tuple[Job, int]]:
    """All measurements and their tokens. Variants alternate at each size, so that an interrupted run has pairs."""
    variants: dict[str, Policy | None] = {BASE: None, **plan.variants}

    def cell(key: str, name: str, what: str, measure: Measure, data: list[Any]) -> Job:
        arguments = {"policy": variants[name], "variant": name, "what": f"{what}: {name}", "measure": measure}
        return Job(key, f"{__name__}:measure_elsewhere", {**arguments, "data": data}, label=f"{what}: {name}")

    for task in plan.tasks:
        for size in plan.sizes_of(task):
            prompts = task.prompts(size, plan.prompts, plan.seed)
            data: list[Any] = [encode(language.tokenizer, prompt) for prompt in prompts]
            tokens = len(data) * len(data[0].ids)
            if task.new_tokens:
                data = [(prompt, task.new_tokens) for prompt in prompts]
            measure = generated if task.new_tokens else judged
            for name in variants:
                yield cell(_answer_key(task, size, name), name, f"{task.name}, size {size}", measure, data), tokens
    for length, cut in material.windows.items():
        for name in variants:
            work = length * len(cut)
            yield cell(_loss_key(length, name), name, f"text, {length} tokens", windows_read, cut), work
    for name in variants if own else ():
        yield cell(_loss_key(CHAT, name), name, _OWN_ANSWERS, judged, own), 2 * _ANSWER_TOKENS * len(own)


def measure_cell(
    language: LanguageModel, policy: Policy | None, variant: str, what: str, measure: Measure, data: list[Any]
) -> Outcome:
    """Measure one cell. Raises SharpmaxError if the logits are not numbers."""
    remarks: list[str] = []
    with under(language.model, policy, remarks.append):
        value = measure(language, data)
    if measure is not questions_answered and not all(math.isfinite(number) for row in value for number in row):
        raise SharpmaxError(
            f"evaluate: {language.name} gives logits that are not numbers (NaN or infinite) in {what!r}; "
            + ("choose another --dtype" if policy is None else "leave that policy out, or choose another --dtype")
        )
    return Outcome({"value": value, "variant": variant, "remarks": remarks})


def measure_elsewhere(*, model: str, device: str, dtype: str, weights: str, **cell: Any) -> Outcome:
    """`measure_cell` in a process that loads the model first, and keeps it."""
    return measure_cell(_loaded(model, device, dtype, weights), **cell)


@functools.lru_cache(maxsize=1)
def _loaded(model: str, device: str, dtype: str, weights: str) -> LanguageModel:
    language = load_language_model(model, device=device, dtype=dtype)
    if weights_fingerprint(language.model) != weights:
        there = f"the node {platform.node()!r} has other weights under {model!r}"
        raise SharpmaxError(f"evaluate: {there}; copy them there")
    return language


def evaluate_tables(
    language: LanguageModel,
    plan: Plan,
    material: Material,
    folder: Path,
    *,
    resume: bool = False,
    progress: Progress = lambda done, total, what: None,
    engine: str = "local",
    workers: int | None = None,
    address: str | None = None,
) -> dict[str, Any]:
    """Run every variant on the same prompts and text. Measurements are stored in `folder`/answers.jsonl.

    With the engine `ray`, cells run on a cluster whose nodes load the model by name. Time, memory and the harness are
    measured on this machine.
    """
    store = RunStore(folder, FILE_NAME)
    if _FINISHED in store and not resume:
        store.clear()
    store.claim(material.identity, resume=resume)
    own: list[Reply] = []
    if material.questions:
        with store.writing():
            if _OWN_ANSWERS not in store:
                progress(0, 0, _OWN_ANSWERS)
                questions = list(material.questions)
                asked = measure_cell(language, None, BASE, _OWN_ANSWERS, questions_answered, questions)
                store.add(_OWN_ANSWERS, asked)
        own = [Reply(tuple(ids), start) for ids, start in store.records[_OWN_ANSWERS]["value"]]
    cells = list(_cells(language, plan, material, own))
    total = sum(tokens for _, tokens in cells)

    def report(what: str) -> None:
        progress(sum(tokens for job, tokens in cells if job.key in store), total, what)

    if engine == "ray":
        where = {name: material.identity[name] for name in ("device", "dtype", "weights")} | {"model": language.name}
        jobs = [replace(job, arguments={**where, **job.arguments}) for job, _ in cells]
        run(
            jobs, store, engine=engine, workers=workers, address=address,
            progress=lambda done, total, running: report(running),
        )  # fmt: skip
    with store.writing():
        for job, _ in cells:
            report(job.label)
            if job.key not in store:
                store.add(job.key, measure_cell(language, **job.arguments))
        if plan.with_cost and _COST not in store:
            limit = context_of(language.model)
            context = CONTEXT if limit is None else min(CONTEXT, limit // 2)  # decoded tokens need positions too
            variants = cost(language.model, plan.variants, context, ROUNDS, note=lambda text: report(f"cost, {text}"))
            store.add(_COST, Outcome({"value": {"context": context, "variants": variants}}))
        if (harness := material.harness) is not None:
            for name in (BASE, *plan.variants):
                report(f"harness: {name}")
                if _HARNESS + name not in store:
                    result = harness.run(language, plan.variants.get(name), limit=plan.prompts, seed=plan.seed)
                    store.add(_HARNESS + name, Outcome({"value": result}))
        store.add(_FINISHED, Outcome({"value": True}))
    return _tables(language, plan, material, store)


def cost(
    model: PreTrainedModel, variants: Mapping[str, Policy], context: int, rounds: int, note: Note
) -> dict[str, dict[str, float | None]]:
    """Time and memory of every variant: medians over rounds, with ratios within a round, after a warm-up round."""
    ids = random_tokens(model, context)

    def timed(policy: Policy | None) -> tuple[float, float, float | None]:
        with torch.no_grad(), under(model, policy):
            reader, known = CachedReader(model), reset_peak(model.device)
            prefill = reader.read(ids)
            decode = median(reader.read(ids[:, place : place + 1]) for place in range(_DECODED))
            return prefill, decode, peak_mib(model.device) if known else None

    measures = {name: functools.partial(timed, policy) for name, policy in {BASE: None, **variants}.items()}
    in_rounds(measures, 1, note)
    times = {name: list(zip(*rows, strict=True)) for name, rows in in_rounds(measures, rounds, note).items()}
    base = times[BASE]
    return {
        name: {
            "prefill_ms": median(prefill),
            "decode_ms": median(decode),
            "peak_mib": None if None in peak else median(peak),
            "prefill_ratio": median_ratio(prefill, base[0]),
            "decode_ratio": median_ratio(decode, base[1]),
        }
        for name, (prefill, decode, peak) in times.items()
    }


def _tables(language: LanguageModel, plan: Plan, material: Material, store: RunStore) -> dict[str, Any]:
    variants = (BASE, *plan.variants)
    found = {key: record["value"] for key, record in store.records.items()}
    tables: dict[str, Any] = {"setting": _setting(language, plan, material, store)}
    for task in plan.tasks:
        right = {
            name: {size: [one[0] for one in found[_answer_key(task, size, name)]] for size in plan.sizes_of(task)}
            for name in variants
        }
        tables[f"accuracy/{task.name}"] = {
            name: {size: statistics.accuracy(cell) for size, cell in cells.items()} for name, cells in right.items()
        }
        tables[f"paired/{task.name}"] = {
            name: {size: statistics.paired(right[BASE][size], cell) for size, cell in right[name].items()}
            for name in plan.variants
        }
    columns: list[int | str] = [*material.windows, *([CHAT] if material.questions else [])]
    if columns:
        tables["perplexity"] = {name: {c: _perplexity(found, c, name) for c in columns} for name in variants}
    if _COST in found:
        tables["cost"] = found[_COST]["variants"]
    if material.harness is not None:
        tables["harness"] = {name: found[_HARNESS + name] for name in variants}
    return json_values(tables)


def _perplexity(found: Mapping[str, Any], column: int | str, variant: str) -> statistics.Perplexity:
    base, here = ([row[1:] for row in found[_loss_key(column, name)]] for name in (BASE, variant))
    change = statistics.perplexity(here, base)
    return replace(change, low=None, high=None) if variant == BASE else change


def _setting(language: LanguageModel, plan: Plan, material: Material, store: RunStore) -> dict[str, Any]:
    layers, heads = shape_of(language.model)
    remarks: dict[str, dict[str, None]] = {}  # of each variant, each once
    for record in store.records.values():
        remarks.setdefault(record.get("variant", ""), {}).update(dict.fromkeys(record.get("remarks", ())))
    every: dict[str, Policy | None] = {BASE: None, **plan.variants}
    names = ("model", "sizes", "prompts", "text", "windows", "dtype", "device")
    return {
        **{name: material.identity[name] for name in names},
        "layers": layers,
        "heads": heads,
        "variants": {
            name: {**describe(policy, layers, heads), "remarks": list(remarks.get(name, ()))}
            for name, policy in every.items()
        },
        "tasks": {task.name: {"version": task.version, "summary": task.summary} for task in plan.tasks},
        "questions": len(material.questions),
        "context": store.records[_COST]["value"]["context"] if _COST in store else None,
        "rounds": ROUNDS,
    }
