"""Links and anchors of Markdown pages, as a reader would follow them."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

from tests.blocks import ROOT

DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


def links(page: Path) -> list[str]:
    """Targets of all links and images of a page."""
    return LINK.findall(CODE.sub("", page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    """What a link can point to within a page: its headings, as they are turned into addresses."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return {slug(heading) for heading in HEADING.findall(text)}


def slug(heading: str) -> str:
    """The address of a heading.

    >>> slug("`is_causal` with a cache"), slug("At no cost: fold")
    ('is_causal-with-a-cache', 'at-no-cost-fold')
    """
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    words = unicodedata.normalize("NFKD", words).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", words).strip().lower())
