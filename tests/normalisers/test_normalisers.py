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
from sharpmax.normalisers.base import Normaliser, attend, normaliser, normalisers
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
SUM_TO_LESS_OR_MORE = {"sigmoid", "softmax-plus-one", "stick-breaking"}
QUERIES, KEYS, WIDTH = 5, 23, 4
"""More keys than the defaults of top-k (8) and local (16), so that both have something to leave out."""

FLOAT_MIN = torch.finfo(torch.float32).min

every = pytest.mark.parametrize("name", NAMES)


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


def _softmax(logits: list[float], seen: list[int], beta: float = 1.0) -> dict[int, float]:
    top = max((beta * logits[j] for j in seen), default=0.0)
    exps = {j: math.exp(beta * logits[j] - top) for j in seen}
    total = sum(exps.values())
    return {j: e / total for j, e in exps.items()}


def oracle_adaptive(row: Row) -> dict[int, float]:
    plain = _softmax(row.logits(), row.seen())
    h = -sum(p * math.log(p) for p in plain.values() if p > 0)
    beta = -0.037 * h**4 + 0.481 * h**3 - 2.3 * h**2 + 4.917 * h - 1.791
    return _softmax(row.logits(), row.seen(), max(1.0, beta) if h > 0.5 else 1.0)


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


def oracle_linear(row: Row) -> dict[int, float]:
    def phi(x: float) -> float:
        return x + 1 if x > 0 else math.exp(x)

    scores = {j: sum(phi(a) * phi(b) for a, b in zip(row.q, row.k[j], strict=True)) for j in row.seen()}
    return {j: s / sum(scores.values()) for j, s in scores.items()}


def oracle_stick_breaking(row: Row) -> dict[int, float]:
    logits, left, weights = row.logits(), 1.0, {}
    for j in reversed(row.seen()):
        weights[j] = left / (1 + math.exp(-logits[j]))
        left *= 1 / (1 + math.exp(logits[j]))
    return weights


def _first(row: Row, count: int) -> list[int]:
    """The visible keys with the largest logits, the first ones on ties."""
    logits = row.logits()
    return sorted(row.seen(), key=lambda j: (-logits[j], j))[:count]


ORACLES: dict[str, Callable[[Row], dict[int, float]]] = {
    "softmax": lambda row: _softmax(row.logits(), row.seen()),
    "adaptive": oracle_adaptive,
    "ssmax": lambda row: _softmax(row.logits(), row.seen(), math.log(max(len(row.seen()), 1)) / math.log(16)),
    "sparsemax": lambda row: _by_bisection(row, lambda s, tau: max(s - tau, 0.0)),
    "entmax15": lambda row: _by_bisection(row, lambda s, tau: max(s / 2 - tau, 0.0) ** 2),
    "sigmoid": lambda row: {j: 1 / (1 + len(row.seen()) * math.exp(-row.logits()[j])) for j in row.seen()},
    "softmax-plus-one": lambda row: _softmax([*row.logits(), 0.0], [*row.seen(), len(row.k)]),
    "linear": oracle_linear,
    "stick-breaking": oracle_stick_breaking,
    "hard": lambda row: dict.fromkeys(_first(row, 1), 1.0),
    "top-k": lambda row: _softmax(row.logits(), _first(row, 8)),
    "local": lambda row: _softmax(row.logits(), [j for j in row.seen() if -16 < j - row.own < 16]),
}


def expected(name: str, q: Tensor, k: Tensor, visible: Tensor, scale: float) -> Tensor:
    """The oracle's weights `[Lq, Lk]`, float64, for one head."""
    rows = []
    for i in range(q.shape[0]):
        own = i + k.shape[0] - q.shape[0]
        weights = ORACLES[name](Row(q[i].tolist(), k.tolist(), visible[i].tolist(), own, scale))
        rows.append([weights.get(j, 0.0) for j in range(k.shape[0])])
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


@every
def test_weights_are_those_of_the_naive_loop(name: str) -> None:
    q, k = inputs()
    visible = some_mask()
    causal = torch.tensor([[j <= i + KEYS - QUERIES for j in range(KEYS)] for i in range(QUERIES)])
    for scale in (None, 1.0, 20.0):
        given = normaliser(name)(q, k, mask=visible, scale=scale)
        same(given, expected(name, q, k, visible, 1 / math.sqrt(WIDTH) if scale is None else scale))
    same(normaliser(name)(q, k, is_causal=True), expected(name, q, k, causal, 0.5))
    same(normaliser(name)(q, k, mask=visible, is_causal=True), expected(name, q, k, causal & visible, 0.5))
    made = normaliser(name)
    assert torch.equal(copy.deepcopy(made)(q, k), made(q, k))
    assert repr(made).startswith(type(made).__name__ + "(")
    short = made(k, q, is_causal=True)  # 23 queries, 5 keys: rows before the first key see nothing
    assert bool((short[: KEYS - QUERIES] == 0).all())
    assert bool((short[KEYS - QUERIES :].sum(-1) > 0).all())


