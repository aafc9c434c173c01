"""The page to explore dispersion by hand: sliders, and what theory and policies make of them.

One HTML file that needs nothing else. `SCENES` are positions of the sliders that are worth a look.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sharpmax.files import write_text
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import LogLength
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.polynomial import PAPER
from sharpmax.report import charts
from sharpmax.report.page import asset, rendered, trusted

FILE_NAME = "explore.html"


@dataclass(frozen=True)
class Choice:
    """A policy that can be chosen: its button, its name in a sentence, and the policy itself (None changes nothing)."""

    button: str
    label: str
    policy: Policy | None
    about: str

    @property
    def rule(self) -> str:
        """The rule in one line."""
        return "β = 1" if self.policy is None else self.policy.describe()

    def plain(self) -> dict[str, Any]:
        """The values that the page's script reads."""
        return {"label": self.label, "policy": None if self.policy is None else self.policy.to_dict()}


CHOICES = {
    "none": Choice("none", "no policy", None, "softmax as it is"),
    "paper": Choice(
        "paper", "the paper's polynomial", PAPER, "reads the entropy H of the row; silent above H = 5.94 nats"
    ),
    # The paper trains on sets of 5 to 16 items.
    "log-length": Choice("log-length", "β ∝ ln n", LogLength(16.0), "reads the number of items; 16 were trained on"),
    # The mean entropy of heads trained by the paper's recipe on sizes they were trained on: sharpmax reproduce.
    "entropy-target": Choice(
        "entropy-target",
        "the entropy held",
        EntropyTarget(0.065),
        "solved for each row; 0.065 nats is what the paper's head has on sets of its training sizes",
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

    def plain(self) -> dict[str, Any]:
        """The values that the page's script reads."""
        return asdict(self)


@dataclass(frozen=True)
class Scene:
    """A place, and what is to be seen there."""

    title: str
    text: str
    place: Place


# 240 nats is the largest spread of the logits of a head trained by the paper's recipe (results/reproduce, "bounds"),
# over which they lie about evenly; 16,384 is the largest set the paper asks about, and 1 its temperature.
START = Place(items=16384, spread=240.0, policy="paper")
"""The paper's numbers."""

SCENES = (
    Scene(
        "The paper's head, far from home",
        "A head trained on sets of 5 to 16 items as in the paper has logits that lie about evenly over 240 nats. "
        "Among 16,384 items the best one is left with under 2% of the weight; the polynomial doubles that.",
        START,
    ),
    Scene(
        "The same head at home",
        "Among 16 items the next best is 16 nats behind, and all the weight is on the best one. Move n to the "
        "right: the others close up, and nothing in the head has changed.",
        Place(items=16, spread=240.0, policy="paper"),
    ),
    Scene(
        "As sharp as bounded logits allow",
        "Here every other item lies at the very bottom, which is the best case there is: the weight is the upper "
        "bound. With a spread of 4 nats the horizon is 55 items; among 64 no such head gives one of them half of "
        "its weight.",
        Place(items=64, spread=4.0, lead=1.0),
    ),
    Scene(
        "Where the polynomial ends",
        "The paper's polynomial acts on entropies up to 5.94 nats. This row of 1,024 items is above that, so that "
        "β is 1 just where it is needed most.",
        Place(items=1024, spread=4.0, policy="paper"),
    ),
    Scene(
        "ln n has a threshold",
        "β = ln n / ln 16 lets the spread grow with ln n. That holds an item which leads by more than ln 16 = 2.77 "
        "nats. This one leads by 2 and goes down all the same; give it a spread of 3.",
        Place(items=65_536, spread=2.0, lead=1.0, policy="log-length"),
    ),
    Scene(
        "The entropy held",
        "β solved for each row keeps the entropy where it was in training, and the best item over 98% of the "
        "weight, among 16,384 items as among 1,024. What is left to go wrong is which item is best.",
        Place(items=16384, spread=240.0, policy="entropy-target"),
    ),
    Scene(
        "A lower temperature for all",
        "θ = 0.1 makes every spread ten times as large. The curves move to the right by a factor of ten, and fall as "
        "before.",
        Place(items=16384, spread=240.0, temperature=0.1),
    ),
)
"""What is worth a look, in the order of a first visit."""


def write(path: str | Path = FILE_NAME) -> Path:
    """Write the page to `path`; it opens in any browser, without a network."""
    licence = (
        f"/*! uPlot 1.6.32, from the npm package uplot, unchanged\n\n{asset('explore/uplot/LICENSE').strip()}\n*/\n"
    )
    context = {
        "choices": CHOICES,
        "scenes": SCENES,
        "start": START,
        "values": {"policies": {name: choice.plain() for name, choice in CHOICES.items()}, "start": START.plain()},
        "charts": charts,
        "library": {
            "script": trusted(licence + asset("explore/uplot/uPlot.iife.min.js")),
            "style": trusted(asset("explore/uplot/uPlot.min.css")),
        },
        "scripts": [trusted(asset(f"explore/{name}.js")) for name in ("maths", "charts", "page")],
    }
    return write_text(path, rendered("explore.html.jinja", context))
