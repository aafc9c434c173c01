"""A user's mistake is one line and exit code 2, before anything is printed or written: tests/golden/mistakes.txt.

A new mistake is a new line of that file; SHARPMAX_GOLDEN=update adds its answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sharpmax.calibration import data as profiles
from sharpmax.policies.basic import Constant, LogLength
from sharpmax.policies.log_linear import LogLinear
from sharpmax.policies.per_head import PerHead
from tests.calibration.small import profile
from tests.cli.test_compare import SQUARES
from tests.experiments.evaluate import tiny
from tests.test_golden import GOLDEN, check

QUICK = {
    "evaluate": "--sizes 4..8 --prompts 8 --lengths 64 --windows 2 --questions 1",
    "calibrate": "--task {home}/letters.py --text own={home}/text.txt --budget 0.05 --steps 5 --sizes 4",
    "compare": "--seeds 2 --steps 3 --batch 4 --width 8 --sizes 16,32 --samples 4 --workers 1 --no-draw",
    "probe": "--sizes 8..32 --prompts 2 --text {home}/text.txt --no-draw",
    "clrs train": "--dataset {home}/eight.jsonl --steps 20 --batch-tokens 256",
    "clrs evaluate": "--dataset {home}/eight.jsonl",
}


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    """With files that cannot be used."""
    from transformers import StableLmConfig, StableLmForCausalLM

    files = {
        "empty.txt": " \n", "short.txt": "Only a few words.", "lacking.jsonl": '{"question": "a", "answer": "b"}\n',
        "eight.jsonl": '{"question": "a", "answer": "b", "algo_name": "minimum", "length": 8}\n', "model.gguf": "GGUF",
        "empty.py": "x = 1\n", "broken.py": "x = 1 / 0\n", "step.py": SQUARES.replace('"squares"', '"step"'),
        "syntax.py": "x = 1\nx = (", "lines.py": "x = 1\nraise ValueError('no\\nluck')",
        "exit.py": "raise SystemExit(3)", "half/empty.py": "x = 2\n", "half/run.json": "{}",
        "long.py": "from sharpmax.experiments.compare.methods import Method\n"
        "METHODS = [Method('long', 'softmax', recipe={'sizes': (5, 64)})]\n",
    }  # fmt: skip
    (home / "half").mkdir()
    for name, text in files.items():
        (home / name).write_text(text, encoding="utf-8")
    (home / "binary.txt").write_bytes(bytes(range(256)))
    (home / "binary.py").write_bytes(b"\xff\xfe\x00")
    PerHead.of(Constant, value=[[2.0] * 3] * 2).save(home / "heads.json")
    PerHead.of(Constant, value=[[2.0] * 4] * 3).save(home / "layers.json")
    PerHead.of(LogLength, reference=[[16.0] * 4] * 2).save(home / "lengths.json")
    PerHead.of(LogLinear, level=[[0.1] * 4] * 2, entropy=[[0.0] * 4, [0.0, 0.0, 0.5, 0.0]]).save(home / "rows.json")
    config = StableLmConfig(
        vocab_size=len(tiny.tokenizer()), hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, bos_token_id=None, eos_token_id=256,
    )  # fmt: skip
    StableLmForCausalLM(config).save_pretrained(home / "stable")
    tiny.tokenizer().save_pretrained(home / "stable")
    return home


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts}


def test_a_mistake_is_one_line(
    home: Path, sharpmax_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profiles, "PROFILES", {"small": profile(), "full": profile()})
    answers, before = [], contents(home)
    for line in (GOLDEN / "mistakes.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            continue
        command = next((name for name in QUICK if line.startswith(f"{name} ")), "")
        words = f"{command} {QUICK.get(command, '')} {line.removeprefix(command)}".format(home=home).split()
        error = sharpmax_command.refused(*words)
        assert list(tmp_path.iterdir()) == [], line
        error = error.removeprefix("sharpmax: error: ").replace(str(home), "{home}").replace(str(tmp_path), "{here}")
        answers.append(f"{line}\n    {error}")
    assert len(answers) > 80
    assert contents(home) == before
    check("mistakes", "".join(answers))
