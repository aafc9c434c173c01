"""Curves, slopes, horizons, kinds, forecasts and sentences, from readings of heads whose every number is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sharpmax.errors import ArgumentError
from sharpmax.probing import measurement
from sharpmax.probing.capture import capture
from sharpmax.probing.findings import KINDS, RULE, Findings, chain_table, kinds_of, layers_table, verdict
from sharpmax.probing.forecast import REPLICATION, error, predict
from sharpmax.probing.inputs import ProbeInputs, task_inputs
from sharpmax.probing.measurement import Numbers, crossing, curve, curves_of, horizons_of, measure_horizons, slope
from sharpmax.tasks.registry import get_task
from tests.experiments.evaluate import tiny

SIZES = (8, 16, 32, 64, 128, 256, 512)
KEYS = {size: 8 * size for size in SIZES}
RISES = np.array([[0.0, 0.0, 0.05], [0.9, 0.6, 0.3], [0.1, 0.0, 0.5]])


def readings(
    entropy: Callable[[float], Any], top: Callable[[float], Any] = lambda n: 0.2, prompts: int = 4, noise: float = 0.0
) -> dict[int, dict[str, Numbers]]:
    """Statistics `[prompts, layers, heads]` at every size, from functions of the number of keys."""
    rng = np.random.default_rng(0)
    found = {}
    for size, keys in KEYS.items():
        values = np.asarray(entropy(keys), dtype=float)
        shape = (prompts, *values.shape)
        found[size] = {
            "entropy": values + noise * rng.normal(size=shape),
            "top": np.clip(np.broadcast_to(top(keys), shape) + 0.1 * noise * rng.normal(size=shape), 0.0, 1.0),
            **{name: np.full(shape, value) for name, value in (("spread", 9.0), ("sink", 0.1), ("local", 0.1))},
            "count": np.full(shape, float(keys)),
        }
    return found


def findings(read: dict[int, dict[str, Numbers]], task: str = "kv") -> Findings:
    """Findings with a forecast by lines."""
    curves = {name: np.stack([one[name].mean(0) for one in read.values()]) for name in ("entropy", "top", "count")}
    inputs = ProbeInputs(task, "items", {size: [] for size in SIZES})
    return Findings.of(inputs, read, True, predict(curves, SIZES, 64), seed=0)


def rising(n: float) -> Numbers:
    return 1.0 + RISES * math.log(n / KEYS[8])


def falling(n: float) -> Numbers:
    """Heads that rise lose their top weight; it is a half at 300 keys in the first of them."""
    return np.clip(0.5 - 0.2 * RISES * math.log(n / 300), 0.0, 1.0)


def test_the_slope_is_that_of_least_squares() -> None:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=6), rng.normal(size=(6, 2, 3))
    np.testing.assert_allclose(slope(x[:, None, None], y), np.polyfit(x, y.reshape(6, -1), 1)[0].reshape(2, 3))
    # A window of fixed length has no n to disperse with; 0/0 must not become a number.
    assert np.isnan(slope(np.full((3, 1, 1), 5.0), np.array([1.0, 2.0, 3.0])[:, None, None])).all()


def test_a_nested_curve_is_not_moved_by_which_passages_are_left() -> None:
    """Each passage has a level of its own; the two that are read at large sizes happen to be the low ones."""
    levels = np.sort(np.random.default_rng(2).normal(3.0, 1.0, size=8))
    rise = {size: 0.3 * place for place, size in enumerate(SIZES)}
    read = {
        size: {
            "entropy": (levels[: 8 if size <= 64 else 2] + rise[size])[:, None, None],
            "count": np.full((1, 1), 20.0),
        }
        for size in SIZES
    }
    paired = curve(read, "entropy", nested=True)[:, 0, 0]
    np.testing.assert_allclose(paired, levels.mean() + np.array(list(rise.values())))
    assert abs(curve(read, "entropy", nested=False)[-1, 0, 0] - paired[-1]) > 1.0
    # It may add up to more than so many keys can have; e^H must not.
    steep = readings(lambda n: np.array([[1.2 * math.log(n)]]))
    curves = curves_of(steep, nested=True)
    assert (curves["effective"] <= curves["count"] * (1 + 1e-12)).all()


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
    np.testing.assert_allclose(crossing(np.arange(4.0), np.array(values), 0.5), expected)


def test_intervals_hold_what_is_true_and_shrink_with_prompts() -> None:
    """Entropy rises by 0.4 per ln n; the top weight is a half at 500 keys."""

    def found(prompts: int) -> Numbers:
        top = lambda n: 0.5 - 0.1 * math.log(n / 500)  # noqa: E731
        fits = findings(readings(lambda n: np.full((1, 8), 0.4 * math.log(n)), top, prompts, noise=0.2)).fits
        return np.stack([fits.slope[:, 0], fits.horizon[:, 0]])

    few, many = found(6), found(24)
    for (at, low, high), expected in zip(many, (0.4, 500.0), strict=True):
        assert at == pytest.approx(expected, rel=0.2)
        assert ((low < expected) & (expected < high)).mean() >= 0.75
        assert ((low <= at) & (at <= high)).all()
    assert (many[0, 2] - many[0, 1]).mean() < 0.6 * (few[0, 2] - few[0, 1]).mean()
    assert np.isnan(found(1)[:, 1:]).all()  # one prompt has no interval


def test_measured_horizons_of_weights_that_fall_on_a_straight_line() -> None:
    line = lambda n: 1.0 - 0.25 * np.log2(n / 64)  # noqa: E731
    tops = lambda n: np.array([[line(n), 0.9, 0.1, 1.2 - line(n)]])  # noqa: E731
    found = horizons_of(readings(lambda n: np.full((1, 4), math.log(n)), tops, prompts=10), 0.6, "kv")
    assert [one.kind for one in found.heads] == ["at", "beyond", "before", "beyond"]
    assert [found.heads[0].tokens, found.heads[0].low] == pytest.approx([64 * 2**1.6] * 2)
    assert all(one.tokens is None for one in found.heads[1:])
    assert [one.slope for one in found.heads] == pytest.approx([1.0] * 4)
    assert (found.shortest, found.longest, found.prompts, found.sizes) == (64, 4096, 70, SIZES)
    assert (found.heads[0].spread, found.heads[0].widest) == (9.0, 9.0)


def test_a_model_is_measured_as_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The spread and the lengths are those of the last rows, captured again by hand."""
    model, tokenizer = tiny.model(), tiny.tokenizer()
    steps: list[tuple[int, int]] = []
    found = measure_horizons(model, tokenizer, 0.3, seed=4, progress=lambda *one: steps.append(one))
    assert [(one.layer, one.head) for one in found.heads] == [(i, j) for i in range(2) for j in range(4)]
    assert steps[-1][0] == steps[-1][1]
    assert len(steps) == found.prompts
    passages = task_inputs(get_task("kv"), tokenizer, tiny.ROOM, None, None, 4).passages
    lengths = [one.length for ones in passages.values() for one in ones]
    assert (found.shortest, found.longest) == (min(lengths), max(lengths))
    spreads = []
    for one in passages[max(passages)]:
        with capture(model) as seen:
            model(**one.inputs)
        spreads.append(seen.stack("spread")[:, 0, :, 0].double().numpy())
    for head in found.heads:
        assert head.spread == pytest.approx(np.mean(spreads, axis=0)[head.layer, head.head], rel=1e-4)
        assert head.widest >= head.spread
    monkeypatch.setattr(measurement, "LONGEST", 150)
    with pytest.raises(ArgumentError, match=r"^model: got kv prompts of .* two sizes, up to 150; .*--certified-only"):
        measure_horizons(model, tokenizer)


