"""Loading language models: frozen, silent, and one clear line for everything that is not one."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.backends import cuda

import sharpmax as sm
from sharpmax.errors import ArgumentError
from sharpmax.integrations.transformers.application import applied
from sharpmax.models import language
from sharpmax.models.language import ALIASES, load_language_model, weights_fingerprint
from tests.calibration.small import calibrated
from tests.experiments.evaluate import tiny

transformers = pytest.importorskip("transformers")


@pytest.fixture
def saved(tmp_path: Path):
    """A function that saves a model with a tokenizer and returns its folder."""
    transformers.logging.disable_progress_bar()

    def save(model) -> Path:
        model.save_pretrained(tmp_path / "model")
        tiny.tokenizer().save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    yield save
    transformers.logging.enable_progress_bar()


@pytest.fixture(scope="module")
def plain():
    return tiny.model()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("llama"))


def refused(name: str | Path, **options) -> str:
    with pytest.raises(ArgumentError) as caught:
        load_language_model(str(name), **options)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 600
    return text


def test_a_folder_is_loaded_as_it_was_saved(llama: Path, plain) -> None:
    loaded = load_language_model(str(llama))
    assert loaded.name == str(llama)
    assert loaded.tokenizer("one two").input_ids == tiny.tokenizer()("one two").input_ids
    state = plain.state_dict()
    torch.testing.assert_close(dict(loaded.model.state_dict()), dict(state), rtol=0, atol=0)
    assert not any(module.training for module in loaded.model.modules())
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    half = load_language_model(str(llama), dtype="bfloat16").model
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert torch.equal(half.lm_head.weight, plain.lm_head.weight.bfloat16())


def test_loading_is_silent_and_restores_the_verbosity(saved, capfd: pytest.CaptureFixture[str]) -> None:
    # transformers reports weights that fit nowhere.
    model = tiny.model()
    model.odd = torch.nn.Linear(3, 3)
    folder = saved(model)
    logging = transformers.logging
    logging.set_verbosity_info()
    logging.enable_progress_bar()
    capfd.readouterr()
    try:
        load_language_model(str(folder))
        assert tuple(capfd.readouterr()) == ("", "")
        assert logging.get_verbosity() == logging.INFO
        assert logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        refused("no such/model at all")
        assert logging.get_verbosity() == logging.INFO
        assert not logging.is_progress_bar_enabled()
    finally:
        logging.set_verbosity_warning()


def test_a_model_without_all_weights_is_refused(saved, plain) -> None:
    """transformers itself warns and fills them in at random."""
    folder = saved(plain.model)
    says = ", whose files lack 1 of the weights of a LlamaForCausalLM (lm_head.weight)"
    assert f"model: got {str(folder)!r}{says}" in refused(folder)


ALLOWED = "; allowed: smollm2, the folder of a saved model, a GGUF file or a hub id"


def test_files_ids_and_devices_that_cannot_be_had(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    unknown = "nobody/nothing-of-this-name"
    assert re.fullmatch(rf"model: got {unknown!r} \(.+\){re.escape(ALLOWED)}", refused(unknown))
    (damaged := tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(99))
    assert re.fullmatch(rf"model: got {str(damaged)!r} \(.+\){re.escape(ALLOWED)}", refused(damaged))
    for content, says in (("{", "not a valid JSON file"), ('{"model_type": "zzz"}', "model type `zzz`")):
        (tmp_path / "config.json").write_text(content)
        assert re.fullmatch(rf"model: got {str(tmp_path)!r} \(.*{says}.*\){re.escape(ALLOWED)}", refused(tmp_path))
    for device in ("nothing", "cpu:x"):
        message = refused(llama, device=device)
        assert message.startswith(f"device: got {device!r} (")
        assert message.endswith("); allowed: a device that torch can use here, such as cpu")


def test_weights_that_cannot_be_read(saved, plain) -> None:
    folder = saved(plain)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    assert refused(folder).startswith(f"model: got {str(folder)!r} (Error while deserializing header: ")
    weights.unlink()
    # A pickle may run anything; it is not opened, whatever it holds.
    torch.save(plain.state_dict(), folder / "pytorch_model.bin")
    assert "no file named model.safetensors" in refused(folder)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert "tokenizer" in refused(folder)


def test_code_that_comes_with_a_model_is_not_run(saved, plain) -> None:
    folder = saved(plain)
    ran = folder / "ran"
    (folder / "own.py").write_text(f"import pathlib\npathlib.Path({str(ran)!r}).touch()\nclass Config: pass\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    assert refused(folder).endswith("; if you trust it, pass trust_remote_code")
    assert not ran.exists()


def test_a_folder_may_not_hide_behind_an_alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama: Path) -> None:
    """An alias means the same model wherever the command is run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    monkeypatch.setattr(language, "ALIASES", {"smollm2": lambda: llama})
    loaded = load_language_model("smollm2")
    assert list(ALIASES) == ["smollm2"]
    names = (loaded.name, loaded.model.name_or_path, loaded.model.config._name_or_path, loaded.tokenizer.name_or_path)
    assert set(names) == {"smollm2"}


