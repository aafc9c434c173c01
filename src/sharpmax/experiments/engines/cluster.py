"""Tasks on a Ray cluster: one that is there already, or one of this machine for as long as the run lasts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import sharpmax
from sharpmax.errors import SharpmaxError
from sharpmax.experiments.engines.address import connect
from sharpmax.experiments.engines.driver import Lost
from sharpmax.experiments.engines.plugins import Plugin
from sharpmax.experiments.engines.store import Store
from sharpmax.experiments.engines.task import Task
from sharpmax.experiments.engines.worker import Answer
from sharpmax.lazy import require

__all__ = ["Cluster", "joined"]

# Read by Ray when it is imported: it reports to nobody, leaves CUDA as it is where a task asks for no GPU, and keeps to
# itself what it does about nodes and processes that die.
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
}
_LOOK_S = 0.5
_PATIENCE_S = 60.0


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
        if now - self._none_since.setdefault(resource, now) >= _PATIENCE_S:
            raise SharpmaxError(
                f"--engine ray: for {_PATIENCE_S:.0f} s no node of the cluster has had a {resource}; add a node and go "
                "on with --resume: what was done is kept"
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
        from sharpmax.experiments.engines.worker import answer

        return answer(call, files, blob)

    return work
