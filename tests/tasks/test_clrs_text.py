"""CLRS-Text problems: the official text, streams of their own, training and tests apart."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from sharpmax.errors import MissingExtraError
from sharpmax.tasks.clrs_text import generation as shim
from sharpmax.tasks.clrs_text.generation import _drawer, _writer, examples, final_answer
from sharpmax.tasks.clrs_text.sizes import ALGORITHMS, test_sizes, train_sizes

installed = importlib.util.find_spec("clrs") is not None
needs_clrs = pytest.mark.skipif(not installed, reason=f"needs dm-clrs: pip install --no-deps {shim.RELEASE}")

# Of two training examples with and two without trace at sizes 4 and 10: what a change of the format, of the seeds or of
# what is held out for tests would change.
GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text(encoding="utf-8"))["clrs_text"]


def digest(algorithm: str) -> str:
    drawn = hashlib.sha256()
    for size, trace in itertools.product((4, 10), (False, True)):
        for example in examples(algorithm, size, "train", 2, trace=trace):
            drawn.update(example.line().encode())
    return drawn.hexdigest()[:16]


@needs_clrs
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_text_is_pinned(algorithm: str) -> None:
    assert digest(algorithm) == GOLDEN[algorithm]


@needs_clrs
@pytest.mark.parametrize("trace", [False, True])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.filterwarnings("ignore:Arrays of 2-dimensional vectors")  # numpy's word about the slow way, not about ours
def test_text_is_what_the_official_sampler_writes(algorithm: str, trace: bool) -> None:
    """Batches of one through the sampler of dm-clrs itself, which our shorter way leaves out."""
    clrs = shim.generator()
    for size in (5, 11):
        draw, write = _drawer(clrs, algorithm, size, seed=7), _writer(clrs, algorithm, trace)
        sampler, _ = clrs.samplers.build_sampler(
            algorithm, -1, seed=7, length=size, track_max_steps=False, truncate_decimals=3
        )
        for _ in range(3):
            official = clrs.clrs_text.format_clrs_example(algorithm, sampler.next(batch_size=1), use_hints=trace)
            assert write(draw()) == official


@needs_clrs
def test_sizes_of_training_are_the_official_ones() -> None:
    source = Path(shim.generator().clrs_text.__file__).with_name("generate_clrs_text.py").read_text(encoding="utf-8")
    tables = {
        node.targets[0].id: node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    official = ast.literal_eval(tables["_DEFAULT_TRAIN_ALGOS_AND_LENGTHS"])
    assert tuple(sorted(official)) == ALGORITHMS
    assert {name: list(train_sizes(name)) for name in ALGORITHMS} == official


def test_tests_go_beyond_training_wherever_there_are_sizes() -> None:
    for name in ALGORITHMS:
        beyond = [size for size in test_sizes(name) if size > max(train_sizes(name))]
        assert len(set(beyond)) == (0 if name == "segments_intersect" else 3), name
        assert list(test_sizes(name)) == sorted(test_sizes(name))
    assert len(ALGORITHMS) == 30


@needs_clrs
def test_the_same_arguments_give_the_same_stream() -> None:
    once = list(examples("bfs", 5, "train", 20, trace=True, seed=3))
    assert list(examples("bfs", 5, "train", 20, trace=True, seed=3)) == once
    assert list(examples("bfs", 5, "train", 7, trace=True, seed=3)) == once[:7]
    assert all(example.algo_name == "bfs" and example.length == 5 for example in once)
    assert list(examples("bfs", 5, "train", 20, trace=True, seed=4)) != once


@needs_clrs
def test_a_trace_is_asked_of_the_same_problems() -> None:
    plain = list(examples("insertion_sort", 5, "test", 5))
    traced = list(examples("insertion_sort", 5, "test", 5, trace=True))
    for one, other in zip(plain, traced, strict=True):
        assert other.question.startswith(one.question.rpartition("\n")[0].rpartition("\n")[0])
    assert [final_answer(example.answer) for example in plain] == [final_answer(example.answer) for example in traced]
    assert all("|" in example.answer and "initial_trace" in example.question for example in traced)


@needs_clrs
@pytest.mark.parametrize(("algorithm", "size"), [("bfs", 4), ("kmp_matcher", 4), ("naive_string_matcher", 5)])
def test_training_that_saw_nearly_everything_saw_no_test_question(algorithm: str, size: int) -> None:
    trained = {example.question for example in examples(algorithm, size, "train", 1500, seed=1)}
    for seed in (0, 1):
        tested = [example.question for example in examples(algorithm, size, "test", 20, seed=seed)]
        assert len(tested) == len(set(tested)) > 5
        assert not trained & set(tested)


@pytest.mark.parametrize(
    ("text", "final"),
    [
        ("[0.1 0.2]\n\n", "[0.1 0.2]"),
        ("[2 1], [1 2] | [1  2]\n\n", "[1 2]"),
        (" | 3\n\n", "3"),
        ("1 | 2 | 3", "3"),
        ("7\n\nminimum:\nkey: [1 | 2]", "7"),
        ("\n\n4\n", "4"),
        ("", ""),
    ],
)
def test_final_answer(text: str, final: str) -> None:
    assert final_answer(text) == final


def test_missing_package_names_the_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shim, "_generator", shim._generator.__wrapped__)
    with pytest.raises(MissingExtraError) as problem:
        examples("minimum", 4, "train", 1)
    assert str(problem.value) == (
        "CLRS-Text needs the package 'clrs', which is not installed; install it with: "
        "pip install 'attrs>=24.2' && pip install --no-deps dm-clrs==2.0.3"
    )


@needs_clrs
@pytest.mark.parametrize("before", ["", "import absl.logging, json; sys.modules['jax'] = json"])
def test_imports_leave_no_stand_in_behind(before: str) -> None:
    """Neither when the real packages are absent nor when they (here: something else by that name) were loaded."""
    script = f"""
import sys
{before}
names = {{"absl", "chex", "clrs", "jax", "tensorflow"}}
held = lambda: {{name: id(module) for name, module in sys.modules.items() if name.partition(".")[0] in names}}
was = held()
from sharpmax.tasks.clrs_text import examples
print(next(examples("minimum", 4, "train", 1)).algo_name)
assert held() == was, held()
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("minimum\n", "")
