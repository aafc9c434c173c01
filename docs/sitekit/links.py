"""Where things outside docs/ are on the site, so that a link works in the repository and on the site."""

from __future__ import annotations

import posixpath
import re

__all__ = ["OUTSIDE_PAGES", "address", "moved", "on_site"]

OUTSIDE_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages of the repository's root that are pages of the site too."""

_LINK = re.compile(r"(\]\()([^)\s#]+)")


def moved(markdown: str, page: str) -> str:
    """The text of a page with every relative link pointing to where its target is on the site."""
    return _LINK.sub(lambda found: found[1] + _target(found[2], page), markdown)


def address(path: str, page: str) -> str:
    """The relative link from a page of the site to a file of the repository."""
    return posixpath.relpath(on_site(path), posixpath.dirname(page) or ".")


def _target(link: str, page: str) -> str:
    if "://" in link or link.startswith(("mailto:", "/")):
        return link
    home = next((outside for outside, inside in OUTSIDE_PAGES.items() if inside == page), f"docs/{page}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(home), link))
    return address(path, page)


def on_site(path: str) -> str:
    """Where a file of the repository is on the site; results are gzipped there."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path == "README.md":
        return "index.md"
    return OUTSIDE_PAGES.get(path, f"data/{path}.gz" if path.endswith(".json") else f"data/{path}")
