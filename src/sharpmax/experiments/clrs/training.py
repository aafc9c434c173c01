"""Train a new or existing language model on CLRS-Text with transformers' Trainer, with or without a policy."""

from __future__ import annotations

import math
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sharpmax.calibration.learnable import LEARNABLE, LearnablePolicy
from sharpmax.errors import SharpmaxError, UnsupportedError, reject
from sharpmax.experiments.clrs.data import IGNORED, MIXED, Batches, Documents
from sharpmax.experiments.run_folder import claim_folder, full_disk_reported
from sharpmax.experiments.variants import under
from sharpmax.files import display_name, parse_json
from sharpmax.integrations.trainer import EntropyBand
from sharpmax.integrations.transformers.application import apply, restore
from sharpmax.lazy import require
from sharpmax.models.language import LanguageModel, any_length, quiet, weights_fingerprint
from sharpmax.policies.base import Policy
from sharpmax.policies.registry import load_policy
from sharpmax.provenance import check_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sharpmax.tasks.clrs_text.generation import Example

MODEL = "model"
"""The folder of the trained model in that of the run."""

NONE = "none"
"""The name of no policy."""

PREFIX = "scratch:"
_SHAPES = {"1m": (128, 4, 4), "3m": (256, 4, 4), "10m": (384, 6, 6), "30m": (512, 9, 8)}  # width, layers, heads
_WITHOUT_POSITIONS = "-nope"
_CONTEXT = 4096
# A word, "0." with a space or bracket before it, or a single character.
_TOKEN = r"[A-Za-z_]+|[ \[]?0\.|[\s\S]"
_END, _UNKNOWN = "<end>", "<unknown>"

_STATES = "states"
_POINTS = 400  # of the loss curve, at most
_READ_EVERY = 10  # steps between reading the loss, which synchronises with the device
_READ_AT_LEAST = 20  # times in a short run
_WARM_UP = 0.05  # share of steps with a rising learning rate, before it falls as a cosine

Progress = Callable[[int, int, str], None]
"""Called with the current step, the number of steps, and the loss."""


def is_scratch(word: str) -> bool:
    """Whether the word names a new model."""
    return word.startswith(PREFIX)


def scratch_model(word: str, tokenizer: Any, seed: int) -> LanguageModel:
    """A Llama-like decoder with random weights: `scratch:10m` with rotary positions, `scratch:10m-nope` without."""
    size = word.removeprefix(PREFIX)
    rotary = not size.endswith(_WITHOUT_POSITIONS)
    if size.removesuffix(_WITHOUT_POSITIONS) not in _SHAPES:
        allowed = ", ".join(f"{PREFIX}{name}" for name in _SHAPES)
        reject("model", repr(word), f"{allowed}, each also with {_WITHOUT_POSITIONS} (no positions)")
    width, layers, heads = _SHAPES[size.removesuffix(_WITHOUT_POSITIONS)]
    transformers = require("transformers", "hf", "sharpmax clrs train")
    config = transformers.SmolLM3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64, hidden_size=width, intermediate_size=8 * width // 3 // 64 * 64,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
        max_position_embeddings=_CONTEXT, no_rope_layers=[int(rotary)] * layers, use_cache=True,
        pad_token_id=None, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.SmolLM3ForCausalLM(config)
    return LanguageModel(word, model.eval(), tokenizer)


def scratch_tokenizer(examples: Sequence[Example]) -> Any:
    """A tokenizer whose tokens are the words in the examples, `0.` and single characters."""
    transformers = require("transformers", "hf", "sharpmax clrs train")
    tokenizers = require("tokenizers", "hf", "sharpmax clrs train")
    known: set[str] = set("0123456789")
    for one in examples:
        known.update(re.findall(_TOKEN, one.question), re.findall(_TOKEN, one.answer))
    vocabulary = {token: number for number, token in enumerate([_END, _UNKNOWN, *sorted(known)])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=_UNKNOWN))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(_TOKEN), "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token=_END, unk_token=_UNKNOWN)


@contextmanager
def answers_only(model: PreTrainedModel, labels: Tensor) -> Iterator[None]:
    """Make the model compute logits of labelled tokens only: `[1, labelled tokens, vocabulary]`."""
    of_model: Any = model
    head = of_model.get_output_embeddings()
    if head is None:
        raise UnsupportedError(f"model: {type(model).__name__} has no output embeddings, from which logits come")
    labelled = labels[:, 1:] != IGNORED  # a token is predicted at the position before it
    hook = head.register_forward_pre_hook(lambda module, args: (args[0][:, :-1][labelled][None], *args[1:]))
    try:
        yield
    finally:
        hook.remove()


