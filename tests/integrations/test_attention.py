"""Policies in front of flash attention, flex attention and sinks, and as the kernels of a GPU get them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

import sharpmax as sm
from sharpmax.errors import UnsupportedError
from sharpmax.integrations import transformers as hf
from sharpmax.integrations.transformers import attention
from sharpmax.ops import sharpen as ops
from sharpmax.ops.kernels import sharpen_launch
from sharpmax.policies import PAPER, Constant, LogLength, PerHead, Policy
from sharpmax.stats import dispatch, triton_launch
from tests.integrations.families import BIDIRECTIONAL, FAMILIES, LENGTH, LLAMA, OTHERS, Family, transformers
from tests.integrations.oracle import by_hand

# The compiler uses parts of torch that torch advises against.
pytestmark = pytest.mark.filterwarnings(
    "ignore::sharpmax.errors.OutOfRangeWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
)
flash_utils = transformers.modeling_flash_attention_utils

MIXED = PerHead(((Constant(2.0), LogLength(3.0), PAPER, Constant(1.0)), (PAPER, PAPER, LogLength(2.0), Constant(0.5))))
POLICIES = {"constant": Constant(2.0), "mixed": MIXED}
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
@pytest.mark.parametrize(
    ("name", "family", "padding"),
    [
        *(("flash_attention_2", one, "") for one in ("llama", "mistral", "gpt2", "modernbert")),
        *(("flash_attention_2", one, side) for one in ("llama", "mistral", "bert") for side in ("left", "right")),
        ("flash_attention_3", "mistral", ""),
        *(("flex_attention", one, side) for one in ("llama", "mistral") for side in ("", "left")),
    ],
)
def test_other_implementations_equal_sdpa(
    flash_attention: None, flex_attention: None, name: str, family: str, padding: str, policy: Policy
) -> None:
    known = FAMILIES[family]
    reference, model = known.build("sdpa").double(), with_attention(known, name)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, {"": slice(0), "left": slice(4), "right": slice(LENGTH - 4, None)}[padding]] = 0
    inputs = {**known.inputs(model), **({"attention_mask": mask} if padding else {})}
    plain = known.logits(model, **inputs)
    with sm.applied(reference, policy), sm.applied(model, policy):
        found, expected = (known.logits(one, **inputs)[mask.bool()] for one in (model, reference))
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)
    assert (expected - plain[mask.bool()]).abs().max() > 1e-3
    assert torch.equal(known.logits(model, **inputs), plain)
    assert model.config._attn_implementation == name


def test_padding_between_tokens_is_refused_where_rows_are_read(flash_attention: None) -> None:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, 5] = 0
    model = sm.apply(with_attention(LLAMA, "flash_attention_2"), LENGTHS)
    with pytest.raises(UnsupportedError, match="padding between tokens"):
        LLAMA.logits(model, **LLAMA.inputs(model), attention_mask=mask)


@every_policy
@pytest.mark.parametrize("given", ["positions", "starts"])
def test_packed_sequences(flash_attention: None, policy: Policy, given: str) -> None:
    reference, model = LLAMA.build("sdpa").double(), with_attention(LLAMA, "flash_attention_2")
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
    reference, model = LLAMA.build("sdpa").double(), with_attention(LLAMA, name)
    options = {"max_new_tokens": 3, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    more = {} if cache == "dynamic" else {"cache_implementation": "static", "disable_compile": True}
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, :4] = 0
    inputs = {**LLAMA.inputs(model), "attention_mask": mask}
    with sm.applied(reference, MIXED), sm.applied(model, MIXED):
        expected = reference.generate(**inputs, **options)
        found = model.generate(**inputs, **options, **more)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-7, atol=1e-8)


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
    model = with_attention(LLAMA, "flash_attention_2")
    with (
        sm.applied(model, Constant(2.0)),
        pytest.raises(UnsupportedError, match=rf"\({name}\), under attn_impl.*'eager'"),
    ):
        LLAMA.logits(model, **LLAMA.inputs(model), **{name: options})


OSS = OTHERS["gpt-oss"]


def gpt_oss(name: str = "eager") -> Any:
    model = OSS.build("eager")  # its experts are not there in float64
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, 1.0, 1.0)
    if name != "eager":
        model.config._attn_implementation_internal = name
    return model


@pytest.mark.parametrize("policy", [PAPER, MIXED], ids=["paper", "mixed"])
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


def gradients(model: Any, ids: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(ids, position_ids=positions, use_cache=False).logits.logsumexp(-1).sum().backward()
    return [weight.grad.clone() for weight in model.parameters()]


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ops, dispatch, attention):
        monkeypatch.setattr(module, "on_gpu", lambda x: True)


@pytest.mark.parametrize("documents", [[24], [10, 14]], ids=["causal", "packed"])
def test_compiled_layers_learn_through_the_kernels(documents: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    launched: list[str] = []

    def launch(*given: Any) -> None:
        launched.append("launch")
        triton_launch.launch(*given)

    monkeypatch.setattr(sharpen_launch, "launch", launch)
    model = hf.apply(LLAMA.build(), "paper")
    ids = torch.randint(3, 97, (2, sum(documents)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in documents]).expand(2, -1)
    expected = gradients(model, ids, positions)
    before = len(launched)
    as_on_a_gpu(monkeypatch)
    eager = gradients(model, ids, positions)
    once = len(launched) - before
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.compile(backend="aot_eager", fullgraph=True)
    compiled = gradients(model, ids, positions)
    # A launch in the pass forward and one in the pass backward of each layer.
    assert len(launched) - before == 2 * once == 4 * model.config.num_hidden_layers
    for found in (eager, compiled):
        for one, other in zip(found, expected, strict=True):
            assert torch.allclose(one, other, atol=1e-4 * float(other.abs().max()))


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many queries the kernels for new tokens were given, call by call, where they run as on a GPU."""
    given: list[int] = []

    def decode(self: Any, query: torch.Tensor, *rest: Any, really: Any = ops.Sharpener.decode) -> Any:
        found = really(self, query, *rest)
        given.extend([] if found is None else [query.shape[2]])
        return found

    monkeypatch.setattr(ops.Sharpener, "decode", decode)
    as_on_a_gpu(monkeypatch)
    return given


