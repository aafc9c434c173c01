"""Processes of this machine: what they give does not depend on how many there are, nor on when they are killed."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from sharpmax.errors import ArgumentError, MissingExtraError, SharpmaxError
from sharpmax.experiments.engine import Job, Progress
from sharpmax.experiments.run_folder import RunStore
from tests.experiments.engine_runs import alive, driver, go, grid, lines, stuck, toy, traces, wait_for


def workers(trace: Path) -> set[int]:
    """The processes that tasks were done in."""
    return {int(path.name.rsplit(".", 2)[1]) for path in trace.iterdir()}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What this process gives."""
    return go(tmp_path_factory.mktemp("expected"), grid(), workers=1)


def test_one_thread_and_no_denormals(expected: dict[str, Any]) -> None:
    record, blob = expected["learn/0"]
    assert (record["threads"], record["denormal"]) == (1, 0.0)
    assert len(blob) == 64 * 64 * 4
    assert expected["test/0/1"][0] != expected["test/1/1"][0]


def test_processes_give_the_same(tmp_path: Path, expected: dict[str, Any]) -> None:
    seen: list[Progress] = []
    assert go(tmp_path, grid(), workers=2, progress=seen.append) == expected
    assert (seen[0].done, seen[-1].done, seen[-1].total, seen[-1].running) == (0, 6, 6, ())
    assert [one.done for one in seen] == sorted(one.done for one in seen)
    assert max(len(one.running) for one in seen) == 2


@pytest.mark.parametrize(
    ("name", "workers", "kind", "says"),
    [
        ("mistake", 1, ArgumentError, "--width: got 7; allowed: an even number"),
        ("mistake", 2, ArgumentError, "--width: got 7; allowed: an even number"),
        ("fail", 1, SharpmaxError, r"task 'it' failed: RuntimeError: out of luck \(toy_tasks.py, line \d+\); .*resume"),
        ("die", 2, SharpmaxError, r"task 'it' failed \(TerminatedWorkerError: .*SIGKILL\(-9\).*\); .*--resume"),
    ],
)
def test_a_task_that_fails_is_one_line_and_what_was_done_is_kept(
    tmp_path: Path, name: str, workers: int, kind: type[SharpmaxError], says: str
) -> None:
    first = Job("done", toy("learn"), {"seed": 0})
    go(tmp_path / "store", [first], workers=1)
    failing = Job(name, toy(name), {"trace": str(tmp_path)}, label="it")
    # The others wait for a task that never ends well.
    never = [Job(f"test/{place}", toy("examine"), {"scale": 0.0}, after=name) for place in range(2)]
    with pytest.raises(kind, match=f"^{says}$"):
        go(tmp_path / "store", [first, failing, *never], workers=workers)
    assert len(list(tmp_path.glob(f"{name}.*"))) == 1
    assert RunStore(tmp_path / "store").keys() == ["done"]


def test_only_what_is_missing_is_done_in_the_order_of_the_tasks(tmp_path: Path, expected: dict[str, Any]) -> None:
    trace = tmp_path / "trace"
    trace.mkdir()
    order = ["learn/1", "test/1/0", "learn/0", "test/0/1", "test/0/0", "test/1/1"]
    tasks = sorted(grid(trace=str(trace)), key=lambda task: order.index(task.key))
    go(tmp_path / "store", tasks[:-1], workers=1)
    assert RunStore(tmp_path / "store").keys() == order[:-1]
    # The predecessor of the one that is missing lies in the store, and is not among the tasks.
    assert go(tmp_path / "store", tasks[-1:], workers=1) == expected
    assert go(tmp_path / "store", tasks) == expected
    assert sum(traces(trace).values()) == len(tasks)


def test_a_lost_driver_loses_what_was_in_flight_and_no_more(tmp_path: Path) -> None:
    process = driver(tmp_path, workers=2)
    stuck(tmp_path, 2)
    process.kill()
    process.communicate()
    kept = RunStore(tmp_path / "store").keys()
    assert 5 <= len(kept) < 12
    begun = sum(traces(tmp_path / "trace").values())
    assert begun == len(kept) + 2
    wait_for(lambda: not any(map(alive, workers(tmp_path / "trace"))))
    tasks = grid(4, 2, trace=str(tmp_path / "trace"))
    assert go(tmp_path / "store", tasks, workers=1) == go(tmp_path / "whole", grid(4, 2), workers=1)
    # Nobody went on with the work of the driver that was killed.
    assert sum(traces(tmp_path / "trace").values()) == begun + 12 - len(kept)


def ends_by_interrupt(process: Any) -> None:
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert said.count(b"Traceback") == 1
    assert said.strip().endswith(b"KeyboardInterrupt")


def test_an_interrupt_ends_all_processes(tmp_path: Path) -> None:
    process = driver(tmp_path, workers=2)
    stuck(tmp_path, 2)
    kept = lines(tmp_path / "store")
    ends_by_interrupt(process)
    assert lines(tmp_path / "store") == kept >= 5
    assert len(workers(tmp_path / "trace")) == 2
    assert not any(map(alive, workers(tmp_path / "trace")))


def test_an_interrupt_while_processes_start_is_left_to_the_driver(tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    process = driver(tmp_path, workers=2)
    wait_for(lambda: len(list(tmp_path.glob("starts.*"))) == 2)
    started = [int(path.suffix[1:]) for path in tmp_path.glob("starts.*")]
    for worker in started:  # a terminal sends it to all
        os.kill(worker, signal.SIGINT)
    assert all(map(alive, started))
    ends_by_interrupt(process)
    assert not any(map(alive, started))


def test_ray_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"engine 'ray' needs the package 'ray'.*pip install 'ray>="):
        go(tmp_path, grid(), engine="ray")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"engine": "dask"}, r"--engine: got 'dask'; allowed: one of \['local', 'ray'\]"),
        ({"workers": 0}, "--workers: got 0"),
        ({"address": "head:6379"}, "--address: got 'head:6379'.*add --engine ray"),
        ({"engine": "ray", "address": "head:6379", "workers": 3}, "--workers: got 3"),
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        go(tmp_path, grid(), **options)
