"""`capture` without a model: calls of torch's own attention function and of `sm.attention`."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import sharpmax as sm
from sharpmax.policies.basic import Constant
from sharpmax.probing.capture import LOCAL, STATISTICS, Capture
from sharpmax.stats.call import AttentionCall
from tests.probing import oracle

Q, K, D = 9, 40, 6


def drawn(*lead: int, queries: int = Q, keys: int = K, key_heads: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    behind = lead if key_heads is None else (*lead[:-1], key_heads)
    return 2 * torch.randn(*lead, queries, D), torch.randn(*behind, keys, D), torch.randn(*behind, keys, D)


def check(found: Capture, expected: oracle.Rows, tolerance: float = 2e-5) -> None:
    """One call was seen, and it is the oracle's; any leading axes are one batch."""
    assert [call.layer for call in found.calls] == [0]
    for name, value in found.calls[0].statistics.items():
        theirs = expected[name]
        theirs = theirs.reshape(-1, *(1, 1, *theirs.shape)[-2:])
        assert value.shape == theirs[..., found.calls[0].places.numpy()].shape
        assert np.allclose(value.numpy(), theirs[..., found.calls[0].places.numpy()], atol=tolerance, rtol=1e-5), name


def float_mask(*shape: int, low: float = -torch.inf) -> Tensor:
    return torch.randn(shape).masked_fill(torch.rand(shape) < 0.3, low)


def bool_mask(*shape: int) -> Tensor:
    return torch.rand(shape) < 0.6


PLAIN = drawn(2, 4)
CASES: dict[str, tuple[tuple[Tensor, ...], dict[str, Any]]] = {
    "plain": (PLAIN, {}),
    "one head": (drawn(), {}),
    "no batch": (drawn(4), {}),
    "two batch axes": (drawn(2, 3, 4), {}),
    "two batch axes, mask": (drawn(2, 3, 4), {"attn_mask": bool_mask(3, 1, Q, K)}),
    "causal": (drawn(2, 4, keys=Q), {"is_causal": True}),
    "causal, more keys": (PLAIN, {"is_causal": True}),
    "causal, more queries": (drawn(2, 4, queries=50), {"is_causal": True}),
    "causal, one query": (drawn(2, 4, queries=1), {"is_causal": True}),
    "scale": (PLAIN, {"scale": 1.3}),
    "dropout": (PLAIN, {"dropout_p": 0.5}),
    "boolean mask": (PLAIN, {"attn_mask": bool_mask(Q, K)}),
    "padding mask": (PLAIN, {"attn_mask": bool_mask(2, 1, 1, K)}),
    "mask by row": (PLAIN, {"attn_mask": bool_mask(2, 1, Q, 1)}),
    "float mask": (PLAIN, {"attn_mask": float_mask(2, 4, Q, K)}),
    "float mask, one row": (PLAIN, {"attn_mask": float_mask(1, K)}),
    "float mask of finfo.min": (PLAIN, {"attn_mask": float_mask(2, 1, Q, K, low=torch.finfo(torch.float32).min)}),
    "grouped": (drawn(2, 4, key_heads=2), {"enable_gqa": True}),
    "grouped, no batch, causal": (drawn(6, key_heads=2), {"enable_gqa": True, "is_causal": True}),
    "grouped, mask": (drawn(2, 4, key_heads=1), {"enable_gqa": True, "attn_mask": bool_mask(2, 4, Q, K)}),
    "keys broadcast": ((PLAIN[0], *(x[:1] for x in PLAIN[1:])), {}),
    "queries broadcast": ((PLAIN[0][:1], *PLAIN[1:]), {"attn_mask": bool_mask(2, 1, Q, K)}),
    "heads of keys broadcast": ((PLAIN[0], *(x[:, :1] for x in PLAIN[1:])), {}),
}


SHARPENED = ("one head", "causal, more queries", "float mask", "grouped, mask")


@pytest.mark.parametrize(("case", "beta"), [*((case, None) for case in CASES), *((case, 1.7) for case in SHARPENED)])
def test_captured_calls_equal_the_oracle(case: str, beta: float | None) -> None:
    """Calls of torch's function, and of `sm.attention` with a policy."""
    (q, k, v), options = CASES[case]
    attention = F.scaled_dot_product_attention if beta is None else partial(sm.attention, policy=Constant(beta))
    torch.manual_seed(5)
    plain = attention(q, k, v, **options)
    torch.manual_seed(5)
    with sm.capture(rows="all") as found:
        out = attention(q, k, v, **options)
    assert torch.equal(out, plain)
    mask, causal = options.get("attn_mask"), options.get("is_causal", False)
    check(found, oracle.dense(q, k, mask, causal, options.get("scale"), beta=beta or 1.0))
    assert found.calls[0].keys == k.shape[-2]


