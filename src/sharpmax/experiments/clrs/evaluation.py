"""Answers of every variant to every question, and the tables of `sharpmax clrs evaluate` and `clrs compare`."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sharpmax.errors import reject
from sharpmax.experiments.clrs.data import end_of, fingerprint, replies
from sharpmax.experiments.clrs.training import MODEL
from sharpmax.experiments.run_folder import RUN, Outcome, RunStore, read_run
from sharpmax.experiments.statistics import CONFIDENCE, accuracy, paired
from sharpmax.experiments.variants import describe, shape_of, under
from sharpmax.files import display_name
from sharpmax.integrations.transformers.interface import observed
from sharpmax.models.language import LanguageModel, context_of, load_language_model, weights_fingerprint
from sharpmax.models.scoring import Reply, batches, generated, reply_losses
from sharpmax.policies.base import Policy
from sharpmax.policies.registry import BESIDE, load_policy
from sharpmax.results import FILE_NAME, json_values, load
from sharpmax.stats.call import AttentionCall
from sharpmax.tasks.clrs_text.generation import Example, final_answer
from sharpmax.tasks.clrs_text.sizes import ALGORITHMS, train_sizes

ANSWERS = "answers.jsonl"

WRONG = "<wrong>"
"""The text of a scored answer that greedy decoding would not give."""


@dataclass(frozen=True, eq=False)
class Variant:
    """A model and its policy."""

    name: str
    language: LanguageModel
    policy: Policy | None
    run: dict[str, Any] | None  # the settings of its training by `sharpmax clrs train`, if any

    @classmethod
    def load(cls, word: str, name: str, *, device: str, dtype: str) -> Variant:
        """Load a folder of `sharpmax clrs train` with its policy, or any other model."""
        folder = Path(word)
        trained = (folder / RUN).is_file()
        place = folder / MODEL if trained else folder
        if trained and not place.is_dir():
            reject("model", repr(word), "a finished training", "continue it: sharpmax clrs train … --resume")
        language = load_language_model(str(place) if place.is_dir() else word, device=device, dtype=dtype)
        policy = load_policy(place / BESIDE) if (place / BESIDE).is_file() else None
        return cls(name, language, policy, read_run(folder) if trained else None)

    def to_dict(self) -> dict[str, Any]:
        """The variant, as saved in results."""
        run = self.run or {}
        return {
            "model": run.get("model", self.name),
            "trained": self.run is not None,
            "steps": run.get("steps"),
            "weights": weights_fingerprint(self.language.model),
            **describe(self.policy, *shape_of(self.language.model)),
        }


def variants_named(words: Sequence[str], *, device: str, dtype: str) -> list[Variant]:
    """Load models under unique names."""
    known: dict[str, str] = {}
    for word in words:
        name = display_name(word)
        names = (name, *(f"{name} ({number})" for number in range(2, len(words) + 1)))
        known[next(one for one in names if one not in known)] = word
    return [Variant.load(word, name, device=device, dtype=dtype) for name, word in known.items()]


def trained_sizes(variants: Sequence[Variant]) -> dict[str, list[int]]:
    """The sizes of each algorithm that the variants were trained on; empty for other models."""
    runs = [one.run for one in variants if one.run is not None]
    if len({run["examples"]["fingerprint"] for run in runs}) > 1:
        reject("model", "models that were trained on different examples", "models that were trained on the same ones")
    return dict(runs[0]["sizes"]) if runs else {}


def training_of(folder: Path) -> dict[str, Any]:
    """Command, provenance, settings, loss curve and speed of a finished training."""
    saved = load(folder / FILE_NAME)
    # Policies and sizes are part of the evaluation's own setting.
    setting = {name: value for name, value in saved.tables["setting"].items() if name not in ("policy", "sizes")}
    kept = {name: saved.tables[name] for name in ("curve", "speed")}
    return {"command": saved.command, "provenance": saved.provenance, "setting": setting, **kept}


@dataclass(frozen=True)
class Answer:
    """A variant's answer to a question."""

    text: str
    tokens: int
    seconds: float  # its share of the time of its batch
    entropy: float | None = None  # of scored answers: H / ln n at the first token, mean over heads


Progress = Callable[[int, str], None]
"""Called with the number of answers since the last call, and the name of the next variant."""


