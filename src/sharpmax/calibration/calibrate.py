"""`calibrate`: learn one rule per head that improves accuracy within a budget. No weight changes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharpmax.calibration.budget import (
    Budget,
    Candidate,
    check_budget,
    evaluate_replies,
    item_losses,
    percent,
    select_best,
)
from sharpmax.calibration.data import PROFILES, Profile, TrainingPrompts, regularisation_data
from sharpmax.calibration.trainer import TrainablePolicy, Trainer, TrainingSetup, frozen, grid_of
from sharpmax.errors import SharpmaxError, reject
from sharpmax.integrations.transformers.application import applied
from sharpmax.integrations.transformers.support import check_model
from sharpmax.lazy import require
from sharpmax.models.language import check_tokenizer, context_of, weights_fingerprint
from sharpmax.policies.per_head import PerHead
from sharpmax.tasks.prompt import Task
from sharpmax.tasks.registry import get_task
from sharpmax.tasks.text import fingerprint, plain_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Progress = Callable[[str, int, int, str], None]
"""Called with what is being done, the steps done, the steps in all, and a remark."""

_RATE = 0.03
_SAVE_EVERY = 20.0


class BudgetError(SharpmaxError, ValueError):
    """No learned policy stays within the budget."""


@dataclass(frozen=True, repr=False)
class CalibrationResult:
    """The best policy, the best that can be folded, and every candidate."""

    candidates: Mapping[str, Candidate]
    """By kind, for the kinds with a policy within the budget."""

    curves: Mapping[str, Sequence[Mapping[str, float]]]
    """By kind: loss and rises after every training step."""

    setting: Mapping[str, Any]
    """Everything the result depends on, with the keys of saved results."""

    before: Mapping[str, float]
    """The test set without a policy: `nll`, and the accuracy under the key `right` of saved results."""

    @property
    def chosen(self) -> Candidate:
        """The candidate with the lowest loss on the test set."""
        return min(self.candidates.values(), key=lambda one: one.nll)

    @property
    def policy(self) -> PerHead:
        """The policy to use."""
        return self.chosen.policy

    @property
    def foldable(self) -> Candidate | None:
        """The candidate that can be folded into the weights, if there is one."""
        return next((one for one in self.candidates.values() if one.foldable), None)

    def show(self) -> None:
        """Print the baseline and one line per candidate."""
        print(self)

    def __str__(self) -> str:
        lines = [f"baseline: accuracy {self.before['right']:.1%}"]
        for kind, one in self.candidates.items():
            rises = ", ".join(f"{name} {percent(rise):+.2f}%" for name, rise in one.rises.items())
            mark = " (chosen)" if one is self.chosen else ""
            lines.append(
                f"{kind}: accuracy {one.accuracy:.1%}, {one.modified_heads} heads modified, perplexity {rises}{mark}"
            )
        return "\n".join(lines)

    __repr__ = __str__

    def to_frame(self) -> Any:
        """Return a pandas frame with a row for the baseline and for each candidate."""
        pandas = require("pandas", "frame", "CalibrationResult.to_frame")
        rows = [{"kind": "baseline", "accuracy": self.before["right"], "nll": self.before["nll"], "modified_heads": 0}]
        for kind, one in self.candidates.items():
            row = {"kind": kind, "accuracy": one.accuracy, "nll": one.nll, "modified_heads": one.modified_heads}
            rises = {f"perplexity_rise_{name}": percent(rise) for name, rise in one.rises.items()}
            rows.append({**row, **rises, "strength": one.strength, "chosen": one is self.chosen})
        return pandas.DataFrame(rows)

    def save(self, folder: str | Path) -> list[Path]:
        """Write the chosen policy and each candidate as files that `sharpmax.load_policy` reads."""
        policies = {"policy": self.policy} | {f"policy-{kind}": one.policy for kind, one in self.candidates.items()}
        return [policy.save(Path(folder) / f"{name}.json") for name, policy in policies.items()]


def calibrate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    task: Task | str = "kv",
    budget: float = 0.01,
    profile: Profile | None = None,
    keep: float = 1.0,
    keep_layers: float = 1.0,
    rate: float = _RATE,
    seed: int = 0,
    text: str | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> CalibrationResult:
    """Learn a policy per head for `model` on `task` while perplexity rises by no more than `budget` (0.01 is 1%).

    The budget holds on plain text at every length of the profile and on the model's own answers to chat questions,
    none of which is trained on. `keep` is the share of the heads that may be modified, `keep_layers` that of the
    layers they may be in: each modified layer adds latency. `text` replaces Python's documentation: its first half to
    train on, the rest to measure on. With `folder` the state is saved there, and `resume` continues from it. No weight
    is changed; afterwards the model is as before. A policy that is applied to it is ignored.
    """
    check_model(model)
    check_tokenizer(tokenizer)
    check_budget(budget)
    for name, share in (("keep", keep), ("keep_layers", keep_layers)):
        if not 0.0 < share <= 1.0:
            reject(name, share, "a share above 0 and up to 1")
    if not rate > 0.0:
        reject("rate", rate, "a number above 0")
    chosen_task = task if isinstance(task, Task) else get_task(task)
    profile = profile or PROFILES["full" if model.device.type == "cuda" else "small"]
    if resume and not (folder and any(state_path(folder, kind).is_file() for kind in profile.kinds)):
        where = "no folder" if folder is None else f"{str(folder)!r}, which has nothing to resume"
        reject("resume", where, "the folder of an interrupted calibration", "leave resume out to start one")
    for size in profile.sizes:
        chosen_task.check_size(size)
    notify = progress or (lambda what, done, total, remark: None)
    layers, heads = grid_of(model)
    started = time.perf_counter()
    with frozen(model):
        notify("reading regularisation data", 0, 0, "")
        half = None if text is None else len(text) // 2
        training_text, held_out_text = (None, None) if text is None else (text[:half], text[half:])
        fillers = training_text or plain_text("calibration")
        prompts = TrainingPrompts(tokenizer, chosen_task, profile, seed, fillers, context_of(model))
        training_data = regularisation_data(model, tokenizer, profile, "calibration", training_text)
        held_out = regularisation_data(model, tokenizer, profile, "validation", held_out_text)
        limit = Budget.of(model, held_out, budget)
        setup = TrainingSetup(model, prompts, training_data, item_losses(model, training_data), limit.nats)
        test_set = prompts.test_set()
        with applied(model, None, skip_unsupported=True):
            nll, accuracy = evaluate_replies(model, test_set)
        amounts = {key: list(v) if isinstance(v, tuple) else v for key, v in dataclasses.asdict(profile).items()}
        amounts["crowds"] = amounts.pop("replications")
        setting: dict[str, Any] = {
            "weights": weights_fingerprint(model),
            "task": chosen_task.name,
            "task_version": chosen_task.version,
            "leash": budget,
            "keep": keep,
            "keep_layers": keep_layers,
            "rate": rate,
            "seed": seed,
            "text": fingerprint(prompts.text),
            "layers": layers,
            "heads": heads,
            "profile": amounts,
        }
        candidates: dict[str, Candidate] = {}
        curves: dict[str, Sequence[Mapping[str, float]]] = {}
        for kind in profile.kinds:
            policy = TrainablePolicy(kind, layers, heads, model.device)
            trainer = Trainer(policy, profile.steps, rate, keep, keep_layers)
            _train(trainer, setup, setting, folder, resume, notify)
            curves[kind] = trainer.curve
            notify(f"measuring {kind}", 0, 0, "")
            candidate = select_best(model, kind, policy.values(), limit, test_set)
            if candidate is not None:
                candidates[kind] = candidate
    if not candidates:
        raise BudgetError(
            f"budget: no policy of kind {', '.join(profile.kinds)} stays within {100 * budget:g}%, however weak; "
            "increase the budget or the steps, or try other kinds"
        )
    setting["seconds"] = {"calibration": time.perf_counter() - started}
    return CalibrationResult(candidates, curves, setting, {"nll": nll, "right": accuracy})


def state_path(folder: str | Path, kind: str) -> Path:
    """The file with the state of one kind, which `resume` reads."""
    return Path(folder) / f"state-{kind}.safetensors"


def _train(
    trainer: Trainer,
    setup: TrainingSetup,
    setting: Mapping[str, Any],
    folder: str | Path | None,
    resume: bool,
    notify: Progress,
) -> None:
    kind = trainer.policy.kind
    path = None if folder is None else state_path(folder, kind)
    about = {"kind": kind, **setting}
    if path is not None and resume:
        trainer.resume(path, about)
    saved = time.monotonic()

    def after_step(now: Trainer) -> None:
        nonlocal saved
        rises = ", ".join(f"{name} {percent(rise):+.1f}%" for name, rise in now.rises.items())
        notify(f"training {kind}", now.step, now.steps, f"loss {now.curve[-1]['nll']:.3f}, {rises}")
        if path is not None and (now.step == now.steps or time.monotonic() - saved > _SAVE_EVERY):
            now.save(path, about)
            saved = time.monotonic()

    trainer.run(setup, after_step)
