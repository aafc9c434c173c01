"""Ranks, intervals and laws against cases made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from sharpmax.experiments.compare.methods import ModelSpec
from sharpmax.experiments.compare.tables import fit_power_law, layer_slopes, ranks
from sharpmax.probing.measurement import crossing


class TestRanks:
    def test_methods_that_cannot_be_told_apart_share_one(self) -> None:
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

    def test_pairs_tell_apart_what_means_do_not(self) -> None:
        base = np.array([10.0, 50.0, 90.0, 30.0, 70.0])
        got = ranks({"worse": base, "better": base + np.array([2.0, 2.1, 1.9, 2.2, 1.8])})
        assert (got["better"].rank, got["worse"].rank) == (1, 2)

    def test_a_group_goes_by_its_leader(self) -> None:
        # b is not behind a, c is; that c is not behind b either does not help it.
        noise = np.array([1.0, -1.0, 0.5, -0.5, 0.0])
        scores = {"a": 50 + 0 * noise, "b": 49 + 2 * noise, "c": 48 + noise}
        got = ranks(scores)
        assert [got[name].rank for name in "abc"] == [1, 1, 3]

    def test_equal_scores_share_one_and_one_seed_goes_by_the_mean(self) -> None:
        same = np.array([1.0, 2.0])
        assert [one.rank for one in ranks({"x": same, "y": same.copy()}).values()] == [1, 1]
        one = ranks({"x": np.array([3.0]), "y": np.array([4.0]), "z": np.array([3.0])})
        assert {name: place.rank for name, place in one.items()} == {"y": 1, "x": 2, "z": 2}

    def test_the_same_difference_in_every_seed_is_one(self) -> None:
        got = ranks({"x": np.array([3.0, 5.0]), "y": np.array([4.0, 6.0])})
        assert (got["y"].rank, got["x"].rank) == (1, 2)


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

    def test_a_factor_that_only_varies_among_those_left_out_has_no_exponent(self) -> None:
        curves = {m: falling(4.0 * m.width if m.depth == 1 else 1e9) for m in self.models()}
        law = fit_power_law(X, curves, end)
        assert set(law["exponents"]) == {"width", "heads"}
        assert law["exponents"]["width"]["mean"] == pytest.approx(1.0, abs=1e-6)
        assert law["used"] == 6

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
