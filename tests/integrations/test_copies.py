"""Copies, pickles and shared configurations of models with a policy."""

from __future__ import annotations

import copy
import gc
import io
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sharpmax.integrations import transformers as hf
from sharpmax.integrations.transformers.interface import installed
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import Constant, LogLength
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.polynomial import Polynomial
from sharpmax.probing.capture import capture
from tests.integrations.families import FAMILIES, Family, transformers

MIXED = PerHead(
    (
        (Constant(1.0), LogLength(3.0), LogLength(2.0), Constant(2.0)),
        (Polynomial((0.5, 1.0), (0.0, 9.0)), Constant(1.0), Constant(1.0), Polynomial((0.2, 1.5), (0.0, 9.0))),
    )
)
POLICIES: list[Policy] = [Constant(2.0), LogLength(2.0), MIXED]
ATTENTIONS = pytest.mark.parametrize("attention", ["sdpa", "eager"])


def through_torch(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": through_torch,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("policy", POLICIES, ids=["constant", "length", "mixed"])
@ATTENTIONS
def test_a_copy_of_a_model_keeps_a_policy_of_its_own(attention: str, policy: Policy, way: Callable[[Any], Any]) -> None:
    family = FAMILIES["llama"]
    model = family.build(attention)
    plain = family.logits(model)
    sharp = family.logits(hf.apply(model, policy))
    twin = way(model)
    hf.restore(model)
    assert hf.policy_of(twin) == policy
    assert torch.equal(family.logits(twin), sharp)
    assert torch.equal(family.logits(model), plain)
    assert torch.equal(family.logits(hf.restore(twin)), plain)
    assert twin.config._attn_implementation == attention
    assert vars(twin).keys() == vars(model).keys()
    assert torch.equal(family.logits(hf.apply(twin, policy)), sharp)


@pytest.mark.parametrize("name", ["t5", "gemma3", "whisper", "vit"])
def test_other_families_come_back_from_a_pickle(name: str) -> None:
    family = FAMILIES[name]
    model = hf.apply(family.build(), Constant(2.0))
    sharp = family.logits(model)
    twin = through_torch(model)
    assert torch.equal(family.logits(twin), sharp)
    assert torch.equal(family.logits(hf.restore(twin)), family.logits(hf.restore(model)))


def test_a_pickle_is_read_by_a_process_that_knows_nothing_yet(tmp_path: Path) -> None:
    family = FAMILIES["llama"]
    model = hf.apply(family.build(), MIXED)
    inputs = family.inputs(model)
    torch.save((model, inputs, family.logits(model).detach()), tmp_path / "model.pt")
    code = (
        "import sys, torch\n"
        "model, inputs, expected = torch.load(sys.argv[1], weights_only=False)\n"
        "assert (model(**inputs).logits - expected).abs().max() < 1e-5\n"
        "import sharpmax as sm\n"
        "assert sm.policy_of(model) is not None\n"
        "assert (sm.restore(model)(**inputs).logits - expected).abs().max() > 1e-3"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "model.pt")], check=True)


def test_a_model_that_is_watched_can_be_copied_and_pickled() -> None:
    family = FAMILIES["llama"]
    model = family.build()
    plain = family.logits(model)
    with capture(model) as seen:
        twins = [way(model) for way in WAYS.values()]
        for twin in twins:
            assert torch.equal(family.logits(twin), plain)
    assert not seen.calls
    for twin in twins:
        assert torch.equal(family.logits(hf.restore(twin)), plain)


# Configurations


@ATTENTIONS
def test_a_configuration_does_not_tell_our_name(attention: str, tmp_path: Path) -> None:
    model = FAMILIES["llama"].build(attention)
    before = model.config.to_json_string()
    hf.apply(model, Constant(2.0))
    assert model.config.to_json_string() == before
    assert "sharpmax" not in json.dumps(model.config.to_dict(), default=str) + repr(model.config)
    model.config.save_pretrained(tmp_path)
    assert "sharpmax" not in (tmp_path / "config.json").read_text()


def second(family: Family, config: Any, like: Any) -> Any:
    """Another model of a configuration, with the weights of a first one."""
    model = getattr(transformers, family.model)(config).eval()
    model.load_state_dict(like.state_dict())
    return model


MADE: dict[str, Callable[[Any], Any]] = {"same": lambda config: config, "copied": copy.deepcopy, "shallow": copy.copy}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
@pytest.mark.parametrize("name", ["llama", "gemma2", "t5", "vit"])
def test_a_model_of_the_configuration_of_another_computes_the_baseline(name: str, made: Callable[[Any], Any]) -> None:
    family = FAMILIES[name]
    model = family.build()
    plain = family.logits(model)
    sharp = family.logits(hf.apply(model, Constant(2.0)))
    other = second(family, made(model.config), model)
    assert torch.equal(family.logits(other), plain)
    assert torch.equal(family.logits(model), sharp)
    hf.restore(model)
    assert torch.equal(family.logits(other), plain)
    hf.apply(other, Constant(2.0))
    assert torch.equal(family.logits(other), sharp)
    assert torch.equal(family.logits(model), plain)


@ATTENTIONS
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_models_that_share_a_configuration(attention: str, order: tuple[int, int]) -> None:
    family = FAMILIES["llama"]
    first = family.build(attention)
    plain = family.logits(first)
    both = [first, second(family, first.config, first)]
    sharp = [family.logits(hf.apply(family.build(attention), policy)) for policy in POLICIES[:2]]
    hf.apply(both[0], POLICIES[0])
    assert torch.equal(family.logits(both[1]), plain)
    with hf.applied(both[1], POLICIES[1]):
        assert torch.equal(family.logits(both[0]), sharp[0])
        assert torch.equal(family.logits(both[1]), sharp[1])
    assert torch.equal(family.logits(both[1]), plain)
    hf.apply(both[1], POLICIES[1])
    for place in order:
        for one, wanted in zip(both, sharp, strict=True):
            assert torch.equal(family.logits(one), plain if installed(one) is None else wanted)
        hf.restore(both[place])
    assert [torch.equal(family.logits(one), plain) for one in both] == [True, True]
    assert first.config._attn_implementation == attention


def test_a_model_that_is_gone_does_not_keep_a_configuration() -> None:
    family = FAMILIES["llama"]
    first = hf.apply(family.build(), Constant(2.0))
    hf.apply(second(family, first.config, first), Constant(3.0))
    gc.collect()
    hf.restore(first)
    assert first.config._attn_implementation == "sdpa"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler uses parts of torch that torch advises against
def test_a_compiled_model_shares_its_configuration() -> None:
    torch.compiler.reset()
    family = FAMILIES["llama"]
    first = family.build()
    other = second(family, first.config, first)
    inputs = family.inputs(other)
    compiled = torch.compile(other, fullgraph=True, backend="eager")
    with torch.no_grad():
        plain = other(**inputs).logits
        assert torch.allclose(compiled(**inputs).logits, plain, atol=1e-5)
        hf.apply(first, Constant(2.0))
        assert torch.allclose(compiled(**inputs).logits, plain, atol=1e-5)


def test_a_model_loads_with_the_configuration_of_another(tmp_path: Path) -> None:
    family = FAMILIES["llama"]
    model = family.build()
    plain = family.logits(model)
    model.save_pretrained(tmp_path)
    hf.apply(model, Constant(2.0))
    again = type(model).from_pretrained(tmp_path, config=model.config).eval()
    assert torch.equal(family.logits(again), plain)
    made = transformers.AutoModelForCausalLM.from_config(model.config).eval()
    made.load_state_dict(model.state_dict())
    assert torch.equal(family.logits(made), plain)
