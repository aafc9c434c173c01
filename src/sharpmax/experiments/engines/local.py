"""Tasks in processes of this machine, or one after the other in this one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from sharpmax.experiments.engines.driver import Lost
from sharpmax.experiments.engines.plugins import Plugin
from sharpmax.experiments.engines.store import Store
from sharpmax.experiments.engines.task import Answer, Task, answer

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_PATIENCE_S = 5.0


class _Local:
    """What both have in common: blobs come from the store."""

    def __init__(self, store: Store, plugins: Sequence[Plugin]) -> None:
        self._store = store
        self._files = [(plugin.path, plugin.text) for plugin in plugins]

    def _message(self, task: Task) -> tuple[Any, ...]:
        blob = None if task.after is None else self._store.blob(task.after)
        return (task.function, dict(task.arguments), task.after is not None), self._files, blob

    def forget(self, key: str) -> None:
        """Nothing is kept but in the store."""


class Here(_Local):
    """Tasks one after the other in this process: the way of one GPU, which stacked seeds fill."""

    _begun: tuple[Task, ...] = ()

    def slots(self, task: Task) -> int:
        """One at a time."""
        return 1

    def begin(self, task: Task) -> None:
        """It is done when its answer is asked for."""
        self._begun = (task,)

    def answers(self) -> Sequence[tuple[Task, Answer | Lost]]:
        """Do the task that was begun."""
        return [(task, answer(*self._message(task))) for task in self._begun]


@dataclass(eq=False)
class _Worker:
    process: BaseProcess
    pipe: connection.Connection
    task: Task | None = None


class Processes(_Local):
    """Tasks side by side, each in a process of its own that does others after it; a process that dies is replaced."""

    def __init__(self, store: Store, plugins: Sequence[Plugin], workers: int) -> None:
        super().__init__(store, plugins)
        self._count = workers
        self._workers: list[_Worker] = []
        try:
            for _ in range(workers):  # all at once: each takes its time to start
                self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> _Worker:
        with _interrupts_wait():  # so that no process starts that `close` does not know
            worker = _new()
            self._workers.append(worker)
        return worker

    def slots(self, task: Task) -> int:
        """As many as there may be processes."""
        return self._count

    def begin(self, task: Task) -> None:
        """Give a task to a process that is idle, or to a new one."""
        worker = next((one for one in self._workers if one.task is None), None)
        if worker is None:
            worker = self._start()
        worker.task = task
        with suppress(OSError):  # it has died: its pipe says so when answers are waited for
            worker.pipe.send(self._message(task))

    def answers(self) -> Sequence[tuple[Task, Answer | Lost]]:
        """Wait until a process has an answer, or dies."""
        busy = {worker.pipe: (worker, worker.task) for worker in self._workers if worker.task is not None}
        found: list[tuple[Task, Answer | Lost]] = []
        for pipe in connection.wait(list(busy)):
            worker, task = busy[pipe]  # type: ignore[index]
            worker.task = None
            try:
                found.append((task, worker.pipe.recv()))
            except (EOFError, OSError):
                found.append((task, Lost(self._end(worker))))
        return found

    def _end(self, worker: _Worker) -> str:
        """Let go of a process that has closed its pipe; says how it ended."""
        self._workers.remove(worker)
        worker.pipe.close()
        worker.process.join(_PATIENCE_S)
        if worker.process.exitcode is None:  # it lives on without a pipe, of no use to anybody
            worker.process.kill()
            worker.process.join()
        code = worker.process.exitcode
        if code is not None and code < 0:
            with suppress(ValueError):
                return f"killed by {signal.Signals(-code).name}"
        return f"exit status {code}"

    def close(self) -> None:
        """End every process, whatever it is at."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join(_PATIENCE_S)
            worker.pipe.close()
        self._workers.clear()


def _new() -> _Worker:
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs,), daemon=True, name="sharpmax worker")
    with _one_thread():
        process.start()
    theirs.close()
    return _Worker(process, mine)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Processes that start now take one thread an operation; libraries read this once, when they are imported."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Interrupts come after this; processes that start meanwhile get none before they have said that they ignore them.

    One in the middle of a start would leave half a process behind, and one that imports would tell where it was.
    """
    if not hasattr(signal, "pthread_sigmask"):  # not a POSIX system
        yield
        return
    resource_tracker.ensure_running()  # which some versions of Python start with a mask of their own, and then unblock
    came: list[tuple[int, FrameType | None]] = []
    # The mask is what a new process inherits. Other threads of this one do not have it: the handler is for those.
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT)
    if main and callable(handler):
        signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if main and callable(handler):
            signal.signal(signal.SIGINT, handler)
            if came:
                handler(*came[0])


def _serve(pipe: connection.Connection) -> None:
    """The life of a process: do what comes through the pipe until that is closed."""
    # Ctrl-C reaches all processes of a terminal; the first one decides. Until here it was blocked.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    with suppress(EOFError, OSError):
        while True:
            call, files, blob = pipe.recv()
            pipe.send(answer(call, files, blob))


def _end_with(parent: BaseProcess) -> None:
    """A task whose driver was killed would be done for nobody."""
    connection.wait([parent.sentinel])
    os._exit(1)
