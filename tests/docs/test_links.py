"""Every relative link and anchor of the documentation and of the README leads somewhere."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

import pytest

from sitekit.drawn import DIRECTIVE, file_of
from sitekit.reports import KINDS
from tests.blocks import ROOT

DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
HOSTS = ("https://arxiv.org/", "https://keepachangelog.com/", "https://semver.org/")


def anchors(page: Path) -> set[str]:
    """What a link can point to within a page: its headings, as they are turned into addresses."""
    return {slug(heading) for heading in HEADING.findall(BLOCK.sub("", page.read_text(encoding="utf-8")))}


def slug(heading: str) -> str:
    """The address of a heading."""
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    words = unicodedata.normalize("NFKD", words).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", words).strip().lower())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        if "://" in link:
            assert link.startswith(HOSTS), f"a host that nobody has looked at: {link}"
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file() or target.is_dir(), link
        assert not anchor or anchor in anchors(target), link


def asked() -> list[tuple[Path, str, str]]:
    pages = [(page, page.read_text(encoding="utf-8")) for page in DOCS.rglob("*.md")]
    return [(page, kind, what) for page, text in pages for kind, what in DIRECTIVE.findall(text)]


def test_everything_that_pages_ask_for_is_known() -> None:
    for page, kind, what in asked():
        filled_by_a_command = kind == "tables" and what in ("begin", "end")
        assert kind in KINDS or filled_by_a_command, (page, kind, what)


def test_every_committed_result_is_on_some_page() -> None:
    shown = {what.partition("/")[0] for _, kind, what in asked() if kind in ("report", "horizon")}
    assert {folder.name for folder in (ROOT / "results").iterdir()} <= shown
    assert all(file_of(ROOT, name).exists() or name in ("clrs", "compare") for name in shown)
    timed = {what for _, kind, what in asked() if kind == "bench"}
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
