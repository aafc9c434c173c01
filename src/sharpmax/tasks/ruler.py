"""RULER's tasks that need no download (Hsieh et al. 2024), with the published wording and scoring.

The size of a task is a number of items: sentences of noise (`niah_single_1`, `vt`), needles (`niah_multikey_*`),
distinct words (`cwe`) or words (`fwe`). `Task.of_length` gives the same task with sizes in tokens. The score of an
answer is the share of the references that occur in it, ignoring case.
"""

from __future__ import annotations

import itertools
import math
import random
import string
import uuid
from collections.abc import Callable, Sequence

from sharpmax.tasks.prompt import Make, Prompt, Task
from sharpmax.tasks.vocabulary import ADJECTIVES, NOUNS, WORDS

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_NEEDLE = "One of the special magic {kind}s for {key} is: {value}."


def _niah(kind: str, lines: Sequence[str], key: str, value: str) -> Prompt:
    text = "\n".join(lines)
    return Prompt(
        f"A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about "
        f"the {kind} afterwards.\n{text}\nWhat is the special magic {kind} for {key} mentioned in the provided text?",
        f"The special magic {kind} for {key} mentioned in the provided text is",
        f" {value}",
        evidence=_NEEDLE.format(kind=kind, key=key, value=value),
        references=(value,),
    )


def _number(rng: random.Random) -> str:
    return str(rng.randint(1_000_000, 9_999_999))


def _key(rng: random.Random) -> str:
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _single(size: int, rng: random.Random) -> Prompt:
    key, value = _key(rng), _number(rng)
    lines = [NOISE] * size
    lines.insert(rng.randint(0, size), _NEEDLE.format(kind="number", key=key, value=value))
    return _niah("number", lines, key, value)


def _multikey(kind: str, key_of: Callable[[random.Random], str], value_of: Callable[[random.Random], str]) -> Make:
    def make(size: int, rng: random.Random) -> Prompt:
        pairs: dict[str, str] = {}
        while len(pairs) < size:
            pairs[key_of(rng)] = value_of(rng)
        key = rng.choice(list(pairs))
        lines = [_NEEDLE.format(kind=kind, key=one, value=value) for one, value in pairs.items()]
        return _niah(kind, lines, key, pairs[key])

    return make


def _chain(size: int, rng: random.Random, letters: int, value: str) -> tuple[str, list[str]]:
    """Return a text with a chain of assignments, in order, among `size` sentences of noise, and their variables."""
    names: list[str] = []
    while len(names) < 5:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        names += [name] if name not in names else []
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {new} = VAR {old} " for old, new in itertools.pairwise(names)]
    lines = [NOISE] * size
    places = sorted(rng.choices(range(size + 1), k=len(chain)))
    for place, assignment in zip(reversed(places), reversed(chain), strict=True):
        lines.insert(place, assignment)
    text = (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n" + "\n".join(lines) +
        f"\nQuestion: Find all variables that are assigned the value {value} in the text above."
    )  # fmt: skip
    return text, names


def _variable_tracking(size: int, rng: random.Random) -> Prompt:
    opening = (
        "Answer: According to the chain(s) of variable assignment in the text above, {} variables are assigned the "
        "value {}, they are:"
    )
    example, known = _chain(min(size, 10), rng, 3, "12345")
    value = str(rng.randint(10_000, 99_999))
    text, names = _chain(size, rng, 5, value)
    shown = f"{example} {opening.format(len(known), '12345')} {' '.join(known)}"
    return Prompt(
        f"{shown}\n\n{text}", opening.format(len(names), value), f" {' '.join(names)}", references=tuple(names)
    )


_COMMON = 10


def _words(rng: random.Random, different: int, common: int, other: int) -> tuple[str, list[str]]:
    words = rng.sample(WORDS, different)
    every = words[:_COMMON] * common + words[_COMMON:] * other
    rng.shuffle(every)
    text = (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        f"appear most often.\n{_listed(every)[1:]}\nQuestion: What are the 10 most common words in the above list?"
    )
    return text, words[:_COMMON]


def _listed(words: Sequence[str]) -> str:
    return "".join(f" {place}. {word}" for place, word in enumerate(words, 1))


def _common_words(size: int, rng: random.Random) -> Prompt:
    opening = "Answer: The top 10 words that appear most often in the list are:"
    example, known = _words(rng, 20, 3, 1)
    text, words = _words(rng, size, 30, 3)
    return Prompt(f"{example} {opening}{_listed(known)}\n{text}", opening, _listed(words), references=tuple(words))


def _frequent_words(size: int, rng: random.Random) -> Prompt:
    # In the published task, the vocabulary is a fiftieth of the number of tokens. A coded word has about three tokens.
    vocabulary = ["..."]
    while len(vocabulary) < max(5, size * 3 // 50):
        word = "".join(rng.choices(string.ascii_lowercase, k=6))
        vocabulary += [word] if word not in vocabulary else []
    counts = (int(size / (math.pi**2 / 6) / rank**2) for rank in range(1, len(vocabulary) + 1))
    every = [word for word, count in zip(vocabulary, counts, strict=True) for _ in range(count)]
    rng.shuffle(every)
    wanted = vocabulary[1:4]
    return Prompt(
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        f"appeared coded words. {' '.join(every)}\nQuestion: Do not provide any explanation. Please ignore the dots "
        "'....'. What are the three most frequently appeared words in the above coded text?",
        "Answer: According to the coded text above, the three most frequently appeared words are:",
        f" {', '.join(wanted)}",
        references=tuple(wanted),
    )


def _task(name: str, summary: str, most: int, make: Make, new_tokens: int, least: int = 1) -> Task:
    sizes = tuple(size for size in (16, 32, 64, 128, 256, 512) if size >= least)
    return Task(f"ruler/{name}", 1, summary, sizes, most, make, least, new_tokens=new_tokens)


RULER: tuple[Task, ...] = (
    _task("niah_single_1", "one number in n sentences of noise", 8192, _single, 128),
    _task("niah_multikey_2", "the number of one key among n", 2048, _multikey("number", _key, _number), 128),
    _task("niah_multikey_3", "the uuid of one uuid among n", 2048, _multikey("uuid", _uuid, _uuid), 128),
    _task("vt", "the variables of one chain in n sentences of noise", 8192, _variable_tracking, 30),
    _task("cwe", "the 10 most common of n words", len(WORDS), _common_words, 120, least=_COMMON + 1),
    _task("fwe", "the 3 most frequent words of n coded ones", 32768, _frequent_words, 50, least=64),
)
"""The tasks, named `ruler/…`."""
