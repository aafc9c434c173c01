"""What is trained and tested: the model, the task, and the recipe that all methods share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from typing import Any

from sharpmax.errors import reject
from sharpmax.experiments.compare.methods import Method
from sharpmax.experiments.recipe import Recipe
from sharpmax.experiments.reproduce.recipes import RECIPES
from sharpmax.models.encoder import Encoders
from sharpmax.models.set_heads import SetHeads
from sharpmax.tasks.sized import SizedTask

__all__ = ["MODELS", "ModelSpec", "models_of", "recipe_for"]

MODELS = ("single", "encoder")

_ENCODER_RATE = 1e-3
_WARMUP_SHARE = 10


@dataclass(frozen=True)
class ModelSpec:
    """A model that every method is put into."""

    kind: str = "single"
    width: int = 128
    heads: int = 1
    depth: int = 1
    causal: bool = False

    def __post_init__(self) -> None:
        if self.kind not in MODELS:
            reject("--model", repr(self.kind), ", ".join(MODELS))
        for name in ("width", "heads", "depth"):
            if getattr(self, name) < 1:
                reject(f"--{name}", getattr(self, name), "1 or more")
        if self.width % self.heads:
            reject("--width", self.width, f"a multiple of --heads, {self.heads}")
        if self.kind == "single" and (self.heads, self.depth, self.causal) != (1, 1, False):
            reject("--model", "'single' with --heads, --depth or --causal", "these for encoders", "add --model encoder")

    @property
    def label(self) -> str:
        """In a few words, the same for the same model."""
        if self.kind == "single":
            return f"single w{self.width}"
        return f"encoder w{self.width} h{self.heads} d{self.depth} {'causal' if self.causal else 'global'}"

    def plain(self) -> dict[str, Any]:
        """The model as JSON values."""
        return asdict(self)

    def check(self, task: SizedTask) -> None:
        """Refuse a task that the model cannot do."""
        if self.kind == "single" and task.name != "max":
            reject("--model", "'single'", f"'encoder' for the task {task.name!r}", "add --model encoder")
        if task.ordered and not self.causal:
            reject("--task", repr(task.name), "a task of sets, unless the model is causal", "add --causal")

    def build(
        self, method: Method, task: SizedTask, seeds: Sequence[int], *, test: bool = False
    ) -> SetHeads | Encoders:
        """The untrained model of these seeds with the method in it, as it is in training or at test."""
        name, options = method.tested_with() if test else (method.normaliser, method.options)
        if self.kind == "single":
            return SetHeads(seeds, name, options, width=self.width, feed_forward=method.feed_forward)
        return Encoders(
            seeds,
            name,
            options,
            task,
            width=self.width,
            heads=self.heads,
            depth=self.depth,
            causal=self.causal,
            feed_forward=method.feed_forward,
        )


def models_of(kind: str, shapes: Mapping[str, Sequence[int]], *, causal: bool) -> list[ModelSpec]:
    """Every model of these widths, numbers of heads and depths; heads that do not share a width evenly are left out."""
    if kind not in MODELS:
        reject("--model", repr(kind), ", ".join(MODELS))
    each = list(product(shapes["width"], shapes["heads"], shapes["depth"]))
    fitting = [one for one in each if one[0] % one[1] == 0] or each
    return [ModelSpec(kind, *one, causal=causal) for one in fitting]


def recipe_for(model: ModelSpec, method: Method, task: SizedTask, steps: int, batch: int) -> Recipe:
    """The recipe that all methods of a model share, with what is the method's own."""
    rate = RECIPES["sharp"].learning_rate if model.kind == "single" else _ENCODER_RATE
    common = replace(RECIPES["sharp"], learning_rate=rate, batch=batch, sizes=task.trained)
    own: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in method.recipe.items()}
    known = [one.name for one in fields(Recipe) if one.name not in ("name", "summary")]
    for name in own:
        if name not in known:
            reject("recipe", f"{name!r} of method {method.name!r}", ", ".join(known))
    if own.get("sizes", task.trained)[1] > task.trained[1]:
        reject("recipe", f"sizes {own['sizes']} of method {method.name!r}", f"up to {task.trained[1]} {task.unit}")
    mine = replace(common, **own)
    return replace(mine, warmup=min(mine.warmup, steps // _WARMUP_SHARE))
