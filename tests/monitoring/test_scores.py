"""Scores of rows and conformal thresholds: what they weigh, and how often they raise a false alarm."""

from __future__ import annotations

import math
import sys
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sharpmax.errors import ArgumentError, ArgumentTypeError, MissingExtraError
from sharpmax.integrations.transformers.interface import installed
from sharpmax.monitoring.scores import (
    LEAST_LEARNED,
    Baseline,
    Report,
    conformal_threshold,
    learn,
    least_examples,
    split,
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
    assert conformal_threshold(torch.zeros(0, 3), rate).tolist() == [math.inf] * 3


@pytest.mark.parametrize(("count", "rate", "held"), [(400, 0.01, 200), (107, 0.01, 99), (12, 0.2, 4)])
def test_parts_are_apart_and_the_rate_decides_how_many(count: int, rate: float, held: int) -> None:
    base, judged = split(count, rate)
    assert sorted([*base.tolist(), *judged.tolist()]) == list(range(count))
    assert len(judged) == held
    with pytest.raises(ArgumentError, match="give 107 or more"):
        split(98 + LEAST_LEARNED, 0.01)


def test_false_alarms_are_as_rare_as_asked_for_on_average() -> None:
    """Over references drawn again and again; fitting weights and threshold on the same prompts would fail this."""
    rate, tries = 0.1, 120
    rows, valid = drawn(4000, seed=10_000)
    found = torch.zeros(3)
    for seed in range(tries):
        known = learn(*drawn(60, seed), HEADS, rate)
        assert known.generated is not None
        first = known.prompt.score(rows[:, 0])
        later = known.generated.score(rows[:, 1:]).masked_fill(~valid[:, 1:], -math.inf).amax(1)
        alarms = (
            first > known.prompt.threshold,
            first.maximum(later) > known.generated.threshold,
            rows[:, 0] > known.prompt.limits,
        )
        found += torch.tensor([float(one.double().mean()) for one in alarms]) / tries
    # 30 scores give ⌊31·0.1⌋/31; the error of the mean over the references is about 0.005.
    assert torch.allclose(found, torch.tensor(3 / 31), atol=0.02)


prometheus = pytest.importorskip("prometheus_client", reason="needs the extra monitor")


def test_requests_scores_thresholds_and_heads_are_counted() -> None:
    one, registry = model(), prometheus.CollectorRegistry()
    with monitored(one, metrics=registry, false_alarms=0.4) as monitor, torch.no_grad():

        def value(name: str, **labels: str) -> float | None:
            found: float | None = registry.get_sample_value(
                f"sharpmax_monitor_{name}", {"model": "LlamaForCausalLM", **labels}
            )
            return found

        assert value("requests_total", outcome="alarm") == 0.0
        found = []
        for number in range(6):
            with monitor.request() as r:
                one(torch.randint(3, 97, (2, 5 + number)))
            found.append(r)
        with monitor.request():
            pass
        alarms = sum(r.alarm for r in found)
        assert 0 < alarms < 6
        assert value("requests_total", outcome="alarm") == alarms
        assert value("requests_total", outcome="ok") == 6 - alarms
        assert value("requests_total", outcome="no_score") == 1
        assert value("score_count") == 12
        for limit in (0.0, 1.0):
            below = sum(score is not None and score <= limit for r in found for score in r.scores)
            assert value("score_bucket", le=str(limit)) == below > 0
        assert value("threshold", rows="prompt") == monitor.thresholds["prompt"]
        for layer in (0, 1):
            above = sum(head.layer == layer for r in found for head in r.heads)
            assert value("heads_above_total", layer=str(layer)) == above > 0


def test_monitors_share_a_registry_and_mistakes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    one, registry = model(), prometheus.CollectorRegistry()
    for _ in range(2):
        with monitored(one, metrics=registry), torch.no_grad():
            one(torch.tensor([[5, 6]]))
    assert registry.get_sample_value("sharpmax_monitor_score_count", {"model": "LlamaForCausalLM"}) == 2.0
    with pytest.raises(ArgumentTypeError, match="metrics"):
        monitored(one, metrics="yes")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtraError, match=r"pip install .*'prometheus-client>="):
        monitored(one, metrics=True)
    assert installed(one) is None
    monitored(one).close()


CONTEXT, NAN = 64, 96


@cache
def pair() -> tuple[Any, Any, list[Report]]:
    """The same model twice, one of them monitored; the token 96 is not a number."""
    plain, one, reports = model(), model(), list[Report]()
    monitored(one, reference=[[n % 90 for n in range(n, 2 * n)] for n in range(3, 33)], callback=reports.append)
    with torch.no_grad():
        for this in (plain, one):
            this.model.embed_tokens.weight[NAN] = torch.nan
    return plain, one, reports


def outcome(one: Any, given: dict[str, torch.Tensor], new: int) -> Any:
    """What a model gives, or the kind of error it ends with."""
    try:
        with torch.no_grad():
            if new == 0:
                return one(**given).logits.nan_to_num(-1.0)
            return one.generate(**given, max_new_tokens=new, do_sample=False, pad_token_id=0, suppress_tokens=[NAN])
    except Exception as problem:
        return type(problem)


def check(given: dict[str, torch.Tensor], new: int) -> list[Report]:
    plain, one, reports = pair()
    reports.clear()
    expected, found = outcome(plain, given, new), outcome(one, given, new)
    if isinstance(found, type):
        assert expected is found
        assert reports == []  # the model refused it: there was no request
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


@settings(max_examples=10)
@given(st.lists(st.sampled_from([5, 6, NAN]), min_size=1, max_size=9), st.sampled_from([0, 3]))
@pytest.mark.filterwarnings("ignore")
def test_logits_that_are_not_numbers(ids: list[int], new: int) -> None:
    reports = check({"input_ids": torch.tensor([ids])}, new)
    assert len(reports) == 1
    if NAN in ids:
        assert reports[0].scores == [None]


@pytest.mark.parametrize(("shape", "new"), [((1, 0), 0), ((2, 0), 3), ((0, 4), 0)])
@pytest.mark.filterwarnings("ignore")
def test_nothing_at_all(shape: tuple[int, int], new: int) -> None:
    check({"input_ids": torch.zeros(shape, dtype=torch.long)}, new)


@pytest.mark.parametrize("rows", [1, 5])
def test_embedded_prompts(rows: int) -> None:
    reports = check({"inputs_embeds": torch.randn(rows, 7, 32, generator=torch.Generator().manual_seed(rows))}, 0)
    assert len(reports[0].scores) == rows
    assert None not in reports[0].scores
