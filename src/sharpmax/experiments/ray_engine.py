"""Run tasks on a Ray cluster, existing or local."""

from __future__ import annotations

import logging
import os
import socket
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import sharpmax
from sharpmax.errors import SharpmaxError, reject
from sharpmax.experiments.engine import Job, JobCall, JobResult, Lost
from sharpmax.lazy import require

_ALLOWED = "host:port of a running Ray cluster that this machine belongs to, or 'auto'"
_TODO = "start one with: ray start --head --port 6379"
_TIMEOUT_S = 30.0  # a busy head answers late
_OBJECT_STORE_BYTES = 80_000_000  # the rest goes to disk
# The opening of an HTTP/2 client, which Ray speaks; the server answers with a SETTINGS frame.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_SETTINGS = 4
# Read by Ray when it is imported: no usage statistics, CUDA left alone for tasks without a GPU, no remarks about nodes
# and processes that die.
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}
_POLL_S = 0.5
_NODE_TIMEOUT_S = 60.0


@contextmanager
def connected(address: str | None, workers: int | None, retries: int) -> Iterator[Cluster]:
    """The cluster at `address`, or one of this machine with `workers` processes, which ends with this block."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    ray: Any = require("ray", "ray", "the engine 'ray'")
    ours = not ray.is_initialized()
    if ours:
        _connect(ray, address, workers)
    cluster = Cluster(ray, retries)
    try:
        yield cluster
    finally:
        cluster.close()
        if ours:
            ray.shutdown()


def _connect(ray: Any, address: str | None, workers: int | None) -> None:
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    own = {"num_cpus": workers, "include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    if address is not None and address != "auto":
        _check_address(address)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # announcements of future changes in Ray
        try:
            ray.init(address=address or "local", **quiet, **({} if address else own))
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as problem:
            ray.shutdown()
            reason = " ".join(str(problem).split())[:300]
            if address is None:
                reject("--engine", f"ray, which cannot be started here ({reason})", "a machine that can run Ray")
            reject("--address", f"{address!r} ({reason})", _ALLOWED, _TODO)


def _check_address(address: str) -> None:
    """Check that Ray answers at the address; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        reject("--address", repr(address), _ALLOWED)
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_TIMEOUT_S) as line:
            line.settimeout(_TIMEOUT_S)
            line.sendall(_HELLO)
            reply = line.recv(9)
    except OSError as problem:
        reason = problem.strerror or str(problem) or type(problem).__name__
        reject("--address", f"{address!r}, where no cluster is ({reason})", _ALLOWED, _TODO)
    if len(reply) < 4 or reply[3] != _SETTINGS:
        reject("--address", f"{address!r}, where something else than Ray is", _ALLOWED, _TODO)


class Cluster:
    """Each task is one of Ray's, which retries it when its node or process dies."""

    def __init__(self, ray: Any, retries: int) -> None:
        self._ray = ray
        self._work = ray.remote(max_retries=retries, num_cpus=1)(_portable())
        self._running: dict[Any, Job] = {}
        self._none_since: dict[str, float] = {}

    def slots(self, task: Job) -> int:
        """The cores of the cluster, or its GPUs for a task that needs one."""
        resource = "GPU" if task.on_gpu else "CPU"
        count = int(self._ray.cluster_resources().get(resource, 0))
        if count:
            self._none_since.pop(resource, None)
            return count
        now = time.monotonic()
        if now - self._none_since.setdefault(resource, now) >= _NODE_TIMEOUT_S:
            raise SharpmaxError(
                f"--engine ray: for {_NODE_TIMEOUT_S:.0f} s no node of the cluster has had a {resource}; add a "
                "node and continue with --resume: finished tasks are kept"
            )
        return 0

    def start(self, task: Job, call: JobCall) -> None:
        """Hand a task to Ray."""
        work = self._work.options(num_gpus=int(task.on_gpu), name=task.name)
        # A plain tuple, which a node without sharpmax can unpickle too.
        self._running[work.remote(sharpmax.__version__, tuple(call))] = task

    def wait(self) -> Sequence[tuple[Job, JobResult | Lost]]:
        """Wait for answers, and from time to time for none, as nodes may have come or gone."""
        if not self._running:
            time.sleep(_POLL_S)
            return []
        ready, waiting = self._ray.wait(list(self._running), timeout=_POLL_S)
        if not ready:
            self.slots(self._running[waiting[0]])
        return [(self._running.pop(reference), self._answer(reference)) for reference in ready]

    def _answer(self, reference: Any) -> JobResult | Lost:
        try:
            return JobResult(*self._ray.get(reference))
        except self._ray.exceptions.RayError as problem:
            reason = " ".join(str(problem).split())[:200]
            return Lost(f"{type(problem).__name__}: {reason}", final=True)

    def close(self) -> None:
        """Stop what is running."""
        for reference in self._running:
            with suppress(Exception):
                self._ray.cancel(reference, force=True)
        self._running.clear()


def _portable() -> Any:
    """A function that Ray ships by value, so that it can report a node where sharpmax cannot be imported."""

    def work(version: str, call: Any) -> Any:
        import platform

        problem = ""
        try:
            import sharpmax

            if sharpmax.__version__ != version:
                problem = f"has sharpmax {sharpmax.__version__} and the driver {version}"
        except ImportError as missing:
            problem = f"cannot import sharpmax ({missing})"
        if problem:
            text = f"--engine ray: node {platform.node()!r} {problem}; install sharpmax=={version} there"
            return None, None, text, "UnsupportedError"
        from sharpmax.experiments.engine import JobCall, answer_to

        return tuple(answer_to(JobCall(*call)))

    return work
