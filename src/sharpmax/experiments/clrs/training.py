"""Fine-tune with transformers' Trainer on packed rows, with or without a policy."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sharpmax.calibration.data import KINDS, NOT_NEGATIVE, policy_from
from sharpmax.calibration.trainer import TrainablePolicy, grid_of
from sharpmax.errors import reject
from sharpmax.experiments.clrs.packing import Packed, batch_of
from sharpmax.experiments.clrs.recipe import FILE_NAME as CURVE
from sharpmax.experiments.clrs.recipe import Curve, Recipe, answers_only
from sharpmax.experiments.run_folder import disk_watched
from sharpmax.files import parse_json
from sharpmax.integrations.transformers.application import apply, restore
from sharpmax.lazy import require
from sharpmax.models.language import LanguageModel, any_length, quiet
from sharpmax.policies.base import Policy
from sharpmax.policies.per_head import PerHead

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def last_checkpoint(folder: Path) -> tuple[Path, int] | None:
    """The last complete state of a training and its step: the file that is written last can be read."""
    found = []
    for path in folder.glob("checkpoint-*"):
        try:
            step = int(parse_json((path / "trainer_state.json").read_bytes())["global_step"])
        except (OSError, KeyError, TypeError, ValueError):
            continue
        found.append((step, path))
    if not found:
        return None
    step, path = max(found)
    return path, step


_NAME = "sharpmax_coefficients"


class Learned:
    """Coefficients per head that optimizers, checkpoints and several devices treat as any weight of the model."""

    def __init__(self, model: PreTrainedModel, kind: str) -> None:
        self._model = model
        self._live = TrainablePolicy(kind, *grid_of(model), model.device)
        self._live.coefficients = nn.Parameter(self._live.coefficients.detach())

    @property
    def parameter(self) -> Tensor:
        """The coefficients."""
        return self._live.coefficients

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """The coefficients as a parameter of the model that chooses β in its attention; afterwards it has none."""
        self._model.register_parameter(_NAME, self.parameter)  # type: ignore[arg-type]
        try:
            with self._live.installed(self._model):
                yield
        finally:
            delattr(self._model, _NAME)

    def hold(self) -> None:
        """After a step: what must not be negative is not."""
        names = KINDS[self._live.kind]
        if NOT_NEGATIVE in names:
            with torch.no_grad():
                self.parameter[..., names.index(NOT_NEGATIVE)].clamp_(min=0.0)

    def policy(self) -> PerHead:
        """What has been learned so far."""
        return policy_from(self._live.kind, self.parameter)


MODEL = "model"
"""The folder of the trained model inside that of the run."""

_STATES = "states"
_READ_EVERY = 10
"""Steps after which losses are read from the device, for whose work that waits."""

_READ_AT_LEAST = 20
"""Times they are read in a short run."""

Progress = Callable[[int, int, str], None]
"""Told how many steps of how many are done, and the loss."""


@dataclass(frozen=True)
class Trained:
    """What came of a training."""

    curve: list[dict[str, Any]]
    tokens_per_second: float | None
    parameters: int
    policy: Policy | None
    """That of the saved model: the one given, or the one learned."""

    devices: int


def train(
    language: LanguageModel,
    packed: Packed,
    recipe: Recipe,
    folder: Path,
    *,
    device: torch.device,
    bfloat16: bool,
    resume: bool = False,
    progress: Progress = lambda step, steps, remark: None,
) -> Trained:
    """Train the model on the packed rows and save it, its tokenizer and its policy in `folder`/model.

    The state is saved every `recipe.save_every` steps; with `resume` a run goes on from the last one.
    """
    transformers = require("transformers", "hf", "sharpmax clrs train")
    require("accelerate", "hf", "sharpmax clrs train")
    model: Any = language.model
    together = recipe.together
    steps = len(packed) // together
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / _STATES), max_steps=steps, per_device_train_batch_size=1,
        gradient_accumulation_steps=_parts(together, device), lr_scheduler_type="cosine", learning_rate=recipe.rate,
        warmup_steps=round(recipe.warm_up * steps), max_grad_norm=recipe.clip, bf16=bfloat16,
        gradient_checkpointing=recipe.checkpointing, gradient_checkpointing_kwargs={"use_reentrant": False},
        train_sampling_strategy="sequential", dataloader_drop_last=True, remove_unused_columns=False,
        dataloader_pin_memory=device.type == "cuda", seed=recipe.seed, use_cpu=device.type == "cpu",
        save_strategy="steps", save_steps=recipe.save_every, save_total_limit=2, logging_strategy="no",
        report_to=[], disable_tqdm=True, ddp_find_unused_parameters=False,
    )  # fmt: skip
    # Several GPUs in one process would each get a copy of the model without its rules: accelerate launch has one each.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    main = arguments.process_index == 0
    model.to(arguments.device).requires_grad_(True)

    def tokens(step: int) -> int:
        return packed.tokens((step - 1) * together, step * together)

    typical = packed.documents.answer_length if recipe.weigh == "answers" else None
    every = min(_READ_EVERY, max(1, steps // _READ_AT_LEAST))
    curve = Curve(folder / CURVE, tokens, every, main, typical)
    found = last_checkpoint(folder / _STATES) if resume else None
    if found is not None:
        curve.go_on_after(found[1])
    parameters = sum(weight.numel() for weight in model.parameters())
    need = 0 if found else _bytes_needed(parameters)
    with (
        quiet(),
        disk_watched(folder, need, "the model and two states to go on from"),
        _policy_in(model, recipe) as learned,
        _compiled(model, recipe),
        any_length(arguments.device),
    ):
        trainer = _trainer_class(transformers)(
            model=model, args=arguments, train_dataset=packed, data_collator=batch_of, compute_loss_func=curve.loss,
            optimizers=(_optimizer(model, recipe, learned), None),
            callbacks=[_watching(transformers, curve, learned, steps, progress)],
        )  # fmt: skip
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train(resume_from_checkpoint=str(found[0]) if found else None)
        policy = recipe.policy if learned is None else learned.policy()
    model.eval()
    with quiet(), disk_watched(folder):
        if main:
            _save(language, policy, folder / MODEL)
    trainer.accelerator.wait_for_everyone()
    return Trained(curve.entries, curve.tokens_per_second(), parameters, policy, arguments.world_size)


def worth_keeping(folder: Path) -> bool:
    """Whether a folder holds a trained model, or a state to go on from."""
    return (folder / MODEL).exists() or last_checkpoint(folder / _STATES) is not None


def forget_states(folder: Path) -> None:
    """Let go of what a run would go on from: it is over, and its results are saved."""
    shutil.rmtree(folder / _STATES, ignore_errors=True)


def _parts(together: int, device: torch.device) -> int:
    """How many of the groups of a step each device reads."""
    devices = require("accelerate", "hf", "sharpmax clrs train").PartialState(cpu=device.type == "cpu").num_processes
    if together % devices:
        given = f"{together} groups of --tokens-at-once for {devices} devices"
        reject("--batch-tokens", given, f"a multiple of {devices} groups")
    return int(together // devices)


@contextmanager
def _policy_in(model: PreTrainedModel, recipe: Recipe) -> Iterator[Learned | None]:
    learned = None if recipe.learn is None else Learned(model, recipe.learn)
    if recipe.policy is not None:
        apply(model, recipe.policy)
    try:
        with nullcontext() if learned is None else learned.at_work():
            yield learned
    finally:
        if recipe.policy is not None:
            restore(model)


@contextmanager
def _compiled(model: PreTrainedModel, recipe: Recipe) -> Iterator[None]:
    """Layers compiled one by one: they are alike, so that compiling takes seconds and not minutes."""
    layers: list[nn.Module] = []
    if recipe.compiled:
        kind = require("transformers.modeling_layers", "hf", "--compile").GradientCheckpointingLayer
        layers = [layer for layer in model.modules() if isinstance(layer, kind)]
    for layer in layers:
        layer.compile()
    try:
        yield
    finally:
        for layer in layers:
            layer._compiled_call_impl = None


def _optimizer(model: PreTrainedModel, recipe: Recipe, learned: Learned | None) -> torch.optim.Optimizer:
    own = None if learned is None else learned.parameter
    weights = [weight for weight in model.parameters() if weight is not own]
    groups: list[dict[str, Any]] = [
        {"params": [w for w in weights if w.ndim >= 2], "weight_decay": recipe.weight_decay},
        {"params": [w for w in weights if w.ndim < 2], "weight_decay": 0.0},
    ]
    if own is not None:
        groups.append({"params": [own], "weight_decay": 0.0, "lr": recipe.policy_rate})
    return torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.95), fused=model.device.type == "cuda")


def _trainer_class(transformers: Any) -> Any:
    """A Trainer whose model computes logits of answers alone."""

    class Answering(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            with answers_only(self.model, inputs["labels"]):
                return super().compute_loss(model, inputs, *args, **kwargs)

    return Answering


def _watching(transformers: Any, curve: Curve, learned: Learned | None, steps: int, progress: Progress) -> Any:
    """A callback of the Trainer that keeps the curve."""

    class Watching(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            curve.begin()

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if learned is not None:
                learned.hold()

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            # A state must not be ahead of the curve beside it.
            curve.step_done(state.global_step, last=control.should_save or state.global_step >= steps)
            if curve.entries:
                progress(state.global_step, steps, f"loss {curve.entries[-1]['loss']:.3f}")

    return Watching()


def _bytes_needed(parameters: int) -> int:
    """Two states of weights and two moments each, a third while one is written, and the model, in float32."""
    return 4 * parameters * (3 * 3 + 1)


def _save(language: LanguageModel, policy: Policy | None, folder: Path) -> None:
    """The model with its policy beside it, complete or not there at all."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    if policy is not None:
        apply(language.model, policy)
    try:
        language.model.save_pretrained(partial)
    finally:
        restore(language.model)
    language.tokenizer.save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
