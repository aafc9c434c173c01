"""What the site adds to the pages of docs/: figures and tables of committed results, and files from outside docs/."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from sitekit.drawn import explore_page, generated
from sitekit.links import OUTSIDE_PAGES, moved
from sitekit.reports import filled

ROOT = Path(__file__).resolve().parents[1]


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the repository's root, the results as they are, and everything drawn from them."""
    for outside, page in OUTSIDE_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / outside).read_text(encoding="utf-8")))
    pages = [file.content_string for file in files.documentation_pages()]
    for uri, content in generated(ROOT, pages).items():
        files.append(File.generated(config, uri, content=content))
    files.append(File.generated(config, "explore/page.html", content=explore_page()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Put results into their places, and turn links that leave docs/ to where their targets are on the site."""
    return moved(filled(ROOT, page.file.src_uri, markdown), page.file.src_uri)


_NUMBER = re.compile(r"(?<![\w.\-])[+−±]?\d[\d.,%×*+−–]*(?!\w)|\b\d\w*[a-zA-Z_.][\w.]*\b|\b[0-9a-f]{12,}\b")


def on_post_build(config: Any) -> None:
    """Drop source maps, and numbers, hashes and words such as 0.5b from the search index: lunr confuses them."""
    for unused in Path(config.site_dir).rglob("*.map"):
        unused.unlink()
    path = Path(config.site_dir) / "search" / "search_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    for one in index["docs"]:
        one["text"] = _NUMBER.sub(" ", one["text"])
    path.write_text(json.dumps(index, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
