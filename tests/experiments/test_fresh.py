"""Measurements in interpreters of their own."""

from __future__ import annotations

import pytest

from sharpmax.errors import SharpmaxError
from sharpmax.experiments.benchmarks import cpu as fresh


def test_import_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    # Light modules in place of the heavy ones: what is tested is the measuring.
    statements = {"torch": "import time; time.sleep(0.05)", "light": "import json", "heavy": "import colorsys"}
    monkeypatch.setattr(fresh, "_STATEMENTS", statements)
    monkeypatch.setattr(fresh, "HEAVY", ("colorsys", "transformers"))
    costs = fresh.import_costs(rounds=2)
    assert set(costs) == {"light", "heavy"}
    assert costs["light"]["torch_median_s"] >= 0.05
    assert costs["light"]["heavy_modules"] == []
    assert costs["heavy"]["heavy_modules"] == ["colorsys"]


def test_imports_are_compared_with_that_of_torch_in_the_same_round(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = iter([9.0, 2.0, 1.0, 3.0, 4.0, 1.0, 8.0])  # the first one counts for nothing
    monkeypatch.setattr(fresh, "_STATEMENTS", {"torch": "import torch", "light": "import json"})
    monkeypatch.setattr(fresh, "_timed_import", lambda statement: (next(rounds), []))
    light = fresh.import_costs(rounds=3)["light"]
    assert (light["ratio"], light["median_s"], light["min_s"], light["torch_median_s"]) == (4 / 3, 4.0, 1.0, 2.0)


def test_import_of_the_package_is_light() -> None:
    seconds, heavy = fresh._timed_import("import sharpmax")
    assert heavy == []
    assert seconds > 0


def test_peak_memory_is_far_below_the_matrix_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    if fresh.resident_bytes() is None:
        pytest.skip("this system does not tell the memory of a process")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    extra = fresh.peak_extra_bytes(length=2048, heads=4, width=8)
    assert extra is not None
    assert 0 < extra < 4 * 2048**2 * 4 / 2


def test_memory_of_this_process() -> None:
    found = fresh.resident_bytes()
    if found is None:
        pytest.skip("this system does not tell the memory of a process")
    now, peak = found
    assert 1e6 < now <= peak * 1.01


def test_a_failing_interpreter_is_one_line() -> None:
    with pytest.raises(SharpmaxError, match="ZeroDivisionError") as caught:
        fresh.run_python(["-c", "1 / 0"])
    assert "\n" not in str(caught.value)
