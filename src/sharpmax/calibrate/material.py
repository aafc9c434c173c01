"""What a calibration reads: prompts of the task, plain text, and the model's own answers to ordinary questions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sharpmax.calibrate.crowd import crowd
from sharpmax.calibrate.profile import Profile
from sharpmax.models.scoring import Reply, encode, own_answers
from sharpmax.tasks.chat import chat_questions
from sharpmax.tasks.parts import Part
from sharpmax.tasks.prompt import Task
from sharpmax.tasks.text import plain_text, windows

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Everyday", "Lessons", "everyday"]

_LESSONS, _EXAMS = 1_000_003, 2_000_003
"""Where the seeds of prompts begin, so that an evaluation with an ordinary seed meets none of them."""


@dataclass(frozen=True)
class Everyday:
    """What must not suffer: windows of plain text by their length, and the model's own answers."""

    text: dict[int, list[list[int]]]
    answers: list[Reply]


def everyday(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, profile: Profile, part: Part, text: str | None = None
) -> Everyday:
    """The everyday material of one part; `text` takes the place of Python's documentation."""
    ids = tokenizer(plain_text(part) if text is None else text, add_special_tokens=False, verbose=False).input_ids
    tokens = profile.practice_tokens if part == "calibration" else profile.validation_tokens
    questions = chat_questions(part)[: profile.questions]
    return Everyday(
        {n: windows(ids, n, max(tokens // n, 1)) for n in profile.lengths},
        own_answers(model, tokenizer, questions, profile.answer_tokens),
    )


@dataclass(frozen=True)
class Lessons:
    """Prompts of a task for each step, and others to choose by; the same for the same seed."""

    tokenizer: PreTrainedTokenizerBase
    task: Task
    profile: Profile
    seed: int
    text: str
    """Plain text to read before some of the prompts."""

    context: int | None = None
    """The longest input the model is made for, in tokens: a crowd beyond it would stand for nothing."""

    def at(self, step: int) -> list[list[Reply]]:
        """The groups of prompts of one step, each to be read together."""
        rng = random.Random(f"lessons/{self.seed}/{step}")
        seed = _LESSONS * (self.seed + 1) + step
        # Every other step practises the largest size, most of them crowded: what larger ones still will be like.
        size = max(self.profile.sizes) if step % 2 == 0 else rng.choice(self.profile.sizes)
        groups = [self._alone(size, self.profile.prompts, seed, rng.choice(self.profile.crowds))]
        if self.profile.filled:
            size = rng.choice(sorted(self.profile.sizes)[-2:])
            groups.append(self._after_text(size, self.profile.filled, seed, rng))
        return groups

    def exam(self) -> list[Reply]:
        """Prompts of the largest size that no step has seen: alone, most crowded, and after text if steps are so."""
        size, count, seed = max(self.profile.sizes), self.profile.validation_prompts, _EXAMS + self.seed
        times = max(self.profile.crowds)
        ways = 1 + (times > 1) + (self.profile.filled > 0)
        each = count // ways
        exam = self._alone(size, count - (ways - 1) * each, seed)
        if times > 1 and each:
            exam += self._alone(size, each, seed + 1, times)
        if self.profile.filled and each:
            exam += self._after_text(size, each, seed + 2, random.Random(f"exam/{self.seed}"))
        return exam

    def _alone(self, size: int, count: int, seed: int, times: int = 1) -> list[Reply]:
        prompts = self.task.prompts(size, count, seed)
        replies = [encode(self.tokenizer, prompt) for prompt in prompts]
        if self.context is not None:
            times = min(times, max(1, self.context // max(len(reply.ids) for reply in replies)))
        if times == 1:
            return replies
        return [crowd(self.tokenizer, *pair, times) for pair in zip(prompts, replies, strict=True)]

    def _after_text(self, size: int, count: int, seed: int, rng: random.Random) -> list[Reply]:
        prompts = self.task.prompts(size, count, seed + 500_000)
        return [encode(self.tokenizer, prompt, self._piece(self.profile.fillers, rng)) for prompt in prompts]

    def _piece(self, lengths: Sequence[int], rng: random.Random) -> str:
        length = min(rng.choice(lengths), len(self.text))
        start = rng.randrange(len(self.text) - length + 1)
        return self.text[start : start + length] + "\n\n"
