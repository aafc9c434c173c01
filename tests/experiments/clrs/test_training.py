"""Fine-tuning: the loss, what differs between variants, learned policies. Kills, comparisons: tests/cli."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sharpmax.errors import SharpmaxError
from sharpmax.experiments.clrs import comparison
from sharpmax.experiments.clrs.comparison import VariantComparison
from sharpmax.experiments.clrs.data import Documents, Source, replies
from sharpmax.experiments.clrs.training import FineTuneRecipe, FineTuning, scratch_model, scratch_tokenizer
from sharpmax.experiments.run_folder import RunStore
from sharpmax.integrations.transformers.application import policy_of
from sharpmax.models.language import LanguageModel
from sharpmax.policies.log_linear import LogLinear
from sharpmax.policies.registry import load_policy
from sharpmax.results import load
from sharpmax.tasks.clrs_text.generation import Example
from tests.experiments.clrs import toy
from tests.experiments.evaluate import tiny

pytest.importorskip("accelerate", reason="needs the extra hf")

STEPS, TOGETHER, ROOM = 6, 2, 128
CPU = torch.device("cpu")
EXAMPLES = toy.examples(toy.ALGORITHMS, toy.TRAIN, 12, "train", 0)


def recipe(**more: Any) -> FineTuneRecipe:
    return FineTuneRecipe(
        **{"steps": STEPS, "batch_tokens": TOGETHER * ROOM, "tokens_at_once": ROOM, "save_every": 2, **more}
    )


def prepared(language: LanguageModel | None = None, examples: Any = EXAMPLES, **more: Any) -> FineTuning:
    language = language or LanguageModel("tiny", tiny.model(), tiny.tokenizer())
    return FineTuning(language, Documents.of(language.tokenizer, examples), {}, recipe(**more), CPU)


def run(folder: Path, model: Any = None, **more: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    return prepared(None if model is None else LanguageModel("tiny", model, tiny.tokenizer()), **more).train(folder)


def losses(trained: dict[str, Any]) -> list[float]:
    assert [step for step, _ in trained["curve"]] == list(range(1, STEPS + 1))
    return [loss for _, loss in trained["curve"]]


@pytest.mark.parametrize("together", [1, 3])
def test_a_long_answer_counts_no_more_than_a_short_one(tmp_path: Path, together: int) -> None:
    examples = [Example(f"say:\n{'ab' * n}\n", "a b " * n, "say", n) for n in (1, 2, 5, 3, 1, 4)]
    known = list(replies(tiny.tokenizer(), examples))
    size = 512 if together == 1 else 128  # one group, or three whose gradients accumulate
    training = prepared(examples=examples, steps=1, batch_tokens=together * size, tokens_at_once=size)
    model, means = tiny.model(), []
    for one in [known[place] for group in training.batches.groups for place in group]:
        with torch.no_grad():
            logits = model(torch.tensor([one.ids])).logits[0, one.start - 1 : -1]
        means.append(float(F.cross_entropy(logits, torch.tensor(one.ids[one.start :]))))
    assert len(training.batches) == together
    assert len(means) > together
    assert training.train(tmp_path)["curve"] == [[1, pytest.approx(sum(means) / len(means), rel=1e-5)]]


def test_variants_read_the_same_batches_from_the_same_weights(tmp_path: Path) -> None:
    seen: dict[str, list[Any]] = {}
    results = {}
    for name, policy in (("none", None), ("paper", load_policy("paper"))):
        model = tiny.model()
        seen[name] = [[weight.clone() for weight in model.parameters()]]

        def note(module: Any, args: Any, kwargs: Any, into: list[Any] = seen[name]) -> None:
            into.append(kwargs["input_ids"].clone())

        model.register_forward_pre_hook(note, with_kwargs=True)
        results[name] = losses(run(tmp_path / name, model=model, policy=policy, policy_name=name))
    assert all(torch.equal(a, b) for a, b in zip(*(batches[1:] for batches in seen.values()), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*(batches[0] for batches in seen.values()), strict=True))
    assert results["none"] != results["paper"]
    assert losses(run(tmp_path / "again")) == results["none"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_layers_have_the_same_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load_policy("paper")
    # Graphs are traced and run without a compiler, which would take a minute.
    options: Any = {"backend": "aot_eager", "fullgraph": True}
    compile_layer = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: compile_layer(self, **options))
    plain = run(tmp_path / "plain", policy=policy)
    compiled = run(tmp_path / "compiled", policy=policy, compiled=True)
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-4)
    assert losses(compiled)[-1] < losses(compiled)[0]


def test_a_learned_policy_is_saved_beside_the_model(tmp_path: Path) -> None:
    model = tiny.model()
    before = set(model.state_dict())
    trained = run(tmp_path / "a", model=model, learn="length", policy_rate=0.05)
    policy: Any = load_policy(tmp_path / "a" / "model" / "sharpmax_policy.json")
    heads = [one for layer in policy.policies for one in layer]
    assert any(isinstance(one, LogLinear) and one.level != 0.0 for one in heads)
    assert all(isinstance(one, LogLinear) for one in heads)
    assert set(model.state_dict()) == before
    assert policy_of(model) is None
    assert trained["setting"]["policy"] == policy.to_dict()
    assert trained["setting"]["parameters"] == sum(weight.numel() for weight in model.parameters())


def test_a_loss_that_is_not_a_number_ends_the_run(tmp_path: Path) -> None:
    model = tiny.model()
    with torch.no_grad():
        model.lm_head.weight[0] = torch.inf
    with pytest.raises(SharpmaxError, match="not a number at step 1"):
        run(tmp_path / "a", model=model)


def test_recipes_of_variants() -> None:
    usual = recipe()
    assert usual.of_variant("none", "--policy") == usual
    assert usual.of_variant("band:0.1:0.6", "--policy").band == (0.1, 0.6)
    assert usual.of_variant("learn:length", "--policy").learn == "length"
    assert usual.of_variant("paper", "--policy").policy_name == "paper"


def test_a_new_model_trains_in_limited_time_with_an_entropy_band(tmp_path: Path) -> None:
    tokenizer = scratch_tokenizer(EXAMPLES)
    language = scratch_model("scratch:1m-nope", tokenizer, seed=3)
    same = scratch_model("scratch:1m-nope", tokenizer, seed=3).model.state_dict()
    assert all(torch.equal(weight, same[name]) for name, weight in language.model.state_dict().items())
    question = EXAMPLES[0].question
    assert language.tokenizer.decode(language.tokenizer(question).input_ids) == question
    trained = prepared(language, band=(0.0, 0.5), minutes=1e-6, batch_tokens=ROOM).train(tmp_path)
    assert len(trained["curve"]) == 1  # time is up after one step
    assert trained["setting"]["steps"] == 1


def test_a_variant_measures_its_speed_trains_and_is_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "_WARM_UP_STEPS", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # so that it trains on one thread
    files = [toy.write(tmp_path / f"{split}.jsonl", toy.TRAIN, 12, split) for split in ("train", "test")]
    limited = FineTuneRecipe(minutes=0.005, batch_tokens=256, tokens_at_once=256)
    train, test = (Source(toy.ALGORITHMS, 12, dataset=file) for file in files)
    made = VariantComparison(
        "scratch:1m", ("learn:ssmax",), (0,), limited, train, test, tmp_path, tmp_path, "cpu", False, "sharpmax"
    )
    store, name = RunStore(tmp_path), "learn-ssmax-0"
    made.run(store, lambda *progress: None)  # a single variant runs in this process
    assert list(store.records) == [f"measure_speed {name}", "steps", f"train {name}", f"test {name}"]
    assert store.records[f"measure_speed {name}"]["steps_per_second"] > 0.0
    assert 1 <= load(tmp_path / name).tables["setting"]["steps"] <= store.records["steps"]["steps"]
    assert not (tmp_path / name / "states").exists()
    answers = store.records[f"test {name}"]["answers"]
    assert len(answers) == len(test.examples("test", tmp_path))
    assert all(0.0 < answer["entropy"] < 1.0 for answer in answers)
