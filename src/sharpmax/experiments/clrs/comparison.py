"""Train variants of one model in parallel, each in its own process and for the same number of steps, and test them."""

from __future__ import annotations

import functools
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sharpmax.experiments.clrs.data import Documents, Source
from sharpmax.experiments.clrs.evaluation import Answer, Evaluation, Variant, evaluation_tables, training_of
from sharpmax.experiments.clrs.training import (
    FineTuneRecipe,
    FineTuning,
    forget_states,
    is_scratch,
    scratch_model,
    scratch_tokenizer,
)
from sharpmax.experiments.engine import Job, run
from sharpmax.experiments.run_folder import Outcome, RunStore
from sharpmax.files import display_name
from sharpmax.models.language import context_of, load_language_model
from sharpmax.results import FILE_NAME, collect

_TRIAL_SECONDS, _TRIAL_SHARE = 20.0, 0.1  # the speed is measured this long, but at most this share of the time
_WARM_UP_STEPS, _TRIAL_STEPS = 10, 2000
_MARGIN = 0.75  # share of the time that is planned, since long trainings are slower than short ones
_LATEST = 1.1  # a training ends after this multiple of its time
_ANSWER_DTYPE = "float32"
_STEPS = "steps"  # key of the planned number of steps


@dataclass(frozen=True)
class VariantComparison:
    """Variants of one model, each trained with every seed on the same examples in the same order.

    If the recipe has no steps, all trainings measure their speed at the same time. Each then runs as many steps as the
    slowest can in the minutes of the recipe.
    """

    model: str
    variants: tuple[str, ...]  # see `FineTuneRecipe.of_variant`; the first is the base
    seeds: tuple[int, ...]
    recipe: FineTuneRecipe
    training: Source
    testing: Source
    folder: Path
    data: Path  # the folder of generated examples
    device: str
    bfloat16: bool
    command: str

    def identity(self) -> dict[str, Any]:
        """What must be the same to resume. Variants and seeds may be added."""
        names = ("steps", "minutes", "batch_tokens", "tokens_at_once", "rate", "policy_rate")
        return {
            "model": display_name(self.model),
            "training": self.training.to_dict(),
            "testing": self.testing.to_dict(),
            **{name: getattr(self.recipe, name) for name in names},
        }

    def run(self, store: RunStore, show: Callable[..., None]) -> None:
        """Train and test what is not in the store yet. `show` shows progress."""
        if (steps := self.recipe.steps) is None:
            if _STEPS not in store:
                self._run("measure_speed", store, show)
                speeds = [store.records[f"measure_speed {name}"]["steps_per_second"] for name in self.names]
                planned = max(1, int(min(speeds) * 60.0 * (self.recipe.minutes or 0.0) * _MARGIN))
                store.add(_STEPS, Outcome({_STEPS: planned}))
            steps = int(store.records[_STEPS][_STEPS])
        self._run("train", store, show, steps=steps)
        self._run("test", store, show)
        for name in self.names:
            forget_states(self.folder / name)

    @property
    def names(self) -> dict[str, tuple[str, int]]:
        """Variant and seed by name of folder."""
        folders = {one: re.sub(r"[^\w.]+", "-", one) for one in self.variants}
        return {f"{folders[one]}-{seed}": (one, seed) for seed in self.seeds for one in self.variants}

    def _run(self, what: str, store: RunStore, show: Callable[..., None], **more: Any) -> None:
        common = {"comparison": self, "device": self.device, **more}
        function = f"{__name__}:{what}"
        jobs = [Job(f"{what} {name}", function, {"name": name, **common}, label=name) for name in self.names]
        run(jobs, store, workers=len(jobs), progress=partial(show, what.replace("_", " ")))

    def prepared(self, name: str, steps: int, minutes: float | None, save_every: int) -> FineTuning:
        """The training of one variant and seed."""
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // len(self.names)))
        variant, seed = self.names[name]
        recipe = self.recipe.of_variant(variant, "--variants")
        recipe = replace(recipe, seed=seed, steps=steps, minutes=minutes, save_every=save_every)
        tokenizer, documents = _documents(self.model, self.training, self.data)
        new = is_scratch(self.model)
        language = scratch_model(self.model, tokenizer, seed) if new else load_language_model(self.model)
        source, device = self.training.to_dict(), torch.device(self.device)
        return FineTuning(language, documents, source, recipe, device, self.bfloat16)

    def tables(self, store: RunStore, seed: int) -> dict[str, Any]:
        """The tables of `evaluation_tables`, once everything is trained and tested."""
        found = {name: store.records[f"test {name}"] for name in self.names}
        answers: dict[str, list[list[Answer]]] = {variant: [] for variant in self.variants}
        training: dict[str, list[dict[str, Any]]] = {variant: [] for variant in self.variants}
        remarks: dict[str, list[str]] = {variant: [] for variant in self.variants}
        for name, (variant, _) in self.names.items():
            answers[variant].append([Answer(**one) for one in found[name]["answers"]])
            training[variant].append(training_of(self.folder / name))
            remarks[variant] += found[name]["remarks"]
        questions = self.testing.examples("test", self.data)
        variants = {}
        for variant, (first, *_) in training.items():
            about = first["setting"]
            variants[variant] = {
                "model": about["model"], "trained": True, "steps": about["steps"], "weights": about["trained_weights"],
                "describe": about["policy_describe"],
            }  # fmt: skip
        setting = {
            "data": self.testing.to_dict(), "device": self.device, "dtype": _ANSWER_DTYPE, "scored": True,
            "variants": variants, "remarks": remarks, "questions": {"count": len(questions)},
        }  # fmt: skip
        trained = dict.fromkeys(self.training.algorithms, self.training.sizes or ())
        tables = evaluation_tables(questions, answers, setting, trained, seed)
        return tables | {"training": {variant: _mean_training(of_seeds) for variant, of_seeds in training.items()}}


