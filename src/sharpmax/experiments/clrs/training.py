"""Train a language model on CLRS-Text with transformers' Trainer, with or without a policy."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sharpmax.calibration.learnable import LEARNABLE, LearnablePolicy
from sharpmax.errors import SharpmaxError, UnsupportedError, reject
from sharpmax.experiments.clrs.data import IGNORED, Documents, Packed, Source, batch_of, fingerprint, sizes_of
from sharpmax.experiments.evaluate.plan import modified_heads, shape_of, under
from sharpmax.experiments.run_folder import belongs, disk_watched, read_lines
from sharpmax.files import append_bytes, parse_json, write_text
from sharpmax.integrations.trainer import EntropyBand
from sharpmax.integrations.transformers.application import apply, restore
from sharpmax.lazy import require
from sharpmax.models.language import LanguageModel, any_length, context_of, quiet, weights_fingerprint
from sharpmax.policies.base import Policy
from sharpmax.provenance import check_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sharpmax.tasks.clrs_text.generation import Example


def _labelled(labels: Tensor) -> Tensor:
    """The positions whose next token is trained on."""
    return labels[:, 1:] != IGNORED


@contextmanager
def answers_only(model: PreTrainedModel, labels: Tensor) -> Iterator[None]:
    """Let the model compute logits `[1, labelled tokens, vocabulary]` of labelled tokens alone."""
    of_model: Any = model
    head = of_model.get_output_embeddings()
    if head is None:
        raise UnsupportedError(f"model: {type(model).__name__} has no output embeddings, from which logits come")
    hook = head.register_forward_pre_hook(lambda module, args: (args[0][:, :-1][_labelled(labels)][None], *args[1:]))
    try:
        yield
    finally:
        hook.remove()


def answer_loss(logits: Tensor, labels: Tensor, count: Tensor | int | float, typical: float | None = None) -> Tensor:
    """Loss in nats of every labelled token, summed and divided by `count`, from logits under `answers_only`.

    With `typical`, the mean length of an answer, a token counts `typical` / length of its answer, so that answers count
    alike.
    """
    wanted = labels[:, 1:][_labelled(labels)]
    if typical is None:
        return F.cross_entropy(logits[0].float(), wanted, reduction="sum") / count
    losses = F.cross_entropy(logits[0].float(), wanted, reduction="none")
    return (losses * (typical / _answer_lengths(labels))).sum() / count


def _answer_lengths(labels: Tensor) -> Tensor:
    """The length of the answer that each labelled token is part of; a question stands between two answers."""
    labelled = _labelled(labels)
    begins = labelled & ~F.pad(labelled, (1, 0))[:, :-1]
    number = begins.flatten().cumsum(0)[labelled.flatten()] - 1
    return torch.bincount(number)[number]


FILE_NAME = "curve.jsonl"


@dataclass(frozen=True)
class CurvePoint:
    """Loss, tokens and seconds of one step; the seconds of warm-up steps are None."""

    step: int
    loss: float
    tokens: int
    seconds: float | None


class LossCurve:
    """Losses and times by step. Losses stay on the device until they are written, so that no step waits for them."""

    def __init__(
        self, path: Path, tokens: Callable[[int], int], every: int, main: bool = True, typical: float | None = None
    ) -> None:
        self.entries: list[CurvePoint] = []
        self._path, self._tokens, self._every, self._main, self._typical = path, tokens, every, main, typical
        self._parts: list[Tensor] = []
        self._waiting: list[tuple[int, Tensor]] = []
        self._since = time.perf_counter()
        self._warming_up = True

    def go_on_after(self, step: int) -> None:
        """Read the entries of an interrupted run up to `step`."""
        entries = read_lines(
            self._path, lambda entry: CurvePoint(**entry), "restore it, or train again in another folder"
        )
        self.entries += [entry for entry in entries if entry.step <= step]

    def begin(self) -> None:
        """The first step begins."""
        self._since = time.perf_counter()
        if self._main:
            write_text(self._path, _lines(self.entries))

    def loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int) -> Tensor:
        """The loss of a part of a step, as transformers' Trainer asks for it."""
        loss = answer_loss(outputs.logits, labels, num_items_in_batch, self._typical)
        # A copy: with several devices the Trainer multiplies the loss in place.
        self._parts.append(loss.detach().clone())
        return loss

    def step_done(self, step: int, last: bool) -> None:
        """Record a step; write every few of them."""
        self._waiting.append((step, torch.stack(self._parts).sum()))
        self._parts.clear()
        if not last and len(self._waiting) < self._every:
            return
        losses = torch.stack([loss for _, loss in self._waiting])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(losses)
        values = losses.tolist()
        now = time.perf_counter()
        # The first steps of a process warm it up.
        seconds = None if self._warming_up else (now - self._since) / len(values)
        new = []
        for (step, _), value in zip(self._waiting, values, strict=True):
            if not math.isfinite(value):
                raise SharpmaxError(
                    f"clrs train: the loss is not a number at step {step}; try a smaller --lr, or --dtype float32"
                )
            new.append(CurvePoint(step, value, self._tokens(step), seconds))
        self._waiting, self._since, self._warming_up = [], now, False
        self.entries += new
        if self._main:
            append_bytes(self._path, _lines(new).encode())

    def tokens_per_second(self) -> float | None:
        """Over the steps whose time is known."""
        timed = [(entry.tokens, entry.seconds) for entry in self.entries if entry.seconds]
        seconds = math.fsum(spent for _, spent in timed)
        return sum(tokens for tokens, _ in timed) / seconds if seconds else None


