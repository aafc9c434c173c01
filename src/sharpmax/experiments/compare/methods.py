"""What `sharpmax compare` compares: methods, models and the shared recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from sharpmax.errors import reject
from sharpmax.experiments.engine import load_plugin, read_plugins
from sharpmax.experiments.stacked_training import RECIPES, Recipe
from sharpmax.models.stacked import ACTIVATIONS, Encoders, SingleHeads
from sharpmax.normalisers.base import normaliser, normalisers
from sharpmax.tasks.sized import SIZED_TASKS, SizedTask


@dataclass(frozen=True)
class Method:
    """An entry of the comparison."""

    name: str
    normaliser: str
    summary: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)  # of the normaliser, plain JSON values
    feed_forward: str = "gelu"
    at_test: Mapping[str, Any] | None = None  # another normaliser at test: {"normaliser": name, "options": {…}}
    recipe: Mapping[str, Any] = field(default_factory=dict)  # fields that differ from the common recipe
    data: Mapping[str, Any] = field(default_factory=dict)
    """Options of its training examples. A task without these options draws the usual ones."""

    def check(self, task: SizedTask) -> None:
        """Raise if the method has an unknown option or needs a package that is missing."""
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
        """Options of the training examples of this task."""
        return {name: value for name, value in self.data.items() if name in task.options}

    def tested_with(self) -> tuple[str, Mapping[str, Any]]:
        """Normaliser and options at test."""
        if self.at_test is None:
            return self.normaliser, self.options
        return self.at_test["normaliser"], self.at_test.get("options", {})


# The largest size in training, and one key for the question.
_WINDOW = 17

SHIPPED_METHODS: Mapping[str, Method] = {
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
"""The methods that `sharpmax compare` runs by default."""


def methods_named(names: Sequence[str], own: Sequence[Method] = ()) -> list[Method]:
    """The methods of these names (by default all shipped ones) and the user's own."""
    there = dict(SHIPPED_METHODS) | {method.name: method for method in own}
    for name in names:
        if name not in there:
            reject("METHODS", repr(name), ", ".join(there), "--with FILE adds a normaliser of your own")
    chosen = list(dict.fromkeys(names)) or list(SHIPPED_METHODS)
    return [there[name] for name in dict.fromkeys([*chosen, *(method.name for method in own)])]


def methods_of_files(files: Sequence[Path]) -> list[Method]:
    """Methods of Python files: those in their list `METHODS`, and one per normaliser that is not used there."""
    found: dict[str, Method] = {}
    for plugin in read_plugins(files):
        listed = getattr(load_plugin(plugin), "METHODS", [])
        name = repr(Path(plugin.path).name)
        if not isinstance(listed, list) or not all(isinstance(one, Method) for one in listed):
            reject("--with", f"METHODS of {name}", "a list of sharpmax.experiments.compare.methods.Method")
        kinds = [kind for kind in normalisers().values() if kind.__module__ == plugin.module]
        if not kinds and not listed:
            reject("--with", name, "a file that defines a subclass of Normaliser with a name")
        used = {one.normaliser for one in listed}
        own = [*listed, *(Method(kind.name, kind.name, kind.disperses) for kind in kinds if kind.name not in used)]
        for method in own:
            if method.name in SHIPPED_METHODS or method.name in found:
                reject("--with", f"{method.name!r} of {name}", "a name that no method has", "rename it")
            found[method.name] = method
    return list(found.values())


MODELS = ("single", "encoder")


@dataclass(frozen=True)
class ModelSpec:
    """A model in which every method is trained."""

    kind: str = "single"
    width: int = 128
    heads: int = 1
    depth: int = 1
    causal: bool = False

    def __post_init__(self) -> None:
        if self.kind not in MODELS:
            reject("--model", repr(self.kind), ", ".join(MODELS))
        if self.width % self.heads:
            reject("--width", self.width, f"a multiple of --heads, {self.heads}")
        if self.kind == "single" and (self.heads, self.depth, self.causal) != (1, 1, False):
            reject("--model", "'single' with --heads, --depth or --causal", "these for encoders", "add --model encoder")

    @property
    def label(self) -> str:
        """A short description; equal models have equal labels."""
        if self.kind == "single":
            return f"single w{self.width}"
        return f"encoder w{self.width} h{self.heads} d{self.depth} {'causal' if self.causal else 'global'}"

    def check(self, task: SizedTask) -> None:
        """Raise if the model cannot do the task."""
        if self.kind == "single" and task.name != "max":
            reject("--model", "'single'", f"'encoder' for the task {task.name!r}", "add --model encoder")
        if task.ordered and not self.causal:
            reject("--task", repr(task.name), "a task of sets, unless the model is causal", "add --causal")

    def build(
        self, method: Method, task: SizedTask, seeds: Sequence[int], *, test: bool = False
    ) -> SingleHeads | Encoders:
        """The untrained model of these seeds with the method in it, for training or for the test."""
        name, options = method.tested_with() if test else (method.normaliser, method.options)
        if self.kind == "single":
            return SingleHeads.initial(seeds, name, options, width=self.width, feed_forward=method.feed_forward)
        shape = {"width": self.width, "heads": self.heads, "depth": self.depth}
        return Encoders(seeds, name, options, task, **shape, causal=self.causal, feed_forward=method.feed_forward)


def models_of(kind: str, shapes: Mapping[str, Sequence[int]], *, causal: bool) -> list[ModelSpec]:
    """Every model of these widths, numbers of heads and depths, except where heads do not divide the width."""
    each = list(product(shapes["width"], shapes["heads"], shapes["depth"]))
    fitting = [one for one in each if one[0] % one[1] == 0] or each
    return [ModelSpec(kind, *one, causal=causal) for one in fitting]


def recipe_for(model: ModelSpec, method: Method, task: SizedTask, steps: int, batch: int) -> Recipe:
    """The recipe that all methods of a model share, changed by the method's own settings."""
    rate = RECIPES["sharp"].learning_rate if model.kind == "single" else 1e-3
    common = replace(RECIPES["sharp"], learning_rate=rate, batch=batch, sizes=task.trained)
    own: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in method.recipe.items()}
    known = [one.name for one in fields(Recipe) if one.name not in ("name", "summary")]
    for name in own:
        if name not in known:
            reject("recipe", f"{name!r} of method {method.name!r}", ", ".join(known))
    if own.get("sizes", task.trained)[1] > task.trained[1]:
        reject("recipe", f"sizes {own['sizes']} of method {method.name!r}", f"up to {task.trained[1]} {task.unit}")
    mine = replace(common, **own)
    return replace(mine, warmup=min(mine.warmup, steps // 10))
