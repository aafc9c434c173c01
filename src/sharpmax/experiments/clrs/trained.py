"""From a recipe and examples to a trained folder and the tables of `sharpmax clrs train`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sharpmax.errors import reject
from sharpmax.experiments.clrs.data import Source, sizes_of
from sharpmax.experiments.clrs.documents import Documents, Question, fingerprint
from sharpmax.experiments.clrs.folder import RUN, belongs
from sharpmax.experiments.clrs.packing import Packed
from sharpmax.experiments.clrs.rate import matrix_rate
from sharpmax.experiments.clrs.recipe import Recipe
from sharpmax.experiments.clrs.training import Progress, Trained, train
from sharpmax.experiments.evaluate.arms import shape_of, touched
from sharpmax.models.language import LanguageModel, context_of, weights_fingerprint

__all__ = ["Prepared", "prepare", "trained_tables"]


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
        return len(self.packed) // self.recipe.together(self.packed.room)

    def claim(self, folder: Path, *, resume: bool) -> None:
        """Let `folder` be that of this run, or say why it cannot be."""
        belongs(folder, self.identity, used=(folder / RUN).exists(), resume=resume)


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
    most = context_of(language.model)
    if most is not None and recipe.row_tokens > most:
        reject("--row-tokens", recipe.row_tokens, f"up to {most} tokens, what {model} is made for")

    def told(done: int) -> None:
        note(f"cutting {done:,} of {len(examples):,} examples into tokens")

    documents = Documents.of(language.tokenizer, examples, most, told)
    note("packing documents into rows")
    room = max(recipe.row_tokens, int(documents.lengths.max()))
    packed = Packed.of(
        documents, room, together=recipe.together(room), steps=recipe.steps, epochs=recipe.epochs, seed=recipe.seed
    )
    identity = {
        "model": model,
        "weights": weights_fingerprint(language.model),
        "data": source.to_dict(),
        "examples": {"count": len(examples), "fingerprint": fingerprint(examples), "dropped": documents.dropped},
        "sizes": sizes_of(examples),
        "dtype": "bfloat16" if bfloat16 else "float32",
        **{key: value for key, value in recipe.to_dict().items() if key not in ("save_every", "epochs", "steps")},
        "steps": len(packed) // recipe.together(room),
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
    packed, recipe = prepared.packed, prepared.recipe
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
            "room": packed.room,
            "rows_per_step": recipe.together(packed.room),
            "devices": found.devices,
            "trained_weights": weights_fingerprint(prepared.language.model),
        },
        "curve": [[entry["step"], entry["loss"]] for entry in found.curve],
        "speed": {
            "tokens": sum(entry["tokens"] for entry in found.curve),
            "tokens_per_second": speed,
            "filled": packed.tokens(0, len(packed)) / (len(packed) * packed.room),
            "model_flops_per_second": flops,
            "matrix_flops_per_second": rate,
            "share": None if flops is None or rate is None else flops / (rate * found.devices),
        },
    }
