"""EleutherAI's harness on every variant: a task file and data on this disk, no hub, and an independent count."""

from __future__ import annotations

import contextlib
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sharpmax.errors import ArgumentError
from sharpmax.experiments.evaluate.plan import Harness
from sharpmax.policies.basic import Constant
from sharpmax.policies.per_head import PerHead
from tests.experiments.evaluate.coins import questions, write
from tests.experiments.evaluate.tiny import language

pytest.importorskip("lm_eval", reason="needs the extra lm-eval")

SHARP = PerHead.of(Constant, value=[[0.0, 12.0, 1.0, 0.0], [0.0, 1.0, 12.0, 0.0]])


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
    from sharpmax.integrations.transformers.application import applied

    there, right = language(), 0
    a, b = (there.tokenizer.convert_tokens_to_ids(letter) for letter in "ab")
    with applied(there.model, policy) if policy else contextlib.nullcontext(), torch.no_grad():
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


def test_unknown_tasks_and_folders_are_refused_before_anything_runs(folder: Path) -> None:
    with pytest.raises(ArgumentError, match="--lm-eval: got 'no-such-task'"):
        Harness.ready(["coins", "no-such-task"], folder)
    with pytest.raises(ArgumentError, match="--lm-eval-path"):
        Harness.ready(["coins"], folder / "nowhere")


def test_what_the_harness_cannot_run_is_one_line(folder: Path) -> None:
    (folder.parent / "coins.jsonl").unlink()
    ready = Harness.ready(["coins"], folder)
    with pytest.raises(ArgumentError, match=r"^--lm-eval: the harness cannot run coins \(") as caught:
        ready.run(language(), None, limit=2, seed=0)
    assert "\n" not in str(caught.value)
