"""How good a monitor is: false alarms on fresh prompts, wrong answers told from right ones, and what it costs.

Three lots of prompts, of other seeds each: the monitor learns from the reference, of small sizes alone; the rule that
sums up a row is chosen on the validation prompts; and what is reported is measured on the evaluation prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from sharpmax.errors import reject
from sharpmax.experiments.evaluate.statistics import accuracy
from sharpmax.experiments.monitor_cost import CONTEXT, ROUNDS, check_cost, monitor_cost
from sharpmax.experiments.monitor_quality import ALL, POOLED, SIGNALS, Cells, alarms_of, auroc_of, aurocs, by_size
from sharpmax.experiments.monitor_signals import Answered, answered, replies_of
from sharpmax.models.language import context_of
from sharpmax.models.scoring import Reply, batches
from sharpmax.probe.watch.judging import Learned
from sharpmax.probe.watch.learning import Reference, learned, read, tokens_at_once
from sharpmax.probe.watch.lookout import heads_of
from sharpmax.probe.watch.monitor import Monitor
from sharpmax.probe.watch.scores import DEFAULT, RULES
from sharpmax.probe.watch.thresholds import LEAST_LEARNED, check_rate, least_examples
from sharpmax.provenance import check_seed, shown
from sharpmax.tasks.prompt import Task
from sharpmax.tasks.registry import get_task

if TYPE_CHECKING:
    from sharpmax.models.language import LanguageModel

__all__ = ["COURSES", "Course", "monitor_tables"]

_SEEDS = {"reference": 1000, "validation": 2000, "evaluation": 3000}
_SAMPLE, _SLACK = 4, 1.1
_MARGIN = 1.0
"""Points that the false-alarm rate may be off."""


@dataclass(frozen=True)
class Course:
    """A task, its sizes, and up to which of them the monitor learns."""

    task: Task
    sizes: tuple[int, ...]
    known: int

    def reference(self) -> list[int]:
        """The sizes that are learned from."""
        return [size for size in self.sizes if size <= self.known]


COURSES = (
    Course(get_task("kv"), (8, 16, 32, 64, 128, 256, 512), 32),
    Course(get_task("max"), (8, 16, 32, 64, 128), 16),
    Course(get_task("needle"), (8, 16, 32, 64), 16),
)


def monitor_tables(
    language: LanguageModel,
    courses: Sequence[Course] = COURSES,
    *,
    limit: int = 100,
    false_alarms: float = 0.01,
    seed: int = 0,
    context: int = CONTEXT,
    rounds: int = ROUNDS,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """All tables; `limit` is the number of evaluation prompts of each size, and `note` is told what is being done.

    There are half as many for validation, and twice as many of the small sizes to learn from and to count false alarms.
    """
    check_seed(seed)
    check_rate(false_alarms)
    check_cost(context, rounds)
    courses = _readable(language, courses)
    cells = sum(len(course.reference()) for course in courses)
    needed = -(-(least_examples(false_alarms) + LEAST_LEARNED) // (2 * cells))
    if limit < max(2, needed):
        reject("limit", limit, f"{max(2, needed)} or more for a false-alarm rate of {false_alarms:g}")
    bench = _Bench(language, tuple(courses), seed, note)
    typical = Answered.together(list(bench.cells("reference", 2 * limit, known=True).values()))
    reference = typical.as_reference(heads_of(language.model))
    rule, validation = bench.choose(reference, limit // 2, false_alarms)
    found = learned(reference, false_alarms, rule)
    fresh = bench.cells("evaluation", limit)
    return {
        "setting": bench.setting(limit, false_alarms, rule),
        "validation": validation,
        "false_alarms": bench.false_alarms(found, 2 * limit, false_alarms),
        **{f"accuracy/{task}": by_size(fresh, task, lambda one: one.right) for task in bench.tasks},
        **{f"alarms/{task}": by_size(fresh, task, lambda one: alarms_of(found, one)) for task in bench.tasks},
        **{f"auroc/{task}": aurocs(fresh, task, found, typical, seed) for task in (*bench.tasks, ALL)},
        "overhead": monitor_cost(language.model, found, context=context, rounds=rounds, note=note),
    }


def _readable(language: LanguageModel, courses: Sequence[Course]) -> list[Course]:
    """The courses with the sizes that the model is made for; an error if nothing is left to learn from."""
    room = context_of(language.model)

    def fits(course: Course, size: int) -> bool:
        longest = max(len(reply.ids) for reply in replies_of(language, course.task, size, _SAMPLE, _SEEDS["reference"]))
        return room is None or longest * _SLACK <= room

    found = [replace(course, sizes=tuple(size for size in course.sizes if fits(course, size))) for course in courses]
    found = [course for course in found if course.reference()]
    if not found:
        reject("model", f"{language.name}, made for {room} tokens", "a model that can read the smallest prompts")
    return found


@dataclass(frozen=True, eq=False)
class _Bench:
    """The model, the courses, and where prompts come from."""

    language: LanguageModel
    courses: tuple[Course, ...]
    seed: int
    note: Callable[[str], None]

    @property
    def tasks(self) -> list[str]:
        return [course.task.name for course in self.courses]

    def replies(self, part: str, course: Course, size: int, count: int) -> list[Reply]:
        """Prompts of one size, of seeds that no other part has."""
        self.note(f"{part}: {course.task.name}, size {size}")
        return replies_of(self.language, course.task, size, count, _SEEDS[part] + self.seed)

    def cells(self, part: str, count: int, *, known: bool = False) -> Cells:
        """Every task and size (those to learn from alone), answered."""
        found = {}
        for course in self.courses:
            for size in course.reference() if known else course.sizes:
                replies = self.replies(part, course, size, count)
                found[course.task.name, size] = answered(self.language.model, replies)
        return found

    def choose(self, reference: Reference, count: int, rate: float) -> tuple[str, dict[str, Any]]:
        """The rule that tells wrong from right best over all validation prompts, and how each does."""
        cells = self.cells("validation", count)
        table: dict[str, Any] = {}
        for rule in RULES:
            made = learned(reference, rate, rule)
            table[rule] = {task: auroc_of(cells, task, made, self.seed) for task in (*self.tasks, ALL)}
        told = {rule: table[rule][ALL]["auroc"] for rule in RULES}
        best = DEFAULT if None in told.values() else max(RULES, key=lambda rule: told[rule])
        return best, table

    def false_alarms(self, known: Learned, count: int, rate: float) -> dict[str, Any]:
        """Alarms on fresh prompts like those of the reference, as a service would meet them."""
        model = self.language.model
        found: dict[str, list[int]] = {}
        with Monitor(model, known, false_alarms=rate, every=1, generated=0) as monitor, torch.no_grad():
            for course in self.courses:
                for size in course.reference():
                    replies = self.replies("evaluation", course, size, count)
                    alarms = found.setdefault(f"{course.task.name}/{size}", [])
                    prompts = [Reply(one.ids[: one.start], one.start) for one in replies]
                    for batch in batches(prompts, tokens_at_once(model)):
                        with monitor.request() as request:
                            read(model, [prompts[place].ids for place in batch])
                        alarms += [int(one.alarm) for one in request.report.sequences]
        pooled = accuracy([one for alarms in found.values() for one in alarms])
        off = abs(pooled["mean"] - 100.0 * rate)
        return {
            "asked": 100.0 * rate,
            POOLED: pooled | {"off": off, "targets": {"off": {"at_most": _MARGIN, "reached": off <= _MARGIN}}},
            **{cell: accuracy(alarms) for cell, alarms in found.items()},
        }

    def setting(self, limit: int, rate: float, rule: str) -> dict[str, Any]:
        model, name = self.language.model, self.language.name
        return {
            "model": shown(name),
            "tasks": {course.task.name: course.task.version for course in self.courses},
            "sizes": {course.task.name: list(course.sizes) for course in self.courses},
            "reference": {course.task.name: course.reference() for course in self.courses},
            "prompts": limit,
            "false_alarms": rate,
            "rule": rule,
            "rules": {name: one.what for name, one in RULES.items()},
            "signals": dict(SIGNALS),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": model.device.type,
            "seed": self.seed,
        }
