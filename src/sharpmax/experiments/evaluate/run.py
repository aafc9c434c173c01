"""Run an evaluation: each measurement is stored as it is computed, so that a run can resume; then its tables."""

from __future__ import annotations

import functools
import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from sharpmax.errors import SharpmaxError
from sharpmax.experiments import statistics
from sharpmax.experiments.benchmarks.measuring import CachedReader, peak_mib, random_tokens, reset_peak
from sharpmax.experiments.engine import Job, run
from sharpmax.experiments.evaluate.plan import BASE, Material, Plan, describe, shape_of, under
from sharpmax.experiments.run_folder import Outcome, RunStore
from sharpmax.models.language import LanguageModel, context_of, load_language_model, weights_fingerprint
from sharpmax.models.scoring import Reply, encode, generated_texts, judge, own_answers, window_losses
from sharpmax.policies.base import Policy, policy_from_dict
from sharpmax.results import json_values
from sharpmax.tasks.prompt import Prompt, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FILE_NAME = "answers.jsonl"

CHAT = "chat"
"""The column of the model's own answers among the lengths of windows."""

CONTEXT = 2048
"""Tokens that are read before decoding is timed."""

ROUNDS = 5

_MODULE = "sharpmax.experiments.evaluate.run"
_FINISHED, _COST, _HARNESS, _OWN_ANSWERS = "finished", "cost", "harness/", "own answers"
_ANSWER_TOKENS = 48
_GENERATING = 20  # reading this many tokens takes about as long as generating one
_DECODED = 24

Progress = Callable[[int, int, str], None]
"""Called with the tokens that were read, about how many there are, and what comes next."""


@dataclass(frozen=True)
class Cell:
    """One measurement of one variant: `measure` of the function named `kind` on plain data."""

    key: str
    variant: str
    what: str
    tokens: int  # the amount of work
    kind: str
    data: Callable[[], list[Any]]


def _answer_key(task: Task, size: int, variant: str) -> str:
    return f"answers/{task.name}/{size}/{variant}"


def _loss_key(column: int | str, variant: str) -> str:
    return f"text/{column}/{variant}"


def _cells(language: LanguageModel, plan: Plan, material: Material, store: RunStore) -> Iterator[Cell]:
    """All measurements, variant after variant for each size, so that an interrupted run has pairs to compare."""
    variants = (BASE, *plan.variants)
    if material.questions:
        work = len(material.questions) * _ANSWER_TOKENS
        yield Cell(_OWN_ANSWERS, BASE, _OWN_ANSWERS, work * _GENERATING, "own", lambda: list(material.questions))
    for task in plan.tasks:
        kind = "generated" if task.new_tokens else "judged"
        for size in plan.sizes_of(task):
            data = functools.cache(functools.partial(_prompts, language, plan, task, size))
            tokens = plan.prompts * len(encode(language.tokenizer, task.prompts(size, 1, plan.seed)[0]).ids)
            for name in variants:
                yield Cell(_answer_key(task, size, name), name, f"{task.name}, size {size}: {name}", tokens, kind, data)
    for length, cut in material.windows.items():
        for name in variants:
            what = f"text, {length} tokens: {name}"
            yield Cell(_loss_key(length, name), name, what, length * len(cut), "windows", functools.partial(list, cut))
    for name in variants if material.questions else ():
        yield Cell(
            _loss_key(CHAT, name), name, f"{_OWN_ANSWERS}: {name}", 2 * work, "judged",
            lambda: store.record(_OWN_ANSWERS)["value"],
        )  # fmt: skip


def _prompts(language: LanguageModel, plan: Plan, task: Task, size: int) -> list[Any]:
    """Prompts as plain values: tokens and start of the answer; texts and references where it is generated."""
    prompts = task.prompts(size, plan.prompts, plan.seed)
    if task.new_tokens:
        return [[one.user, one.opening, list(one.references), task.new_tokens] for one in prompts]
    return [[list(one.ids), one.start] for one in (encode(language.tokenizer, prompt) for prompt in prompts)]


def _judged(language: LanguageModel, data: list[Any]) -> list[Any]:
    replies = [Reply(tuple(ids), start) for ids, start in data]
    return [[int(one.right), one.nll, one.tokens] for one in judge(language.model, replies)]


def _generated(language: LanguageModel, data: list[Any]) -> list[Any]:
    """The share of the references in what is generated for each prompt; its loss is not measured."""
    prompts = [Prompt(user, opening, "", references=tuple(known)) for user, opening, known, _ in data]
    texts = generated_texts(language.model, language.tokenizer, prompts, data[0][-1])
    pairs = zip(texts, prompts, strict=True)
    hits = ([one.lower() in text.lower() for one in prompt.references] for text, prompt in pairs)
    return [[sum(found) / len(found), 0.0, 0] for found in hits]


