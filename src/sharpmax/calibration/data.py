"""Profiles, training prompts and the domains of a calibration.

Key replication simulates a long list with a short one. In a long list the keys of other items, at more and more
distant positions, share the weight of a head. Repeating these keys in every layer and leaving gaps in the positions
has the same effect: 64 items whose keys count eight times, eight times as far apart, disperse attention as much as 512
items, at the cost of 64.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from sharpmax.calibration.learnable import FREQUENCY, KINDS
from sharpmax.errors import reject
from sharpmax.integrations.transformers.attention import Repeated
from sharpmax.integrations.transformers.interface import repeating
from sharpmax.models.scoring import Judged, Reply, asked_with, encode, judge, own_answers, sampled_texts, special_tokens
from sharpmax.tasks.prompt import Prompt, Task
from sharpmax.tasks.text import chat_questions, plain_text, python_code, windows

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Profile:
    """The amounts of one calibration. Lengths are in tokens."""

    kinds: tuple[str, ...]
    steps: int
    sizes: tuple[int, ...] | None  # None: the sizes at which the model begins to fail
    longest: int  # the longest training prompt when `sizes` is None
    scanned: int  # prompts per format and size to find the sizes
    formats: int  # per step
    prompts: int  # per step and format
    controls: int  # control prompts per step
    lengths: tuple[int, ...]  # of text windows
    sampled: tuple[int, ...]  # lengths of text sampled from the model
    turns: int  # text domains per step; domains take turns
    tokens: int  # per step and text domain
    rows: int  # predictions per window whose divergence is measured in training
    answers: int  # the model's own answers per step
    questions: int  # chat questions for training, and for validation
    answer_tokens: int
    training_windows: int  # per domain
    validation_windows: int
    validation_prompts: int
    replications: tuple[int, ...] = (1,)  # possible numbers of copies of the keys of other items


PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        "full": Profile(
            kinds=(FREQUENCY,), steps=100, sizes=None, longest=4096, scanned=4, formats=12, prompts=2,
            controls=4, lengths=(2048, 6144), sampled=(256, 1024), turns=2, tokens=6144,
            rows=512, answers=16, questions=56, answer_tokens=64, training_windows=48, validation_windows=12,
            validation_prompts=96,
        ),
        "small": Profile(
            kinds=(FREQUENCY,), steps=24, sizes=None, longest=384, scanned=1, formats=1, prompts=2, controls=1,
            replications=(1, 1, 2), lengths=(512,), sampled=(128,), turns=1, tokens=512, rows=256, answers=2,
            questions=12, answer_tokens=32, training_windows=12, validation_windows=3, validation_prompts=13,
        ),
    }
)  # fmt: skip
"""The profiles by name."""


def profile_for(name: str, **changes: Any) -> Profile:
    """A profile by name, with `changes` that are not None."""
    if name not in PROFILES:
        reject("profile", repr(name), f"one of {list(PROFILES)}")
    profile = replace(PROFILES[name], **{key: value for key, value in changes.items() if value is not None})
    for kind in profile.kinds:
        if kind not in KINDS:
            reject("kinds", repr(kind), f"some of {list(KINDS)}")
    if profile.steps < 1:
        reject("steps", profile.steps, "1 or more")
    if profile.sizes == ():
        reject("sizes", "none", "one or more numbers of items")
    return profile


_TRAINING_SEED, _VALIDATION_SEED = 1_000_003, 2_000_003
"""The first seeds of prompts, so that an evaluation with a small seed has other prompts."""

HELD_OUT = "code"
"""The default domain that is not trained on."""

CHAT, SAMPLED = "chat", "sampled"


@dataclass(frozen=True)
class Domain:
    """Text of one kind and length, on which the divergence has to stay within the budget."""

    name: str
    trained: bool  # whether training reduces its divergence
    training: tuple[Reply, ...]
    validation: tuple[Reply, ...]


def domains_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    profile: Profile,
    texts: Mapping[str, str],
    held_out: str,
    seed: int,
) -> list[Domain]:
    """Text sampled from the model, Python's documentation and code, `texts`, and the model's own chat answers.

    The first half of each of `texts` is for training, the rest for validation.
    """
    parts = {
        "docs": (plain_text("calibration"), plain_text("validation")),
        "code": (python_code("calibration"), python_code("validation")),
        **{name: (text[: len(text) // 2], text[len(text) // 2 :]) for name, text in texts.items()},
    }
    if held_out not in (*parts, SAMPLED, CHAT):
        reject("held_out", repr(held_out), f"one of {[*parts, SAMPLED, CHAT]}")
    amounts, found = (profile.training_windows, profile.validation_windows), []
    sampled = sampled_texts(model, tokenizer, sum(amounts), max(profile.sampled), seed)
    for length in profile.sampled:
        cut = [Reply(tuple(ids[:length]), 1) for ids in sampled]
        first, rest = tuple(cut[: amounts[0]]), tuple(cut[amounts[0] :])
        found.append(Domain(f"{SAMPLED}/{length}", held_out != SAMPLED, first, rest))
    for name, both in parts.items():
        for length in profile.lengths:
            cuts = [_windows(tokenizer, text, length, amount) for text, amount in zip(both, amounts, strict=True)]
            found.append(Domain(f"{name}/{length}", held_out != name, *cuts))
    questions = [chat_questions(part)[: profile.questions] for part in ("calibration", "validation")]
    answers = [tuple(own_answers(model, tokenizer, part, profile.answer_tokens)) for part in questions]
    return [*found, Domain(CHAT, held_out != CHAT, *answers)]


def _windows(tokenizer: PreTrainedTokenizerBase, text: str, length: int, most: int) -> tuple[Reply, ...]:
    """At most `most` windows of `length` tokens, spread evenly over a text; only parts of a long text are tokenized."""
    size = 12 * length  # in characters, more than `length` tokens have
    parts = [text[i * len(text) // most :][:size] for i in range(most)] if len(text) > size * most else [text]
    ids = [tokenizer(part, add_special_tokens=False, verbose=False).input_ids for part in parts]
    before = special_tokens(tokenizer)[0]
    cut = [one for tokens in ids for one in windows(tokens, length, 1 if len(parts) > 1 else most, before)]
    return tuple(Reply(tuple(one), 1) for one in cut)


def sizes_for(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[Task], profile: Profile
) -> tuple[int, ...]:
    """The sizes to train at: up to four, ending with the first whose accuracy is below 15% or the last that fits."""
    found: list[int] = []
    for size in (4 * 2**i for i in range(9)):
        replies = [
            encode(tokenizer, prompt)
            for task in tasks if task.least <= size <= task.most
            for prompt in task.prompts(size, profile.scanned, _VALIDATION_SEED)
        ]  # fmt: skip
        if not replies or max(len(reply.ids) for reply in replies) > profile.longest:
            break
        found.append(size)
        if sum(one.right for one in judge(model, replies)) < 0.15 * len(replies):
            break
    if not found:
        shortest = f"prompts of more than {profile.longest} tokens"
        reject("task", shortest, f"a task whose smallest prompts have up to {profile.longest} tokens")
    return tuple(found[-4:])


@dataclass(frozen=True)
class TrainingPrompts:
    """Training prompts for each step and validation prompts, determined by the seed."""

    tokenizer: PreTrainedTokenizerBase
    tasks: tuple[Task, ...]
    controls: tuple[Task, ...]
    profile: Profile  # with sizes
    seed: int
    context: int | None = None  # the model's longest input in tokens, which key replication must not exceed

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes to train at."""
        return self.profile.sizes or ()

    def at(self, step: int) -> list[Reply]:
        """The prompts of one step: some tasks, and controls."""
        rng = random.Random(f"lessons/{self.seed}/{step}")
        seed = _TRAINING_SEED * (self.seed + 1) + step
        replies: list[Reply] = []
        for task in rng.sample(self.tasks, min(self.profile.formats, len(self.tasks))):
            # Every other step trains on the largest size, which is closest to longer inputs.
            size = max(self.sizes) if step % 2 == 0 else rng.choice(self.sizes)
            replies += self._prompts(task, size, self.profile.prompts, seed, rng.choice(self.profile.replications))
        if self.controls and self.profile.controls:
            task, size = rng.choice(self.controls), rng.choice(self.sizes)
            # An item of a control can be a paragraph: halve the size until the prompts fit.
            while size > 1 and len(encode(self.tokenizer, task.prompts(size, 1, 0)[0]).ids) > self.profile.longest:
                size //= 2
            replies += self._prompts(task, size, self.profile.controls, seed)
        return replies

    def validation(self) -> list[Reply]:
        """Prompts of the largest size that no step trains on, without replication and with the most replication."""
        times = sorted({1, max(self.profile.replications)})
        each = max(1, self.profile.validation_prompts // (len(times) * len(self.tasks)))
        seed = _VALIDATION_SEED + 1 + self.seed
        replies: list[Reply] = []
        for factor, task in itertools.product(times, self.tasks):
            replies += self._prompts(task, max(self.sizes), each, seed + factor, factor)
        return replies

    def _prompts(self, task: Task, size: int, count: int, seed: int, times: int = 1) -> list[Reply]:
        prompts = task.prompts(size, count, seed)
        replies = [encode(self.tokenizer, prompt) for prompt in prompts]
        if self.context is not None:
            times = min(times, max(1, self.context // max(len(reply.ids) for reply in replies)))
        if times == 1:
            return replies
        return [replicate_keys(self.tokenizer, *pair, times) for pair in zip(prompts, replies, strict=True)]


def replicate_keys(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, reply: Reply, times: int) -> Reply:
    """Count the keys of other items `times` times: all lines but the first, the last and those of the evidence.

    The tokens of a line keep consecutive positions; the gap for the copies follows the line. If items are not lines, or
    no line contains the answer, every token counts once.
    """
    asked = asked_with(tokenizer, prompt)
    at = asked.index(prompt.user)
    lines = prompt.user.split("\n")
    wanted = (prompt.evidence or prompt.opening + prompt.answer).split("\n")
    places = [i for i in range(len(lines)) if lines[i : i + len(wanted)] == wanted]
    item = [0] * (len(asked) + len(prompt.answer) + 1)  # per character: the number of its item; 0 is not replicated
    for number, line in enumerate(lines if places else ()):
        if 0 < number < len(lines) - 1 and not places[0] <= number < places[0] + len(wanted):
            item[at : at + len(line) + 1] = [number] * (len(line) + 1)
        at += len(line) + 1
    spans = tokenizer(
        asked + prompt.answer, add_special_tokens=tokenizer.chat_template is None, return_offsets_mapping=True
    )["offset_mapping"]
    items = [item[start] if end > start else 0 for start, end in spans]
    counts = tuple(times if one else 1 for one in items)
    positions, gap = [], 0
    for index, one in enumerate(items):
        if index and one != items[index - 1]:
            gap = sum(counts[:index]) - index
        positions.append(index + gap)
    return Reply(reply.ids, reply.start, tuple(positions), counts)


@contextmanager
def replicated(model: PreTrainedModel, replies: Sequence[Reply]) -> Iterator[None]:
    """Inside the block, replicate the keys of one batch of these replies, in this order, in every layer."""
    if all(reply.times is None for reply in replies):
        yield
        return
    rows = [
        torch.arange(len(reply.ids)).repeat_interleave(torch.tensor(reply.times or [1] * len(reply.ids)))
        for reply in replies
    ]
    keys = Repeated(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1))
    with repeating(model, lambda layer: keys):
        yield


def judge_replicated(model: PreTrainedModel, replies: Sequence[Reply]) -> list[Judged]:
    """`judge`, with replicated keys for replies that have `times`."""
    plain = iter(judge(model, [reply for reply in replies if reply.times is None]))
    judged = []
    for reply in replies:
        if reply.times is None:
            judged.append(next(plain))
        else:
            with replicated(model, [reply]):
                judged += judge(model, [reply])
    return judged
