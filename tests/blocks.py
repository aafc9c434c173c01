"""Code blocks of Markdown pages: run in order as written, or, where a page says why not, read without being run."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer.main

from sharpmax.cli import main, make_app
from sharpmax.errors import OutOfRangeWarning

ROOT = Path(__file__).parents[1]
FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^>]+?) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
OTHERS = ("pip", "vllm", "llama-server", "ollama", "echo", "python", "tar")
INDENTED = re.compile(r"^    (sharpmax .*)$", re.MULTILINE)
INLINE = re.compile(r"`(sharpmax [^`]*)`")
APP: Any = typer.main.get_command(make_app())


class Block(NamedTuple):
    """A block of code, where it stands, why it is not run, and what the page says that it prints."""

    language: str
    text: str
    place: str
    reason: str | None = None
    output: str | None = None


def blocks(page: Path) -> list[Block]:
    """The blocks of a page; a `text` block is the output of the Python block before it."""
    markdown = page.read_text(encoding="utf-8")
    found: list[Block] = []
    for fence in FENCE.finditer(markdown):
        if fence["language"] == "text":
            if found and found[-1].language == "python":
                found[-1] = found[-1]._replace(output=fence["text"])
            continue
        line = markdown.count("\n", 0, fence.start("text")) + 1
        place = f"{page.relative_to(ROOT).as_posix()}:{line}"
        found.append(Block(fence["language"], fence["text"], place, fence["reason"]))
    return found


def run(chosen: list[Block]) -> None:
    """Run blocks one after the other in the current folder, the Python ones in one namespace."""
    names: dict[str, object] = {}
    for block in chosen:
        if block.language == "python":
            program = compile(block.text, block.place, "exec", dont_inherit=True)
            if block.reason is None:
                printed = io.StringIO()
                with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
                    warnings.simplefilter("ignore", OutOfRangeWarning)
                    exec(program, names)
                assert block.output is None or printed.getvalue() == block.output, block.place
        elif block.language == "sh":
            for words in commands(block.text):
                if words[0] != "sharpmax" or block.reason is not None:
                    check_command(words, block.reason)
                    continue
                with contextlib.redirect_stdout(io.StringIO()):
                    assert main(words[1:]) == 0, f"{block.place}: {shlex.join(words)}"


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a shell block, each as its words."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words:
            end = words.index("&&") if "&&" in words else len(words)
            yield words[:end]
            words = words[end + 1 :]


def check_command(words: list[str], reason: str | None = None) -> None:
    """See that a command could be run: its name, options and arguments are known. Others than ours need a reason."""
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert all(f"\n{target}:" in makefile for target in words[1:] if "=" not in target), words
    elif words[0] == "sharpmax":
        command, rest = command_of(words)
        assert not hasattr(command, "commands"), f"not a whole command: {words}"
        command.make_context(command.name, rest)
    else:
        assert next(word for word in words if "=" not in word) in OTHERS, words
        assert reason, f"not run without a reason: {words}"


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that these words call, or the group of the command that they leave out, and the words after it."""
    assert words[0] == "sharpmax", words
    command, rest = APP, words[1:]
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        assert rest[0] in command.commands, f"no such command: {words}"
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


def check_mentioned(words: list[str]) -> None:
    """See that a command that is spoken of exists, with these options; its arguments may be left out."""
    if words[1:2] == ["COMMAND"]:
        return
    command, rest = command_of(words)
    known = {option for one in command.params for option in [*one.opts, *one.secondary_opts]}
    assert {word for word in rest if word.startswith("--")} <= known | {"--help", "--debug", "--version"}, words