@functools.lru_cache(maxsize=1)
def _documents(model: str, source: Source, data: Path) -> tuple[Any, Documents]:
    """The tokenizer and the documents to train on, cached in each process."""
    examples = source.examples("train", data)
    language = scratch_model(model, scratch_tokenizer(examples), 0) if is_scratch(model) else load_language_model(model)
    return language.tokenizer, Documents.of(language.tokenizer, examples, context_of(language.model))


def measure_speed(*, comparison: VariantComparison, name: str, device: str) -> Outcome:
    """Steps per second of a short training, after one that compiles kernels. Both are discarded."""
    seconds = min(_TRIAL_SECONDS, _TRIAL_SHARE * 60.0 * (comparison.recipe.minutes or 0.0))
    for steps, limit in ((_WARM_UP_STEPS, 60.0), (_TRIAL_STEPS, seconds)):
        with tempfile.TemporaryDirectory() as folder:
            prepared = comparison.prepared(name, steps, limit / 60.0, save_every=steps)
            tables = prepared.train(Path(folder))
    done, speed = tables["setting"]["steps"], tables["speed"]
    known = speed["tokens_per_second"]
    return Outcome({"steps_per_second": done / seconds if known is None else done * known / speed["tokens"]})


def train(*, comparison: VariantComparison, name: str, device: str, steps: int) -> Outcome:
    """Train a variant with one seed."""
    _, seed = comparison.names[name]
    folder = comparison.folder / name
    folder.mkdir(exist_ok=True)
    recipe = comparison.recipe
    minutes = None if recipe.minutes is None else _LATEST * recipe.minutes
    prepared = comparison.prepared(name, steps, minutes, recipe.save_every)
    prepared.claim(folder, resume=True)
    collect(comparison.command, prepared.train(folder, resume=True), seed=seed).save(folder / FILE_NAME)
    return Outcome({})


def test(*, comparison: VariantComparison, name: str, device: str) -> Outcome:
    """Score the expected answers under a trained variant."""
    variant = Variant.load(str(comparison.folder / name), name, device=device, dtype=_ANSWER_DTYPE)
    questions = comparison.testing.examples("test", comparison.data)
    evaluation = Evaluation([variant], questions, comparison.recipe.tokens_at_once, {"scored": True})
    remarks: dict[str, None] = {}
    answers: dict[int, Answer] = {}
    for found in evaluation.answers(variant, remark=lambda text: remarks.update({text: None})):
        answers |= found
    return Outcome({"answers": [asdict(answers[item]) for item in sorted(answers)], "remarks": list(remarks)})


def _mean_training(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The training of the first seed, with loss curve and speed averaged over seeds."""
    speeds = [one["speed"]["tokens_per_second"] for one in runs if one["speed"]["tokens_per_second"] is not None]
    curves = zip(*(one["curve"] for one in runs), strict=False)
    curve = [[points[0][0], sum(loss for _, loss in points) / len(points)] for points in curves]
    speed = runs[0]["speed"] | {"tokens_per_second": sum(speeds) / len(speeds) if speeds else None}
    return runs[0] | {"curve": curve, "speed": speed}
