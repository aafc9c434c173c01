"""Ranks, intervals and laws against cases made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from sharpmax.experiments.compare.methods import ModelSpec
from sharpmax.experiments.compare.tables import fit_power_law, layer_slopes, ranks
from sharpmax.probing.measurement import crossing


def test_methods_whose_difference_is_not_significant_share_a_rank() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(0.0, 5.0, 8)  # what seeds have in common cancels in pairs
    scores = {
        "c": 60 + base + rng.normal(0, 0.1, 8),
        "a": 80 + base + rng.normal(0, 1, 8),
        "b": 79.9 + base + rng.normal(0, 1, 8),
        "d": 20 + base,
    }
    got = ranks(scores)
    assert set(list(got)[:2]) == {"a", "b"}
    assert [got[name].rank for name in "abcd"] == [1, 1, 3, 4]
    assert got["c"].leader == "c"


NOISE = np.array([1.0, -1.0, 0.5, -0.5, 0.0])


@pytest.mark.parametrize(
    ("scores", "wanted"),
    [
        # Pairs differ significantly where means do not.
        ({"x": 50 + 40 * NOISE, "y": 52 + 40.1 * NOISE}, {"y": 1, "x": 2}),
        # y is not behind x, z is; that z is not behind y either does not help it.
        ({"x": 50 + 0 * NOISE, "y": 49 + 2 * NOISE, "z": 48 + NOISE}, {"x": 1, "y": 1, "z": 3}),
        ({"x": np.array([1.0, 2.0]), "y": np.array([1.0, 2.0])}, {"x": 1, "y": 1}),
        # One seed goes by its score, and the same difference in every seed is a difference.
        ({"x": np.array([3.0]), "y": np.array([4.0]), "z": np.array([3.0])}, {"y": 1, "x": 2, "z": 2}),
        ({"x": np.array([3.0, 5.0]), "y": np.array([4.0, 6.0])}, {"y": 1, "x": 2}),
    ],
)
def test_ranks(scores: dict[str, np.ndarray], wanted: dict[str, int]) -> None:
    assert {name: place.rank for name, place in ranks(scores).items()} == wanted


SIZES = tuple(2**power for power in range(4, 15))
X = np.log(np.array(SIZES, dtype=float))


def end(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return crossing(x, y, 0.5)


def falling(at: float, seeds: int = 6, noise: float = 0.0) -> np.ndarray:
    """A measure [sizes, seeds] that crosses one half at a size."""
    rng = np.random.default_rng(int(at))
    shift = rng.normal(0.0, noise, seeds)
    found: np.ndarray = np.clip(0.5 - 0.1 * (X[:, None] - np.log(at) - shift), 0.0, 1.0)
    return found


class TestLaw:
    def models(self) -> list[ModelSpec]:
        return [ModelSpec("encoder", w, h, d) for w in (16, 32, 64) for h in (1, 2) for d in (1, 2, 4)]

    def test_a_law_is_found_again(self) -> None:
        curves = {m: falling(8.0 * m.width**0.9 * m.heads**-0.3 * m.depth**0.5) for m in self.models()}
        law = fit_power_law(X, curves, end)
        assert law["used"] == law["models"] == 18
        exponents = {name: one["mean"] for name, one in law["exponents"].items()}
        assert exponents == pytest.approx({"width": 0.9, "heads": -0.3, "depth": 0.5}, abs=1e-6)
        assert law["constant"] == pytest.approx(8.0)
        assert law["r2"] == pytest.approx(1.0)

    def test_intervals_hold_the_truth_and_widen_with_noise(self) -> None:
        laws = [
            fit_power_law(X, {m: falling(8.0 * m.width**0.9, noise=noise) for m in self.models()}, end)
            for noise in (0.1, 0.8)
        ]
        narrow, wide = (law["exponents"]["width"] for law in laws)
        assert narrow["low"] <= 0.9 <= narrow["high"]
        assert wide["high"] - wide["low"] > 2 * (narrow["high"] - narrow["low"]) > 0

    def test_models_beyond_the_sizes_are_counted_and_left_out(self) -> None:
        curves = {m: falling(64.0 * m.width if m.width < 64 else 1e9) for m in self.models()}
        law = fit_power_law(X, curves, end)
        assert (law["used"], law["beyond"]) == (12, 6)
        assert law["exponents"]["width"]["mean"] == pytest.approx(1.0, abs=1e-6)

    def test_what_does_not_vary_has_no_exponent_and_too_few_models_no_law(self) -> None:
        some = [ModelSpec("encoder", w, 1, 1) for w in (16, 32)]
        law = fit_power_law(X, {m: falling(4.0 * m.width) for m in some}, end)
        assert list(law["exponents"]) == ["width"]
        none = fit_power_law(X, {m: falling(1e9) for m in some}, end)
        assert (none["exponents"], none["beyond"]) == (None, 2)


class TestLayers:
    def test_straight_lines_are_forecast(self) -> None:
        slopes = np.array([0.1, 0.6, 0.3])
        entropy = (0.2 + slopes * X[:, None])[..., None].repeat(2, axis=2)
        top = np.full_like(entropy, 0.5)
        found = layer_slopes(SIZES, entropy, top)
        assert found is not None
        assert found["measured"] == pytest.approx(slopes.tolist())
        assert found["forecast"] == pytest.approx(slopes.tolist())
        assert (found["first_measured"], found["first_forecast"]) == (1, 1)

    def test_a_layer_that_breaks_later_is_not_foreseen(self) -> None:
        entropy = np.stack((0.3 * X, np.where(np.array(SIZES) <= 64, 0.1, 0.1 + 0.9 * (X - np.log(64)))), axis=1)
        found = layer_slopes(SIZES, entropy[..., None], np.full((len(SIZES), 2, 1), 0.5))
        assert found is not None
        assert (found["first_measured"], found["first_forecast"]) == (1, 0)

    def test_none_without_sizes_on_both_sides(self) -> None:
        entropy = np.ones((2, 2, 1))
        assert layer_slopes((16, 32), entropy, entropy) is None
        assert layer_slopes((128, 256), entropy, entropy) is None
