"""A question with its answer, in the columns of the public CLRS-Text datasets."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

__all__ = ["Example", "final_answer", "problem"]

_TRACE_ASKED = ", initial_trace: "
_BEFORE_FINAL = "|"


@dataclass(frozen=True)
class Example:
    """One row of a dataset; with a trace the answer is `"<states> | <final answer>"`."""

    question: str
    answer: str
    algo_name: str
    length: int

    @property
    def characters(self) -> int:
        """The length of its text."""
        return len(self.question) + len(self.answer)

    def line(self) -> str:
        """Return the example as a line of JSONL."""
        return json.dumps(asdict(self), ensure_ascii=False) + "\n"


def final_answer(text: str) -> str:
    """Return what `text` answers in the end: what follows the last `|`, spaces made equal.

    An answer ends at its first blank line; what a model writes after that does not count.

    >>> final_answer("[3 1 2], [1 3 2] |  [1 2 3]\\n\\n")
    '[1 2 3]'
    """
    answer = text.lstrip().partition("\n\n")[0]
    return " ".join(answer.rpartition(_BEFORE_FINAL)[2].split())


def problem(question: str) -> bytes:
    """Return 16 bytes that tell what a question is about: the same with and without a trace asked for."""
    name, _, rest = question.partition("\n")
    given = rest.partition("\n")[0].partition(_TRACE_ASKED)[0]
    return hashlib.blake2b(f"{name}\n{given}".encode(), digest_size=16).digest()
