"""The tables against what the model generates, variant by variant."""

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
from tests.experiments.evaluate.coins import questions, write
from tests.experiments.evaluate.tiny import HEADS, LAYERS, LETTERS, ROOM, language

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


def said(policy: Any, size: int) -> list[bool]:
    """Whether generating gives the right answer, prompt by prompt."""
    there: Any = language()
    found = []
    with applied(there.model, policy):
        for prompt in LETTERS.prompts(size, PLAN.prompts, PLAN.seed):
            ids = there.tokenizer(f"{prompt.user}\n{prompt.opening}", return_tensors="pt").input_ids
            whole = there.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
            found.append(there.tokenizer.decode(whole[0, ids.shape[1] :]) == prompt.answer)
    return found


@pytest.mark.parametrize("size", [4, 16])
def test_right_answers_are_those_of_generation(tables: dict[str, Any], size: int) -> None:
    plain, sharp = said(None, size), said(SHARP, size)
    table, test = tables["accuracy/letters"], tables["paired/letters"]
    assert table[BASE][str(size)]["mean"] == pytest.approx(100 * sum(plain) / len(plain))
    assert table["sharp"][str(size)]["mean"] == pytest.approx(100 * sum(sharp) / len(sharp))
    assert 0 < sum(plain) < len(plain), "a model that is always right would prove nothing"
    gained = sum(s and not p for p, s in zip(plain, sharp, strict=True))
    lost = sum(p and not s for p, s in zip(plain, sharp, strict=True))
    assert gained + lost > 0, "a policy that changes nothing would prove nothing"
    assert (test["sharp"][str(size)]["gained"], test["sharp"][str(size)]["lost"]) == (gained, lost)


def test_an_arm_that_changes_nothing_changes_no_number(tables: dict[str, Any]) -> None:
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


@pytest.mark.parametrize("arm", [BASE, "sharp"])
def test_perplexity_is_that_of_transformers_own_loss(tables: dict[str, Any], arm: str) -> None:
    there, losses = language(), []
    with applied(there.model, SHARP if arm == "sharp" else None), torch.no_grad():
        for window in prepare(there, PLAN).windows[128]:
            ids = torch.tensor([window])
            losses.append(float(there.model(input_ids=ids, labels=ids).loss))
    cell = tables["perplexity"][arm]["128"]
    assert cell["mean"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)
    assert (cell["n"], cell["texts"]) == (3 * 127, 3)
    assert set(tables["perplexity"][arm]) == {"64", "128", "chat"}


