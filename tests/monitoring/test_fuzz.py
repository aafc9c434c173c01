"""Whatever a prompt looks like, the monitor gives a score or says why not, and the model does what it did before."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpmax.monitoring.monitor import Monitor
from sharpmax.monitoring.requests import Report
from tests.monitoring.monitored import model, monitored

CONTEXT, NAN = 64, 96
TOKENS = st.integers(0, 95)


@cache
def pair() -> tuple[Any, Any, Monitor, list[Report]]:
    """The same model twice, one of them monitored; the token 96 is not a number."""
    plain, one, reports = model(), model(), list[Report]()
    monitor = monitored(one, reference=[[token % 90 for token in range(n, 2 * n)] for n in range(3, 33)])
    monitor._callback = reports.append
    with torch.no_grad():
        for this in (plain, one):
            this.model.embed_tokens.weight[NAN] = torch.nan
    return plain, one, monitor, reports


def outcome(one: Any, given: dict[str, torch.Tensor], new: int) -> Any:
    """What a model gives, or the kind of error it ends with."""
    try:
        with torch.no_grad():
            if new == 0:
                return one(**given).logits
            return one.generate(**given, max_new_tokens=new, do_sample=False, pad_token_id=0, suppress_tokens=[NAN])
    except Exception as problem:
        return type(problem)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())
    return bool(one is other)


def check(given: dict[str, torch.Tensor], new: int) -> list[Report]:
    plain, one, _, reports = pair()
    reports.clear()
    expected, found = outcome(plain, given, new), outcome(one, given, new)
    assert same(expected, found)
    if isinstance(found, type):
        assert reports == []  # the model refused it: there was no request
    else:
        assert len(reports) == 1
        assert all((one.score is None) == (one.why is not None) for one in reports[0].sequences)
        assert reports[0].sequences or reports[0].why
        assert "failed" not in (reports[0].why or "")
    return list(reports)


@st.composite
def batches(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Batches of any lengths, padding on either side, in the middle or everywhere, and longer than the context."""
    rows, length = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 7, 30, CONTEXT, CONTEXT + 9]))
    ids = torch.tensor([draw(st.lists(TOKENS, min_size=length, max_size=length)) for _ in range(rows)])
    kind = draw(st.sampled_from(["none", "ones", "left", "right", "holes", "nothing"]))
    if kind == "none":
        return {"input_ids": ids}
    mask = torch.ones_like(ids)
    for row in range(rows):
        cut = draw(st.integers(0, length))
        if kind == "left":
            mask[row, :cut] = 0
        elif kind == "right":
            mask[row, cut:] = 0
        elif kind == "holes":
            mask[row] = torch.tensor(draw(st.lists(st.integers(0, 1), min_size=length, max_size=length)))
    if kind == "nothing":
        mask.zero_()
    return {"input_ids": ids, "attention_mask": mask}


@settings(max_examples=25)
@given(batches(), st.sampled_from([0, 0, 1, 5]))
@pytest.mark.filterwarnings("ignore")
def test_any_batch_has_a_score_or_a_reason(batch: dict[str, torch.Tensor], new: int) -> None:
    reports = check(batch, new)
    mask = batch.get("attention_mask")
    if reports and mask is not None:
        real = mask.any(1).tolist()
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


@given(st.integers(1, 5), st.integers(1, 12))
@settings(max_examples=5)
def test_embedded_prompts(rows: int, length: int) -> None:
    generator = torch.Generator().manual_seed(rows * length)
    reports = check({"inputs_embeds": torch.randn(rows, length, 32, generator=generator)}, 0)
    assert len(reports[0].scores) == rows
    assert None not in reports[0].scores
