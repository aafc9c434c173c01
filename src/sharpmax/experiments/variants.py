"""Language models under a policy: how results describe them, and EleutherAI's evaluation harness."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharpmax.errors import ArgumentError, OutOfRangeWarning, reject
from sharpmax.lazy import require
from sharpmax.models.language import LanguageModel
from sharpmax.policies.base import Policy
from sharpmax.policies.per_head import PerHead

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextlib.contextmanager
def under(
    model: PreTrainedModel, policy: Policy | None, remark: Callable[[str], None] = lambda text: None
) -> Iterator[None]:
    """Apply a policy, or none. `remark` is called with warnings about rows outside the policy's fitted range."""
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
    """The number of heads that a policy modifies.

    >>> from sharpmax.policies import Constant
    >>> policies = Constant(1.5), PerHead.of(Constant, value=[[1.0, 2.0]]), None
    >>> [modified_heads(policy, 1, 2) for policy in policies]
    [2, 1, 0]
    """
    if policy is None or policy.is_identity:
        return 0
    return policy.modified_heads if isinstance(policy, PerHead) else layers * heads


def describe(policy: Policy | None, layers: int, heads: int) -> dict[str, Any]:
    """A variant's policy, as saved in results."""
    return {
        "describe": "no policy" if policy is None else policy.describe(),
        "policy": None if policy is None else policy.to_dict(),
        "modified": modified_heads(policy, layers, heads),
    }


_BATCH = 16  # requests per batch on a GPU


@dataclass(frozen=True)
class Harness:
    """Tasks of EleutherAI's Language Model Evaluation Harness."""

    tasks: tuple[str, ...]
    manager: Any

    @classmethod
    def ready(cls, tasks: Sequence[str], folder: Path | None) -> Harness:
        """Find the tasks in the harness and in `folder`."""
        if folder is not None and not folder.is_dir():
            reject("--lm-eval-path", repr(str(folder)), "a folder with task files (YAML) of the harness")
        names = tuple(tasks)
        with _quiet():
            managers = require("lm_eval.tasks", "lm-eval", "--lm-eval").TaskManager
            own: Any = None if folder is None else managers(include_path=str(folder), include_defaults=False)
            # The harness reads thousands of files to find its own tasks, so it does so only if they are needed.
            here = own is not None and all(own.match_tasks([name]) for name in names)
            manager = own if here else managers(include_path=None if folder is None else str(folder))
        for name in names:
            if not manager.match_tasks([name]):
                reject("--lm-eval", repr(name), "tasks of the harness", "list them with: lm-eval ls tasks")
        return cls(names, manager)

    def run(self, language: LanguageModel, policy: Policy | None, *, limit: int | None, seed: int) -> dict[str, Any]:
        """Run the tasks under a policy: mean and standard error by task and metric."""
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
            except Exception as problem:  # users' tasks may raise anything
                reason = " ".join(str(problem).split())[:300] or type(problem).__name__
                raise ArgumentError(f"--lm-eval: the harness cannot run {', '.join(self.tasks)} ({reason})") from None
        return {task: _metrics(values) for task, values in found["results"].items()}


def _metrics(values: Mapping[str, Any]) -> dict[str, Any]:
    """Pair each metric with its standard error: the harness returns "acc,none" and "acc_stderr,none"."""
    known = {key: value for key, value in values.items() if isinstance(value, (int, float)) and math.isfinite(value)}
    found = {}
    for key, value in known.items():
        metric, comma, filtered = key.partition(",")
        if comma and not metric.endswith("_stderr"):
            name = metric if filtered == "none" else f"{metric} ({filtered})"
            found[name] = {"mean": float(value), "sem": known.get(f"{metric}_stderr,{filtered}")}
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the harness, except for its progress bars at a terminal."""
    shown = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with shown:
            yield
    finally:
        logging.disable(before)
