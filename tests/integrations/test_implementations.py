"""Policies in front of flash attention, flex attention and attention with sinks.

The functions of flash attention are replaced by stand-ins with their interface, written out densely.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import sharpmax as sm
from sharpmax.errors import UnsupportedError
from sharpmax.policies import PAPER, Constant, LogLength, PerHead, Policy
from tests.integrations.families import _LLAMA, FAMILIES, LENGTH, Family, transformers
from tests.integrations.oracle import by_hand

pytestmark = pytest.mark.filterwarnings(
    "ignore::sharpmax.errors.OutOfRangeWarning", "ignore:flex_attention called without"
)
flash_utils = transformers.modeling_flash_attention_utils

MIXED = PerHead(((Constant(2.0), LogLength(3.0), PAPER, Constant(1.0)), (PAPER, PAPER, LogLength(2.0), Constant(0.5))))
POLICIES = {"constant": Constant(2.0), "log-length": LogLength(3.0), "paper": PAPER, "mixed": MIXED}
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def flash(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), s_aux: Tensor | None = None, **unused: Any,
) -> Tensor:  # fmt: skip
    """`flash_attn_func`: q `[B, L, H, D]`; causal limits are aligned to the last key."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    place = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
    hidden = (place < 0) & causal
    if window_size[0] >= 0:
        hidden = hidden | (place > window_size[0]) | (place < -window_size[1])
    s = s.masked_fill(hidden, -torch.inf)
    if s_aux is not None:
        s = torch.cat([s, s_aux.view(1, -1, 1, 1).expand(*s.shape[:-1], 1)], dim=-1)
    weights = s.softmax(-1)[..., : k.shape[1]].nan_to_num(0.0)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int = 0,
    max_seqlen_k: int = 0, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), s_aux: Tensor | None = None, **unused: Any,
) -> Tensor:  # fmt: skip
    """`flash_attn_varlen_func`: sequences one after the other."""
    parts = []
    for number in range(len(cu_seqlens_q) - 1):
        rows, keys = (slice(int(cu[number]), int(cu[number + 1])) for cu in (cu_seqlens_q, cu_seqlens_k))
        one = (q[None, rows], k[None, keys], v[None, keys])
        parts.append(flash(*one, 0.0, softmax_scale, causal, window_size, s_aux)[0])
    return torch.cat(parts)


@pytest.fixture
def flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = (flash, varlen, None, flash_utils._pad_input, flash_utils._unpad_input)
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)
    monkeypatch.setattr(flash_utils, "_lazy_imports", lambda *args, **kwargs: functions)


def with_attention(family: Family, name: str) -> Any:
    model = family.build("sdpa").double()
    for part in model.modules():
        if hasattr(part, "config"):
            part.config._attn_implementation_internal = name
    return model


@every_policy
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "modernbert"])
@pytest.mark.parametrize("version", [2, 3])
def test_flash_attention(flash_attention: None, family: str, policy: Policy, version: int) -> None:
    known = FAMILIES[family]
    reference, model = known.build("sdpa").double(), with_attention(known, f"flash_attention_{version}")
    plain = known.logits(model)
    torch.testing.assert_close(plain, known.logits(reference))
    with sm.applied(reference, policy), sm.applied(model, policy):
        found, expected = known.logits(model), known.logits(reference)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)
    assert (expected - plain).abs().max() > 1e-3
    assert torch.equal(known.logits(model), plain)
    assert model.config._attn_implementation == f"flash_attention_{version}"


@every_policy
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["llama", "mistral", "bert"])
def test_flash_attention_with_padding(flash_attention: None, family: str, side: str, policy: Policy) -> None:
    known = FAMILIES[family]
    reference, model = known.build("sdpa").double(), with_attention(known, "flash_attention_2")
    inputs = known.inputs(model)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, slice(None, 4) if side == "left" else slice(LENGTH - 4, None)] = 0
    with sm.applied(reference, policy), sm.applied(model, policy):
        found, expected = (known.logits(one, **inputs, attention_mask=mask) for one in (model, reference))
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-8, atol=1e-9)
    broken = torch.ones_like(mask)
    broken[1, 5] = 0
    if any(one.needs for one in [policy]):
        with pytest.raises(UnsupportedError, match="padding between tokens"), sm.applied(model, policy):
            known.logits(model, **inputs, attention_mask=broken)


@every_policy
@pytest.mark.parametrize("given", ["positions", "starts"])
def test_packed_sequences(flash_attention: None, policy: Policy, given: str) -> None:
    known = FAMILIES["llama"]
    reference, model = known.build("sdpa").double(), with_attention(known, "flash_attention_2")
    ids = torch.randint(3, 97, (1, 11), generator=torch.Generator().manual_seed(3))
    positions = torch.cat([torch.arange(4), torch.arange(7)])[None]
    starts = torch.tensor([0, 4, 11], dtype=torch.int32)
    more = {} if given == "positions" else {
        "cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 7, "max_length_k": 7
    }  # fmt: skip
    with sm.applied(reference, policy), sm.applied(model, policy):
        found = model(input_ids=ids, position_ids=positions, use_cache=False, **more).logits
        expected = torch.cat([reference(input_ids=part).logits for part in (ids[:, :4], ids[:, 4:])], dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "cache"),
    [("flash_attention_2", "dynamic"), ("flash_attention_2", "static"), ("flex_attention", "dynamic")],
)
def test_generation(flash_attention: None, flex_attention: None, name: str, cache: str) -> None:
    known = FAMILIES["llama"]
    reference, model = known.build("sdpa").double(), with_attention(known, name)
    options = {"max_new_tokens": 3, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    more = {} if cache == "dynamic" else {"cache_implementation": "static", "disable_compile": True}
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, :4] = 0
    inputs = {**known.inputs(model), "attention_mask": mask}
    with sm.applied(reference, MIXED), sm.applied(model, MIXED):
        expected = reference.generate(**inputs, **options)
        found = model.generate(**inputs, **options, **more)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-7, atol=1e-8)


