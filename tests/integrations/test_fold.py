"""A constant per head in the weights of a model and in the files of a checkpoint: what the applied policy computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import sharpmax as sm
from sharpmax.errors import ArgumentError, UnsupportedError
from sharpmax.integrations import transformers as hf
from sharpmax.integrations.transformers.interface import modules_of
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import Constant, LogLength, LogScale, PerFrequency
from sharpmax.policies.per_head import PerHead
from tests.integrations.families import FAMILIES, LLAMA, OLMO2, OTHERS, PHI3, Family, transformers

RULE = LogScale(0.5, 3.0, steps=True, shift=1.0)
SHARED_GAIN = ("qwen3", "gemma3", "phi-norm")
"""Families whose heads share the gain of their queries' normalisation, which can hold one β per layer."""

FOLDABLE = [
    *(family for family in FAMILIES.values() if family.name not in ("gemma2", "t5")),
    *(OTHERS[name] for name in ("phi3", "olmo2", "phi-norm", "beit-plain", "albert", "cohere")),
]


def constants(model: Any, *, alike: bool = False) -> PerHead:
    """Another β in every head, one of them 1, or in every layer."""
    layers = len(modules_of(model))
    grid = [[0.5 + 0.5 * ((layer + (0 if alike else h)) % 5) for h in range(4)] for layer in range(layers)]
    return PerHead.of(Constant, value=grid)


def example(family: Family, model: Any) -> Any:
    """None where `fold` makes an example itself: of tokens alone."""
    return family.inputs(model) if family.kind in ("image", "speech") else None


def weights(model: Any) -> list[torch.Tensor]:
    return [p.clone() for p in model.parameters()]


@pytest.mark.parametrize("family", FOLDABLE, ids=lambda f: f.name)
def test_a_folded_model_is_the_applied_one(family: Family) -> None:
    model = family.build()
    before, plain = weights(model), family.logits(model)
    policy = constants(model, alike=family.name in SHARED_GAIN)
    with hf.applied(model, policy):
        sharp = family.logits(model)
    folded = hf.fold(model, policy, example_inputs=example(family, model))
    assert (sharp - plain).abs().max() > 1e-3
    assert (family.logits(folded) - sharp).abs().max() < 1e-5
    assert type(folded) is type(model)
    assert hf.policy_of(folded) is None
    assert folded.config._attn_implementation == model.config._attn_implementation
    assert all(torch.equal(a, b) for a, b in zip(weights(model), before, strict=True))


@pytest.mark.parametrize("name", ["gemma2", "t5"])
def test_a_beta_of_one_folds_into_any_model(name: str) -> None:
    model = FAMILIES[name].build()
    unchanged = hf.fold(model, Constant(1.0))
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(unchanged), strict=True))


def test_the_nearest_constant_is_the_policy_at_that_length() -> None:
    grid = PerHead.of(LogLength, reference=[[8.0, 64.0]])
    assert hf.nearest_constant(grid, 64) == PerHead.of(Constant, value=[[2.0, 1.0]])
    assert hf.nearest_constant(Constant(3.0), 5) == Constant(3.0)


def test_a_folded_model_is_marked(model: Any, tmp_path: Path) -> None:
    folded = hf.fold(model, constants(model))
    folded.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(LLAMA.logits(again), LLAMA.logits(folded))
    for twice in (folded, again):
        with pytest.raises(ArgumentError, match="already holds a policy: 2 layers × 4 heads"):
            hf.fold(twice, Constant(2.0))


DIFFERENT = [OTHERS[name] for name in ("swin", "beit", "doge")]


