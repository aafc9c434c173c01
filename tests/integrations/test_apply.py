"""Applying a policy, taking it out again, and everything a model can do in between."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import sharpmax as sm
from sharpmax.errors import OutOfRangeWarning, UnsupportedError
from sharpmax.integrations import transformers as hf
from sharpmax.integrations.transformers.interface import observed
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import Constant, LogLength, OutputScale
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.polynomial import PAPER, Polynomial
from sharpmax.stats.call import AttentionCall
from sharpmax.stats.dispatch import measure
from tests.integrations.families import FAMILIES, LLAMA, MIXTURE, transformers

SMOOTH = PerHead(
    (
        (Constant(1.0), Polynomial((0.5, 1.0), (0.0, 9.0), threshold=0.0), LogLength(2.0), EntropyTarget(0.5)),
        (Polynomial((0.2, 1.5), (0.0, 9.0), threshold=0.0), Constant(2.0), EntropyTarget(0.7), LogLength(3.0)),
    )
)
LENGTHS = PerHead.of(LogLength, reference=[[2.0, 3.0, 4.0, 5.0], [3.0, 2.0, 6.0, 4.0]])


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 97, (2, 12))


def everything(model: Any) -> dict[str, Any]:
    """All that can be told about a model: attributes, configurations, hooks and weights, module by module."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[name] = {key: value for key, value in vars(module).items() if key not in ("_modules", "config")}
        found[name] = {k: dict(v) if isinstance(v, dict) else v for k, v in found[name].items()}
        if hasattr(module, "config"):
            found[name + ".config"] = dict(vars(module.config))
    return found


# Restoring


def test_restore_leaves_no_trace(model: Any, ids: torch.Tensor) -> None:
    mine = model.save_pretrained = lambda *args, **kwargs: "a method of this instance"
    before, plain = everything(model), model(ids).logits
    assert hf.apply(model, MIXTURE) is model
    assert model.save_pretrained is not mine
    assert not torch.equal(model(ids).logits, plain)
    for _ in range(2):
        assert hf.restore(model) is model
        assert repr(everything(model)) == repr(before)
    assert model.save_pretrained is mine
    assert torch.equal(model(ids).logits, plain)


def test_applied_nests_and_survives_exceptions(model: Any, ids: torch.Tensor) -> None:
    before, plain = everything(model), model(ids).logits
    with hf.applied(model, Constant(2.0)):
        outer = model(ids).logits
        with hf.applied(model, LogLength(2.0)):
            assert hf.policy_of(model) == LogLength(2.0)
        with pytest.raises(RuntimeError, match="on purpose"), hf.applied(model, LogLength(2.0)):
            raise RuntimeError("on purpose")
        assert hf.policy_of(model) == Constant(2.0)
        assert torch.equal(model(ids).logits, outer)
        with hf.applied(model, None):
            assert torch.equal(model(ids).logits, plain)
        with hf.applied(model, "paper"):
            hf.restore(model)
        assert torch.equal(model(ids).logits, outer)
    assert hf.policy_of(model) is None
    assert repr(everything(model)) == repr(before)


def test_the_attention_cannot_be_changed_behind_a_policy(model: Any, ids: torch.Tensor) -> None:
    hf.apply(model, "paper")
    model.config._attn_implementation = "eager"
    with pytest.raises(UnsupportedError, match="became 'eager'"):
        model(ids)


# Saving


def test_the_policy_is_saved_beside_a_plain_checkpoint(model: Any, ids: torch.Tensor, tmp_path: Path) -> None:
    plain = model(ids).logits
    model.save_pretrained(tmp_path / "plain")
    sharp = hf.apply(model, MIXTURE)(ids).logits
    model.save_pretrained(tmp_path / "sharp")
    model.save_pretrained(tmp_path / "another process", False)
    assert not (tmp_path / "another process" / "sharpmax_policy.json").exists()
    assert torch.equal(model(ids).logits, sharp)
    added = {p.name for p in (tmp_path / "sharp").iterdir()} - {p.name for p in (tmp_path / "plain").iterdir()}
    assert added == {"sharpmax_policy.json"}
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "sharp" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "sharp").eval()
    assert torch.equal(again(ids).logits, plain)
    assert torch.equal(hf.apply(again, tmp_path / "sharp")(ids).logits, sharp)
    assert hf.policy_of(again) == MIXTURE
    hf.apply(hf.restore(again), str(tmp_path / "sharp" / "sharpmax_policy.json"))
    assert torch.equal(again(ids).logits, sharp)


# What a model can do


