"""Learn reference statistics and alarm thresholds from in-distribution prompts."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sharpmax.errors import reject, reject_type
from sharpmax.models.language import context_of
from sharpmax.models.scoring import Reply, batches
from sharpmax.monitoring.observer import Observer
from sharpmax.monitoring.requests import Report, Request, Run
from sharpmax.monitoring.scores import Kind, Learned, learn, request_score

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LEAST_LEARNED = 8
"""Fewer examples give no usable means and scales."""

_ROUNDING = 1e-9
"""Products of decimal fractions with whole numbers may miss the whole number they mean."""


def check_rate(rate: object, name: str = "false_alarms") -> float:
    """Return a false-alarm rate, or refuse it."""
    allowed = "a share above 0 and below 1, as 0.01"
    if isinstance(rate, bool) or not isinstance(rate, (int, float)):
        reject_type(name, repr(rate), allowed)
    if not 0.0 < rate < 1.0:
        reject(name, rate, allowed)
    return float(rate)


def least_examples(rate: float) -> int:
    """How many scores a threshold for such a rate needs.

    >>> least_examples(0.01)
    99
    """
    return max(1, math.ceil(1.0 / rate - _ROUNDING) - 1)


def conformal_threshold(scores: Tensor, rate: float) -> Tensor:
    """The threshold, along the first axis, that one more score like these n exceeds with probability ≤ `rate`.

    It is the score of rank ⌈(n + 1)(1 − rate)⌉: if the fresh score is exchangeable with the others, each of its n + 1
    ranks among them is as likely as another, so the probability is ⌊(n + 1)·rate⌋ / (n + 1) without ties and less with
    them, for scores of any distribution. With fewer scores than `least_examples` it is infinite.

    >>> conformal_threshold(torch.arange(1.0, 100.0), 0.05)
    tensor(95.)
    """
    above = math.floor(rate * (len(scores) + 1) + _ROUNDING)
    if above == 0:
        return torch.full_like(scores[0], torch.inf) if len(scores) else scores.new_full(scores.shape[1:], torch.inf)
    return scores.sort(0).values[len(scores) - above]


def split(count: int, rate: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Split `count` examples at random: which to learn from, and which to take the threshold from.

    Half each, or as many for the threshold as the rate needs; an error if too few would be left to learn from.
    """
    needed = least_examples(rate)
    judged = max(min(count // 2, count - LEAST_LEARNED), needed)
    if count - judged < LEAST_LEARNED:
        hint = f"give {needed + LEAST_LEARNED} or more, or ask for a higher rate"
        reject("reference", f"{count} prompts for a false-alarm rate of {rate:g}", "prompts enough for the rate", hint)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[judged:], order[:judged]


_ALLOWED = "a list of prompts, each a text or a list of tokens"
_AT_ONCE, _AT_ONCE_ON_CPU = 16_384, 2_048


class Reference:
    """Rows of N prompts: entropies `[N, heads]` of the last and `[N, K, heads]` of generated ones, and their keys."""

    def __init__(self, prompts: int, rows: int, heads: Sequence[tuple[int, int]]) -> None:
        self.heads = heads
        self.entropy = torch.zeros(prompts, len(heads), dtype=torch.float64)
        self.count = torch.zeros(prompts, dtype=torch.int64)
        self.later = torch.zeros(prompts, rows, len(heads), dtype=torch.float64)
        self.later_count = torch.zeros(prompts, rows, dtype=torch.int64)
        self.counts = torch.zeros(prompts, rows, dtype=torch.bool)
        """Which of the generated rows exist `[N, K]`: a sequence may end before."""

    def put(self, places: Sequence[int], run: Run) -> None:
        """Keep the rows of a batch."""
        if run.prompt is None:
            reject("model", "a model whose attention was not observed (compiled?)", "a model that is not compiled")
        at = torch.tensor(places)
        self.entropy[at], self.count[at] = run.prompt.entropy.cpu().double(), run.prompt.count.cpu()
        for number, row in enumerate(run.generated):
            self.later[at, number], self.later_count[at, number] = row.entropy.cpu().double(), row.count.cpu()
            self.counts[at, number] = True if row.counts is None else row.counts.cpu()
        for place in places:
            if not (self.entropy[place].isfinite().all() and self.later[place].isfinite().all()):
                given = f"prompt {place}, whose attention is not a number (NaN)"
                reject("reference", given, "prompts a model can read")


def token_lists(reference: object, tokenizer: PreTrainedTokenizerBase | None) -> list[list[int]]:
    """The prompts of a reference as tokens."""
    if isinstance(reference, (str, bytes)) or not isinstance(reference, Iterable):
        reject_type("reference", type(reference).__name__, _ALLOWED)
    return [_tokens(number, prompt, tokenizer) for number, prompt in enumerate(reference)]


def _tokens(number: int, prompt: Any, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            reject("tokenizer", None, "the model's tokenizer, where prompts are texts")
        prompt = tokenizer(prompt).input_ids
    ids = prompt.tolist() if isinstance(prompt, Tensor) else prompt
    if not isinstance(ids, (list, tuple)) or not all(type(one) is int for one in ids):
        reject_type("reference", f"{type(prompt).__name__} as prompt {number}", _ALLOWED)
    if not ids:
        reject("reference", f"prompt {number} without a token", "prompts of one token or more")
    return list(ids)


def observed(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], *, every: int = 8, generated: int = 0
) -> Reference:
    """Let the model read prompts and generate until `generated` of its own tokens, each the `every`-th, were read."""
    context, longest = context_of(model), max(map(len, prompts), default=0)
    new = generated * every + 1 if generated else 0
    if context is not None and longest + new > context:
        hint = "leave out the longest, or learn from fewer generated rows" if new else "leave out the longest"
        given = f"a prompt of {longest} tokens" + (f" and {new} to generate" if new else "")
        reject("reference", given, f"up to {context} tokens, what the model can read", hint)
    problems: list[Exception] = []

    def failed(problem: Exception) -> str:
        problems.append(problem)
        return str(problem)

    def begun() -> Request:
        return Request(lambda request: Report(()))

    observer = Observer(model, every=every, window=generated, begun=begun, ended=lambda one: None, failed=failed)
    found = Reference(len(prompts), generated, observer.heads)
    try:
        for batch in batches([Reply(tuple(ids), len(ids)) for ids in prompts], tokens_at_once(model)):
            with torch.no_grad(), observer.request() as request:
                read(model, [prompts[place] for place in batch], new)
            if problems:
                raise problems[0]
            found.put(batch, request.runs[0])
    finally:
        observer.close()
    return found


def tokens_at_once(model: PreTrainedModel) -> int:
    """How many tokens a batch may have: a GPU is fastest with many, a CPU with what its cache holds."""
    return _AT_ONCE_ON_CPU if model.device.type == "cpu" else _AT_ONCE


def read(model: Any, prompts: Sequence[Sequence[int]], new: int = 0) -> None:
    """Let a model read prompts as one batch, and generate `new` tokens.

    Padding is on the left to generate and on the right otherwise, so that positions need not be passed.
    """
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, one in enumerate(prompts):
        place = slice(longest - len(one), longest) if new else slice(len(one))
        ids[row, place], mask[row, place] = torch.tensor(one), 1
    given = {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}
    if new:
        model.generate(**given, max_new_tokens=new, do_sample=False, pad_token_id=0)
        return
    known = inspect.signature(model.forward).parameters
    model(**given, **{name: value for name, value in (("use_cache", False), ("logits_to_keep", 1)) if name in known})


def learned(reference: Reference, rate: float, rule: str) -> Learned:
    """Baselines from one part of the reference, thresholds from the other."""
    base, held = split(len(reference.entropy), rate)
    layers = torch.tensor([layer for layer, _ in reference.heads])
    baseline = learn(reference.entropy[base], reference.count[base], layers, rule)
    first = baseline.score(reference.entropy[held])
    limits = conformal_threshold(reference.entropy[held], rate)
    prompt = Kind(baseline, limits, float(conformal_threshold(first, rate)))
    exist = reference.counts[base]
    if exist.sum() < LEAST_LEARNED:
        return Learned(reference.heads, prompt, None)
    later = learn(reference.later[base][exist], reference.later_count[base][exist], layers, rule)
    counts, entropy = reference.counts[held], reference.later[held]
    whole = request_score(first, later.score(entropy), counts)
    going_on = counts.any(1)
    highest = entropy.masked_fill(~counts[..., None], -torch.inf)[going_on].amax(1)
    generated = Kind(later, conformal_threshold(highest, rate), float(conformal_threshold(whole, rate)))
    return Learned(reference.heads, prompt, generated)