def refused(model: Any, words: str, policy: Policy | str = "constant:2", **options: Any) -> str:
    """The reason; the model is unchanged to the last bit."""
    before, mode, config = weights(model), model.training, model.config.to_dict()
    with pytest.raises(UnsupportedError, match=words) as caught:
        hf.fold(model, policy, **options)
    assert all(torch.equal(a, b) for a, b in zip(weights(model), before, strict=True))
    assert (model.training, model.config.to_dict()) == (mode, config)
    assert hf.policy_of(model) is None
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", DIFFERENT, ids=lambda f: f.name)
def test_logits_that_are_more_than_query_times_key_are_found_out(family: Family, dtype: torch.dtype) -> None:
    """A position bias in the mask (Swin, BEiT), a mask made of values (Doge)."""
    model = family.build().to(dtype)
    given = example(family, model)
    assert family.model in refused(model, r"layer 0 of .*more than query times key.*apply", example_inputs=given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_is_no_difference(dtype: torch.dtype) -> None:
    for name in ("bert", "whisper", "llama"):
        model = FAMILIES[name].build().to(dtype)
        assert hf.fold(model, constants(model), example_inputs=example(FAMILIES[name], model)).dtype == dtype
    gentle = hf.fold(model, Constant(1.01))
    first = [one.model.layers[0].self_attn.q_proj.weight for one in (gentle, model)]
    assert not torch.equal(*first)


def test_a_bias_added_to_the_query_is_found_out_wherever_it_is(model: Any) -> None:
    """Only the second layer has it, behind the projection that holds β."""
    attention = model.model.layers[1].self_attn
    attention.q_proj.register_forward_hook(lambda module, args, out: out + 0.5)
    refused(model, "layer 1 of LlamaForCausalLM")
    assert hf.fold(model, PerHead.of(Constant, value=[[2.0] * 4, [1.0] * 4])) is not model


def test_queries_that_something_else_reads_too_are_found_out(model: Any) -> None:
    """Each layer by itself is right; the model is not."""

    def reads_queries(module: Any, args: Any, kwargs: Any, out: Any) -> Any:
        embedded = module.get_input_embeddings()(kwargs["input_ids"])
        out.logits = out.logits + 10 * module.model.layers[0].self_attn.q_proj(embedded).mean(-1, keepdim=True)
        return out

    model.register_forward_hook(reads_queries, with_kwargs=True)
    refused(model, "the folded LlamaForCausalLM is not the model with the policy applied")


def test_without_an_example_the_error_says_what_to_give(model: Any) -> None:
    """A model that no input can be made for is refused, and says what to do."""
    forward = model.forward

    def picky(input_ids: torch.Tensor, key: str = "", **kwargs: Any) -> Any:
        if key != "open":
            raise ValueError("no key")
        return forward(input_ids, **kwargs)

    model.forward = model.model.forward = picky
    refused(model, r"no example.*layer 0 of Llama.*one of 2 such layers.*no key.*example_inputs=")
    with pytest.raises(ArgumentError, match=r"example_inputs: got \['input_ids'\].*no key"):
        hf.fold(model, Constant(2.0), example_inputs={"input_ids": torch.arange(3, 20)[None]})


def test_nothing_else_changes() -> None:
    """Neither the state of the random generator nor the mode of any module, nor weights of layers left alone."""
    model = FAMILIES["gpt2"].build().train()
    model.transformer.h[0].eval()
    state = torch.get_rng_state()
    folded = hf.fold(model, PerHead.of(Constant, value=[[1.0] * 4, [2.0] * 4]))
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in folded.modules()] == [m.training for m in model.modules()]
    changed = {name for name, value in folded.state_dict().items() if not torch.equal(value, model.state_dict()[name])}
    assert changed == {"transformer.h.1.attn.c_attn.weight", "transformer.h.1.attn.c_attn.bias"}
    assert not any(m._forward_pre_hooks for m in folded.modules())


IN_FILES = [FAMILIES[name] for name in ("llama", "gpt2", "qwen2", "bert")] + [PHI3, OLMO2]


def saved(family: Family, folder: Path, **options: Any) -> Any:
    model = family.build()
    model.save_pretrained(folder, **options)
    (folder / "tokenizer.json").write_text("{}")
    return model


def loaded(model: Any, folder: Path) -> Any:
    return type(model).from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("family", IN_FILES, ids=lambda f: f.name)
