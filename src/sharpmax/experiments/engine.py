"""Run many tasks in processes of this machine or on Ray, and keep every result as soon as it is there."""

from __future__ import annotations

import concurrent.futures
import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple, Protocol

import torch

from sharpmax import errors
from sharpmax.errors import FileFormatError, SharpmaxError, UnsupportedError, reject
from sharpmax.experiments.run_folder import Outcome, RunStore
from sharpmax.lazy import require

ENGINES = ("local", "ray")


@dataclass(frozen=True)
class Job:
    """A function call under a key that stays the same from run to run."""

    key: str
    function: str  # "package.module:function", imported where the task runs; it returns an Outcome
    arguments: Mapping[str, Any]  # plain JSON values; a `device` that begins with "cuda" asks for a GPU
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
        what = " ".join(str(problem).split())
        raise FileFormatError(
            f"--with: {plugin.path!r} cannot be run ({type(problem).__name__}{where}: {what})"
        ) from None
    return module


class JobCall(NamedTuple):
    """What travels to the process that runs a task."""

    function: str
    arguments: dict[str, Any]
    files: list[tuple[str, str]]  # plain tuples of plugins, which a node without sharpmax can unpickle too


class JobResult(NamedTuple):
    """What comes back: a result, or an error, whose `kind` is a class of `sharpmax.errors` or None for any other."""

    record: dict[str, Any] | None = None
    blob: bytes | None = None
    error: str = ""
    kind: str | None = None


@dataclass(frozen=True)
class Lost:
    """The process of a task died. Without `certain` it may have been that of another task."""

    reason: str
    certain: bool = True
    final: bool = False  # the engine itself has retried


class Engine(Protocol):
    """Where tasks run."""

    def slots(self, task: Job) -> int:
        """How many tasks can run at the same time, if this one is among them."""

    def start(self, task: Job, call: JobCall) -> None:
        """Start a task."""

    def wait(self) -> Sequence[tuple[Job, JobResult | Lost]]:
        """Wait for the next answers; none if nothing came for a while."""


