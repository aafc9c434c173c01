"""Measurements in interpreters of their own."""

from __future__ import annotations

import pytest

from sharpmax.errors import SharpmaxError
from sharpmax.experiments.benchmarks import cpu as fresh
from sharpmax.experiments.benchmarks.measuring import resident_bytes, run_python


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
    if resident_bytes() is None:
        pytest.skip("this system does not tell the memory of a process")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    extra = fresh.peak_extra_bytes(length=2048, heads=4, width=8)
    assert extra is not None
    assert 0 < extra < 4 * 2048**2 * 4 / 2


def test_a_failing_interpreter_is_one_line() -> None:
    with pytest.raises(SharpmaxError, match="ZeroDivisionError") as caught:
        run_python(["-c", "1 / 0"])
    assert "\n" not in str(caught.value)
