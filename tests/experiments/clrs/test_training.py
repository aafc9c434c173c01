"""Fine-tuning: what is learned from, that arms differ in their policy alone, and that nothing is lost by a kill."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sharpmax.errors import ArgumentError, SharpmaxError
from sharpmax.experiments.clrs import training
from sharpmax.experiments.clrs.data import Documents, Packed, batch_of, replies
from sharpmax.experiments.clrs.scratch import scratch_model
from sharpmax.experiments.clrs.training import FineTuned, FineTuneRecipe, LossCurve, train
from sharpmax.integrations.transformers.application import policy_of
from sharpmax.models.language import LanguageModel, load_language_model
from sharpmax.policies.basic import Constant
from sharpmax.policies.log_linear import LogLinear
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.registry import load_policy
from sharpmax.tasks.clrs_text.generation import Example
from tests.experiments.clrs import stub
from tests.experiments.evaluate import tiny

pytest.importorskip("accelerate", reason="needs the extra hf")

STEPS, TOGETHER, ROOM = 6, 2, 128
CPU = torch.device("cpu")


def packed() -> Packed:
    examples = stub.examples(stub.ALGORITHMS, stub.TRAIN, 12, "train", 0)
    documents = Documents.of(tiny.tokenizer(), examples)
    return Packed.of(documents, ROOM, group_tokens=ROOM, together=TOGETHER, steps=STEPS, epochs=1.0, seed=0)


def recipe(**more: Any) -> FineTuneRecipe:
    usual = {"steps": STEPS, "batch_tokens": TOGETHER * ROOM, "tokens_at_once": ROOM, "row_tokens": ROOM}
    return FineTuneRecipe(**{**usual, "save_every": 2, **more})


def run(folder: Path, resume: bool = False, model: Any = None, progress: Any = None, **more: Any) -> FineTuned:
    folder.mkdir(exist_ok=True)
    language = LanguageModel("tiny", tiny.model() if model is None else model, tiny.tokenizer())
    options = {} if progress is None else {"progress": progress}
    return train(language, packed(), recipe(**more), folder, device=CPU, bfloat16=False, resume=resume, **options)


def losses(trained: FineTuned) -> list[float]:
    assert [entry.step for entry in trained.curve] == list(range(1, STEPS + 1))
    return [entry.loss for entry in trained.curve]


def test_the_loss_is_the_mean_over_the_tokens_of_the_answers_of_a_step(tmp_path: Path) -> None:
    groups = packed()
    total, count = 0.0, 0
    for number in range(TOGETHER):
        batch: Any = batch_of([groups[number]])
        labels = batch.pop("labels")
        with torch.no_grad():
            logits = tiny.model()(**batch).logits[:, :-1]
        total += float(F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"))
        count += int((labels != -100).sum())
    trained = run(tmp_path / "a", rate=2e-2)
    found = losses(trained)
    # Groups of different numbers of answers add up as if they were one.
    assert found[0] == pytest.approx(total / count, rel=1e-6)
    assert found[-1] < found[0]
    # Computing activations again changes nothing.
    again = run(tmp_path / "c", rate=2e-2, checkpointing=True, policy=Constant(1.0), policy_name="constant:1")
    assert losses(again) == pytest.approx(found, rel=1e-4)
    assert trained.tokens_per_second
    training.forget_states(tmp_path / "a")
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"model", "curve.jsonl"}
    tokens = [entry.tokens for entry in trained.curve]
    assert tokens[0] == groups.tokens(0, TOGETHER)


def test_weighed_by_answers_a_long_answer_counts_no_more_than_a_short_one(tmp_path: Path) -> None:
    examples = [Example(f"say:\n{'ab' * n}\n", "a b " * n, "say", n) for n in (1, 2, 5, 3, 1, 4)]
    known = list(replies(tiny.tokenizer(), examples))
    groups = Packed.of(
        Documents.of(tiny.tokenizer(), examples), 512, group_tokens=512, together=1, steps=1, epochs=1.0, seed=0
    )
    model, means, lengths = tiny.model(), [], []
    for row in groups.groups[0].rows:
        for one in map(known.__getitem__, row):
            with torch.no_grad():
                logits = model(torch.tensor([one.ids])).logits[0, one.start - 1 : -1]
            means.append(float(F.cross_entropy(logits, torch.tensor(one.ids[one.start :]))))
            lengths.append(len(one.ids) - one.start)
    assert len(lengths) == 6
    assert len(set(lengths)) == 5
    language = LanguageModel("tiny", tiny.model(), tiny.tokenizer())
    settings = recipe(steps=1, batch_tokens=512, row_tokens=512, tokens_at_once=512, weigh="answers")
    trained = train(language, groups, settings, tmp_path, device=CPU, bfloat16=False)
    assert trained.curve[0].loss == pytest.approx(sum(means) / len(means), rel=1e-5)


def test_arms_read_the_same_batches_from_the_same_weights(tmp_path: Path) -> None:
    seen: dict[str, list[Any]] = {}
    results = {}
    for name, policy in (("none", None), ("paper", load_policy("paper"))):
        model = tiny.model()
        seen[name] = [[weight.clone() for weight in model.parameters()]]

        def note(module: Any, args: Any, kwargs: Any, into: list[Any] = seen[name]) -> None:
            into.append((kwargs["input_ids"].clone(), kwargs["position_ids"].clone()))

        model.register_forward_pre_hook(note, with_kwargs=True)
        results[name] = losses(run(tmp_path / name, model=model, policy=policy, policy_name=name))
    for one, other in zip(*(batches[1:] for batches in seen.values()), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*(batches[0] for batches in seen.values()), strict=True))
    assert results["none"] != results["paper"]
    assert losses(run(tmp_path / "again")) == results["none"]


@pytest.mark.parametrize("more", [{"learn": "length", "policy_rate": 0.05}, {"policy": load_policy("paper")}])
def test_a_run_that_was_killed_goes_on_with_the_same_losses(tmp_path: Path, more: dict[str, Any]) -> None:
    whole = run(tmp_path / "whole", **more)

    def killed(step: int, steps: int, remark: str) -> None:
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", progress=killed, **more)
    states = sorted(path.name for path in (tmp_path / "cut" / "states").iterdir())
    assert states == ["checkpoint-2", "checkpoint-4"]
    assert not (tmp_path / "cut" / "model").exists()
    # Half of a state, as a kill while it is written leaves it.
    half = tmp_path / "cut" / "states" / "checkpoint-6"
    half.mkdir()
    (half / "trainer_state.json").write_text('{"global_')
    gone_on = run(tmp_path / "cut", resume=True, **more)
    assert losses(gone_on) == losses(whole)
    ends = [load_language_model(str(tmp_path / name / "model")).model for name in ("whole", "cut")]
    for one, other in zip(*(end.parameters() for end in ends), strict=True):
        assert torch.equal(one, other)
    assert gone_on.policy == whole.policy
    lines = (tmp_path / "cut" / "curve.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == losses(whole)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_layers_learn_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load_policy("paper")
    # Graphs are traced and run as they are; a compiler behind them would take a minute.
    options: Any = {"backend": "aot_eager", "fullgraph": True}
    compile_layer = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: compile_layer(self, **options))
    plain = run(tmp_path / "plain", policy=policy)
    compiled = run(tmp_path / "compiled", policy=policy, compiled=True)
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-4)
    assert losses(compiled)[-1] < losses(compiled)[0]


def test_a_learned_policy_is_beside_the_model_and_nowhere_in_it(tmp_path: Path) -> None:
    model = tiny.model()
    before = set(model.state_dict())
    trained = run(tmp_path / "a", model=model, learn="length", policy_rate=0.05)
    assert isinstance(trained.policy, PerHead)
    heads = [one for layer in trained.policy.policies for one in layer]
    assert any(isinstance(one, LogLinear) and one.level != 0.0 for one in heads)
    assert all(isinstance(one, LogLinear) for one in heads)
    assert set(model.state_dict()) == before
    assert policy_of(model) is None
    assert load_policy(tmp_path / "a" / "model" / "sharpmax_policy.json") == trained.policy
    assert trained.parameters == sum(weight.numel() for weight in model.parameters())


def test_a_loss_that_is_not_a_number_ends_the_run(tmp_path: Path) -> None:
    model = tiny.model()
    with torch.no_grad():
        model.lm_head.weight[0] = torch.inf
    with pytest.raises(SharpmaxError, match="not a number at step 1"):
        run(tmp_path / "a", model=model)


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers: Any = pytest.importorskip("transformers")
    real = transformers.Trainer._save_optimizer_and_scheduler

    def full(self: Any, output_dir: str) -> None:
        if self.state.global_step == 4:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")
        real(self, output_dir)

    with monkeypatch.context() as patch:
        patch.setattr(transformers.Trainer, "_save_optimizer_and_scheduler", full)
        with pytest.raises(SharpmaxError, match=r"is full .*--resume"):
            run(tmp_path / "cut")
    assert len(losses(run(tmp_path / "cut", resume=True))) == STEPS
    usage: Any = type("Usage", (), {"free": 100})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ArgumentError, match="GB free"):
        run(tmp_path / "new")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"rate": 0.0}, "--lr: got 0.0"),
        ({"epochs": -1.0}, "--epochs: got -1.0"),
        ({"learn": "magic"}, "--learn-policy: got 'magic'"),
        ({"learn": "length", "policy": Constant(2.0)}, "one of --policy, --learn-policy"),
        ({"seed": -1}, "seed: got -1"),
    ],
)
def test_recipes_that_make_no_sense(more: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says.replace("(", r"\(")):
        recipe(**more)


def test_the_curve_keeps_losses_as_they_were(tmp_path: Path) -> None:
    """The Trainer multiplies a loss in place by the number of devices, which undoes the mean that follows."""
    curve = LossCurve(tmp_path / "curve.jsonl", lambda step: 1, every=1)
    logits, labels = torch.zeros(1, 2, 5), torch.tensor([[-100, 1, 2]])
    loss = curve.loss(SimpleNamespace(logits=logits), labels, 2)
    loss *= 2
    curve.step_done(1, last=True)
    assert curve.entries[0].loss == pytest.approx(math.log(5))


def test_a_decoder_from_scratch_in_limited_time_with_a_band(tmp_path: Path) -> None:
    examples = stub.examples(stub.ALGORITHMS, stub.TRAIN, 12, "train", 0)
    language = scratch_model("scratch:1m-nope", examples, seed=3)
    same = scratch_model("scratch:1m-nope", examples, seed=3).model.state_dict()
    assert all(torch.equal(weight, same[name]) for name, weight in language.model.state_dict().items())
    question = examples[0].question
    assert language.tokenizer.decode(language.tokenizer(question).input_ids) == question
    documents = Documents.of(language.tokenizer, examples)
    rows = Packed.of(documents, 2, group_tokens=ROOM, together=1, steps=STEPS, epochs=1.0, seed=0)
    settings = recipe(band=(0.0, 0.5), minutes=1e-6, batch_tokens=ROOM)
    (tmp_path / "a").mkdir()
    trained = train(language, rows, settings, tmp_path / "a", device=CPU, bfloat16=False)
    assert len(trained.curve) == 1  # time is up after a step
    with pytest.raises(ArgumentError, match="scratch:10m"):
        scratch_model("scratch:9b", examples, seed=0)
