"""Every variant answers every question by batched greedy generation."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharpmax.errors import reject
from sharpmax.experiments.clrs.data import end_of, fingerprint, replies
from sharpmax.experiments.clrs.training import MODEL
from sharpmax.experiments.evaluate.plan import describe, shape_of, under
from sharpmax.experiments.run_folder import RUN, belongs, disk_watched, drop_half_line, read_lines, read_run
from sharpmax.files import append_bytes, display_name
from sharpmax.models.language import LanguageModel, context_of, load_language_model, weights_fingerprint
from sharpmax.models.scoring import Reply, batches, generated
from sharpmax.policies.base import Policy
from sharpmax.policies.registry import BESIDE, load_policy

if TYPE_CHECKING:
    from sharpmax.tasks.clrs_text.generation import Example


@dataclass(frozen=True, eq=False)
class Variant:
    """A model and the policy it answers under."""

    name: str
    language: LanguageModel
    policy: Policy | None
    run: dict[str, Any] | None  # the settings of its training, if `sharpmax clrs train` trained it

    def to_dict(self) -> dict[str, Any]:
        """The variant as results hold it."""
        run = self.run or {}
        return {
            "model": run.get("model", self.name),
            "trained": self.run is not None,
            "steps": run.get("steps"),
            "weights": weights_fingerprint(self.language.model),
            **describe(self.policy, *shape_of(self.language.model)),
        }


def variants_named(words: Sequence[str], *, device: str, dtype: str) -> list[Variant]:
    """Load the models a user asked for, each under a name of its own."""
    found: list[Variant] = []
    for word in words:
        folder = Path(word)
        trained = (folder / RUN).is_file()
        place = folder / MODEL if trained else folder
        if trained and not place.is_dir():
            reject("model", repr(word), "a finished training", "continue it: sharpmax clrs train … --resume")
        language = load_language_model(str(place) if place.is_dir() else word, device=device, dtype=dtype)
        policy = load_policy(place / BESIDE) if (place / BESIDE).is_file() else None
        name = display_name(word)
        known = [one.name for one in found]
        names = (name, *(f"{name} ({number})" for number in range(2, len(known) + 3)))
        name = next(one for one in names if one not in known)
        found.append(Variant(name, language, policy, read_run(folder) if trained else None))
    return found


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
    def name(self) -> str:
        """The shard as part of a file name."""
        return f"{self.number}-of-{self.count}"

    @property
    def file_name(self) -> str:
        """The file of its answers."""
        return "answers.jsonl" if self.count == 1 else f"answers-{self.name}.jsonl"


@dataclass(frozen=True)
class Answer:
    """A variant's answer to a question, and when its batch began and ended (wall clock, shared by all processes)."""

    text: str
    tokens: int
    began: float
    ended: float


_FIELDS = {one.name for one in fields(Answer)}
_FILES = "answers*.jsonl"
_AGAIN = "remove that line and run the same command with --resume: only what is missing is asked again"


