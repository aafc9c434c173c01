"""The cells of an evaluation, saved as they are computed so that a run can be resumed."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sharpmax.errors import ArgumentError, FileFormatError
from sharpmax.experiments.evaluate.plan import Material, Plan
from sharpmax.experiments.evaluate.variants import BASE
from sharpmax.experiments.run_folder import check_identity, plain
from sharpmax.files import parse_json, write_text
from sharpmax.models.scoring import Judged, Reply, encode, judge, own_answers, window_losses
from sharpmax.tasks.prompt import Task

if TYPE_CHECKING:
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
