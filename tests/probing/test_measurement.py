"""Curves, slopes, intervals and crossings against numbers that are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sharpmax.probing.measurement import crossing, curve, curves_of, interval, repeats, slope
from tests.probing.readings import SIZES, findings, material, readings


def test_the_slope_is_that_of_least_squares() -> None:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=6), rng.normal(size=(6, 2, 3))
    expected = np.polyfit(x, y.reshape(6, -1), 1)[0].reshape(2, 3)
    np.testing.assert_allclose(slope(x[:, None, None], y), expected)


def test_no_slope_where_the_number_of_keys_does_not_change() -> None:
    """A window of fixed length has no n to disperse with; 0/0 must not become a number."""
    assert np.isnan(slope(np.full((3, 1, 1), 5.0), np.array([1.0, 2.0, 3.0])[:, None, None])).all()


def test_a_nested_curve_is_not_moved_by_which_passages_are_left() -> None:
    """Each passage has a level of its own; the two that are read at large sizes happen to be the low ones."""
    rng = np.random.default_rng(2)
    levels = np.sort(rng.normal(3.0, 1.0, size=8))
    rise = {size: 0.3 * place for place, size in enumerate(SIZES)}
    many = {size: 8 if size <= 64 else 2 for size in SIZES}
    read = {size: {"entropy": (levels[: many[size]] + rise[size])[:, None, None]} for size in SIZES}
    paired = curve(read, "entropy", nested=True)[:, 0, 0]
    np.testing.assert_allclose(paired, levels.mean() + np.array(list(rise.values())))
    unpaired = curve(read, "entropy", nested=False)[:, 0, 0]
    assert abs(unpaired[-1] - paired[-1]) > 1.0


def test_the_interval_holds_the_slope_and_shrinks_with_prompts() -> None:
    def width(prompts: int) -> float:
        found = findings(readings(lambda n: np.full((1, 8), 0.4 * math.log(n)), prompts=prompts, noise=0.2))
        inside = (found.fits.slope[1] < 0.4) & (found.fits.slope[2] > 0.4)
        assert inside.mean() >= 0.75
        return float((found.fits.slope[2] - found.fits.slope[1]).mean())

    assert width(24) < 0.6 * width(6)


def test_one_prompt_has_no_interval() -> None:
    read = readings(lambda n: np.array([[1.0]]), prompts=1)
    assert list(repeats(read, 0)) == []
    low, high = interval([], np.zeros((2, 2)))
    assert np.isnan(low).all()
    assert np.isnan(high).all()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.9, 0.7, 0.3, 0.1], 1.5),
        ([0.9, 0.4, 0.6, 0.2], 2.25),  # for good, not for the first time
        ([0.4, 0.3, 0.2, 0.1], -math.inf),
        ([0.9, 0.4, 0.3, 0.6], math.inf),
        ([0.9, math.nan, 0.3, 0.1], math.nan),
    ],
)
def test_where_a_curve_falls_under_a_level_for_good(values: list[float], expected: float) -> None:
    found = crossing(np.arange(4.0), np.array(values), 0.5)
    np.testing.assert_allclose(found, expected)


def test_the_horizon_is_where_the_top_weight_is_a_half() -> None:
    """The top weight falls by a fixed amount per doubling and is a half at 500 keys."""
    found = findings(
        readings(
            lambda n: np.array([[2.0]]), lambda n: np.array([[0.5 - 0.1 * math.log(n / 500)]]), prompts=12, noise=0.2
        )
    )
    at, low, high = found.fits.horizon[:, 0, 0]
    assert at == pytest.approx(500.0, rel=0.1)
    assert low <= at <= high
    assert low < 500.0 < high


def test_entropy_never_exceeds_what_so_many_keys_can_have() -> None:
    """A nested curve may add up to more; e^H must not be more than all keys."""
    read = readings(lambda n: np.array([[1.2 * math.log(n)]]))
    curves = curves_of(read, material(nested=True).nested)
    assert (curves["effective"] <= curves["count"] * (1 + 1e-12)).all()
