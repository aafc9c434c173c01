"""From a plan to the tables of `sharpmax evaluate`."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharpmax.errors import SharpmaxError
from sharpmax.experiments import statistics
from sharpmax.experiments.evaluate.cells import CHAT, Answers, Piece, answer_key, loss_key, pieces
from sharpmax.experiments.evaluate.cost import CONTEXT, ROUNDS, cost
from sharpmax.experiments.evaluate.harness import Harness
from sharpmax.experiments.evaluate.plan import Material, Plan
from sharpmax.experiments.evaluate.variants import BASE, shape_of, touched, under
from sharpmax.models.language import context_of
from sharpmax.policies.base import Policy

if TYPE_CHECKING:
    from sharpmax.models.language import LanguageModel

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
