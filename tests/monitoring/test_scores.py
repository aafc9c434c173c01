"""Scores of rows and conformal thresholds: what they weigh, and how often they raise a false alarm."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sharpmax.monitoring.scores import (
    Baseline,
    Report,
    conformal_threshold,
    learn,
    least_examples,
)
from tests.monitoring.monitored import model, monitored

HEADS = [(layer, head) for layer in range(2) for head in range(3)]


def drawn(prompts: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rows of two layers, heavy-tailed, dependent on each other and on the length; some sequences end early."""
    generator = torch.Generator().manual_seed(seed)
    length = torch.randint(5, 500, (prompts, 1), generator=generator).log()
    common = torch.randn(prompts, 1, generator=generator).exp()
    first = length * torch.linspace(-0.5, 1, 6) + common * torch.randn(prompts, 6, generator=generator)
    later = first[:, None] + torch.randn(prompts, 2, 6, generator=generator)
    valid = torch.arange(3) <= torch.randint(0, 3, (prompts, 1), generator=generator)
    return torch.cat((first[:, None], later), 1).double(), valid


def test_scores_of_the_reference_have_mean_0_and_deviation_1_and_nan_stays_in_its_row() -> None:
    entropy = drawn(500, 0)[0][:, 0]
    baseline = Baseline.of(entropy)
    score = baseline.score(entropy)
    assert float(score.mean()) == pytest.approx(0.0, abs=1e-9)
    assert float(score.std()) == pytest.approx(1.0)
    entropy[3, 5] = torch.nan
    invalid = baseline.score(entropy)
    assert invalid.isnan().nonzero()[:, 0].tolist() == [3]
    assert torch.equal(invalid[~invalid.isnan()], score[~invalid.isnan()])


def test_a_reference_of_several_kinds_does_not_hide_what_is_new_in_each() -> None:
    """Two kinds of prompts far apart; a rise of all heads within either counts, and which kind it is does not."""
    generator = torch.Generator().manual_seed(0)
    apart = torch.tensor([3.0] * 8 + [-3.0] * 4).double()

    def both(count: int, rise: float) -> Tensor:
        kinds = [3.0 + kind * apart + rise + 0.1 * torch.randn(count, 12, generator=generator) for kind in (0, 1)]
        return torch.cat(kinds).double()

    baseline = Baseline.of(both(200, 0.0))
    usual, risen = both(50, 0.0), both(50, 0.3)
    assert baseline.score(risen).min() > baseline.score(usual).max()
    assert risen.mean(-1).min() < usual.mean(-1).max()  # a plain mean over heads does not tell them apart


RATES = st.sampled_from([0.01, 0.03, 0.05, 0.1, 0.29, 0.5, 0.7])


@given(st.integers(2, 100), RATES, st.integers(0, 99), st.booleans())
def test_the_rate_of_a_threshold_is_exact_and_ties_never_raise_it(
    many: int, rate: float, seed: int, ties: bool
) -> None:
    """Of n + 1 scores each is the fresh one once: ⌊(n + 1)·rate⌋ of them exceed the threshold of the others."""
    scores = torch.randperm(many, generator=torch.Generator().manual_seed(seed)).double()
    scores = scores // 4 if ties else scores.exp2()
    others = [torch.cat((scores[:i], scores[i + 1 :])) for i in range(many)]
    above = sum(bool(one > conformal_threshold(rest, rate)) for one, rest in zip(scores, others, strict=True))
    allowed = math.floor(round(rate * many, 9))
    assert above <= allowed if ties else above == allowed


@pytest.mark.parametrize("rate", [0.01, 0.05, 0.1, 0.3])
def test_as_many_as_needed_and_not_one_fewer(rate: float) -> None:
    needed = least_examples(rate)
    assert conformal_threshold(torch.arange(needed).double(), rate).isfinite()
    assert conformal_threshold(torch.arange(needed - 1).double(), rate).isinf()
    assert conformal_threshold(torch.zeros(0), rate).isinf()


