"""Run an evaluation: each measurement is stored as it is computed, so that a run can resume; then its tables."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sharpmax.errors import ArgumentError, FileFormatError, SharpmaxError
from sharpmax.experiments import statistics
from sharpmax.experiments.benchmarks.measuring import CachedReader, peak_mib, random_tokens, reset_peak
from sharpmax.experiments.evaluate.plan import BASE, Harness, Material, Plan, shape_of, touched, under
from sharpmax.experiments.run_folder import check_identity, plain
from sharpmax.files import parse_json, write_text
from sharpmax.models.language import context_of
from sharpmax.models.scoring import Judged, Reply, encode, judge, own_answers, window_losses
from sharpmax.policies.base import Policy
from sharpmax.tasks.prompt import Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sharpmax.models.language import LanguageModel

FILE_NAME = "answers.json"

_SCHEMA = 1


class Answers:
    """Values by key, each written with all others in one step; `identity` says what run they belong to."""

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self._path, self._identity = path, plain(identity)
        self._values: dict[str, Any] = {}
        self._remarks: dict[str, list[str]] = {}
        self._complete = False

    @classmethod
    def open(cls, folder: Path, identity: Mapping[str, Any], *, resume: bool) -> Answers:
        """The answers of a run in `folder`: none yet, or those of an interrupted run of the very same settings."""
        answers = cls(folder / FILE_NAME, identity)
        if answers._path.exists():
            answers._take_up(resume=resume)
        return answers

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def add(self, key: str, value: Any) -> None:
        """Keep a value; when this returns it is on disk."""
        self._values[key] = value
        self._save()

    def remark(self, arm: str, text: str) -> None:
        """Keep what there is to say about an arm; it is written with the next value."""
        said = self._remarks.setdefault(arm, [])
        if text not in said:
            said.append(text)

    def remarks(self, arm: str) -> list[str]:
        """What there is to say about an arm."""
        return list(self._remarks.get(arm, []))

    def finish(self) -> None:
        """Say that nothing is missing: the next run in this folder may begin anew."""
        self._complete = True
        self._save()

    def _save(self) -> None:
        body = {
            "schema": _SCHEMA,
            "complete": self._complete,
            "run": self._identity,
            "remarks": self._remarks,
            "values": self._values,
        }
        write_text(self._path, json.dumps(body, ensure_ascii=False, allow_nan=False) + "\n")

    def _take_up(self, *, resume: bool) -> None:
        try:
            body = parse_json(self._path.read_bytes())
            schema, complete, run = body["schema"], body["complete"], body["run"]
            values, remarks = dict(body["values"]), dict(body["remarks"])
        except (OSError, KeyError, TypeError, ValueError):
            schema, complete, run, values, remarks = None, False, {}, {}, {}
        if schema != _SCHEMA or not isinstance(run, dict):
            raise FileFormatError(
                f"--out: {str(self._path)!r} is not a file of answers that this sharpmax wrote; remove it, or choose "
                "another folder"
            )
        if not resume:
            if complete:
                return
            raise ArgumentError(
                f"--out: {str(self._path.parent)!r} holds an evaluation that was interrupted; add --resume to go on "
                "with it, or choose another folder"
            )
        check_identity(self._path, run, self._identity)
        self._values, self._remarks, self._complete = values, remarks, complete


CHAT = "chat"
"""The column of the model's own answers among the lengths of windows."""

_OWN_ANSWERS = "own answers"
_TOKENS_TO_SAY = 48
_GENERATING = 20
"""About how many read tokens one generated token takes as long as."""


@dataclass(frozen=True)
class Piece:
    """Something to find out about the model under one arm; `tokens` is how much work that is."""

    key: str
    arm: str
    what: str
    tokens: int
    measure: Callable[[Answers], list[Any]]
    """The outcome, as JSON values, given what is known already."""

    losses: Callable[[list[Any]], Sequence[float]]
    """The numbers in an outcome that must be finite."""


def answer_key(task: Task, size: int, arm: str) -> str:
    """Where the rightness of each prompt is kept."""
    return f"answers/{task.name}/{size}/{arm}"


def loss_key(column: int | str, arm: str) -> str:
    """Where the (summed loss, tokens) of each window, or of each own answer, is kept."""
    return f"text/{column}/{arm}"


