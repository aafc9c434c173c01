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
from sharpmax.experiments.engines.driver import Lost
from sharpmax.experiments.engines.plugins import Plugin
from sharpmax.experiments.engines.store import Store
from sharpmax.experiments.engines.task import Answer, Task
from sharpmax.lazy import require

_ALLOWED = "host:port of a running Ray cluster that this machine belongs to, or 'auto'"
_TODO = "start one with: ray start --head --port 6379"
_PATIENCE_S = 30.0  # a refusal comes at once; a head with much to do answers late
_OBJECT_STORE_BYTES = 80_000_000  # what is more goes to disk
# How a client of HTTP/2, which Ray speaks, begins; the server answers with a frame of the same type.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_SETTINGS = 4


def connect(ray: Any, address: str | None, workers: int | None) -> None:
    """Join the cluster at `address`, or start one of this machine: no dashboard, no logs, no statistics to anybody."""
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    own = {"num_cpus": workers, "include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    if address is not None and address != "auto":
        _check(address)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Ray will change one day is not the user's to know
        try:
            ray.init(address=address or "local", **quiet, **({} if address else own))
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as problem:
            ray.shutdown()  # what has been started so far
            said = " ".join(str(problem).split())[:300]
            if address is None:
                reject("--engine", f"ray, which cannot be started here ({said})", "a machine that can run Ray")
            reject("--address", f"{address!r} ({said})", _ALLOWED, _TODO)


def _check(address: str) -> None:
    """Ask the cluster for a sign of life: Ray itself would ask for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        reject("--address", repr(address), _ALLOWED)
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE_S) as line:
            line.settimeout(_PATIENCE_S)
            line.sendall(_HELLO)
            reply = line.recv(9)
    except OSError as problem:
        said = problem.strerror or str(problem) or type(problem).__name__
        reject("--address", f"{address!r}, where no cluster is ({said})", _ALLOWED, _TODO)
    if len(reply) < 4 or reply[3] != _SETTINGS:
        reject("--address", f"{address!r}, where something else than Ray is", _ALLOWED, _TODO)


# Read by Ray when it is imported: it reports to nobody, leaves CUDA as it is where a task asks for no GPU, and keeps to
# itself what it does about nodes and processes that die.
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
}
_LOOK_S = 0.5
_NODE_PATIENCE_S = 60.0


@contextmanager
def joined(
    address: str | None, workers: int | None, store: Store, plugins: Sequence[Plugin], retries: int
) -> Iterator[Cluster]:
    """The cluster at `address`, or one of this machine with `workers` processes, which ends with this."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    ray: Any = require("ray", "ray", "the engine 'ray'")
    ours = not ray.is_initialized()
    if ours:
        connect(ray, address, workers)
    cluster = Cluster(ray, store, plugins, retries)
    try:
        yield cluster
    finally:
        cluster.close()
        if ours:
            ray.shutdown()


class Cluster:
    """Tasks as Ray's, which does again what a node that dies had at work or kept for others."""

    def __init__(self, ray: Any, store: Store, plugins: Sequence[Plugin], retries: int) -> None:
        self._ray, self._store = ray, store
        self._files = ray.put([(plugin.path, plugin.text) for plugin in plugins])
        self._work = ray.remote(num_returns=2, max_retries=retries, num_cpus=1)(_portable())
        self._running: dict[Any, tuple[Task, Any]] = {}
        """By the reference to the first part of an answer: the task, and the reference to its blob."""
        self._blobs: dict[str, Any] = {}
        self._none_since: dict[str, float] = {}

    def slots(self, task: Task) -> int:
        """As many as the cluster has cores now, or GPUs for a task that needs one."""
        resource = "GPU" if task.on_gpu else "CPU"
        count = int(self._ray.cluster_resources().get(resource, 0))
        if count:
            self._none_since.pop(resource, None)
            return count
        now = time.monotonic()
        if now - self._none_since.setdefault(resource, now) >= _NODE_PATIENCE_S:
            raise SharpmaxError(
                f"--engine ray: for {_NODE_PATIENCE_S:.0f} s no node of the cluster has had a {resource}; add a "
                "node and go on with --resume: what was done is kept"
            )
        return 0

    def begin(self, task: Task) -> None:
        """Hand a task to Ray, with a reference to its blob."""
        blob = None if task.after is None else self._blob(task.after)
        call = (task.function, dict(task.arguments), task.after is not None)
        work = self._work.options(num_gpus=int(task.on_gpu), name=task.shown)
        first, second = work.remote(sharpmax.__version__, call, self._files, blob)
        self._running[first] = task, second

    def _blob(self, key: str) -> Any:
        if key not in self._blobs:
            self._blobs[key] = self._ray.put(self._store.blob(key))
        return self._blobs[key]

    def answers(self) -> Sequence[tuple[Task, Answer | Lost]]:
        """Wait for an answer; now and then for none, as nodes may have come meanwhile."""
        if not self._running:
            time.sleep(_LOOK_S)
            return []
        ready, waiting = self._ray.wait(list(self._running), timeout=_LOOK_S)
        if not ready:
            self.slots(self._running[waiting[0]][0])  # all nodes may have gone
        return [self._answer(reference) for reference in ready]

    def _answer(self, reference: Any) -> tuple[Task, Answer | Lost]:
        task, blob = self._running.pop(reference)
        try:
            body, data = self._ray.get(reference), self._ray.get(blob)
        except self._ray.exceptions.RayError as problem:
            said = " ".join(str(problem).split())[:200]
            return task, Lost(f"{type(problem).__name__}: {said}", final=True)
        if data is not None:
            self._blobs[task.key] = blob
        return task, (body, data)

    def forget(self, key: str) -> None:
        """Let Ray free a blob that nobody needs any more."""
        self._blobs.pop(key, None)

    def close(self) -> None:
        """Stop what is at work."""
        for reference in self._running:
            with suppress(Exception):
                self._ray.cancel(reference, force=True)
        self._running.clear()
        self._blobs.clear()


def _portable() -> Any:
    """The function that Ray ships by value, as a local one is: it must say so where there is no sharpmax to import."""

    def work(version: str, call: Any, files: Any, blob: bytes | None) -> Any:
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
            return {"error": text, "kind": "UnsupportedError"}, None
        from sharpmax.experiments.engines.task import answer

        return answer(call, files, blob)

    return work
