"""What all policies share: being values, JSON, one line for people."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from typing import Any

import pytest
import torch

import sharpmax as sm
from sharpmax.policies.base import Policy, policy_from_dict
from sharpmax.policies.basic import Constant, Curve, LogLength, LogScale, OutputScale, PerFrequency
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.log_linear import LogLinear
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.polynomial import PAPER, Polynomial
from tests.policies.rows import beta_of

EXAMPLES: dict[str, Policy] = {
    "constant": Constant(0.1 + 0.2),
    "polynomial": Polynomial((1 / 3, -0.0, 5e-324), (0.1, 7.0), 0.25, "extrapolate"),
    "log-length": LogLength(16, fitted_on=(2, 16)),
    "entropy-target": EntropyTarget(0.7, floor=0.5, ceiling=50.0),
    "curve": Curve((0.0, 1 / 3, 2.0), (1.0, 1.0, 1.7)),
    "log-scale": LogScale(0.1, 8192.0, steps=True, shift=1.0),
    "log-linear": LogLinear(0.1 + 0.2, 5e-324, -1 / 3, 2, -3, 1e-9, 7e9, 0.5, -0.5, reference=64, floor=0.1, ceiling=3),
    "output-scale": OutputScale(0.1 + 0.2, LogLength(7)),
    "per-frequency": PerFrequency((0.1 + 0.2, 1.0, 5e-324)),
    "per-head": PerHead(((PAPER, Constant(2.0)), (LogLength(7), EntropyTarget(1.0)))),
}
every_kind = pytest.mark.parametrize("policy", EXAMPLES.values(), ids=EXAMPLES.keys())


def test_every_kind_is_an_example_here():
    """A new kind of policy has to join these tests."""
    assert {policy.kind for policy in EXAMPLES.values()} == set(EXAMPLES)
    kinds = {getattr(sm.policies, name) for name in sm.policies.__all__ if name != "Policy"}
    public = {kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Policy)}
    assert {type(policy) for policy in EXAMPLES.values()} == public


class TestJson:
    @every_kind
    def test_a_file_keeps_every_bit(self, policy, tmp_path):
        path = policy.save(tmp_path / "new" / "folder" / "policy.json")
        for given_path in (path, str(path)):
            again = sm.load_policy(given_path)
            # The text of a float is exact, and unlike == it tells −0.0 from 0.0.
            assert again == policy
            assert again.to_json() == policy.to_json()
            assert again.to_json() + "\n" == path.read_text(encoding="utf-8")

    def test_fields_with_defaults_may_be_missing(self):
        assert policy_from_dict({"schema": 1, "kind": "entropy-target", "target": 0.5}) == EntropyTarget(0.5)


@pytest.mark.parametrize(
    "policy", [one for one in EXAMPLES.values() if not isinstance(one, (OutputScale, PerFrequency))], ids=repr
)
@pytest.mark.filterwarnings("ignore::sharpmax.errors.OutOfRangeWarning")
def test_rows_are_on_their_own(policy):
    """Rows of fewer than two keys have β = 1, a NaN stays in its row, and what a mask hides does not count."""
    policy = PerHead((policy.policies[0],)) if isinstance(policy, PerHead) else policy
    rows = torch.randn(2, 5, 20, dtype=torch.float64) * 2
    clean = beta_of(policy, rows)
    for filler in (0.0, 1e4, -math.inf, math.nan):
        padded = torch.cat([rows, torch.full((2, 5, 7), filler, dtype=torch.float64)], -1)
        torch.testing.assert_close(beta_of(policy, padded, torch.arange(27) < 20), clean, rtol=1e-9, atol=0)
    visible = torch.ones(2, 5, 20, dtype=torch.bool)
    visible[:, 1, 1:] = visible[:, 3] = False
    few = beta_of(policy, rows, visible)
    assert (few[:, [1, 3]] == 1.0).all()
    torch.testing.assert_close(few[:, [0, 2, 4]], clean[:, [0, 2, 4]])
    rows[:, 2, 4] = math.nan
    broken = beta_of(policy, rows)
    assert torch.equal(broken[:, 2].isnan(), torch.tensor([True, True]) & torch.tensor(reads_logits(policy)))
    torch.testing.assert_close(broken[:, [0, 1, 3, 4]], clean[:, [0, 1, 3, 4]])


def reads_logits(policy: Policy) -> list[bool]:
    """Whether β depends on more than the number of keys, in each of two heads."""
    heads = policy.policies[0] if isinstance(policy, PerHead) else (policy,) * 2
    return [bool(one.needs - {"count"}) for one in heads]


class TestValue:
    @every_kind
    def test_is_frozen_and_hashable(self, policy):
        for field in dataclasses.fields(policy):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(policy, field.name, 1)
        for other in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy)), dataclasses.replace(policy)):
            assert other == policy
            assert hash(other) == hash(policy)
            assert len({other, policy}) == 1
        assert len(set(EXAMPLES.values())) == len(EXAMPLES)

    @every_kind
    def test_lists_become_tuples(self, policy):
        """Given as lists, a policy must still be hashable and nobody else's to change."""
        as_lists = {
            field.name: list(value) if isinstance(value := getattr(policy, field.name), tuple) else value
            for field in dataclasses.fields(policy)
        }
        again = type(policy)(**as_lists)
        assert again == policy
        assert hash(again) == hash(policy)

    @pytest.mark.parametrize(
        ("policy", "line"),
        [
            (Polynomial((2.0,), (0.0, 5.0)), "β = max(1, 2) for H > 0.5, clamp outside"),
            (
                Polynomial((-1.0, 0.5, 2.0), (0.0, 5.0), outside_is="extrapolate"),
                "β = max(1, -1·H^2 +0.5·H +2) for H > 0.5, extrapolate outside",
            ),
            (LogScale(0.4, bias=0.0), "β = 0.4·ln n"),
            (LogScale(0.1, 262144.0), "β = 1 + 0.1·ln⁺(n/262144)"),
            (LogScale(0.1, 16384, steps=True, shift=1), "β = 1 + 0.1·ln(1 + ⌊(n − 1)/16384⌋)"),
            (PerHead.of(Constant, value=[[1.0, 1.0]] * 3), "3 layers × 2 heads, kinds: constant, 6 heads left alone"),
        ],
        ids=lambda x: x.kind if isinstance(x, Policy) else "",
    )
    def test_descriptions(self, policy, line):
        assert policy.describe() == line

    @pytest.mark.parametrize(
        ("whole", "floats"),
        [
            (Constant(0), Constant(0.0)),
            (LogLength(2, 0, (1, 3)), LogLength(2.0, 0.0, (1.0, 3.0))),
            (EntropyTarget(0, 2, 3), EntropyTarget(0.0, 2.0, 3.0)),
            (Polynomial((1, 2), (0, 3), 0), Polynomial((1.0, 2.0), (0.0, 3.0), 0.0)),
            (Curve((0, 1), (0, 0)), Curve((0.0, 1.0), (0.0, 0.0))),
            (
                LogLinear(1, 2, reference=1, floor=1, ceiling=3),
                LogLinear(1.0, 2.0, reference=1.0, floor=1.0, ceiling=3.0),
            ),
        ],
        ids=repr,
    )
    def test_whole_numbers_become_floats(self, whole, floats):
        """Kernels take floats, and a saved policy must read back the same. Limits are allowed values."""
        assert repr(whole) == repr(floats)

    def test_a_kind_of_ones_own_joins_in(self, monkeypatch):
        """Subclassing with a `kind` is all it takes to be used, saved and loaded."""
        from sharpmax.policies import base

        monkeypatch.setattr(base, "_kinds", dict(base._kinds))

        @dataclasses.dataclass(frozen=True)
        class Half(Policy):
            kind = "test-half"
            needs = frozenset({"count"})
            factor: float = 0.5

            def describe(self) -> str:
                return "half"

            def rule(self, xp: Any, stats: Any, remeasure: Any) -> Any:
                return xp.ones_like(xp.cast(stats.count, xp.widest)) * self.factor

        row = torch.randn(7, dtype=torch.float64)
        torch.testing.assert_close(sm.softmax(row, policy=Half()), (row / 2).softmax(-1))
        assert policy_from_dict(Half(0.25).to_dict()) == Half(0.25)
