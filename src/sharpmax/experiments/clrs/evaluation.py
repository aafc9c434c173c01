"""Every variant answers every question by batched greedy generation; the tables of `sharpmax clrs evaluate`."""

from __future__ import annotations

import importlib
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sharpmax.errors import reject
from sharpmax.experiments.clrs.data import end_of, fingerprint, replies
from sharpmax.experiments.clrs.training import MODEL
from sharpmax.experiments.evaluate.plan import describe, shape_of, under
from sharpmax.experiments.run_folder import RUN, Outcome, RunStore, belongs, read_run
from sharpmax.experiments.statistics import CONFIDENCE, Accuracy, accuracy, paired
from sharpmax.files import display_name
from sharpmax.integrations.transformers.interface import observed
from sharpmax.models.language import LanguageModel, context_of, load_language_model, weights_fingerprint
from sharpmax.models.scoring import Reply, batches, generated, reply_losses
from sharpmax.policies.base import Policy
from sharpmax.policies.registry import BESIDE, load_policy
from sharpmax.results import FILE_NAME, json_values, load
from sharpmax.stats.call import AttentionCall

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
class Answer:
    """A variant's answer to a question."""

    text: str
    tokens: int
    seconds: float  # its share of the time of its batch
    entropy: float | None = None  # H / ln n where the answer begins, mean over heads; of scored answers


class AnswerStore:
    """The answers in a folder, and remarks on variants."""

    def __init__(self, folder: Path) -> None:
        self._store = RunStore(folder, FILE)
        self.writing = self._store.writing

    def __contains__(self, key: tuple[str, int]) -> bool:
        return _key(*key) in self._store

    def __getitem__(self, key: tuple[str, int]) -> Answer:
        return Answer(**self._store.record(_key(*key)))

    def add(self, variant: str, answers: Mapping[int, Answer]) -> None:
        """Store answers by the number of their question; when this returns they are on disk."""
        self._store.add_all({_key(variant, item): Outcome(asdict(one)) for item, one in answers.items()})

    def remark(self, variant: str, text: str) -> None:
        """Store a remark on a variant."""
        if f"{variant}/{text}" not in self._store:
            self._store.add(f"{variant}/{text}", Outcome({"variant": variant, "remark": text}))

    def remarks(self, variant: str) -> list[str]:
        """Remarks on a variant."""
        records = map(self._store.record, self._store.keys())
        return [one["remark"] for one in records if one.get("variant") == variant]


FILE = "answers.jsonl"


def _key(variant: str, item: int) -> str:
    return f"{variant}/{item}"


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
        limited = {} if longest is None else {"longest": longest}
        too_long = {name: sorted(sizes) for name, sizes in out.items()}
        asked_questions = [questions[place] for place in left]
        made = cls(variants, asked_questions, batch_tokens, {**setting, "too_long": too_long, **limited})
        made._expected.update({name: [asked[place] for place in left] for name, asked in expected.items()})
        return made

    def identity(self) -> dict[str, Any]:
        """What must be the same for answers to belong together."""
        return {
            "arms": {variant.name: variant.to_dict() for variant in self.variants},
            "questions": {"count": len(self.questions), "fingerprint": fingerprint(self.questions)},
            **self.setting,
        }

    def store(self, folder: Path, *, resume: bool) -> AnswerStore:
        """The answers in `folder`, if they are to these questions by these variants."""
        belongs(folder, self.identity(), used=(folder / FILE).is_file(), resume=resume)
        return AnswerStore(folder)

    def answer(self, store: AnswerStore, progress: Progress = lambda done, what: None) -> None:
        """Ask what has no answer yet."""
        answers = _scored if self.setting.get("scored") else _generated
        with store.writing():
            for variant in self.variants:
                progress(0, variant.name)
                expected = self.expected(variant)
                for batch in _batches(expected, self.batch_tokens):
                    left = [item for item in batch if (variant.name, item) not in store]
                    if left:
                        remark = partial(store.remark, variant.name)
                        wanted = [self.questions[item].answer.strip() for item in left]
                        with under(variant.language.model, variant.policy, remark):
                            found = answers(variant, [expected[item] for item in left], wanted)
                        store.add(variant.name, dict(zip(left, found, strict=True)))
                    progress(len(batch), variant.name)

    def expected(self, variant: Variant) -> list[Reply]:
        """Questions with their right answers as the tokens of a variant."""
        if not self._expected:
            self._expected.update(_as_tokens(self.variants, self.questions))
        return self._expected[variant.name]


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


def _batches(expected: Sequence[Reply], most_tokens: int) -> list[list[int]]:
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
    return sorted(found, key=lambda batch: len(expected[batch[-1]].ids), reverse=True)


def _generated(variant: Variant, expected: Sequence[Reply], texts: Sequence[str]) -> list[Answer]:
    """What greedy decoding answers."""
    tokenizer: Any = variant.language.tokenizer
    end = end_of(tokenizer)
    began = time.perf_counter()
    found = generated(variant.language.model, [one.ids[: one.start] for one in expected], _limit(expected), end)
    seconds = (time.perf_counter() - began) / len(found)
    answers = []
    for one in found:
        ids = [token for token in one.ids[one.start :] if token != end]
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        answers.append(Answer(text, one.tokens, seconds))
    return answers


