"""Run many tasks in processes of this machine or on Ray, and keep every result as soon as it is there."""

from __future__ import annotations

import concurrent.futures
import gc
import importlib
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch

from sharpmax.errors import FileFormatError, SharpmaxError, reject
from sharpmax.experiments.run_folder import Outcome, RunStore
from sharpmax.lazy import require

ENGINES = ("local", "ray")
_KEPT = "finished tasks are kept: continue with --resume"


@dataclass(frozen=True)
class Job:
    """A function call under a key that stays the same from run to run."""

    key: str
    function: str  # "package.module:function", imported where the task runs; it returns an Outcome
    arguments: Mapping[str, Any]  # a `device` that begins with "cuda" asks for a GPU
    after: str | None = None  # key of the task whose blob the function gets as keyword `blob`
    label: str = ""

    @property
    def name(self) -> str:
        """The label, or the key."""
        return self.label or self.key

    @property
    def on_gpu(self) -> bool:
        """Whether the task needs a GPU."""
        return str(self.arguments.get("device", "")).startswith("cuda")


@dataclass(frozen=True)
class Progress:
    """Tasks done, tasks in total, and the names of those that are running."""

    done: int
    total: int
    running: tuple[str, ...] = ()


class Plugin(NamedTuple):
    """A user's own Python file, which is sent as text to where tasks run: its path, for messages, and its text."""

    path: str
    text: str

    @property
    def module(self) -> str:
        """The name under which it is imported everywhere.

        >>> Plugin("/home/me/mine.py", "").module
        'sharpmax_plugin_mine'
        """
        return f"sharpmax_plugin_{Path(self.path).stem}"


def read_plugins(paths: Sequence[Path]) -> list[Plugin]:
    """The files as they are now."""
    found: dict[str, Plugin] = {}
    for path in map(Path, paths):
        try:
            plugin = Plugin(str(path.resolve()), path.read_text(encoding="utf-8-sig"))
        except OSError as problem:
            reject("--with", f"{str(path)!r} ({problem.strerror})", "the path of a Python file that you may read")
        except UnicodeDecodeError:
            raise FileFormatError(f"--with: {str(path)!r} is not text in UTF-8; give a Python file") from None
        if found.setdefault(plugin.module, plugin) != plugin:
            reject("--with", f"two files called {path.stem!r}", "files of different names", "rename one of them")
    return list(found.values())


def load_plugin(plugin: Plugin) -> ModuleType:
    """Import a plugin, unless this process has done so before."""
    before = sys.modules.get(plugin.module)
    if before is not None and getattr(before, "__plugin__", None) == plugin:
        return before
    module = sys.modules[plugin.module] = ModuleType(plugin.module)
    vars(module).update(__file__=plugin.path, __plugin__=plugin)
    try:
        exec(compile(plugin.text, plugin.path, "exec"), vars(module))
    except BaseException as problem:
        del sys.modules[plugin.module]
        if isinstance(problem, SharpmaxError) or not isinstance(problem, (Exception, SystemExit)):
            raise
        lines = [one.lineno for one in traceback.extract_tb(problem.__traceback__) if one.filename == plugin.path]
        where = f", line {lines[-1]}" if lines else ""
        raise FileFormatError(
            f"--with: {plugin.path!r} cannot be run ({type(problem).__name__}{where}: {_one_line(problem)})"
        ) from None
    return module


class Engine(Protocol):
    """Where tasks run."""

    def slots(self, job: Job) -> int:
        """How many tasks can run at the same time, if this one is among them."""

    def submit(self, job: Job, blob: bytes | None, plugins: Sequence[Plugin]) -> Future[Outcome]:
        """Start `perform` with these arguments."""


def run(
    tasks: Sequence[Job],
    store: RunStore,
    *,
    engine: str = "local",
    workers: int | None = None,
    address: str | None = None,
    plugins: Sequence[Path] = (),
    progress: Callable[[Progress], None] = lambda progress: None,
) -> None:
    """Run the tasks that are not in the store yet, in their order; each result is stored as soon as it is there.

    `workers` is the number of processes on this machine: by default its cores, and this process alone for tasks on a
    GPU. `address` is that of a Ray cluster; without one, Ray is started on this machine. `plugins` are Python files
    that are imported where tasks run, as `sharpmax_plugin_<name>`. The first task that fails ends the run; what the
    others have stored stays.
    """
    if engine not in ENGINES:
        reject("--engine", repr(engine), f"one of {list(ENGINES)}")
    if workers is not None and workers < 1:
        reject("--workers", workers, "1 or more")
    if address is not None and engine != "ray":
        reject("--address", repr(address), "no address with the engine 'local'", "add --engine ray")
    if address is not None and workers is not None:
        reject("--workers", workers, "no number of processes with --address: a cluster knows its own")
    files = read_plugins(plugins)
    with store.writing():
        missing = sum(task.key not in store for task in tasks)
        opened: AbstractContextManager[Engine]
        if engine == "ray" and missing:
            from sharpmax.experiments.ray_engine import connected

            opened = connected(address, workers)
        else:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            count = min(missing, workers or (1 if any(task.on_gpu for task in tasks) else cores))
            opened = nullcontext(_ThisProcess()) if count <= 1 else _processes(count)
        with opened as chosen:
            _drive(tasks, store, chosen, files, progress)