def test_a_folded_folder_is_the_applied_policy(family: Family, tmp_path: Path) -> None:
    """In several files, of which only the query weights change."""
    model = saved(family, tmp_path / "model", max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    (tmp_path / "model" / "pytorch_model.bin").write_text("weights that are not folded")
    (tmp_path / "model" / "sharpmax_policy.json").write_text("a policy to apply")
    policy = constants(model)
    made = sm.fold(tmp_path / "model", policy, out=tmp_path / "new" / "folded")
    with sm.applied(model, policy):
        sharp = family.logits(model)
    assert (family.logits(loaded(model, made.path)) - sharp).abs().max() < 1e-5
    assert (family.logits(model) - sharp).abs().max() > 1e-3
    names = {file.name for file in (tmp_path / "model").iterdir()}
    assert {file.name for file in made.path.iterdir()} == names - {"pytorch_model.bin", "sharpmax_policy.json"}
    assert list((tmp_path / "new").iterdir()) == [made.path]
    assert made.layers == len(modules_of(model))
    assert made.error < 1e-7
    with pytest.raises(ArgumentError, match="already holds a policy"):
        sm.fold(made.path, Constant(2.0), out=tmp_path / "twice")


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_one_constant_per_layer_goes_into_the_gain_in_files(name: str, tmp_path: Path) -> None:
    """The gain itself in Qwen 3, the gain minus 1 in Gemma 3."""
    family = FAMILIES[name]
    model = saved(family, tmp_path / "model")
    policy = constants(model, alike=True)
    made = sm.fold(tmp_path / "model", policy, out=tmp_path / "folded")
    with sm.applied(model, policy):
        assert (family.logits(loaded(model, made.path)) - family.logits(model)).abs().max() < 1e-5


def test_a_beta_per_frequency_in_files(tmp_path: Path) -> None:
    model = saved(LLAMA, tmp_path / "model")
    policy = PerHead(((PerFrequency((0.5, 1.0, 2.0, 1.5)), PerFrequency((1.0, 3.0, 1.0, 0.7))) * 2,) * 2)
    made = sm.fold(tmp_path / "model", policy, out=tmp_path / "folded")
    with sm.applied(model, policy):
        assert (LLAMA.logits(loaded(model, made.path)) - LLAMA.logits(model)).abs().max() < 1e-5
    adapter = sm.fold(tmp_path / "model", policy, out=tmp_path / "adapter", as_adapter=True)
    factors = load_file(adapter.path / "adapter_model.safetensors")
    first = next(value for key, value in factors.items() if "layers.0." in key)
    assert first[:8, 0].tolist() == [0.5, 1.0, 2.0, 1.5] * 2


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_rule_of_the_length_makes_a_ministral3(name: str, tmp_path: Path) -> None:
    """The weights stay, and transformers computes the rule; `tests/engines` has vLLM."""
    family, window = FAMILIES[name], {"sliding_window": None} if name == "mistral" else {}
    model = family.build(**window)
    model.save_pretrained(tmp_path / "model")
    made = sm.fold(tmp_path / "model", RULE, out=tmp_path / "ruled")
    assert (made.layers, made.error) == (2, 0.0)
    ruled = transformers.AutoModelForCausalLM.from_pretrained(made.path, dtype=torch.float32).eval()
    with sm.applied(model, RULE):
        sharp = family.logits(model)
    assert (family.logits(ruled) - sharp).abs().max() < 1e-5
    assert (family.logits(model) - sharp).abs().max() > 1e-3
    assert sm.policies.from_config(ruled.config) == RULE
    assert (made.path / "model.safetensors").read_bytes() == (tmp_path / "model" / "model.safetensors").read_bytes()
    with pytest.raises(ArgumentError, match="already holds a policy"):
        sm.fold(made.path, Constant(2.0), out=tmp_path / "twice")


def test_types_stay_as_they_are(tmp_path: Path) -> None:
    """bfloat16 in, bfloat16 out: β times the weight, rounded once."""
    model = LLAMA.build().to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    sm.fold(tmp_path / "model", Constant(1.3), out=tmp_path / "folded")
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "folded"))
    for name, weight in old.items():
        wanted = (weight.double() * 1.3).to(torch.bfloat16) if "q_proj" in name else weight
        assert torch.equal(new[name], wanted), name


@pytest.mark.parametrize("family", [LLAMA, FAMILIES["gpt2"], FAMILIES["qwen2"], PHI3], ids=lambda f: f.name)
@pytest.mark.filterwarnings("ignore")
def test_peft_loads_the_adapter(family: Family, tmp_path: Path) -> None:
    """Biases and fused projections too; `load_adapter` of transformers and `PeftModel` of peft."""
    peft = pytest.importorskip("peft")
    model = saved(family, tmp_path / "model")
    plain, policy = family.logits(model), constants(model)
    with sm.applied(model, policy):
        sharp = family.logits(model)
    made = sm.fold(tmp_path / "model", policy, out=tmp_path / "adapter", as_adapter=True)
    assert sum(file.stat().st_size for file in made.path.iterdir()) < 8_000
    wrapped = peft.PeftModel.from_pretrained(loaded(model, tmp_path / "model"), made.path)
    assert (family.logits(wrapped) - sharp).abs().max() < 1e-5
    with wrapped.disable_adapter():
        assert (family.logits(wrapped) - plain).abs().max() < 1e-6
    assert (family.logits(wrapped.merge_and_unload()) - sharp).abs().max() < 1e-5
    native = loaded(model, tmp_path / "model")
    native.load_adapter(str(made.path))
    assert (family.logits(native) - sharp).abs().max() < 1e-5


def test_families_that_weights_cannot_hold_or_nobody_knows_are_found_out(tmp_path: Path) -> None:
    """The first by a small model, in which what training starts at 0 is not 0."""
    saved(OTHERS["doge"], tmp_path / "doge")
    with pytest.raises(UnsupportedError, match="a logit is more than query times key"):
        sm.fold(tmp_path / "doge", Constant(2.0), out=tmp_path / "out")
    (tmp_path / "doge" / "config.json").write_text('{"model_type": "nonsense"}')
    with pytest.raises(ArgumentError, match=r"model: got .*nonsense"):
        sm.fold(tmp_path / "doge", Constant(2.0), out=tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["doge"]


def test_a_folder_that_somebody_writes_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sharpmax.integrations.transformers import checkpoint

    saved(LLAMA, tmp_path / "model")
    put = checkpoint._scale_stored

    def slow(*given: Any) -> float:
        (tmp_path / "model" / "model.safetensors").touch()
        return put(*given)

    monkeypatch.setattr(checkpoint, "_scale_stored", slow)
    with pytest.raises(ArgumentError, match="changed while it was read"):
        sm.fold(tmp_path / "model", Constant(2.0), out=tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