def pieces(language: LanguageModel, plan: Plan, material: Material) -> Iterator[Piece]:
    """Everything to be done, arm after arm for each size, so that an interrupted run has pairs to compare."""
    for task in plan.tasks:
        for size in plan.sizes:
            replies = functools.cache(functools.partial(_replies, language, plan, task, size))
            tokens = plan.prompts * len(encode(language.tokenizer, task.prompts(size, 1, plan.seed)[0]).ids)
            for arm in (BASE, *plan.arms):
                measure = functools.partial(_answers, language, replies)
                what = f"{task.name}, size {size}: {arm}"
                yield Piece(
                    answer_key(task, size, arm), arm, what, tokens, measure, lambda found: [f[1] for f in found]
                )
    for length, cut in material.windows.items():
        for arm in (BASE, *plan.arms):
            measure = functools.partial(_window_losses, language, cut)
            what = f"text, {length} tokens: {arm}"
            yield Piece(loss_key(length, arm), arm, what, length * len(cut), measure, _first)
    if material.questions:
        asked = material.questions
        say = functools.partial(_own_answers, language, asked)
        work = len(asked) * _TOKENS_TO_SAY
        yield Piece(_OWN_ANSWERS, BASE, _OWN_ANSWERS, work * _GENERATING, say, lambda found: ())
        for arm in (BASE, *plan.arms):
            measure = functools.partial(_chat_losses, language)
            yield Piece(loss_key(CHAT, arm), arm, f"{_OWN_ANSWERS}: {arm}", 2 * work, measure, _first)


def _first(found: list[Any]) -> list[float]:
    return [loss for loss, _ in found]


def _replies(language: LanguageModel, plan: Plan, task: Task, size: int) -> list[Reply]:
    return [encode(language.tokenizer, prompt) for prompt in task.prompts(size, plan.prompts, plan.seed)]


def _answers(language: LanguageModel, replies: Callable[[], list[Reply]], known: Answers) -> list[Any]:
    return [[int(found.right), found.nll] for found in judge(language.model, replies())]


def _window_losses(language: LanguageModel, cut: list[list[int]], known: Answers) -> list[Any]:
    found = []
    with torch.no_grad():
        for window in cut:
            said = len(window) - 1
            found.append([float(window_losses(language.model, [window])[0]) * said, said])
    return found


def _own_answers(language: LanguageModel, questions: Sequence[str], known: Answers) -> list[Any]:
    replies = own_answers(language.model, language.tokenizer, questions, _TOKENS_TO_SAY)
    return [[list(reply.ids), reply.start] for reply in replies]


def _chat_losses(language: LanguageModel, known: Answers) -> list[Any]:
    replies = [Reply(tuple(ids), start) for ids, start in known[_OWN_ANSWERS]]
    found: list[Judged] = judge(language.model, replies)
    return [[one.nll, one.tokens] for one in found]


CONTEXT = 2048
"""Tokens that are read before one more is said."""

ROUNDS = 5
_TOKENS_SAID = 24


def cost(
    model: PreTrainedModel,
    arms: Mapping[str, Policy],
    context: int,
    rounds: int = ROUNDS,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, dict[str, Any]]:
    """Milliseconds and MiB of every arm, and times as ratios to the model as it comes.

    Every round measures each arm once and ratios are taken within a round, so that noise of the machine hits all
    arms alike. Each arm has run once before the first round.
    """
    every: dict[str, Policy | None] = {BASE: None, **arms}
    ids = random_tokens(model, context)
    found: dict[str, list[dict[str, float | None]]] = {arm: [] for arm in every}
    for number in range(rounds + 1):
        for arm, policy in every.items():
            note(f"cost, round {number} of {rounds}: {arm}")
            with torch.no_grad(), under(model, policy):
                measured = _measured(model, ids)
            if number:
                found[arm].append(measured)
    return {arm: _summary(rows, found[BASE]) for arm, rows in found.items()}


def _measured(model: PreTrainedModel, ids: Tensor) -> dict[str, float | None]:
    reader = CachedReader(model)
    known = reset_peak(model.device)
    prefill = reader.read(ids)
    decode = median(reader.read(ids[:, place : place + 1]) for place in range(_TOKENS_SAID))
    return {"prefill_ms": prefill, "decode_ms": decode, "peak_mib": peak_mib(model.device) if known else None}


