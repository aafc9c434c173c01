"""Measurements in interpreters of their own."""

from __future__ import annotations

import pytest

from sharpmax.errors import SharpmaxError
from sharpmax.experiments import fresh


def test_import_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    # Light modules in place of the heavy ones: what is tested is the measuring.
    statements = {"torch": "import time; time.sleep(0.05)", "light": "import json", "heavy": "import colorsys"}
    monkeypatch.setattr(fresh, "_STATEMENTS", statements)
    monkeypatch.setattr(fresh, "HEAVY", ("colorsys", "transformers"))
    costs = fresh.import_costs(rounds=2)
    assert set(costs) == {"light", "heavy"}
    assert costs["light"]["ratio"] < 1.0
    assert costs["light"]["torch_median_s"] >= 0.05
    assert costs["light"]["heavy_modules"] == []
    assert costs["heavy"]["heavy_modules"] == ["colorsys"]


def test_import_of_the_package_is_light() -> None:
    seconds, heavy = fresh._timed_import("import sharpmax")
    assert heavy == []
    assert 0 < seconds < 5


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
        fresh._python(["-c", "1 / 0"])
    assert "\n" not in str(caught.value)