@pytest.mark.parametrize("align", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("keys", [Q, K])
def test_the_causal_biases_of_torch(align: Any, keys: int) -> None:
    q, k, v = drawn(2, 4, keys=keys)
    bias = align(Q, keys)
    visible = torch.ones(Q, keys).tril(0 if align is causal_upper_left else keys - Q).bool()
    expected = oracle.dense(q, k, visible, False)
    for attention in (F.scaled_dot_product_attention, partial(sm.attention, policy=None)):
        plain = attention(q, k, v, attn_mask=bias)
        with sm.capture(rows="all") as found:
            assert torch.equal(attention(q, k, v, attn_mask=bias), plain)
        check(found, expected)


def test_a_key_of_nan_is_seen_by_its_rows_alone_and_the_call_counts_once() -> None:
    q, k, v = drawn(2, 4)
    mask = bool_mask(2, 1, Q, K)
    mask[:, :, : Q // 2, 3], mask[:, :, Q // 2 :, 3] = False, True
    with sm.capture(rows="all") as clean:
        sm.attention(q, k, v, attn_mask=mask, policy=Constant(2.0))
    k[:, :, 3] = torch.nan
    with sm.capture(rows="all") as found:
        out = sm.attention(q, k, v, attn_mask=mask, policy=Constant(2.0))
    assert len(found.calls) == 1
    for name in set(STATISTICS) - {"count"}:
        ours, theirs = found.stack(name)[0], clean.stack(name)[0]
        assert torch.equal(ours[..., : Q // 2], theirs[..., : Q // 2])
        assert ours[..., Q // 2 :].isnan().all()
    assert torch.equal(found.stack("entropy")[0].isnan(), out.isnan().any(-1))


def test_calls_are_numbered_and_chosen_rows_are_those_among_all() -> None:
    q, k, v = drawn(1, 2, queries=100)
    with sm.capture(rows="all") as every, sm.capture(rows="log") as log, sm.capture() as last:
        F.scaled_dot_product_attention(q, k, v)
        sm.attention(q, k, v, policy=None)
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
    for part in (every, log, last):
        assert [call.layer for call in part.calls] == [0, 1, 2]
        for some, whole in zip(part.calls, every.calls, strict=True):
            for name in STATISTICS:
                assert torch.allclose(some.statistics[name], whole.statistics[name][..., some.places], atol=1e-6)
    assert torch.equal(every.stack("entropy")[0], every.stack("entropy")[1])
    F.scaled_dot_product_attention(*PLAIN)  # after the block
    assert len(last.calls) == 3


@pytest.mark.parametrize("shape", [(0, 4, Q), (2, 4, 0)])
def test_empty_calls(shape: tuple[int, int, int]) -> None:
    *lead, queries = shape
    with sm.capture(rows="all") as found:
        F.scaled_dot_product_attention(*drawn(*lead, queries=queries))
    assert found.calls[0].statistics["entropy"].shape == shape


def test_memory_is_that_of_a_block_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = drawn(2, queries=2000, keys=3000)
    asked: list[int] = []
    logits = AttentionCall.logits

    def counted(self: AttentionCall, places: Tensor) -> Any:
        found = logits(self, places)
        assert found.hidden is not None
        asked.extend((found.values.numel(), found.hidden.numel()))
        return found

    monkeypatch.setattr(AttentionCall, "logits", counted)
    with sm.capture(rows="all") as found:
        F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(2000, 3000))
    assert max(asked) <= 1 << 22
    assert sum(asked[::2]) == 2 * 2000 * 3000
    entropy = sm.row_stats(q, k, attn_mask=causal_lower_right(2000, 3000)).entropy
    assert torch.allclose(found.stack("entropy")[0, 0], entropy, atol=1e-4)


def test_what_is_compiled_shows_nothing() -> None:
    compiled = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), backend="aot_eager")
    plain = compiled(*PLAIN)
    with sm.capture() as found:
        assert torch.equal(compiled(*PLAIN), plain)
    assert found.calls == []


@pytest.mark.parametrize(("keys", "scale"), [(1, 1.0), (LOCAL, 0.0), (LOCAL + 1, 1e4), (131_072, 1.0)])
def test_any_number_of_keys_and_size_of_logits(keys: int, scale: float) -> None:
    q, k = scale * torch.randn(1, 1, 1, D), torch.randn(1, 1, keys, D)
    with sm.capture() as found:
        F.scaled_dot_product_attention(q, k, k)
    check(found, oracle.dense(q, k, None, False), 2e-3 if scale > 1.0 else 2e-5)
    statistics = found.calls[0].statistics
    assert statistics["entropy"].item() <= np.float32(math.log(keys))
    # Nothing of the logits is kept.
    assert all(value.untyped_storage().nbytes() == 4 for value in statistics.values())
