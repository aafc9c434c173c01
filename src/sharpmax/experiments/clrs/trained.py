"""From a recipe and examples to a trained folder and the tables of `sharpmax clrs train`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sharpmax.errors import reject
from sharpmax.experiments.clrs.data import Documents, Question, Source, fingerprint, sizes_of
from sharpmax.experiments.clrs.packing import Packed
from sharpmax.experiments.clrs.recipe import Recipe, matrix_rate
from sharpmax.experiments.clrs.training import Progress, Trained, train, worth_keeping
from sharpmax.experiments.evaluate.variants import shape_of, touched, under
from sharpmax.experiments.run_folder import belongs
from sharpmax.models.language import LanguageModel, context_of, weights_fingerprint

_POINTS = 400
"""Points of the loss curve in results; every step is in the file of the curve."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """Everything a training needs, made ready."""

    language: LanguageModel
    recipe: Recipe
    packed: Packed
    identity: dict[str, Any]

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return len(self.packed) // self.recipe.together

    def claim(self, folder: Path, *, resume: bool) -> None:
        """Let `folder` be that of this run, or say why it cannot be."""
        belongs(folder, self.identity, used=worth_keeping(folder), resume=resume)


def prepare(
    language: LanguageModel,
    examples: Sequence[Question],
    source: Source,
    recipe: Recipe,
    *,
    model: str,
    bfloat16: bool,
    note: Callable[[str], None] = lambda text: None,
) -> Prepared:
    """Tokens, rows and order of the whole run; documents longer than the model is made for are left out."""
    with under(language.model, recipe.policy):
        pass  # refuses a policy made for another architecture
    most = context_of(language.model)
    if most is not None and recipe.row_tokens > most:
        reject("--row-tokens", recipe.row_tokens, f"up to {most} tokens, what {model} is made for")

    def told(done: int) -> None:
        note(f"cutting {done:,} of {len(examples):,} examples into tokens")

    documents = Documents.of(language.tokenizer, examples, most, told)
    note("packing documents into rows")
    packed = Packed.of(
        documents, recipe.row_tokens, group_tokens=recipe.group_tokens, together=recipe.together, steps=recipe.steps,
        epochs=recipe.epochs, seed=recipe.seed,
    )  # fmt: skip
    identity = {
        "model": model,
        "weights": weights_fingerprint(language.model),
        "data": source.to_dict(),
        "examples": {"count": len(examples), "fingerprint": fingerprint(examples), "dropped": documents.dropped},
        "sizes": sizes_of(examples),
        "dtype": "bfloat16" if bfloat16 else "float32",
        **{key: value for key, value in recipe.to_dict().items() if key not in ("save_every", "epochs", "steps")},
        "steps": len(packed) // recipe.together,
    }
    return Prepared(language, recipe, packed, identity)


def trained_tables(
    prepared: Prepared,
    folder: Path,
    *,
    device: torch.device,
    bfloat16: bool,
    resume: bool = False,
    progress: Progress = lambda step, steps, remark: None,
) -> dict[str, Any]:
    """Train, save, and say what came of it."""
    rate = matrix_rate(device) if bfloat16 else None
    found = train(
        prepared.language, prepared.packed, prepared.recipe, folder, device=device, bfloat16=bfloat16, resume=resume,
        progress=progress,
    )  # fmt: skip
    return _tables(prepared, found, rate)


def _tables(prepared: Prepared, found: Trained, rate: float | None) -> dict[str, Any]:
    packed = prepared.packed
    layers, heads = shape_of(prepared.language.model)
    speed = found.tokens_per_second
    flops = None if speed is None else 6.0 * found.parameters * speed
    return {
        "setting": {
            **prepared.identity,
            "epochs": packed.passes,
            "policy": None if found.policy is None else found.policy.to_dict(),
            "policy_describe": "no policy" if found.policy is None else found.policy.describe(),
            "touched": touched(found.policy, layers, heads),
            "layers": layers,
            "heads": heads,
            "parameters": found.parameters,
            "longest": int(packed.documents.lengths.max()),
            "devices": found.devices,
            "trained_weights": weights_fingerprint(prepared.language.model),
        },
        "curve": thinned([(entry["step"], entry["loss"]) for entry in found.curve]),
        "speed": {
            "tokens": sum(entry["tokens"] for entry in found.curve),
            "tokens_per_second": speed,
            "filled": packed.filled,
            "model_flops_per_second": flops,
            "matrix_flops_per_second": rate,
            "share": None if flops is None or rate is None else flops / (rate * found.devices),
        },
    }


def thinned(curve: Sequence[tuple[int, float]], most: int = _POINTS) -> list[list[float]]:
    """A curve of up to `most` points: each stands for a few steps, at the last of them and with their mean.

    >>> thinned([(1, 4.0), (2, 2.0), (3, 1.0)], 2)
    [[2, 3.0], [3, 1.0]]
    """
    every = max(1, math.ceil(len(curve) / most))
    parts = [curve[first : first + every] for first in range(0, len(curve), every)]
    return [[part[-1][0], math.fsum(loss for _, loss in part) / len(part)] for part in parts]
