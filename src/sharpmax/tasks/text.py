"""Plain text, code and chat questions that a policy must leave as they are: what comes with every Python, or a file."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from sharpmax.errors import FileFormatError, reject
from sharpmax.tasks.prompt import PARTS, Part, check_part, part_of, part_of_index

_MODULES = """
    argparse ast base64 bdb cmd code collections configparser contextlib difflib doctest enum fileinput fractions
    ftplib functools heapq imaplib inspect ipaddress json logging mimetypes optparse pdb pickletools queue random
    shelve shutil smtplib socket socketserver ssl statistics subprocess tarfile tempfile textwrap threading timeit
    tokenize traceback turtle typing uuid wave zipfile
"""
_LONG = 200
"""Characters a docstring must have: shorter ones are remarks, not prose."""

_SALT = 57
"""Topics differ much in size; with this in front, names fall so that the parts have the shares they should."""


def plain_text(part: Part) -> str:
    """Python's language reference and long docstrings of its library: half, a quarter and a quarter of them.

    Whole topics and modules go to one part by their name, so a newer Python moves none of them. Its text
    differs a little, though: report `fingerprint` with a result. No paragraph is in two parts.
    """
    check_part(part)
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
                texts[part_of(name)].append(paragraph.strip("\n"))
    return {part: "\n\n".join(paragraphs) for part, paragraphs in texts.items()}


def _sources() -> Iterator[tuple[str, str]]:
    from pydoc_data.topics import topics

    for topic in sorted(topics):
        yield f"topic{_SALT}/{topic}", topics[topic]
    for module in _MODULES.split():
        yield f"module{_SALT}/{module}", "\n\n".join(_docstrings(module))


def _docstrings(module: str) -> Iterator[str]:
    spec = importlib.util.find_spec(module)
    # A Python may come without the sources of its library; its text is then shorter, with another fingerprint.
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return
    for node in ast.walk(ast.parse(Path(spec.origin).read_bytes())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring and len(docstring) >= _LONG:
                yield docstring


def python_code(part: Part) -> str:
    """Source code of Python's library: each module in the part that its docstrings are in."""
    check_part(part)
    files = (
        importlib.util.find_spec(module) for module in _MODULES.split() if part_of(f"module{_SALT}/{module}") == part
    )
    paths = [Path(spec.origin) for spec in files if spec is not None and spec.origin is not None]
    return "\n\n".join(path.read_text(encoding="utf-8") for path in paths if path.suffix == ".py" and path.is_file())


CHAT: tuple[str, ...] = tuple((Path(__file__).parent / "data" / "chat.txt").read_text(encoding="utf-8").splitlines())
"""Facts, explanations, advice, small talk, writing, arithmetic, code and language; the order is part of the split."""


def chat_questions(part: Part) -> list[str]:
    """Ordinary questions of one part: half of them for calibration, a quarter each for validation and test."""
    check_part(part)
    return [question for index, question in enumerate(CHAT) if part_of_index(index) == part]


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


def windows(ids: list[int], length: int, most: int) -> list[list[int]]:
    """At most `most` windows of `length` tokens that do not overlap, spread evenly over the text.

    >>> windows(list(range(10)), length=2, most=3)
    [[0, 1], [3, 4], [6, 7]]
    """
    for argument, value in (("length", length), ("most", most)):
        if value < 1:
            reject(argument, value, "1 or more")
    if len(ids) < length:
        reject("text", f"{len(ids):,} tokens", f"at least one window of {length:,} tokens", "give a longer text")
    count = min(most, len(ids) // length)
    starts = (index * len(ids) // count for index in range(count))
    return [ids[start : start + length] for start in starts]


def fingerprint(text: str) -> str:
    """A short hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
