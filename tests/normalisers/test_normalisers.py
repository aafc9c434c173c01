"""Every normaliser against a naive float64 loop over one row, and against what all of them promise."""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from sharpmax import normalisers as package
from sharpmax.errors import ArgumentError, MissingExtraError, OutOfRangeWarning
from sharpmax.normalisers import base
from sharpmax.normalisers.base import Normaliser, attend, normaliser, normalisers, visible_softmax
from sharpmax.policies.basic import Constant
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.polynomial import PAPER, Polynomial

pytestmark = pytest.mark.filterwarnings("ignore::sharpmax.errors.OutOfRangeWarning")

KINDS: dict[str, type[Normaliser]] = {
    kind.name: kind
    for kind in (getattr(package, name) for name in package.__all__)
    if isinstance(kind, type) and issubclass(kind, Normaliser) and kind is not Normaliser
}
NAMES = sorted(KINDS)
SHIFT_INVARIANT = {"softmax", "adaptive", "ssmax", "sparsemax", "entmax15", "hard", "top-k", "local"}
QUERIES, KEYS, WIDTH = 5, 23, 4
"""More keys than the defaults of top-k (8) and local (16), so that both have something to leave out."""

every = pytest.mark.parametrize("name", NAMES)


# --- oracles: one row, plain floats, no torch ---------------------------------------------------------------


@dataclass
class Row:
    """What an oracle sees of a row: its query, all keys, which are visible, its own position."""

    q: list[float]
    k: list[list[float]]
    visible: list[bool]
    own: int
    scale: float

    def logits(self) -> list[float]:
        return [self.scale * sum(a * b for a, b in zip(self.q, key, strict=True)) for key in self.k]

    def seen(self) -> list[int]:
        return [j for j, visible in enumerate(self.visible) if visible]


def _spread(n: int, weights: dict[int, float]) -> list[float]:
    return [weights.get(j, 0.0) for j in range(n)]


def _softmax(logits: list[float], seen: list[int], beta: float = 1.0) -> dict[int, float]:
    top = max((beta * logits[j] for j in seen), default=0.0)
    exps = {j: math.exp(beta * logits[j] - top) for j in seen}
    total = sum(exps.values())
    return {j: e / total for j, e in exps.items()}


def oracle_softmax(row: Row) -> dict[int, float]:
    return _softmax(row.logits(), row.seen())


def oracle_adaptive(row: Row) -> dict[int, float]:
    plain = _softmax(row.logits(), row.seen())
    h = -sum(p * math.log(p) for p in plain.values() if p > 0)
    beta = -0.037 * h**4 + 0.481 * h**3 - 2.3 * h**2 + 4.917 * h - 1.791
    return _softmax(row.logits(), row.seen(), max(1.0, beta) if h > 0.5 else 1.0)


def oracle_ssmax(row: Row) -> dict[int, float]:
    seen = row.seen()
    return _softmax(row.logits(), seen, math.log(max(len(seen), 1)) / math.log(16))


def _by_bisection(row: Row, weight: Callable[[float, float], float]) -> dict[int, float]:
    """τ with Σ weight(s, τ) = 1; needs no sorting, which is what the entmax package does."""
    logits, seen = row.logits(), row.seen()
    top = max((logits[j] for j in seen), default=0.0)
    low, high = -2.0, 0.0
    for _ in range(200):
        middle = (low + high) / 2
        if sum(weight(logits[j] - top, middle) for j in seen) > 1:
            low = middle
        else:
            high = middle
    return {j: weight(logits[j] - top, high) for j in seen}


def oracle_sparsemax(row: Row) -> dict[int, float]:
    return _by_bisection(row, lambda s, tau: max(s - tau, 0.0))


def oracle_entmax15(row: Row) -> dict[int, float]:
    return _by_bisection(row, lambda s, tau: max(s / 2 - tau, 0.0) ** 2)


