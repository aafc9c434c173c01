"""Tasks in processes: results depend neither on their number nor on when they are killed. Plugins."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from sharpmax.errors import ArgumentError, MissingExtraError, SharpmaxError
from sharpmax.experiments import engine as plugins
from sharpmax.experiments.engine import Job
from sharpmax.experiments.run_folder import RunStore
from sharpmax.normalisers import normalisers
from tests.experiments.engine_runs import alive, driver, go, grid, lines, toy, traces, wait_for


def workers(trace: Path) -> set[int]:
    """Ids of the processes that ran tasks."""
    return {int(path.name.rsplit(".", 2)[1]) for path in trace.iterdir()}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of a run in this process."""
    return go(tmp_path_factory.mktemp("expected"), grid(), workers=1)


def test_processes_give_the_same(tmp_path: Path, expected: dict[str, Any]) -> None:
    record, blob = expected["learn/0"]
    assert (record["threads"], record["denormal"], len(blob)) == (1, 0.0, 64 * 64 * 4)
    seen: list[tuple[int, int, str]] = []
    assert go(tmp_path, grid(), workers=2, progress=lambda *state: seen.append(state)) == expected
    assert (seen[0], seen[-1]) == ((0, 6, "learn/0, learn/1"), (6, 6, ""))
    assert [one[0] for one in seen] == sorted(one[0] for one in seen)


@pytest.mark.parametrize(
    ("name", "workers", "kind", "says"),
    [
        ("mistake", 1, ArgumentError, "--width: got 7; allowed: an even number"),
        ("mistake", 2, ArgumentError, "--width: got 7; allowed: an even number"),
        ("fail", 1, SharpmaxError, r"task 'it' failed \(RuntimeError in toy_tasks.py, line \d+: out of luck\);.*"),
        ("die", 2, SharpmaxError, r"task 'it' failed \(TerminatedWorkerError: .*SIGKILL\(-9\).*\); .*--resume"),
    ],
)
def test_a_failing_task_is_one_line_and_finished_tasks_are_kept(
    tmp_path: Path, name: str, workers: int, kind: type[SharpmaxError], says: str
) -> None:
    first = Job("done", toy("learn"), {"seed": 0})
    go(tmp_path / "store", [first], workers=1)
    failing = Job(name, toy("fail"), {"trace": str(tmp_path), "how": name}, label="it")
    # These depend on the failing task.
    never = [Job(f"test/{place}", toy("examine"), {"scale": 0.0}, after=name) for place in range(2)]
    with pytest.raises(kind, match=f"^{says}$"):
        go(tmp_path / "store", [first, failing, *never], workers=workers)
    assert len(list(tmp_path.glob(f"{name}.*"))) == 1
    assert list(RunStore(tmp_path / "store").records) == ["done"]


def test_only_missing_tasks_run_in_their_order(tmp_path: Path, expected: dict[str, Any]) -> None:
    trace = tmp_path / "trace"
    trace.mkdir()
    order = ["learn/1", "learn/0", "test/1/0", "test/0/1", "test/0/0", "test/1/1"]
    tasks = sorted(grid(trace=str(trace)), key=lambda task: order.index(task.key))
    go(tmp_path / "store", tasks[:-1], workers=1)
    assert list(RunStore(tmp_path / "store").records) == order[:-1]
    # The missing task depends on one that is in the store but not among the tasks.
    assert go(tmp_path / "store", tasks[-1:], workers=1) == expected
    assert go(tmp_path / "store", tasks) == expected
    assert sum(traces(trace).values()) == len(tasks)


def test_a_killed_driver_loses_only_running_tasks(tmp_path: Path) -> None:
    process = driver(tmp_path)
    process.kill()
    process.communicate()
    kept = list(RunStore(tmp_path / "store").records)
    assert 5 <= len(kept) < 12
    begun = sum(traces(tmp_path / "trace").values())
    assert begun == len(kept) + 2
    wait_for(lambda: not any(map(alive, workers(tmp_path / "trace"))))
    tasks = grid(4, 2, trace=str(tmp_path / "trace"))
    assert go(tmp_path / "store", tasks, workers=1) == go(tmp_path / "whole", grid(4, 2), workers=1)
    # No worker went on after the driver was killed.
    assert sum(traces(tmp_path / "trace").values()) == begun + 12 - len(kept)


def test_an_interrupt_ends_all_processes(tmp_path: Path) -> None:
    process = driver(tmp_path)
    kept = lines(tmp_path / "store")
    for pid in (*workers(tmp_path / "trace"), process.pid):  # a terminal sends it to all
        os.kill(pid, signal.SIGINT)
    _, said = process.communicate()
    assert said.count(b"Traceback") == 1
    assert said.strip().endswith(b"KeyboardInterrupt")
    assert lines(tmp_path / "store") == kept >= 5
    assert len(workers(tmp_path / "trace")) == 2
    assert not any(map(alive, workers(tmp_path / "trace")))


def test_ray_is_an_extra_and_a_cluster_has_its_own_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"engine 'ray' needs the package 'ray'.*pip install 'ray>="):
        go(tmp_path, grid(), engine="ray")
    with pytest.raises(ArgumentError, match="--workers: got 3"):
        go(tmp_path, grid(), engine="ray", address="head:6379", workers=3)


NORMALISER = """
from sharpmax.normalisers import Normaliser, visible_softmax

class Squared(Normaliser):
    name = "squared-for-a-test"
    disperses = "as a test likes"

    def normalise(self, logits, visible):
        return visible_softmax(logits.square(), visible)
"""


def test_the_text_of_a_plugin_is_enough_to_register_its_normaliser(tmp_path: Path) -> None:
    file = tmp_path / "squared.py"
    file.write_text(NORMALISER, encoding="utf-8")
    plugin = plugins.read_plugins([file])[0]
    file.unlink()
    module: Any = plugins.load_plugin(plugin)
    assert normalisers()["squared-for-a-test"] is module.Squared
    # A changed file replaces what it defined before; the name is not taken.
    changed: Any = plugins.load_plugin(plugins.Plugin(plugin.path, plugin.text + "\n"))
    assert normalisers()["squared-for-a-test"] is changed.Squared is not module.Squared
