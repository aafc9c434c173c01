"""Models that cannot have a policy are refused by name, and temperature rules of their own are replaced."""

from __future__ import annotations

import copy
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sharpmax
from sharpmax.errors import UnsupportedError
from sharpmax.integrations import transformers as hf
from sharpmax.integrations import vllm
from sharpmax.integrations.transformers.interface import modules_of
from sharpmax.policies import Constant, LogLength, PerHead, from_config
from tests.integrations.families import FAMILIES, OTHERS, Family, transformers
from tests.integrations.oracle import by_hand

SIGLIP = OTHERS["siglip"]


def test_a_module_of_torch_is_refused_by_name_each_time() -> None:
    model = SIGLIP.build()
    before = {name: vars(part).copy() for name, part in model.named_modules()}
    reason = r"head\.attention \(MultiheadAttention\).*skip_unsupported=True"
    with pytest.raises(UnsupportedError, match=reason) as caught:
        hf.apply(model, Constant(2.0))
    assert "\n" not in str(caught.value)
    assert repr({name: vars(part) for name, part in model.named_modules()}) == repr(before)
    with pytest.raises(UnsupportedError, match=r"head\.attention.*None"), sharpmax.capture(model):
        pass
    with hf.applied(model, None, skip_unsupported=True), sharpmax.capture(model) as seen:
        model(**SIGLIP.inputs(model))
    assert [call.layer for call in seen.calls] == [0, 1]
    hf.apply(model, Constant(2.0), skip_unsupported=True)
    for again in (lambda: hf.apply(model, Constant(3.0)), lambda: hf.fold(model, Constant(3.0))):
        with pytest.raises(UnsupportedError, match=reason):
            again()
    assert hf.policy_of(model) == Constant(2.0)


def test_a_skipped_module_keeps_its_temperature() -> None:
    model = SIGLIP.build().double()
    inputs = SIGLIP.inputs(model)
    grid = PerHead.of(Constant, value=[[2.0, 1.0, 3.0, 0.5]] * 2)
    for policy in (Constant(2.0), grid):
        with by_hand(model, policy):
            expected = model(**inputs)
        with hf.applied(model, policy, skip_unsupported=True):
            found = model(**inputs)
        assert (found.last_hidden_state - expected.last_hidden_state).abs().max() < 1e-9
        assert (found.pooler_output - expected.pooler_output).abs().max() < 1e-9
        folded = hf.fold(model, policy, example_inputs=inputs, skip_unsupported=True)(**inputs)
        assert (folded.pooler_output - expected.pooler_output).abs().max() < 1e-9


class Mixes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weigh = nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bij,bjd->bid", self.weigh(torch.einsum("bid,bjd->bij", x, x)), x)


def weighted(x: Tensor) -> Tensor:
    return torch.bmm(torch.bmm(x, x.mT).softmax(-1), x)


def module(forward: Callable[[Any, Tensor], Tensor]) -> type[nn.Module]:
    """A module whose name says nothing."""
    return type("Mixer", (nn.Module,), {"forward": forward})


BY_HAND: list[Callable[[], nn.Module]] = [
    Mixes,
    module(lambda self, x: torch.softmax(x @ x.transpose(-1, -2), dim=-1) @ x),
    module(lambda self, x: F.scaled_dot_product_attention(x, x, x)),
    module(lambda self, x: weighted(x)),
    lambda: nn.Sequential(nn.Linear(32, 32), nn.TransformerDecoderLayer(32, 4, 32)),
]


@pytest.mark.parametrize("make", BY_HAND)
def test_attention_written_out_is_refused_under_any_name(model: Any, make: Callable[[], nn.Module]) -> None:
    model.model.layers[1].mlp.extra = make()
    with pytest.raises(UnsupportedError, match=r"model\.layers\.1\.mlp\.extra"):
        hf.apply(model, "paper")
    assert len(modules_of(hf.apply(model, "paper", skip_unsupported=True))) == 2


def test_a_softmax_alone_is_no_attention(model: Any) -> None:
    model.model.extra = module(lambda self, x: torch.softmax(x @ x.new_ones(x.shape[-1], 3), dim=-1))()  # a router
    assert len(modules_of(model)) == 2
    moe = transformers.MixtralForCausalLM(transformers.MixtralConfig(**FAMILIES["llama"].options, num_local_experts=2))
    assert len(modules_of(moe)) == 2


LLAMA: Any = pytest.importorskip("transformers.models.llama.modeling_llama")
ALL_ATTENTION_FUNCTIONS, eager_attention_forward = LLAMA.ALL_ATTENTION_FUNCTIONS, LLAMA.eager_attention_forward

_ROPE = OTHERS["ministral3"].options["rope_parameters"]
_NO_ROPE = {"rope_parameters": {**_ROPE, "llama_4_scaling_beta": 0.0}}
OFF: dict[str, dict[str, Any]] = {
    "llama4": {"attn_temperature_tuning": False}, "ministral3": _NO_ROPE, "mistral4": _NO_ROPE,
    "inkling": {"log_scaling_n_floor": None},
}  # fmt: skip
"""The options that switch a family's own rule off."""


