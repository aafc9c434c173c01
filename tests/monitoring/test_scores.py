"""Rules that sum up a row: what they weigh, and that they find what they are meant to find."""

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
from sharpmax.monitoring.scores import RULES, Learned, learn

LAYERS = torch.arange(4).repeat_interleave(3)
SLOPES = torch.tensor([1.0, 0.5, 0.0, -0.5] * 3).double()


def rows(count: int, seed: int, low: float = 3.0, high: float = 5.0) -> tuple[Tensor, Tensor]:
    """Entropies whose heads rise, stay or fall with ln n."""
    generator = torch.Generator().manual_seed(seed)
    length = low + (high - low) * torch.rand(count, generator=generator).double()
    noise = 0.1 * torch.randn(count, len(SLOPES), generator=generator).double()
    return 2.0 + length[:, None] * SLOPES + noise, length.exp()


@pytest.mark.parametrize("rule", list(RULES))
def test_scores_of_the_reference_have_mean_0_and_deviation_1(rule: str) -> None:
    entropy, count = rows(500, 0)
    score = learn(entropy, count, LAYERS, rule).score(entropy)
    assert float(score.mean()) == pytest.approx(0.0, abs=1e-9)
    assert float(score.std()) == pytest.approx(1.0)


@pytest.mark.parametrize("rule", list(RULES))
def test_not_a_number_stays_in_its_row(rule: str) -> None:
    entropy, count = rows(50, 0)
    baseline = learn(entropy, count, LAYERS, rule)
    invalid = entropy.clone()
    invalid[3, 5] = torch.nan
    found, expected = baseline.score(invalid), baseline.score(entropy)
    assert found.isnan().nonzero()[:, 0].tolist() == [3]
    assert torch.equal(found[~found.isnan()], expected[~found.isnan()])


def test_heads_that_disperse_weigh_as_much_as_they_do() -> None:
    entropy, count = rows(2000, 0)
    weights = learn(entropy, count, LAYERS, "dispersing").part
    correlation = torch.corrcoef(torch.cat((entropy.T, count.log()[None])))[-1, :-1].clamp_min(0.0)
    assert torch.allclose(weights, correlation / correlation.sum(), atol=1e-3)
    assert (weights[SLOPES < 0] == 0).all()
    same = learn(entropy, torch.full_like(count, 64.0), LAYERS, "dispersing").part
    assert torch.allclose(same, torch.full_like(same, 1 / len(same)))


def test_distance_is_that_of_mahalanobis() -> None:
    entropy, count = rows(300, 0)
    baseline = learn(entropy, count, LAYERS, "distance")
    excess = baseline.excess(entropy)
    means = excess.view(300, 4, 3).mean(-1)
    covariance = torch.cov(means.T)
    covariance += 0.1 * covariance.diagonal().mean() * torch.eye(4).double()
    expected = torch.einsum("ni,ij,nj->n", means, covariance.inverse(), means).sqrt()
    assert torch.allclose(RULES["distance"].score(excess, baseline.part), expected)


def test_a_reference_of_several_kinds_does_not_hide_what_is_new_in_each() -> None:
    """Two kinds of prompts far apart; a rise of all heads within either counts, and which kind it is does not."""
    generator = torch.Generator().manual_seed(0)
    apart = torch.tensor([3.0] * 8 + [-3.0] * 4).double()

    def drawn(count: int, kind: int, rise: float) -> Tensor:
        return 3.0 + kind * apart + rise + 0.1 * torch.randn(count, 12, generator=generator).double()

    reference = torch.cat((drawn(200, 0, 0.0), drawn(200, 1, 0.0)))
    count = torch.full((400,), 64.0)
    usual, risen = (torch.cat((drawn(50, 0, rise), drawn(50, 1, rise))) for rise in (0.0, 0.3))
    limits = {}
    for rule in ("unexplained", "mean"):
        baseline = learn(reference, count, LAYERS, rule)
        limits[rule] = float(baseline.score(risen).min() - baseline.score(usual).max())
    assert limits["unexplained"] > 0 > limits["mean"]


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