def padded(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


@pytest.mark.parametrize(("family", "options"), [
    ("llama", {"num_beams": 2, "cache_implementation": "static"}), ("mistral", {"num_beams": 3}), ("gemma3", {}),
], ids=str)  # fmt: skip
def test_unequal_prompts_generate_what_they_do_alone(family: str, options: dict[str, Any], ids: torch.Tensor) -> None:
    model = FAMILIES[family].build()
    hf.apply(model, MIXTURE)
    options = {**options, "max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "disable_compile": True}
    both = model.generate(**padded(ids), **options)
    first = model.generate(ids[:1, 4:], attention_mask=torch.ones(1, 8, dtype=torch.long), **options)
    second = model.generate(ids[1:], attention_mask=torch.ones(1, 12, dtype=torch.long), **options)
    assert torch.equal(both[0, 4:], first[0])
    assert torch.equal(both[1], second[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler uses parts of torch that torch advises against
def test_compiled_in_one_graph(model: Any, ids: torch.Tensor) -> None:
    torch.compiler.reset()
    hf.apply(model, MIXTURE)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert (compiled(**padded(ids)).logits - model(**padded(ids)).logits).abs().max() < 1e-5
        hf.restore(model)
        assert torch.equal(compiled(ids).logits, model(ids).logits)


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """In the dtype of the model; transformers' own loss is in float32."""
    return torch.nn.functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def test_gradients_with_and_without_checkpointing(ids: torch.Tensor) -> None:
    """Against finite differences of the whole model with its policy (which normalises in float32 in any dtype)."""
    model = LLAMA.build().double().train()
    hf.apply(model, SMOOTH)
    weight = model.model.layers[0].self_attn.q_proj.weight
    loss_of(model, ids).backward()
    direction, step = weight.grad / weight.grad.norm(), 1e-4
    losses = []
    with torch.no_grad():
        for change in (step, -2 * step):
            weight += change * direction
            losses.append(loss_of(model, ids))
        weight += step * direction
    slope = float((losses[0] - losses[1]) / (2 * step))
    for checkpoint in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        if checkpoint is not None:
            model.gradient_checkpointing_enable(checkpoint)
        model.zero_grad()
        loss_of(model, ids).backward()
        assert abs(float((weight.grad * direction).sum()) - slope) < 1e-3 * slope


def test_training_after_inference_mode(model: Any, ids: torch.Tensor) -> None:
    """What is kept between calls must not be an inference tensor, which could not be part of a graph."""
    model.double()
    for policy in (LENGTHS, PerHead.of(Constant, value=[[1.0, 2.0, 3.0, 4.0]] * 2)):
        hf.apply(model, policy)
        with torch.inference_mode():
            model(ids)
        model(ids, labels=ids).loss.backward()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[AttentionCall]:
    """The calls whose rows are measured."""
    calls: list[AttentionCall] = []

    def spy(call: AttentionCall, impl: str, fields: frozenset[str]) -> Any:
        calls.append(call)
        return measure(call, impl, fields)

    monkeypatch.setattr("sharpmax.ops.sharpen.measure", spy)
    return calls


def test_autocast_reaches_measured_and_observed_rows(model: Any, ids: torch.Tensor, measured: list[Any]) -> None:
    # Rotary embeddings return float32 under autocast; attention computes in bfloat16.
    calls: list[AttentionCall] = []
    with torch.autocast("cpu", dtype=torch.bfloat16), observed(model, calls.append):
        model(ids)
        hf.apply(model, PAPER)(ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(ids)
    assert [call.q.dtype for call in calls] == [torch.bfloat16] * 4
    assert [call.q.dtype for call in measured] == [torch.bfloat16] * 4


@pytest.mark.parametrize(
    ("policy", "rows"),
    [(None, []), (Constant(2.0), []), (LENGTHS, []), (MIXTURE, [(2, 2, 12)] * 2)],
    ids=["none", "constant", "lengths", "mixture"],
)
def test_only_heads_that_need_it_are_measured(
    policy: Policy | None, rows: list[Any], model: Any, ids: torch.Tensor, measured: list[AttentionCall]
) -> None:
    hf.apply(model, policy)
    model(ids)
    model(**padded(ids))
    assert [call.rows for call in measured] == rows


def warnings_of(model: Any, ids: torch.Tensor) -> int:
    """The number of warnings in one pass under Python's default filters."""
    with warnings.catch_warnings(record=True) as found:
        warnings.resetwarnings()
        model(ids)
    return sum(issubclass(one.category, OutOfRangeWarning) for one in found)


@pytest.mark.parametrize("shape", ["one", "heads"])
def test_rows_outside_the_fitted_range_warn_once_per_model(shape: str, ids: torch.Tensor) -> None:
    narrow = Polynomial((1.0, 1.0), (0.0, 0.6), outside_is="clamp")
    policy = narrow if shape == "one" else PerHead(((narrow, Constant(1.0), narrow, narrow),) * 2)
    first, second = LLAMA.build(), LLAMA.build()
    with hf.applied(first, policy):
        assert [warnings_of(first, ids) for _ in range(2)] == [1, 0]
        twin = copy.deepcopy(first)
    with hf.applied(first, policy):
        assert warnings_of(first, ids) == 0
    assert [warnings_of(hf.apply(second, policy), ids), warnings_of(twin, ids)] == [1, 1]
    other = Polynomial((1.0, 1.0), (0.0, 0.7), outside_is="clamp")
    assert warnings_of(hf.apply(first, other), ids) == 1


def test_an_output_scale_equals_scaled_columns_of_the_output_projection() -> None:
    model = LLAMA.build()
    ids = torch.arange(12)[None]
    scales = torch.linspace(0.5, 1.5, 8).reshape(2, 4)
    policy = PerHead(tuple(tuple(OutputScale(float(s), Constant(1.3)) for s in layer) for layer in scales))
    oracle = copy.deepcopy(model)
    width = oracle.config.hidden_size // 4
    for layer, gains in zip(oracle.model.layers, scales, strict=True):
        layer.self_attn.q_proj.weight.data *= 1.3
        layer.self_attn.o_proj.weight.data *= gains.repeat_interleave(width)
    with torch.no_grad(), sm.applied(model, policy):
        torch.testing.assert_close(model(ids).logits, oracle(ids).logits)
