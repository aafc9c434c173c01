"""The pieces of work of an evaluation, each with the key its outcome is kept under."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sharpmax.experiments.evaluate.answers import Answers
from sharpmax.experiments.evaluate.arms import BASE
from sharpmax.experiments.evaluate.plan import Material, Plan
from sharpmax.models.scoring import Judged, Reply, encode, judge, own_answers, window_losses
from sharpmax.tasks.prompt import Task

if TYPE_CHECKING:
    from sharpmax.models.language import LanguageModel

__all__ = ["CHAT", "Piece", "answer_key", "loss_key", "pieces"]

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
