"""Every arm answers every question: batched greedy generation with a cache, kept as it comes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sharpmax.errors import reject
from sharpmax.experiments.clrs.arms import Arm
from sharpmax.experiments.clrs.documents import Question, end_of, fingerprint, replies
from sharpmax.experiments.clrs.store import Said, Shard, Store
from sharpmax.experiments.evaluate.arms import under
from sharpmax.experiments.folder import belongs, disk_watched
from sharpmax.models.language import context_of
from sharpmax.models.scoring import Reply, batches, generated

__all__ = ["Exam"]

Progress = Callable[[int, str], None]
"""Told how many answers there are since the last time, and whose come next."""


@dataclass(frozen=True, eq=False)
class Exam:
    """Arms and the questions put to them."""

    arms: Sequence[Arm]
    questions: Sequence[Question]
    batch_tokens: int
    """Tokens that a device holds at once, answers included."""

    setting: dict[str, Any]
    """What else the answers depend on."""

    _wanted: dict[str, list[Reply]] = field(default_factory=dict, init=False)

    @classmethod
    def fitting(
        cls,
        arms: Sequence[Arm],
        questions: Sequence[Question],
        batch_tokens: int,
        setting: Mapping[str, Any],
        longest: int | None = None,
    ) -> Exam:
        """With the questions of those sizes that every arm has room for; the setting says which sizes are left out.

        With `longest`, questions of more tokens than that, answers included, have no room either. A size is asked for
        as a whole or not at all: its shorter questions alone would be easier ones.
        """
        wanted = _as_tokens(arms, questions)
        out: dict[str, set[int]] = {}
        for arm in arms:
            limits = (context_of(arm.language.model), longest)
            room = min((limit for limit in limits if limit is not None), default=math.inf)
            for one, reply in zip(questions, wanted[arm.name], strict=True):
                if len(reply.ids) > room:
                    out.setdefault(one.algo_name, set()).add(one.length)
        left = [place for place, one in enumerate(questions) if one.length not in out.get(one.algo_name, ())]
        if not left:
            allowed = "sizes whose questions and answers every arm has room for"
            reject("--sizes", sorted({one.length for one in questions}), allowed, "ask for smaller ones")
        said: dict[str, Any] = {"too_long": {name: sorted(sizes) for name, sizes in out.items()}}
        said |= {} if longest is None else {"longest": longest}
        exam = cls(arms, [questions[place] for place in left], batch_tokens, {**setting, **said})
        exam._wanted.update({name: [asked[place] for place in left] for name, asked in wanted.items()})
        return exam

    def identity(self) -> dict[str, Any]:
        """What must be the same for answers to belong together."""
        return {
            "arms": {arm.name: arm.to_dict() for arm in self.arms},
            "questions": {"count": len(self.questions), "fingerprint": fingerprint(self.questions)},
            **self.setting,
        }

    def store(self, folder: Path, shard: Shard, *, resume: bool) -> Store:
        """The answers in `folder`, if they are to these questions by these arms."""
        store = Store(folder, shard)
        begun = store.begun
        mine = store.used if shard.count > 1 else begun
        # What other processes have begun must be of the same run, and is no reason not to begin.
        belongs(folder, self.identity(), used=mine, resume=resume or (begun and not mine))
        store.read()
        return store

    def answer(self, store: Store, folder: Path, shard: Shard, progress: Progress = lambda done, what: None) -> None:
        """Ask what has not been answered yet and is this process's to ask."""
        with disk_watched(folder):
            for arm in self.arms:
                self._ask(arm, store, shard, progress)

    def wanted(self, arm: Arm) -> list[Reply]:
        """Questions with right answers as the tokens of an arm."""
        if not self._wanted:
            self._wanted.update(_as_tokens(self.arms, self.questions))
        return self._wanted[arm.name]

    def work(self, shard: Shard) -> int:
        """How many answers are this process's to get."""
        return sum(len(batch) for arm in self.arms for batch in self._share(arm, shard))

    def missing(self, store: Store) -> int:
        """How many answers are not there."""
        return sum((arm.name, item) not in store for arm in self.arms for item in range(len(self.questions)))

    def _ask(self, arm: Arm, store: Store, shard: Shard, progress: Progress) -> None:
        progress(0, arm.name)
        wanted = self.wanted(arm)
        for batch in self._share(arm, shard):
            left = [item for item in batch if (arm.name, item) not in store]
            if left:
                with under(arm.language.model, arm.policy, lambda text: store.remark(arm.name, text)):
                    found = _answers(arm, [wanted[item] for item in left])
                store.add(arm.name, dict(zip(left, found, strict=True)))
            progress(len(batch), arm.name)

    def _share(self, arm: Arm, shard: Shard) -> list[list[int]]:
        """The batches that are this process's: whole ones, each for the process that has the least to say so far."""
        wanted = self.wanted(arm)
        shares: list[list[list[int]]] = [[] for _ in range(shard.count)]
        tokens = [0] * shard.count
        even = -(-sum(len(one.ids) for one in wanted) // shard.count)  # there must be something for each
        for batch in _batches(wanted, min(self.batch_tokens, even)):
            least = tokens.index(min(tokens))
            shares[least].append(batch)
            tokens[least] += _limit([wanted[item] for item in batch])
        return shares[shard.number - 1]


def _as_tokens(arms: Sequence[Arm], questions: Sequence[Question]) -> dict[str, list[Reply]]:
    """Questions with right answers as the tokens of each arm, cut once for all arms that cut text alike."""
    cut: dict[Any, list[Reply]] = {}
    found = {}
    for arm in arms:
        tokenizer: Any = arm.language.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        key = tokenizer if backend is None else (backend.to_str(), end_of(tokenizer))
        if key not in cut:
            cut[key] = list(replies(tokenizer, questions))
        found[arm.name] = cut[key]
    return found


def _limit(wanted: Sequence[Reply]) -> int:
    """Tokens to be said at most: an answer that is longer than any expected one is wrong, whatever follows."""
    longest = max(one.tokens for one in wanted)
    return longest + longest // 4 + 8


def _batches(wanted: Sequence[Reply], most_tokens: int) -> Iterator[list[int]]:
    """Questions to ask together: of similar length, and with answers of similar length, for which all have to wait.

    Longest first: what a device has no memory for is known at once.
    """
    alike: dict[int, list[int]] = {}
    for place, one in enumerate(wanted):
        alike.setdefault(one.tokens.bit_length(), []).append(place)
    found = [
        [places[i] for i in batch]
        for places in alike.values()
        for batch in batches([wanted[place] for place in places], most_tokens)
    ]
    yield from sorted(found, key=lambda batch: len(wanted[batch[-1]].ids), reverse=True)


def _answers(arm: Arm, wanted: Sequence[Reply]) -> list[Said]:
    tokenizer: Any = arm.language.tokenizer
    end = end_of(tokenizer)
    began = time.time()  # not a monotonic clock: parts may be of several machines, or of days before
    found = generated(arm.language.model, [one.ids[: one.start] for one in wanted], _limit(wanted), end)
    ended = time.time()
    return [
        Said(_text(tokenizer, [token for token in one.ids[one.start :] if token != end]), one.tokens, began, ended)
        for one in found
    ]


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
