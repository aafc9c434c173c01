"""Whatever a prompt looks like, the monitor gives a score or says why not, and the model does what it did before."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpmax.monitoring.scores import Report
from tests.monitoring.monitored import model, monitored

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
