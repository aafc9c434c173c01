"""The bound under rotary positions against random inputs and angles, and against ascent that looks for the worst."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpmax.errors import ArgumentError
from sharpmax.theory.rotary import common_basis, spread_from_rotary
from sharpmax.theory.spread import spread_from_product, spread_from_weights

SOME = settings(max_examples=25, deadline=None)
SEEDS = st.integers(0, 2**32 - 1)


def turned(vectors, angles, pairs):
    """Vectors `[..., D]` with each pair turned by its angle `[..., pairs]`, written out entry by entry."""
    out = np.array(vectors)
    for b in range(pairs):
        first, second = vectors[..., b], vectors[..., b + pairs]
        cos, sin = np.cos(angles[..., b]), np.sin(angles[..., b])
        out[..., b], out[..., b + pairs] = cos * first - sin * second, sin * first + cos * second
    return out


def random_head(seed, pairs, still, dy=5, dx=6):
    rng = np.random.default_rng(seed)
    width = 2 * pairs + still
    return rng, rng.normal(size=(width, dy)), rng.normal(size=(width, dx)), *rng.normal(size=(2, width))


@SOME
@given(SEEDS, st.integers(0, 3), st.integers(0, 3), st.booleans(), st.booleans())
def test_no_input_at_no_position_spreads_further(seed, pairs, still, query_bias, key_bias):
    still = max(still, 1 - pairs)
    rng, Q, K, q0, k0 = random_head(seed, pairs, still)
    q0, k0 = q0 * query_bias, k0 * key_bias
    y, x = rng.normal(size=(200, 5)), rng.normal(size=(200, 40, 6))
    y, x = (2.0 * v / np.linalg.norm(v, axis=-1, keepdims=True) for v in (y, x))
    q = y @ Q.T + q0
    k = turned(x @ K.T + k0, rng.uniform(0, 2 * np.pi, size=(200, 40, max(pairs, 1))), pairs)
    spread = np.ptp(0.5 * np.einsum("td,tsd->ts", q, k), axis=1).max()
    biases = {"query_bias": q0 if query_bias else None, "key_bias": k0 if key_bias else None}
    assert spread <= spread_from_rotary(Q, K, 2.0, 2.0, 0.5, pairs=pairs, **biases)


def worst(Q, K, q0, k0, pairs, norm=1.0, starts=24, steps=300):
    """The largest spread that gradient ascent on y, two keys and their angles finds."""
    Q, K, q0, k0 = (torch.tensor(np.asarray(v), dtype=torch.float64) for v in (Q, K, q0, k0))
    free = [torch.randn(starts, Q.shape[1], dtype=torch.float64)]
    free += [torch.randn(starts, K.shape[1], dtype=torch.float64) for _ in range(2)]
    free += [torch.randn(starts, pairs, dtype=torch.float64) for _ in range(2)]
    for one in free:
        one.requires_grad_()
    optimiser = torch.optim.Adam(free, lr=0.05)
    best = 0.0
    for _ in range(steps):
        y, *xs = (norm * v / v.norm(dim=1, keepdim=True) for v in free[:3])
        q, logits = y @ Q.T + q0, []
        for x, angle in zip(xs, free[3:], strict=True):
            k = x @ K.T + k0
            a, b, rest = k[:, :pairs], k[:, pairs : 2 * pairs], k[:, 2 * pairs :]
            k = torch.cat((angle.cos() * a - angle.sin() * b, angle.sin() * a + angle.cos() * b, rest), 1)
            logits.append((q * k).sum(1))
        spread = logits[0] - logits[1]
        best = max(best, float(spread.detach().max()))
        optimiser.zero_grad()
        (-spread.sum()).backward()
        optimiser.step()
    return best


@pytest.mark.parametrize(
    ("pairs", "still", "query_bias", "key_bias", "close"),
    [
        (4, 0, 0, 0, 0.97),
        (2, 4, 0, 0, 0.97),
        (4, 0, 1, 1, 0.95),
        (0, 5, 1, 1, 0.99),
        (1, 0, 0, 3, 0.97),
        (2, 3, 1, 1, 0.8),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_ascent_never_passes_the_bound_and_comes_close(seed, pairs, still, query_bias, key_bias, close):
    _, Q, K, q0, k0 = random_head(seed, pairs, still, dy=9, dx=9)
    q0, k0 = q0 * query_bias, k0 * key_bias
    bound = spread_from_rotary(Q, K, 1.5, 1.5, pairs=pairs, query_bias=q0, key_bias=k0)
    found = worst(Q, K, q0, k0, pairs, norm=1.5)
    assert found <= bound
    assert found >= close * bound


@SOME
@given(SEEDS, st.integers(1, 4))
def test_between_the_product_and_the_norms(seed, pairs):
    """Rotations can do what no rotation does, and nothing that the product of norms does not allow."""
    _, Q, K, _, _ = random_head(seed, pairs, 0)
    bound = spread_from_rotary(Q, K, 1.0, 3.0, 0.1, pairs=pairs)
    assert spread_from_product(Q, K, 1.0, 3.0, 0.1) <= bound * (1 + 1e-12)
    assert bound <= spread_from_weights(Q, K, 1.0, 3.0, 0.1) * (1 + 1e-12)


@SOME
@given(SEEDS, st.integers(1, 6))
def test_without_rotation_it_is_the_product(seed, width):
    _, Q, K, _, _ = random_head(seed, 0, width)
    assert spread_from_rotary(Q, K, 2.0, 3.0, pairs=0) == pytest.approx(spread_from_product(Q, K, 2.0, 3.0), rel=1e-9)


def test_blocks_that_read_different_inputs_do_not_add_up():
    """Each pair reads inputs of its own, so the best is to spend all on the best pair: the norms alone miss that."""
    Q, K = np.diag([1.0, 4.0, 1.0, 4.0]), np.diag([5.0, 2.0, 5.0, 2.0])
    assert spread_from_rotary(Q, K, 1.0, 1.0, pairs=2) == pytest.approx(2 * 4.0 * 2.0, rel=1e-2)
    assert spread_from_weights(Q, K, 1.0, 1.0) == pytest.approx(2 * 4.0 * 5.0)


def test_a_constant_query_is_met_by_the_best_key():
    _, Q, K, q0, _ = random_head(3, 0, 4)
    exact = 2 * 1.7 * np.linalg.norm(K.T @ q0)
    assert spread_from_rotary(0 * Q, K, 1.0, 1.7, pairs=0, query_bias=q0) == pytest.approx(exact, rel=1e-6)
    assert spread_from_rotary(Q, K, 0.0, 1.7, pairs=0, query_bias=q0) == pytest.approx(exact, rel=1e-6)


def test_a_constant_in_keys_counts_only_where_it_turns():
    _, Q, K, _, k0 = random_head(4, 1, 3)
    plain, turning = spread_from_rotary(Q, K, 1.0, 1.0, pairs=1), k0 * [1, 1, 0, 0, 0]
    assert spread_from_rotary(Q, K, 1.0, 1.0, pairs=1, key_bias=k0 - turning) == pytest.approx(plain, rel=1e-12)
    with_all = spread_from_rotary(Q, K, 1.0, 1.0, pairs=1, key_bias=5 * k0)
    assert with_all == pytest.approx(spread_from_rotary(Q, K, 1.0, 1.0, pairs=1, key_bias=5 * turning), rel=1e-12)
    assert with_all > 1.2 * plain


def test_what_positions_do_anyway_changes_nothing():
    """Turning a pair of rows, exchanging pairs, turning the inputs, and shifting size from Q to K."""
    rng, Q, K, q0, k0 = random_head(5, 3, 2)
    bias = {"query_bias": q0, "key_bias": k0}
    plain = spread_from_rotary(Q, K, 1.0, 2.0, pairs=3, **bias)
    angles = rng.uniform(0, 6, size=3)
    rotated = {"query_bias": turned(q0, angles, 3), "key_bias": k0}
    assert spread_from_rotary(turned(Q.T, angles, 3).T, K, 1.0, 2.0, pairs=3, **rotated) == pytest.approx(plain)
    order = [2, 0, 1, 5, 3, 4, 6, 7]
    exchanged = {name: value[order] for name, value in bias.items()}
    assert spread_from_rotary(Q[order], K[order], 1.0, 2.0, pairs=3, **exchanged) == pytest.approx(plain)
    basis = np.linalg.qr(rng.normal(size=(6, 6)))[0]
    assert spread_from_rotary(Q, K @ basis, 1.0, 2.0, pairs=3, **bias) == pytest.approx(plain)
    shifted = {"query_bias": 8 * q0, "key_bias": k0 / 8}
    assert spread_from_rotary(8 * Q, K / 8, 1.0, 2.0, pairs=3, **shifted) == pytest.approx(plain)


def test_heads_one_by_one_and_as_tensors():
    rng = np.random.default_rng(6)
    Q, K, q0 = rng.normal(size=(3, 6, 7)), rng.normal(size=(6, 5)), rng.normal(size=(3, 6))
    norms = np.array([1.0, 2.0, 0.5])
    together = spread_from_rotary(Q, K, norms, 1.5, 0.3, pairs=2, query_bias=q0)
    assert together.shape == (3,)
    one_by_one = [spread_from_rotary(Q[h], K, norms[h], 1.5, 0.3, pairs=2, query_bias=q0[h]) for h in range(3)]
    np.testing.assert_allclose(together, one_by_one, rtol=1e-9)
    tensors = spread_from_rotary(torch.tensor(Q), K, norms, 1.5, 0.3, pairs=2, query_bias=torch.tensor(q0))
    assert isinstance(tensors, torch.Tensor)
    np.testing.assert_allclose(tensors.numpy(), together, rtol=1e-9)


def test_nothing_spreads_nothing():
    _, Q, K, q0, _ = random_head(7, 2, 2)
    assert spread_from_rotary(0 * Q, K, 1.0, 1.0, pairs=2) == 0.0
    assert spread_from_rotary(Q, K, 1.0, 0.0, pairs=2, query_bias=q0) == 0.0
    assert spread_from_rotary(Q, K, 1.0, 1.0, 0.0, pairs=3) == 0.0


@pytest.mark.parametrize("rank", [1, 3])
def test_a_common_basis_changes_no_product(rank):
    rng = np.random.default_rng(8)
    left, right = rng.normal(size=(4, rank)) @ rng.normal(size=(rank, 6)), rng.normal(size=(4, 5))
    of_left, of_right = common_basis(np, left, right)
    a, b = of_left @ left, of_right @ right
    np.testing.assert_allclose(a.T @ b, left.T @ right, atol=1e-12)
    np.testing.assert_allclose(a @ a.T, b @ b.T, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pairs": 2}, r"^pairs: got 2; allowed: a whole number from 0 to 1"),
        ({"pairs": True}, "^pairs: got True"),
        ({"pairs": 1, "query_bias": [1.0]}, r"^query_bias: got shape \(1,\); allowed: \[..., 2\]"),
        ({"pairs": 1, "key_bias": [np.nan, 1.0]}, "^key_bias: got nan"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ArgumentError, match=message):
        spread_from_rotary(np.eye(2), np.eye(2), 1.0, 1.0, **options)
