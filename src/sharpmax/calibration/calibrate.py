"""`calibrate`: learn one rule per head that improves accuracy within a budget. No weight changes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sharpmax.calibration.budget import (
    HELD_OUT_FACTOR,
    Candidate,
    TrainingSetup,
    check_budget,
    evaluate_replies,
    percent,
    select_best,
)
from sharpmax.calibration.data import HELD_OUT, PROFILES, Profile, TrainingPrompts, domains_of, sizes_for
from sharpmax.calibration.learnable import BOTH, FOLDABLE, FREQUENCY, TrainablePolicy, frequencies_of, grid_of
from sharpmax.calibration.trainer import Trainer, checkpointed, frozen, plan_memory
from sharpmax.errors import SharpmaxError, reject
from sharpmax.integrations.transformers.application import applied
from sharpmax.integrations.transformers.interface import modules_of
from sharpmax.integrations.transformers.projections import has_one_gain
from sharpmax.integrations.transformers.support import check_model
from sharpmax.lazy import require
from sharpmax.models.language import check_tokenizer, context_of, weights_fingerprint
from sharpmax.policies.per_head import PerHead
from sharpmax.tasks.formats import CONTROLS
from sharpmax.tasks.prompt import Task
from sharpmax.tasks.registry import get_tasks
from sharpmax.tasks.text import fingerprint, plain_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Progress = Callable[[str, int, int, str], None]
"""Called with a description of the work, the completed steps, the number of steps, and a remark."""

DEFAULT_TASKS = "training,control"
"""Many formats, and control tasks that must not get worse."""

_SAVE_EVERY = 20.0  # seconds


class BudgetError(SharpmaxError, ValueError):
    """No learned policy stays within the budget."""


@dataclass(frozen=True, repr=False)
class CalibrationResult:
    """The best policy, the best that can be folded, and every candidate."""

    candidates: Mapping[str, Candidate]
    """By kind; kinds without a policy within the budget are absent."""

    curves: Mapping[str, Sequence[Mapping[str, float]]]
    """By kind: loss and divergence on each domain after every training step."""

    setting: Mapping[str, Any]
    """All settings, with the keys of saved results."""

    before: Mapping[str, float]
    """The baseline on the validation prompts: `nll`, and accuracy as `right`."""

    prompts: int
    """The number of validation prompts."""

    @property
    def chosen(self) -> Candidate:
        """The candidate with the lowest loss on the validation prompts."""
        return min(self.candidates.values(), key=lambda one: one.nll)

    @property
    def policy(self) -> PerHead:
        """The policy to use."""
        return self.chosen.policy

    @property
    def foldable(self) -> Candidate | None:
        """The candidate with the lowest loss among those that can be folded into the weights, if there is one."""
        foldable = (one for one in self.candidates.values() if one.foldable)
        return min(foldable, key=lambda one: one.nll, default=None)

    def show(self) -> None:
        """Print the baseline and one line per candidate."""
        print(self)

    def __str__(self) -> str:
        lines = [f"baseline: accuracy {self.before['right']:.1%}"]
        for kind, one in self.candidates.items():
            costs = ", ".join(f"{name} {change.kl:.4f}" for name, change in one.changes.items())
            mark = " (chosen)" if one is self.chosen else ""
            lines.append(f"{kind}: accuracy {one.accuracy:.1%}, {one.modified_heads} heads modified, KL {costs}{mark}")
        return "\n".join(lines)

    __repr__ = __str__

    def to_frame(self) -> Any:
        """Return a pandas frame with a row for the baseline and for each candidate."""
        pandas = require("pandas", "frame", "CalibrationResult.to_frame")
        rows = [{"kind": "baseline", "accuracy": self.before["right"], "nll": self.before["nll"], "modified_heads": 0}]
        for kind, one in self.candidates.items():
            row = {"kind": kind, "accuracy": one.accuracy, "nll": one.nll, "modified_heads": one.modified_heads}
            costs = {f"kl_{name}": change.kl for name, change in one.changes.items()}
            costs |= {f"perplexity_rise_{name}": percent(change.rise) for name, change in one.changes.items()}
            rows.append({**row, **costs, "strength": one.strength, "chosen": one is self.chosen})
        return pandas.DataFrame(rows)

    def save(self, folder: str | Path) -> list[Path]:
        """Write the chosen policy and each candidate as files that `sharpmax.load_policy` reads."""
        policies = {"policy": self.policy} | {f"policy-{kind}": one.policy for kind, one in self.candidates.items()}
        return [policy.save(Path(folder) / f"{name}.json") for name, policy in policies.items()]


def calibrate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    task: Task | str = DEFAULT_TASKS,
    budget: float = 0.01,
    profile: Profile | None = None,
    keep: float = 1.0,
    keep_layers: float = 1.0,
    rate: float = 0.02,
    seed: int = 0,
    texts: Mapping[str, str] | None = None,
    held_out: str = HELD_OUT,
    memory: int | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> CalibrationResult:
    """Learn a policy per head for `model` whose KL divergence stays within `budget` nats per token.

    The budget limits KL(baseline ‖ policy) on each domain: text sampled from the model, Python's documentation and
    code, the model's own chat answers, and `texts`, by name. It is measured on text that is not trained on. The domain
    `held_out` is not trained on at all; its limit is 1.3 times the budget. `task` is a task or the names of tasks
    (`get_tasks`); the default is many formats and controls, at the sizes where the model begins to fail. At most the
    share `keep` of the heads is modified, in at most the share `keep_layers` of the layers; each modified layer adds
    latency. `memory` is the approximate number of bytes that training may use. The state is saved in `folder`, and
    `resume` continues from it. No weight changes, and afterwards the model is as before. A policy applied to it is
    ignored.

    Raises `BudgetError` if no policy stays within the budget.
    """
    check_model(model)
    check_tokenizer(tokenizer)
    check_budget(budget)
    for name, share in (("keep", keep), ("keep_layers", keep_layers)):
        if not 0.0 < share <= 1.0:
            reject(name, share, "a share above 0 and up to 1")
    if not rate > 0.0:
        reject("rate", rate, "a number above 0")
    every = (task,) if isinstance(task, Task) else get_tasks(task)
    tasks, controls = tuple(one for one in every if one not in CONTROLS), tuple(one for one in every if one in CONTROLS)
    if not tasks:
        reject("task", repr(task), "one or more tasks that are not controls")
    profile = profile or PROFILES["full" if model.device.type == "cuda" else "small"]
    if resume and not (folder and any(state_path(folder, kind).is_file() for kind in profile.kinds)):
        where = "no folder" if folder is None else f"{str(folder)!r}, which has nothing to resume"
        reject("resume", where, "the folder of an interrupted calibration", "leave resume out to start one")
    for one, size in itertools.product(tasks, profile.sizes or ()):
        one.check_size(size)
    notify = progress or (lambda what, done, total, remark: None)
    layers, heads = grid_of(model)
    if {FREQUENCY, BOTH} & set(profile.kinds) and not frequencies_of(model):
        kinds = tuple(dict.fromkeys("constant" if kind in (FREQUENCY, BOTH) else kind for kind in profile.kinds))
        notify("no rotary frequency for every two dimensions of a head: constants instead", 0, 0, "")
        profile = replace(profile, kinds=kinds)
    started = time.perf_counter()
    with frozen(model):
        notify("finding sizes", 0, 0, "")
        profile = replace(profile, sizes=profile.sizes or sizes_for(model, tokenizer, tasks, profile))
        prompts = TrainingPrompts(tokenizer, tasks, controls, profile, seed, context_of(model))
        notify("sampling text from the model and reading other text", 0, 0, "")
        domains = domains_of(model, tokenizer, profile, texts or {}, held_out, seed)
        replies = [*prompts.at(0), *prompts.at(1), *(reply for domain in domains for reply in domain.training)]
        longest = max(profile.longest, *(len(reply.ids) for reply in replies))
        most_tokens, checkpoint, estimate = plan_memory(model, longest, memory)
        notify(f"sizes {', '.join(map(str, prompts.sizes))}; memory about {estimate / 2**30:.1f} GiB", 0, 0, "")
        setup = TrainingSetup(model, prompts, domains, budget, most_tokens)
        validation = prompts.validation()
        with applied(model, None, skip_unsupported=True):
            nll, accuracy = evaluate_replies(model, validation)
        setting: dict[str, Any] = {
            "weights": weights_fingerprint(model),
            "task": ",".join(dict.fromkeys(one.name.partition("/")[0] for one in every)),
            "task_version": max(one.version for one in every),
            "budget": budget,
            "held_out": held_out,
            "held_out_factor": HELD_OUT_FACTOR,
            "keep": keep,
            "keep_layers": keep_layers,
            "rate": rate,
            "seed": seed,
            "text": fingerprint("".join(text for _, text in sorted((texts or {}).items())) + plain_text("calibration")),
            "layers": layers,
            "heads": heads,
            "profile": {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(profile).items()},
        }
        candidates: dict[str, Candidate] = {}
        curves: dict[str, Sequence[Mapping[str, float]]] = {}
        for kind in profile.kinds:
            shared = kind in FOLDABLE and any(has_one_gain(one) for one in modules_of(model))
            trainer = Trainer(TrainablePolicy(model, kind, shared=shared), profile.steps, rate, keep, keep_layers)
            with checkpointed(model) if checkpoint else nullcontext():
                _train(trainer, setup, {"kind": kind, **setting}, folder, resume, notify)
            curves[kind] = trainer.curve
            notify(f"measuring {kind}", 0, 0, "")
            candidate = select_best(setup, kind, trainer.policy.values(), validation)
            if candidate is not None:
                candidates[kind] = candidate
    if not candidates:
        raise BudgetError(
            f"budget: no policy of kind {', '.join(profile.kinds)} stays within {budget:g} nats per token, however "
            "weak; increase the budget or the steps, or try other kinds"
        )
    setting["seconds"] = {"calibration": time.perf_counter() - started}
    setting["memory"] = torch.cuda.max_memory_allocated(model.device) if model.device.type == "cuda" else None
    return CalibrationResult(candidates, curves, setting, {"nll": nll, "right": accuracy}, len(validation))


def state_path(folder: str | Path, kind: str) -> Path:
    """The file with the state of one kind, which `resume` reads."""
    return Path(folder) / f"state-{kind}.safetensors"


def _train(
    trainer: Trainer,
    setup: TrainingSetup,
    about: Mapping[str, Any],
    folder: str | Path | None,
    resume: bool,
    notify: Progress,
) -> None:
    kind = trainer.policy.kind
    path = None if folder is None else state_path(folder, kind)
    if path is not None and resume:
        trainer.resume(path, about)
    saved = time.monotonic()

    def after_step(now: Trainer) -> None:
        nonlocal saved
        worst = max(now.divergences.values(), default=0.0)
        notify(f"training {kind}", now.step, now.steps, f"loss {now.curve[-1]['nll']:.3f}, KL up to {worst:.4f}")
        if path is not None and (now.step == now.steps or time.monotonic() - saved > _SAVE_EVERY):
            now.save(path, about)
            saved = time.monotonic()

    trainer.run(setup, after_step)