def answer_loss(logits: Tensor, labels: Tensor, count: Tensor | float) -> Tensor:
    """Sum over answers of the mean loss of their tokens in nats, divided by `count`; logits are from `answers_only`.

    Answers of any length have the same weight.
    """
    labelled = labels[:, 1:] != IGNORED
    lengths = labelled.sum(1)
    losses = F.cross_entropy(logits[0].float(), labels[:, 1:][labelled], reduction="none")
    return (losses / lengths.repeat_interleave(lengths)).sum() / count


@dataclass(frozen=True)
class FineTuneRecipe:
    """Settings of a fine-tuning run."""

    policy: Policy | None = None  # used in training, and saved with the model for evaluation
    policy_name: str = NONE
    learn: str | None = None  # the kind of policy that is trained with the weights, per head
    band: tuple[float, float] | None = None  # a penalty (weight 1) keeps the entropy of every head between these · ln n
    steps: int | None = None  # None: one pass over the data
    minutes: float | None = None  # time limit; the learning rate reaches 0 at its end
    batch_tokens: int = 65_536  # tokens per step, over all devices
    mixed: float = MIXED  # documents whose lengths differ by up to this factor are read together
    tokens_at_once: int = 16_384  # tokens that a device reads at once; larger batches accumulate gradients
    rate: float = 5e-4
    policy_rate: float = 1e-2
    compiled: bool = False
    save_every: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for name, number in (("--lr", self.rate), ("--policy-lr", self.policy_rate), ("--minutes", self.minutes)):
            if number is not None and not 0.0 < number < math.inf:
                reject(name, number, "a number above 0")

    def of_variant(self, word: str, option: str) -> FineTuneRecipe:
        """The recipe of a variant: "none", a policy, "learn:KIND" or "band:LOW:HIGH"."""
        kind, _, rest = word.partition(":")
        if kind == "learn":
            if rest not in LEARNABLE:
                reject(option, repr(word), " or ".join(f"learn:{one}" for one in LEARNABLE))
            return replace(self, learn=rest)
        if kind == "band":
            try:
                low, high = map(float, rest.split(":"))
            except ValueError:
                low, high = 1.0, 0.0
            if not 0.0 <= low < high <= 1.0:
                reject(option, repr(word), "band:LOW:HIGH with two numbers from 0 to 1, as band:0.05:0.7")
            return replace(self, band=(low, high))
        return self if word == NONE else replace(self, policy=load_policy(word), policy_name=display_name(word))

    @property
    def group_tokens(self) -> int:
        """Tokens in a group, which a device reads at once."""
        return min(self.tokens_at_once, self.batch_tokens)

    @property
    def together(self) -> int:
        """Groups per step, over all devices."""
        return round(self.batch_tokens / self.group_tokens)