def _windows(language: LanguageModel, data: list[Any]) -> list[Any]:
    with torch.no_grad():
        means = [float(window_losses(language.model, [window])[0]) for window in data]
    return [[0, mean * (len(window) - 1), len(window) - 1] for mean, window in zip(means, data, strict=True)]


def _own(language: LanguageModel, data: list[Any]) -> list[Any]:
    replies = own_answers(language.model, language.tokenizer, data, _ANSWER_TOKENS)
    return [[list(reply.ids), reply.start] for reply in replies]


_KINDS: Mapping[str, Callable[[LanguageModel, list[Any]], list[Any]]] = {
    "judged": _judged, "generated": _generated, "windows": _windows, "own": _own,
}  # fmt: skip
"""Functions of a model and plain data: how right each answer is, its summed loss in nats and its number of tokens.

`own` generates what the others judge: tokens and start of the model's answer to each question.
"""


def measure(language: LanguageModel, policy: Policy | None, cell: Mapping[str, Any]) -> Outcome:
    """Measure one cell; SharpmaxError if the model gives no numbers."""
    remarks: list[str] = []
    with under(language.model, policy, remarks.append):
        value = _KINDS[cell["kind"]](language, cell["data"])
    if cell["kind"] != "own" and not all(math.isfinite(number) for row in value for number in row):
        raise SharpmaxError(
            f"evaluate: {language.name} gives logits that are not numbers (NaN or infinite) in {cell['what']!r}; "
            + ("choose another --dtype" if policy is None else "leave that policy out, or choose another --dtype")
        )
    return Outcome({"value": value, "variant": cell["variant"], "remarks": remarks})


def measure_elsewhere(
    *, model: str, device: str, dtype: str, weights: str, policy: Mapping[str, Any] | None, cell: Mapping[str, Any]
) -> Outcome:
    """`measure` in a process that may not have the model yet; it keeps one."""
    language = _loaded(model, device, dtype, weights)
    return measure(language, None if policy is None else policy_from_dict(policy), cell)


@functools.lru_cache(maxsize=1)
def _loaded(model: str, device: str, dtype: str, weights: str) -> LanguageModel:
    language = load_language_model(model, device=device, dtype=dtype)
    if weights_fingerprint(language.model) != weights:
        raise SharpmaxError(
            f"evaluate: the node {platform.node()!r} has other weights under {model!r}; copy them there"
        )
    return language