@pytest.fixture
def flex_attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's own flex attention, not compiled and without gradients, which it has none of on a CPU."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")

    def attend(query: Tensor, key: Tensor, value: Tensor, training: bool = False, **kwargs: Any) -> Any:
        for name in ("return_aux", "return_lse"):
            kwargs.pop(name, None)
        return flex.flex_attention(query, key, value, **kwargs)

    def block_mask(*args: Any, _compile: bool = False, **kwargs: Any) -> Any:
        return flex.create_block_mask(*args, **kwargs)

    monkeypatch.setattr(transformers.integrations.flex_attention, "compile_friendly_flex_attention", attend)
    monkeypatch.setattr(transformers.masking_utils, "create_block_mask", block_mask)
    with torch.no_grad():
        yield


@every_policy
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_flex_attention(flex_attention: None, family: str, padded: bool, policy: Policy) -> None:
    known = FAMILIES[family]
    reference, model = known.build("sdpa").double(), with_attention(known, "flex_attention")
    inputs = known.inputs(model)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, : 4 * padded] = 0
    with sm.applied(reference, policy), sm.applied(model, policy):
        found, expected = (known.logits(one, **inputs, attention_mask=mask) for one in (model, reference))
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention"])
def test_capture_sees_what_sdpa_shows(flash_attention: None, flex_attention: None, name: str) -> None:
    known = FAMILIES["mistral"]
    reference, model = known.build("sdpa").double(), with_attention(known, name)
    stacks = []
    for one in (reference, model):
        with sm.applied(one, "paper"), sm.capture(one, rows="all") as found:
            known.logits(one)
        stacks.append([found.stack(statistic) for statistic in ("entropy", "count", "top")])
    torch.testing.assert_close(stacks[1], stacks[0])


@pytest.mark.parametrize(
    ("name", "options"), [("softcap", 5.0), ("position_bias", torch.zeros(1)), ("cache", object())]
)
def test_what_cannot_be_exact_is_refused(flash_attention: None, name: str, options: Any) -> None:
    model = with_attention(FAMILIES["llama"], "flash_attention_2")
    with (
        sm.applied(model, Constant(2.0)),
        pytest.raises(UnsupportedError, match=rf"\({name}\), under attn_impl.*'eager'"),
    ):
        FAMILIES["llama"].logits(model, **FAMILIES["llama"].inputs(model), **{name: options})


_OSS = {
    **_LLAMA, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
OSS = Family("gpt-oss", "GptOssForCausalLM", "GptOssConfig", _OSS)


def gpt_oss(name: str = "eager") -> Any:
    model = OSS.build("eager")  # its experts are not there in float64
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, 1.0, 1.0)
    if name != "eager":
        model.config._attn_implementation_internal = name
    return model


@every_policy
@pytest.mark.parametrize("name", ["eager", "flash_attention_3"])
def test_beta_scales_logits_and_not_the_sink(flash_attention: None, name: str, policy: Policy) -> None:
    model = gpt_oss()
    plain = OSS.logits(model)
    with by_hand(model, policy):
        expected = OSS.logits(model)
    with by_hand(model, Constant(1.0)):
        torch.testing.assert_close(OSS.logits(model), plain, rtol=1e-4, atol=1e-4)
    other = gpt_oss(name)
    with sm.applied(other, policy):
        found = OSS.logits(other)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (expected - plain).abs().max() > 1e-3


def test_rows_with_sinks_show_their_keys_alone_and_constants_fold() -> None:
    model = gpt_oss()
    with sm.capture(model, rows="all") as found:
        OSS.logits(model)
    counts = torch.arange(1, LENGTH + 1)
    assert torch.equal(found.stack("count")[1, 0, 0], counts.float())
    assert torch.equal(found.stack("count")[0, 0, 0], counts.clamp_max(5).float())
    assert found.stack("entropy")[1, :, :, -1].max() <= math.log(LENGTH)
    policy = PerHead.of(Constant, value=[[2.0, 0.5, 1.5, 1.0], [1.0, 3.0, 1.2, 0.8]])
    with sm.applied(model, policy):
        expected = OSS.logits(model)
    torch.testing.assert_close(OSS.logits(sm.fold(model, policy)), expected, rtol=1e-4, atol=1e-4)
    model.config._attn_implementation_internal = "sdpa"
    with pytest.raises(UnsupportedError, match=r"has attention sinks .* sdpa leaves out"):
        sm.apply(model, policy)