class FineTuning:
    """A prepared training: the model, its documents in order, and the settings that identify the run."""

    def __init__(
        self,
        language: LanguageModel,
        documents: Documents,
        source: Mapping[str, Any],
        recipe: FineTuneRecipe,
        device: torch.device,
        bfloat16: bool = False,
    ) -> None:
        """`source` describes where the documents come from."""
        with under(language.model, recipe.policy):
            pass  # raises if the policy is for another architecture
        self.language, self.recipe, self.device, self.bfloat16 = language, recipe, device, bfloat16
        self.batches = Batches.of(
            documents, recipe.group_tokens, recipe.together, recipe.steps, recipe.seed, recipe.mixed
        )
        self.steps = len(self.batches) // recipe.together
        settings = asdict(replace(recipe, policy=None))
        del settings["save_every"]
        self.identity = {
            "model": display_name(language.name),
            "weights": weights_fingerprint(language.model),
            "data": source,
            **documents.about,
            "dtype": "bfloat16" if bfloat16 else "float32",
            **settings,
            "policy": None if recipe.policy is None else recipe.policy.to_dict(),
            "steps": self.steps,
        }

    def claim(self, folder: Path, *, resume: bool) -> None:
        """Record this run in `folder`, or raise if the folder belongs to another run."""
        used = (folder / MODEL).exists() or last_checkpoint(folder / _STATES) is not None
        claim_folder(folder, self.identity, used=used, resume=resume)

    def train(
        self, folder: Path, *, resume: bool = False, progress: Progress = lambda step, steps, remark: None
    ) -> dict[str, Any]:
        """Train, save model, tokenizer and policy in `folder`/model, and return the tables of results.

        The state is saved every `recipe.save_every` steps. With `resume`, training continues from the last state.
        """
        transformers = require("transformers", "hf", "sharpmax clrs train")
        recipe, steps, batches = self.recipe, self.steps, self.batches
        model: Any = self.language.model
        arguments = transformers.TrainingArguments(
            output_dir=str(folder / _STATES), max_steps=steps, per_device_train_batch_size=1,
            gradient_accumulation_steps=self._groups_per_device(), max_grad_norm=1.0,
            bf16=self.bfloat16, train_sampling_strategy="sequential", dataloader_drop_last=True,
            remove_unused_columns=False, dataloader_pin_memory=self.device.type == "cuda", seed=recipe.seed,
            use_cpu=self.device.type == "cpu", save_strategy="steps", save_steps=recipe.save_every, save_total_limit=2,
            logging_nan_inf_filter=False,
            logging_steps=max(1, min(_READ_EVERY, steps // _READ_AT_LEAST), math.ceil(steps / _POINTS)),
            report_to=[], disable_tqdm=True, ddp_find_unused_parameters=False,
        )  # fmt: skip
        # With several GPUs in one process, Trainer would copy the model without its policy. `accelerate launch` starts
        # one process per GPU.
        arguments._n_gpu = min(arguments.n_gpu, 1)
        model.to(arguments.device).requires_grad_(True)
        clock = _Clock(recipe, steps)
        with quiet(), full_disk_reported(folder), any_length(arguments.device), ExitStack() as block:
            learned = None if recipe.learn is None else LearnablePolicy(model, recipe.learn)
            if learned is not None:
                block.callback(learned.remove)
            elif recipe.policy is not None:
                apply(model, recipe.policy)
                block.callback(restore, model)
            if recipe.compiled:
                block.enter_context(_compiled(model))
            band = None if recipe.band is None else block.enter_context(EntropyBand(model, *recipe.band))
            optimizer = _optimizer(model, recipe, learned)
            trainer = _trainer_class(transformers, band)(
                model=model, args=arguments, train_dataset=batches, data_collator=itemgetter(0),
                optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, clock.factor)),
                callbacks=[_callback(transformers, clock, steps, progress)],
            )  # fmt: skip
            trainer.compute_loss_func = trainer.loss_of_answers
            trainer.remove_callback(transformers.PrinterCallback)
            trainer.train(resume_from_checkpoint=last_checkpoint(folder / _STATES) if resume else None)
            policy = recipe.policy if learned is None else learned.policy()
        model.eval()
        with quiet(), full_disk_reported(folder):
            if arguments.process_index == 0:
                _save(self.language, policy, folder / MODEL)
        trainer.accelerator.wait_for_everyone()
        done = trainer.state.global_step
        return {
            "setting": {
                **self.identity,
                "epochs": batches.passes,
                "steps": done,  # fewer than planned if the time ran out
                "policy": None if policy is None else policy.to_dict(),
                "policy_describe": "no policy" if policy is None else policy.describe(),
                "parameters": sum(weight.numel() for weight in model.parameters()),
                "devices": arguments.world_size,
                "trained_weights": weights_fingerprint(model),
            },
            "curve": [[entry["step"], entry["loss"]] for entry in trainer.state.log_history if "loss" in entry],
            "speed": {
                "tokens": batches.tokens(0, done * recipe.together),
                "tokens_per_second": clock.speed(
                    lambda first, last: batches.tokens(first * recipe.together, last * recipe.together)
                ),
            },
        }

    def _groups_per_device(self) -> int:
        """Groups that each device reads in a step."""
        state = require("accelerate", "hf", "sharpmax clrs train").PartialState(cpu=self.device.type == "cpu")
        devices, together = int(state.num_processes), self.recipe.together
        if together % devices:
            given = f"{together} groups of --tokens-at-once for {devices} devices"
            reject("--batch-tokens", given, f"a multiple of {devices} groups")
        return together // devices


@contextmanager
def _compiled(model: PreTrainedModel) -> Iterator[None]:
    """Compile layer by layer. Layers are alike, so this takes seconds instead of minutes."""
    kind = require("transformers.modeling_layers", "hf", "--compile").GradientCheckpointingLayer
    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, kind)]
    for layer in layers:
        layer.compile()
    try:
        yield
    finally:
        for layer in layers:
            layer._compiled_call_impl = None


