"""What the site adds to the pages of docs/: figures and tables of committed results, and files from outside docs/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from links import OUTSIDE_PAGES, moved
from mkdocs.structure.files import File, Files
from stories import filled, generated

ROOT = Path(__file__).resolve().parents[2]


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the repository's root, the results as they are, and everything drawn from them."""
    for outside, page in OUTSIDE_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / outside).read_text(encoding="utf-8")))
    for uri, content in generated(ROOT, {file.src_uri: _text(file) for file in files.documentation_pages()}).items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Put results into their places, and turn links that leave docs/ to where their targets are on the site."""
    return moved(filled(ROOT, page.file.src_uri, markdown), page.file.src_uri)


def _text(file: File) -> str:
    return file.content_string
