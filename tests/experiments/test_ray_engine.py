"""A real Ray cluster of two nodes on this machine: numbers are the same when a node is killed."""

from __future__ import annotations

import importlib
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sharpmax
from sharpmax.errors import ArgumentError, SharpmaxError
from sharpmax.experiments import engine
from sharpmax.experiments.engine import Job
from tests.experiments.engine_runs import go, grid, toy, traces, wait_for

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Timeouts of Ray's own processes, which start and answer late on a busy machine.
for part in ("worker_register_timeout_seconds", "gcs_server_request_timeout_seconds", "gcs_server_port_wait_time_s"):
    os.environ.setdefault(f"RAY_{part}", "600")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
ray: Any = pytest.importorskip("ray", reason="needs the extra ray")

NODE = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}
# Ray drops a node that refuses connections after 1.5 seconds, but not one that answers late.
SOON = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 3,
    "health_check_timeout_ms": 600_000,
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster whose head has one core."""
    utils: Any = importlib.import_module("ray.cluster_utils")
    made = utils.Cluster(initialize_head=True, head_node_args={**NODE, "_system_config": SOON})
    yield made
    made.shutdown()


def test_tasks_of_a_killed_node_run_again_elsewhere(
    cluster: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """All results equal those of a run in this process. Killed drivers: test_engine.py."""
    second = cluster.add_node(**NODE)
    trace = tmp_path / "trace"
    trace.mkdir()
    # Blobs that are too large for messages.
    gate = tmp_path / "gate"
    tasks = grid(4, 2, size=256, trace=str(trace), gate=str(gate), beside=2)
    process = second.all_processes["raylet"][0].process.pid
    doomed: list[str] = []

    def on_second() -> list[list[str]]:
        """Tasks that began on the second node, the last at the end: name, process, time."""
        begun = [path.name for path in trace.iterdir() if path.read_text(encoding="utf-8") == str(process)]
        return sorted((name.rsplit(".", 2) for name in begun), key=lambda parts: int(parts[2]))

    def kill() -> None:
        try:
            # Trainings begin in pairs, one per node. Then each node has a test that waits for the gate.
            wait_for(lambda: len(list(trace.glob("examine-0.5.*"))) == 2)
            assert len(on_second()) >= 2
            name, worker, _ = on_second()[-1]
            doomed.append(name)
            for dying in (process, int(worker)):  # as when the machine fails
                os.kill(dying, signal.SIGKILL)
            cluster.remove_node(second, allow_graceful=False)
        finally:
            gate.touch()  # or the run would wait forever

    killer = threading.Thread(target=kill)
    killer.start()
    seen: list[tuple[int, int, str]] = []
    capfd.readouterr()
    found = go(
        tmp_path / "ray", tasks, engine="ray", address=cluster.address, progress=lambda *state: seen.append(state)
    )
    assert capfd.readouterr().err == ""  # Ray prints nothing
    killer.join()
    assert found == go(tmp_path / "local", grid(4, 2, size=256), workers=1)
    assert len(found["learn/0"][1]) == 256 * 256 * 4
    assert traces(trace)[doomed[0]] > (4 if doomed[0].startswith("examine") else 1)
    assert (seen[0], seen[-1]) == ((0, 12, "learn/0, learn/1"), (12, 12, ""))


def test_errors_are_one_line(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_RETRIES", 1)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")  # one connection for all runs
    try:
        for name, kind, says, times in (
            ("mistake", ArgumentError, "--width: got 7; allowed: an even number", 1),
            ("fail", SharpmaxError, r"task 'x' failed \(RuntimeError in toy_.*: out of luck.*--resume", 1),
            ("die", SharpmaxError, r"task 'x' failed \(WorkerCrashedError: .*--resume", 2),
        ):
            with pytest.raises(kind, match=f"^{says}$"):
                go(tmp_path / name, [Job("x", toy("fail"), {"trace": str(tmp_path), "how": name})], engine="ray")
            assert len(list(tmp_path.glob(f"{name}.*"))) == times
        gpu = Job("x", toy("learn"), {"seed": 0, "device": "cuda"})
        with pytest.raises(SharpmaxError, match="no node of the cluster has a GPU"):
            go(tmp_path / "gpu", [gpu], engine="ray")
        assert ray.is_initialized()
    finally:
        ray.shutdown()


def test_a_node_with_another_version() -> None:
    says = rf"^--engine ray: node '.*' has sharpmax {re.escape(sharpmax.__version__)}; install sharpmax==0\.0\.7 there$"
    with pytest.raises(SharpmaxError, match=says):
        engine._perform_on_node("0.0.7", Job("x", toy("learn"), {"seed": 0}), None, [])


def test_no_cluster_at_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("head", ":6379", "head:99999", "head:port"):
        with pytest.raises(ArgumentError, match=f"^--address: got {address!r}; allowed: host:port"):
            go(tmp_path, grid(), engine="ray", address=address)
    # Ray itself would keep trying for minutes.
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("connected to an address without a cluster"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ArgumentError, match=rf"'127.0.0.1:{port}', where no cluster is \(.*ray start --head"):
        go(tmp_path, grid(), engine="ray", address=f"127.0.0.1:{port}")
