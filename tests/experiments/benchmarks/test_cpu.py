"""Costs of imports, memory, capture and a training step. Incorrect results are not timed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sharpmax.errors import SharpmaxError
from sharpmax.experiments.benchmarks import cpu
from sharpmax.experiments.benchmarks.measuring import extra_bytes, in_fresh_interpreter, resident_bytes, run_python
from sharpmax.probing import capture
from tests.integrations.families import FAMILIES


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES["llama"].build()
    monkeypatch.setattr(cpu, "load_language_model", lambda name: SimpleNamespace(model=model))


@pytest.mark.usefixtures("tiny")
def test_capture_is_timed_next_to_a_plain_pass() -> None:
    bench = cpu.probe_tables(length=40, repeat=2)["bench"]
    assert list(bench) == ["forward/plain", "capture/last", "capture/log"]
    assert bench["forward/plain"]["ratio"] == 1.0
    for name in ("capture/last", "capture/log"):
        assert 0.0 <= bench[name]["errors"]["entropy"] < 1e-5
        assert bench[name]["errors"]["output"] == 0.0
        assert bench[name]["ratio"] > 0.0
        assert bench[name]["targets"]["ratio"] == {"at_most": 2.5, "reached": None}  # the pass is short


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_incorrect_entropies_are_not_timed(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right = capture.measured

    def wrong(*arguments: Any) -> Any:
        found = right(*arguments)
        return found | {"entropy": found["entropy"] * factor}

    monkeypatch.setattr(capture, "measured", wrong)
    bench = cpu.probe_tables(length=40, repeat=1)["bench"]
    assert bench["capture/last"]["agrees"] is False
    assert not {"median_s", "ratio"} & set(bench["capture/last"])
    assert bench["forward/plain"]["median_s"] > 0.0


def test_imports_are_compared_with_torch_in_the_same_round(monkeypatch: pytest.MonkeyPatch) -> None:
    # A warm-up, then torch, sharpmax and sharpmax with row_stats in each of three rounds.
    rounds = iter([9.0, 2.0, 1.0, 9.0, 3.0, 4.0, 9.0, 1.0, 8.0, 9.0])
    monkeypatch.setattr(cpu, "run_python", lambda code: (next(rounds), []))
    light = cpu.import_costs(rounds=3)["import/sharpmax"]
    assert (light["ratio"], light["median_s"], light["min_s"], light["torch_median_s"]) == (4 / 3, 4.0, 1.0, 2.0)


def test_import_of_the_package_is_light() -> None:
    statement = "import sharpmax; sharpmax.row_stats"
    assert run_python(cpu._TIMED.format(statement=statement, heavy=cpu.HEAVY))[1] == []


def test_peak_memory_is_far_below_the_matrix_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    if resident_bytes() is None:
        pytest.skip("the memory of a process is unknown on this system")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    extra = in_fresh_interpreter(extra_bytes, 2048, 4, 8)
    assert 0 < extra < 4 * 2048**2 * 4 / 2


def test_a_failing_interpreter_is_one_line() -> None:
    with pytest.raises(SharpmaxError, match="ZeroDivisionError") as caught:
        run_python("1 / 0")
    assert "\n" not in str(caught.value)
