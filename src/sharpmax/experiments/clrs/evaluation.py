"""Every variant answers every question by batched greedy generation."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from sharpmax.errors import FileFormatError, reject
from sharpmax.experiments.clrs.data import Question, end_of, fingerprint, replies
from sharpmax.experiments.clrs.training import MODEL
from sharpmax.experiments.evaluate.plan import modified_heads, shape_of, under
from sharpmax.experiments.run_folder import RUN, belongs, disk_watched, read_run
from sharpmax.files import append_bytes, display_name, parse_json
from sharpmax.models.language import LanguageModel, context_of, load_language_model, weights_fingerprint
from sharpmax.models.scoring import Reply, batches, generated
from sharpmax.policies.base import Policy
from sharpmax.policies.registry import BESIDE, load_policy


@dataclass(frozen=True, eq=False)
class Arm:
    """A model and the policy it answers under."""

    name: str
    language: LanguageModel
    policy: Policy | None
    run: dict[str, Any] | None
    """The settings it was trained with, where `sharpmax clrs train` did."""

    def to_dict(self) -> dict[str, Any]:
        """What results say of it."""
        layers, heads = shape_of(self.language.model)
        run = self.run or {}
        return {
            "model": run.get("model", self.name),
            "trained": self.run is not None,
            "steps": run.get("steps"),
            "weights": weights_fingerprint(self.language.model),
            "policy": None if self.policy is None else self.policy.to_dict(),
            "describe": "no policy" if self.policy is None else self.policy.describe(),
            "touched": modified_heads(self.policy, layers, heads),
        }


def arms_named(words: Sequence[str], *, device: str, dtype: str) -> list[Arm]:
    """The arms a user asked for, each with a name of its own."""
    arms: list[Arm] = []
    for word in words:
        folder = Path(word)
        trained = (folder / RUN).is_file()
        place = folder / MODEL if trained else folder
        if trained and not place.is_dir():
            reject("model", repr(word), "a finished training", "go on with it: sharpmax clrs train … --resume")
        language = load_language_model(str(place) if place.is_dir() else word, device=device, dtype=dtype)
        policy = load_policy(place / BESIDE) if (place / BESIDE).is_file() else None
        name = display_name(word)
        known = [one.name for one in arms]
        numbered = (f"{name} ({number})" for number in range(2, len(known) + 3))
        name = name if name not in known else next(one for one in numbered if one not in known)
        arms.append(Arm(name, language, policy, read_run(folder) if trained else None))
    return arms


_FILES = "answers*.jsonl"


@dataclass(frozen=True)
class Shard:
    """One of several processes that share the work: the `number`th of `count`."""

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """From "2/4".

        >>> Shard.parse("2/4")
        Shard(number=2, count=4)
        """
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip())
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            reject("--shard", repr(text), "i/n with i from 1 to n, as 1/4")
        return cls(int(found[1]), int(found[2]))

    @property
    def file_name(self) -> str:
        """Where its answers are."""
        return "answers.jsonl" if self.count == 1 else f"answers-{self.name}.jsonl"

    @property
    def name(self) -> str:
        """The part in a word."""
        return f"{self.number}-of-{self.count}"


@dataclass(frozen=True)
class Said:
    """What an arm said to a question."""

    text: str
    tokens: int
    began: float
    ended: float
    """When its batch was asked and had answered, by the clock on the wall, which all processes share."""


_SAID = {field.name for field in fields(Said)}


class Store:
    """The answers in a folder, of all processes; what is added goes to the file of this one."""

    def __init__(self, folder: Path, shard: Shard) -> None:
        self._folder, self._path = folder, folder / shard.file_name
        self._said: dict[tuple[str, int], Said] = {}
        self._remarks: dict[str, list[str]] = {}
        self._mended = False

    @property
    def used(self) -> bool:
        """Whether this process has answered something before."""
        return self._path.is_file()

    @property
    def begun(self) -> bool:
        """Whether any process has."""
        return any(self._folder.glob(_FILES))

    def read(self) -> None:
        """Take in what every process has written so far."""
        for path in sorted(self._folder.glob(_FILES)):
            # What follows the last end of a line is half of one.
            for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
                self._read_line(line, f"line {number} of {str(path)!r}")

    def _read_line(self, line: bytes, where: str) -> None:
        try:
            self._take(parse_json(line))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise FileFormatError(
                f"--out: {where} is not what sharpmax wrote; remove that line and run the same command with --resume: "
                "only what is missing is asked again"
            ) from None

    def _take(self, entry: Mapping[str, Any]) -> None:
        arm = str(entry["arm"])
        if "remark" in entry:
            said = self._remarks.setdefault(arm, [])
            if entry["remark"] not in said:
                said.append(str(entry["remark"]))
        elif entry.keys() >= _SAID:  # what another version wrote is asked again
            one = Said(str(entry["text"]), int(entry["tokens"]), float(entry["began"]), float(entry["ended"]))
            self._said[arm, int(entry["item"])] = one

    def __contains__(self, key: tuple[str, int]) -> bool:
        return key in self._said

    def __getitem__(self, key: tuple[str, int]) -> Said:
        return self._said[key]

    def remarks(self, arm: str) -> list[str]:
        """What there is to say about an arm."""
        return list(self._remarks.get(arm, []))

    def add(self, arm: str, said: Mapping[int, Said]) -> None:
        """Keep answers by the number of their question; when this returns they are on disk."""
        self._append({"arm": arm, "item": item, **asdict(one)} for item, one in said.items())

    def remark(self, arm: str, text: str) -> None:
        """Keep what there is to say about an arm."""
        if text not in self.remarks(arm):
            self._append([{"arm": arm, "remark": text}])

    def _append(self, new: Any) -> None:
        entries: Sequence[Mapping[str, Any]] = list(new)
        if not self._mended and self._path.is_file():
            # A killed process may have left half of a line.
            os.truncate(self._path, self._path.read_bytes().rfind(b"\n") + 1)
        self._mended = True
        append_bytes(self._path, "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries).encode())
        for entry in entries:
            self._take(entry)


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
