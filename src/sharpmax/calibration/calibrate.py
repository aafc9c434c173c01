"""`calibrate`: learn one rule per head that improves accuracy within a budget. No weight changes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharpmax.calibration.budget import Candidate, Leash, check_leash, examined, item_losses, percent, strongest
from sharpmax.calibration.data import PROFILES, Lessons, Profile, everyday
from sharpmax.calibration.trainer import Course, Descent, Live, grid_of, held_still
from sharpmax.errors import SharpmaxError, reject
from sharpmax.integrations.transformers.application import applied
from sharpmax.integrations.transformers.support import check_model
from sharpmax.models.language import check_tokenizer, context_of, weights_fingerprint
from sharpmax.policies.per_head import PerHead
from sharpmax.tasks.prompt import Task
from sharpmax.tasks.registry import get_task
from sharpmax.tasks.text import fingerprint, plain_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class CalibrationResult:
    """What was learned: the best policy, the best that can be folded, and all candidates."""

    candidates: Mapping[str, Candidate]
    """By kind, for the kinds that keep to the leash."""

    curves: Mapping[str, Sequence[Mapping[str, float]]]
    setting: Mapping[str, Any]
    before: Mapping[str, float]
    """The exam without any policy: `nll` and the share `right`."""

    @property
    def chosen(self) -> Candidate:
        """The candidate with the lowest loss on prompts that no step has seen."""
        return min(self.candidates.values(), key=lambda one: one.nll)

    @property
    def policy(self) -> PerHead:
        """The policy to use."""
        return self.chosen.policy

    @property
    def foldable(self) -> Candidate | None:
        """The candidate that can be folded into the weights."""
        return next((one for one in self.candidates.values() if one.foldable), None)

    def show(self) -> None:
        """Print the candidates, a line each."""
        print(self)

    def __str__(self) -> str:
        lines = [f"as it comes: {100 * self.before['right']:.1f}% right"]
        for kind, one in self.candidates.items():
            rises = ", ".join(f"{name} {percent(rise):+.2f}%" for name, rise in one.rises.items())
            mark = " (chosen)" if one is self.chosen else ""
            lines.append(f"{kind}: {100 * one.right:.1f}% right, {one.touched} heads, perplexity {rises}{mark}")
        return "\n".join(lines)

    def save(self, folder: str | Path) -> list[Path]:
        """Write the chosen policy and each candidate as files that `sharpmax.load_policy` reads."""
        written = [self.policy.save(Path(folder) / "policy.json")]
        return written + [
            one.policy.save(Path(folder) / f"policy-{kind}.json") for kind, one in self.candidates.items()
        ]


Progress = Callable[[str, int, int, str], None]
"""Told what is being done, how many steps of how many are done, and a remark."""

_RATE = 0.03
_SAVE_EVERY = 20.0


class LeashError(SharpmaxError, ValueError):
    """No policy that was learned keeps to the leash."""


def calibrate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    task: Task | str = "kv",
    leash: float = 0.01,
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
    """Learn a policy per head for `model` on `task`, while perplexity rises by no more than `leash` (0.01 is 1%).

    The leash holds on plain text at every length of the profile and on the model's own answers to ordinary
    questions, none of which is seen while learning. `keep` is the share of the heads that may be touched, and
    `keep_layers` that of the layers they may be in: a policy costs time in every layer it touches. `text` takes the
    place of Python's documentation: its first half to learn on, the rest to measure on. With `folder` the state
    is kept there, and `resume` goes on from it. No weight is changed, and afterwards the model is as it was; a policy
    that it has takes no part.
    """
    check_model(model)
    check_tokenizer(tokenizer)
    check_leash(leash)
    for name, share in (("keep", keep), ("keep_layers", keep_layers)):
        if not 0.0 < share <= 1.0:
            reject(name, share, "a share above 0 and up to 1")
    if not rate > 0.0:
        reject("rate", rate, "a number above 0")
    chosen_task = task if isinstance(task, Task) else get_task(task)
    device = model.device
    profile = profile or PROFILES["full" if device.type == "cuda" else "small"]
    if resume and not (folder and any(state_path(folder, kind).is_file() for kind in profile.kinds)):
        where = "no folder" if folder is None else f"{str(folder)!r}, which has nothing to resume"
        reject("resume", where, "the folder of an interrupted calibration", "leave resume out to start one")
    for size in profile.sizes:
        chosen_task.check_size(size)
    tell = progress or (lambda what, done, total, remark: None)
    layers, heads = grid_of(model)
    started = time.perf_counter()
    with held_still(model):
        tell("reading everyday text", 0, 0, "")
        learn_text, hold_text = _halves(text)
        before_lists = learn_text or plain_text("calibration")
        lessons = Lessons(tokenizer, chosen_task, profile, seed, before_lists, context_of(model))
        practice = everyday(model, tokenizer, profile, "calibration", learn_text)
        held = Leash.of(model, everyday(model, tokenizer, profile, "validation", hold_text), leash)
        course = Course(model, lessons, practice, item_losses(model, practice), held.room)
        exam = lessons.exam()
        with applied(model, None, skip_unsupported=True):
            before = dict(zip(("nll", "right"), examined(model, exam), strict=True))
        setting: dict[str, Any] = {
            "weights": weights_fingerprint(model),
            "task": chosen_task.name,
            "task_version": chosen_task.version,
            "leash": leash,
            "keep": keep,
            "keep_layers": keep_layers,
            "rate": rate,
            "seed": seed,
            "text": fingerprint(lessons.text),
            "layers": layers,
            "heads": heads,
            "profile": {key: list(v) if isinstance(v, tuple) else v for key, v in dataclasses.asdict(profile).items()},
        }
        candidates: dict[str, Candidate] = {}
        curves: dict[str, Sequence[Mapping[str, float]]] = {}
        for kind in profile.kinds:
            descent = Descent(Live(kind, layers, heads, device), profile.steps, rate, keep, keep_layers)
            _descend(descent, course, setting, folder, resume, tell)
            curves[kind] = descent.curve
            tell(f"measuring {kind}", 0, 0, "")
            found = strongest(model, kind, descent.live.values(), held, exam)
            if found is not None:
                candidates[kind] = found
    if not candidates:
        raise LeashError(
            f"leash: got {100 * leash:g}%, which no policy of kind {', '.join(profile.kinds)} keeps to, however weak; "
            "allow a longer one, more --steps or another --kinds"
        )
    setting["seconds"] = {"calibration": time.perf_counter() - started}
    return CalibrationResult(candidates, curves, setting, before)


def state_path(folder: str | Path, kind: str) -> Path:
    """The file of the state of one kind, from which a calibration goes on."""
    return Path(folder) / f"state-{kind}.safetensors"


def _descend(
    descent: Descent,
    course: Course,
    setting: Mapping[str, Any],
    folder: str | Path | None,
    resume: bool,
    tell: Progress,
) -> None:
    kind = descent.live.kind
    path = None if folder is None else state_path(folder, kind)
    about = {"kind": kind, **setting}
    if path is not None and resume:
        descent.resume(path, about)
    saved = time.monotonic()

    def after_step(now: Descent) -> None:
        nonlocal saved
        rises = ", ".join(f"{name} {percent(rise):+.1f}%" for name, rise in now.rises.items())
        tell(f"learning {kind}", now.step, now.steps, f"loss {now.curve[-1]['nll']:.3f}, {rises}")
        due = now.step == now.steps or time.monotonic() - saved > _SAVE_EVERY
        if path is not None and due:
            now.save(path, about)
            saved = time.monotonic()

    descent.run(course, after_step)


def _halves(text: str | None) -> tuple[str | None, str | None]:
    return (None, None) if text is None else (text[: len(text) // 2], text[len(text) // 2 :])
