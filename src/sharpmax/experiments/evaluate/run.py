"""Run an evaluation: each measurement is stored as it is computed, so that a run can resume; then its tables."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sharpmax.errors import SharpmaxError
from sharpmax.experiments import statistics
from sharpmax.experiments.benchmarks.measuring import CachedReader, peak_mib, random_tokens, reset_peak
from sharpmax.experiments.evaluate.plan import BASE, Material, Plan, describe, shape_of, under
from sharpmax.experiments.run_folder import Outcome, RunStore
from sharpmax.models.language import LanguageModel, context_of
from sharpmax.models.scoring import Reply, encode, generated_texts, judge, own_answers, window_losses
from sharpmax.policies.base import Policy
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

_FINISHED, _COST, _HARNESS, _OWN_ANSWERS = "finished", "cost", "harness/", "own answers"
_ANSWER_TOKENS = 48
_GENERATING = 20  # reading this many tokens takes about as long as generating one
_DECODED = 24

Progress = Callable[[int, str], None]
"""Called with the number of tokens read since the last call, and what comes next."""


class Measurements:
    """Values in the folder of a run by key, and remarks on variants; `identity` are the settings they belong to.

    A finished run can be started anew, an interrupted one only with `resume`.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], *, resume: bool) -> None:
        self._store = RunStore(folder, FILE_NAME)
        if _FINISHED in self._store and not resume:
            self._store.clear()
        self._store.claim(identity, resume=resume)
        self.writing = self._store.writing

    def __contains__(self, key: str) -> bool:
        return key in self._store

    def __getitem__(self, key: str) -> Any:
        return self._store.record(key)["value"]

    def add(self, key: str, value: Any, variant: str = "", remarks: Sequence[str] = ()) -> None:
        """Store a value; when this returns it is on disk."""
        self._store.add(key, Outcome({"value": value, "variant": variant, "remarks": list(remarks)}))

    def remarks(self, variant: str) -> list[str]:
        """Remarks on a variant, each once."""
        records = map(self._store.record, self._store.keys())
        return list(dict.fromkeys(r for one in records if one["variant"] == variant for r in one["remarks"]))


@dataclass(frozen=True)
class Piece:
    """One measurement of one variant; `tokens` is the amount of work."""

    key: str
    variant: str
    what: str
    tokens: int
    measure: Callable[[Measurements], list[Any]]  # JSON values, given what has been measured already
    losses: Callable[[list[Any]], Sequence[float]]  # the numbers in an outcome that must be finite


def _answer_key(task: Task, size: int, variant: str) -> str:
    return f"answers/{task.name}/{size}/{variant}"


def _loss_key(column: int | str, variant: str) -> str:
    return f"text/{column}/{variant}"


def _pieces(language: LanguageModel, plan: Plan, material: Material) -> Iterator[Piece]:
    """All measurements, variant after variant for each size, so that an interrupted run has pairs to compare."""
    variants = (BASE, *plan.variants)
    for task in plan.tasks:
        for size in plan.sizes_of(task):
            replies = functools.cache(functools.partial(_replies, language, plan, task, size))
            prompts = functools.cache(functools.partial(task.prompts, size, plan.prompts, plan.seed))
            tokens = plan.prompts * len(encode(language.tokenizer, task.prompts(size, 1, plan.seed)[0]).ids)
            for name in variants:
                key, what = _answer_key(task, size, name), f"{task.name}, size {size}: {name}"
                answers = functools.partial(_answers, language, replies)
                if task.new_tokens:
                    answers = functools.partial(_generated, language, prompts, task.new_tokens)
                yield Piece(key, name, what, tokens, answers, _second)
    for length, cut in material.windows.items():
        for name in variants:
            key, what = _loss_key(length, name), f"text, {length} tokens: {name}"
            yield Piece(key, name, what, length * len(cut), functools.partial(_window_losses, language, cut), _first)
    if material.questions:
        work = len(material.questions) * _ANSWER_TOKENS
        generate = functools.partial(_own_answers, language, material.questions)
        yield Piece(_OWN_ANSWERS, BASE, _OWN_ANSWERS, work * _GENERATING, generate, lambda found: ())
        for name in variants:
            score = functools.partial(_chat_losses, language)
            yield Piece(_loss_key(CHAT, name), name, f"{_OWN_ANSWERS}: {name}", 2 * work, score, _first)