def oracle_sigmoid(row: Row) -> dict[int, float]:
    logits, seen = row.logits(), row.seen()
    return {j: 1 / (1 + len(seen) * math.exp(-logits[j])) for j in seen}


def oracle_plus_one(row: Row) -> dict[int, float]:
    with_void = _softmax([*row.logits(), 0.0], [*row.seen(), len(row.k)])
    return {j: with_void[j] for j in row.seen()}


def oracle_linear(row: Row) -> dict[int, float]:
    def phi(x: float) -> float:
        return x + 1 if x > 0 else math.exp(x)

    scores = {j: sum(phi(a) * phi(b) for a, b in zip(row.q, row.k[j], strict=True)) for j in row.seen()}
    total = sum(scores.values())
    return {j: s / total for j, s in scores.items()}


def oracle_stick_breaking(row: Row) -> dict[int, float]:
    logits, left, weights = row.logits(), 1.0, {}
    for j in reversed(row.seen()):
        weights[j] = left / (1 + math.exp(-logits[j]))
        left *= 1 / (1 + math.exp(logits[j]))
    return weights


def oracle_hard(row: Row) -> dict[int, float]:
    logits, seen = row.logits(), row.seen()
    return {max(seen, key=lambda j: (logits[j], -j)): 1.0} if seen else {}


def oracle_top_k(row: Row) -> dict[int, float]:
    logits = row.logits()
    return _softmax(logits, sorted(row.seen(), key=lambda j: (-logits[j], j))[:8])


def oracle_local(row: Row) -> dict[int, float]:
    return _softmax(row.logits(), [j for j in row.seen() if -16 < j - row.own < 16])


ORACLES: dict[str, Callable[[Row], dict[int, float]]] = {
    "softmax": oracle_softmax,
    "adaptive": oracle_adaptive,
    "ssmax": oracle_ssmax,
    "sparsemax": oracle_sparsemax,
    "entmax15": oracle_entmax15,
    "sigmoid": oracle_sigmoid,
    "softmax-plus-one": oracle_plus_one,
    "linear": oracle_linear,
    "stick-breaking": oracle_stick_breaking,
    "hard": oracle_hard,
    "top-k": oracle_top_k,
    "local": oracle_local,
}


def expected(name: str, q: Tensor, k: Tensor, visible: Tensor, scale: float) -> Tensor:
    """The oracle's weights `[Lq, Lk]`, float64, for one head."""
    rows = []
    for i in range(q.shape[0]):
        own = i + k.shape[0] - q.shape[0]
        row = Row(q[i].tolist(), k.tolist(), visible[i].tolist(), own, scale)
        rows.append(_spread(k.shape[0], ORACLES[name](row)))
    return torch.tensor(rows, dtype=torch.float64)


