"""Plain text and code that come with every Python, chat questions, and text from files."""

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
"""Makes the hashes of names split the text, whose topics differ much in size, into the intended shares."""


def _part_of_index(index: int) -> Part:
    """Return the part of the item at an index: half are for calibration, a quarter each for the others."""
    order: tuple[Part, ...] = ("calibration", "validation", "calibration", "test")
    return order[index % 4]


def _part_of(name: str) -> Part:
    """Return the part of an item, which depends on nothing but its name."""
    return _part_of_index(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big"))


def _check_part(part: str) -> None:
    if part not in PARTS:
        reject("part", repr(part), f"one of {list(PARTS)}")


def plain_text(part: Part) -> str:
    """Return one part of Python's language reference and the long docstrings of its library.

    Calibration has half of it, validation and test a quarter each. The part of a topic or module depends on its name
    alone, so it is the same in every version of Python. The text differs a little between versions: report its
    `fingerprint` with results. No paragraph is in two parts.
    """
    _check_part(part)
    return _parts()[part]


@functools.cache
def _parts() -> dict[Part, str]:
    texts: dict[Part, list[str]] = {part: [] for part in PARTS}
    seen: set[str] = set()
    for name, text in _sources():
        # Topics repeat whole sections of one another. Keep the first of each.
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
    """Return the source file of a module, or None: some Pythons come without, and have less text."""
    spec = importlib.util.find_spec(module)
    path = None if spec is None or spec.origin is None else Path(spec.origin)
    return path if path is not None and path.suffix == ".py" and path.is_file() else None


def _docstrings(module: str) -> Iterator[str]:
    path = _source(module)
    for node in ast.walk(ast.parse("" if path is None else path.read_bytes())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring and len(docstring) >= 200:  # shorter ones are hardly prose
                yield docstring


def python_code(part: Part) -> str:
    """Return source code of Python's library; a module is in the part that has its docstrings."""
    _check_part(part)
    paths = [_source(module) for module in _MODULES.split() if _part_of(f"module{_SALT}/{module}") == part]
    return "\n\n".join(path.read_text(encoding="utf-8") for path in paths if path is not None)


CHAT: tuple[str, ...] = tuple((Path(__file__).parent / "data" / "chat.txt").read_text(encoding="utf-8").splitlines())
"""Questions about facts, advice, writing, arithmetic, code and more. Their order decides their parts."""


def chat_questions(part: Part) -> list[str]:
    """Return the questions of one part: half are for calibration, a quarter each for validation and test."""
    _check_part(part)
    return [question for index, question in enumerate(CHAT) if _part_of_index(index) == part]


def text_from_file(path: str | Path) -> str:
    """Read a UTF-8 text file. Raises FileFormatError if it is binary or empty."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as problem:
        reject("text", f"{str(path)!r} ({problem.strerror})", "the path of a readable text file in UTF-8")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise FileFormatError(f"text: {str(path)!r} is not text in UTF-8; convert it, or give another file")
    if not text.strip():
        raise FileFormatError(f"text: {str(path)!r} is empty; give a file with text")
    return text


def windows(ids: list[int], length: int, most: int, before: Sequence[int] = ()) -> list[list[int]]:
    """Return at most `most` windows of `length` tokens that do not overlap, spread evenly over the text.

    Each begins with the tokens `before`, such as a beginning-of-text token.

    >>> windows(list(range(10)), length=2, most=3)
    [[0, 1], [3, 4], [6, 7]]
    """
    for argument, value in (("length", length), ("most", most)):
        if value < 1:
            reject(argument, value, "1 or more")
    length -= len(before)
    if not 0 < length <= len(ids):
        given, special = f"{len(ids):,} tokens", f" and {len(before)} special ones" if before else ""
        reject("text", given, f"at least one window of {length:,} tokens{special}", "give a longer text")
    count = min(most, len(ids) // length)
    starts = (index * len(ids) // count for index in range(count))
    return [[*before, *ids[start : start + length]] for start in starts]


def fingerprint(text: str) -> str:
    """A short hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