def same(given: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(given, wanted, rtol=1e-10, atol=1e-13)


@every
@pytest.mark.parametrize("hiding", [None, -math.inf, FLOAT_MIN, FLOAT_MIN / 2])
def test_hidden_keys_get_exactly_nothing(name: str, hiding: float | None) -> None:
    q, k = inputs(dtype=torch.float32)
    visible = some_mask()
    mask = visible if hiding is None else torch.zeros(QUERIES, KEYS).masked_fill(~visible, hiding)
    weights = normaliser(name)(q, k, mask=mask)
    assert bool((weights[~visible] == 0).all())
    assert torch.equal(weights, normaliser(name)(q, k, mask=visible))


@pytest.mark.parametrize("name", [name for name in NAMES if KINDS[name].adds_mask])
def test_a_float_mask_is_added_to_the_logits(name: str) -> None:
    logits = torch.linspace(-1, 1, KEYS, dtype=torch.float64)
    bias = torch.randn(KEYS, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    q, k, kw = logits_row(logits)
    _, biased, _ = logits_row(logits + bias)
    torch.testing.assert_close(normaliser(name)(q, k, mask=bias, **kw), normaliser(name)(q, biased, **kw))


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


def equal(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@every
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_a_hidden_key_holds_does_not_matter(name: str, poison: float) -> None:
    q, k = inputs()
    visible = torch.ones(1, KEYS, dtype=torch.bool)
    visible[0, [0, 7, KEYS - 1]] = False
    bad = k.clone()
    bad[0], bad[7, 2], bad[KEYS - 1] = poison, poison, poison
    for mask in (visible, torch.zeros(1, KEYS).masked_fill(~visible, -math.inf)):
        clean = weights_and_gradients(name, q, k, mask=mask)
        assert equal(weights_and_gradients(name, q, bad, mask=mask), clean)
    assert bool((clean[2] != 0).any())
    # A key in the future does not matter to earlier rows, though the last one sees it.
    bad = k.clone()
    bad[-1] = poison
    before = slice(0, QUERIES - 1)
    clean = weights_and_gradients(name, q, k, before, is_causal=True)
    assert equal(weights_and_gradients(name, q, bad, before, is_causal=True), clean)
    assert bool(normaliser(name)(q, bad, is_causal=True)[-1, -1].isnan())


@every
def test_a_row_that_sees_nothing_is_zero_with_zero_gradient(name: str) -> None:
    q, k = inputs()
    q[1] = math.nan  # a padded query
    weights, dq, dk = weights_and_gradients(name, q, k, mask=some_mask())
    assert bool((weights[1] == 0).all() & (dq[1] == 0).all())
    assert bool(dq.isfinite().all() & dk.isfinite().all() & (dk != 0).any())
    for nothing in weights_and_gradients(name, *inputs(), mask=torch.zeros(1, 1, dtype=torch.bool)):
        assert bool((nothing == 0).all())


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
def test_shapes(name: str) -> None:
    q, k = inputs()
    for queries, keys in ((0, 7), (3, 0), (1, 1), (2, 1)):
        weights, dq, dk = weights_and_gradients(name, q[:queries], k[:keys])
        assert weights.shape == (queries, keys)
        assert bool(dq.isfinite().all() & dk.isfinite().all())
        if keys == 1 and name not in SUM_TO_LESS_OR_MORE and name != "local":
            assert bool((weights == 1).all())
    # Batches broadcast, and need not be contiguous.
    q, k = inputs(batch=(2, 3))[0], inputs(1, batch=(3,))[1]
    mask = torch.stack([some_mask(s) for s in range(3)])
    weights = normaliser(name)(q.mT.contiguous().mT, k.mT.contiguous().mT, mask=mask)
    assert weights.shape == (2, 3, QUERIES, KEYS)
    torch.testing.assert_close(weights[1, 2], normaliser(name)(q[1, 2], k[2], mask=mask[2]))


@every
def test_autocast_does_not_cost_precision(name: str) -> None:
    q, k = inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = normaliser(name)(q, k)
    assert torch.equal(inside, normaliser(name)(q, k))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "hard"])
def test_gradients_are_those_of_the_values(name: str) -> None:
    q, k = (x.requires_grad_() for x in inputs(11))
    kind, visible = normaliser(name).double(), some_mask()
    torch.manual_seed(0)  # the fast mode compares along random directions
    assert torch.autograd.gradcheck(lambda q, k: kind(q, k, mask=visible), (q, k), atol=1e-7, fast_mode=True)


def test_ssmax_learns_its_scalar() -> None:
    q, k = inputs()
    kind = normaliser("ssmax").double()
    assert list(kind.state_dict()) == ["s"]

    def weights(s: Tensor) -> Any:
        return torch.func.functional_call(kind, {"s": s}, (q, k), {"mask": some_mask()})

    torch.manual_seed(0)
    leaf = next(kind.parameters()).detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(weights, (leaf,), atol=1e-7, fast_mode=True)
    assert not torch.equal(weights(leaf), weights(2 * leaf))


def test_hard_passes_the_gradient_of_softmax_straight_through() -> None:
    q, k = inputs()
    hard, dq, dk = weights_and_gradients("hard", q, k, mask=some_mask())
    _, soft_dq, soft_dk = weights_and_gradients("softmax", q, k, mask=some_mask())
    assert set(hard.unique().tolist()) == {0.0, 1.0}
    torch.testing.assert_close(dq, soft_dq)
    torch.testing.assert_close(dk, soft_dk)


def test_ties_go_to_the_first() -> None:
    q, k, kw = logits_row(torch.tensor([1.0, 3.0, 3.0, 3.0, 2.0]))
    assert normaliser("hard")(q, k, **kw).tolist() == [[0, 1, 0, 0, 0]]
    hidden = torch.tensor([True, False, True, True, True])
    assert normaliser("hard")(q, k, mask=hidden, **kw).tolist() == [[0, 0, 1, 0, 0]]
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
    mixed = normaliser("adaptive", policy=PerHead(((Constant(1.0), PAPER),)))(q, k)
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
def test_sparse_maps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = 1e-3 * torch.rand(16_384, generator=torch.Generator().manual_seed(0)) + 500.0
    logits[5] += 1.3
    q, k, kw = logits_row(logits)
    total = normaliser(name)(q, k, **kw).double().sum().item()
    assert total == pytest.approx(1.0, abs=2e-6)  # 0.999 if the package computes it in float32
    monkeypatch.setitem(sys.modules, "entmax", None)
    with pytest.raises(MissingExtraError, match=rf"normaliser\('{name}'\).*pip install 'entmax>="):
        normaliser(name)


def test_stick_breaking_keeps_its_digits_beside_a_huge_logit() -> None:
    q, k, kw = logits_row(torch.tensor([2.0, 1000.0, -7.0], dtype=torch.float32))
    weights = normaliser("stick-breaking")(q, k, **kw)[0]
    assert weights[1].item() == pytest.approx(1 / (1 + math.exp(-7.0)), rel=1e-6)
    assert weights[0].item() == 0.0


def test_linear_rows_whose_features_vanish_still_have_weights() -> None:
    q = torch.full((2, WIDTH), -300.0)
    weights, dq, dk = weights_and_gradients("linear", q, torch.full((6, WIDTH), -300.0))
    torch.testing.assert_close(weights, torch.full((2, 6), 1 / 6))
    assert bool(dq.isfinite().all() & dk.isfinite().all())


EXPONENT = dict.fromkeys(("softmax", "adaptive", "sigmoid", "softmax-plus-one", "linear"), -1.0)
EXPONENT["ssmax"] = 2 / math.log(16) - 1
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
def test_a_leader_disperses_as_declared(name: str) -> None:
    kind, exponent = normaliser(name), EXPONENT.get(name, 0.0)
    assert kind.disperses.startswith("yes" if exponent < 0 else "no")
    assert "\n" not in kind.disperses
    small, middle, large = (leader_weight(kind, n) for n in (16, 1024, 4096))
    assert math.log(large / middle) / math.log(4096 / 1024) == pytest.approx(exponent, abs=0.05)
    if exponent < 0:
        assert large < small / 3
    else:
        assert large == pytest.approx(small, rel=1e-5)
        assert large > 0.3


@every
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_attend_is_weights_times_the_values_that_are_seen(name: str, poison: float) -> None:
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
    torch.testing.assert_close(good, normaliser(name)(q, k, mask=mask, is_causal=True) @ v)
    assert torch.equal(out[:-1], good[:-1])
    assert out[-1].isnan().tolist() == [False, True, False]


def test_kinds_that_are_not_whole_are_refused() -> None:
    def define(**body: Any) -> type[Normaliser]:
        return type("Own", (Normaliser,), {"__module__": __name__, **body})

    def sums(self: Normaliser, logits: Tensor, visible: Tensor) -> Tensor:
        return logits.sum(-1)

    assert define() not in normalisers().values()  # it has no name
    with pytest.raises(TypeError, match="normalise"):
        define(name="own", disperses="no")()
    # the same class defined again, as a notebook does, replaces itself
    again = define(name="own", disperses="no", normalise=sums)
    assert normalisers()["own"] is again
    with pytest.raises(ArgumentError, match=r"normalise: got shape \(5,\).*\(5, 23\)"):
        normaliser("own")(*inputs())