def inputs(seed: int = 0, dtype: torch.dtype = torch.float64, batch: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(*batch, QUERIES, WIDTH, generator=generator, dtype=torch.float64)
    k = torch.randn(*batch, KEYS, WIDTH, generator=generator, dtype=torch.float64)
    return q.to(dtype), k.to(dtype)


def some_mask(seed: int = 1) -> Tensor:
    """About a third hidden; the second row sees nothing, the third one key."""
    mask = torch.rand(QUERIES, KEYS, generator=torch.Generator().manual_seed(seed)) > 0.35
    mask[1] = False
    mask[2] = False
    mask[2, KEYS - 2] = True
    return mask


def logits_row(logits: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Queries and keys of width 1 whose only row has exactly these logits."""
    return torch.ones(1, 1, dtype=logits.dtype), logits[:, None], {"scale": 1.0}


def seen_by(name: str, mask: Tensor) -> Tensor:
    """The mask, narrowed by the window for `local`."""
    q, k = inputs()
    return normaliser(name).visible(q, k, mask, False)


# --- values -------------------------------------------------------------------------------------------------


def test_every_kind_has_an_oracle_and_is_registered() -> None:
    assert set(ORACLES) == set(NAMES)
    assert set(NAMES) <= set(normalisers())


@every
@pytest.mark.parametrize("scale", [None, 1.0, 20.0])
def test_weights_are_those_of_the_naive_loop(name: str, scale: float | None) -> None:
    q, k = inputs()
    visible = some_mask()
    given = normaliser(name)(q, k, mask=visible, scale=scale)
    factor = 1 / math.sqrt(WIDTH) if scale is None else scale
    torch.testing.assert_close(given, expected(name, q, k, visible, factor), rtol=1e-10, atol=1e-13)


@every
def test_weights_are_shares(name: str) -> None:
    q, k = inputs()
    visible = some_mask()
    weights = normaliser(name)(q, k, mask=visible)
    assert bool((weights >= 0).all())
    assert bool((weights <= 1).all())
    sums = weights.sum(-1)[seen_by(name, visible).any(-1)]
    assert sums.numel() >= 3
    is_one = torch.isclose(sums, torch.ones_like(sums), rtol=1e-12, atol=0)
    if KINDS[name].sums_to_one:
        assert bool(is_one.all())
    else:
        assert not bool(is_one.any())
        assert name == "sigmoid" or bool((sums < 1).all())


@every
@pytest.mark.parametrize("kind", ["bool", "-inf", "finfo.min", "finfo.min/2"])
def test_hidden_keys_get_exactly_nothing(name: str, kind: str) -> None:
    q, k = inputs(dtype=torch.float32)
    visible = some_mask()
    hiding = {"-inf": -math.inf, "finfo.min": torch.finfo(torch.float32).min}
    hiding["finfo.min/2"] = hiding["finfo.min"] / 2
    mask = visible if kind == "bool" else torch.zeros(QUERIES, KEYS).masked_fill(~visible, hiding[kind])
    weights = normaliser(name)(q, k, mask=mask)
    assert bool((weights[~visible] == 0).all())
    assert bool((weights[1] == 0).all())
    assert torch.equal(weights, normaliser(name)(q, k, mask=visible))


@every
def test_a_float_mask_is_added_to_the_logits(name: str) -> None:
    logits = torch.linspace(-1, 1, KEYS, dtype=torch.float64)
    bias = torch.randn(KEYS, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    q, k, kw = logits_row(logits)
    if not KINDS[name].adds_mask:
        with pytest.raises(ArgumentError, match=r"mask: got a float mask.*boolean"):
            normaliser(name)(q, k, mask=bias, **kw)
        return
    _, biased, _ = logits_row(logits + bias)
    torch.testing.assert_close(normaliser(name)(q, k, mask=bias, **kw), normaliser(name)(q, biased, **kw))


@every
def test_causal_rows_end_at_the_last_key(name: str) -> None:
    q, k = inputs()
    by_hand = torch.tensor([[j <= i + KEYS - QUERIES for j in range(KEYS)] for i in range(QUERIES)])
    extra = some_mask()
    causal = normaliser(name)(q, k, is_causal=True)
    torch.testing.assert_close(causal, expected(name, q, k, by_hand, 0.5), rtol=1e-10, atol=1e-13)
    both = normaliser(name)(q, k, mask=extra, is_causal=True)
    torch.testing.assert_close(both, expected(name, q, k, by_hand & extra, 0.5), rtol=1e-10, atol=1e-13)
    assert bool((causal[0, -QUERIES + 1 :] == 0).all())


@every
def test_causal_rows_before_the_first_key_see_nothing(name: str) -> None:
    q, k = inputs()
    weights = normaliser(name)(k, q, is_causal=True)  # 23 queries, 5 keys
    assert bool((weights[: KEYS - QUERIES] == 0).all())
    assert bool((weights[KEYS - QUERIES :].sum(-1) > 0).all())


@every
def test_order_matters_only_where_said(name: str) -> None:
    q, k = inputs()
    visible = some_mask()
    order = torch.randperm(KEYS, generator=torch.Generator().manual_seed(2))
    plain = normaliser(name)(q, k, mask=visible)
    permuted = normaliser(name)(q, k[order], mask=visible[:, order])
    same = torch.allclose(permuted, plain[:, order], rtol=1e-12, atol=1e-14)
    assert same is not KINDS[name].order_dependent


@pytest.mark.parametrize("name", [name for name in NAMES if KINDS[name].adds_mask])
def test_a_common_shift_matters_only_outside_the_softmax_family(name: str) -> None:
    q, k = inputs()
    shifted = normaliser(name)(q, k, mask=torch.full((QUERIES, 1), 3.0, dtype=torch.float64))
    same = torch.allclose(shifted, normaliser(name)(q, k), rtol=1e-10, atol=1e-13)
    assert same is (name in SHIFT_INVARIANT)


# --- what is hidden, broken or empty ------------------------------------------------------------------------


def weights_and_gradients(
    name: str, q: Tensor, k: Tensor, rows: slice = slice(None), **kw: Any
) -> tuple[Tensor, Tensor, Tensor]:
    q, k = q.clone().requires_grad_(), k.clone().requires_grad_()
    weights = normaliser(name)(q, k, **kw)[..., rows, :]
    costs = torch.randn(weights.shape, generator=torch.Generator().manual_seed(9), dtype=weights.dtype)
    (weights * costs).sum().backward()
    if q.grad is None or k.grad is None:
        raise RuntimeError("no gradient arrived")
    return weights.detach(), q.grad, k.grad


@every
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_a_padded_key_holds_does_not_matter(name: str, poison: float) -> None:
    q, k = inputs()
    visible = torch.ones(1, KEYS, dtype=torch.bool)
    visible[0, [0, 7, KEYS - 1]] = False
    bad = k.clone()
    bad[0], bad[7, 2], bad[KEYS - 1] = poison, poison, poison
    as_float = torch.zeros(1, KEYS).masked_fill(~visible, -math.inf)
    for mask in (visible, as_float):
        clean = weights_and_gradients(name, q, k, mask=mask)
        for given, wanted in zip(weights_and_gradients(name, q, bad, mask=mask), clean, strict=True):
            assert torch.equal(given, wanted)
    assert bool((clean[2] != 0).any())


@every
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_key_in_the_future_does_not_matter_even_if_later_rows_see_it(name: str, poison: float) -> None:
    q, k = inputs()
    bad = k.clone()
    bad[-1] = poison
    before = slice(0, QUERIES - 1)
    clean = weights_and_gradients(name, q, k, before, is_causal=True)
    for given, wanted in zip(weights_and_gradients(name, q, bad, before, is_causal=True), clean, strict=True):
        assert torch.equal(given, wanted)
    assert bool(normaliser(name)(q, bad, is_causal=True)[-1, -1].isnan())


@every
def test_a_row_that_sees_nothing_is_zero_with_zero_gradient(name: str) -> None:
    q, k = inputs()
    visible = some_mask()
    q[1] = math.nan  # a padded query
    weights, dq, dk = weights_and_gradients(name, q, k, mask=visible)
    assert bool((weights[1] == 0).all())
    assert bool((dq[1] == 0).all())
    assert bool(dq.isfinite().all())
    assert bool(dk.isfinite().all())
    assert bool((dk != 0).any())
    nothing, dq, dk = weights_and_gradients(name, *inputs(), mask=torch.zeros(1, 1, dtype=torch.bool))
    assert bool((nothing == 0).all())
    assert bool((dq == 0).all())
    assert bool((dk == 0).all())


@every
def test_a_broken_row_is_nan_and_leaves_the_others_alone(name: str) -> None:
    q, k = inputs()
    broken = q.clone()
    broken[3, 0] = math.nan
    visible = some_mask()
    weights, clean = normaliser(name)(broken, k, mask=visible), normaliser(name)(q, k, mask=visible)
    seen = seen_by(name, visible)
    assert bool(weights[3][seen[3]].isnan().all())
    assert bool((weights[3][~seen[3]] == 0).all())
    others = [0, 1, 2, 4]
    assert torch.equal(weights[others], clean[others])


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_with_huge_logits(name: str, dtype: torch.dtype) -> None:
    q = torch.tensor([[1.0], [-1.0], [1000.0], [-1000.0]], dtype=dtype)
    k = torch.tensor([[1000.0], [-1000.0], [992.0], [0.0], [-996.0], [1000.0]], dtype=dtype)
    visible = torch.tensor([True, True, True, True, True, False])
    weights, dq, dk = weights_and_gradients(name, q, k, mask=visible, scale=1.0)
    for x in (weights, dq, dk):
        assert x.dtype == dtype
        assert bool(x.isfinite().all())
    exact = normaliser(name)(q.double(), k.double(), mask=visible, scale=1.0)
    torch.testing.assert_close(weights.double(), exact.detach(), rtol=torch.finfo(dtype).eps, atol=1e-7)


@every
@pytest.mark.parametrize(("queries", "keys"), [(0, 7), (3, 0), (1, 1), (2, 1)])
def test_the_smallest_shapes(name: str, queries: int, keys: int) -> None:
    q, k = inputs()
    weights, dq, dk = weights_and_gradients(name, q[:queries], k[:keys])
    assert weights.shape == (queries, keys)
    assert bool(dq.isfinite().all())
    assert bool(dk.isfinite().all())
    if keys == 1 and KINDS[name].sums_to_one and name != "local":
        assert bool((weights == 1).all())


@every
def test_batches_broadcast_and_need_not_be_contiguous(name: str) -> None:
    q, _ = inputs(batch=(2, 3))
    _, k = inputs(1, batch=(3,))
    mask = torch.stack([some_mask(s) for s in range(3)])
    odd_q, odd_k = q.mT.contiguous().mT, k.mT.contiguous().mT
    weights = normaliser(name)(odd_q, odd_k, mask=mask)
    assert weights.shape == (2, 3, QUERIES, KEYS)
    for b in range(2):
        for h in range(3):
            torch.testing.assert_close(weights[b, h], normaliser(name)(q[b, h], k[h], mask=mask[h]))


@every
def test_autocast_does_not_cost_precision(name: str) -> None:
    q, k = inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = normaliser(name)(q, k)
    assert torch.equal(inside, normaliser(name)(q, k))


# --- gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in NAMES if name != "hard"])
def test_gradients_are_those_of_the_values(name: str) -> None:
    q, k = (x.requires_grad_() for x in inputs(11))
    kind, visible = normaliser(name).double(), some_mask()
    torch.manual_seed(0)  # the fast mode compares along random directions
    assert torch.autograd.gradcheck(lambda q, k: kind(q, k, mask=visible), (q, k), atol=1e-7, fast_mode=True)


def test_ssmax_learns_its_scalar() -> None:
    q, k = inputs()
    kind = normaliser("ssmax").double()
    (s,) = kind.parameters()
    assert list(kind.state_dict()) == ["s"]

    def weights(s: Tensor) -> Any:
        return torch.func.functional_call(kind, {"s": s}, (q, k), {"mask": some_mask()})

    torch.manual_seed(0)
    leaf = s.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(weights, (leaf,), atol=1e-7, fast_mode=True)
    assert not torch.equal(weights(s), weights(2 * s))


def test_hard_passes_the_gradient_of_softmax_straight_through() -> None:
    q, k = inputs()
    hard, dq, dk = weights_and_gradients("hard", q, k, mask=some_mask())
    soft, soft_dq, soft_dk = weights_and_gradients("softmax", q, k, mask=some_mask())
    assert set(hard.unique().tolist()) == {0.0, 1.0}
    assert not torch.allclose(hard, soft, atol=0.1)
    torch.testing.assert_close(dq, soft_dq)
    torch.testing.assert_close(dk, soft_dk)
    assert bool((dq != 0).any())


# --- single kinds -------------------------------------------------------------------------------------------


def test_hard_takes_the_first_of_equals() -> None:
    q, k, kw = logits_row(torch.tensor([1.0, 3.0, 3.0, 3.0, 2.0]))
    assert normaliser("hard")(q, k, **kw).tolist() == [[0, 1, 0, 0, 0]]
    hidden = torch.tensor([True, False, True, True, True])
    assert normaliser("hard")(q, k, mask=hidden, **kw).tolist() == [[0, 0, 1, 0, 0]]


def test_top_k_keeps_exactly_k_of_equals() -> None:
    q, k, kw = logits_row(torch.tensor([2.0] + [1.0] * 1000))
    weights = normaliser("top-k", k=5)(q, k, **kw)[0]
    assert weights.nonzero().flatten().tolist() == [0, 1, 2, 3, 4]
    few = torch.arange(1001) < 3
    assert normaliser("top-k", k=5)(q, k, mask=few, **kw)[0].nonzero().flatten().tolist() == [0, 1, 2]


def test_adaptive_takes_any_policy() -> None:
    q, k = inputs(batch=(2,))
    assert torch.equal(normaliser("adaptive", policy="none")(q, k), normaliser("softmax")(q, k))
    low = normaliser("adaptive", policy=EntropyTarget(0.25))(q, k)
    entropy = -(low * low.clamp(min=1e-300).log()).sum(-1)
    torch.testing.assert_close(entropy, torch.full_like(entropy, 0.25), atol=1e-5, rtol=0)
    heads = PerHead(((Constant(1.0), PAPER),))
    mixed = normaliser("adaptive", policy=heads)(q, k)
    torch.testing.assert_close(mixed[0], normaliser("softmax")(q[0], k[0]))
    torch.testing.assert_close(mixed[1], normaliser("adaptive")(q[1], k[1]))


def test_adaptive_does_not_warn_of_rows_that_see_nothing() -> None:
    policy = Polynomial((1.5,), (0.5, 6.0))  # a new one, since each warns once only
    q, k, kw = logits_row(torch.zeros(1000))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hidden = normaliser("adaptive", policy=policy)(q, k, mask=torch.zeros(1000, dtype=torch.bool), **kw)
    assert bool((hidden == 0).all())
    with pytest.warns(OutOfRangeWarning, match="entropy outside"):
        normaliser("adaptive", policy=policy)(q, k, **kw)


@pytest.mark.parametrize("name", ["sparsemax", "entmax15"])
def test_sparse_maps_hold_in_float32_over_many_near_ties(name: str) -> None:
    logits = 1e-3 * torch.rand(16_384, generator=torch.Generator().manual_seed(0)) + 500.0
    logits[5] += 1.3
    q, k, kw = logits_row(logits)
    total = normaliser(name)(q, k, **kw).double().sum().item()
    assert total == pytest.approx(1.0, abs=2e-6)  # 0.999 if the package computes it in float32


def test_stick_breaking_keeps_its_digits_beside_a_huge_logit() -> None:
    logits = torch.tensor([2.0, 1000.0, -7.0], dtype=torch.float32)
    q, k, kw = logits_row(logits)
    weights = normaliser("stick-breaking")(q, k, **kw)[0]
    left = 1 / (1 + math.exp(-7.0))
    assert weights[1].item() == pytest.approx(left, rel=1e-6)
    assert weights[0].item() == 0.0


def test_linear_rows_whose_features_vanish_still_have_weights() -> None:
    q = torch.full((2, WIDTH), -300.0)
    weights, dq, dk = weights_and_gradients("linear", q, torch.full((6, WIDTH), -300.0))
    torch.testing.assert_close(weights, torch.full((2, 6), 1 / 6))
    assert bool(dq.isfinite().all() & dk.isfinite().all())


def test_local_window_is_by_position() -> None:
    q, k = inputs()
    around = normaliser("local", window=3)(q, k)
    for i in range(QUERIES):
        own = i + KEYS - QUERIES
        assert around[i].nonzero().flatten().tolist() == [j for j in range(KEYS) if abs(own - j) < 3]
    behind = normaliser("local", window=3)(q, k, is_causal=True)
    assert behind[0].nonzero().flatten().tolist() == [KEYS - QUERIES - 2, KEYS - QUERIES - 1, KEYS - QUERIES]


# --- dispersion ---------------------------------------------------------------------------------------------

EXPONENT = {
    "softmax": -1.0,
    "adaptive": -1.0,
    "ssmax": 2 / math.log(16) - 1,
    "sigmoid": -1.0,
    "softmax-plus-one": -1.0,
    "linear": -1.0,
}
"""The power of n that the leader's weight follows; 0 for kinds not named."""


def leader_weight(kind: Normaliser, n: int, lead: float = 2.0) -> float:
    """The weight of one key at logit 1 among n − 1 at 1 − lead.

    The leader comes last, where kinds that look at positions can see it.
    """
    logits = torch.full((n,), 1.0 - lead)
    logits[-1] = 1.0
    q, k, kw = logits_row(logits)
    with torch.no_grad():
        return float(kind(q, k, **kw)[0, -1])


@every
def test_a_leader_disperses_where_said(name: str) -> None:
    kind, exponent = normaliser(name), EXPONENT.get(name, 0.0)
    assert KINDS[name].can_disperse is (exponent < 0)
    small, middle, large = (leader_weight(kind, n) for n in (16, 1024, 4096))
    assert math.log(large / middle) / math.log(4096 / 1024) == pytest.approx(exponent, abs=0.05)
    if exponent < 0:
        assert large < small / 3
    else:
        assert large == pytest.approx(small, rel=1e-5)
        assert large > 0.3


@every
def test_disperses_is_one_line_that_begins_with_the_answer(name: str) -> None:
    line = KINDS[name].disperses
    assert "\n" not in line
    assert line.startswith("yes" if KINDS[name].can_disperse else "no")


def test_what_disperses_says_of_the_sparse_maps() -> None:
    for lead in (0.25, 0.5, 1.5):
        sparsemax, entmax15 = (leader_weight(normaliser(n), 4096, lead) for n in ("sparsemax", "entmax15"))
        assert min(1.0, lead) <= sparsemax + 1e-6
        assert sparsemax == pytest.approx(min(1.0, lead), abs=1e-3)
        assert min(1.0, lead / 2) ** 2 <= entmax15 + 1e-6
        assert entmax15 == pytest.approx(min(1.0, lead / 2) ** 2, abs=0.02)
    uniform = torch.linspace(-1, 1, 4096)
    q, k, kw = logits_row(uniform)
    assert normaliser("sparsemax")(q, k, **kw).max().item() == pytest.approx(2 / math.sqrt(4096), rel=0.05)
    assert leader_weight(normaliser("entmax15"), 4096, 0.0) == pytest.approx(1 / 4096, rel=1e-5)


def test_what_disperses_says_of_options_and_positions() -> None:
    assert leader_weight(normaliser("ssmax", s=1.0), 4096) > leader_weight(normaliser("ssmax", s=1.0), 16) > 0.9
    assert leader_weight(normaliser("sigmoid", bias=0.0), 4096) == pytest.approx(1 / (1 + math.exp(-1)))
    holds = normaliser("adaptive", policy=EntropyTarget(0.5))
    assert leader_weight(holds, 4096) > 0.9
    logits = torch.full((64,), -1.0)
    logits[20] = 1.0
    q, k, kw = logits_row(logits)
    bound = (1 - 1 / (1 + math.exp(1.0))) ** (63 - 20)
    assert 0 < normaliser("stick-breaking")(q, k, **kw)[0, 20].item() <= bound
    assert normaliser("local")(q, k, **kw)[0, 20].item() == 0.0


# --- attend -------------------------------------------------------------------------------------------------


@every
def test_attend_is_weights_times_values(name: str) -> None:
    q, k = inputs(batch=(2,))
    v = torch.randn(2, KEYS, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    kind = normaliser(name)
    kw: dict[str, Any] = {"mask": some_mask(), "is_causal": True, "scale": 0.7}
    torch.testing.assert_close(attend(q, k, v, kind, **kw), kind(q, k, **kw) @ v)
    assert torch.equal(attend(q, k, v, name, **kw), attend(q, k, v, kind, **kw))


@every
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_values_that_are_not_seen_do_not_matter(name: str, poison: float) -> None:
    q, k = inputs()
    v = torch.randn(KEYS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    bad = v.clone()
    bad[0] = poison  # hidden from all
    bad[-1, 1] = poison  # seen by the last row alone
    mask = torch.arange(KEYS) > 0
    results = []
    for values in (v, bad):
        leaves = [x.clone().requires_grad_() for x in (q, k, values)]
        out = attend(leaves[0], leaves[1], leaves[2], name, mask=mask, is_causal=True)
        results.append((out, *torch.autograd.grad(out[:-1].square().sum(), leaves)))
    for given, wanted in zip(results[1][1:], results[0][1:], strict=True):
        assert torch.equal(given, wanted)
    good, out = results[0][0], results[1][0]
    assert torch.equal(out[:-1], good[:-1])
    assert out[-1].isnan().tolist() == [False, True, False]


# --- building, refusing, extending --------------------------------------------------------------------------


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(base, "_kinds", dict(base._kinds))


@pytest.mark.usefixtures("own_registry")
def test_a_kind_of_ones_own_in_a_few_lines() -> None:
    class Cold(Normaliser):
        name = "cold"
        disperses = "yes: it is softmax at β = 3"

        def normalise(self, logits: Tensor, visible: Tensor) -> Tensor:
            return visible_softmax(3 * logits, visible)

    assert normalisers()["cold"] is Cold
    q, k = inputs()
    visible = some_mask()
    bad = k.masked_fill(~visible.any(0)[:, None], math.nan)
    torch.testing.assert_close(
        normaliser("cold")(q, bad, mask=visible), normaliser("softmax")(q, k, mask=visible, scale=1.5)
    )
    assert set(NAMES) | {"cold"} <= set(normalisers())


@pytest.mark.usefixtures("own_registry")
def test_kinds_that_are_not_whole_are_refused() -> None:
    def define(**body: Any) -> type[Normaliser]:
        return type("Own", (Normaliser,), {"__module__": __name__, **body})

    def sums(self: Normaliser, logits: Tensor, visible: Tensor) -> Tensor:
        return logits.sum(-1)

    assert define().__name__ == "Own"
    assert "Own" not in {kind.__name__ for kind in normalisers().values()}
    with pytest.raises(ArgumentError, match="disperses: got nothing on Own"):
        define(name="own")
    with pytest.raises(ArgumentError, match="name: got ''"):
        define(name="", disperses="no")
    with pytest.raises(ArgumentError, match="name: got 'softmax'; allowed: a name that is free"):
        define(name="softmax", disperses="no")
    with pytest.raises(TypeError, match="normalise"):
        define(name="own", disperses="no")()
    # the same class defined again, as a notebook does, replaces itself
    again = define(name="own", disperses="no", normalise=sums)
    assert normalisers()["own"] is again
    with pytest.raises(ArgumentError, match=r"normalise: got shape \(5,\).*\(5, 23\)"):
        normaliser("own")(*inputs())


@every
def test_modules_can_be_copied_and_described(name: str) -> None:
    q, k = inputs()
    kind = normaliser(name)
    assert torch.equal(copy.deepcopy(kind)(q, k), kind(q, k))
    assert repr(kind).startswith(type(kind).__name__ + "(")


@pytest.mark.parametrize("name", ["sparsemax", "entmax15"])
def test_a_missing_package_is_named_when_it_is_needed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "entmax", None)
    with pytest.raises(MissingExtraError, match=rf"normaliser\('{name}'\).*pip install 'entmax>="):
        normaliser(name)
