"""The evaluation plan: tasks, sizes and text, validated against the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sharpmax.errors import reject
from sharpmax.experiments.evaluate.harness import Harness
from sharpmax.experiments.evaluate.variants import under
from sharpmax.files import display_name
from sharpmax.models.language import LanguageModel, context_of, weights_fingerprint
from sharpmax.models.scoring import encode
from sharpmax.policies.base import Policy
from sharpmax.tasks.chat import chat_questions
from sharpmax.tasks.prompt import Task
from sharpmax.tasks.text import fingerprint, plain_text, text_from_file, windows

LENGTHS = (2048, 6144)
"""Lengths of the windows of text, in tokens, unless others are asked for or the model is made for less."""


@dataclass(frozen=True)
class Plan:
    """Arms, tasks, sizes and amounts; nothing in it depends on the machine."""

    arms: Mapping[str, Policy]
    tasks: tuple[Task, ...]
    sizes: tuple[int, ...]
    prompts: int
    seed: int = 0
    with_text: bool = True
    text: Path | None = None
    """A file to read instead of the test part of the text that comes with Python."""

    lengths: tuple[int, ...] | None = None
    windows: int = 3
    questions: int = 8
    """How many ordinary questions the model is asked for answers of its own."""

    harness: tuple[str, ...] = ()
    """Tasks of EleutherAI's harness to run as well."""

    harness_path: Path | None = None
    calibrated_on: Mapping[str, str | None] = field(default_factory=dict)
    """The task that each arm's policy was calibrated on, where that is known."""


@dataclass(frozen=True)
class Material:
    """Everything a plan needs, made ready: windows of text, questions, the harness, and what run this is."""

    windows: Mapping[int, list[list[int]]]
    questions: tuple[str, ...]
    text: Mapping[str, Any] | None
    harness: Harness | None
    identity: Mapping[str, Any]


def prepare(language: LanguageModel, plan: Plan) -> Material:
    """Check that every arm, size and length suits the model, and make the text ready."""
    for policy in plan.arms.values():
        with under(language.model, policy):
            pass  # refuses a policy made for another architecture
    room = context_of(language.model)
    for task in plan.tasks:
        _check_sizes(language, plan, task, room)
    source, cut = _text(language, plan, room) if plan.with_text else (None, {})
    questions = tuple(chat_questions("test")[: plan.questions]) if plan.with_text else ()
    harness = Harness.ready(plan.harness, plan.harness_path) if plan.harness else None
    return Material(cut, questions, source, harness, _identity(language, plan, source, cut))


def _check_sizes(language: LanguageModel, plan: Plan, task: Task, room: int | None) -> None:
    for size in plan.sizes:
        task.check_size(size)
    if room is None:
        return
    for size in plan.sizes:
        tokens = len(encode(language.tokenizer, task.prompts(size, 1, plan.seed)[0]).ids)
        if tokens > room:
            reject(
                "--sizes",
                f"{size} for the task {task.name!r}, a prompt of {tokens} tokens",
                f"prompts of up to {room} tokens, what {language.name} is made for",
                "leave out the largest sizes",
            )


def _text(language: LanguageModel, plan: Plan, room: int | None) -> tuple[dict[str, Any], dict[int, list[list[int]]]]:
    lengths = plan.lengths
    if lengths is None:
        lengths = tuple(n for n in LENGTHS if room is None or n <= room) or (room or min(LENGTHS),)
    for length in lengths:
        if room is not None and length > room:
            reject("--lengths", length, f"up to {room} tokens, what {language.name} is made for")
    text = plain_text("test") if plan.text is None else text_from_file(plan.text)
    ids = language.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    source = {
        "source": "Python's own documentation, test part" if plan.text is None else plan.text.name,
        "fingerprint": fingerprint(text),
        "tokens": len(ids),
    }
    return source, {length: windows(ids, length, plan.windows) for length in lengths}


def _identity(
    language: LanguageModel, plan: Plan, text: Mapping[str, Any] | None, cut: Mapping[int, Any]
) -> dict[str, Any]:
    return {
        "model": display_name(language.name),
        "weights": weights_fingerprint(language.model),
        "dtype": str(language.model.dtype).removeprefix("torch."),
        "device": language.model.device.type,
        "seed": plan.seed,
        "prompts": plan.prompts,
        "sizes": list(plan.sizes),
        "tasks": {task.name: task.version for task in plan.tasks},
        "arms": {arm: policy.to_dict() for arm, policy in plan.arms.items()},
        "text": dict(text) if text else None,
        "lengths": list(cut),
        "windows": plan.windows,
        "questions": plan.questions if plan.with_text else 0,
        "harness": list(plan.harness),
    }