def _first(found: list[Any]) -> list[Any]:
    return [one[0] for one in found]


def _second(found: list[Any]) -> list[float]:
    return [one[1] for one in found]


def _replies(language: LanguageModel, plan: Plan, task: Task, size: int) -> list[Reply]:
    return [encode(language.tokenizer, prompt) for prompt in task.prompts(size, plan.prompts, plan.seed)]


def _answers(language: LanguageModel, replies: Callable[[], list[Reply]], known: Measurements) -> list[Any]:
    """Whether each answer is right, and its loss."""
    return [[int(found.right), found.nll] for found in judge(language.model, replies())]


def _generated(
    language: LanguageModel, prompts: Callable[[], list[Prompt]], new_tokens: int, known: Measurements
) -> list[Any]:
    """The share of the references in what is generated for each prompt; its loss is not measured."""
    texts = generated_texts(language.model, language.tokenizer, prompts(), new_tokens)
    found = [
        [one.lower() in text.lower() for one in prompt.references]
        for text, prompt in zip(texts, prompts(), strict=True)
    ]
    return [[sum(hits) / len(hits), 0.0] for hits in found]


def _window_losses(language: LanguageModel, cut: list[list[int]], known: Measurements) -> list[Any]:
    """Summed loss and number of tokens of each window."""
    found = []
    with torch.no_grad():
        for window in cut:
            predicted = len(window) - 1
            found.append([float(window_losses(language.model, [window])[0]) * predicted, predicted])
    return found


def _own_answers(language: LanguageModel, questions: Sequence[str], known: Measurements) -> list[Any]:
    replies = own_answers(language.model, language.tokenizer, questions, _ANSWER_TOKENS)
    return [[list(reply.ids), reply.start] for reply in replies]


def _chat_losses(language: LanguageModel, known: Measurements) -> list[Any]:
    replies = [Reply(tuple(ids), start) for ids, start in known[_OWN_ANSWERS]]
    return [[one.nll, one.tokens] for one in judge(language.model, replies)]


