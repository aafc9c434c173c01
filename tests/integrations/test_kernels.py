"""Rules as kernels are given them, inside of a model: the interpreter runs what a GPU would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from sharpmax.integrations import transformers as hf
from sharpmax.integrations.transformers import attention
from sharpmax.ops import attention as ops
from sharpmax.ops.kernels import sharpen
from sharpmax.policies.basic import Constant, LogLength
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.polynomial import PAPER
from sharpmax.stats import dispatch, triton_launch
from tests.integrations.families import BIDIRECTIONAL, FAMILIES, transformers
from tests.integrations.oracle import by_hand

# The compiler uses parts of torch that torch advises against.
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "UserWarning")]


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

    monkeypatch.setattr(sharpen, "launch", launch)
    model = hf.apply(FAMILIES["llama"].build(), "paper")
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


# The kernels for new tokens take up to eight queries.
@pytest.mark.parametrize(
    ("family", "length"),
    [(BIDIRECTIONAL[0], 1), (BIDIRECTIONAL[0], 8), (BIDIRECTIONAL[0], 9), *((one, 3) for one in BIDIRECTIONAL)],
    ids=lambda one: getattr(one, "name", str(one)),
)
def test_few_queries_are_not_taken_for_causal_ones(family: Any, length: int, decoded: list[int]) -> None:
    policy = LogLength(2.0)
    model = hf.apply(family.build(), policy)
    inputs = family.inputs(model, length=length)
    with torch.no_grad():
        found = family.logits(model, **inputs)
        hf.restore(model)
        with by_hand(model, policy):
            expected = family.logits(model, **inputs)
    assert (length in decoded) == (length <= 8)
    assert torch.allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_a_mask_that_looks_ahead_is_kept(padded: bool, decoded: list[int]) -> None:
    policy = LogLength(2.0)
    family = FAMILIES["llama"]
    model = hf.apply(family.build(), policy)
    inputs = family.inputs(model, length=5)
    # A prefix of three tokens that see one another, as in PaliGemma; the second sequence may begin with padding.
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    mask[:3, :3] = True
    mask = mask.expand(2, 1, 5, 5).clone()
    if padded:
        mask[1, :, :, 0] = False
    with torch.no_grad():
        found = model(**inputs, attention_mask=mask, use_cache=False).logits
        hf.restore(model)
        with by_hand(model, policy):
            expected = model(**inputs, attention_mask=mask, use_cache=False).logits
    assert decoded == [5, 5]
    assert torch.allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize(("chunk", "static"), [(2, True), (3, False), (8, True)])
def test_a_prompt_in_parts_equals_the_whole(chunk: int, static: bool, decoded: list[int]) -> None:
    policy = LogLength(2.0)
    model = hf.apply(FAMILIES["llama"].build(), policy)
    ids = FAMILIES["llama"].inputs(model, length=2 * chunk + 1)["input_ids"]
    cache = transformers.StaticCache(model.config, max_cache_len=24) if static else transformers.DynamicCache()
    parts = []
    with torch.no_grad():
        for place in torch.arange(2 * chunk + 1).split(chunk):
            out = model(ids[:, place], past_key_values=cache, position_ids=place.expand(2, -1))
            parts.append(out.logits)
        hf.restore(model)
        with by_hand(model, policy):
            expected = model(ids, use_cache=False).logits
    assert chunk in decoded
    assert torch.allclose(torch.cat(parts, 1), expected, atol=1e-4)


MIXED = PerHead(((PAPER, Constant(1.0), Constant(2.0), LogLength(4.0)), (Constant(1.0),) * 4))


@pytest.mark.parametrize("policy", [PAPER, MIXED], ids=["paper", "mixed"])
@pytest.mark.parametrize("kind", ["causal", "padded", "packed", "scattered"])
def test_masks_become_spans_where_each_row_sees_one_run_of_keys(
    kind: str, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FAMILIES["llama"].build()
    ids = FAMILIES["llama"].inputs(model, length=12)["input_ids"]
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


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize(
    "policy", ["constant:1.5", PerHead(((Constant(2.0), Constant(1.0)) * 2,) * 2), PAPER, MIXED], ids=str
)
def test_a_token_against_a_static_cache_is_one_graph(policy: Any, gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    model = hf.apply(FAMILIES["llama"].build(), policy)
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
