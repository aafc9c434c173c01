"""The tables of an evaluation against what the model generates under each variant."""

from __future__ import annotations

import copy
import importlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sharpmax.errors import ArgumentError, SharpmaxError
from sharpmax.experiments import evaluate as pieces
from sharpmax.experiments.evaluate import BASE, Plan, evaluate_tables, prepare
from sharpmax.experiments.run_folder import RunStore
from sharpmax.experiments.variants import Harness
from sharpmax.integrations.transformers.application import applied
from sharpmax.policies.basic import Constant, LogLength
from sharpmax.policies.per_head import PerHead
from tests.experiments.evaluate.tiny import HEADS, LAYERS, LETTERS, coins, language, write_coins

SHARP = PerHead.of(Constant, value=[[0.0, 12.0, 1.0, 0.0], [0.0, 1.0, 12.0, 0.0]])
PLAN = Plan(
    variants={"sharp": SHARP, "same": Constant(1.0)},
    tasks=(LETTERS,),
    sizes=(4, 16),
    prompts=24,
    lengths=(64, 128),
    windows=3,
    questions=2,
)


def run(plan: Plan, folder: Path, **options: Any) -> dict[str, Any]:
    return evaluate_tables(language(), plan, prepare(language(), plan), folder, **options)


@pytest.fixture(scope="module", autouse=True)
def _one_round() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "ROUNDS", 1)
        yield


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(PLAN, tmp_path_factory.mktemp("run"))


def generated(policy: Any, size: int) -> list[bool]:
    """For each prompt, whether generation gives the right answer."""
    there: Any = language()
    found = []
    with applied(there.model, policy):
        for prompt in LETTERS.prompts(size, PLAN.prompts, PLAN.seed):
            ids = there.tokenizer(f"{prompt.user}\n{prompt.opening}", return_tensors="pt").input_ids
            whole = there.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
            found.append(there.tokenizer.decode(whole[0, ids.shape[1] :]) == prompt.answer)
    return found


@pytest.mark.parametrize("size", [4, 16])
def test_accuracy_is_that_of_generation(tables: dict[str, Any], size: int) -> None:
    plain, sharp = generated(None, size), generated(SHARP, size)
    table, test = tables["accuracy/letters"], tables["paired/letters"]
    assert table[BASE][str(size)]["mean"] == pytest.approx(100 * sum(plain) / len(plain))
    assert table["sharp"][str(size)]["mean"] == pytest.approx(100 * sum(sharp) / len(sharp))
    assert 0 < sum(plain) < len(plain), "the model must be right sometimes"
    gained = sum(s and not p for p, s in zip(plain, sharp, strict=True))
    lost = sum(p and not s for p, s in zip(plain, sharp, strict=True))
    assert gained + lost > 0, "the policy must change some answers"
    assert (test["sharp"][str(size)]["gained"], test["sharp"][str(size)]["lost"]) == (gained, lost)


def test_an_identity_policy_changes_no_number(tables: dict[str, Any]) -> None:
    for cell in tables["paired/letters"]["same"].values():
        assert cell == {"gained": 0, "lost": 0, "p": 1.0}
    for cell in tables["perplexity"]["same"].values():
        assert (cell["rise"], cell["low"], cell["high"]) == (0.0, 0.0, 0.0)
    setting, cost = tables["setting"], tables["cost"]
    assert (setting["layers"], setting["heads"]) == (LAYERS, HEADS)
    assert {name: about["modified"] for name, about in setting["variants"].items()} == {BASE: 0, "sharp": 6, "same": 0}
    assert list(cost) == [BASE, "sharp", "same"]
    assert all(cells["prefill_ms"] > 0 and cells["decode_ms"] > 0 for cells in cost.values())
    assert cost[BASE]["prefill_ratio"] == 1.0
    json.dumps(tables, allow_nan=False)


@pytest.mark.parametrize("variant", [BASE, "sharp"])
def test_perplexity_is_that_of_the_loss_of_transformers(tables: dict[str, Any], variant: str) -> None:
    there, losses = language(), []
    with applied(there.model, SHARP if variant == "sharp" else None), torch.no_grad():
        for window in prepare(there, PLAN).windows[128]:
            ids = torch.tensor([window])
            losses.append(float(there.model(input_ids=ids, labels=ids).loss))
    cell = tables["perplexity"][variant]["128"]
    assert cell["mean"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)
    assert (cell["n"], cell["texts"]) == (3 * 127, 3)
    assert set(tables["perplexity"][variant]) == {"64", "128", "chat"}


