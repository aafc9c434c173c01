"""The one loop behind every engine: hands out what can be done, keeps what comes, tries again what failed."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sharpmax.errors import SharpmaxError, reject
from sharpmax.experiments.engines.store import Store
from sharpmax.experiments.engines.task import Answer, Outcome, Progress, Task, error_of


@dataclass(frozen=True)
class Lost:
    """The process that a task was in died."""

    why: str
    final: bool = False
    """Whether the engine itself has tried again often enough."""


class Engine(Protocol):
    """Where tasks are done."""

    def slots(self, task: Task) -> int:
        """How many tasks can be at work now, if this one is among them."""

    def begin(self, task: Task) -> None:
        """Start a task whose predecessor is done."""

    def answers(self) -> Sequence[tuple[Task, Answer | Lost]]:
        """Wait for what comes next; none where nothing came for a while."""

    def forget(self, key: str) -> None:
        """Nobody needs the blob of this task any more."""


def drive(
    tasks: Sequence[Task], store: Store, engine: Engine, retries: int, progress: Callable[[Progress], None]
) -> None:
    """Do what is not in the store."""
    waiting = _Waiting(tasks, store)
    running: dict[str, Task] = {}
    failures: Counter[str] = Counter()

    done = sum(task.key in store for task in tasks)

    def tell() -> None:
        progress(Progress(done, len(tasks), tuple(task.shown for task in running.values())))

    tell()
    while waiting.ready or running:
        while waiting.ready and len(running) < engine.slots(waiting.first):
            task = waiting.next()
            engine.begin(task)
            running[task.key] = task
            tell()
        for task, answer in engine.answers():
            del running[task.key]
            if isinstance(answer, Lost) or "error" in answer[0]:
                failures[task.key] += 1
                _check_failure(task, answer, failures[task.key], retries)
                waiting.again(task)
                continue
            store.add(task.key, Outcome(answer[0]["record"], answer[1]))
            done += 1
            for key in waiting.done(task):
                engine.forget(key)
            tell()


def _check_failure(task: Task, answer: Answer | Lost, times: int, retries: int) -> None:
    """Raise if there is no point in trying again."""
    if not isinstance(answer, Lost) and answer[0]["kind"] is not None:
        raise error_of(answer[0]["kind"], answer[0]["error"])
    if times <= retries and not (isinstance(answer, Lost) and answer.final):
        return
    often = "once" if times == 1 else f"{times} times"
    how = f"lost its process ({answer.why})" if isinstance(answer, Lost) else f"failed {often}: {answer[0]['error']}"
    if isinstance(answer, Lost) and not answer.final:
        how = f"lost its process {often} ({answer.why})"
    raise SharpmaxError(f"task {task.shown!r} {how}; what was done before is kept: go on with --resume")


class _Waiting:
    """Tasks that are not done, those first that were given first."""

    def __init__(self, tasks: Sequence[Task], store: Store) -> None:
        self._place = {task.key: place for place, task in enumerate(tasks)}
        if len(self._place) != len(tasks):
            key, _ = Counter(task.key for task in tasks).most_common(1)[0]
            reject("tasks", f"two of the key {key!r}", "keys that are unique")
        self._tasks = tasks
        self._after: dict[str, list[Task]] = {}
        self.ready: list[int] = []
        for task in tasks:
            if task.key in store:
                continue
            if task.after is None or task.after in store:
                self.again(task)
            elif task.after not in self._place:
                reject("tasks", f"{task.key!r} after {task.after!r}", "predecessors among the tasks or in the store")
            if task.after is not None:
                self._after.setdefault(task.after, []).append(task)
        self._check_reached(store)

    def _check_reached(self, store: Store) -> None:
        reached = [self._tasks[place] for place in self.ready]
        for task in reached:
            reached += self._after.get(task.key, [])
        known = {task.key for task in reached}
        if left := [key for key in self._place if key not in store and key not in known]:
            reject("tasks", f"{left[0]!r} after itself, by way of others", "predecessors that can be done first")

    @property
    def first(self) -> Task:
        """The first of those that can be done now."""
        return self._tasks[self.ready[0]]

    def next(self) -> Task:
        """Take the first."""
        return self._tasks[heapq.heappop(self.ready)]

    def again(self, task: Task) -> None:
        """A task can be done now."""
        heapq.heappush(self.ready, self._place[task.key])

    def done(self, task: Task) -> list[str]:
        """Let begin what waited for a task; the keys of tasks whose blobs nobody waits for any more."""
        free = [] if self._after.get(task.key) else [task.key]
        for follower in self._after.get(task.key, []):
            self.again(follower)
        if task.after is not None:
            self._after[task.after].remove(task)
            if not self._after[task.after]:
                free.append(task.after)
        return free