@pytest.fixture(params=[OTHERS[name] for name in OFF], ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    if not hasattr(transformers, request.param.model):
        pytest.skip(f"this release of transformers has no {request.param.model}")
    found: Family = request.param
    return found


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_own_rule_applied_as_a_policy_is_the_model_as_published(family: Family, attention: str) -> None:
    model = family.build(attention)
    published = family.logits(model)
    with hf.applied(model, from_config(model.config)):
        torch.testing.assert_close(family.logits(model), published, rtol=1e-4, atol=1e-5)
    assert torch.equal(family.logits(model), published)


def test_a_policy_replaces_the_own_rule_and_none_keeps_it(family: Family) -> None:
    model = family.build()
    published, policy = family.logits(model), LogLength(2.0)
    for nothing in (None, "none", PerHead.of(Constant, value=[[1.0] * 4] * 2)):
        with hf.applied(model, nothing):
            assert torch.equal(family.logits(model), published)
    with hf.applied(model, policy):
        replaced = family.logits(model)
        copied = copy.deepcopy(model)
        with hf.applied(model, None):
            assert torch.equal(family.logits(model), published)
        assert torch.equal(family.logits(model), replaced)
    assert torch.equal(family.logits(model), published)
    assert torch.equal(family.logits(copied), replaced)
    assert torch.equal(family.logits(hf.restore(copied)), published)
    with hf.applied(family.build(**OFF[family.name]), policy) as without:
        assert torch.equal(family.logits(without), replaced)
    assert not torch.allclose(replaced, published, atol=1e-3)


def test_the_own_rule_goes_on_over_a_cache(family: Family) -> None:
    model = family.build()
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    published = model.generate(**family.inputs(model), **options)
    with hf.applied(model, from_config(model.config)):
        found = model.generate(**family.inputs(model), **options)
    assert torch.equal(found.sequences, published.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(published.logits), rtol=1e-4, atol=1e-5)


def test_weights_cannot_replace_an_own_rule(family: Family) -> None:
    with pytest.raises(UnsupportedError, match=r"scales its queries by position|position bias"):
        hf.fold(family.build(), Constant(2.0))


def longer(positions: torch.Tensor) -> torch.Tensor:
    return 1 + torch.log1p(positions / 16)


def grows(self: Any, x: Any, attention_mask: Any, **kwargs: Any) -> Any:
    """Attention whose queries grow with their position, without an option that says so."""
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
    return attend(self, self.q_proj(x) * longer(torch.arange(x.shape[1])), x, x, attention_mask, **kwargs)


def given(self: Any, x: Any, attention_mask: Any, query_scale: Any = 1.0, **kwargs: Any) -> Any:
    """Attention whose queries are scaled by what its caller says."""
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
    return attend(self, self.q_proj(x) * query_scale, x, x, attention_mask, **kwargs)


def test_a_scale_given_by_the_model_is_refused() -> None:
    if not hasattr(transformers, "BeamForCausalLM"):
        pytest.skip("this release of transformers has no BeamForCausalLM")
    model = transformers.BeamForCausalLM(transformers.BeamConfig(**FAMILIES["gemma"].options))
    for skip in (False, True):
        with pytest.raises(UnsupportedError, match=r"BeamForCausalLM scales its queries by position .*attention_scal"):
            hf.apply(model, "paper", skip_unsupported=skip)


@pytest.mark.parametrize(("forward", "rule"), [(grows, "a logarithm in grows"), (given, "query_scale of given")])
def test_a_rule_of_a_family_unknown_here_shows_in_its_code(model: Any, forward: Callable[..., Any], rule: str) -> None:
    kind = type("OtherAttention", (LLAMA.LlamaAttention,), {"forward": forward})
    model.model.layers[1].self_attn = kind(model.config, 1)
    with pytest.raises(UnsupportedError, match=rule):
        hf.apply(model, "paper")


DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "reference" / "supported-models.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| ")][1:]


def test_the_header_counts_the_rows() -> None:
    found = re.search(r"^\*(\d+) of (\d+) model types of transformers (\S+) take a policy\.\*$", PAGE, re.MULTILINE)
    assert found is not None
    counts = [int(row[3]) for row in ROWS]
    assert counts == [len(row[4].split(", ")) for row in ROWS]
    assert int(found[2]) == sum(counts)
    assert int(found[1]) == sum(count for row, count in zip(ROWS, counts, strict=True) if row[0] == "yes")
    names = [name for row in ROWS for name in row[4].split(", ")]
    assert len(names) == len(set(names))


@pytest.fixture(scope="module")
def scan() -> dict[str, Any]:
    if f"transformers {transformers.__version__} " not in PAGE:
        pytest.skip("the page was made with another release of transformers")
    return runpy.run_path(str(DOCS / "supported_models.py"))


@pytest.mark.parametrize(
    ("kind", "apply", "fold"),
    [
        ("llama", "yes", "yes"), ("gpt_oss", "yes", "yes"), ("bert", "yes", "yes"), ("t5", "yes", "no"),
        ("gemma2", "yes", "no"), ("ministral3", "yes", "no"), ("bloom", "no", "no"), ("mamba", "no", "no"),
    ],
)  # fmt: skip
def test_rows_are_true(scan: dict[str, Any], kind: str, apply: str, fold: str) -> None:
    verdict = scan["verdict"](kind, dict(scan["model_types"]())[kind])
    row = next(row for row in ROWS if kind in row[4].split(", "))
    assert (row[0], row[1], row[2].replace("—", "")) == verdict
    assert verdict[:2] == (apply, fold)


def test_what_each_backend_of_vllm_can_run() -> None:
    for needs in ({"count"}, {"count", "entropy"}):
        vllm._check_backend("CPU_ATTN", frozenset(needs))
    for backend in ("FLASH_ATTN", "FLASHINFER"):
        vllm._check_backend(backend, frozenset())


def test_without_the_variable_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(vllm.VARIABLE, raising=False)
    vllm.register()