def test_an_interrupted_run_resumes_with_the_same_result(
    tables: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: Any = vars(pieces)["judge"]
    calls = 0

    def twice(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return judged(*arguments, **options)

    monkeypatch.setattr(pieces, "judge", twice)
    with pytest.raises(KeyboardInterrupt):
        run(PLAN, tmp_path)
    other = replace(language(), model=copy.deepcopy(language().model))
    other.model.model.layers[1].mlp.up_proj.weight[0, 0] += 1.0
    with pytest.raises(ArgumentError, match="begun with weights"):
        evaluate_tables(other, PLAN, prepare(other, PLAN), tmp_path, resume=True)
    calls = 10
    read: list[tuple[int, int]] = []
    again = run(PLAN, tmp_path, resume=True, progress=lambda done, total, what: read.append((done, total)))
    assert read == sorted(read)
    assert read[-1][0] == read[-1][1] > read[0][0] > 0
    # Six cells of answers and three of own answers; three were stored.
    assert calls == 10 + 6
    for name in tables:
        if name != "cost":
            assert again[name] == tables[name], name


def test_a_finished_run_can_be_repeated_and_leaves_the_model_unchanged(tmp_path: Path) -> None:
    there, plan = language().model, replace(PLAN, with_text=False, sizes=(4,), prompts=2)
    ids = torch.arange(40)[None]
    before = there(ids).logits
    run(plan, tmp_path)
    assert torch.equal(there(ids).logits, before)
    assert run(replace(plan, prompts=3), tmp_path)["setting"]["prompts"] == 3


@dataclass(frozen=True)
class Broken(Constant):
    """A policy whose β is NaN."""

    def rule(self, xp: Any, stats: Any, remeasure: Any) -> Any:
        return super().rule(xp, stats, remeasure) * math.nan


def test_logits_that_are_not_numbers_name_the_variant(tmp_path: Path) -> None:
    plan = replace(PLAN, variants={"fine": Constant(1.5), "burst": Broken(1.5)}, sizes=(4,), prompts=2, with_text=False)
    with pytest.raises(SharpmaxError, match=r"not numbers.*burst"):
        run(plan, tmp_path)
    kept = RunStore(tmp_path, pieces.FILE_NAME)
    assert "answers/letters/4/fine" in kept
    assert "answers/letters/4/burst" not in kept


def test_rows_outside_the_fitted_range_are_reported(tmp_path: Path) -> None:
    short = LogLength(16, fitted_on=(2.0, 50.0))
    plan = replace(PLAN, variants={"short": short}, sizes=(64,), prompts=2, with_text=False)
    about = run(plan, tmp_path)["setting"]["variants"]
    assert len(about["short"]["remarks"]) == 1
    assert "outside 2 … 50" in about["short"]["remarks"][0]
    assert about[BASE]["remarks"] == []


pytest.importorskip("lm_eval", reason="needs the extra lm-eval")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a task file, without network access."""
    datasets: Any = importlib.import_module("datasets")
    tasks: Any = importlib.import_module("lm_eval.tasks")
    manager = tasks.TaskManager
    # Do not read the thousands of files of the harness's own tasks.
    monkeypatch.setattr(tasks, "TaskManager", lambda **options: manager(**options | {"include_defaults": False}))

    def refused(*arguments: Any, **options: Any) -> None:
        raise AssertionError("tried to use the network")

    monkeypatch.setattr("socket.socket.connect", refused)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return write_coins(tmp_path)


def counted(policy: Any) -> float:
    """The share of questions whose correct letter is more likely."""
    there, right = language(), 0
    a, b = (there.tokenizer.convert_tokens_to_ids(letter) for letter in "ab")
    with applied(there.model, policy), torch.no_grad():
        for line in coins():
            ids = there.tokenizer(line["question"], return_tensors="pt").input_ids
            last = there.model(ids).logits[0, -1]
            right += int(last[b] > last[a]) == line["label"]
    return right / len(coins())


def test_the_harness_runs_the_model_under_each_policy(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plain, sharp = counted(None), counted(SHARP)
    assert plain != sharp, "the policy must change the accuracy"
    ready = Harness.ready(["coins"], folder)
    found = [ready.run(language(), policy, limit=None, seed=0) for policy in (None, SHARP)]
    assert found[0]["coins"]["acc"]["mean"] == pytest.approx(plain)
    assert found[1]["coins"]["acc"]["mean"] == pytest.approx(sharp)
    assert list(found[1]["coins"]) == ["acc"]
    json.dumps(found, allow_nan=False)
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


def test_errors_of_the_harness_are_one_line(folder: Path) -> None:
    with pytest.raises(ArgumentError, match="--lm-eval: got 'no-such-task'"):
        Harness.ready(["coins", "no-such-task"], folder)
    with pytest.raises(ArgumentError, match="--lm-eval-path"):
        Harness.ready(["coins"], folder / "nowhere")
    (folder.parent / "coins.jsonl").unlink()
    ready = Harness.ready(["coins"], folder)
    with pytest.raises(ArgumentError, match=r"^--lm-eval: the harness cannot run coins \(") as caught:
        ready.run(language(), None, limit=2, seed=0)
    assert "\n" not in str(caught.value)
