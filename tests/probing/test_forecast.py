"""Forecasts from small sizes: exact where they can be, chosen without a look at what is forecast."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sharpmax.probing.forecast import REPLICATION, error, predict
from sharpmax.probing.measurement import Numbers
from tests.probing.readings import KEYS, SIZES

RISES = np.linspace(-0.1, 0.8, 12).reshape(3, 4)


def curves(entropy: Callable[[float], Any], top: Callable[[float], Any] | None = None) -> dict[str, Numbers]:
    def stacked(function: Callable[[float], Any]) -> Numbers:
        return np.stack([np.asarray(function(KEYS[size]), dtype=float) * np.ones((3, 4)) for size in SIZES])

    return {"entropy": stacked(entropy), "top": stacked(top or (lambda n: 0.3)), "count": stacked(lambda n: n)}


def straight(n: float) -> Numbers:
    return 1.0 + RISES * math.log(n / 64)


def bent(n: float) -> Numbers:
    """Straight up to 64 items; then something happens that no curve tells."""
    return straight(n) + (1.5 * math.log(n / 512) if n > 512 else 0.0)


def change(of: dict[str, Numbers], base: int, to: int, off: float = 0.0) -> dict[str, Numbers]:
    places = SIZES.index(base), SIZES.index(to)
    return {name: of[name][places[1]] - of[name][places[0]] + off for name in ("entropy", "top")}


def test_a_straight_line_is_forecast_exactly() -> None:
    found = predict(curves(straight), SIZES, 64)
    assert found.method == "line"
    assert found.fitted == (8, 16, 32, 64)
    assert list(found.values) == [128, 256, 512]
    np.testing.assert_allclose(found.values[512]["entropy"], straight(KEYS[512]))
    np.testing.assert_allclose(found.values[512]["top"], 0.3)


def test_nothing_but_the_number_of_keys_is_read_of_larger_sizes() -> None:
    """The broken version looks: then poison would show."""
    known = curves(straight, lambda n: 1.0 / math.sqrt(n))
    poisoned = {name: values.copy() for name, values in known.items()}
    for name in ("entropy", "top"):
        poisoned[name][SIZES.index(64) + 1 :] = np.nan
    plain, blind = predict(known, SIZES, 64), predict(poisoned, SIZES, 64)
    assert blind.method == plain.method
    assert blind.decided == plain.decided
    for size in plain.values:
        np.testing.assert_array_equal(plain.values[size]["entropy"], blind.values[size]["entropy"])
        np.testing.assert_array_equal(plain.values[size]["top"], blind.values[size]["top"])


def test_key_replication_is_used_where_it_does_better_on_what_is_known() -> None:
    known = curves(bent)
    exact = {(32, 64): change(known, 32, 64), **{(64, to): change(known, 64, to) for to in (128, 256, 512)}}
    # The line is exact at 64, too; a hair of noise makes it the second best.
    known["entropy"][0] += 0.05
    found = predict(known, SIZES, 64, exact)
    assert found.method == REPLICATION
    np.testing.assert_allclose(found.values[512]["entropy"], np.clip(bent(KEYS[512]), 0, None))
    assert error(found.values[512], {n: known[n][-1] for n in ("entropy", "top")})["entropy"]["median"] < 1e-9
    line = error(found.others["line"][512], {n: known[n][-1] for n in ("entropy", "top")})["entropy"]["median"]
    assert line > 1.0


def test_key_replication_that_is_wrong_where_it_can_be_checked_is_not_used() -> None:
    known = curves(straight)
    wrong = {(32, 64): change(known, 32, 64, off=0.7), **{(64, to): change(known, 64, to) for to in (128, 256, 512)}}
    assert predict(known, SIZES, 64, wrong).method == "line"


def test_a_method_that_cannot_reach_every_size_is_not_chosen() -> None:
    known = curves(bent)
    known["entropy"][0] += 0.05
    some = {(32, 64): change(known, 32, 64), (64, 128): change(known, 64, 128)}
    found = predict(known, SIZES, 64, some)
    assert found.decided[REPLICATION] < found.decided["line"]
    assert REPLICATION not in found.method
    assert set(found.values) == {128, 256, 512}


@pytest.mark.parametrize("name", ["line", "the largest size again"])
def test_forecasts_are_entropies_and_weights(name: str) -> None:
    steep = curves(lambda n: 0.2 + 1.4 * (math.log(n) - 4.0), lambda n: min(1.0, 40.0 / n))
    found = predict(steep, SIZES, 64).others[name][512]
    assert (found["entropy"] >= 0.0).all()
    assert (found["entropy"] <= math.log(KEYS[512])).all()
    assert (found["top"] >= 1.0 / KEYS[512]).all()
    assert (found["top"] <= 1.0).all()


def test_errors_leave_out_heads_without_numbers() -> None:
    forecast = {name: np.array([[1.0, np.nan, 3.0]]) for name in ("entropy", "top")}
    measured = {name: np.array([[1.5, 1.0, 2.0]]) for name in ("entropy", "top")}
    found = error(forecast, measured)
    assert found["heads"] == 2
    assert found["entropy"] == {"median": 0.75, "p90": pytest.approx(0.95), "bias": 0.25}
    assert error({n: np.array([np.nan]) for n in forecast}, {n: np.array([1.0]) for n in forecast})["entropy"] == {
        "median": None, "p90": None, "bias": None,
    }  # fmt: skip
