"""Run many tasks in processes on this machine or on Ray, and store each result as soon as it is computed."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import platform
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

import sharpmax
from sharpmax.errors import FileFormatError, SharpmaxError, reject
from sharpmax.experiments.run_folder import Outcome, RunStore
from sharpmax.lazy import require
from sharpmax.provenance import usable_cores


@dataclass(frozen=True)
class Job:
    """A function call, with a key that stays the same from run to run."""

    key: str
    function: str  # "package.module:function", imported where the task runs; returns an Outcome
    arguments: Mapping[str, Any]  # a `device` that begins with "cuda" requests a GPU
    after: str | None = None  # key of the task whose blob is passed as keyword `blob`
    label: str = ""

    @property
    def name(self) -> str:
        """The label, or the key."""
        return self.label or self.key

    @property
    def on_gpu(self) -> bool:
        """Whether the task needs a GPU."""
        return str(self.arguments.get("device", "")).startswith("cuda")


Progress = Callable[[int, int, str], None]
"""Called with the number of finished tasks, of all tasks, and the names of two that are running."""


class Plugin(NamedTuple):
    """A user's Python file: its path, for messages, and its text, which is sent to where tasks run."""

    path: str
    text: str

    @property
    def module(self) -> str:
        """The name it is imported under everywhere.

        >>> Plugin("/home/me/mine.py", "").module
        'sharpmax_plugin_mine'
        """
        return f"sharpmax_plugin_{Path(self.path).stem}"


def read_plugins(paths: Sequence[Path]) -> list[Plugin]:
    """Read Python files."""
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
    """Import a plugin, once per process."""
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
        reason = " ".join(str(problem).split())
        raise FileFormatError(
            f"--with: {plugin.path!r} cannot be run ({type(problem).__name__}{where}: {reason})"
        ) from None
    return module


Call = tuple[Job, bytes | None, Sequence[Plugin]]
"""The arguments of `perform`."""

Performed = Generator[tuple[str, Outcome], None, None]
"""Keys and outcomes of tasks, in the order they end."""

Engine = tuple[int, Callable[[Iterable[Call]], Performed]]
"""How many tasks run at a time, and a function that performs calls."""


def run(
    tasks: Sequence[Job],
    store: RunStore,
    *,
    engine: str = "local",
    workers: int | None = None,
    address: str | None = None,
    plugins: Sequence[Path] = (),
    progress: Progress = lambda done, total, running: None,
) -> None:
    """Run the tasks that are not in the store yet, and store each result as soon as it is computed.

    Tasks that do not depend on others run first. `workers` is the number of processes on this machine; the default is
    one per core, or this process for tasks on a GPU. `address` is that of a Ray cluster; without one, Ray is started
    on this machine. `plugins` are Python files that are imported where tasks run, as `sharpmax_plugin_<name>`. The
    first task that fails ends the run; stored results are kept.
    """
    if address is not None and workers is not None:
        reject("--workers", workers, "no number of processes with --address: a cluster knows its own")
    files = read_plugins(plugins)
    with store.writing():
        missing = [task for task in tasks if task.key not in store]
        on_ray = engine == "ray" and missing
        opened = _on_ray(address, workers) if on_ray else nullcontext(_local(missing, workers))
        blob = functools.cache(store.blob)  # several tasks may need the same blob
        with opened as (slots, perform_all):
            for after in (False, True):
                waiting = {task.key: task for task in missing if (task.after is not None) == after}
                calls = (
                    (task, None if task.after is None else blob(task.after), files) for task in list(waiting.values())
                )

                def report(waiting: Mapping[str, Job] = waiting) -> None:
                    running = islice((task.name for task in waiting.values()), min(slots, 2))  # in order
                    progress(sum(task.key in store for task in tasks), len(tasks), ", ".join(running))

                report()
                with closing(perform_all(calls)) as performed, warnings.catch_warnings():
                    # loky warns when it replaces a worker whose memory has grown, joblib when it stops early.
                    warnings.filterwarnings("ignore", category=UserWarning, module="joblib")
                    try:
                        for key, outcome in performed:
                            store.add(key, outcome)
                            del waiting[key]
                            report()
                    except BrokenExecutor as problem:  # loky does not say which task's process died
                        raise failure(list(waiting.values())[:slots], problem) from problem


def failure(lost: Sequence[Job], problem: BaseException, where: str = "") -> SharpmaxError:
    """The one-line error of tasks that failed."""
    names = " or ".join(repr(job.name) for job in lost)
    reason = f"{type(problem).__name__}{where}: {' '.join(str(problem).split())[:500]}"
    return SharpmaxError(f"task {names} failed ({reason}); finished tasks are kept: continue with --resume")


@contextmanager
def one_thread_each() -> Iterator[int]:
    """Run operations on one thread each; yields the number of threads otherwise used.

    In small operations, threads wait for each other longer than they compute.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


@contextmanager
def without_denormals() -> Iterator[None]:
    """Flush denormal numbers to 0 in this thread, since they are many times slower on a CPU."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def perform(job: Job, blob: bytes | None, plugins: Sequence[Plugin]) -> tuple[str, Outcome]:
    """Run a task in this process: plugins imported, one thread per operation, no denormals."""
    try:
        with one_thread_each(), without_denormals():
            for plugin in plugins:
                load_plugin(plugin)
            module, _, name = job.function.partition(":")
            function = getattr(importlib.import_module(module), name)
            return job.key, function(**job.arguments, **({} if blob is None else {"blob": blob}))
    except SharpmaxError:
        raise
    except Exception as problem:
        frame = traceback.extract_tb(problem.__traceback__)[-1]
        raise failure([job], problem, f" in {Path(frame.filename).name}, line {frame.lineno}") from problem