def last_checkpoint(states: Path) -> str | None:
    """The last complete state of a training, in which the file that Trainer writes last is readable."""
    found: dict[int, Path] = {}
    for path in states.glob("checkpoint-*"):
        try:
            step = int(parse_json((path / "trainer_state.json").read_bytes())["global_step"])
        except (OSError, KeyError, TypeError, ValueError):
            continue
        found[step] = path
    return str(found[max(found)]) if found else None


def forget_states(folder: Path) -> None:
    """Remove the states of a finished training."""
    shutil.rmtree(folder / _STATES, ignore_errors=True)


class _Clock:
    """The learning rate: a linear rise, then a cosine to 0 at the last step or the time limit."""

    def __init__(self, recipe: FineTuneRecipe, steps: int) -> None:
        self._limit = math.inf if recipe.minutes is None else 60.0 * recipe.minutes
        self._rise, self._steps = round(_WARM_UP * steps), steps
        self.began = time.perf_counter()
        self._read: list[tuple[int, float]] = []  # steps at which the device was synchronised, and when

    def read(self, step: int) -> None:
        """Note that the device has finished this step."""
        self._read.append((step, time.perf_counter()))

    def speed(self, tokens: Callable[[int, int], int]) -> float | None:
        """Tokens per second after the first reading, so without the warm-up."""
        if len(self._read) < 2:
            return None
        (first, began), *_, (last, ended) = self._read
        return tokens(first, last) / (ended - began)

    @property
    def spent(self) -> float:
        """The share of the time limit that has passed."""
        return (time.perf_counter() - self.began) / self._limit

    def factor(self, step: int) -> float:
        """The factor of the peak learning rate at a step."""
        if step < self._rise:
            return step / self._rise
        done = max((step - self._rise) / max(1, self._steps - self._rise), self.spent)
        return 0.5 + 0.5 * math.cos(math.pi * min(done, 1.0))


def _optimizer(
    model: PreTrainedModel, recipe: FineTuneRecipe, learned: LearnablePolicy | None
) -> torch.optim.Optimizer:
    own = None if learned is None else learned.parameter
    weights = [weight for weight in model.parameters() if weight is not own]
    groups: list[dict[str, Any]] = [
        {"params": [w for w in weights if w.ndim >= 2], "weight_decay": 0.01},
        {"params": [w for w in weights if w.ndim < 2], "weight_decay": 0.0},
    ]
    if own is not None:
        groups.append({"params": [own], "weight_decay": 0.0, "lr": recipe.policy_rate})
    return torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.95), fused=model.device.type == "cuda")


def _trainer_class(transformers: Any, band: EntropyBand | None) -> Any:
    """A Trainer that computes logits of answers only, and adds the penalty of an entropy band."""

    class Answering(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.answers = inputs.pop("answers")
            with answers_only(self.model, inputs["labels"]):
                loss = super().compute_loss(model, inputs, *args, **kwargs)
            if band is None:
                return loss
            penalty = band.loss() / self.args.gradient_accumulation_steps
            return loss + penalty - penalty.detach()  # only its gradient, so that losses of variants are comparable

        def loss_of_answers(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int) -> Tensor:
            return answer_loss(outputs.logits, labels, self.answers)

    return Answering


def _callback(transformers: Any, clock: _Clock, steps: int, progress: Progress) -> Any:
    """A Trainer callback that ends the training at the time limit, or if the loss is not a number."""

    class Watch(transformers.TrainerCallback):  # type: ignore[misc]
        remark = ""

        def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            clock.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            control.should_training_stop |= clock.spent >= 1.0
            control.should_log |= control.should_training_stop or state.global_step >= steps or control.should_save
            progress(state.global_step, steps, self.remark)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
            if "loss" not in (logs or {}):
                return
            if not math.isfinite(logs["loss"]):
                raise SharpmaxError(
                    f"clrs train: the loss is not a number at step {state.global_step}; try a smaller --lr, or "
                    "--dtype float32"
                )
            clock.read(state.global_step)
            self.remark = f"loss {logs['loss']:.3f}"

    return Watch()


def _save(language: LanguageModel, policy: Policy | None, folder: Path) -> None:
    """Save the model with its policy, atomically."""
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
