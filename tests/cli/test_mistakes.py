"""A user's mistake is one line and exit code 2, before anything is printed or written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sharpmax.calibration import data as profiles
from sharpmax.policies.basic import Constant
from sharpmax.policies.per_head import PerHead
from tests.calibration.small import profile
from tests.cli.lines import is_one_error_line
from tests.experiments.clrs import stub

MODEL, OUT = "{home}/model", "--out {tmp}/out"
QUICK = {
    "evaluate": f"{MODEL} {OUT} --sizes 4..8 --prompts 8 --lengths 64 --windows 2 --questions 1",
    "calibrate": f"{MODEL} {OUT} --task {{home}}/letters.py --text own={{home}}/text.txt --budget 0.05 --steps 5 "
    "--sizes 4",
    "compare": f"{OUT} --seeds 2 --steps 3 --batch 4 --width 8 --sizes 16,32 --samples 4 --workers 1 --no-draw",
    "probe": f"{MODEL} {OUT} --sizes 8..32 --prompts 2 --text {{home}}/text.txt --no-draw",
    "horizon": f"{MODEL} {OUT}",
    "reproduce": OUT,
    "clrs train": f"{MODEL} {OUT} --data {{tmp}}/data --per-cell 12 --steps 20 --batch-tokens 256 --row-tokens 128",
    "clrs evaluate": f"{MODEL} {OUT} --data {{tmp}}/data",
    "fold": f"{MODEL} {OUT}",
}
CASES = {
    "evaluate": [
        ("--policy nonsense", "policy: got 'nonsense'"),
        ("--policy log-length:x", "policy: got 'log-length:x'"),
        ("--policy log-length:0.5", "reference: got 0.5"),
        ("--policy constant:-1", "value: got -1.0"),
        ("--policy {home}", "a folder without sharpmax_policy.json or policy.json"),
        ("--policy {home}/heads.json", "2 layers × 3 heads"),
        ("--policy {home}/letters.py", "letters.py"),
        ("--task nonsense", "task: got 'nonsense'"),
        ("--sizes 9..8", "--sizes: got '9..8'"),
        ("--sizes 8,4096", "size: got 4096"),
        ("--prompts 0", "--prompts: got 0; allowed: 1 or more"),
        ("--windows 0", "--windows: got 0"),
        ("--lengths 5000", "--lengths: got 5000"),
        ("--text nowhere", "text: got 'nowhere'"),
        ("--text x --no-text", "--text"),
        ("--dtype int3", "--dtype: got 'int3'; allowed: auto, float32, bfloat16, float16"),
        ("--device tpu", "--device: got 'tpu'; allowed: auto, cpu, cuda, mps, split"),
        ("--seed -1", "seed: got -1"),
        ("--lm-eval-path x", "--lm-eval-path"),
        ("--device split --engine ray", "--device: got 'split'; allowed: one device per cell"),
        ("--workers 2", "add --engine ray"),
    ],
    "calibrate": [
        ("--kinds constant,best", "kinds: got 'best'"),
        ("--kinds rows --foldable", "--kinds: got 'rows'; allowed: nothing together with --foldable"),
        ("--profile huge", "--profile: got 'huge'; allowed: auto, full, small"),
        ("--budget 101%", "--budget: got '101%'"),
        ("--budget 1.7", "--budget: got 1.7; write 1.7% or 0.017"),
        ("--keep 1", "--keep: got 1; write 1% or 0.01"),
        ("--keep-layers 0", "--keep-layers: got '0'"),
        ("--steps 0", "--steps: got 0"),
        ("--lr 0", "rate: got 0.0"),
        ("--sizes 4,5000", "size: got 5000; allowed: 1 … 512"),
        ("--text own={home}/empty.txt", "is empty"),
        ("--text own={home}/binary.txt", "is not text in UTF-8"),
        ("--text own={home}/short.txt", "text: got 8 tokens; allowed: at least one window of 40 tokens"),
    ],
    "compare": [
        ("hardmax", "METHODS: got 'hardmax'; allowed: softmax, adaptive, ssmax"),
        ("--task min", "--task: got 'min'; allowed: max, recall, sort, copy"),
        ("--task copy", "--model encoder"),
        ("--model rnn", "--model: got 'rnn'; allowed: single, encoder"),
        ("--heads 2", "add --model encoder"),
        ("--model encoder --heads 3", "--width: got 8; allowed: a multiple of --heads, 3"),
        ("--model encoder --depth 1,2", "add --capacity"),
        ("--capacity", "--model encoder"),
        ("--seeds 0", "--seeds: got 0"),
        ("--task recall --model encoder --sizes 100000", "--sizes: got 100000; allowed: up to 16384"),
        ("--with nowhere.py", "--with: got 'nowhere.py'"),
        ("--engine dask", "--engine: got 'dask'"),
        ("--address head:6379", "add --engine ray"),
    ],
    "probe": [
        ("--task nothing", "task: got 'nothing'; allowed: one of ["),
        ("--sizes 8..4096 --task text", "sizes: got 2048 for text; allowed: 2 … 1,024 tokens"),
        ("--sizes 8,128 --task kv", "sizes: got 128 for the task 'kv', a prompt of "),
        ("--sizes 8 --task kv", "sizes: got [8] for 'kv'; allowed: two sizes or more"),
        ("--rows first", "--rows: got 'first'"),
    ],
    "horizon": [
        ("--mass 1.5", "--mass: got 1.5"),
        ("--mass nan", "--mass: got nan"),
        ("--policy log-length:64", "policy: β = max(1, ln n / ln 64) has no largest β"),
    ],
    "reproduce": [
        ("--recipe bread", "--recipe: got 'bread'; allowed: paper, sharp, both"),
        ("--seeds 11", "seeds: got 11; allowed: 1 … 10"),
        ("--samples -3", "--samples: got -3"),
        ("--steps 500", "add --train"),
        ("--sizes 16,,32", "--sizes"),
        ("--weights nowhere", "weights: no file"),
        ("--weights x --train", "--weights"),
        ("--nope", "--nope"),
        ("--seed two", "--seed"),
        (f"--seed {2**64}", "seed: got"),
    ],
    "clrs train": [
        ("--algorithms first,nonsense", "--algorithms: got 'nonsense'"),
        ("--per-cell 0", "--per-cell: got 0"),
        ("--epochs 2", "--epochs: got 2.0; allowed: nothing together with --steps"),
        ("--lr -1", "--lr: got -1.0"),
        ("--learn-policy magic", "--learn-policy: got 'magic'"),
        ("--learn-policy length --policy paper", "--policy: got paper"),
        ("--entropy-band 0.9:0.1", "--entropy-band: got '0.9:0.1'"),
        ("--dataset {home}/nowhere", "--dataset: got"),
        ("--dataset {home}/lacking.jsonl", "lacks a column"),
        ("--dataset {home}/eight.jsonl --largest 7", "--largest: got 7; allowed: 8 or more"),
        ("--row-tokens 5000", "--row-tokens: got 5000"),
        ("--weigh words", "--weigh: got 'words'; allowed: tokens, answers"),
        ("--policy {home}/heads.json", "2 layers × 3 heads"),
        ("--dtype float16", "--dtype: got 'float16'; allowed: auto, float32, bfloat16"),
    ],
    "clrs evaluate": [
        ("--sizes 4000", "--sizes: got [4000]"),
        ("--processes 0", "--processes: got 0"),
        ("--longest 0", "--longest: got 0"),
        ("--longest 3", "--sizes: got [4, 8]"),
        ("--tokens-at-once 0", "--tokens-at-once: got 0"),
        ("--dataset {home}/lacking.jsonl", "lacks a column"),
    ],
    "fold": [
        ("--policy {home}/rows.json", "depends on the row (count, entropy)"),
        ("--policy {home}/heads.json", "policy: got 2 layers × 3 heads; allowed: 2 × 4"),
        ("--policy {home}/layers.json", "policy: got 3 layers × 4 heads; allowed: 2 × 4"),
        ("--policy {home}/not.json", "not.json"),
    ],
}
ALONE = [
    ("nope", "'nope'"),
    ("bench --gpu --probe", "--probe: got both --probe and --gpu"),
    ("bench --monitor --probe", "--probe: got both --probe and --monitor"),
    ("bench --repeat 0", "repeat: got 0"),
    ("bench --length 1", "length: got 1"),
    ("report", "DIR"),
    ("report no-such-folder", "no file"),
    ("horizon {home}/stable", "model: no certificate is known for the family 'stablelm'; allowed: bert, "),
]


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    """With files that cannot be used."""
    from transformers import StableLmConfig, StableLmForCausalLM

    from sharpmax.policies.log_linear import LogLinear
    from tests.experiments.evaluate import tiny

    (home / "empty.txt").write_text(" \n")
    (home / "short.txt").write_text("Only a few words.")
    (home / "binary.txt").write_bytes(bytes(range(256)))
    (home / "lacking.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    (home / "eight.jsonl").write_text('{"question": "a", "answer": "b", "algo_name": "first", "length": 8}\n')
    (home / "not.json").write_text("{")
    PerHead.of(Constant, value=[[2.0] * 3] * 2).save(home / "heads.json")
    PerHead.of(Constant, value=[[2.0] * 4] * 3).save(home / "layers.json")
    entropy = [[0.0] * 4, [0.0, 0.0, 0.5, 0.0]]
    PerHead.of(LogLinear, level=[[0.1] * 4] * 2, entropy=entropy).save(home / "rows.json")
    config = StableLmConfig(
        vocab_size=len(tiny.tokenizer()), hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, bos_token_id=None, eos_token_id=256,
    )  # fmt: skip
    StableLmForCausalLM(config).save_pretrained(home / "stable")
    tiny.tokenizer().save_pretrained(home / "stable")
    return home


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profiles, "PROFILES", {"small": profile(), "full": profile()})
    stub.install(monkeypatch.setitem)


LINES = [(f"{command} {QUICK[command]} {more}", says) for command, cases in CASES.items() for more, says in cases]


@pytest.mark.parametrize(("line", "says"), [*LINES, *ALONE], ids=lambda given: given.partition("/out ")[2] or given)
def test_a_mistake_is_one_line(line: str, says: str, home: Path, sharpmax_command: Any, tmp_path: Path) -> None:
    words = [word.format(home=home, tmp=tmp_path) for word in line.split(" ")]
    assert says in sharpmax_command.refused(*words)
    assert not (tmp_path / "out").exists()
    # Generated examples are kept: they are the same for every run.
    assert [path for path in tmp_path.rglob("*.*") if path.parent.name != "data"] == []


@pytest.mark.parametrize("command", ["calibrate", "evaluate", "fold --policy constant:2", "horizon", "probe"])
def test_an_unknown_model_is_one_line(command: str, home: Path, sharpmax_command: Any, tmp_path: Path) -> None:
    for model in ("nowhere/at/all", home):
        assert "model: got" in sharpmax_command.refused(*command.split(), model, "--out", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_with_json_stdout_stays_empty(home: Path, sharpmax_command: Any) -> None:
    for words in (("probe", home / "model", "--seed", "two"), ("horizon", home / "model", "--mass", 2)):
        outcome = sharpmax_command(*words, "--json")
        assert (outcome.code, outcome.out) == (2, "")
        assert is_one_error_line(outcome.err)
