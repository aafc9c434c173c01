"""Bounds on the spread of logits against random heads, angles and inputs, and against ascent to the worst."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpmax.errors import ArgumentError
from sharpmax.theory.rotary import spread_from_rotary
from sharpmax.theory.spread import spread_from_product, spread_from_weights, spread_over_inputs

SOME = settings(max_examples=40, deadline=None)
SEEDS = st.integers(0, 2**32 - 1)
SIZES = st.integers(1, 8)
BOTH = pytest.mark.parametrize("bound", [spread_from_product, spread_from_weights])


def random_matrices(seed, d, dy, dx):
    rng = np.random.default_rng(seed)
    return rng, rng.normal(size=(d, dy)), rng.normal(size=(d, dx))


def spread_of(Q, K, y, x, scale):
    """Spread of the logits of one query y `[Dy]` over inputs x `[n, Dx]`."""
    return np.ptp(scale * (x @ K.T) @ (Q @ y))


@SOME
@given(SEEDS, SIZES, SIZES, SIZES, st.integers(1, 20), st.sampled_from([0.0, 0.125, 1.0, 3.7]))
def test_no_head_spreads_further(seed, d, dy, dx, n, scale):
    rng, Q, K = random_matrices(seed, d, dy, dx)
    y, x = rng.normal(size=dy), rng.normal(size=(n, dx)) * rng.exponential(size=(n, 1))
    norms = np.linalg.norm(y), np.linalg.norm(x, axis=1).max()
    product, separate = spread_from_product(Q, K, *norms, scale), spread_from_weights(Q, K, *norms, scale)
    assert spread_of(Q, K, y, x, scale) <= product * (1 + 1e-12)
    assert product <= separate * (1 + 1e-12)


@SOME
@given(SEEDS, SIZES, SIZES, SIZES, st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0.1, 4))
def test_both_bounds_are_attained(seed, d, dy, dx, query_norm, key_norm, scale):
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


def test_entries_of_very_different_sizes_in_one_matrix():
    for matrix in (np.diag([1e200, 1e-200]), np.array([[1e200, 1e-200], [1e-200, 1e200]])):
        assert spread_from_product(matrix, np.eye(2) * 1e-200, 1.0, 1.0) == pytest.approx(2.0, rel=1e-12)


EYE = np.eye(2)


@pytest.mark.parametrize(
    ("bound", "arguments", "options", "message"),
    [
        *((bound, arguments, {}, message) for bound in (spread_from_product, spread_from_weights)
          for arguments, message in [
            ((np.ones(2), EYE, 1.0, 1.0), r"^Q: got shape \(2,\)"),
            ((EYE, np.ones((2, 0)), 1.0, 1.0), r"^K: got shape \(2, 0\)"),
            ((EYE, np.eye(3), 1.0, 1.0), r"^Q, K: got shapes .* same D"),
            ((EYE * np.nan, EYE, 1.0, 1.0), "^Q: got nan"),
            ((EYE, EYE, -1.0, 1.0), "^query_norm: got -1.0"),
            ((EYE, EYE, 1.0, np.inf), "^key_norm: got inf"),
            ((EYE, EYE, 1.0, 1.0, -0.5), "^scale: got -0.5"),
            ((np.ones((3, 2, 2)), EYE, np.ones(4), 1.0), "Q, K, query_norm, key_norm, scale: got shapes"),
        ]),
        (spread_over_inputs, (np.ones(3), np.ones((2, 3))), {}, r"^queries: got shape \(3,\)"),
        (spread_over_inputs, (np.ones((2, 3)), np.ones((0, 3))), {}, r"^keys: got shape \(0, 3\)"),
        (spread_over_inputs, (np.ones((2, 3)), np.ones((2, 4))), {}, "^queries, keys: got shapes .* same D"),
        (spread_over_inputs, (np.ones((2, 3)), np.ones((2, 3))), {"pairs": 2}, "^pairs: got 2; allowed: .* to 1, half"),
        (spread_over_inputs, (np.ones((2, 3)), np.ones((2, 3)), -1.0), {}, "^scale: got -1.0"),
        (spread_over_inputs, (np.ones((2, 3)) * np.inf, np.ones((2, 3))), {}, "^queries: got inf"),
        (spread_from_rotary, (EYE, EYE, 1.0, 1.0), {"pairs": 2}, r"^pairs: got 2; allowed: a whole number from 0 to 1"),
        (spread_from_rotary, (EYE, EYE, 1.0, 1.0), {"pairs": True}, "^pairs: got True"),
        (spread_from_rotary, (EYE, EYE, 1.0, 1.0), {"pairs": 1, "query_bias": [1.0]}, r"^query_bias: got shape \(1,\)"),
        (spread_from_rotary, (EYE, EYE, 1.0, 1.0), {"pairs": 1, "key_bias": [np.nan, 1.0]}, "^key_bias: got nan"),
    ],
)  # fmt: skip
def test_mistakes_are_named(bound, arguments, options, message):
    with pytest.raises(ArgumentError, match=message):
        bound(*arguments, **options)


def every_pair(queries, keys, pairs):
    """The largest spread if each pair of entries may turn as it likes for each key, written out."""
    still = queries[:, 2 * pairs :] @ keys[:, 2 * pairs :].T
    lengths = [np.hypot(x[:, :pairs], x[:, pairs : 2 * pairs]) for x in (queries, keys)]
    turned = lengths[0] @ lengths[1].T
    return ((still + turned).max(1) - (still - turned).min(1)).max()


@pytest.mark.parametrize(("pairs", "still"), [(0, 2), (0, 5), (1, 0), (2, 0), (1, 3)])
@pytest.mark.parametrize("size", [0.05, 0.3, 2.0])
@pytest.mark.parametrize("at_once", [1, 1 << 24])
def test_the_spread_over_inputs_is_the_largest_of_any_query(monkeypatch, pairs, still, size, at_once):
    """One query at a time, in the order of what they could reach at most: too low an estimate would end the search."""
    monkeypatch.setattr("sharpmax.theory.spread._AT_ONCE", at_once)
    rng = np.random.default_rng(0)
    for _ in range(20):
        queries = size * rng.normal(size=(12, 2 * pairs + still)) * rng.exponential(size=(12, 1))
        keys = size * rng.normal(size=(9, 2 * pairs + still)) * rng.exponential(size=(9, 1)) + 1.0
        exact = 0.7 * every_pair(queries, keys, pairs)
        found = spread_over_inputs(queries, keys, 0.7, pairs=pairs)
        assert exact * (1 - 1e-9) <= found <= exact * (1 + 2e-4)
        tensors = spread_over_inputs(torch.tensor(queries), torch.tensor(keys), 0.7, pairs=pairs)
        assert tensors == pytest.approx(found, rel=1e-5)


def test_rounding_is_added_never_lost_and_small_spreads_stay_small():
    """Large numbers that cancel: float32 alone would be wrong by more than the spread."""
    queries, keys = np.array([[1e4, 1e4]]), np.array([[1e4, -1e4], [1e4, -1e4 + 1e-4]])
    assert spread_over_inputs(queries, keys) >= 1.0
    assert spread_over_inputs([[1e-3]], [[1.0], [2.0]]) == pytest.approx(1e-3, rel=1e-5)
    assert spread_over_inputs([[0.0]], [[1.0], [2.0]]) == 0.0


def test_what_all_keys_share_does_not_count_unless_it_turns():
    rng = np.random.default_rng(2)
    queries, keys = rng.normal(size=(30, 5)), rng.normal(size=(20, 5))
    plain = spread_over_inputs(queries, keys, pairs=1)
    assert spread_over_inputs(queries, np.add(keys, [0, 0, 9, -5, 2]), pairs=1) == pytest.approx(plain, rel=1e-4)
    assert spread_over_inputs(queries, np.add(keys, [9, 0, 0, 0, 0]), pairs=1) > 1.2 * plain


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


@pytest.mark.parametrize(("pairs", "still"), [(1, 1), (2, 1), (2, 2), (3, 2)])
def test_what_does_not_turn_may_be_written_in_any_basis(pairs, still):
    """Q multiplied by a matrix and K by its transposed inverse, in the rows that no position turns."""
    rng = np.random.default_rng(pairs)
    width = 2 * pairs + still
    Q, K, q0 = rng.normal(size=(width, 5)), rng.normal(size=(width, 6)), rng.normal(size=width)
    plain = spread_from_rotary(Q, K, 1.0, 2.0, pairs=pairs, query_bias=q0)
    change = np.eye(width)
    change[2 * pairs :, 2 * pairs :] = rng.normal(size=(still, still)) + 3 * np.eye(still)
    other = spread_from_rotary(change @ Q, np.linalg.inv(change).T @ K, 1.0, 2.0, pairs=pairs, query_bias=change @ q0)
    assert other == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("size", [1e-150, 1e-60, 1e-30, 1e30])
def test_the_rotary_bound_grows_with_the_matrices_whatever_their_size(size):
    rng = np.random.default_rng(0)
    Q, K, q0, k0 = rng.normal(size=(6, 4)), rng.normal(size=(6, 5)), rng.normal(size=6), rng.normal(size=6)
    plain = spread_from_rotary(Q, K, 1.0, 2.0, pairs=2, query_bias=q0, key_bias=k0)
    scaled = spread_from_rotary(size * Q, K, 1.0, 2.0, pairs=2, query_bias=size * q0, key_bias=k0)
    assert scaled == pytest.approx(size * plain, rel=1e-9)