WRONG = "<wrong>"
"""The text of an answer that was scored and is not what greedy decoding gives."""


def _scored(variant: Variant, expected: Sequence[Reply], texts: Sequence[str]) -> list[Answer]:
    """Whether greedy decoding gives each answer, and the entropy of attention where it begins."""
    row = _AnswerRow(expected)
    with observed(variant.language.model, row), torch.no_grad():
        right = reply_losses(variant.language.model, expected)[1].all(-1).tolist()
    entropies = row.mean().tolist()
    rows = zip(texts, right, entropies, strict=True)
    return [Answer(text if good else WRONG, 0, 0.0, entropy) for text, good, entropy in rows]


class _AnswerRow:
    """An observer of the row that gives the first token of each answer: H / ln n, mean over heads and layers."""

    def __init__(self, expected: Sequence[Reply]) -> None:
        self._places = torch.tensor([one.start - 1 for one in expected])
        self._found: list[torch.Tensor] = []

    def __call__(self, call: AttentionCall) -> None:
        stats = call.of_rows(self._places).logits(slice(None)).measure(frozenset({"count", "max", "lse", "mean"}))
        self._found.append((stats.entropy / stats.count.clamp_min(2).log()).mean((1, 2)))

    def mean(self) -> torch.Tensor:
        """One number for each reply."""
        return torch.stack(self._found).mean(0)


_ELSEWHERE = ("policy", "sizes")  # settings that the evaluation has itself


def trainings(words: Sequence[str], variants: Sequence[Variant]) -> dict[str, Any]:
    """Command, provenance, settings, loss curve and speed of every variant, named by `words`, that has results."""
    found = {}
    for word, variant in zip(words, variants, strict=True):
        file = Path(word) / FILE_NAME
        if variant.run is None or not file.is_file():
            continue
        saved = load(file)
        found[variant.name] = {
            "command": saved.command,
            "provenance": saved.provenance,
            "setting": {name: value for name, value in saved.tables["setting"].items() if name not in _ELSEWHERE},
            "curve": saved.tables["curve"],
            "speed": saved.tables["speed"],
        }
    return found


IN, OUT = "in", "out"
"""Sizes that the variants were trained on, and all others."""

Cells = dict[str, dict[int, list[int]]]
"""For each algorithm and size, its questions, or whether the answer to each is right."""

_DRAWS = 4000


@dataclass(frozen=True)
class MeanAccuracy:
    """Accuracy in percent, mean over algorithms, with a bootstrap interval."""

    mean: float
    low: float
    high: float
    algorithms: int


@dataclass(frozen=True)
class MeanGain:
    """Percentage points over the base with a bootstrap interval, and McNemar's test."""

    mean: float
    low: float
    high: float
    gained: int
    lost: int
    p: float


def evaluation_tables(
    evaluation: Evaluation, store: AnswerStore, trained: Mapping[str, Sequence[int]], seed: int
) -> dict[str, Any]:
    """All tables; `trained` holds the sizes of each algorithm that the variants were trained on."""
    final: Any = importlib.import_module("sharpmax.tasks.clrs_text").final_answer
    places = _places(evaluation.questions)
    wanted = [question.answer.strip() for question in evaluation.questions]
    ends = [final(answer) for answer in wanted]
    names = [variant.name for variant in evaluation.variants]
    base, others = names[0], names[1:]
    last: dict[str, Cells] = {}
    whole: dict[str, Cells] = {}
    for name in names:
        texts = [store[name, item].text.strip() for item in range(len(wanted))]
        last[name] = _cells(places, [int(final(a) == b) for a, b in zip(texts, ends, strict=True)])
        whole[name] = _cells(places, [int(a == b) for a, b in zip(texts, wanted, strict=True)])
    groups: dict[str, dict[str, list[int]]] = {IN: {}, OUT: {}}
    for algorithm, cells in places.items():
        for size in cells:
            group = IN if size in trained.get(algorithm, ()) else OUT
            groups[group].setdefault(algorithm, []).append(size)
    shown = {group: sizes for group, sizes in groups.items() if sizes}
    tables: dict[str, Any] = {
        "setting": {
            **evaluation.identity(),
            "base": base,
            "remarks": {name: store.remarks(name) for name in names},
            "sizes": {
                algorithm: {"trained": list(trained.get(algorithm, ())), "examined": list(cells)}
                for algorithm, cells in places.items()
            },
        },
        "accuracy": {name: _each(last[name], accuracy) for name in names},
        "majority": _each(places, lambda items: _majority([ends[item] for item in items])),
        "means": {name: {g: _mean(last[name], cells, seed) for g, cells in shown.items()} for name in names},
        "means_exact": {name: {g: _mean(whole[name], cells, seed) for g, cells in shown.items()} for name in names},
        "gains": {
            name: {g: _gain(last[base], last[name], cells, seed) for g, cells in shown.items()} for name in others
        },
        "by_algorithm": {name: _apart(shown, partial(_mean, last[name], seed=seed)) for name in names},
        "gains_by_algorithm": {
            name: _apart(shown, partial(_gain, last[base], last[name], seed=seed)) for name in others
        },
        "speed": {name: _speed(store, name, len(wanted)) for name in names},
    }
    if evaluation.setting.get("scored"):
        tables["entropy"] = {name: _entropies(store, name, evaluation.questions) for name in names}
    return json_values(tables)