def _drive(
    tasks: Sequence[Job],
    store: RunStore,
    engine: Engine,
    plugins: Sequence[Plugin],
    progress: Callable[[Progress], None],
) -> None:
    """Start what is ready, and store what comes back."""
    waiting = [task for task in tasks if task.key not in store]
    running: dict[Future[Outcome], Job] = {}

    def report(*starting: Job) -> None:
        names = tuple(job.name for job in (*running.values(), *starting))
        progress(Progress(len(tasks) - len(waiting) - len(names), len(tasks), names))

    report()
    while True:
        ready = (job for job in waiting if job.after is None or job.after in store)
        job = next(ready, None)
        if job is not None and len(running) < engine.slots(job):
            waiting.remove(job)
            report(job)
            blob = None if job.after is None else store.blob(job.after)
            running[engine.submit(job, blob, plugins)] = job
            continue
        if not running:
            return
        with warnings.catch_warnings():
            # loky replaces a worker whose memory has grown, and says so.
            warnings.filterwarnings("ignore", "A worker stopped", UserWarning)
            done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
        for future in sorted(done, key=lambda one: one.exception() is not None):  # what is done is stored first
            outcome = _outcome(future, running)
            store.add(running.pop(future).key, outcome)
            report()


def _outcome(future: Future[Outcome], running: Mapping[Future[Outcome], Job]) -> Outcome:
    """What a task returned, or its error in one line."""
    try:
        return future.result()
    except Exception as problem:
        cause = getattr(problem, "cause", problem)  # Ray wraps what a task raises
        if isinstance(cause, SharpmaxError):
            raise cause from None
        # A process that dies takes all others with it, and loky does not say which it was.
        lost = running.values() if isinstance(problem, concurrent.futures.BrokenExecutor) else [running[future]]
        names = " or ".join(repr(job.name) for job in lost)
        raise SharpmaxError(
            f"task {names} failed ({type(cause).__name__}: {_one_line(cause)[:500]}); {_KEPT}"
        ) from problem


def _one_line(problem: BaseException) -> str:
    return " ".join(str(problem).split())


@contextmanager
def one_thread_each() -> Iterator[int]:
    """Let operations use one thread each; yields the number of threads there are.

    Threads that share a small operation wait for one another longer than they work.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


@contextmanager
def without_denormals() -> Iterator[None]:
    """Flush denormal numbers to 0 in this thread; they slow a CPU down many times."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def perform(job: Job, blob: bytes | None, plugins: Sequence[Plugin]) -> Outcome:
    """Run a task in this process: one thread per operation, no denormals, the user's files imported before."""
    try:
        with one_thread_each(), without_denormals():
            for plugin in plugins:
                load_plugin(plugin)
            module, _, name = job.function.partition(":")
            function = getattr(importlib.import_module(module), name)
            outcome: Outcome = function(**job.arguments, **({} if blob is None else {"blob": blob}))
            return outcome
    except SharpmaxError:
        raise
    except Exception as problem:
        frame = traceback.extract_tb(problem.__traceback__)[-1]
        where = f"{Path(frame.filename).name}, line {frame.lineno}"
        raise SharpmaxError(
            f"task {job.name!r} failed: {type(problem).__name__}: {_one_line(problem)[:500]} ({where}); {_KEPT}"
        ) from problem


class _ThisProcess:
    """Tasks one after the other in this process: one GPU is filled by stacked seeds."""

    def slots(self, job: Job) -> int:
        return 1

    def submit(self, job: Job, blob: bytes | None, plugins: Sequence[Plugin]) -> Future[Outcome]:
        try:
            future: Future[Outcome] = Future()
            future.set_result(perform(job, blob, plugins))
            return future
        except Exception as problem:
            return _failed(problem)


def _failed(problem: Exception) -> Future[Outcome]:
    future: Future[Outcome] = Future()
    future.set_exception(problem)
    return future


@dataclass
class _Processes:
    """Tasks in worker processes by loky."""

    workers: int
    pool: Any

    def slots(self, job: Job) -> int:
        return self.workers

    def submit(self, job: Job, blob: bytes | None, plugins: Sequence[Plugin]) -> Future[Outcome]:
        try:
            future: Future[Outcome] = self.pool.submit(perform, job, blob, plugins)
            return future
        except concurrent.futures.BrokenExecutor as problem:  # a process has died since the last answer
            return _failed(problem)


@contextmanager
def _processes(workers: int) -> Iterator[_Processes]:
    loky: Any = require("joblib.externals.loky", "reproduce", "several processes")
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    pool = loky.ProcessPoolExecutor(workers, initializer=_end_with, initargs=(os.getpid(),), env=threads)
    try:
        # Processes started in this moment ignore Ctrl-C, which reaches every process of a terminal: it is the driver's.
        in_main = threading.current_thread() is threading.main_thread()
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main else None
        pool.submit(int)  # starts them all
        if in_main:
            signal.signal(signal.SIGINT, handler)
        yield _Processes(workers, pool)
    finally:
        pool.shutdown(wait=True, kill_workers=True)
        gc.collect()  # frees loky's semaphores now; at the exit of the interpreter their tracker may be gone


def _end_with(driver: int) -> None:
    """End this worker when the driver has ended, however that was."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == driver:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