def _context(language: LanguageModel) -> int:
    context = context_of(language.model)
    # Decoded tokens need positions of their own.
    return CONTEXT if context is None else min(CONTEXT, context // 2)


def work(language: LanguageModel, plan: Plan, material: Material) -> int:
    """About how many tokens `evaluate_tables` reads."""
    cost = (1 + len(plan.variants)) * (ROUNDS + 1) * _context(language)
    return sum(piece.tokens for piece in _pieces(language, plan, material)) + cost


def evaluate_tables(
    language: LanguageModel,
    plan: Plan,
    material: Material,
    folder: Path,
    *,
    resume: bool = False,
    progress: Progress = lambda tokens, remark: None,
) -> dict[str, Any]:
    """Run every variant on the same prompts and text; what is measured is in `folder`/answers.jsonl at any moment."""
    found = Measurements(folder, material.identity, resume=resume)
    with found.writing():
        for piece in _pieces(language, plan, material):
            progress(0, piece.what)
            if piece.key not in found:
                _measure(language, plan.variants.get(piece.variant), piece, found)
            progress(piece.tokens, piece.what)
        if _COST not in found:
            context = _context(language)
            costs = cost(language.model, plan.variants, context, ROUNDS, note=lambda text: progress(context, text))
            found.add(_COST, {"context": context, "arms": {name: asdict(one) for name, one in costs.items()}})
        for name in (BASE, *plan.variants) if material.harness is not None else ():
            progress(0, f"harness: {name}")
            if _HARNESS + name not in found and material.harness is not None:
                policy = plan.variants.get(name)
                result = material.harness.run(language, policy, limit=plan.prompts, seed=plan.seed)
                found.add(_HARNESS + name, result)
        found.add(_FINISHED, True)
    return _tables(language, plan, material, found)


def _measure(language: LanguageModel, policy: Policy | None, piece: Piece, found: Measurements) -> None:
    remarks: list[str] = []
    with under(language.model, policy, remarks.append):
        value = piece.measure(found)
    if not all(math.isfinite(loss) for loss in piece.losses(value)):
        raise SharpmaxError(
            f"evaluate: {language.name} gives logits that are not numbers (NaN or infinite) in {piece.what!r}; "
            + ("choose another --dtype" if policy is None else "leave that policy out, or choose another --dtype")
        )
    found.add(piece.key, value, piece.variant, remarks)


@dataclass(frozen=True)
class Cost:
    """Medians over rounds; ratios are to the model without a policy in the same round."""

    prefill_ms: float
    decode_ms: float
    peak_mib: float | None
    prefill_ratio: float = 1.0
    decode_ratio: float = 1.0


def cost(
    model: PreTrainedModel,
    variants: Mapping[str, Policy],
    context: int,
    rounds: int,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Cost]:
    """Time and memory of every variant.

    Every round measures each variant once and ratios are taken within a round, so that noise of the machine affects
    all alike. Each variant runs once before the first round.
    """
    every: dict[str, Policy | None] = {BASE: None, **variants}
    ids = random_tokens(model, context)
    found: dict[str, list[Cost]] = {name: [] for name in every}
    for number in range(rounds + 1):
        for name, policy in every.items():
            note(f"cost, round {number} of {rounds}: {name}")
            with torch.no_grad(), under(model, policy):
                measured = _one_cost(model, ids)
            if number:
                found[name].append(measured)
    return {name: _median(rows, found[BASE]) for name, rows in found.items()}


def _one_cost(model: PreTrainedModel, ids: Tensor) -> Cost:
    reader = CachedReader(model)
    known = reset_peak(model.device)
    prefill = reader.read(ids)
    decode = median(reader.read(ids[:, place : place + 1]) for place in range(_DECODED))
    return Cost(prefill, decode, peak_mib(model.device) if known else None)


def _median(rows: Sequence[Cost], base: Sequence[Cost]) -> Cost:
    peaks = [row.peak_mib for row in rows if row.peak_mib is not None]
    pairs = list(zip(rows, base, strict=True))
    return Cost(
        median(row.prefill_ms for row in rows),
        median(row.decode_ms for row in rows),
        median(peaks) if len(peaks) == len(rows) else None,
        median(row.prefill_ms / other.prefill_ms for row, other in pairs),
        median(row.decode_ms / other.decode_ms for row, other in pairs),
    )


def _tables(language: LanguageModel, plan: Plan, material: Material, found: Measurements) -> dict[str, Any]:
    variants = (BASE, *plan.variants)
    tables: dict[str, Any] = {"setting": _setting(language, plan, material, found)}
    for task in plan.tasks:
        sizes = plan.sizes_of(task)
        right = {name: {size: _first(found[_answer_key(task, size, name)]) for size in sizes} for name in variants}
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


def _perplexity(found: Measurements, column: int | str, variant: str) -> dict[str, Any]:
    base, here = found[_loss_key(column, BASE)], found[_loss_key(column, variant)]
    change = statistics.Rise(0.0, None, None) if variant == BASE else statistics.rise(base, here)
    return {**asdict(statistics.perplexity(here)), **asdict(change), "texts": len(here)}


def _setting(language: LanguageModel, plan: Plan, material: Material, found: Measurements) -> dict[str, Any]:
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
                "remarks": found.remarks(name),
            }
            for name, policy in every.items()
        },
        "tasks": {task.name: {"version": task.version, "summary": task.summary} for task in plan.tasks},
        "sizes": list(plan.sizes),
        "prompts": plan.prompts,
        "text": None if material.text is None else dict(material.text),
        "windows": plan.windows,
        "questions": len(material.questions),
        "context": found[_COST]["context"],
        "rounds": ROUNDS,
        "dtype": material.identity["dtype"],
        "device": material.identity["device"],
    }
