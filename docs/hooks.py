"""What the site adds to the pages of docs/: figures and tables of committed results, and files from outside docs/."""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

import figures
from mkdocs.structure.files import File, Files

from sitekit.drawn import PHONE, explore_page, generated, narrow, narrow_figures
from sitekit.links import OUTSIDE_PAGES, moved
from sitekit.reports import filled

ROOT = Path(__file__).resolve().parents[1]


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the repository's root, the results as they are, and everything drawn from them."""
    for outside, page in OUTSIDE_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / outside).read_text(encoding="utf-8")))
    pages = [file.content_string for file in files.documentation_pages()]
    drawn = {narrow(f"images/{name}.svg"): figures.draw(name, PHONE) for name in figures.FIGURES}
    for uri, content in {**generated(ROOT, pages), **narrow_figures(ROOT, pages), **drawn}.items():
        files.append(File.generated(config, uri, content=content))
    files.append(File.generated(config, "explore/page.html", content=explore_page()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Put results into their places, and turn links that leave docs/ to where their targets are on the site."""
    return moved(filled(ROOT, page.file.src_uri, markdown), page.file.src_uri)


_FIGURE = re.compile(r'<img [^>]*?src="([^"]+\.svg)"[^>]*>')


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Give phones the figures that are drawn for their width."""

    def with_narrow(found: re.Match[str]) -> str:
        address = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.dest_uri), found[1]))
        if files.get_file_from_path(narrow(address)) is None:
            return found[0]
        return f'<picture><source media="(max-width: 44.9375em)" srcset="{narrow(found[1])}">{found[0]}</picture>'

    return _FIGURE.sub(with_narrow, html)


_NUMBER = re.compile(r"(?<![\w.\-])[+−±]?\d[\d.,%×*+−–]*(?!\w)|\b\d\w*[a-zA-Z_.][\w.]*\b|\b[0-9a-f]{12,}\b")


def on_post_build(config: Any) -> None:
    """Drop files that no page uses, and words with digits from the search index, which lunr confuses."""
    site = Path(config.site_dir)
    for unused in [*site.rglob("*.map"), *site.glob("assets/javascripts/lunr/**/*.js")]:  # maps, and other languages
        unused.unlink()
    path = site / "search" / "search_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    for one in index["docs"]:
        one["text"] = _NUMBER.sub(" ", one["text"])
    path.write_text(json.dumps(index, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
