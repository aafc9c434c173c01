"""Processes of this machine: what they give does not depend on how many there are, nor on which of them die."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from sharpmax.errors import ArgumentError, MissingExtraError, SharpmaxError, UnsupportedError
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


def test_processes_give_the_same_and_a_killed_one_is_replaced(tmp_path: Path, expected: dict[str, Any]) -> None:
    trace = tmp_path / "trace"
    trace.mkdir()
    seen: list[Progress] = []
    tasks = [*grid(), Job("die", toy("die"), {"trace": str(trace), "times": 1}, label="dying")]
    found = go(tmp_path / "store", tasks, workers=2, progress=seen.append)
    assert found.pop("die") == ({"lived": True}, None)
    assert found == expected
    assert traces(trace) == {"die": 2}
    assert (seen[0].done, seen[-1].done, seen[-1].total, seen[-1].running) == (0, 7, 7, ())
    assert [one.done for one in seen] == sorted(one.done for one in seen)
    assert max(len(one.running) for one in seen) == 2
    assert any("dying" in one.running for one in seen)


def test_a_process_that_dies_too_often_is_one_line_and_what_was_done_is_kept(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.mkdir()
    tasks = [*grid(1, 1), Job("die", toy("die"), {"trace": str(trace), "times": 9}, after=None, label="dying")]
    with pytest.raises(SharpmaxError, match=r"^task 'dying' lost its process 2 times \(SIGKILL\(-9\)\); .*--resume$"):
        go(tmp_path / "store", tasks, workers=2, retries=1)
    assert traces(trace) == {"die": 2}
    assert "die" not in RunStore(tmp_path / "store")


def test_what_raises_is_tried_again(tmp_path: Path) -> None:
    for number, (times, works) in enumerate([(2, True), (3, False)]):
        trace = tmp_path / f"trace-{number}"
        trace.mkdir()
        tasks = [*grid(1, 0), Job("fail", toy("fail"), {"trace": str(trace), "times": times})]
        if works:
            go(tmp_path / str(number), tasks, workers=1)
        else:
            says = r"^task 'fail' failed 3 times: RuntimeError: out of luck \(toy_tasks.py, line \d+\); .*--resume$"
            with pytest.raises(SharpmaxError, match=says):
                go(tmp_path / str(number), tasks, workers=1)
        assert traces(trace) == {"fail": 3}
        assert ("learn/0" in RunStore(tmp_path / str(number)), "fail" in RunStore(tmp_path / str(number))) == (
            True,
            works,
        )


@pytest.mark.parametrize("workers", [1, 2])
def test_a_mistake_passes_through_as_it_is(tmp_path: Path, workers: int) -> None:
    for name, kind, says in (
        ("mistake", ArgumentError, "--width: got 7; allowed: an even number"),
        ("lacking", MissingExtraError, "fitting needs the package 'scipy', .*"),
    ):
        with pytest.raises(kind, match=f"^{says}$"):
            go(tmp_path / "store", [Job("x", toy(name), {"trace": str(tmp_path)})], workers=workers)
        assert len(list(tmp_path.glob(f"{name}.*"))) == 1


def test_functions_that_give_something_else(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="JSON cannot hold"):
        go(tmp_path, [Job("x", toy("not_json"), {})], workers=1)
    with pytest.raises(UnsupportedError, match="NoneType; allowed: an Outcome"):
        go(tmp_path, [Job("x", toy("nothing"), {})], workers=1)


def test_only_what_is_missing_is_done(tmp_path: Path, expected: dict[str, Any]) -> None:
    trace = tmp_path / "trace"
    trace.mkdir()
    tasks = grid(trace=str(trace))
    # The predecessor of a test that is missing lies in the store, and is not among the tasks.
    go(tmp_path / "store", [task for task in tasks if task.key != "test/1/1"], workers=1)
    before = traces(trace)
    assert go(tmp_path / "store", [tasks[-1]], workers=2) == expected
    assert traces(trace)["examine-0.5"] == before["examine-0.5"] + 1
    assert sum(traces(trace).values()) == len(tasks)
    assert go(tmp_path / "store", tasks) == expected
    assert sum(traces(trace).values()) == len(tasks)


def test_tasks_are_done_in_their_order(tmp_path: Path) -> None:
    order = ["learn/1", "test/1/1", "test/1/0", "learn/0", "test/0/1", "test/0/0"]
    go(tmp_path, sorted(grid(), key=lambda task: order.index(task.key)), workers=1)
    assert RunStore(tmp_path).keys() == order


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


def test_an_interrupt_ends_all_processes(tmp_path: Path) -> None:
    process = driver(tmp_path, workers=2)
    stuck(tmp_path, 2)
    kept = lines(tmp_path / "store")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert said.count(b"Traceback") == 1
    assert said.strip().endswith(b"KeyboardInterrupt")
    assert lines(tmp_path / "store") == kept >= 5
    assert len(workers(tmp_path / "trace")) == 2
    assert not any(map(alive, workers(tmp_path / "trace")))


def test_an_interrupt_that_reaches_processes_as_they_start_is_left_to_the_driver(tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    (tmp_path / "gate").touch()
    process = driver(tmp_path, workers=2)
    wait_for(lambda: len(list(tmp_path.glob("starts.*"))) == 2)
    for path in tmp_path.glob("starts.*"):
        os.kill(int(path.suffix[1:]), signal.SIGINT)
    (tmp_path / "hold").unlink()
    _, said = process.communicate()
    assert (process.returncode, said) == (0, b"")
    assert lines(tmp_path / "store") == 12
    assert len(list(tmp_path.glob("starts.*"))) == 2


def test_an_interrupt_while_processes_start_ends_them(tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    process = driver(tmp_path, workers=2)
    wait_for(lambda: list(tmp_path.glob("starts.*")))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert said.count(b"Traceback") == 1
    assert said.strip().endswith(b"KeyboardInterrupt")
    assert not any(alive(int(path.suffix[1:])) for path in tmp_path.glob("starts.*"))


@pytest.mark.parametrize(
    ("tasks", "says"),
    [
        ([*grid(1, 0), *grid(1, 0)], "tasks: got two of the key 'learn/0'"),
        ([Job("a", "m:f", {}, after="b")], "tasks: got 'a' after 'b'; allowed: predecessors among"),
        ([Job("a", "m:f", {}, after="a")], "tasks: got 'a' after 'a'"),
    ],
)
def test_tasks_that_make_no_sense(tmp_path: Path, tasks: list[Job], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        go(tmp_path, tasks, workers=1)


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
