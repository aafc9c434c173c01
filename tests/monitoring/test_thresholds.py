"""A conformal threshold is exceeded exactly as often as asked for, whatever the scores."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sharpmax.errors import ArgumentError, ArgumentTypeError
from sharpmax.monitoring.learning import (
    LEAST_LEARNED,
    Reference,
    check_rate,
    conformal_threshold,
    learned,
    least_examples,
    split,
)
from sharpmax.monitoring.scores import RULES, Learned


def exceeding(scores: Tensor, rate: float) -> int:
    """How many of the scores exceed the threshold of all the others."""
    others = [torch.cat((scores[:i], scores[i + 1 :])) for i in range(len(scores))]
    return sum(bool(one > conformal_threshold(rest, rate)) for one, rest in zip(scores, others, strict=True))


RATES = st.sampled_from([0.01, 0.03, 0.05, 0.1, 0.29, 0.5, 0.7])


@given(st.integers(2, 150), RATES, st.integers(0, 99))
def test_each_rank_is_as_likely_so_the_rate_is_exact(many: int, rate: float, seed: int) -> None:
    """Of n + 1 scores each is the fresh one once: ⌊(n + 1)·rate⌋ of them exceed the threshold of the others."""
    scores = torch.randperm(many, generator=torch.Generator().manual_seed(seed)).double().exp2()
    above = exceeding(scores, rate)
    assert above == math.floor(round(rate * many, 9))


@given(st.lists(st.integers(0, 3), min_size=2, max_size=60), RATES)
def test_ties_never_raise_the_rate(scores: list[int], rate: float) -> None:
    values = torch.tensor(scores).double()
    above = sum(
        bool(values[i] > conformal_threshold(torch.cat((values[:i], values[i + 1 :])), rate))
        for i in range(len(values))
    )
    assert above <= rate * len(values) + 1e-9


@pytest.mark.parametrize("rate", [0.01, 0.05, 0.1, 0.3])
def test_as_many_as_needed_and_not_one_fewer(rate: float) -> None:
    needed = least_examples(rate)
    assert conformal_threshold(torch.arange(needed).double(), rate).isfinite()
    assert conformal_threshold(torch.arange(needed - 1).double(), rate).isinf()
    assert conformal_threshold(torch.zeros(0, 3), rate).tolist() == [math.inf] * 3


def test_parts_are_apart_and_the_rate_decides_how_many() -> None:
    base, held = split(400, 0.01)
    assert sorted([*base.tolist(), *held.tolist()]) == list(range(400))
    assert len(held) == 200
    base, held = split(99 + LEAST_LEARNED, 0.01)
    assert (len(base), len(held)) == (LEAST_LEARNED, 99)
    assert [len(part) for part in split(12, 0.2)] == [LEAST_LEARNED, 4]
    with pytest.raises(ArgumentError, match="give 107 or more"):
        split(98 + LEAST_LEARNED, 0.01)


@pytest.mark.parametrize("rate", [0.0, 1.0, -1, math.nan, 5])
def test_rates_that_mean_nothing(rate: float) -> None:
    with pytest.raises(ArgumentError, match="false_alarms"):
        check_rate(rate)
    with pytest.raises(ArgumentTypeError):
        check_rate("1%")


def drawn(prompts: int, seed: int) -> Reference:
    """Rows of two layers, heavy-tailed, dependent on each other and on the length; some sequences end early."""
    generator = torch.Generator().manual_seed(seed)
    found = Reference(prompts, 2, [(layer, head) for layer in range(2) for head in range(3)])
    found.count = torch.randint(5, 500, (prompts,), generator=generator)
    common = torch.randn(prompts, 1, generator=generator).exp()
    slope = torch.linspace(-0.5, 1, 6)
    found.entropy = (
        found.count.log()[:, None] * slope + common * torch.randn(prompts, 6, generator=generator)
    ).double()
    found.later = found.entropy[:, None] + torch.randn(prompts, 2, 6, generator=generator).double()
    found.later_count = found.count[:, None] + torch.tensor([8, 16])
    ends = torch.randint(0, 3, (prompts, 1), generator=generator)
    found.counts = torch.arange(2) < ends
    return found


def rates_of(known: Learned, fresh: Reference) -> tuple[float, float, float]:
    """How often fresh prompts exceed the threshold; the same of whole requests; and how often a head its own."""
    prompt, generated = known.prompt, known.generated
    assert generated is not None
    first = prompt.baseline.score(fresh.entropy)
    later = generated.baseline.score(fresh.later).masked_fill(~fresh.counts, -math.inf)
    whole = torch.maximum(first, later.amax(1))
    heads = (fresh.entropy > prompt.limits).double().mean()
    return (
        float((first > prompt.threshold).double().mean()),
        float((whole > generated.threshold).double().mean()),
        float(heads),
    )


@pytest.mark.parametrize("rule", list(RULES))
def test_false_alarms_are_as_rare_as_asked_for_on_average(rule: str) -> None:
    """Over references drawn again and again; fitting weights and threshold on the same prompts would fail this."""
    rate, tries = 0.1, 120
    fresh = drawn(4000, seed=10_000)
    found = torch.tensor([rates_of(learned(drawn(60, seed), rate, rule), fresh) for seed in range(tries)])
    # 30 scores give ⌊31·0.1⌋/31; the error of the mean over the references is about 0.005.
    assert torch.allclose(found.mean(0), torch.tensor(3 / 31), atol=0.02)
