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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharpmax.errors import ArgumentError, OutOfRangeWarning, reject
from sharpmax.files import display_name
from sharpmax.lazy import require
from sharpmax.models.language import LanguageModel, context_of, weights_fingerprint
from sharpmax.models.scoring import encode
from sharpmax.policies.base import Policy
from sharpmax.policies.per_head import PerHead
from sharpmax.tasks.prompt import Prompt, Task
from sharpmax.tasks.text import chat_questions, fingerprint, plain_text, text_from_file, windows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BASE = "as it comes"
"""The name, in results, of the variant without a policy, which every evaluation has."""

LENGTHS = (2048, 6144)
"""Default lengths of the windows of text in tokens, as far as the model's context allows."""


BY_LENGTH = "ruler/"
"""Tasks whose sizes may be numbers of tokens."""


@dataclass(frozen=True)
class Plan:
    """Variants, tasks, sizes and amounts; nothing in it depends on the machine."""

    variants: Mapping[str, Policy]
    tasks: tuple[Task, ...]
    sizes: tuple[int, ...]
    prompts: int
    seed: int = 0
    with_text: bool = True
    text: Path | None = None  # a file to read instead of the test part of the text that comes with Python
    lengths: tuple[int, ...] | None = None
    windows: int = 3
    questions: int = 8  # ordinary questions that the model answers itself
    harness: tuple[str, ...] = ()  # tasks of EleutherAI's harness to run as well
    harness_path: Path | None = None
    calibrated_on: Mapping[str, str | None] = field(default_factory=dict)  # the task of each variant's calibration

    def sizes_of(self, task: Task) -> tuple[int, ...]:
        """The sizes of one task; those of RULER are the lengths, if there are any."""
        return self.lengths if self.lengths is not None and self._by_length(task) else self.sizes

    def for_tokenizer(self, tokenizer: Any) -> Plan:
        """The plan with tasks whose sizes are numbers of tokens, where they are to be."""

        def tokens(prompt: Prompt) -> int:
            return len(encode(tokenizer, prompt).ids)

        tasks = (task.of_length(tokens) if self._by_length(task) else task for task in self.tasks)
        return replace(self, tasks=tuple(tasks))

    def _by_length(self, task: Task) -> bool:
        return bool(self.lengths) and task.name.startswith(BY_LENGTH)


@dataclass(frozen=True)
class Material:
    """The data of a plan: windows of text, questions, the harness, and the settings that identify the run."""

    windows: Mapping[int, list[list[int]]]
    questions: tuple[str, ...]
    text: Mapping[str, Any] | None
    harness: Harness | None
    identity: Mapping[str, Any]


def prepare(language: LanguageModel, plan: Plan) -> Material:
    """Check that every variant, size and length suits the model, and load the text."""
    for policy in plan.variants.values():
        with under(language.model, policy):
            pass  # refuses a policy made for another architecture
    context = context_of(language.model)
    for task in plan.tasks:
        _check_sizes(language, plan, task, context)
    source, cut = _text(language, plan, context) if plan.with_text else (None, {})
    questions = tuple(chat_questions("test")[: plan.questions]) if plan.with_text else ()
    harness = Harness.ready(plan.harness, plan.harness_path) if plan.harness else None
    identity = {
        "schema": 2,  # of what is measured
        "model": display_name(language.name),
        "weights": weights_fingerprint(language.model),
        "dtype": str(language.model.dtype).removeprefix("torch."),
        "device": language.model.device.type,
        "seed": plan.seed,
        "prompts": plan.prompts,
        "sizes": list(plan.sizes),
        "tasks": {task.name: task.version for task in plan.tasks},
        "arms": {name: policy.to_dict() for name, policy in plan.variants.items()},
        "text": source,
        "lengths": list(cut),
        "windows": plan.windows,
        "questions": plan.questions if plan.with_text else 0,
        "harness": list(plan.harness),
    }
    return Material(cut, questions, source, harness, identity)


def _check_sizes(language: LanguageModel, plan: Plan, task: Task, context: int | None) -> None:
    for size in plan.sizes_of(task):
        task.check_size(size)
        if context is None:
            continue
        tokens = len(encode(language.tokenizer, task.prompts(size, 1, plan.seed)[0]).ids)
        if tokens > context:
            given = f"{size} for the task {task.name!r}, a prompt of {tokens} tokens"
            allowed = f"prompts of up to {context} tokens, the context of {language.name}"
            reject("--sizes", given, allowed, "leave out the largest sizes")


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
    return source, {length: windows(ids, length, plan.windows) for length in lengths}


@contextlib.contextmanager
def under(
    model: PreTrainedModel, policy: Policy | None, remark: Callable[[str], None] = lambda text: None
) -> Iterator[None]:
    """The model under a policy, or without one; `remark` is called for rows outside a policy's fitted range."""
    from sharpmax.integrations.transformers.application import applied

    variant: AbstractContextManager[Any] = contextlib.nullcontext() if policy is None else applied(model, policy)
    with warnings.catch_warnings(record=True) as caught, variant:
        warnings.simplefilter("always", OutOfRangeWarning)
        yield
    for warning in caught:
        if issubclass(warning.category, OutOfRangeWarning):
            remark(str(warning.message))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def shape_of(model: PreTrainedModel) -> tuple[int, int]:
    """Layers, and heads per layer."""
    config = model.config.get_text_config()
    return int(config.num_hidden_layers), int(config.num_attention_heads)


def modified_heads(policy: Policy | None, layers: int, heads: int) -> int:
    """How many heads a policy modifies.

    >>> from sharpmax.policies import Constant
    >>> policies = Constant(1.5), PerHead.of(Constant, value=[[1.0, 2.0]]), None
    >>> [modified_heads(policy, 1, 2) for policy in policies]
    [2, 1, 0]
    """
    if policy is None or policy.is_identity:
        return 0
    return policy.modified_heads if isinstance(policy, PerHead) else layers * heads


def describe(policy: Policy | None, layers: int, heads: int) -> dict[str, Any]:
    """A variant's policy as results hold it."""
    return {
        "describe": "no policy" if policy is None else policy.describe(),
        "policy": None if policy is None else policy.to_dict(),
        "touched": modified_heads(policy, layers, heads),
    }


_BATCH = 16  # requests of the harness that a GPU reads at once


@dataclass(frozen=True)
class Harness:
    """Tasks of EleutherAI's Language Model Evaluation Harness, found and ready to run."""

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
        """Results of one variant by task and metric: mean and standard error."""
        lm_eval = require("lm_eval", "lm-eval", "--lm-eval")
        adapter = require("lm_eval.models.huggingface", "lm-eval", "--lm-eval").HFLM
        batch = 1 if language.model.device.type == "cpu" else _BATCH
        names = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
        with _quiet(), under(language.model, policy):
            model = adapter(pretrained=language.model, tokenizer=language.tokenizer, batch_size=batch)
            try:
                found = lm_eval.simple_evaluate(
                    model=model,
                    tasks=list(self.tasks),
                    task_manager=self.manager,
                    limit=limit,
                    log_samples=False,
                    **dict.fromkeys(names, seed),
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
    shown = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with shown:
            yield
    finally:
        logging.disable(before)
