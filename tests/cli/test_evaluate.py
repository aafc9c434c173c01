"""`sharpmax evaluate`, on a tiny model in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sharpmax.experiments import engine as engines
from sharpmax.experiments import evaluate as pieces
from sharpmax.models.scoring import generated_texts
from sharpmax.policies.basic import Constant
from sharpmax.policies.per_head import PerHead
from sharpmax.tasks.prompt import Prompt
from tests.cli.lines import names_no_folder, saved
from tests.experiments.evaluate import tiny

QUICK = ("--sizes", "4..8", "--prompts", 8, "--lengths", "64", "--windows", 2, "--questions", 1)


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    """With policies."""
    PerHead.of(Constant, value=[[0.0, 12.0, 1.0, 0.0], [0.0, 1.0, 12.0, 0.0]]).save(home / "made" / "policy.json")
    return home


def words(home: Path, out: Path, *more: Any) -> list[Any]:
    return ["evaluate", home / "model", "--task", f"{home / 'letters.py'},max", "--out", out, *QUICK, *more]


def test_a_run_saves_every_variant_a_page_and_nothing_of_the_machine(
    home: Path, tmp_path: Path, sharpmax_command: Any
) -> None:
    run = tmp_path / "run"
    policies = ("--policy", home / "made", "--policy", "log-length:64", "--policy", "log-length:64")
    printed = sharpmax_command.ok(*words(home, run, *policies)).out
    drawn = {"report.html", "accuracy.svg", "accuracy.png"}
    assert {file.name for file in run.iterdir()} == {"run.json", "answers.jsonl", "results.json", *drawn}
    tables = saved(run)["tables"]
    assert list(tables["setting"]["variants"]) == ["baseline", "made", "log-length:64", "log-length:64 (2)"]
    assert set(tables) == {
        "setting", "accuracy/letters", "paired/letters", "accuracy/max", "paired/max", "perplexity", "cost",
    }  # fmt: skip
    assert tables["setting"]["model"] == "model"
    command = f"sharpmax evaluate model --task letters.py,max --policy made{' --policy log-length:64' * 2} "
    assert saved(run)["command"].startswith(command)
    assert names_no_folder(run, home)
    for said in ("Accuracy (%): max", "Perplexity", "prefill ms", "McNemar", "Mean accuracy over 2 tasks"):
        assert said in printed
    cell = tables["accuracy/letters"]["made"]["8"]
    table = printed[printed.index("Accuracy (%): letters") :]
    row = next(line for line in table.splitlines() if line.strip().startswith("made "))
    assert f"{cell['mean']:.1f} ({cell['low']:.1f}–{cell['high']:.1f}" in row


def test_an_interrupted_run_is_resumed(
    home: Path, tmp_path: Path, sharpmax_command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    line = words(home, tmp_path, "--no-draw")
    with monkeypatch.context() as patch:
        patch.setattr(pieces, "window_losses", interrupted)
        stopped = sharpmax_command(*line)
    assert stopped.code == 130
    assert "--resume" in stopped.out
    assert {file.name for file in tmp_path.iterdir()} == {"run.json", "answers.jsonl"}
    sharpmax_command.ok(*line, "--resume")
    assert (tmp_path / "results.json").exists()


def test_cells_on_ray_give_the_same_numbers(
    home: Path, tmp_path: Path, sharpmax_command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a cluster, but here: cells are jobs of plain values, and the model is loaded by its name."""
    task = f"{home / 'letters.py'},ruler/niah_single_1"
    more: tuple[Any, ...] = ("--policy", home / "made", "--task", task, "--lengths", "1k", "--prompts", 2)
    more += ("--device", "cpu", "--no-draw")
    sharpmax_command.ok(*words(home, tmp_path / "here", *more))
    asked = []

    def run_here(jobs: Any, store: Any, *, engine: str, workers: int, address: None, progress: Any) -> None:
        asked.append((engine, workers))
        engines.run(jobs, store, workers=1, progress=progress)

    monkeypatch.setattr(pieces, "run", run_here)
    sharpmax_command.ok(*words(home, tmp_path / "there", *more, "--engine", "ray", "--workers", 2))
    assert asked == [("ray", 2)]
    here, there = (saved(tmp_path / name)["tables"] for name in ("here", "there"))
    assert {**there, "cost": here["cost"]} == here


def test_ruler_is_asked_by_length_and_scored_by_its_references(
    home: Path, tmp_path: Path, sharpmax_command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of five references occur in what is generated, in whatever case: the score is 40%."""
    seen = []

    def generated(model: Any, tokenizer: Any, prompts: list[Any], new_tokens: int) -> list[str]:
        seen.extend(prompts)
        assert new_tokens == 30
        return [f"They are {p.references[0].lower()}, nothing and {p.references[3].upper()}." for p in prompts]

    monkeypatch.setattr(pieces, "generated_texts", generated)
    line = ["evaluate", home / "model", "--task", "ruler/vt,formats/csv", "--lengths", "1k", "--sizes", 4]
    sharpmax_command.ok(*line, "--prompts", 3, "--no-text", "--policy", "paper", "--out", tmp_path)
    tables = saved(tmp_path)["tables"]
    cell = tables["accuracy/ruler/vt"]["paper"]["1024"]
    assert cell["mean"] == pytest.approx(40.0)
    assert cell["n"] == 3
    assert len(seen) == 6
    assert all(500 < len(prompt.user.encode()) <= 1024 for prompt in seen)
    assert list(tables["accuracy/formats/csv"]["paper"]) == ["4"]
    assert (tmp_path / "accuracy.svg").is_file()


def test_an_answer_is_generated_until_it_holds_every_reference() -> None:
    language = tiny.language()

    def generated(*references: str) -> list[str]:
        prompts = [Prompt("abba", "So:", " x", references=(one,)) for one in references]
        return generated_texts(language.model, language.tokenizer, prompts, 12)

    short, whole = generated("AAA", "~")
    assert whole == "a" * 12
    assert short.rstrip("!") == "aaa", "an answer that is complete is padded"
