"""The interactive page about dispersion: sliders for a row of logits, with theory and policies applied to it.

One self-contained HTML file. `SCENES` are positions of the sliders; the template has their texts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from sharpmax.files import write_text
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import LogLength
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.polynomial import PAPER
from sharpmax.report import charts
from sharpmax.report.page import asset, rendered, trusted

FILE_NAME = "explore.html"


class Choice(NamedTuple):
    """A policy to choose (None: β = 1), its name in a sentence and one fact about it."""

    label: str
    policy: Policy | None
    about: str


# The paper trains on sets of 5 to 16 items; 0.065 nats is the mean entropy of its heads on those sizes (sharpmax
# reproduce).
CHOICES = {
    "none": Choice("no policy", None, "plain softmax"),
    "paper": Choice("the paper's polynomial", PAPER, "uses the entropy H of the row; β = 1 above H = 5.94 nats"),
    "log-length": Choice("β ∝ ln n", LogLength(16.0), "uses the number of items; trained on up to 16"),
    "entropy-target": Choice(
        "the entropy target", EntropyTarget(0.065), "solved for each row; 0.065 nats as in training"
    ),
}
"""The policies, by name."""


@dataclass(frozen=True)
class Place:
    """Positions of all sliders; `lead` is the share of the spread by which the best item leads."""

    items: int
    spread: float
    lead: float = 0.0
    temperature: float = 1.0
    policy: str = "none"


START = Place(items=256, spread=4.0, lead=1.0, policy="log-length")
"""A head with bounded logits beyond its horizon, and a policy that fixes it."""

# 240 nats is the largest spread of logits of a head trained by the paper's recipe (results/reproduce, "bounds"); they
# are about evenly distributed. 16,384 is the largest set that the paper tests.
SCENES = {
    "bounded": START,
    "far": Place(items=16384, spread=240.0, policy="paper"),
    "near": Place(items=16, spread=240.0, policy="paper"),
    "end": Place(items=1024, spread=4.0, policy="paper"),
    "threshold": Place(items=65_536, spread=2.0, lead=1.0, policy="log-length"),
    "target": Place(items=16384, spread=240.0, policy="entropy-target"),
    "cold": Place(items=16384, spread=240.0, temperature=0.1),
}
"""Examples, in the order of the page."""


def write(path: str | Path = FILE_NAME) -> Path:
    """Write the page to `path`."""
    policies = {
        name: {"label": one.label, "policy": one.policy and one.policy.to_dict()} for name, one in CHOICES.items()
    }
    licence = asset("explore/uplot/LICENSE").strip()
    uplot = f"/*! uPlot 1.6.32, from the npm package uplot, unchanged\n\n{licence}\n*/\n"
    context = {
        "choices": CHOICES,
        "scenes": {name: asdict(place) for name, place in SCENES.items()},
        "values": {"policies": policies, "start": asdict(START)},
        "charts": charts,
        "library": {
            "script": trusted(uplot + asset("explore/uplot/uPlot.iife.min.js")),
            "style": trusted(asset("explore/uplot/uPlot.min.css")),
        },
        "scripts": [trusted(asset(f"explore/{name}.js")) for name in ("maths", "charts", "page")],
    }
    return write_text(path, rendered("explore.html.jinja", context))