class AnswerStore:
    """The answers in a folder, of all processes; new ones go to the file of this process."""

    def __init__(self, folder: Path, shard: Shard) -> None:
        self._folder, self._path = folder, folder / shard.file_name
        self._answers: dict[tuple[str, int], Answer] = {}
        self._remarks: dict[str, list[str]] = {}
        self._whole = False

    @property
    def used(self) -> bool:
        """Whether this process has stored answers before."""
        return self._path.is_file()

    @property
    def begun(self) -> bool:
        """Whether any process has."""
        return any(self._folder.glob(_FILES))

    def read(self) -> None:
        """Take in what every process has written so far."""
        for path in sorted(self._folder.glob(_FILES)):
            read_lines(path, self._take, _AGAIN)

    def _take(self, entry: Mapping[str, Any]) -> None:
        variant = str(entry["arm"])
        if "remark" in entry:
            known = self._remarks.setdefault(variant, [])
            if entry["remark"] not in known:
                known.append(str(entry["remark"]))
        elif entry.keys() >= _FIELDS:  # what another version wrote is asked again
            one = Answer(str(entry["text"]), int(entry["tokens"]), float(entry["began"]), float(entry["ended"]))
            self._answers[variant, int(entry["item"])] = one

    def __contains__(self, key: tuple[str, int]) -> bool:
        return key in self._answers

    def __getitem__(self, key: tuple[str, int]) -> Answer:
        return self._answers[key]

    def remarks(self, variant: str) -> list[str]:
        """Remarks on a variant."""
        return list(self._remarks.get(variant, []))

    def add(self, variant: str, answers: Mapping[int, Answer]) -> None:
        """Store answers by the number of their question; when this returns they are on disk."""
        self._append([{"arm": variant, "item": item, **asdict(one)} for item, one in answers.items()])

    def remark(self, variant: str, text: str) -> None:
        """Store a remark on a variant."""
        if text not in self.remarks(variant):
            self._append([{"arm": variant, "remark": text}])

    def _append(self, entries: Sequence[Mapping[str, Any]]) -> None:
        if not self._whole:
            drop_half_line(self._path)
        self._whole = True
        append_bytes(self._path, "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries).encode())
        for entry in entries:
            self._take(entry)


Progress = Callable[[int, str], None]
"""Called with the number of answers since the last call, and the variant that comes next."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Variants and the questions put to them."""

    variants: Sequence[Variant]
    questions: Sequence[Example]
    batch_tokens: int  # tokens that a device holds at once, answers included
    setting: dict[str, Any]  # what else the answers depend on
    _expected: dict[str, list[Reply]] = field(default_factory=dict, init=False)

    @classmethod
    def fitting(
        cls,
        variants: Sequence[Variant],
        questions: Sequence[Example],
        batch_tokens: int,
        setting: Mapping[str, Any],
        longest: int | None = None,
    ) -> Evaluation:
        """With the questions of the sizes that fit every variant's context; the setting lists the sizes left out.

        With `longest`, questions of more tokens than that, answers included, are left out too. A size is asked as a
        whole or not at all: its shorter questions alone would be easier.
        """
        expected = _as_tokens(variants, questions)
        out: dict[str, set[int]] = {}
        for variant in variants:
            limits = (context_of(variant.language.model), longest)
            limit = min((limit for limit in limits if limit is not None), default=math.inf)
            for one, reply in zip(questions, expected[variant.name], strict=True):
                if len(reply.ids) > limit:
                    out.setdefault(one.algo_name, set()).add(one.length)
        left = [place for place, one in enumerate(questions) if one.length not in out.get(one.algo_name, ())]
        if not left:
            allowed = "sizes whose questions and answers fit every model's context"
            reject("--sizes", sorted({one.length for one in questions}), allowed, "ask for smaller ones")
        limited: dict[str, Any] = {"too_long": {name: sorted(sizes) for name, sizes in out.items()}}
        limited |= {} if longest is None else {"longest": longest}
        made = cls(variants, [questions[place] for place in left], batch_tokens, {**setting, **limited})
        made._expected.update({name: [asked[place] for place in left] for name, asked in expected.items()})
        return made

    def identity(self) -> dict[str, Any]:
        """What must be the same for answers to belong together."""
        return {
            "arms": {variant.name: variant.to_dict() for variant in self.variants},
            "questions": {"count": len(self.questions), "fingerprint": fingerprint(self.questions)},
            **self.setting,
        }

    def store(self, folder: Path, shard: Shard, *, resume: bool) -> AnswerStore:
        """The answers in `folder`, if they are to these questions by these variants."""
        store = AnswerStore(folder, shard)
        begun = store.begun
        mine = store.used if shard.count > 1 else begun
        # What other processes have begun must be of the same run, and does not keep this one from starting.
        belongs(folder, self.identity(), used=mine, resume=resume or (begun and not mine))
        store.read()
        return store

    def answer(
        self, store: AnswerStore, folder: Path, shard: Shard, progress: Progress = lambda done, what: None
    ) -> None:
        """Ask what is this process's share and has no answer yet."""
        with disk_watched(folder):
            for variant in self.variants:
                self._ask(variant, store, shard, progress)

    def expected(self, variant: Variant) -> list[Reply]:
        """Questions with their right answers as the tokens of a variant."""
        if not self._expected:
            self._expected.update(_as_tokens(self.variants, self.questions))
        return self._expected[variant.name]

    def work(self, shard: Shard) -> int:
        """How many answers are this process's share."""
        return sum(len(batch) for variant in self.variants for batch in self._share(variant, shard))

    def missing(self, store: AnswerStore) -> int:
        """How many answers are missing."""
        return sum((one.name, item) not in store for one in self.variants for item in range(len(self.questions)))

    def _ask(self, variant: Variant, store: AnswerStore, shard: Shard, progress: Progress) -> None:
        progress(0, variant.name)
        expected = self.expected(variant)
        for batch in self._share(variant, shard):
            left = [item for item in batch if (variant.name, item) not in store]
            if left:
                with under(variant.language.model, variant.policy, lambda text: store.remark(variant.name, text)):
                    found = _answers(variant, [expected[item] for item in left])
                store.add(variant.name, dict(zip(left, found, strict=True)))
            progress(len(batch), variant.name)

    def _share(self, variant: Variant, shard: Shard) -> list[list[int]]:
        """The batches of this process: whole ones, each for the process that has the fewest tokens so far."""
        expected = self.expected(variant)
        shares: list[list[list[int]]] = [[] for _ in range(shard.count)]
        tokens = [0] * shard.count
        even = -(-sum(len(one.ids) for one in expected) // shard.count)  # there must be something for each
        for batch in _batches(expected, min(self.batch_tokens, even)):
            least = tokens.index(min(tokens))
            shares[least].append(batch)
            tokens[least] += _limit([expected[item] for item in batch])
        return shares[shard.number - 1]


def _as_tokens(variants: Sequence[Variant], questions: Sequence[Example]) -> dict[str, list[Reply]]:
    """Questions with right answers as the tokens of each variant, tokenized once for equal tokenizers."""
    known: dict[Any, list[Reply]] = {}
    found = {}
    for variant in variants:
        tokenizer: Any = variant.language.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        key = tokenizer if backend is None else (backend.to_str(), end_of(tokenizer))
        if key not in known:
            known[key] = list(replies(tokenizer, questions))
        found[variant.name] = known[key]
    return found


def _limit(expected: Sequence[Reply]) -> int:
    """Tokens to generate at most: an answer longer than any expected one is wrong, whatever follows."""
    longest = max(one.tokens for one in expected)
    return longest + longest // 4 + 8


def _batches(expected: Sequence[Reply], most_tokens: int) -> Iterator[list[int]]:
    """Questions to ask together: of similar length, with answers of similar length, as all wait for the longest.

    Longest first: what a device has no memory for is known at once.
    """
    alike: dict[int, list[int]] = {}
    for place, one in enumerate(expected):
        alike.setdefault(one.tokens.bit_length(), []).append(place)
    found = [
        [places[i] for i in batch]
        for places in alike.values()
        for batch in batches([expected[place] for place in places], most_tokens)
    ]
    yield from sorted(found, key=lambda batch: len(expected[batch[-1]].ids), reverse=True)


def _answers(variant: Variant, expected: Sequence[Reply]) -> list[Answer]:
    tokenizer: Any = variant.language.tokenizer
    end = end_of(tokenizer)
    began = time.time()  # not a monotonic clock: shards may run on several machines, or days apart
    found = generated(variant.language.model, [one.ids[: one.start] for one in expected], _limit(expected), end)
    ended = time.time()
    texts = [
        tokenizer.decode(
            [token for token in one.ids[one.start :] if token != end],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        for one in found
    ]
    return [Answer(text, one.tokens, began, ended) for text, one in zip(texts, found, strict=True)]
