"""Pages of the documentation: code blocks run as written; commands, links and anchors exist."""

from __future__ import annotations

import functools
import re
import unicodedata
from pathlib import Path

import pytest

from sitekit.drawn import DIRECTIVE, file_of
from sitekit.reports import KINDS
from tests.blocks import INDENTED, INLINE, ROOT, blocks, check_command, check_mentioned, commands, run
from tests.smollm2 import load_once

DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
HOSTS = ("https://arxiv.org/", "https://keepachangelog.com/", "https://semver.org/")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if DOCS in page.parents and blocks(page)], ids=lambda page: page.name
)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    load_once(monkeypatch)
    run(blocks(page))


def test_most_blocks_are_run() -> None:
    found = [block for page in DOCS.rglob("*.md") for block in blocks(page)]
    assert {block.language for block in found} == {"python", "sh"}
    assert len(found) > 40
    assert sum(block.reason is None for block in found) > len(found) / 2


def test_commands_in_the_text_exist() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for words in [words for line in INDENTED.findall(text) for words in commands(line)]:
            check_command(words)
        for mentioned in INLINE.findall(text):
            check_mentioned(mentioned.split())


@functools.cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    return {slug(heading) for heading in HEADING.findall(BLOCK.sub("", page.read_text(encoding="utf-8")))}


def slug(heading: str) -> str:
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    words = unicodedata.normalize("NFKD", words).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", words).strip().lower())


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
            if "://" in link:
                assert link.startswith(HOSTS), f"{page}: a new host, {link}"
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), (page, link)
            assert not anchor or anchor in anchors(target), (page, link)


def test_every_committed_result_is_on_some_page() -> None:
    asked = [found for page in DOCS.rglob("*.md") for found in DIRECTIVE.findall(page.read_text(encoding="utf-8"))]
    # `sharpmax bench --gpu` fills the tables of docs/gpu.md between two of its own.
    assert {kind for kind, what in asked if (kind, what) not in (("tables", "begin"), ("tables", "end"))} <= set(KINDS)
    shown = {what.partition("/")[0] for kind, what in asked if kind in ("report", "horizon")}
    assert {folder.name for folder in (ROOT / "results").iterdir()} <= shown
    assert all(file_of(ROOT, name).exists() or name in ("clrs", "compare") for name in shown)
    timed = {what for kind, what in asked if kind == "bench"}
    committed = {file.stem for file in (ROOT / "benchmarks").glob("*.json")}
    assert timed <= committed <= timed | {"h200", "host-h200"}  # docs/gpu.md, held by tests/test_docs_gpu.py


def test_the_reference_names_every_extra() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = project.split("[project.optional-dependencies]\n")[1].split("\n[")[0]
    page = (DOCS / "reference" / "index.md").read_text(encoding="utf-8").split("## Extras")[1]
    named = re.findall(r"`([\w-]+)`", "".join(line.split("|")[1] for line in page.splitlines() if "|" in line))
    assert set(named) == set(re.findall(r"^([\w-]+) = \[", section, re.MULTILINE)) - {"dev"}


def test_the_glossary_is_in_order_and_has_each_word_once() -> None:
    page = (DOCS / "glossary.md").read_text(encoding="utf-8")
    order = [word.lower().replace("β", "beta") for word in re.findall(r"^#### (.+)$", page, re.MULTILINE)]
    assert order == sorted(order)
    assert len(set(order)) == len(order) >= 40
