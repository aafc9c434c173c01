"""Temperature rules that public models ship, against their published formulas."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sharpmax as sm
from sharpmax.errors import UnsupportedError
from sharpmax.policies import Constant, LogLength, LogScale, PerHead, from_config
from sharpmax.stats.statistics import RowStats

# β at position i, counted from 0, as the models' own code and the papers have it.
FORMULAS = {
    "llama4": lambda i: math.log1p(math.floor((i + 1.0) / 8192)) * 0.1 + 1.0,
    "ministral3": lambda i: 1 + 0.1 * math.log(1 + math.floor(i / 16384)),
    "inkling:128000": lambda i: 1.0 + 0.1 * math.log(max((i + 1) / 128000, 1.0)),
    "qwen2.5-1m": lambda i: max(1.0, 0.1 * math.log((i + 1) / 262144) + 1),
    "qwen": lambda i: math.log(i + 1, 8192) if i + 1 > 8192 else 1.0,
    "grok2": lambda i: math.log(i + 1, 1024) if i + 1 > 1024 else 1.0,
    "ssmax:0.43": lambda i: 0.43 * math.log(i + 1),
    "yarn:4": lambda i: (0.1 * math.log(4) + 1) ** 2,
    "llama4:100": lambda i: math.log1p(math.floor((i + 1.0) / 100)) * 0.1 + 1.0,
}


STEPS = [around + near for around in (100, 1024, 8192, 16384, 32768) for near in range(-2, 3)]


@pytest.mark.parametrize("name", FORMULAS)
@given(position=st.integers(1, 2**21))
def test_formulas(name: str, position: int) -> None:
    places = [position, *STEPS]
    found = sm.load_policy(name).beta(RowStats.anchored(torch.tensor(places) + 1))
    assert found.tolist() == pytest.approx([FORMULAS[name](place) for place in places], rel=1e-12)


def test_ssmax_has_a_scale_and_a_bias_per_head() -> None:
    q, k = torch.randn(2, 1, 2, 6, 4, dtype=torch.float64).unbind()
    policy = PerHead.of(LogScale, scale=[[0.4, 0.9]], bias=[[0.0, 0.3]])
    assert LogScale(0.0, 64.0).is_identity
    assert not any(one.is_identity for one in policy.policies[0])
    out = sm.attention(q, k, k, policy=policy)
    for head, beta in enumerate((0.4 * math.log(6), 0.3 + 0.9 * math.log(6))):
        expected = (beta * 0.5 * q[0, head] @ k[0, head].T).softmax(-1) @ k[0, head]
        torch.testing.assert_close(out[0, head], expected)


def test_configurations() -> None:
    """Rules of models whose code is not in transformers; the others are tested with their models."""
    assert from_config(SimpleNamespace(use_logn_attn=True, seq_length=2048)) == LogLength(2048.0)
    assert from_config(SimpleNamespace(attn_temperature_len=1024)) == sm.load_policy("grok2")
    long = SimpleNamespace(dual_chunk_attention_config={"original_max_position_embeddings": 262144})
    assert from_config(SimpleNamespace(text_config=long)) == sm.load_policy("qwen2.5-1m")
    assert from_config(SimpleNamespace(rope_parameters={"rope_type": "yarn", "factor": 4.0})) is None
    rotary = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16384}
    assert from_config(SimpleNamespace(rope_parameters=rotary)) == sm.load_policy("ministral3")
    with pytest.raises(UnsupportedError, match="sliding_window"):
        from_config(SimpleNamespace(rope_parameters=rotary, sliding_window=4096))
    llama = SimpleNamespace(
        attn_temperature_tuning=True, attn_scale=0.1, floor_scale=8192, no_rope_layers=[1, 0], num_attention_heads=2
    )
    rule = sm.load_policy("llama4")
    assert from_config(llama) == PerHead(((Constant(), Constant()), (rule, rule)))
