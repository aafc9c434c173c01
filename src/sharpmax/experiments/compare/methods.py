"""What is compared: a normaliser in training and at test, a kind of feed-forward layer, and what else is its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sharpmax.attention.normalisers import normaliser, normalisers
from sharpmax.errors import reject
from sharpmax.experiments.engines import plugins
from sharpmax.models.activations import ACTIVATIONS
from sharpmax.tasks.sized import SizedTask
from sharpmax.tasks.sized_registry import SIZED_TASKS

__all__ = ["LEAGUE", "Method", "methods_named", "methods_of_files"]


@dataclass(frozen=True)
class Method:
    """One entry of the league; everything but its name and normaliser has a default that is the same for all."""

    name: str
    normaliser: str
    summary: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the normaliser, plain JSON values."""

    feed_forward: str = "gelu"
    at_test: Mapping[str, Any] | None = None
    """Another normaliser for the trained weights: `{"normaliser": name, "options": {…}}`."""

    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the common recipe that this method has otherwise."""

    data: Mapping[str, Any] = field(default_factory=dict)
    """Options of the examples in training, which this method sees instead of the usual ones; a task that has no such
    option draws the usual ones."""

    def plain(self) -> dict[str, Any]:
        """The method as JSON values."""
        return asdict(self)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Method:
        """The method that `plain` made these of."""
        return cls(**plain)

    def check(self, task: SizedTask) -> None:
        """Refuse what no worker could do: an option that there is not, or a package that is missing."""
        normaliser(self.normaliser, **self.options)
        name, options = self.tested_with()
        normaliser(name, **options)
        if self.feed_forward not in ACTIVATIONS:
            reject("feed_forward", f"{self.feed_forward!r} of method {self.name!r}", ", ".join(ACTIVATIONS))
        known = {name for one in SIZED_TASKS.values() for name in one.options} | set(task.options)
        if other := [name for name in self.data if name not in known]:
            allowed = ", ".join(task.options) or "none"
            reject("data", f"{other[0]!r} of method {self.name!r}", f"{allowed} for the task {task.name!r}")

    def examples(self, task: SizedTask) -> dict[str, Any]:
        """Options of this task's examples in training."""
        return {name: value for name, value in self.data.items() if name in task.options}

    def tested_with(self) -> tuple[str, Mapping[str, Any]]:
        """Normaliser and options at test."""
        if self.at_test is None:
            return self.normaliser, self.options
        return self.at_test["normaliser"], self.at_test.get("options", {})


# The largest size in training, and the question itself where it is among the keys.
_WINDOW = 17

LEAGUE: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method("softmax", "softmax", "exp(s)/Σ exp(s)"),
        Method("adaptive", "adaptive", "softmax(β·s) with the paper's β in training and at test"),
        Method("ssmax", "ssmax", "softmax(s·ln n·logits), s learned"),
        Method("sparsemax", "sparsemax", "nearest point of the simplex"),
        Method("entmax15", "entmax15", "half way between softmax and sparsemax"),
        Method("sigmoid", "sigmoid", "σ(s − ln n) for each key on its own"),
        Method("softmax-plus-one", "softmax-plus-one", "exp(s)/(1 + Σ exp(s))"),
        Method("linear", "linear", "φ(q)·φ(k)/Σ φ(q)·φ(k)"),
        Method("stick-breaking", "stick-breaking", "σ(s_j)·Π (1 − σ(s)) over the keys after j"),
        Method("hard", "hard", "the largest logit alone, straight-through gradient"),
        Method("top-k", "top-k", "softmax over the 8 largest logits", {"k": 8}),
        Method("local", "local", f"softmax over the last {_WINDOW} keys", {"window": _WINDOW}),
        Method("step", "softmax", "softmax, feed-forward layers with a step", feed_forward="step"),
        Method("hard-threshold", "softmax", "softmax, feed-forward layers with a jump", feed_forward="hard-threshold"),
        Method(
            "sharp",
            "ssmax",
            "ssmax trained on near-ties of all scales, the largest logit alone at test",
            at_test={"normaliser": "hard", "options": {}},
            data={"zoom": 1e-4},
        ),
    )
}
"""What `sharpmax compare` runs unless told otherwise."""


def methods_named(names: Sequence[str], own: Sequence[Method] = ()) -> list[Method]:
    """The methods of these names, all of the league without any, and a user's own in either case."""
    there = dict(LEAGUE) | {method.name: method for method in own}
    for name in names:
        if name not in there:
            reject("METHODS", repr(name), ", ".join(there), "--with FILE adds a normaliser of your own")
    chosen = list(dict.fromkeys(names)) or list(LEAGUE)
    return [there[name] for name in dict.fromkeys([*chosen, *(method.name for method in own)])]


def methods_of_files(files: Sequence[Path]) -> list[Method]:
    """What these Python files add: the methods of their list `METHODS`, and one for each normaliser not used there."""
    found: dict[str, Method] = {}
    for plugin in plugins.read(files):
        listed = getattr(plugins.load(plugin), "METHODS", [])
        name = repr(Path(plugin.path).name)
        if not isinstance(listed, list) or not all(isinstance(one, Method) for one in listed):
            reject("--with", f"METHODS of {name}", "a list of sharpmax.experiments.compare.methods.Method")
        kinds = [kind for kind in normalisers().values() if kind.__module__ == plugin.module]
        if not kinds and not listed:
            reject("--with", name, "a file that defines a subclass of Normaliser with a name")
        used = {one.normaliser for one in listed}
        own = [*listed, *(Method(kind.name, kind.name, kind.disperses) for kind in kinds if kind.name not in used)]
        for method in own:
            if method.name in LEAGUE or method.name in found:
                reject("--with", f"{method.name!r} of {name}", "a name that no method has", "rename it")
            found[method.name] = method
    return list(found.values())
