"""Tasks by name and from a user's file, and what is said when there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from sharpmax.errors import ArgumentError, ArgumentTypeError, FileFormatError
from sharpmax.tasks.prompt import Prompt
from sharpmax.tasks.registry import TASKS, get_task

OWN = '''\
"""Which colour a ball has."""

import random

from sharpmax.tasks import Prompt, Task

COLOURS = ["red", "green", "blue", "white"]


def make(size: int, rng: random.Random) -> Prompt:
    balls = {f"Ball {number}": rng.choice(COLOURS) for number in range(1, size + 1)}
    ball = rng.choice(list(balls))
    text = " ".join(f"{name} is {colour}." for name, colour in balls.items())
    return Prompt(user=f"{text}\\nWhich colour is {ball.lower()}?", opening=f"{ball} is", answer=f" {balls[ball]}")


TASK = Task("balls", version=1, summary="the colour of one ball among n", sizes=(8, 32, 128), most=999, make=make)
'''


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "balls.py"
    path.write_text(OWN, encoding="utf-8")
    return path


def test_from_a_file_of_twenty_lines(own: Path) -> None:
    assert len(OWN.splitlines()) <= 20
    guide = Path(__file__).parents[2] / "CONTRIBUTING.md"
    assert OWN in guide.read_text(encoding="utf-8")
    task = get_task(own)
    assert (task.name, task.sizes) == ("balls", (8, 32, 128))
    prompts = task.prompts(8, count=20, seed=0)
    assert task.prompts(8, count=3, seed=0) == prompts[:3]
    for prompt in prompts:
        assert isinstance(prompt, Prompt)
        assert f"{prompt.opening}{prompt.answer}." in prompt.user
    assert not list(own.parent.glob("*pycache*")), "running a user's file leaves nothing beside it"


def test_a_file_may_define_dataclasses_and_helpers(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from sharpmax.tasks import Prompt, Task\n"
        "@dataclass\n"
        "class Thing:\n"
        "    size: int\n"
        "def helper(size): return Prompt(str(Thing(size)), 'a', ' b')\n"
        "TASK = Task('own', 1, '', (1,), 9, lambda size, rng: helper(size))\n"
    )
    assert get_task(path).prompts(2, count=1, seed=0) == [Prompt("Thing(size=2)", "a", " b")]


def one_line(caught: pytest.ExceptionInfo[Exception]) -> str:
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("name", ["kvv", "", "folder/nothing.py"])
def test_an_unknown_name_lists_the_names(name: str) -> None:
    assert get_task("kv") is TASKS["kv"]
    with pytest.raises(ArgumentTypeError, match=r"^task: got int; allowed: a path or one of"):
        get_task(3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError) as caught:
        get_task(name)
    assert one_line(caught) == (
        f"task: got {name!r}; allowed: one of ['houses', 'json', 'kv', 'max', 'multi-kv', 'needle', 'prices'] "
        "or the path of a Python file that defines TASK"
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("X = 1\n", "does not define TASK; it must hold TASK = Task(...), with sharpmax.tasks.Task"),
        ("TASK = 'kv'\n", "defines TASK as a str; it must hold TASK = Task(...), with sharpmax.tasks.Task"),
        ("\n\n1 / 0\n", "cannot be run (ZeroDivisionError, line 3: division by zero)"),
        ("def f():\n    raise ValueError('a\\nb')\nf()\n", "cannot be run (ValueError, line 2: a b)"),
        ("import nothing_here\n", "cannot be run (ModuleNotFoundError, line 1: No module named 'nothing_here')"),
        ("def f(:\n", "cannot be run (SyntaxError: invalid syntax (own.py, line 1))"),
        ("raise SystemExit(3)\n", "cannot be run (SystemExit, line 1: 3)"),
    ],
)
def test_a_file_that_is_no_task(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "own.py"
    path.write_text(content)
    with pytest.raises(FileFormatError) as caught:
        get_task(path)
    assert one_line(caught) == f"task: {str(path)!r} {says}"
