"""Tasks in processes: results do not depend on how many there are, nor on when they are killed; plugins."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from sharpmax.errors import ArgumentError, FileFormatError, MissingExtraError, SharpmaxError
from sharpmax.experiments import engine as plugins
from sharpmax.experiments.engine import Job
from sharpmax.experiments.run_folder import RunStore
from sharpmax.normalisers import normalisers
from tests.experiments.engine_runs import alive, driver, go, grid, lines, stuck, toy, traces, wait_for


def workers(trace: Path) -> set[int]:
    """The processes that tasks were done in."""
    return {int(path.name.rsplit(".", 2)[1]) for path in trace.iterdir()}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What this process gives."""
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
    assert list(RunStore(tmp_path / "store").records) == ["done"]


def test_only_what_is_missing_is_done_in_the_order_of_the_tasks(tmp_path: Path, expected: dict[str, Any]) -> None:
    trace = tmp_path / "trace"
    trace.mkdir()
    order = ["learn/1", "learn/0", "test/1/0", "test/0/1", "test/0/0", "test/1/1"]
    tasks = sorted(grid(trace=str(trace)), key=lambda task: order.index(task.key))
    go(tmp_path / "store", tasks[:-1], workers=1)
    assert list(RunStore(tmp_path / "store").records) == order[:-1]
    # The predecessor of the one that is missing lies in the store, and is not among the tasks.
    assert go(tmp_path / "store", tasks[-1:], workers=1) == expected
    assert go(tmp_path / "store", tasks) == expected
    assert sum(traces(trace).values()) == len(tasks)


def test_a_lost_driver_loses_what_was_in_flight_and_no_more(tmp_path: Path) -> None:
    process = driver(tmp_path, workers=2)
    stuck(tmp_path, 2)
    process.kill()
    process.communicate()
    kept = list(RunStore(tmp_path / "store").records)
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
    for pid in (*workers(tmp_path / "trace"), process.pid):  # a terminal sends it to all
        os.kill(pid, signal.SIGINT)
    _, said = process.communicate()
    assert said.count(b"Traceback") == 1
    assert said.strip().endswith(b"KeyboardInterrupt")
    assert lines(tmp_path / "store") == kept >= 5
    assert len(workers(tmp_path / "trace")) == 2
    assert not any(map(alive, workers(tmp_path / "trace")))


def test_ray_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"engine 'ray' needs the package 'ray'.*pip install 'ray>="):
        go(tmp_path, grid(), engine="ray")


def test_a_cluster_knows_its_own_workers(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="--workers: got 3"):
        go(tmp_path, grid(), engine="ray", address="head:6379", workers=3)


def loaded(path: Path) -> Any:
    return plugins.load_plugin(plugins.read_plugins([path])[0])


NORMALISER = """
from sharpmax.normalisers import Normaliser, visible_softmax

class Squared(Normaliser):
    name = "squared-for-a-test"
    disperses = "as a test likes"

    def normalise(self, logits, visible):
        return visible_softmax(logits.square(), visible)
"""


def test_a_normaliser_registers_wherever_its_text_goes(tmp_path: Path) -> None:
    file = tmp_path / "squared.py"
    file.write_text(NORMALISER, encoding="utf-8")
    plugin = plugins.read_plugins([file])[0]
    file.unlink()
    module: Any = plugins.load_plugin(plugin)
    assert normalisers()["squared-for-a-test"] is module.Squared
    # A file that was changed since replaces what it defined before, instead of finding the name taken.
    changed: Any = plugins.load_plugin(plugins.Plugin(plugin.path, plugin.text + "\n"))
    assert normalisers()["squared-for-a-test"] is changed.Squared is not module.Squared


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\nx = (", r"SyntaxError"),
        ("x = 1\nraise ValueError('no\\nluck')", r"ValueError, line 2: no luck"),
        ("import nowhere_at_all", r"ModuleNotFoundError, line 1"),
        ("raise SystemExit(3)", r"SystemExit, line 1: 3"),
    ],
)
def test_a_file_that_cannot_be_run(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "bad.py"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(FileFormatError, match=rf"^--with: '.*bad.py' cannot be run \({says}.*\)$"):
        loaded(file)
    assert "sharpmax_plugin_bad" not in sys.modules


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"--with: got '.*none.py'"):
        plugins.read_plugins([tmp_path / "none.py"])
    (tmp_path / "x.py").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileFormatError, match="not text"):
        plugins.read_plugins([tmp_path / "x.py"])
    (tmp_path / "a").mkdir()
    for folder in ("a", "."):
        (tmp_path / folder / "y.py").touch()
    with pytest.raises(ArgumentError, match="two files called 'y'"):
        plugins.read_plugins([tmp_path / "y.py", tmp_path / "a" / "y.py"])