class Evaluation:
    """Variants, and the questions whose sizes fit the context of all of them.

    With `longest`, sizes with longer questions (in tokens, answer included) are left out too. A size is left out as a
    whole, since its shorter questions alone would be easier. `batch_tokens` is the number of tokens in a batch, answers
    included. `setting` holds what else the answers depend on.
    """

    def __init__(
        self,
        variants: Sequence[Variant],
        questions: Sequence[Example],
        batch_tokens: int,
        setting: Mapping[str, Any],
        longest: int | None = None,
    ) -> None:
        expected = {one.name: list(replies(one.language.tokenizer, questions)) for one in variants}
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
        self.variants, self.batch_tokens = variants, batch_tokens
        self.questions = [questions[place] for place in left]
        self.expected = {name: [asked[place] for place in left] for name, asked in expected.items()}
        self.setting = {**setting, "too_long": {name: sorted(sizes) for name, sizes in out.items()}}
        if longest is not None:
            self.setting["longest"] = longest

    def identity(self) -> dict[str, Any]:
        """What must be the same to resume."""
        return {
            "variants": {variant.name: variant.to_dict() for variant in self.variants},
            "questions": {"count": len(self.questions), "fingerprint": fingerprint(self.questions)},
            **self.setting,
        }

    def answers(
        self, variant: Variant, done: Container[int] = (), remark: Callable[[str], None] = lambda text: None
    ) -> Iterator[dict[int, Answer]]:
        """Answer the questions that are not done yet, batch by batch. `remark` gets warnings about the policy."""
        ask = _scored if self.setting.get("scored") else _generated
        expected = self.expected[variant.name]
        for batch in _batches(expected, self.batch_tokens):
            left = [item for item in batch if item not in done]
            with under(variant.language.model, variant.policy, remark):
                texts = [self.questions[item].answer.strip() for item in left]
                found = ask(variant, [expected[item] for item in left], texts) if left else []
            yield dict(zip(left, found, strict=True))

    def run(self, store: RunStore, progress: Progress = lambda done, what: None) -> None:
        """Answer the questions without an answer in the store, and store each batch."""
        for variant in self.variants:
            name = variant.name
            done = {item for item in range(len(self.questions)) if f"{name}/{item}" in store}
            progress(len(done), name)

            def remark(text: str, name: str = name) -> None:
                if f"{name}/{text}" not in store:
                    store.add(f"{name}/{text}", Outcome({"variant": name, "remark": text}))

            with store.writing():
                for found in self.answers(variant, done, remark):
                    store.add_all({f"{name}/{item}": Outcome(asdict(one)) for item, one in found.items()})
                    progress(len(found), name)

    def tables(self, store: RunStore, seed: int) -> dict[str, Any]:
        """The tables of `evaluation_tables`, once every question is answered."""
        names, numbers = [variant.name for variant in self.variants], range(len(self.questions))
        answers = {name: [[Answer(**store.records[f"{name}/{item}"]) for item in numbers]] for name in names}
        remarked = [record for record in store.records.values() if "remark" in record]
        remarks = {name: [record["remark"] for record in remarked if record["variant"] == name] for name in names}
        known = trained_sizes(self.variants) or {name: list(train_sizes(name)) for name in ALGORITHMS}
        return evaluation_tables(self.questions, answers, {**self.identity(), "remarks": remarks}, known, seed)


def _limit(expected: Sequence[Reply]) -> int:
    """Maximum number of tokens to generate. Much longer answers than expected are wrong anyway."""
    longest = max(one.tokens for one in expected)
    return longest + longest // 4 + 8


