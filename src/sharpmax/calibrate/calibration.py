"""`sharpmax.calibrate`: a policy per head that answers better and keeps to a leash, without touching a weight."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharpmax.calibrate.crowd import judge_crowded
from sharpmax.calibrate.descent import Course, Descent
from sharpmax.calibrate.kinds import KINDS
from sharpmax.calibrate.leash import Leash, check_leash, item_losses, percent
from sharpmax.calibrate.live import Live, grid_of
from sharpmax.calibrate.material import Lessons, everyday
from sharpmax.calibrate.profile import PROFILES, Profile
from sharpmax.calibrate.still import held_still
from sharpmax.calibrate.strength import Candidate, strongest
from sharpmax.errors import SharpmaxError, reject
from sharpmax.hf import applied
from sharpmax.models.language import weights_fingerprint
from sharpmax.policies import PerHead
from sharpmax.tasks.prompt import Task
from sharpmax.tasks.registry import get_task
from sharpmax.tasks.text import fingerprint, plain_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Calibration", "LeashError", "calibrate", "profile_for"]

Progress = Callable[[str, int, int, str], None]
"""Told what is being done, how many steps of how many are done, and a remark."""

_RATE = 0.03
_SAVE_EVERY = 20.0


class LeashError(SharpmaxError, ValueError):
    """No policy that was learned keeps to the leash."""


@dataclass(frozen=True)
class Calibration:
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

    def show(self) -> str:
        """The candidates, a line each."""
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


def profile_for(name: str, **changes: Any) -> Profile:
    """A profile by name, with some of its amounts changed."""
    if name not in PROFILES:
        reject("profile", repr(name), f"one of {list(PROFILES)}")
    profile = dataclasses.replace(PROFILES[name], **{key: value for key, value in changes.items() if value is not None})
    for kind in profile.kinds:
        if kind not in KINDS:
            reject("kinds", repr(kind), f"some of {list(KINDS)}")
    if profile.steps < 1:
        reject("steps", profile.steps, "1 or more")
    if not profile.sizes:
        reject("sizes", "none", "one or more numbers of items")
    return profile


def calibrate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    task: Task | str = "kv",
    leash: float = 0.01,
    profile: Profile | None = None,
    keep: float = 1.0,
    rate: float = _RATE,
    seed: int = 0,
    text: str | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> Calibration:
    """Learn a policy per head for `model` on `task`, while perplexity rises by no more than `leash` (0.01 is 1%).

    The leash holds on plain text at every length of the profile and on the model's own answers to ordinary
    questions, none of which is seen while learning. `keep` is the share of heads that may be touched. `text` takes
    the place of Python's documentation: its first half to learn on, the rest to measure on. With `folder` the state
    is kept there, and `resume` goes on from it. No weight is changed, and afterwards the model is as it was; a policy
    that it has takes no part.
    """
    check_leash(leash)
    if not 0.0 < keep <= 1.0:
        reject("keep", keep, "a share of the heads above 0 and up to 1")
    if not rate > 0.0:
        reject("rate", rate, "a number above 0")
    chosen_task = get_task(task) if isinstance(task, str) else task
    device = model.device
    profile = profile or PROFILES["full" if device.type == "cuda" else "small"]
    for size in profile.sizes:
        chosen_task.check_size(size)
    tell = progress or (lambda what, done, total, remark: None)
    layers, heads = grid_of(model)
    started = time.perf_counter()
    with held_still(model):
        tell("reading everyday text", 0, 0, "")
        learn_text, hold_text = _halves(text)
        lessons = Lessons(tokenizer, chosen_task, profile, seed, learn_text or plain_text("calibration"))
        practice = everyday(model, tokenizer, profile, "calibration", learn_text)
        held = Leash.of(model, everyday(model, tokenizer, profile, "validation", hold_text), leash)
        course = Course(model, lessons, practice, item_losses(model, practice), held.room)
        exam = lessons.exam()
        with applied(model, None):
            judged = judge_crowded(model, exam)
        before = {
            "nll": sum(one.nll for one in judged) / len(judged),
            "right": sum(one.right for one in judged) / len(judged),
        }
        setting: dict[str, Any] = {
            "weights": weights_fingerprint(model),
            "task": chosen_task.name,
            "task_version": chosen_task.version,
            "leash": leash,
            "keep": keep,
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
            descent = Descent(Live(kind, layers, heads, device), profile.steps, rate, keep)
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
    return Calibration(candidates, curves, setting, before)


def _descend(
    descent: Descent,
    course: Course,
    setting: Mapping[str, Any],
    folder: str | Path | None,
    resume: bool,
    tell: Progress,
) -> None:
    kind = descent.live.kind
    path = None if folder is None else Path(folder) / f"state-{kind}.safetensors"
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