def curves(entropy: Callable[[float], Any], top: Callable[[float], Any] = lambda n: 0.3) -> dict[str, Numbers]:
    values = {"entropy": entropy, "top": top, "count": lambda n: n}
    return {name: np.stack([one(KEYS[size]) * np.ones_like(RISES) for size in SIZES]) for name, one in values.items()}


def bent(n: float) -> Numbers:
    """Straight up to 64 items; then something happens that no curve shows."""
    return rising(n) + (1.5 * math.log(n / 512) if n > 512 else 0.0)


def change(of: dict[str, Numbers], base: int, to: int, off: float = 0.0) -> dict[str, Numbers]:
    places = SIZES.index(base), SIZES.index(to)
    return {name: of[name][places[1]] - of[name][places[0]] + off for name in ("entropy", "top")}


def test_a_straight_line_is_forecast_exactly_without_a_look_at_larger_sizes() -> None:
    known = curves(rising, lambda n: 0.3)
    for name in ("entropy", "top"):
        known[name][SIZES.index(64) + 1 :] = np.nan
    found = predict(known, SIZES, 64)
    assert (found.method, found.fitted, list(found.values)) == ("line", (8, 16, 32, 64), [128, 256, 512])
    np.testing.assert_allclose(found.values[512]["entropy"], rising(KEYS[512]))
    np.testing.assert_allclose(found.values[512]["top"], 0.3)