def test_false_alarms_are_as_rare_as_asked_for_on_average() -> None:
    """Over references drawn again and again; fitting weights and threshold on the same prompts would fail this."""
    rate, tries = 0.1, 60
    rows, valid = drawn(4000, seed=10_000)
    found = torch.zeros(2)
    for seed in range(tries):
        known = learn(*drawn(60, seed), HEADS, rate)
        assert known.generated is not None
        first = known.prompt.score(rows[:, 0])
        later = known.generated.score(rows[:, 1:]).masked_fill(~valid[:, 1:], -math.inf).amax(1)
        alarms = (
            first > known.prompt.threshold,
            first.maximum(later) > known.generated.threshold,
        )
        found += torch.tensor([float(one.double().mean()) for one in alarms]) / tries
    # 30 scores give ⌊31·0.1⌋/31; the error of the mean over the references is about 0.005.
    assert torch.allclose(found, torch.tensor(3 / 31), atol=0.02)


CONTEXT = 64


@cache
def pair() -> tuple[Any, Any, list[Report]]:
    """The same model twice, one of them monitored."""
    plain, one, reports = model(), model(), list[Report]()
    monitored(one, callback=reports.append)
    return plain, one, reports


def outcome(one: Any, given: dict[str, torch.Tensor], new: int) -> Any:
    """The output of a model, or the type of the error it raises."""
    try:
        with torch.no_grad():
            if new == 0:
                return one(**given).logits.nan_to_num(-1.0)
            return one.generate(**given, max_new_tokens=new, do_sample=False, pad_token_id=0)
    except Exception as problem:
        return type(problem)


def check(given: dict[str, torch.Tensor], new: int) -> list[Report]:
    plain, one, reports = pair()
    reports.clear()
    expected, found = outcome(plain, given, new), outcome(one, given, new)
    if isinstance(found, type):
        assert expected is found
        assert reports == []  # the model raised an error, so there was no request
    else:
        assert torch.equal(expected, found)
        assert len(reports) == 1
        assert all((one.score is None) == (one.why is not None) for one in reports[0].sequences)
        assert reports[0].sequences or reports[0].why
        assert "failed" not in (reports[0].why or "")
    return list(reports)


@settings(max_examples=25)
@given(
    st.integers(1, 3),
    st.sampled_from([1, 2, 7, 30, CONTEXT, CONTEXT + 9]),
    st.sampled_from(["none", "ones", "left", "right", "holes", "nothing"]),
    st.integers(0, 999),
    st.sampled_from([0, 0, 1, 5]),
)
@pytest.mark.filterwarnings("ignore")
def test_any_batch_has_a_score_or_a_reason(rows: int, length: int, kind: str, seed: int, new: int) -> None:
    """Any lengths, padding on either side, in the middle or everywhere, and longer than the context."""
    generator = torch.Generator().manual_seed(seed)
    batch = {"input_ids": torch.randint(96, (rows, length), generator=generator)}
    places, cut = torch.arange(length), torch.randint(length + 1, (rows, 1), generator=generator)
    holes = torch.randint(2, (rows, length), generator=generator)
    masks = {"ones": cut >= 0, "left": places >= cut, "right": places < cut, "holes": holes, "nothing": cut < 0}
    if kind != "none":
        batch["attention_mask"] = masks[kind].long().expand(rows, length)
    reports = check(batch, new)
    if reports and kind != "none":
        real = batch["attention_mask"].any(1).tolist()
        assert [one.score is not None for one in reports[0].sequences] == real


@pytest.mark.filterwarnings("ignore")
def test_empty_batches() -> None:
    for shape, new in (((1, 0), 0), ((2, 0), 3), ((0, 4), 0)):
        check({"input_ids": torch.zeros(shape, dtype=torch.long)}, new)


def test_embedded_prompts() -> None:
    (report,) = check({"inputs_embeds": torch.randn(5, 7, 32)}, 0)
    assert len(report.scores) == 5
    assert None not in report.scores