def _entropies(store: AnswerStore, variant: str, questions: Sequence[Example]) -> dict[str, float]:
    """Mean H / ln n where answers begin, by size."""
    found: dict[int, list[float]] = {}
    for item, one in enumerate(questions):
        entropy = store[variant, item].entropy
        if entropy is not None:
            found.setdefault(one.length, []).append(entropy)
    return {str(size): math.fsum(values) / len(values) for size, values in sorted(found.items())}


def _places(questions: Sequence[Example]) -> Cells:
    """The numbers of the questions of each algorithm and size."""
    found: dict[str, dict[int, list[int]]] = {}
    for item, one in enumerate(questions):
        found.setdefault(one.algo_name, {}).setdefault(one.length, []).append(item)
    return {name: dict(sorted(cells.items())) for name, cells in found.items()}


def _cells(places: Cells, right: Sequence[int]) -> Cells:
    return {name: {s: [right[i] for i in items] for s, items in cells.items()} for name, cells in places.items()}


def _each(cells: Cells, value: Any) -> dict[str, Any]:
    return {name: {str(size): value(right) for size, right in sizes.items()} for name, sizes in cells.items()}


def _majority(answers: Sequence[str]) -> Accuracy:
    """The accuracy of always giving the most frequent answer."""
    (_, right), *_ = Counter(answers).most_common(1)
    return accuracy([1] * right + [0] * (len(answers) - right))


def _apart(groups: Mapping[str, Mapping[str, Sequence[int]]], value: Any) -> dict[str, Any]:
    """A value of the sizes trained on and of the others, for each algorithm by itself."""
    found: dict[str, dict[str, Any]] = {}
    for group, cells in groups.items():
        for name, sizes in cells.items():
            found.setdefault(name, {})[group] = value({name: sizes})
    return found


def _mean(cells: Cells, chosen: Mapping[str, Sequence[int]], seed: int) -> MeanAccuracy:
    """Every algorithm counts the same, and every size of it; the interval comes from drawing answers again."""
    rng = np.random.default_rng(seed)
    drawn, means = [], []
    for name, sizes in chosen.items():
        rows = [cells[name][size] for size in sizes]
        means.append(np.mean([np.mean(row) for row in rows]))
        # Drawing right and wrong answers again, with replacement, is drawing from a binomial distribution.
        drawn.append(np.mean([rng.binomial(len(row), np.mean(row), _DRAWS) / len(row) for row in rows], axis=0))
    return MeanAccuracy(*_interval(float(np.mean(means)), np.mean(drawn, axis=0)), len(chosen))


def _gain(base: Cells, variant: Cells, chosen: Mapping[str, Sequence[int]], seed: int) -> MeanGain:
    """The mean of a variant minus that of the base on the same questions, drawn again in pairs; and McNemar's test."""
    rng = np.random.default_rng(seed)
    drawn, means = [], []
    for name, sizes in chosen.items():
        apart = [np.subtract(variant[name][size], base[name][size]) for size in sizes]
        means.append(np.mean([np.mean(row) for row in apart]))
        parts = []
        for row in apart:
            shares = [float(np.mean(row == 1)), float(np.mean(row == -1)), float(np.mean(row == 0))]
            counts = rng.multinomial(len(row), np.array(shares) / math.fsum(shares), _DRAWS)
            parts.append((counts[:, 0] - counts[:, 1]) / len(row))
        drawn.append(np.mean(parts, axis=0))
    pairs = [(name, size) for name, sizes in chosen.items() for size in sizes]
    test = paired(*([right for name, size in pairs for right in cells[name][size]] for cells in (base, variant)))
    return MeanGain(*_interval(float(np.mean(means)), np.mean(drawn, axis=0)), test.gained, test.lost, test.p)


def _interval(mean: float, drawn: np.ndarray) -> tuple[float, float, float]:
    low, high = np.quantile(drawn, [0.5 - 0.5 * CONFIDENCE, 0.5 + 0.5 * CONFIDENCE])
    return 100.0 * mean, 100.0 * float(low), 100.0 * float(high)


def _speed(store: AnswerStore, variant: str, count: int) -> dict[str, Any]:
    """Tokens generated and the time that took."""
    answers = [store[variant, item] for item in range(count)]
    tokens, seconds = sum(one.tokens for one in answers), math.fsum(one.seconds for one in answers)
    return {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds if seconds else None}