def _summary(rows: list[dict[str, Any]], base: list[dict[str, Any]]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for name in ("prefill_ms", "decode_ms", "peak_mib"):
        known = [row[name] for row in rows]
        summary[name] = None if None in known else median(known)
    for name in ("prefill", "decode"):
        pairs = zip(rows, base, strict=True)
        summary[f"{name}_ratio"] = median(row[f"{name}_ms"] / other[f"{name}_ms"] for row, other in pairs)
    return summary


Progress = Callable[[int, str], None]
"""Told how many tokens have been read since the last time, and what comes next."""

_COST = "cost"
_HARNESS = "harness/"


def work(language: LanguageModel, plan: Plan, material: Material) -> int:
    """Tokens to be read by `evaluate_tables`, about."""
    arms = 1 + len(plan.arms)
    reading = arms * (ROUNDS + 1) * _context(language)
    return sum(piece.tokens for piece in pieces(language, plan, material)) + reading


def evaluate_tables(
    language: LanguageModel,
    plan: Plan,
    material: Material,
    folder: Path,
    *,
    resume: bool = False,
    progress: Progress = lambda tokens, remark: None,
) -> dict[str, Any]:
    """Run every arm on the same prompts and the same text; what is known is in `folder`/answers.json at any moment."""
    answers = Answers.open(folder, material.identity, resume=resume)
    for piece in pieces(language, plan, material):
        progress(0, piece.what)
        if piece.key not in answers:
            _run(language, plan.arms.get(piece.arm), piece, answers)
        progress(piece.tokens, piece.what)
    if _COST not in answers:
        context = _context(language)
        found = cost(language.model, plan.arms, context, note=lambda text: progress(context, text))
        answers.add(_COST, {"context": context, "arms": found})
    if material.harness is not None:
        _run_harness(language, plan, material.harness, answers, progress)
    answers.finish()
    return _tables(language, plan, material, answers)


def _run_harness(language: LanguageModel, plan: Plan, harness: Harness, answers: Answers, progress: Progress) -> None:
    for arm in (BASE, *plan.arms):
        progress(0, f"harness: {arm}")
        if _HARNESS + arm not in answers:
            policy = plan.arms.get(arm)
            answers.add(_HARNESS + arm, harness.run(language, policy, limit=plan.prompts, seed=plan.seed))


def _context(language: LanguageModel) -> int:
    room = context_of(language.model)
    # Tokens said after the context need places of their own.
    return CONTEXT if room is None else min(CONTEXT, room // 2)


def _run(language: LanguageModel, policy: Policy | None, piece: Piece, answers: Answers) -> None:
    with under(language.model, policy, lambda text: answers.remark(piece.arm, text)):
        found = piece.measure(answers)
    if not all(math.isfinite(loss) for loss in piece.losses(found)):
        raise SharpmaxError(
            f"evaluate: {language.name} gives logits that are not numbers (NaN or infinite) in {piece.what!r}; "
            + ("choose another --dtype" if policy is None else "leave that policy out, or choose another --dtype")
        )
    answers.add(piece.key, found)


def _tables(language: LanguageModel, plan: Plan, material: Material, answers: Answers) -> dict[str, Any]:
    arms = (BASE, *plan.arms)
    tables: dict[str, Any] = {"setting": _setting(language, plan, material, answers)}
    for task in plan.tasks:
        right = {
            arm: {size: [found[0] for found in answers[answer_key(task, size, arm)]] for size in plan.sizes}
            for arm in arms
        }
        tables[f"accuracy/{task.name}"] = {
            arm: {str(size): statistics.accuracy(cells[size]) for size in plan.sizes} for arm, cells in right.items()
        }
        tables[f"paired/{task.name}"] = {
            arm: {str(size): statistics.paired(right[BASE][size], right[arm][size]) for size in plan.sizes}
            for arm in plan.arms
        }
    columns: list[int | str] = [*material.windows, *([CHAT] if material.questions else [])]
    if columns:
        tables["perplexity"] = {arm: {str(c): _perplexity(answers, c, arm) for c in columns} for arm in arms}
    tables["cost"] = answers[_COST]["arms"]
    if material.harness is not None:
        tables["harness"] = {arm: answers[_HARNESS + arm] for arm in arms}
    return tables


def _perplexity(answers: Answers, column: int | str, arm: str) -> dict[str, Any]:
    base, here = answers[loss_key(column, BASE)], answers[loss_key(column, arm)]
    change = {"rise": 0.0, "low": None, "high": None} if arm == BASE else statistics.rise(base, here)
    return {**statistics.perplexity(here), **change, "texts": len(here)}


def _setting(language: LanguageModel, plan: Plan, material: Material, answers: Answers) -> dict[str, Any]:
    layers, heads = shape_of(language.model)
    every: dict[str, Policy | None] = {BASE: None, **plan.arms}
    return {
        "model": material.identity["model"],
        "layers": layers,
        "heads": heads,
        "arms": {
            arm: {
                "describe": "no policy" if policy is None else policy.describe(),
                "policy": None if policy is None else policy.to_dict(),
                "touched": touched(policy, layers, heads),
                "calibrated_on": plan.calibrated_on.get(arm),
                "remarks": answers.remarks(arm),
            }
            for arm, policy in every.items()
        },
        "tasks": {task.name: {"version": task.version, "summary": task.summary} for task in plan.tasks},
        "sizes": list(plan.sizes),
        "prompts": plan.prompts,
        "text": None if material.text is None else dict(material.text),
        "windows": plan.windows,
        "questions": len(material.questions),
        "context": answers[_COST]["context"],
        "rounds": ROUNDS,
        "dtype": material.identity["dtype"],
        "device": material.identity["device"],
    }