def _local(missing: Sequence[Job], workers: int | None) -> Engine:
    """Processes on this machine. A single worker is this process; stacked seeds already fill one GPU."""
    on_gpu = any(task.on_gpu for task in missing)
    count = min(len(missing), workers or (1 if on_gpu else usable_cores()))
    if count <= 1:
        return 1, lambda calls: (perform(*call) for call in calls)
    joblib: Any = require("joblib", "reproduce", "several processes")

    def perform_all(calls: Iterable[Call]) -> Performed:
        with joblib.parallel_config(
            "loky", n_jobs=count, inner_max_num_threads=1, initializer=_end_with, initargs=(os.getpid(),)
        ):
            # Dispatch all at once, so that no process is idle while others are dispatched.
            pool = joblib.Parallel(return_as="generator_unordered", pre_dispatch="all", batch_size=1, max_nbytes=None)
            performed: Performed = pool(joblib.delayed(perform)(*call) for call in calls)
        return performed

    return count, perform_all


def _end_with(driver: int) -> None:
    """In a worker: leave Ctrl-C, which the terminal sends to every process, to the driver, and end when it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == driver:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


_ALLOWED = "host:port of a running Ray cluster that this machine belongs to, or 'auto'"
_TODO = "start one with: ray start --head --port 6379"
_TIMEOUT_S = 30.0  # a busy head node answers late
_OBJECT_STORE_BYTES = 80_000_000  # Ray spills the rest to disk
_RETRIES = 2  # of a task whose node or process died
# Ray reads these when it is imported: no usage statistics, no change to CUDA for tasks without a GPU, no messages about
# nodes and processes that die.
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}


@contextmanager
def _on_ray(address: str | None, workers: int | None) -> Iterator[Engine]:
    """The cluster at `address`, or one on this machine with `workers` processes, which ends with the block."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    ray: Any = require("ray", "ray", "the engine 'ray'")
    ours = not ray.is_initialized()
    if ours:
        _connect(ray, address, workers)
    try:
        yield int(ray.cluster_resources().get("CPU", 1)), lambda calls: _perform_all(ray, calls)
    finally:
        if ours:
            ray.shutdown()


def _connect(ray: Any, address: str | None, workers: int | None) -> None:
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    own = {"num_cpus": workers, "include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    if address is not None and address != "auto":
        host, _, port = address.removeprefix("ray://").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            reject("--address", repr(address), _ALLOWED)
        try:  # Ray itself would keep trying for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=_TIMEOUT_S).close()
        except OSError as problem:
            reject("--address", f"{address!r}, where no cluster is ({problem.strerror or problem})", _ALLOWED, _TODO)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside Ray
        try:
            ray.init(address=address or "local", **quiet, **({} if address else own))
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as problem:
            ray.shutdown()
            reason = " ".join(str(problem).split())[:300]
            if address is None:
                reject("--engine", f"ray, which cannot be started here ({reason})", "a machine that can run Ray")
            reject("--address", f"{address!r} ({reason})", _ALLOWED, _TODO)


def _perform_all(ray: Any, calls: Iterable[Call]) -> Performed:
    """Run each call as a Ray task, one per core. Ray retries it if its node or process dies."""
    work = ray.remote(max_retries=_RETRIES, num_cpus=1)(_perform_on_node)
    running: dict[Any, Job] = {}
    calls = iter(calls)
    try:
        while True:
            cores = int(ray.cluster_resources().get("CPU", 0))
            for call in islice(calls, max(0, cores - len(running))):
                job = call[0]
                if job.on_gpu and not ray.cluster_resources().get("GPU"):
                    raise SharpmaxError("--engine ray: no node of the cluster has a GPU; add a node, or --device cpu")
                one = work.options(num_gpus=int(job.on_gpu), name=job.name)
                running[one.remote(sharpmax.__version__, *call)] = job
            if not running:
                return
            (done, *_), _ = ray.wait(list(running), num_returns=1)
            job = running.pop(done)
            try:
                outcome = ray.get(done)
            except Exception as problem:
                cause = getattr(problem, "cause", problem)  # Ray wraps what a task raises
                raise (cause if isinstance(cause, SharpmaxError) else failure([job], cause)) from None
            yield outcome
    finally:
        for reference in running:
            with suppress(Exception):
                ray.cancel(reference, force=True)


def _perform_on_node(version: str, *call: Any) -> tuple[str, Outcome]:
    """`perform` on a cluster node; raises if its sharpmax is not the driver's `version`."""
    if version != sharpmax.__version__:
        there = f"node {platform.node()!r} has sharpmax {sharpmax.__version__}"
        raise SharpmaxError(f"--engine ray: {there}; install sharpmax=={version} there")
    return perform(*call)