def test_an_interrupted_run_goes_on_and_ends_the_same(
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
    with pytest.raises(ArgumentError, match="--resume"):
        run(PLAN, tmp_path)
    with pytest.raises(ArgumentError, match="seed 0 and now got 1"):
        run(replace(PLAN, seed=1), tmp_path, resume=True)
    other = replace(language(), model=copy.deepcopy(language().model))
    other.model.model.layers[1].mlp.up_proj.weight[0, 0] += 1.0
    with pytest.raises(ArgumentError, match="begun with weights"):
        evaluate_tables(other, PLAN, prepare(other, PLAN), tmp_path, resume=True)
    calls = 10
    read: list[tuple[int, int]] = []
    again = run(PLAN, tmp_path, resume=True, progress=lambda done, total, what: read.append((done, total)))
    assert read == sorted(read)
    assert read[-1][0] == read[-1][1] > read[0][0] > 0
    # Six of answers and three of own answers, less the three that were known.
    assert calls == 10 + 6
    for name in tables:
        if name != "cost":
            assert again[name] == tables[name], name


def test_a_finished_run_may_be_done_again_and_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    there, plan = language().model, replace(PLAN, with_text=False, sizes=(4,), prompts=2)
    ids = torch.arange(40)[None]
    before = there(ids).logits
    run(plan, tmp_path)
    assert torch.equal(there(ids).logits, before)
    assert run(replace(plan, prompts=3), tmp_path)["setting"]["prompts"] == 3


@dataclass(frozen=True)
class Broken(Constant):
    """A policy that gives no number."""

    def rule(self, xp: Any, stats: Any, remeasure: Any) -> Any:
        return super().rule(xp, stats, remeasure) * math.nan


def test_logits_that_are_no_numbers_name_their_arm(tmp_path: Path) -> None:
    plan = replace(PLAN, variants={"fine": Constant(1.5), "burst": Broken(1.5)}, sizes=(4,), prompts=2, with_text=False)
    with pytest.raises(SharpmaxError, match=r"not numbers.*burst"):
        run(plan, tmp_path)
    kept = RunStore(tmp_path, pieces.FILE_NAME)
    assert "answers/letters/4/fine" in kept
    assert "answers/letters/4/burst" not in kept


def test_rows_outside_a_policys_range_are_remarked_on(tmp_path: Path) -> None:
    short = LogLength(16, fitted_on=(2.0, 50.0))
    plan = replace(PLAN, variants={"short": short}, sizes=(64,), prompts=2, with_text=False)
    about = run(plan, tmp_path)["setting"]["variants"]
    assert len(about["short"]["remarks"]) == 1
    assert "outside 2 … 50" in about["short"]["remarks"][0]
    assert about[BASE]["remarks"] == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sizes": (4, 1024)}, "size: got 1024; allowed: 1 … 512"),
        ({"sizes": (4, 300)}, f"--sizes: got 300 for the task 'letters', a prompt of .* up to {ROOM} tokens"),
        ({"lengths": (64, ROOM + 1)}, f"--lengths: got {ROOM + 1}"),
        ({"text": Path("nowhere.txt")}, "text: got 'nowhere.txt'"),
        ({"variants": {"grid": PerHead.of(Constant, value=[[2.0] * 9] * 3)}}, "3 layers × 9 heads"),
    ],
)
def test_what_cannot_be_is_refused_before_the_run(change: dict[str, Any], says: str) -> None:
    with pytest.raises(SharpmaxError, match=says):
        prepare(language(), replace(PLAN, **change))


pytest.importorskip("lm_eval", reason="needs the extra lm-eval")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a task file; nothing may reach for the network."""
    datasets: Any = importlib.import_module("datasets")
    tasks: Any = importlib.import_module("lm_eval.tasks")
    manager = tasks.TaskManager
    # Without the thousands of files of the harness's own tasks.
    monkeypatch.setattr(tasks, "TaskManager", lambda **options: manager(**options | {"include_defaults": False}))

    def refused(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the network was asked for")

    monkeypatch.setattr("socket.socket.connect", refused)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return write(tmp_path)


def counted(policy: Any) -> float:
    """The share of questions whose right letter the model finds likelier."""
    there, right = language(), 0
    a, b = (there.tokenizer.convert_tokens_to_ids(letter) for letter in "ab")
    with applied(there.model, policy), torch.no_grad():
        for line in questions():
            ids = there.tokenizer(line["question"], return_tensors="pt").input_ids
            last = there.model(ids).logits[0, -1]
            right += int(last[b] > last[a]) == line["label"]
    return right / len(questions())


def test_every_variant_is_what_the_harness_is_given(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plain, sharp = counted(None), counted(SHARP)
    assert plain != sharp, "variants that do the same would prove nothing"
    ready = Harness.ready(["coins"], folder)
    found = [ready.run(language(), policy, limit=None, seed=0) for policy in (None, SHARP)]
    assert found[0]["coins"]["acc"]["mean"] == pytest.approx(plain)
    assert found[1]["coins"]["acc"]["mean"] == pytest.approx(sharp)
    assert list(found[1]["coins"]) == ["acc"]
    json.dumps(found, allow_nan=False)
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


def test_what_the_harness_cannot_run_is_one_line(folder: Path) -> None:
    with pytest.raises(ArgumentError, match="--lm-eval: got 'no-such-task'"):
        Harness.ready(["coins", "no-such-task"], folder)
    with pytest.raises(ArgumentError, match="--lm-eval-path"):
        Harness.ready(["coins"], folder / "nowhere")
    (folder.parent / "coins.jsonl").unlink()
    ready = Harness.ready(["coins"], folder)
    with pytest.raises(ArgumentError, match=r"^--lm-eval: the harness cannot run coins \(") as caught:
        ready.run(language(), None, limit=2, seed=0)
    assert "\n" not in str(caught.value)