def _batches(expected: Sequence[Reply], most_tokens: int) -> list[list[int]]:
    """Batches of questions of similar length with answers of similar length, as all wait for the longest.

    Longest first, so that a device that is too small fails at once.
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
    """Answers by greedy decoding."""
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


def _scored(variant: Variant, expected: Sequence[Reply], texts: Sequence[str]) -> list[Answer]:
    """Whether greedy decoding would give each answer, and H / ln n of the row that predicts its first token."""
    rows, found = torch.tensor([one.start - 1 for one in expected]), []

    def observe(call: AttentionCall) -> None:
        stats = call.of_rows(rows).logits(slice(None)).measure(frozenset({"count", "max", "lse", "mean"}))
        found.append((stats.entropy / stats.count.clamp_min(2).log()).mean((1, 2)))

    with observed(variant.language.model, observe), torch.no_grad():
        right = reply_losses(variant.language.model, expected)[1].all(-1).tolist()
    entropies = torch.stack(found).mean(0).tolist()
    return [
        Answer(text if good else WRONG, 0, 0.0, entropy)
        for text, good, entropy in zip(texts, right, entropies, strict=True)
    ]


IN, OUT = "in", "out"
"""Sizes that the variants were trained on, and other sizes."""

_DRAWS = 4000


def evaluation_tables(
    questions: Sequence[Example],
    answers: Mapping[str, Sequence[Sequence[Answer]]],
    setting: Mapping[str, Any],
    trained: Mapping[str, Sequence[int]],
    seed: int,
) -> dict[str, Any]:
    """All tables. `answers` holds one answer to each question, by variant and seed; seeds are pooled.

    `trained` holds the sizes of each algorithm that the variants were trained on.
    """
    cells: dict[str, dict[int, list[int]]] = {}  # indices of questions by algorithm and size
    for item, one in sorted(enumerate(questions), key=lambda pair: pair[1].length):
        cells.setdefault(one.algo_name, {}).setdefault(one.length, []).append(item)
    cells = {name: cells[name] for name in dict.fromkeys(one.algo_name for one in questions)}
    groups: dict[str, dict[str, list[int]]] = {IN: {}, OUT: {}}
    for name, sizes in cells.items():
        for size in sizes:
            groups[IN if size in trained.get(name, ()) else OUT].setdefault(name, []).append(size)
    groups = {group: chosen for group, chosen in groups.items() if chosen}
    ends = [final_answer(question.answer) for question in questions]
    right = {
        name: np.array(
            [[final_answer(one.text) == end for one, end in zip(each, ends, strict=True)] for each in seeds], dtype=int
        )
        for name, seeds in answers.items()
    }
    base, *others = answers

    def values(of: np.ndarray, chosen: Mapping[str, Sequence[int]]) -> list[list[np.ndarray]]:
        """Values [seeds, questions], flattened, by algorithm and size."""
        return [[of[:, cells[name][size]].ravel() for size in sizes] for name, sizes in chosen.items()]

    def mean(name: str, chosen: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        return {**_bootstrap(values(right[name], chosen), seed), "algorithms": len(chosen)}

    def gain(name: str, chosen: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        items = [item for algorithm, sizes in chosen.items() for size in sizes for item in cells[algorithm][size]]
        test = paired(*(right[one][:, items].ravel().tolist() for one in (base, name)))
        return {**_bootstrap(values(right[name] - right[base], chosen), seed), **asdict(test)}

    def by_algorithm(value: Callable[..., Any]) -> dict[str, Any]:
        return {
            name: {group: value({name: chosen[name]}) for group, chosen in groups.items() if name in chosen}
            for name in cells
        }

    def majority(items: Sequence[int]) -> Any:
        (_, count), *_ = Counter(ends[item] for item in items).most_common(1)
        return accuracy([1] * count + [0] * (len(items) - count))

    tables: dict[str, Any] = {
        "setting": {
            **setting,
            "base": base,
            "sizes": {
                name: {"trained": list(trained.get(name, ())), "examined": list(sizes)} for name, sizes in cells.items()
            },
        },
        "accuracy": {
            variant: {
                name: {size: accuracy(of[:, items].ravel().tolist()) for size, items in sizes.items()}
                for name, sizes in cells.items()
            }
            for variant, of in right.items()
        },
        "majority": {name: {size: majority(items) for size, items in sizes.items()} for name, sizes in cells.items()},
        "means": {name: {group: mean(name, chosen) for group, chosen in groups.items()} for name in answers},
        "gains": {name: {group: gain(name, chosen) for group, chosen in groups.items()} for name in others},
        "by_algorithm": {name: by_algorithm(partial(mean, name)) for name in answers},
        "gains_by_algorithm": {name: by_algorithm(partial(gain, name)) for name in others},
        "speed": {name: _speed([one for each in seeds for one in each]) for name, seeds in answers.items()},
    }
    if len(answers[base]) > 1:
        tables["seeds"] = {
            name: {
                group: [_bootstrap(values(one[None], chosen), seed)["mean"] for one in of]
                for group, chosen in groups.items()
            }
            for name, of in right.items()
        }
    if setting.get("scored"):
        tables["entropy"] = {name: _entropies(seeds, questions) for name, seeds in answers.items()}
    return json_values(tables)


def _bootstrap(values: Sequence[Sequence[np.ndarray]], seed: int) -> dict[str, float]:
    """The mean in percent of values −1, 0 and 1 by algorithm and size, with a bootstrap interval.

    Algorithms have equal weights, and so have the sizes of each.
    """
    rng = np.random.default_rng(seed)
    means, drawn = [], []
    for rows in values:
        means.append(np.mean([row.mean() for row in rows]))
        parts = []
        for row in rows:
            shares = [float(np.mean(row == value)) for value in (1, -1, 0)]
            counts = rng.multinomial(len(row), np.array(shares) / math.fsum(shares), _DRAWS)
            parts.append((counts[:, 0] - counts[:, 1]) / len(row))
        drawn.append(np.mean(parts, axis=0))
    ends = np.quantile(np.mean(drawn, axis=0), [0.5 - 0.5 * CONFIDENCE, 0.5 + 0.5 * CONFIDENCE])
    low, high = (100.0 * float(end) for end in ends)
    return {"mean": 100.0 * float(np.mean(means)), "low": low, "high": high}


def _entropies(answers: Sequence[Sequence[Answer]], questions: Sequence[Example]) -> dict[int, float]:
    """Mean H / ln n at the first token of answers, by size."""
    found: dict[int, list[float]] = {}
    for of_seed in answers:
        for question, answer in zip(questions, of_seed, strict=True):
            if answer.entropy is not None:
                found.setdefault(question.length, []).append(answer.entropy)
    return {size: math.fsum(values) / len(values) for size, values in sorted(found.items())}


def _speed(answers: Sequence[Answer]) -> dict[str, Any]:
    """Tokens generated, and the time it took."""
    tokens, seconds = sum(one.tokens for one in answers), math.fsum(one.seconds for one in answers)
    return {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds if seconds else None}