@pytest.mark.parametrize(
    ("off", "reached", "chosen"), [(0.0, (128, 256, 512), True), (0.7, (128, 256, 512), False), (0.0, (128,), False)]
)
def test_key_replication_is_chosen_where_it_does_better_on_what_is_known(
    off: float, reached: tuple[int, ...], chosen: bool
) -> None:
    """Not where it is wrong at the largest known size, nor where it does not reach every size."""
    known = curves(bent)
    known["entropy"][0] += 0.05  # the line is exact at 64, too; a hair of noise makes it the second best
    changes = {(32, 64): change(known, 32, 64, off), **{(64, to): change(known, 64, to) for to in reached}}
    found = predict(known, SIZES, 64, changes)
    assert (found.method == REPLICATION) == chosen
    assert (found.decided[REPLICATION] < found.decided["line"]) == (off == 0.0)
    assert set(found.values) == {128, 256, 512}
    if chosen:
        np.testing.assert_allclose(found.values[512]["entropy"], bent(KEYS[512]))
        measured = {name: known[name][-1] for name in ("entropy", "top")}
        assert error(found.values[512], measured)["entropy"]["median"] < 1e-9
        assert error(found.others["line"][512], measured)["entropy"]["median"] > 1.0


@pytest.mark.parametrize("name", ["line", "the largest size again"])
def test_forecasts_are_entropies_and_weights(name: str) -> None:
    steep = curves(lambda n: 0.2 + 1.4 * (math.log(n) - 4.0), lambda n: min(1.0, 40.0 / n))
    found = predict(steep, SIZES, 64).others[name][512]
    assert ((found["entropy"] >= 0.0) & (found["entropy"] <= math.log(KEYS[512]))).all()
    assert ((found["top"] >= 1.0 / KEYS[512]) & (found["top"] <= 1.0)).all()


def test_errors_leave_out_heads_without_numbers() -> None:
    forecast = dict.fromkeys(("entropy", "top"), np.array([[1.0, np.nan, 3.0]]))
    found = error(forecast, dict.fromkeys(("entropy", "top"), np.array([[1.5, 1.0, 2.0]])))
    assert found["heads"] == 2
    assert found["entropy"] == {"median": 0.75, "p90": pytest.approx(0.95), "bias": 0.25}
    nothing = dict.fromkeys(("entropy", "top"), np.full((1, 3), np.nan))
    assert error(forecast, nothing)["entropy"] == dict.fromkeys(("median", "p90", "bias"))


