"""Questions and answers as tokens: read the question, say the answer and then stop."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sharpmax.errors import reject
from sharpmax.models.scoring import Reply

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Documents", "Question", "end_of", "fingerprint", "replies"]

_AT_ONCE = 2000


class Question(Protocol):
    """A question with its answer, as `sharpmax.tasks.clrs_text.Example` is one."""

    @property
    def question(self) -> str:
        """What the model reads."""

    @property
    def answer(self) -> str:
        """What it has to say, white space at its end aside."""

    @property
    def characters(self) -> int:
        """The length of both."""

    @property
    def algo_name(self) -> str:
        """The algorithm."""

    @property
    def length(self) -> int:
        """The size of the problem."""


def end_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that ends an answer."""
    end: Any = tokenizer.eos_token_id
    if end is None:
        reject("model", "a tokenizer without an end-of-sequence token", "one that has it: it ends every answer")
    return int(end)


def replies(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Question]) -> Iterator[Reply]:
    """Each example as tokens. Question and answer are cut apart: a token never has letters of both."""
    end = end_of(tokenizer)
    for place in range(0, len(examples), _AT_ONCE):
        part = examples[place : place + _AT_ONCE]
        asked = tokenizer([one.question for one in part], verbose=False).input_ids
        said = tokenizer([one.answer.rstrip() for one in part], add_special_tokens=False, verbose=False).input_ids
        for question, answer in zip(asked, said, strict=True):
            # Some tokenizers end every text they are given.
            read = question[:-1] if question[-1:] == [end] else question
            if not read:
                reject("--dataset", "a question without a single token", "questions with text")
            yield Reply((*read, *answer, end), len(read))


@dataclass(frozen=True, eq=False)
class Documents:
    """Many documents in few arrays: tokens one after the other, where each begins, and where its answer does."""

    ids: np.ndarray
    begins: np.ndarray
    """`[documents + 1]`: the last is the end of them all."""

    starts: np.ndarray
    """Tokens of the question of each."""

    dropped: int = 0
    """How many are not there because they are longer than allowed."""

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        examples: Sequence[Question],
        most: int | None = None,
        note: Callable[[int], None] = lambda done: None,
    ) -> Documents:
        """The documents of up to `most` tokens; `note` is told how many have been read."""
        ids: list[np.ndarray] = []
        starts, dropped = [], 0
        for done, reply in enumerate(replies(tokenizer, examples), 1):
            if most is not None and len(reply.ids) > most:
                dropped += 1
            else:
                ids.append(np.array(reply.ids, dtype=np.int32))
                starts.append(reply.start)
            if done % _AT_ONCE == 0:
                note(done)
        if not ids:
            reject("examples", f"{len(examples)} of which none fits", f"examples of up to {most} tokens")
        begins = np.cumsum([0, *(len(one) for one in ids)], dtype=np.int64)
        return cls(np.concatenate(ids), begins, np.array(starts, dtype=np.int64), dropped)

    def __len__(self) -> int:
        return len(self.starts)

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each."""
        return np.diff(self.begins)

    @property
    def answer_length(self) -> float:
        """Tokens of an answer on average."""
        return float((self.lengths - self.starts).mean())

    def __getitem__(self, number: int) -> Reply:
        if not 0 <= number < len(self):
            raise IndexError(number)
        one = self.ids[self.begins[number] : self.begins[number + 1]]
        return Reply(tuple(one.tolist()), int(self.starts[number]))


def fingerprint(examples: Sequence[Question]) -> str:
    """Tells one set of examples from another, order included."""
    digest = hashlib.sha256()
    for one in examples:
        digest.update(f"{one.algo_name}\0{one.length}\0{one.question}\0{one.answer}\1".encode())
    return digest.hexdigest()[:16]
