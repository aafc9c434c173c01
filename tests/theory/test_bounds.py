"""Bounds on weights, entropy and spread, horizons and limits against exact arithmetic and random rows and heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import sharpmax.theory as theory
from sharpmax.theory.bounds import (
    entropy_ceiling,
    entropy_floor,
    horizon,
    loose_weight_bounds,
    required_spread,
    spread_from_product,
    spread_from_weights,
    top_weight_limit,
    top_weight_limit_from_sample,
    weight_bounds,
)

MANY = settings(max_examples=50, deadline=None)
LOGITS = hnp.arrays(np.float64, st.integers(1, 40), elements=st.floats(-20, 20))
SPREADS = [0.0, 1e-300, 1e-12, 1.0, 40.0, 400.0, 690.0, 720.0, 745.0, 760.0, 1000.0, 1400.0, 1e4]


def softmax(logits: Any) -> Any:
    unnormalised = np.exp(logits - np.max(logits))
    return unnormalised / unnormalised.sum()


def entropy_of(logits: Any) -> float:
    # lse(s) − E[s] relative to the largest logit: no term is negative, so small entropies keep their digits.
    below = np.sort(logits - np.max(logits))
    return float(np.log1p(np.exp(below[:-1]).sum()) - (softmax(below) * below).sum())


@MANY
@given(LOGITS, st.floats(0, 3))
def test_no_weight_leaves_the_bounds(logits, beta):
    weights, n = softmax(beta * logits), len(logits)
    spread = beta * np.ptp(logits)
    (low, high), (loose_low, loose_high) = weight_bounds(spread, n), loose_weight_bounds(spread, n)
    assert loose_low * (1 - 1e-12) <= low <= weights.min() * (1 + 1e-12)
    assert weights.max() * (1 - 1e-12) <= high <= loose_high * (1 + 1e-12)


@pytest.mark.parametrize("n", [1, 1.0 + 1e-9, 1.25, 1.5, 2, 2.5, 3, 1000, 10**18, 10**100, 10**300])
@pytest.mark.parametrize("spread", SPREADS)
def test_bounds_agree_with_exact_arithmetic(spread, n):
    """Results that fit into float64 survive intermediates that do not; sizes need not be whole."""
    with mpmath.workdps(400):
        e, many = mpmath.exp(spread), mpmath.mpf(n)
        exact = [1 / (1 + (many - 1) * e), e / (e + many - 1), 1 / (many * e), e / many]
        expected = [float(x) for x in exact]
    computed = [*weight_bounds(spread, n), *loose_weight_bounds(spread, n)]
    for ours, theirs in zip(computed, expected, strict=True):
        # Subnormal numbers hold few digits.
        assert ours == pytest.approx(theirs, rel=1e-13 if theirs > 1e-300 else 1e-2, abs=1e-323)


@pytest.mark.parametrize("mass", [1e-300, 1e-6, 0.1, 0.25, 0.5, 0.9, 1 - 2.0**-40])
@pytest.mark.parametrize("spread", [*SPREADS, 1e308])
def test_horizon_and_required_spread_agree_with_exact_arithmetic(spread, mass):
    with mpmath.workdps(400):
        odds = (1 - mpmath.mpf(mass)) / mpmath.mpf(mass)
        exact = 1 + mpmath.exp(spread) * odds
        fits = exact < mpmath.mpf(1.7e308)
    assert horizon(spread, mass) == (pytest.approx(float(exact), rel=1e-13) if fits else math.inf)
    for n in (1, 2, 4, 5, 17, 1e15, 1e300):
        with mpmath.workdps(400):
            needed = mpmath.log((mpmath.mpf(n) - 1) / odds) if n > 1 else mpmath.mpf(0)
        assert required_spread(n, mass) == pytest.approx(float(max(needed, 0)), rel=1e-13, abs=1e-12)


@MANY
@given(st.floats(0, 6), st.floats(0.05, 0.95))
def test_the_horizon_parts_the_sizes_that_can_from_those_that_cannot(spread, mass):
    last = math.floor(horizon(spread, mass))
    tops = [softmax(np.r_[spread, np.zeros(n - 1)])[0] for n in (last, last + 1)]
    assert tops[0] >= mass * (1 - 1e-12)
    assert tops[1] < mass * (1 + 1e-12)


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0, 2.0, 3.0, 4.0, 17.0, 60.0])
def test_the_floor_is_the_least_entropy_of_all_two_level_rows(spread):
    for n in range(2, 70):
        best = min(entropy_of(np.where(np.arange(n) < j, spread, 0.0)) for j in range(1, n))
        assert entropy_floor(spread, n) == pytest.approx(best, rel=1e-12), n


@MANY
@given(LOGITS, st.floats(0, 2), st.floats(0, 3))
def test_no_row_within_the_spread_falls_under_the_floor(logits, beta, slack):
    spread, entropy = beta * np.ptp(logits), entropy_of(beta * logits)
    assert entropy >= entropy_floor(spread, len(logits)) * (1 - 1e-12)
    assert entropy >= entropy_floor(spread + slack, len(logits)) * (1 - 1e-12)
    assert entropy <= entropy_ceiling(len(logits)) * (1 + 1e-12)


@pytest.mark.parametrize("n", [2, 7, 10**6, 10**18, 10**300])
@pytest.mark.parametrize("spread", [1e-9, 1e-3, 1.0, 30.0, 690.0, 700.0, 744.0, 760.0, 1000.0, 1e4])
def test_extreme_floors_agree_with_exact_arithmetic(spread, n):
    """The least two-level entropy near the real minimiser, in 400 digits."""
    with mpmath.workdps(400):
        d = mpmath.mpf(spread)
        u = -mpmath.expm1(-d)
        middle = int(n * mpmath.exp(-d) * (d - u) / u**2)
        best = mpmath.inf
        for j in {min(max(middle + step, 1), n - 1) for step in range(-2, 4)}:
            odds = (n - j) * mpmath.exp(-d) / j
            best = min(best, mpmath.log(j) + mpmath.log1p(odds) + d * odds / (1 + odds))
    assert entropy_floor(spread, n) == pytest.approx(float(best), rel=1e-13, abs=1e-300)


@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0, 20.0])
def test_the_entropy_lost_is_bounded_whatever_the_size_and_tends_to_that_bound(spread):
    u = -math.expm1(-spread)
    most = spread / u - 1 - math.log(spread / u)
    n = np.array([2.0, 30.0, 1e5, 1e9, 1e15])
    lost = entropy_ceiling(n) - entropy_floor(spread, n)
    assert (lost <= most + 3e-8).all()
    assert lost[-1] == pytest.approx(most, abs=3e-8)


def uniform_limit(beta):
    """Logits uniform on [0, 1]: E[e^βs] = (e^β − 1)/β."""
    return beta / -math.expm1(-beta)


@pytest.mark.parametrize("beta", [0.1, 1.0, 5.0, 30.0])
def test_limits_known_in_closed_form(beta):
    uniform = top_weight_limit(beta, math.log(math.expm1(beta) / beta))
    assert uniform == pytest.approx(uniform_limit(beta), rel=1e-13)
    two_point = top_weight_limit(beta, math.log(0.25 * math.exp(beta) + 0.75))
    assert two_point == pytest.approx(1 / (0.25 + 0.75 * math.exp(-beta)), rel=1e-13)
    assert top_weight_limit(beta, beta) == 1.0


@MANY
@given(LOGITS, st.floats(0, 5))
def test_a_sample_gives_its_own_size_times_its_largest_weight(logits, beta):
    found = top_weight_limit_from_sample(logits, beta)
    assert found == pytest.approx(len(logits) * softmax(beta * logits).max(), rel=1e-12)
    log_mean_exp = np.log(np.exp(beta * logits - beta * logits.max()).mean()) + beta * logits.max()
    assert found == pytest.approx(top_weight_limit(beta * logits.max(), log_mean_exp), rel=1e-12)


def test_samples_row_by_row_and_their_upper_end():
    samples = np.random.default_rng(7).uniform(size=(2000, 20))
    blind = top_weight_limit_from_sample(samples, 6.0)
    informed = top_weight_limit_from_sample(samples, 6.0, top=1.0)
    np.testing.assert_allclose(informed, blind * np.exp(6.0 * (1.0 - samples.max(-1))), rtol=1e-12)
    # 1/mean is itself biased upwards for a small sample, so medians are compared.
    assert abs(np.median(informed) - uniform_limit(6.0)) < abs(np.median(blind) - uniform_limit(6.0))
    betas = np.array([0.0, 1.0, 2.5])
    one_by_one = [top_weight_limit_from_sample(row, beta) for row, beta in zip(samples, betas, strict=False)]
    np.testing.assert_allclose(top_weight_limit_from_sample(samples[:3], betas), one_by_one, rtol=1e-14)
    assert one_by_one[0] == 1.0
    assert top_weight_limit_from_sample(samples[1]) == one_by_one[1]


def test_extreme_logits():
    assert top_weight_limit_from_sample([0.0, 1e4], 1.0) == 2.0
    assert top_weight_limit_from_sample([-1e308, -1e308 + 1e300], 1.0) == 2.0
    assert top_weight_limit(1e4, 1e4 - 2.0) == pytest.approx(math.exp(2), rel=1e-11)
    assert top_weight_limit(1e4, 0.0) == math.inf
    assert top_weight_limit(1e308, -1e308) == math.inf
    # Rounding of the caller's logarithm is forgiven, in proportion to the logits.
    assert top_weight_limit(3.0, math.nextafter(3.0, 4.0)) == 1.0
    assert top_weight_limit(1e6, 1e6 + 1e-5) == 1.0


SEEDS = st.integers(0, 2**32 - 1)
SIZES = st.integers(1, 8)
BOTH = pytest.mark.parametrize("bound", [spread_from_product, spread_from_weights])


def random_matrices(seed, d, dy, dx):
    rng = np.random.default_rng(seed)
    return rng, rng.normal(size=(d, dy)), rng.normal(size=(d, dx))


def spread_of(Q, K, y, x, scale):
    """Spread of the logits of one query y `[Dy]` over inputs x `[n, Dx]`."""
    return np.ptp(scale * (x @ K.T) @ (Q @ y))


@MANY
@given(SEEDS, SIZES, SIZES, SIZES, st.integers(1, 20), st.sampled_from([0.0, 0.125, 1.0, 3.7]))
def test_no_head_spreads_further(seed, d, dy, dx, n, scale):
    rng, Q, K = random_matrices(seed, d, dy, dx)
    y, x = rng.normal(size=dy), rng.normal(size=(n, dx)) * rng.exponential(size=(n, 1))
    norms = np.linalg.norm(y), np.linalg.norm(x, axis=1).max()
    product, separate = spread_from_product(Q, K, *norms, scale), spread_from_weights(Q, K, *norms, scale)
    assert spread_of(Q, K, y, x, scale) <= product * (1 + 1e-12)
    assert product <= separate * (1 + 1e-12)


@MANY
@given(SEEDS, SIZES, SIZES, SIZES, st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0.1, 4))
def test_both_bounds_on_the_spread_are_attained(seed, d, dy, dx, query_norm, key_norm, scale):
    """That of the product by aligned inputs, that of the norms by aligned matrices too."""
    _, Q, K = random_matrices(seed, d, dy, dx)
    left, _, right = np.linalg.svd(Q.T @ K)
    spread = spread_of(Q, K, query_norm * left[:, 0], key_norm * np.stack([right[0], -right[0]]), scale)
    assert spread_from_product(Q, K, query_norm, key_norm, scale) == pytest.approx(spread, rel=1e-12)
    q_left, _, q_right = np.linalg.svd(Q)
    k_left, _, k_right = np.linalg.svd(K)
    K = q_left @ k_left.T @ K  # turned so that both share their main output direction
    spread = spread_of(Q, K, query_norm * q_right[0], key_norm * np.stack([k_right[0], -k_right[0]]), scale)
    assert spread_from_weights(Q, K, query_norm, key_norm, scale) == pytest.approx(spread, rel=1e-12)


def test_matrices_that_meet_only_after_a_rotation():
    Q, K = np.diag([3.0, 0.0]), np.diag([0.0, 5.0])
    assert spread_from_product(Q, K, 1.0, 1.0) == pytest.approx(0.0, abs=1e-14)
    assert spread_from_product(0 * Q, K, 1.0, 1.0) == 0.0
    quarter_turn = np.array([[0.0, 1.0], [-1.0, 0.0]])
    spread = spread_of(Q, quarter_turn @ K, np.array([1.0, 0.0]), np.array([[0.0, 1.0], [0.0, -1.0]]), 1.0)
    assert spread == spread_from_weights(Q, K, 1.0, 1.0) == pytest.approx(30.0, rel=1e-15)


@BOTH
def test_heads_are_bounded_one_by_one(bound):
    rng = np.random.default_rng(0)
    Q, K = rng.normal(size=(3, 4, 9)), rng.normal(size=(3, 4, 7))
    norms = np.array([1.0, 0.5, 2.0])
    together = bound(Q, K, norms, 1.5, scale=0.5)
    np.testing.assert_allclose(together, [bound(Q[h], K[h], norms[h], 1.5, scale=0.5) for h in range(3)], rtol=1e-14)
    shared_key = bound(Q, K[0], 1.0, 1.0)  # grouped queries: many query heads, one key head
    np.testing.assert_allclose(shared_key, [bound(Q[h], K[0], 1.0, 1.0) for h in range(3)], rtol=1e-14)


@BOTH
def test_sizes_of_entries_that_cancel_neither_overflow_nor_underflow(bound):
    _, Q, K = random_matrices(1, 3, 4, 5)
    plain = pytest.approx(bound(Q, K, 1.0, 1.0), rel=1e-12)
    for of_query, of_key, norms in [(1e200, 1e200, 1e-200), (1e-200, 1e-200, 1e200), (1e200, 1e-200, 1.0)]:
        assert bound(of_query * Q, of_key * K, norms, norms) == plain
    assert bound(1e200 * Q, 1e200 * K, 1.0, 1.0) == np.inf
    for matrix in (np.diag([1e200, 1e-200]), np.array([[1e200, 1e-200], [1e-200, 1e200]])):
        assert bound(matrix, np.eye(2) * 1e-200, 1.0, 1.0) == pytest.approx(2.0, rel=1e-12)


ELEMENTWISE: dict[str, tuple[Callable[..., Any], list[float], list[float]]] = {
    "low": (lambda a, b: theory.weight_bounds(a, b)[0], [0.0, 1.0, 50.0], [1, 4, 1000]),
    "high": (lambda a, b: theory.weight_bounds(a, b)[1], [0.0, 1.0, 50.0], [1, 4, 1000]),
    "loose low": (lambda a, b: theory.loose_weight_bounds(a, b)[0], [0.0, 1.0, 50.0], [1, 4, 1000]),
    "loose high": (lambda a, b: theory.loose_weight_bounds(a, b)[1], [0.0, 1.0, 50.0], [1, 4, 1000]),
    "horizon": (theory.horizon, [0.0, 1.0, 50.0], [0.1, 0.5, 0.9]),
    "required spread": (theory.required_spread, [1, 4, 1000], [0.1, 0.5, 0.9]),
    "entropy floor": (theory.entropy_floor, [0.0, 1.0, 50.0], [1, 4, 1000]),
    "limit": (theory.top_weight_limit, [1.0, 2.0, 3.0], [0.5, 2.0, -4.0]),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_numbers_arrays_and_tensors_agree(name):
    function, first, second = ELEMENTWISE[name]
    one_by_one = [function(a, b) for a, b in zip(first, second, strict=True)]
    assert all(type(value) is float for value in one_by_one)
    array = function(np.array(first), np.array(second))
    assert array.dtype == np.float64
    np.testing.assert_allclose(array, one_by_one, rtol=1e-15)
    for tensor in (
        function(torch.tensor(first), torch.tensor(second, dtype=torch.float64)),
        function(torch.tensor(first), np.array(second)),
        function(np.array(first), torch.tensor(second, dtype=torch.float64)),
    ):
        assert tensor.dtype == torch.float64
        np.testing.assert_allclose(tensor.numpy(), one_by_one, rtol=1e-13)


def test_matrices_and_samples_as_tensors():
    rng = np.random.default_rng(0)
    Q, K, logits = rng.normal(size=(2, 3, 5)), rng.normal(size=(2, 3, 4)), rng.normal(size=(6, 9))
    for bound in (theory.spread_from_weights, theory.spread_from_product):
        found = bound(torch.tensor(Q), torch.tensor(K), 1.5, [1.0, 2.0], scale=0.5)
        assert isinstance(found, torch.Tensor)
        np.testing.assert_allclose(found.numpy(), bound(Q, K, 1.5, [1.0, 2.0], scale=0.5), rtol=1e-13)
    found = theory.top_weight_limit_from_sample(torch.tensor(logits), 2.0, top=4.0)
    expected = theory.top_weight_limit_from_sample(logits, 2.0, top=4.0)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-13)


def test_gradients_flow_through_tensors():
    n, mass = torch.tensor([4.0, 9.0, 30.0]).double(), torch.tensor(0.7).double()
    spread = torch.tensor([0.5, 2.0, 7.0], dtype=torch.float64, requires_grad=True)
    for function in (
        lambda d: theory.weight_bounds(d, n),
        lambda d: theory.loose_weight_bounds(d, n),
        lambda d: theory.horizon(d, mass),
        lambda d: theory.entropy_floor(d, n),
    ):
        assert torch.autograd.gradcheck(function, (spread,))
    weights = [torch.randn(3, 4, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in (0, 1)]
    for bound in (theory.spread_from_weights, theory.spread_from_product):
        inputs = tuple(w.clone().requires_grad_() for w in weights)
        assert torch.autograd.gradcheck(lambda Q, K, bound=bound: bound(Q, K, 1.0, 2.0), inputs)


def test_gradients_are_finite_at_the_edges():
    spread = torch.tensor([0.0, 0.0, 5.0, 1e4], dtype=torch.float64, requires_grad=True)
    n = torch.tensor([1.0, 7.0, 1.0, 1e300], dtype=torch.float64, requires_grad=True)
    total = theory.entropy_floor(spread, n) + sum(theory.weight_bounds(spread, n)) + theory.required_spread(n)
    total.sum().backward()
    assert spread.grad is not None
    assert n.grad is not None
    assert spread.grad.isfinite().all()
    assert n.grad.isfinite().all()


def test_other_kinds_of_number():
    assert theory.entropy_ceiling(Fraction(1, 1)) == 0.0
    assert theory.entropy_ceiling(10**300) == pytest.approx(300 * math.log(10), rel=1e-15)
    np.testing.assert_allclose(theory.entropy_ceiling([[1, 2], [3, 4]]), np.log([[1, 2], [3, 4]]), rtol=1e-15)
    assert theory.entropy_ceiling(np.ones(0)).shape == (0,)