LENGTHS = LogLength(2.0)


def equals_by_hand(found: Tensor, family: Family, model: Any, **inputs: Any) -> bool:
    """Whether logits with the policy `LENGTHS` are those of one pass written out by hand."""
    with torch.no_grad(), by_hand(hf.restore(model), LENGTHS):
        return torch.allclose(found, family.logits(model, **inputs), atol=1e-4)


# The kernels for new tokens take up to eight queries.
@pytest.mark.parametrize(("name", "length"), [("bert", 1), ("bert", 8), ("bert", 9), ("bart", 3)])
def test_few_queries_are_not_taken_for_causal_ones(name: str, length: int, decoded: list[int]) -> None:
    family = next(family for family in BIDIRECTIONAL if family.name == name)
    model = hf.apply(family.build(), LENGTHS)
    inputs = family.inputs(model, length=length)
    with torch.no_grad():
        found = family.logits(model, **inputs)
    assert (length in decoded) == (length <= 8)
    assert equals_by_hand(found, family, model, **inputs)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_a_mask_that_looks_ahead_is_kept(padded: bool, decoded: list[int]) -> None:
    model = hf.apply(LLAMA.build(), LENGTHS)
    # A prefix of three tokens that see one another, as in PaliGemma; the second sequence may begin with padding.
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    mask[:3, :3] = True
    mask = mask.expand(2, 1, 5, 5).clone()
    mask[1, :, :, 0] = not padded
    inputs = {**LLAMA.inputs(model, length=5), "attention_mask": mask, "use_cache": False}
    with torch.no_grad():
        found = model(**inputs).logits
    assert decoded == [5, 5]
    assert equals_by_hand(found, LLAMA, model, **inputs)


@pytest.mark.parametrize(("chunk", "static"), [(2, True), (3, False), (8, True)])
def test_a_prompt_in_parts_equals_the_whole(chunk: int, static: bool, decoded: list[int]) -> None:
    model = hf.apply(LLAMA.build(), LENGTHS)
    ids = LLAMA.inputs(model, length=2 * chunk + 1)["input_ids"]
    cache = transformers.StaticCache(model.config, max_cache_len=24) if static else transformers.DynamicCache()
    parts = []
    with torch.no_grad():
        for place in torch.arange(2 * chunk + 1).split(chunk):
            out = model(ids[:, place], past_key_values=cache, position_ids=place.expand(2, -1))
            parts.append(out.logits)
    assert chunk in decoded
    assert equals_by_hand(torch.cat(parts, 1), LLAMA, model, input_ids=ids, use_cache=False)


ONE_LAYER = PerHead((MIXED.policies[0], (Constant(1.0),) * 4))


@pytest.mark.parametrize("policy", [PAPER, ONE_LAYER], ids=["paper", "mixed"])
@pytest.mark.parametrize("kind", ["causal", "padded", "packed", "scattered"])
def test_masks_become_spans_where_each_row_sees_one_run_of_keys(
    kind: str, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LLAMA.build()
    ids = LLAMA.inputs(model, length=12)["input_ids"]
    mask = torch.ones(12, 12, dtype=torch.bool).tril().expand(2, 1, 12, 12).clone()
    if kind == "padded":
        mask[1, :, 3:, :3] = False
    elif kind == "packed":
        mask[:, :, 5:, :5] = False
    elif kind == "scattered":
        mask[0, :, 6:, 3] = False
    given = {} if kind == "causal" else {"attention_mask": mask}
    measured: list[Any] = []

    def measure(call: Any, *rest: Any, really: Any = dispatch.measure_parts) -> Any:
        measured.append(call)
        return really(call, *rest)

    with torch.no_grad():
        with by_hand(model, policy):
            expected = model(ids, use_cache=False, **given).logits
        hf.apply(model, policy)
        monkeypatch.setattr(ops, "measure_parts", measure)
        as_on_a_gpu(monkeypatch)
        for _ in range(2):
            assert torch.allclose(model(ids, use_cache=False, **given).logits, expected, atol=1e-4)
    layers = 2 if policy is PAPER else 1
    # Without a mask only the first layer has more to do: it looks whether rows lie outside the range of the policy.
    assert len(measured) == (1 if kind == "causal" else 2 * layers)
    assert {call.mask is None for call in measured} == {kind != "scattered"}
    assert {call.spans is None for call in measured} == {kind in ("causal", "scattered")}


@pytest.mark.parametrize(("policy", "gpu"), [(ONE_LAYER, False), (PAPER, True)])
def test_a_token_against_a_static_cache_is_one_graph(policy: Any, gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    model = hf.apply(LLAMA.build(), policy)
    if gpu:
        as_on_a_gpu(monkeypatch)
        for layer in model.model.layers:
            vars(layer.self_attn)["_sharpmax_layer"].sharpener.prepare(torch.device("cpu"))

    def last(step: Any) -> torch.Tensor:
        cache = transformers.StaticCache(model.config, max_cache_len=16)
        model(torch.arange(9)[None], past_key_values=cache)
        found: torch.Tensor = step(torch.tensor([[5]]), past_key_values=cache, position_ids=torch.tensor([[9]])).logits
        return found

    with torch.no_grad():
        expected = last(model)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert torch.allclose(last(compiled), expected, atol=1e-5)