def _lines(entries: Sequence[CurvePoint]) -> str:
    return "".join(json.dumps(dataclasses.asdict(entry)) + "\n" for entry in entries)


NONE = "none"
"""The name of no policy."""


@dataclass(frozen=True)
class FineTuneRecipe:
    """Settings of a fine-tuning run."""

    policy: Policy | None = None  # in every attention row of training, and saved beside the model for evaluation
    policy_name: str = NONE
    learn: str | None = None  # the kind of policy that is trained with the weights, per head
    band: tuple[float, float] | None = None  # a penalty (weight 1) keeps the entropy of every head between these · ln n
    steps: int | None = None
    epochs: float = 1.0  # passes over the data, unless `steps` is given
    minutes: float | None = None  # training ends after so many at the latest, its rate at 0
    batch_tokens: int = 65_536  # tokens of one step, on all devices together
    row_tokens: int = 512  # tokens of a packed row; longer documents have rows of their own
    tokens_at_once: int = 16_384  # tokens that a device reads at once; larger batches accumulate gradients
    rate: float = 5e-4
    policy_rate: float = 1e-2
    warm_up: float = 0.05  # share of the steps in which the rate rises, before it falls along a cosine
    weight_decay: float = 0.01
    clip: float = 1.0
    weigh: str = "tokens"  # what counts alike in the loss: tokens, or answers of any length
    checkpointing: bool = False
    compiled: bool = False
    save_every: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for name, number in (("--epochs", self.epochs), ("--lr", self.rate), ("--policy-lr", self.policy_rate)):
            if not 0.0 < number < float("inf"):
                reject(name, number, "a number above 0")
        if self.minutes is not None and not self.minutes > 0.0:
            reject("--minutes", self.minutes, "a number above 0")
        if self.learn is not None and self.learn not in LEARNABLE:
            reject("--learn-policy", repr(self.learn), f"one of {list(LEARNABLE)}")
        if sum(one is not None for one in (self.learn, self.policy, self.band)) > 1:
            reject("--policy", self.policy_name, "one of --policy, --learn-policy and --entropy-band")

    @property
    def group_tokens(self) -> int:
        """Tokens of a group, which a device reads at once."""
        return min(self.tokens_at_once, self.batch_tokens)

    @property
    def together(self) -> int:
        """Groups of one step, on all devices."""
        return round(self.batch_tokens / self.group_tokens)

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        # Results from before these were there are without them.
        new = {name for name in ("band", "minutes") if values[name] is None}
        kept = {name: value for name, value in values.items() if name not in new}
        return kept | {"policy": None if self.policy is None else self.policy.to_dict()}


def last_checkpoint(folder: Path) -> tuple[Path, int] | None:
    """The last complete state of a training and its step: the file that Trainer writes last can be read."""
    found = []
    for path in folder.glob("checkpoint-*"):
        try:
            step = int(parse_json((path / "trainer_state.json").read_bytes())["global_step"])
        except (OSError, KeyError, TypeError, ValueError):
            continue
        found.append((path, step))
    return max(found, default=None, key=lambda one: one[1])


MODEL = "model"
"""The folder of the trained model inside that of the run."""

_STATES = "states"
_READ_EVERY = 10  # steps after which losses are read from the device, which waits for its work
_READ_AT_LEAST = 20  # times in a short run

Progress = Callable[[int, int, str], None]
"""Called with the steps done, all steps, and the loss."""


@dataclass(frozen=True)
class FineTuned:
    """The result of a training; `policy` is that of the saved model, given or learned."""

    curve: list[CurvePoint]
    tokens_per_second: float | None
    parameters: int
    policy: Policy | None
    devices: int