def test_three_sentences() -> None:
    other = findings(readings(lambda n: np.array([[0.1, 0.1]])), task="text")
    first, second, third = verdict("some-model", [findings(readings(rising, falling)), other])
    low, high = (math.exp(1.0 + 0.55 * math.log(n / KEYS[8])) for n in (KEYS[8], KEYS[512]))
    assert first == (
        "4 (44%) of some-model's 9 attention heads lose focus as inputs grow from 8 to 512 items (64 to 4,096 tokens): "
        f"the median of them spreads its weight over {low:.1f} tokens at first and {high:,.0f} at last; on text (8 to "
        "512 items (64 to 4,096 tokens)) it is 0 (0%)."
    )
    assert second == (
        "Layers 1, 2 and 0 of 3 disperse most; 9 heads have half of their weight on one token in the smallest inputs, "
        "6 of them no longer in the largest (median: from 300 tokens on)."
    )
    assert third == (
        "Measured up to 64 items, the forecast of entropy at 512 is off by 0.00 nats (median head) and 0.00 "
        "(90th percentile)."
    )


def test_sentences_about_a_model_that_keeps_its_focus_and_a_bad_forecast() -> None:
    kept = readings(lambda n: np.full((2, 2), 1.0 - 0.05 * math.log(n / 64)), lambda n: np.full((2, 2), 0.8))
    first, second, _ = verdict("m", [findings(kept)])
    assert (
        first == "0 (0%) of m's 4 attention heads lose focus as inputs grow from 8 to 512 items (64 to 4,096 tokens)."
    )
    assert second == (
        "No layer loses focus on average; 4 heads have half of their weight on one token in the smallest inputs, and "
        "all of them still do in the largest."
    )
    jump = readings(lambda n: np.full((2, 2), 1.0 if n <= KEYS[64] else 4.0))
    assert "at 512 is off by 3.00 nats" in verdict("m", [findings(jump)])[2]


def test_layers_are_ranked_by_slope_and_chained_by_correlation() -> None:
    table = layers_table(findings(readings(rising)))
    assert {layer: about["rank"] for layer, about in table.items()} == {"0": 3, "1": 1, "2": 2}
    assert table["1"]["slope"] == pytest.approx(0.6)
    assert table["1"]["kinds"] == {"dispersing": 3}
    rises = np.array([0.1, 0.4, 0.2, 0.7, 0.3, 0.5])[:, None]
    chain = chain_table(findings(readings(lambda n: 1.0 + rises * math.log(n / 64))))
    assert chain["next"] == pytest.approx(np.corrcoef(rises[:-1, 0], rises[1:, 0])[0, 1])
    assert chain["pairs"] == 5
    assert chain["low"] < chain["next"] < chain["high"]
    assert chain_table(findings(readings(rising)))["next"] is None  # two pairs are no correlation


@pytest.mark.parametrize(
    ("expected", "given"),
    [
        ("sharp", {}),
        ("sharp", {"slope": -0.5}),
        ("sharp", {"slope": 0.25 - 1e-9}),
        ("dispersing", {"slope": 0.25}),
        ("dispersing", {"slope": 0.6, "entropy": 4.0}),
        ("uniform", {"slope": 0.99, "entropy": math.log(900.0)}),
        ("uniform", {"slope": 0.99, "entropy": math.log(500.1), "local": 0.6}),
        ("sink", {"sink": 0.5, "slope": 0.6}),
        ("local", {"local": 0.5, "slope": 0.6}),
        ("dispersing", {"local": 0.9, "slope": 0.6, "causal": False}),
        ("dispersing", {"local": 0.9, "slope": 0.6, "count": 20.0, "entropy": 1.5}),
        ("unknown", {"slope": math.nan}),  # NaN compares as False: such a head must not be called sharp
        ("unknown", {"entropy": math.nan}),
    ],
)
def test_kinds_of_heads(expected: str, given: dict[str, Any]) -> None:
    head = {"slope": 0.0, "causal": True, "entropy": 1.0, "sink": 0.1, "local": 0.1, "count": 1000.0} | given
    rise, causal = np.array([[head.pop("slope")]]), head.pop("causal")
    assert kinds_of(rise, {name: np.array([[value]]) for name, value in head.items()}, causal) == expected
    assert set(RULE) == set(KINDS)
