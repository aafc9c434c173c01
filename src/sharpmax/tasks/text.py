"""Plain text, code and chat questions that a policy must leave as they are: what comes with every Python, or a file."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, get_args

from sharpmax.errors import FileFormatError, reject

Part = Literal["calibration", "validation", "test"]

PARTS: tuple[Part, ...] = get_args(Part)

_MODULES = """
    argparse ast base64 bdb cmd code collections configparser contextlib difflib doctest enum fileinput fractions
    ftplib functools heapq imaplib inspect ipaddress json logging mimetypes optparse pdb pickletools queue random
    shelve shutil smtplib socket socketserver ssl statistics subprocess tarfile tempfile textwrap threading timeit
    tokenize traceback turtle typing uuid wave zipfile
"""
_SALT = 57
"""Topics differ much in size; with this in front, names fall so that the parts have the shares they should."""


def _part_of_index(index: int) -> Part:
    """The part of the item at a place in a list: half are for calibration, a quarter each for the others."""
    order: tuple[Part, ...] = ("calibration", "validation", "calibration", "test")
    return order[index % 4]


def _part_of(name: str) -> Part:
    """The part of an item by its name, whatever other items there are; the same in every process and version."""
    return _part_of_index(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big"))


def _check_part(part: str) -> None:
    if part not in PARTS:
        reject("part", repr(part), f"one of {list(PARTS)}")


def plain_text(part: Part) -> str:
    """Python's language reference and long docstrings of its library: half, a quarter and a quarter of them.

    Whole topics and modules go to one part by their name, so a newer Python moves none of them. Its text
    differs a little, though: report `fingerprint` with a result. No paragraph is in two parts.
    """
    _check_part(part)
    return _parts()[part]


@functools.cache
def _parts() -> dict[Part, str]:
    texts: dict[Part, list[str]] = {part: [] for part in PARTS}
    seen: set[str] = set()
    for name, text in _sources():
        # Topics repeat whole sections of one another: only the first to come keeps them.
        for paragraph in text.strip("\n").split("\n\n"):
            words = " ".join(paragraph.split())
            if words and words not in seen:
                seen.add(words)
                texts[_part_of(name)].append(paragraph.strip("\n"))
    return {part: "\n\n".join(paragraphs) for part, paragraphs in texts.items()}


def _sources() -> Iterator[tuple[str, str]]:
    from pydoc_data.topics import topics

    for topic in sorted(topics):
        yield f"topic{_SALT}/{topic}", topics[topic]
    for module in _MODULES.split():
        yield f"module{_SALT}/{module}", "\n\n".join(_docstrings(module))


def _source(module: str) -> Path | None:
    """The file of a module; a Python may come without: its text is then shorter, with another fingerprint."""
    spec = importlib.util.find_spec(module)
    path = None if spec is None or spec.origin is None else Path(spec.origin)
    return path if path is not None and path.suffix == ".py" and path.is_file() else None


def _docstrings(module: str) -> Iterator[str]:
    path = _source(module)
    for node in ast.walk(ast.parse("" if path is None else path.read_bytes())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring and len(docstring) >= 200:  # shorter ones are remarks, not prose
                yield docstring


def python_code(part: Part) -> str:
    """Source code of Python's library: each module in the part that its docstrings are in."""
    _check_part(part)
    paths = [_source(module) for module in _MODULES.split() if _part_of(f"module{_SALT}/{module}") == part]
    return "\n\n".join(path.read_text(encoding="utf-8") for path in paths if path is not None)


CHAT: tuple[str, ...] = tuple((Path(__file__).parent / "data" / "chat.txt").read_text(encoding="utf-8").splitlines())
"""Facts, explanations, advice, small talk, writing, arithmetic, code and language; the order is part of the split."""


def chat_questions(part: Part) -> list[str]:
    """Ordinary questions of one part: half of them for calibration, a quarter each for validation and test."""
    _check_part(part)
    return [question for index, question in enumerate(CHAT) if _part_of_index(index) == part]


def text_from_file(path: str | Path) -> str:
    """The text of a UTF-8 file."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as problem:
        reject("text", f"{str(path)!r} ({problem.strerror})", "the path of a text file in UTF-8 that you may read")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise FileFormatError(f"text: {str(path)!r} is not text in UTF-8; convert it, or give another file")
    if not text.strip():
        raise FileFormatError(f"text: {str(path)!r} is empty; give a file with text in it")
    return text


def windows(ids: list[int], length: int, most: int, before: Sequence[int] = ()) -> list[list[int]]:
    """At most `most` windows of `length` tokens that do not overlap, spread evenly over the text.

    Each begins with the tokens `before`, such as the one that a model expects at the start of every text.

    >>> windows(list(range(10)), length=2, most=3)
    [[0, 1], [3, 4], [6, 7]]
    """
    for argument, value in (("length", length), ("most", most)):
        if value < 1:
            reject(argument, value, "1 or more")
    length -= len(before)
    if not 0 < length <= len(ids):
        given, special = f"{len(ids):,} tokens", f" beside {len(before)} special ones" if before else ""
        reject("text", given, f"at least one window of {length:,} tokens{special}", "give a longer text")
    count = min(most, len(ids) // length)
    starts = (index * len(ids) // count for index in range(count))
    return [[*before, *ids[start : start + length]] for start in starts]


def fingerprint(text: str) -> str:
    """A short hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
