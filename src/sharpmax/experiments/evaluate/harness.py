"""EleutherAI's Language Model Evaluation Harness, run on every arm."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharpmax.errors import ArgumentError, reject
from sharpmax.experiments.evaluate.variants import under
from sharpmax.lazy import require
from sharpmax.policies.base import Policy

if TYPE_CHECKING:
    from sharpmax.models.language import LanguageModel

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