def train(
    language: LanguageModel,
    packed: Packed,
    recipe: FineTuneRecipe,
    folder: Path,
    *,
    device: torch.device,
    bfloat16: bool,
    resume: bool = False,
    progress: Progress = lambda step, steps, remark: None,
) -> FineTuned:
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
        gradient_accumulation_steps=(parts := _parts(together, device)), max_grad_norm=recipe.clip, bf16=bfloat16,
        gradient_checkpointing=recipe.checkpointing, gradient_checkpointing_kwargs={"use_reentrant": False},
        train_sampling_strategy="sequential", dataloader_drop_last=True, remove_unused_columns=False,
        dataloader_pin_memory=device.type == "cuda", seed=recipe.seed, use_cpu=device.type == "cpu",
        save_strategy="steps", save_steps=recipe.save_every, save_total_limit=2, logging_strategy="no",
        report_to=[], disable_tqdm=True, ddp_find_unused_parameters=False,
    )  # fmt: skip
    # Several GPUs in one process would each get a copy of the model without its policy: accelerate launch has one each.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    main = arguments.process_index == 0
    model.to(arguments.device).requires_grad_(True)

    def tokens(step: int) -> int:
        return packed.tokens((step - 1) * together, step * together)

    typical = packed.documents.answer_length if recipe.weigh == "answers" else None
    every = min(_READ_EVERY, max(1, steps // _READ_AT_LEAST))
    curve = LossCurve(folder / FILE_NAME, tokens, every, main, typical)
    found = last_checkpoint(folder / _STATES) if resume else None
    if found is not None:
        curve.go_on_after(found[1])
    parameters = sum(weight.numel() for weight in model.parameters())
    # Two states of weights and two moments, a third while one is written, and the model, in float32.
    need = 0 if found else 4 * parameters * (3 * 3 + 1)
    with (
        ExitStack() as block,
        quiet(),
        disk_watched(folder, need, "the model and two states to resume from"),
        _policy_in(model, recipe) as learned,
        _compiled(model, recipe),
        any_length(arguments.device),
    ):
        band = None if recipe.band is None else block.enter_context(EntropyBand(model, *recipe.band))
        optimizer, clock = _optimizer(model, recipe, learned), _Clock(recipe, steps)
        trainer = _trainer_class(transformers, band, parts)(
            model=model, args=arguments, train_dataset=packed, data_collator=batch_of, compute_loss_func=curve.loss,
            optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, clock.factor)),
            callbacks=[_callback(transformers, curve, clock, steps, progress)],
        )  # fmt: skip
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train(resume_from_checkpoint=str(found[0]) if found else None)
        policy = recipe.policy if learned is None else learned.policy()
    model.eval()
    with quiet(), disk_watched(folder):
        if main:
            _save(language, policy, folder / MODEL)
    trainer.accelerator.wait_for_everyone()
    return FineTuned(curve.entries, curve.tokens_per_second(), parameters, policy, arguments.world_size)


def worth_keeping(folder: Path) -> bool:
    """Whether a folder holds a trained model, or a state to resume from."""
    return (folder / MODEL).exists() or last_checkpoint(folder / _STATES) is not None


def forget_states(folder: Path) -> None:
    """Remove the states of a training that is finished and saved."""
    shutil.rmtree(folder / _STATES, ignore_errors=True)


def _parts(together: int, device: torch.device) -> int:
    """Groups of a step that each device reads."""
    devices = require("accelerate", "hf", "sharpmax clrs train").PartialState(cpu=device.type == "cpu").num_processes
    if together % devices:
        given = f"{together} groups of --tokens-at-once for {devices} devices"
        reject("--batch-tokens", given, f"a multiple of {devices} groups")
    return int(together // devices)


@contextmanager
def _policy_in(model: PreTrainedModel, recipe: FineTuneRecipe) -> Iterator[LearnablePolicy | None]:
    learned = None if recipe.learn is None else LearnablePolicy(model, recipe.learn)
    if recipe.policy is not None:
        apply(model, recipe.policy)
    try:
        yield learned
    finally:
        if learned is not None:
            learned.remove()
        elif recipe.policy is not None:
            restore(model)


class _Clock:
    """The learning rate by steps and time: a linear rise, then a cosine that ends with whichever comes first."""

    def __init__(self, recipe: FineTuneRecipe, steps: int) -> None:
        self._limit = math.inf if recipe.minutes is None else 60.0 * recipe.minutes
        self._rise, self._steps = round(recipe.warm_up * steps), steps
        self._began = time.perf_counter()

    def begin(self) -> None:
        """Training begins."""
        self._began = time.perf_counter()

    @property
    def spent(self) -> float:
        """The share of the time that has passed."""
        return (time.perf_counter() - self._began) / self._limit

    def factor(self, step: int) -> float:
        """What the peak rate is multiplied by after so many steps."""
        if step < self._rise:
            return step / self._rise
        done = max((step - self._rise) / max(1, self._steps - self._rise), self.spent)
        return 0.5 + 0.5 * math.cos(math.pi * min(done, 1.0))


@contextmanager
def _compiled(model: PreTrainedModel, recipe: FineTuneRecipe) -> Iterator[None]:
    """Compile layer by layer: they are alike, so compiling takes seconds and not minutes."""
    layers: list[Any] = []
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


def _optimizer(
    model: PreTrainedModel, recipe: FineTuneRecipe, learned: LearnablePolicy | None
) -> torch.optim.Optimizer:
    own = None if learned is None else learned.parameter
    weights = [weight for weight in model.parameters() if weight is not own]
    groups: list[dict[str, Any]] = [
        {"params": [w for w in weights if w.ndim >= 2], "weight_decay": recipe.weight_decay},
        {"params": [w for w in weights if w.ndim < 2], "weight_decay": 0.0},
    ]
    if own is not None:
        groups.append({"params": [own], "weight_decay": 0.0, "lr": recipe.policy_rate})
    return torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.95), fused=model.device.type == "cuda")