def test_cudnn_is_left_out_inside_any_length_on_a_gpu() -> None:
    def enabled() -> list[bool]:
        return [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()]

    before = enabled()
    with language.any_length(torch.device("cuda")):
        assert enabled() == [True, True, False]
    with language.any_length(torch.device("cpu")):
        assert enabled() == before
    assert enabled() == before


def test_a_fingerprint_tells_every_value_of_every_tensor(plain) -> None:
    before = weights_fingerprint(plain)
    narrow = copy.deepcopy(plain).to(torch.bfloat16)  # it depends on the numbers, not on the dtype they are loaded in
    assert weights_fingerprint(narrow) == weights_fingerprint(copy.deepcopy(narrow).float()) != before
    other = copy.deepcopy(plain)
    other.register_buffer("steps", torch.tensor([3]))
    assert weights_fingerprint(other) != weights_fingerprint(copy.deepcopy(plain)) == before
    for name, _ in plain.named_parameters():
        other = copy.deepcopy(plain)
        with torch.no_grad():
            other.get_parameter(name).view(-1)[-1] += 1.0
        assert weights_fingerprint(other) != before, name


def test_a_model_on_several_devices_computes_and_learns_the_same(llama: Path) -> None:
    """One layer on the CPU, one on the disk: the same logits, policies, fingerprint, calibration and probe."""
    pytest.importorskip("accelerate")
    names = ("embed_tokens", "rotary_emb", "layers.0")
    split: dict[str, int | str] = {f"model.{name}": "cpu" for name in names}
    split |= dict.fromkeys(("model.layers.1", "model.norm", "lm_head"), "disk")
    whole, there = (load_language_model(str(llama), device=device) for device in ("cpu", split))
    assert there.model.model.layers[1].self_attn.q_proj.weight.is_meta
    ids = torch.arange(40)[None]
    for policy in (None, "paper"):
        with applied(whole.model, policy), applied(there.model, policy):
            assert torch.equal(there.model(ids).logits, whole.model(ids).logits)
    assert weights_fingerprint(there.model) == weights_fingerprint(whole.model)
    learned = [calibrated(one.model, steps=1, lengths=(40,)).chosen.policy for one in (whole, there)]
    assert learned[0] == learned[1]
    options: dict[str, Any] = {"tasks": [tiny.LETTERS], "sizes": [4, 8, 16], "prompts": 1}
    found = [sm.probe(one.model, one.tokenizer, **options).heads() for one in (whole, there)]
    assert found[0] == found[1]


def test_a_split_model_begins_on_a_device(llama: Path) -> None:
    pytest.importorskip("accelerate")
    assert load_language_model(str(llama), device="split").model.device.type in ("cpu", "cuda")
    parts = ("model.embed_tokens", "model.rotary_emb", "model.layers", "model.norm", "lm_head")
    assert "the embeddings on the disk" in refused(llama, device=dict.fromkeys(parts, "disk"))
