"""A constant per head in the files of a checkpoint, and as a PEFT adapter: what transformers and peft load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import sharpmax as sm
from sharpmax.errors import ArgumentError, FileFormatError, SharpmaxError, UnsupportedError
from sharpmax.integrations.transformers.interface import modules_of
from sharpmax.policies.basic import Constant
from sharpmax.policies.per_head import PerHead
from tests.integrations.families import _LLAMA, FAMILIES, Family

PHI3 = Family("phi3", "Phi3ForCausalLM", "Phi3Config", _LLAMA)
OLMO2 = Family("olmo2", "Olmo2ForCausalLM", "Olmo2Config", _LLAMA)
PER_HEAD = [FAMILIES[name] for name in ("llama", "gpt2", "qwen2", "bert")] + [PHI3, OLMO2]


def constants(model: Any, *, alike: bool = False) -> PerHead:
    """Another β in every head, or in every layer."""
    layers = len(modules_of(model))
    grid = [[0.5 + 0.5 * ((layer + (0 if alike else h)) % 5) for h in range(4)] for layer in range(layers)]
    return PerHead.of(Constant, value=grid)


def saved(family: Family, folder: Path, **options: Any) -> Any:
    model = family.build()
    model.save_pretrained(folder, **options)
    (folder / "tokenizer.json").write_text("{}")
    return model


def loaded(model: Any, folder: Path) -> Any:
    return type(model).from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("family", PER_HEAD, ids=lambda f: f.name)
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


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_one_constant_per_layer_goes_into_the_gain(name: str, tmp_path: Path) -> None:
    """The gain itself in Qwen 3, the gain minus 1 in Gemma 3."""
    family = FAMILIES[name]
    model = saved(family, tmp_path / "model")
    policy = constants(model, alike=True)
    made = sm.fold(tmp_path / "model", policy, out=tmp_path / "folded")
    with sm.applied(model, policy):
        assert (family.logits(loaded(model, made.path)) - family.logits(model)).abs().max() < 1e-5
    with pytest.raises(UnsupportedError, match=r"one gain for all heads.*one β per layer"):
        sm.fold(tmp_path / "model", constants(model), out=tmp_path / "other")
    with pytest.raises(UnsupportedError, match=r"normalises its queries .*q_norm\), so that an \(IA\)³ adapter"):
        sm.fold(tmp_path / "model", policy, out=tmp_path / "adapter", as_adapter=True)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "folded"}


def test_types_stay_as_they_are(tmp_path: Path) -> None:
    """bfloat16 in, bfloat16 out: β times the weight, rounded once."""
    model = FAMILIES["llama"].build().to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    sm.fold(tmp_path / "model", Constant(1.3), out=tmp_path / "folded")
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "folded"))
    for name, weight in old.items():
        wanted = (weight.double() * 1.3).to(torch.bfloat16) if "q_proj" in name else weight
        assert torch.equal(new[name], wanted), name


@pytest.mark.parametrize("family", [FAMILIES["llama"], FAMILIES["gpt2"], FAMILIES["qwen2"], PHI3], ids=lambda f: f.name)
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


def quantised(folder: Path) -> None:
    edit(folder, quantization_config={"quant_method": "gptq"})


def edit(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def cut(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-9])


def renamed(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({name.replace("q_proj", "wq"): one for name, one in weights.items()}, folder / "model.safetensors")


def half_float(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({name: one.half() for name, one in weights.items()}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "policy", "kind", "says"),
    [
        (quantised, Constant(2.0), ArgumentError, r"weights quantised by 'gptq'; allowed: .*or a GGUF file"),
        (lambda folder: edit(folder, model_type="nonsense"), Constant(2.0), ArgumentError, r"model: got .*nonsense"),
        (lambda folder: edit(folder, sharpmax_folded="β = 2"), Constant(2.0), ArgumentError, r"already holds"),
        (cut, Constant(2.0), FileFormatError, r"model\.safetensors' is not a whole safetensors file \(it ends before"),
        (renamed, Constant(2.0), UnsupportedError, r"layers\.0\.self_attn\.q_proj\.weight is not in its files"),
        (half_float, Constant(1e7), UnsupportedError, r"β up to 1e\+07 gives weights that F16 cannot hold"),
        (lambda folder: (folder / "model.safetensors").unlink(), Constant(2.0), ArgumentError, r"no safetensors files"),
        (lambda folder: None, "paper", UnsupportedError, r"depends on the row \(entropy\)"),
        (lambda folder: None, PerHead.of(Constant, value=[[2.0] * 4] * 3), ArgumentError, r"3 layers × 4 heads; allow"),
    ],
)  # fmt: skip
def test_what_cannot_be_right_is_refused(
    change: Any, policy: Any, kind: type[SharpmaxError], says: str, tmp_path: Path
) -> None:
    saved(FAMILIES["llama"], tmp_path / "model")
    change(tmp_path / "model")
    before = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    with pytest.raises(kind, match=says) as caught:
        sm.fold(tmp_path / "model", policy, out=tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()} == before


def test_a_family_that_weights_cannot_hold_is_found_out(tmp_path: Path) -> None:
    """By a small model, in which what training starts at 0 is not 0."""
    saved(Family("doge", "DogeForCausalLM", "DogeConfig", _LLAMA), tmp_path / "doge")
    with pytest.raises(UnsupportedError, match="a logit is more than query times key"):
        sm.fold(tmp_path / "doge", Constant(2.0), out=tmp_path / "out")


def test_a_folder_that_somebody_writes_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sharpmax.integrations.transformers import checkpoint

    saved(FAMILIES["llama"], tmp_path / "model")
    put = checkpoint._put

    def slow(*given: Any) -> float:
        (tmp_path / "model" / "model.safetensors").touch()
        return put(*given)

    monkeypatch.setattr(checkpoint, "_put", slow)
    with pytest.raises(ArgumentError, match="changed while it was read"):
        sm.fold(tmp_path / "model", Constant(2.0), out=tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