def _context(language: LanguageModel) -> int:
    context = context_of(language.model)
    # Decoded tokens need positions of their own.
    return CONTEXT if context is None else min(CONTEXT, context // 2)


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
    """Run every variant on the same prompts and text; what is measured is in `folder`/answers.jsonl at any moment.

    With the engine `ray`, cells run on a cluster whose nodes load the model by its name; time, memory and the harness
    are measured here.
    """
    store = RunStore(folder, FILE_NAME)
    if _FINISHED in store and not resume:
        store.clear()
    store.claim(material.identity, resume=resume)
    cells = list(_cells(language, plan, material, store))
    context, timed = _context(language), 0
    total = sum(cell.tokens for cell in cells) + (1 + len(plan.variants)) * (ROUNDS + 1) * context

    def report(what: str) -> None:
        progress(sum(cell.tokens for cell in cells if cell.key in store) + timed, total, what)

    def report_timed(what: str) -> None:
        nonlocal timed
        timed += context
        report(what)

    def measure_here(some: Sequence[Cell]) -> None:
        for cell in some:
            report(cell.what)
            if cell.key not in store:
                store.add(cell.key, measure(language, plan.variants.get(cell.variant), _plain(cell)))

    if engine == "ray":
        with store.writing():
            measure_here(cells[:1] if material.questions else ())
        jobs = [_job(language, plan, material, cell) for cell in cells if cell.key not in store]
        run(
            jobs, store, engine=engine, workers=workers, address=address,
            progress=lambda state: report(", ".join(state.running[:2])),
        )  # fmt: skip
    with store.writing():
        measure_here(cells)
        if _COST not in store:
            arms = cost(language.model, plan.variants, context, ROUNDS, note=report_timed)
            store.add(_COST, Outcome({"value": {"context": context, "arms": arms}}))
        for name in (BASE, *plan.variants) if material.harness is not None else ():
            report(f"harness: {name}")
            if _HARNESS + name not in store and material.harness is not None:
                policy = plan.variants.get(name)
                result = material.harness.run(language, policy, limit=plan.prompts, seed=plan.seed)
                store.add(_HARNESS + name, Outcome({"value": result}))
        store.add(_FINISHED, Outcome({"value": True}))
    return _tables(language, plan, material, store)


def _plain(cell: Cell) -> dict[str, Any]:
    return {"kind": cell.kind, "variant": cell.variant, "what": cell.what, "data": cell.data()}


def _job(language: LanguageModel, plan: Plan, material: Material, cell: Cell) -> Job:
    policy = plan.variants.get(cell.variant)
    arguments = {
        "model": language.name,
        **{name: material.identity[name] for name in ("device", "dtype", "weights")},
        "policy": None if policy is None else policy.to_dict(),
        "cell": _plain(cell),
    }
    return Job(cell.key, f"{_MODULE}:measure_elsewhere", arguments, label=cell.what)


def cost(
    model: PreTrainedModel,
    variants: Mapping[str, Policy],
    context: int,
    rounds: int,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, dict[str, float | None]]:
    """Time and memory of every variant: medians over rounds.

    Every round measures each variant once and ratios are taken within a round, so that noise of the machine affects
    all alike. Each variant runs once before the first round.
    """
    every: dict[str, Policy | None] = {BASE: None, **variants}
    ids = random_tokens(model, context)
    found: dict[str, list[tuple[float, float, float | None]]] = {name: [] for name in every}
    for number in range(rounds + 1):
        for name, policy in every.items():
            note(f"cost, round {number} of {rounds}: {name}")
            with torch.no_grad(), under(model, policy):
                reader, known = CachedReader(model), reset_peak(model.device)
                prefill = reader.read(ids)
                decode = median(reader.read(ids[:, place : place + 1]) for place in range(_DECODED))
                peak = peak_mib(model.device) if known else None
            if number:
                found[name].append((prefill, decode, peak))
    return {name: _medians(rows, found[BASE]) for name, rows in found.items()}


def _medians(rows: Sequence[tuple[float, float, float | None]], base: Sequence[Any]) -> dict[str, float | None]:
    peaks = [row[2] for row in rows if row[2] is not None]
    pairs = list(zip(rows, base, strict=True))
    return {
        "prefill_ms": median(row[0] for row in rows),
        "decode_ms": median(row[1] for row in rows),
        "peak_mib": median(peaks) if len(peaks) == len(rows) else None,
        "prefill_ratio": median(row[0] / other[0] for row, other in pairs),
        "decode_ratio": median(row[1] / other[1] for row, other in pairs),
    }


def _tables(language: LanguageModel, plan: Plan, material: Material, store: RunStore) -> dict[str, Any]:
    variants = (BASE, *plan.variants)
    found = {key: store.record(key)["value"] for key in store.keys()}  # noqa: SIM118 (not a mapping)
    tables: dict[str, Any] = {"setting": _setting(language, plan, material, store)}
    for task in plan.tasks:
        sizes = plan.sizes_of(task)
        right = {
            name: {size: [one[0] for one in found[_answer_key(task, size, name)]] for size in sizes}
            for name in variants
        }
        tables[f"accuracy/{task.name}"] = {
            name: {str(size): statistics.accuracy(cells[size]) for size in sizes} for name, cells in right.items()
        }
        tables[f"paired/{task.name}"] = {
            name: {str(size): statistics.paired(right[BASE][size], right[name][size]) for size in sizes}
            for name in plan.variants
        }
    columns: list[int | str] = [*material.windows, *([CHAT] if material.questions else [])]
    if columns:
        tables["perplexity"] = {name: {str(c): _perplexity(found, c, name) for c in columns} for name in variants}
    tables["cost"] = found[_COST]["arms"]
    if material.harness is not None:
        tables["harness"] = {name: found[_HARNESS + name] for name in variants}
    return json_values(tables)


def _perplexity(found: Mapping[str, Any], column: int | str, variant: str) -> dict[str, Any]:
    base, here = ([row[1:] for row in found[_loss_key(column, name)]] for name in (BASE, variant))
    change = statistics.Rise(0.0, None, None) if variant == BASE else statistics.rise(base, here)
    return {**asdict(statistics.perplexity(here)), **asdict(change), "texts": len(here)}


def _setting(language: LanguageModel, plan: Plan, material: Material, store: RunStore) -> dict[str, Any]:
    layers, heads = shape_of(language.model)
    every: dict[str, Policy | None] = {BASE: None, **plan.variants}
    return {
        "model": material.identity["model"],
        "layers": layers,
        "heads": heads,
        "arms": {
            name: {
                **describe(policy, layers, heads),
                "calibrated_on": plan.calibrated_on.get(name),
                "remarks": _remarks(store, name),
            }
            for name, policy in every.items()
        },
        "tasks": {task.name: {"version": task.version, "summary": task.summary} for task in plan.tasks},
        "sizes": list(plan.sizes),
        "prompts": plan.prompts,
        "text": None if material.text is None else dict(material.text),
        "windows": plan.windows,
        "questions": len(material.questions),
        "context": store.record(_COST)["value"]["context"],
        "rounds": ROUNDS,
        "dtype": material.identity["dtype"],
        "device": material.identity["device"],
    }


def _remarks(store: RunStore, variant: str) -> list[str]:
    """Remarks on a variant, each once."""
    records = [store.record(key) for key in store.keys()]  # noqa: SIM118 (not a mapping)
    return list(dict.fromkeys(text for one in records if one.get("variant") == variant for text in one["remarks"]))
