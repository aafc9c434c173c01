"""Run tasks on a Ray cluster, existing or local."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import sharpmax
from sharpmax.errors import SharpmaxError, reject
from sharpmax.experiments.engine import Job, Plugin, perform
from sharpmax.experiments.run_folder import Outcome
from sharpmax.lazy import require

_ALLOWED = "host:port of a running Ray cluster that this machine belongs to, or 'auto'"
_TODO = "start one with: ray start --head --port 6379"
_TIMEOUT_S = 30.0  # a busy head answers late
_OBJECT_STORE_BYTES = 80_000_000  # the rest goes to disk
_RETRIES = 2  # of a task whose node or process died
# Read by Ray when it is imported: no usage statistics, CUDA left alone for tasks without a GPU, no remarks about nodes
# and processes that die.
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}


@contextmanager
def connected(address: str | None, workers: int | None) -> Iterator[Cluster]:
    """The cluster at `address`, or one of this machine with `workers` processes, which ends with this block."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    ray: Any = require("ray", "ray", "the engine 'ray'")
    ours = not ray.is_initialized()
    if ours:
        _connect(ray, address, workers)
    cluster = Cluster(ray)
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
    """Check that something listens at the address; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        reject("--address", repr(address), _ALLOWED)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_TIMEOUT_S).close()
    except OSError as problem:
        reason = problem.strerror or str(problem) or type(problem).__name__
        reject("--address", f"{address!r}, where no cluster is ({reason})", _ALLOWED, _TODO)


class Cluster:
    """Each task is one of Ray's, which retries it when its node or process dies."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._work = ray.remote(max_retries=_RETRIES, num_cpus=1)(_portable())
        self._references: list[Any] = []

    def slots(self, job: Job) -> int:
        """The cores of the cluster, or its GPUs for a task that needs one."""
        resource = "GPU" if job.on_gpu else "CPU"
        count = int(self._ray.cluster_resources().get(resource, 0))
        if not count:
            raise SharpmaxError(
                f"--engine ray: no node of the cluster has a {resource}; add a node and continue with --resume: "
                "finished tasks are kept"
            )
        return count

    def submit(self, job: Job, blob: bytes | None, plugins: Sequence[Plugin]) -> Future[Outcome]:
        """Hand a task to Ray."""
        work = self._work.options(num_gpus=int(job.on_gpu), name=job.name)
        reference = work.remote(sharpmax.__version__, pickle.dumps((perform, job, blob, plugins)))
        self._references.append(reference)
        future: Future[Outcome] = reference.future()
        return future

    def close(self) -> None:
        """Stop what is running."""
        for reference in self._references:
            with suppress(Exception):
                self._ray.cancel(reference, force=True)


def _portable() -> Any:
    """A function that Ray ships by value, so that it can report a node where sharpmax cannot be imported."""

    def work(version: str, call: bytes) -> Any:
        import pickle
        import platform

        try:
            import sharpmax

            there = sharpmax.__version__
        except ImportError as missing:
            there = f"cannot be imported ({missing})"
        if there != version:
            node = f"node {platform.node()!r} has another sharpmax than the driver: {there}"
            raise ImportError(f"--engine ray: {node}; install sharpmax=={version} there")
        function, *arguments = pickle.loads(call)
        return function(*arguments)

    return work
