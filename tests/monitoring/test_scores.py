"""Rules that sum up a row: what they weigh, and that they find what they are meant to find."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sharpmax.monitoring.scores import RULES, learn

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
