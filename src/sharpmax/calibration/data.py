"""Kinds of policy, profiles, training prompts and regularisation data of a calibration."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sharpmax.calibration.replication import replicate_keys
from sharpmax.errors import reject
from sharpmax.models.scoring import Reply, encode, own_answers
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import Constant
from sharpmax.policies.log_linear import LogLinear
from sharpmax.policies.per_head import PerHead
from sharpmax.tasks.chat import chat_questions
from sharpmax.tasks.prompt import Part, Task
from sharpmax.tasks.text import plain_text, windows

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

KINDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "constant": ("level",),
        "length": ("level", "length"),
        "entropy": ("level", "length", "entropy", "entropy2", "entropy_length"),
        "rows": LogLinear.COEFFICIENTS,
    }
)
"""Each kind with the coefficients of `LogLinear` that it learns in every head."""

FOLDABLE = "constant"
"""The kind that can be folded into the weights."""

NOT_NEGATIVE = "length"
"""The coefficient kept at 0 or above: a budget on long text would otherwise teach it to flatten long inputs."""

_DIGITS = 5


def policy_from(kind: str, coefficients: Tensor, strength: float = 1.0) -> PerHead:
    """The policy of coefficients `[layers, heads, those of the kind]`; ln β is multiplied by `strength`.

    Numbers are rounded here, so that what is measured afterwards is what a file will hold.
    """
    grid = (coefficients.detach().cpu().double() * strength).tolist()
    return PerHead(tuple(tuple(_of_head(kind, head) for head in layer) for layer in grid))


def _of_head(kind: str, values: list[float]) -> Policy:
    policy = LogLinear(**{name: round(value, _DIGITS) for name, value in zip(KINDS[kind], values, strict=True)})
    if kind != FOLDABLE:
        return policy
    level = min(max(policy.level, math.log(policy.floor)), math.log(policy.ceiling))
    return Constant(round(math.exp(level), _DIGITS))


@dataclass(frozen=True)
class Profile:
    """The amounts of one calibration. Lengths of text are in tokens, `fillers` in characters."""

    kinds: tuple[str, ...]
    steps: int
    sizes: tuple[int, ...]
    prompts: int  # prompts per step that are read alone
    filled: int  # prompts per step that are read after plain text: few items in a long input
    fillers: tuple[int, ...]
    lengths: tuple[int, ...]
    tokens: int  # plain text per step, in windows of one of the lengths, which take turns
    answers: int  # the model's own answers per step
    questions: int  # chat questions in calibration and in validation each
    answer_tokens: int
    practice_tokens: int  # plain text of each length to train on
    validation_tokens: int  # plain text of each length that the budget is measured on
    validation_prompts: int
    replications: tuple[int, ...] = (1,)  # how often the keys of other items may count


PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        "full": Profile(
            kinds=("constant", "entropy", "rows"), steps=240, sizes=(8, 16, 32, 64), prompts=12,
            replications=(1, 2, 4, 8), filled=4, fillers=(1500, 4000, 8000, 12000), lengths=(2048, 6144), tokens=6144,
            answers=12, questions=56, answer_tokens=64, practice_tokens=122_880, validation_tokens=36_864,
            validation_prompts=64,
        ),
        "small": Profile(
            kinds=("constant",), steps=40, sizes=(8, 16, 32), prompts=3, replications=(1, 2, 4), filled=0, fillers=(),
            lengths=(512,), tokens=512, answers=1, questions=12, answer_tokens=32, practice_tokens=8192,
            validation_tokens=6144, validation_prompts=12,
        ),
    }
)  # fmt: skip
"""The profiles by name."""


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


_TRAINING_SEED, _TEST_SEED = 1_000_003, 2_000_003
"""Where the seeds of prompts begin, so that an evaluation with an ordinary seed meets none of them."""


@dataclass(frozen=True)
class RegularisationData:
    """Windows of plain text by their length, and the model's own chat answers: neither may get worse."""

    text: dict[int, list[list[int]]]
    answers: list[Reply]


def regularisation_data(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, profile: Profile, part: Part, text: str | None = None
) -> RegularisationData:
    """The regularisation data of one part. `text` replaces Python's documentation."""
    ids = tokenizer(plain_text(part) if text is None else text, add_special_tokens=False, verbose=False).input_ids
    tokens = profile.practice_tokens if part == "calibration" else profile.validation_tokens
    questions = chat_questions(part)[: profile.questions]
    return RegularisationData(
        {n: windows(ids, n, max(tokens // n, 1)) for n in profile.lengths},
        own_answers(model, tokenizer, questions, profile.answer_tokens),
    )


@dataclass(frozen=True)
class TrainingPrompts:
    """Prompts of a task for each training step, and a test set to select by; the same for the same seed."""

    tokenizer: PreTrainedTokenizerBase
    task: Task
    profile: Profile
    seed: int
    text: str  # plain text to read before some of the prompts
    context: int | None = None  # the model's longest input in tokens, which key replication must not exceed

    def at(self, step: int) -> list[list[Reply]]:
        """The groups of prompts of one step, each read as one batch."""
        rng = random.Random(f"lessons/{self.seed}/{step}")
        seed = _TRAINING_SEED * (self.seed + 1) + step
        # Every other step trains on the largest size, mostly with replicated keys: closest to longer inputs.
        size = max(self.profile.sizes) if step % 2 == 0 else rng.choice(self.profile.sizes)
        groups = [self._alone(size, self.profile.prompts, seed, rng.choice(self.profile.replications))]
        if self.profile.filled:
            size = rng.choice(sorted(self.profile.sizes)[-2:])
            groups.append(self._after_text(size, self.profile.filled, seed, rng))
        return groups

    def test_set(self) -> list[Reply]:
        """Prompts of the largest size that no step reads: alone, with most replication, after text if trained so."""
        size, count, seed = max(self.profile.sizes), self.profile.validation_prompts, _TEST_SEED + self.seed
        times = max(self.profile.replications)
        ways = 1 + (times > 1) + (self.profile.filled > 0)
        each = count // ways
        replies = self._alone(size, count - (ways - 1) * each, seed)
        if times > 1 and each:
            replies += self._alone(size, each, seed + 1, times)
        if self.profile.filled and each:
            replies += self._after_text(size, each, seed + 2, random.Random(f"exam/{self.seed}"))
        return replies

    def _alone(self, size: int, count: int, seed: int, times: int = 1) -> list[Reply]:
        prompts = self.task.prompts(size, count, seed)
        replies = [encode(self.tokenizer, prompt) for prompt in prompts]
        if self.context is not None:
            times = min(times, max(1, self.context // max(len(reply.ids) for reply in replies)))
        if times == 1:
            return replies
        return [replicate_keys(self.tokenizer, *pair, times) for pair in zip(prompts, replies, strict=True)]

    def _after_text(self, size: int, count: int, seed: int, rng: random.Random) -> list[Reply]:
        prompts = self.task.prompts(size, count, seed + 500_000)
        return [encode(self.tokenizer, prompt, self._filler(rng)) for prompt in prompts]

    def _filler(self, rng: random.Random) -> str:
        length = min(rng.choice(self.profile.fillers), len(self.text))
        start = rng.randrange(len(self.text) - length + 1)
        return self.text[start : start + length] + "\n\n"
