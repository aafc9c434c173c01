"""Known ways to get the integration wrong: each test fails on the broken version."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sharpmax.errors import UnsupportedError
from sharpmax.integrations import transformers as hf
from sharpmax.integrations.transformers.attention import sharp_attention
from sharpmax.integrations.transformers.support import NAMES
from sharpmax.policies.basic import Constant, LogLength
from sharpmax.policies.polynomial import Polynomial
from tests.integrations.families import FAMILIES, transformers

SHARP = Polynomial((0.5, 1.5), (0.0, 9.0))


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits  # type: ignore[no-any-return]


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 97, (2, 12))


def test_1_the_mask_function_is_registered_too() -> None:
    """Without one, transformers makes no mask at all, and padding is attended to without a warning."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    hf.apply(FAMILIES["llama"].build(), "paper")
    for inner, name in NAMES.items():
        assert ALL_MASK_ATTENTION_FUNCTIONS[name] is ALL_MASK_ATTENTION_FUNCTIONS[inner]


@pytest.mark.parametrize("family", ["llama", "opt", "t5"])
def test_2_what_goes_in_and_out_of_the_interface(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys come unrepeated, `scaling` is 1 in OPT and T5, and what returns is `[B, Lq, H, D]`, contiguous."""
    seen: list[Any] = []

    def spy(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        out = sharp_attention(module, query, key, value, mask, **kwargs)
        seen.append((query.shape, key.shape, kwargs["scaling"], out[0]))
        return out

    monkeypatch.setattr("sharpmax.integrations.transformers.interface.sharp_attention", spy)
    model = FAMILIES[family].build()
    FAMILIES[family].logits(hf.apply(model, SHARP))
    model.generate(FAMILIES[family].inputs(model)["input_ids"], max_new_tokens=2, do_sample=False)
    assert seen
    for query, key, scaling, out in seen:
        assert key[1] == (2 if family == "llama" else 4)
        assert scaling == (8**-0.5 if family == "llama" else 1.0)
        assert out.shape == (query[0], query[2], query[1], query[3])
        assert out.is_contiguous()


def test_3_static_cache_prompts_are_causal_over_their_own_keys(ids: torch.Tensor) -> None:
    """The rest of the cache is not written yet: it must neither be attended to nor counted."""
    model = FAMILIES["llama"].build()
    for policy in (LogLength(2.0), SHARP):
        hf.apply(model, policy)
        cache = transformers.StaticCache(model.config, max_cache_len=40)
        with torch.no_grad():
            long = model(ids, past_key_values=cache).logits
        assert (long - logits(model, ids)).abs().max() < 1e-4


def test_4_capped_logits_are_scaled_after_the_cap(ids: torch.Tensor) -> None:
    """With a cap that bites, β in the query is almost no β at all."""
    model = FAMILIES["gemma2"].build(attn_logit_softcapping=0.01)
    plain = logits(model, ids)
    sharp = logits(hf.apply(model, Constant(200.0)), ids)
    in_the_query = hf.restore(model)
    for layer in in_the_query.model.layers:
        layer.self_attn.q_proj.weight.data *= 200.0
    assert (sharp - plain).abs().max() > 3 * (logits(in_the_query, ids) - plain).abs().max()


def test_4_sinks_are_refused_even_if_they_only_show_at_the_call(ids: torch.Tensor) -> None:
    model = hf.apply(FAMILIES["llama"].build(), SHARP)
    with pytest.raises(UnsupportedError, match="sinks"):
        model(ids, s_aux=torch.zeros(4))


def test_6_names_carry_no_meaning_to_transformers() -> None:
    for inner, name in NAMES.items():
        assert ("flash" in name) == ("flash" in inner)  # where flash attention is meant, and nowhere else
        assert not any(part in name for part in ("sdpa", "/", "flex_attention", "paged"))


def test_6_a_model_that_outputs_attentions_can_be_saved(ids: torch.Tensor, tmp_path: Path) -> None:
    """`output_attentions` in the configuration is refused under any name but eager, when saving too."""
    model = FAMILIES["llama"].build("eager")
    model.config.output_attentions = True
    hf.apply(model, SHARP)
    assert model(ids).attentions is not None
    model.save_pretrained(tmp_path)
    assert transformers.AutoConfig.from_pretrained(tmp_path).model_type == "llama"


def test_7_nothing_is_patched() -> None:
    before = (F.softmax, F.scaled_dot_product_attention, dict(vars(transformers.LlamaForCausalLM)))
    functions = dict(transformers.AttentionInterface._global_mapping)
    with hf.applied(FAMILIES["llama"].build(), SHARP):
        assert (F.softmax, F.scaled_dot_product_attention, dict(vars(transformers.LlamaForCausalLM))) == before
        registered = transformers.AttentionInterface._global_mapping
        assert {name: registered[name] for name in functions} == functions


def test_9_the_first_new_token_is_chosen_by_a_sharpened_row(ids: torch.Tensor) -> None:
    """It comes from the last row of the prompt, not from a row of one query."""
    model = FAMILIES["llama"].build()
    plain = logits(model, ids)[:, -1]
    hf.apply(model, SHARP)
    out = model.generate(
        ids, max_new_tokens=1, do_sample=False, attention_mask=torch.ones_like(ids), output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert (out.logits[0] - plain).abs().max() > 1e-2
    assert (out.logits[0] - logits(model, ids)[:, -1]).abs().max() < 1e-5


def test_10_a_window_bounds_what_is_counted(ids: torch.Tensor) -> None:
    """Rows that never see more than five keys are not sharpened by a policy that starts above five."""
    policy = LogLength(5.0)
    window, full = FAMILIES["mistral"].build(), FAMILIES["llama"].build()
    assert (logits(hf.apply(window, policy), ids) - logits(hf.restore(window), ids)).abs().max() < 1e-5
    assert (logits(hf.apply(full, policy), ids) - logits(hf.restore(full), ids)).abs().max() > 1e-2


def test_without_transformers_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import sharpmax.integrations.transformers as hf\n"
        "from sharpmax.errors import MissingExtraError\n"
        "try: hf.apply(object(), 'paper')\n"
        "except MissingExtraError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "pip install 'accelerate>=1.10' 'safetensors>=0.6' 'transformers>=5.17'" in done.stdout


HALF_FAMILIES = ["t5", "llama", "gemma2", "bert", "whisper"]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("beta", [3.0, 1e4, 1e39])
@pytest.mark.parametrize("name", HALF_FAMILIES)
def test_float16_has_room_for_every_beta(name: str, beta: float, attention: str) -> None:
    family = FAMILIES[name]
    if attention not in family.attentions:
        pytest.skip("softcapped logits are eager's alone")
    model = family.build(attention)
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if "relative_attention_bias" in weight_name:
                weight.mul_(400.0)  # up to about 300: times 1e4 beyond the range of float16
    # What float32 makes of the same weights; hard attention magnifies rounding, so inputs are rounded alike.
    model = hf.apply(model.half().float(), Constant(beta))
    inputs = family.inputs(model, length=6)
    with torch.no_grad():
        expected = family.logits(model, **inputs)
        halves = {key: x.half() if x.is_floating_point() else x for key, x in inputs.items()}
        found = family.logits(model.half(), **halves)
    assert bool(found.isfinite().all())
    if beta < 10:
        assert torch.allclose(found.float(), expected, atol=0.02 * float(expected.abs().max()))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("beta", [1.5, 20.0, 1e39])
def test_float16_bias_is_multiplied_exactly(beta: float, attention: str) -> None:
    """T5's attention itself, against float64 on the same rounded inputs."""
    model = hf.apply(FAMILIES["t5"].build(attention).half(), Constant(beta))
    module = model.encoder.block[0].layer[0].SelfAttention
    rng = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 4, 6, 8, generator=rng).half() for _ in range(3))
    bias = (torch.randn(1, 4, 6, 6, generator=rng) * 4000.0).half()
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    mask[..., 4:] = False
    given = mask if attention == "sdpa" else torch.zeros(mask.shape).half().masked_fill(~mask, -65504.0)
    out, _ = sharp_attention(module, query, key, value, given, scaling=1.0, position_bias=bias)
    s = (query.double() @ key.double().mT + bias.double()).masked_fill(~mask, -torch.inf)
    weights = (beta * (s - s.amax(-1, keepdim=True))).exp()
    expected = (weights / weights.sum(-1, keepdim=True) @ value.double()).transpose(1, 2)
    assert out.dtype == torch.float16
    assert torch.allclose(out.double(), expected, atol=2e-3)
