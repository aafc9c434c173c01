"""The evaluation plan: variants, tasks, sizes and text, validated against the model."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharpmax.errors import ArgumentError, OutOfRangeWarning, reject
from sharpmax.files import display_name
from sharpmax.lazy import require
from sharpmax.models.language import LanguageModel, context_of, weights_fingerprint
from sharpmax.models.scoring import encode
from sharpmax.policies.base import Policy
from sharpmax.policies.per_head import PerHead
from sharpmax.tasks.chat import chat_questions
from sharpmax.tasks.prompt import Task
from sharpmax.tasks.text import fingerprint, plain_text, text_from_file, windows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sharpmax.models.language import LanguageModel

BASE = "as it comes"
"""The name of the arm without a policy, which every evaluation has."""


@contextlib.contextmanager
def under(
    model: PreTrainedModel, policy: Policy | None, remark: Callable[[str], None] = lambda text: None
) -> Iterator[None]:
    """The model under a policy, or as it comes for None; `remark` is told of rows outside a policy's fitted range."""
    from sharpmax.integrations.transformers.application import applied

    arm: AbstractContextManager[Any] = contextlib.nullcontext() if policy is None else applied(model, policy)
    with warnings.catch_warnings(record=True) as said, arm:
        warnings.simplefilter("always", OutOfRangeWarning)
        yield
    for warning in said:
        if issubclass(warning.category, OutOfRangeWarning):
            remark(str(warning.message))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def shape_of(model: PreTrainedModel) -> tuple[int, int]:
    """Layers, and heads per layer."""
    config = model.config.get_text_config()
    return int(config.num_hidden_layers), int(config.num_attention_heads)


def touched(policy: Policy | None, layers: int, heads: int) -> int:
    """How many heads a policy does not leave alone.

    >>> from sharpmax.policies import Constant
    >>> touched(Constant(1.5), 30, 9), touched(PerHead.of(Constant, value=[[1.0, 2.0]]), 1, 2), touched(None, 30, 9)
    (270, 1, 0)
    """
    if policy is None or policy.is_identity:
        return 0
    if isinstance(policy, PerHead):
        return policy.touched
    return layers * heads


_TOGETHER = 16
"""Requests that a GPU reads at once."""


@dataclass(frozen=True)
class Harness:
    """Tasks of the harness, found and ready to be run."""

    tasks: tuple[str, ...]
    manager: Any

    @classmethod
    def ready(cls, tasks: Sequence[str], folder: Path | None) -> Harness:
        """Find the tasks among the harness's own and those of `folder`."""
        if folder is not None and not folder.is_dir():
            reject("--lm-eval-path", repr(str(folder)), "a folder with task files (YAML) of the harness")
        names = tuple(name.strip() for name in tasks)
        with _quiet():
            managers = require("lm_eval.tasks", "lm-eval", "--lm-eval").TaskManager
            own: Any = None if folder is None else managers(include_path=str(folder), include_defaults=False)
            # The harness reads thousands of files to know its own tasks: only where they are needed.
            here = own is not None and all(own.match_tasks([name]) for name in names)
            manager = own if here else managers(include_path=None if folder is None else str(folder))
        for name in names:
            if not manager.match_tasks([name]):
                reject("--lm-eval", repr(name), "tasks of the harness", "list them with: lm-eval ls tasks")
        return cls(names, manager)

    def run(self, language: LanguageModel, policy: Policy | None, *, limit: int | None, seed: int) -> dict[str, Any]:
        """What the harness says of one arm: task, metric, mean and standard error."""
        lm_eval = require("lm_eval", "lm-eval", "--lm-eval")
        adapter = require("lm_eval.models.huggingface", "lm-eval", "--lm-eval").HFLM
        together = 1 if language.model.device.type == "cpu" else _TOGETHER
        with _quiet(), under(language.model, policy):
            model = adapter(pretrained=language.model, tokenizer=language.tokenizer, batch_size=together)
            try:
                found = lm_eval.simple_evaluate(
                    model=model,
                    tasks=list(self.tasks),
                    task_manager=self.manager,
                    limit=limit,
                    log_samples=False,
                    random_seed=seed,
                    numpy_random_seed=seed,
                    torch_random_seed=seed,
                    fewshot_random_seed=seed,
                )
            except Exception as problem:  # tasks are files of other people, which fail in ways of their own
                reason = " ".join(str(problem).split())[:300] or type(problem).__name__
                raise ArgumentError(f"--lm-eval: the harness cannot run {', '.join(self.tasks)} ({reason})") from None
        return {task: _metrics(values) for task, values in found["results"].items()}


def _metrics(values: Mapping[str, Any]) -> dict[str, Any]:
    """The harness writes "acc,none" and "acc_stderr,none" beside each other."""
    found = {}
    for key, value in values.items():
        metric, comma, filtered = key.partition(",")
        if not comma or metric.endswith("_stderr") or _finite(value) is None:
            continue
        error = values.get(f"{metric}_stderr,{filtered}")
        name = metric if filtered == "none" else f"{metric} ({filtered})"
        found[name] = {"mean": _finite(value), "sem": _finite(error)}
    return found


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The harness reports every step; in a pipe nobody asked for that, and at a terminal its bars are enough."""
    talkers = [logging.getLogger(name) for name in ("lm_eval", "datasets")]
    before = [talker.level for talker in talkers]
    shown = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
    for talker in talkers:
        talker.setLevel(logging.ERROR)
    try:
        with shown:
            yield
    finally:
        for talker, level in zip(talkers, before, strict=True):
            talker.setLevel(level)


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
