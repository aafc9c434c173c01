"""The limit of n·max p against closed forms and against simulation with fixed seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sharpmax.errors import ArgumentError
from sharpmax.theory.bounds import top_weight_limit, top_weight_limit_from_sample, weight_bounds

MANY = settings(max_examples=100, deadline=None)


def uniform_limit(beta):
    """Logits uniform on [0, 1]: E[e^βs] = (e^β − 1)/β."""
    return beta / -math.expm1(-beta)


def two_point_limit(beta, chance):
    """Logits 1 with the given chance, else 0."""
    return 1 / (chance + (1 - chance) * math.exp(-beta))


@pytest.mark.parametrize("beta", [0.1, 1.0, 5.0, 30.0])
def test_closed_forms(beta):
    uniform = top_weight_limit(beta, math.log(math.expm1(beta) / beta))
    assert uniform == pytest.approx(uniform_limit(beta), rel=1e-13)
    two_point = top_weight_limit(beta, math.log(0.25 * math.exp(beta) + 0.75))
    assert two_point == pytest.approx(two_point_limit(beta, 0.25), rel=1e-13)


@pytest.mark.parametrize("beta", [0.5, 3.0, 8.0])
def test_uniform_logits_tend_to_the_limit(softmax, beta):
    rng = np.random.default_rng(11)
    limit = uniform_limit(beta)
    errors = []
    for n in (100, 10_000, 1_000_000):
        rows = [rng.uniform(size=n) for _ in range(4)]
        errors.append(np.mean([abs(n * softmax(beta * row).max() / limit - 1) for row in rows]))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 3e-3


@pytest.mark.parametrize("chance", [0.5, 0.01])
@pytest.mark.parametrize("beta", [1.0, 6.0])
def test_two_point_logits_tend_to_the_limit(softmax, beta, chance):
    n = 1_000_000
    logits = (np.random.default_rng(5).uniform(size=n) < chance).astype(np.float64)
    limit = two_point_limit(beta, chance)
    # Four standard errors of the mean of e^βs, relative to that mean.
    slack = 4 * -math.expm1(-beta) * limit * math.sqrt(chance * (1 - chance) / n)
    assert n * softmax(beta * logits).max() == pytest.approx(limit, rel=slack)


@MANY
@given(hnp.arrays(np.float64, st.integers(1, 50), elements=st.floats(-20, 20)), st.floats(0, 5))
def test_a_sample_gives_its_own_size_times_its_largest_weight(softmax, logits, beta):
    found = top_weight_limit_from_sample(logits, beta)
    assert found == pytest.approx(len(logits) * softmax(beta * logits).max(), rel=1e-12)
    log_mean_exp = np.log(np.exp(beta * logits - beta * logits.max()).mean()) + beta * logits.max()
    assert found == pytest.approx(top_weight_limit(beta * logits.max(), log_mean_exp), rel=1e-12)


def test_knowing_the_upper_end_fixes_a_small_sample():
    samples = np.random.default_rng(7).uniform(size=(2000, 20))
    limit = uniform_limit(6.0)
    blind = top_weight_limit_from_sample(samples, 6.0)
    informed = top_weight_limit_from_sample(samples, 6.0, top=1.0)
    assert blind.shape == informed.shape == (2000,)
    np.testing.assert_allclose(informed, blind * np.exp(6.0 * (1.0 - samples.max(-1))), rtol=1e-12)
    # 1/mean is itself biased upwards for a small sample, so medians are compared.
    assert abs(np.median(informed) - limit) < abs(np.median(blind) - limit)


def test_beta_of_each_row():
    samples = np.random.default_rng(2).normal(size=(3, 50))
    betas = np.array([0.0, 1.0, 2.5])
    one_by_one = [top_weight_limit_from_sample(row, beta) for row, beta in zip(samples, betas, strict=True)]
    np.testing.assert_allclose(top_weight_limit_from_sample(samples, betas), one_by_one, rtol=1e-14)
    assert one_by_one[0] == 1.0


@MANY
@given(st.floats(0, 20), st.floats(0.001, 0.999))
def test_the_limit_is_what_the_tight_bound_allows_at_most(beta, chance):
    n = 1e12
    limit = top_weight_limit(beta, beta + math.log(chance + (1 - chance) * math.exp(-beta)))
    assert 1 <= limit <= n * weight_bounds(beta, n)[1] * (1 + 1e-3)


def test_constant_logits_keep_the_uniform_weight():
    assert top_weight_limit(3.0, 3.0) == 1.0
    assert top_weight_limit(3.0, math.nextafter(3.0, 4.0)) == 1.0  # rounding of the caller's logarithm
    assert top_weight_limit_from_sample(np.full(7, 123.0), 4.0) == 1.0


def test_extreme_logits():
    assert top_weight_limit_from_sample([0.0, 1e4], 1.0) == 2.0
    assert top_weight_limit_from_sample([-1e308, -1e308 + 1e300], 1.0) == 2.0
    assert top_weight_limit(1e4, 1e4 - 2.0) == pytest.approx(math.exp(2), rel=1e-11)
    assert top_weight_limit(1e4, 0.0) == math.inf
    assert top_weight_limit(1e308, -1e308) == math.inf


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: top_weight_limit(math.inf, 1.0), "^top: got inf"),
        (lambda: top_weight_limit(1.0, math.nan), "^log_mean_exp: got nan"),
        (lambda: top_weight_limit([1.0, 2.0], 1.5), "^log_mean_exp: got a value 0.5 above top"),
        (
            lambda: top_weight_limit(np.ones(2), np.ones(3)),
            r"^top, log_mean_exp: got shapes \(2,\) and \(3,\)",
        ),
        (lambda: top_weight_limit_from_sample(1.0), r"^logits: got shape \(\)"),
        (lambda: top_weight_limit_from_sample([]), r"^logits: got shape \(0,\)"),
        (lambda: top_weight_limit_from_sample([0.0, -math.inf]), "^logits: got -inf.*masked"),
        (lambda: top_weight_limit_from_sample([0.0, 1.0], -1.0), "^beta: got -1.0"),
        (lambda: top_weight_limit_from_sample([0.0, 1.0], 1.0, top=0.5), "^top: got a value 0.5 under"),
        (lambda: top_weight_limit_from_sample([0.0, 1.0], 1.0, top=math.inf), "^top: got inf"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()
