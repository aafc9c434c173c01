"""The paper's polynomial: its golden values, its range, its fit."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sharpmax as sm
from sharpmax.errors import OutOfRangeWarning
from sharpmax.policies.polynomial import PAPER, Polynomial
from sharpmax.stats.statistics import RowStats
from tests.policies.rows import beta_of, rows_with

anywhere = pytest.mark.filterwarnings("ignore::sharpmax.errors.OutOfRangeWarning")
GOLDEN = [(1.0, 1.270), (2.0, 2.099), (3.0, 2.250), (4.0, 2.389), (5.0, 2.294)]


class TestThePaper:
    @pytest.mark.parametrize(("entropy", "beta"), GOLDEN)
    def test_golden_values(self, entropy, beta):
        assert PAPER.value_at(entropy) == pytest.approx(beta, abs=5e-4)
        assert PAPER.beta(rows_with(entropy)).item() == pytest.approx(beta, abs=5e-4)

    @anywhere
    def test_acts_between_085_and_594_only(self):
        h = torch.linspace(0, 9, 9001, dtype=torch.float64)
        beta = PAPER.beta(rows_with(h))
        acting = h[beta > 1]
        assert acting.min().item() == pytest.approx(0.85, abs=0.005)
        assert acting.max().item() == pytest.approx(5.94, abs=0.005)
        assert (beta[(h < 0.848) | (h > 5.945)] == 1).all()
        assert PAPER.acts_on == pytest.approx((0.8486, 5.9445), abs=1e-4)

    @pytest.mark.parametrize("n", [384, 1000, 131072])
    def test_large_uniform_rows_get_nothing_and_say_so_once(self, n):
        row = torch.zeros(n)
        with pytest.warns(OutOfRangeWarning) as caught:
            beta = beta_of(PAPER, row)
        assert beta.item() == 1.0
        assert len(caught) == 1
        message = str(caught[0].message)
        assert "100.0% of the rows have entropy outside 0.5 … 5.9445" in message
        assert PAPER.describe() in message
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert beta_of(PAPER, row).item() == 1.0
            sm.softmax(row, policy="paper")


class TestWarnings:
    def test_every_policy_speaks_for_itself_and_once(self):
        for policy in (Polynomial((1.5,), (1.0, 2.0)), Polynomial((1.6,), (1.0, 2.0))):
            with pytest.warns(OutOfRangeWarning, match=r"25\.0% of the rows have entropy outside 1 … 2"):
                policy.beta(rows_with([1.5, 1.2, 1.9, 3.0]))
            policy.beta(rows_with(3.0))

    @pytest.mark.parametrize(
        ("entropy", "count"), [*((h, 9) for h in (0.0, 0.2, 0.5, 0.6, 1.5, 2.0, math.nan)), (3.0, 1)]
    )
    def test_no_word_inside_the_range_under_the_threshold_or_about_rows_without_a_choice(self, entropy, count):
        Polynomial((1.5,), fitted_on=(0.6, 2.0)).beta(rows_with(entropy, count=count))


class TestOutside:
    def test_rows_of_one_key_do_not_matter_and_rows_of_two_do(self):
        far = torch.full((4,), 7.0, dtype=torch.float64)
        stats = RowStats(torch.tensor([0, 1, 2, 3]), max=far, lse=far, mean=far, var=far)
        assert PAPER.outside(far, stats).tolist() == [False, False, True, True]

    @given(
        st.lists(st.floats(-3, 3), min_size=1, max_size=6),
        st.lists(st.floats(0, 12), min_size=1, max_size=20),
        st.sampled_from(["clamp", "extrapolate"]),
        st.floats(0, 2),
    )
    @anywhere
    def test_numpy_and_torch_say_the_same(self, coefficients, entropies, outside, threshold):
        policy = Polynomial(tuple(coefficients), (0.5, 5.0), threshold, outside)
        beta = policy.beta(rows_with(entropies))
        low, high = (0.5, 5.0) if outside == "clamp" else (-math.inf, math.inf)
        for h, found in zip(entropies, beta.tolist(), strict=True):
            powers = enumerate(reversed(coefficients))
            exact = sum(c * min(max(h, low), high) ** power for power, c in powers)
            assert found == pytest.approx(max(1.0, exact) if h > threshold else 1.0, rel=1e-9, abs=1e-9)
        np.testing.assert_allclose(beta.numpy(), policy.value_at(entropies), rtol=1e-9, atol=1e-9)
        assert (beta >= 1).all()

    @pytest.mark.parametrize(
        ("policy", "acts_on"),
        [
            (Polynomial((1.0, 0.0), (0.5, 2.0)), (1.0, math.inf)),  # held at β = 2 above
            (Polynomial((1.0, 0.0), (0.5, 2.0), outside_is="extrapolate"), (1.0, math.inf)),
            (Polynomial((-1.0, 3.0), (0.5, 2.5)), (0.5, 2.0)),
            (Polynomial((3.0,), (0.1, 0.4)), (0.5, math.inf)),
            (Polynomial((1.0,), (0.5, 2.0)), None),
            (Polynomial((-1.0, 4.0, -2.9), (0.5, 2.0)), (1.6838, math.inf)),
            (Polynomial((-1.0, 4.0, -2.9), (0.5, 5.0)), (1.6838, 2.3162)),
        ],
    )
    def test_acts_on(self, policy, acts_on):
        assert policy.acts_on == (None if acts_on is None else pytest.approx(acts_on, abs=1e-4))


@given(
    st.lists(st.floats(-2, 2), min_size=1, max_size=5),
    st.lists(st.floats(0.1, 6), max_size=10),
)
def test_recovers_the_polynomial_it_was_shown(coefficients, entropies):
    # Spread over the whole range, or nothing could tell the coefficients apart.
    x = np.concatenate([np.linspace(0.1, 6, 12), entropies])
    found = Polynomial.fit(x, np.polyval(coefficients, x), degree=len(coefficients) - 1, threshold=0.3)
    leading = (0.0,) * (len(coefficients) - len(found.coefficients))  # powers that are not there may be left out
    assert leading + found.coefficients == pytest.approx(coefficients, abs=1e-8)
    assert found.fitted_on == (x.min(), x.max())
    assert found.threshold == 0.3
    assert found.outside_is == "clamp"
