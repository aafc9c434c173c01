"""A calibration as tables: the numbers of the calibration, and heads compared at one row."""

from __future__ import annotations

import json
import math

import pytest

from sharpmax.calibration.budget import percent
from sharpmax.calibration.calibrate import CalibrationResult
from sharpmax.experiments.tables import calibrated_tables
from sharpmax.policies.basic import Constant
from sharpmax.policies.log_linear import LogLinear
from tests.calibration.small import calibrated
from tests.experiments.evaluate import tiny


@pytest.fixture(scope="module")
def found() -> CalibrationResult:
    return calibrated(tiny.model(), kinds=("constant", "rows"), keep=0.5)


def test_candidates_are_those_of_the_calibration(found: CalibrationResult) -> None:
    tables = json.loads(json.dumps(calibrated_tables(found, "tiny"), allow_nan=False))
    assert list(tables["candidates"]) == ["constant", "rows"]
    for kind, one in found.candidates.items():
        shown = tables["candidates"][kind]
        assert shown["kl"] == {name: change.kl for name, change in one.changes.items()}
        assert shown["rise"] == pytest.approx({name: percent(change.rise) for name, change in one.changes.items()})
        assert (shown["nll"], shown["strength"], shown["touched"]) == (one.nll, one.strength, one.modified_heads)
        cell = tables["validation"][kind]["8"]
        assert cell["mean"] == pytest.approx(100 * one.accuracy) == pytest.approx(shown["validation"])
        assert cell["n"] == 8
    assert tables["validation"]["as it comes"]["8"]["mean"] == pytest.approx(100 * found.before["right"])
    assert tables["chosen"] == found.chosen.kind
    assert tables["best_foldable"] == "constant"
    setting = tables["setting"]
    assert (setting["model"], setting["budget"], setting["steps"], setting["sizes"]) == ("tiny", 0.05, 4, [4, 8])


def test_a_curve_is_drawn_of_what_was_learned(found: CalibrationResult) -> None:
    curve = calibrated_tables(found, "tiny")["curve"]
    points = found.curves[found.chosen.kind]
    assert curve["nll"] == [[point["step"], point["nll"]] for point in points]
    # Texts take turns: this one is met at the second step for the first time.
    assert [step for step, _ in curve["kl/docs/64"]] == [2, 3, 4]
    assert curve["kl/chat"][-1] == [4, points[-1]["chat"]]


def test_heads_are_compared_at_the_reference_row(found: CalibrationResult) -> None:
    """β by hand of a row with n = 1,024, H/ln n = 0.5 and a top weight of 0.25."""
    heads = calibrated_tables(found, "tiny")["heads"]
    longer = math.log(1024 / 32)
    features = (1.0, longer, 0.5, 0.25, 0.25, 0.0625, math.log(2.0), 0.5 * longer, 0.25 * longer)
    touched = []
    for layer, row in enumerate(found.policy.policies):
        for head, one in enumerate(row):
            if isinstance(one, LogLinear):
                total = sum(getattr(one, n) * f for n, f in zip(LogLinear.COEFFICIENTS, features, strict=True))
                want = min(max(math.exp(total), 0.2), 12.0)
            else:
                assert isinstance(one, Constant)
                want = one.value
            assert heads["betas"][layer][head] == pytest.approx(want, rel=1e-5)
            if not one.is_identity:
                touched.append((layer, head))
    assert sorted((layer, head) for layer, head, _, _ in heads["touched"]) == touched
    distances = [abs(math.log(beta)) for _, _, _, beta in heads["touched"]]
    assert distances == sorted(distances, reverse=True)
    assert len(touched) == 4
