"""Pages from templates: one set of templates, one way to fill them in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sharpmax.lazy import require

__all__ = ["rendered", "trusted"]

_PURPOSE = "writing pages"


def rendered(template: str, context: Mapping[str, Any]) -> str:
    """A template of the package with its blanks filled in; what is filled in is escaped unless it is `trusted`."""
    jinja2 = require("jinja2", "report", _PURPOSE)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sharpmax.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return str(environment.get_template(template).render(context))


def trusted(text: str) -> Any:
    """Text of our own, such as a script, that goes into a page as it is."""
    return require("markupsafe", "report", _PURPOSE).Markup(text)