def _trainer_class(transformers: Any, band: EntropyBand | None, parts: int) -> Any:
    """A Trainer whose model computes logits of answers alone, with the penalty of a band."""

    class Answering(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            with answers_only(self.model, inputs["labels"]):
                loss = super().compute_loss(model, inputs, *args, **kwargs)
            return loss if band is None else loss + band.loss() / parts

    return Answering


def _callback(transformers: Any, curve: LossCurve, clock: _Clock, steps: int, progress: Progress) -> Any:
    """A callback of the Trainer that keeps the curve and ends the training in time."""

    class KeepCurve(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            clock.begin()
            curve.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            control.should_training_stop |= clock.spent >= 1.0
            # The saved state must not be ahead of the curve.
            last = control.should_save or control.should_training_stop or state.global_step >= steps
            curve.step_done(state.global_step, last=last)
            if curve.entries:
                progress(state.global_step, steps, f"loss {curve.entries[-1].loss:.3f}")

    return KeepCurve()


def _save(language: LanguageModel, policy: Policy | None, folder: Path) -> None:
    """Save the model with its policy, completely or not at all."""
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


_POINTS = 400  # of the loss curve in results; every step is in the file of the curve


@dataclass(frozen=True, eq=False)
class PreparedTraining:
    """A model, its packed data and the settings that identify the training."""

    language: LanguageModel
    recipe: FineTuneRecipe
    packed: Packed
    identity: dict[str, Any]

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return len(self.packed) // self.recipe.together

    def claim(self, folder: Path, *, resume: bool) -> None:
        """Let `folder` be that of this run, or raise."""
        belongs(folder, self.identity, used=worth_keeping(folder), resume=resume)


def prepare(
    language: LanguageModel,
    examples: Sequence[Example],
    source: Source,
    recipe: FineTuneRecipe,
    *,
    model: str,
    bfloat16: bool,
    note: Callable[[str], None] = lambda text: None,
) -> PreparedTraining:
    """Tokens, rows and order of the whole run; documents longer than the model's context are left out."""
    with under(language.model, recipe.policy):
        pass  # refuses a policy made for another architecture
    most = context_of(language.model)
    if most is not None and recipe.row_tokens > most:
        reject("--row-tokens", recipe.row_tokens, f"up to {most} tokens, the context of {model}")

    def report(done: int) -> None:
        note(f"tokenizing {done:,} of {len(examples):,} examples")

    documents = Documents.of(language.tokenizer, examples, most, report)
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
    return PreparedTraining(language, recipe, packed, identity)


def trained_tables(
    prepared: PreparedTraining,
    folder: Path,
    *,
    device: torch.device,
    bfloat16: bool,
    resume: bool = False,
    progress: Progress = lambda step, steps, remark: None,
) -> dict[str, Any]:
    """Train, save, and return the tables of results."""
    found = train(
        prepared.language, prepared.packed, prepared.recipe, folder, device=device, bfloat16=bfloat16, resume=resume,
        progress=progress,
    )  # fmt: skip
    packed = prepared.packed
    layers, heads = shape_of(prepared.language.model)
    speed = found.tokens_per_second
    flops = None if speed is None else 6.0 * found.parameters * speed
    return {
        "setting": {
            **prepared.identity,
            "epochs": packed.passes,
            "steps": found.curve[-1].step if found.curve else 0,  # fewer than planned where time ran out
            "policy": None if found.policy is None else found.policy.to_dict(),
            "policy_describe": "no policy" if found.policy is None else found.policy.describe(),
            "touched": modified_heads(found.policy, layers, heads),
            "layers": layers,
            "heads": heads,
            "parameters": found.parameters,
            "longest": int(packed.documents.lengths.max()),
            "devices": found.devices,
            "trained_weights": weights_fingerprint(prepared.language.model),
        },
        "curve": thinned([(entry.step, entry.loss) for entry in found.curve]),
        "speed": {
            "tokens": sum(entry.tokens for entry in found.curve),
            "tokens_per_second": speed,
            "filled": packed.filled,
            "model_flops_per_second": flops,
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