def run(
    tasks: Sequence[Job],
    store: RunStore,
    *,
    engine: str = "local",
    workers: int | None = None,
    address: str | None = None,
    plugins: Sequence[Path] = (),
    retries: int = 2,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> None:
    """Run the tasks that are not in the store yet; each result is stored as soon as it is there.

    `workers` is the number of processes on this machine: by default its cores, and this process alone for tasks on a
    GPU. `address` is that of a Ray cluster; without one, Ray is started on this machine. `plugins` are Python files
    that are imported where tasks run, as `sharpmax_plugin_<name>`. A task that fails or whose process dies is retried
    `retries` times; a user's mistake (`SharpmaxError`) is raised at once.
    """
    if engine not in ENGINES:
        reject("--engine", repr(engine), f"one of {list(ENGINES)}")
    if workers is not None and workers < 1:
        reject("--workers", workers, "1 or more")
    if address is not None and engine != "ray":
        reject("--address", repr(address), "no address with the engine 'local'", "add --engine ray")
    if address is not None and workers is not None:
        reject("--workers", workers, "no number of processes with --address: a cluster knows its own")
    files = [(plugin.path, plugin.text) for plugin in read_plugins(plugins)]
    _check_order(tasks, store)
    with store.writing():
        missing = sum(task.key not in store for task in tasks)
        if not missing:
            progress(Progress(len(tasks), len(tasks)))
            return
        if engine == "ray":
            from sharpmax.experiments.ray_engine import connected

            opened: AbstractContextManager[Engine] = connected(address, workers, retries)
        else:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            count = min(missing, workers or (1 if any(task.on_gpu for task in tasks) else cores))
            opened = nullcontext(_ThisProcess()) if count == 1 else closing(_Processes(count))
        with opened as chosen:
            _drive(tasks, store, chosen, files, retries, progress)


def _drive(
    tasks: Sequence[Job],
    store: RunStore,
    engine: Engine,
    files: list[tuple[str, str]],
    retries: int,
    progress: Callable[[Progress], None],
) -> None:
    """Start what is ready, in the order given; store what comes back; retry what failed."""
    waiting = {task.key for task in tasks if task.key not in store}
    running: dict[str, Job] = {}
    failures: Counter[str] = Counter()
    suspects: set[str] = set()  # tasks that run alone, as one of them has killed a process

    def report() -> None:
        done = len(tasks) - len(waiting) - len(running)
        progress(Progress(done, len(tasks), tuple(task.name for task in running.values())))

    def startable() -> Job | None:
        ready = (task for task in tasks if task.key in waiting and (task.after is None or task.after in store))
        task = next(ready, None)
        if task is None:
            return None
        alone = task.key in suspects or not suspects.isdisjoint(running)
        return task if len(running) < (1 if alone else engine.slots(task)) else None

    report()
    while waiting or running:
        while (task := startable()) is not None:
            blob = {} if task.after is None else {"blob": store.blob(task.after)}
            engine.start(task, JobCall(task.function, {**task.arguments, **blob}, files))
            waiting.remove(task.key)
            running[task.key] = task
            report()
        for task, answer in engine.wait():
            del running[task.key]
            if isinstance(answer, Lost) or answer.record is None:
                failures[task.key] += 1
                _check_failure(task, answer, failures[task.key], retries)
                if isinstance(answer, Lost):
                    suspects.add(task.key)
                waiting.add(task.key)
                continue
            store.add(task.key, Outcome(answer.record, answer.blob))
            suspects.discard(task.key)
            report()


def _check_order(tasks: Sequence[Job], store: RunStore) -> None:
    """Refuse keys that are not unique, and a task that could never start."""
    known: set[str] = set()
    for task in tasks:
        if task.key in known:
            reject("tasks", f"two of the key {task.key!r}", "keys that are unique")
        if task.after is not None and not (task.after in known or task.after in store or task.key in store):
            reject("tasks", f"{task.key!r} after {task.after!r}", "predecessors among the tasks before it, or stored")
        known.add(task.key)


def _check_failure(task: Job, answer: JobResult | Lost, times: int, retries: int) -> None:
    """Raise unless the task is worth another try."""
    often = "once" if times == 1 else f"{times} times"
    if isinstance(answer, Lost):
        if not answer.final and (times <= retries or not answer.certain):
            return
        how = f"lost its process{'' if answer.final else f' {often}'} ({answer.reason})"
    else:
        if answer.kind is not None:
            # The constructors of some errors take other things than the text.
            kind: type[SharpmaxError] = getattr(errors, answer.kind, SharpmaxError)
            raise kind.__new__(kind, answer.error)
        if times <= retries:
            return
        how = f"failed {often}: {answer.error}"
    raise SharpmaxError(f"task {task.name!r} {how}; finished tasks are kept: continue with --resume")


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


def answer_to(call: JobCall) -> JobResult:
    """Run a task in this process: one thread per operation, no denormals, the user's files imported before."""
    try:
        with one_thread_each(), without_denormals():
            for file in call.files:
                load_plugin(Plugin(*file))
            module, _, name = call.function.partition(":")
            function = getattr(importlib.import_module(module), name)
            outcome = function(**call.arguments)
        if not isinstance(outcome, Outcome):
            raise UnsupportedError(f"{call.function} returned a {type(outcome).__name__}; allowed: an Outcome")
        try:
            record = json.loads(json.dumps(outcome.record, allow_nan=False))
        except (TypeError, ValueError) as problem:
            raise UnsupportedError(
                f"{call.function} returned a record that JSON cannot hold ({problem}); allowed: texts, finite "
                "numbers, lists, None"
            ) from None
        return JobResult(record, outcome.blob)
    except (Exception, SystemExit) as problem:
        text = " ".join(str(problem).split())
        if isinstance(problem, SharpmaxError):
            return JobResult(error=text, kind=type(problem).__name__)
        frames = traceback.extract_tb(problem.__traceback__)
        where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
        return JobResult(error=f"{type(problem).__name__}: {text[:500]}{where}")


class _ThisProcess:
    """Tasks one after the other in this process: one GPU is filled by stacked seeds."""

    def __init__(self) -> None:
        self._started: list[tuple[Job, JobCall]] = []

    def slots(self, task: Job) -> int:
        return 1

    def start(self, task: Job, call: JobCall) -> None:
        self._started = [(task, call)]

    def wait(self) -> Sequence[tuple[Job, JobResult | Lost]]:
        return [(task, answer_to(call)) for task, call in self._started]


_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class _Processes:
    """Tasks in worker processes by loky. When a worker dies, loky ends them all and a new pool is started."""

    def __init__(self, workers: int) -> None:
        self._loky: Any = require("joblib.externals.loky", "reproduce", "several processes")
        self._workers = workers
        self._pool: Any = None
        self._running: dict[Any, Job] = {}

    def slots(self, task: Job) -> int:
        return self._workers

    def start(self, task: Job, call: JobCall) -> None:
        with _interrupts_deferred():
            if self._pool is None:
                self._pool = self._loky.ProcessPoolExecutor(
                    self._workers, initializer=_start_worker, initargs=(os.getpid(),), env=_ONE_THREAD
                )
            self._running[self._pool.submit(answer_to, call)] = task

    def wait(self) -> Sequence[tuple[Job, JobResult | Lost]]:
        with warnings.catch_warnings():
            # loky replaces a worker whose memory has grown, and says so.
            warnings.filterwarnings("ignore", "A worker stopped", UserWarning)
            done, _ = concurrent.futures.wait(self._running, return_when=concurrent.futures.FIRST_COMPLETED)
        if not any(isinstance(future.exception(), self._loky.BrokenProcessPool) for future in done):
            return [(self._running.pop(future), future.result()) for future in done]
        everything, _ = concurrent.futures.wait(self._running)
        self.close()
        found: list[tuple[Job, JobResult | Lost]] = []
        lost = [future for future in everything if future.exception() is not None]
        for future in everything:
            task = self._running.pop(future)
            if future in lost:
                codes = str(future.exception()).rpartition("exit codes of the workers are {")[2].partition("}")[0]
                found.append((task, Lost(codes or "its process died", certain=len(lost) == 1)))
            else:
                found.append((task, future.result()))
        return found

    def close(self) -> None:
        """End every process, whatever it is doing."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, kill_workers=True)
            self._pool = None
            gc.collect()  # frees loky's semaphores now; at the exit of the interpreter their tracker may be gone


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Handle Ctrl-C after this block. Processes started in it ignore Ctrl-C until they are set up.

    In the middle of a start it would leave a process that `close` does not know.
    """
    if not hasattr(signal, "pthread_sigmask"):  # not a POSIX system
        yield
        return
    resource_tracker.ensure_running()  # some versions of Python unblock the signal when they start it
    received: list[tuple[int, FrameType | None]] = []
    # New processes inherit the mask. Other threads of this process do not have it: the handler is for those.
    handler = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread() and callable(handler)
    if in_main:
        signal.signal(signal.SIGINT, lambda number, frame: received.append((number, frame)))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if in_main:
            signal.signal(signal.SIGINT, handler)
            if received and callable(handler):
                handler(*received[0])


def _start_worker(driver: int) -> None:
    """Leave Ctrl-C, which reaches all processes of a terminal, to the driver; end when the driver ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def end_with_driver() -> None:
        while os.getppid() == driver:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=end_with_driver, daemon=True).start()
