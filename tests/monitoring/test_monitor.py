"""The monitor: rows, scores, requests and files; outputs of the model do not change."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import sharpmax as sm
from sharpmax.errors import ArgumentError, FileFormatError
from sharpmax.integrations.transformers.interface import installed
from sharpmax.monitoring import monitor as monitoring
from sharpmax.monitoring.monitor import Monitor, heads_of, reference_rows
from sharpmax.monitoring.requests import Request, Row
from sharpmax.monitoring.scores import NOT_A_NUMBER, NOT_OBSERVED, PADDING, Report
from tests.monitoring.monitored import last_entropies, model, monitored, padded, prompts


def rows_of(request: Request) -> list[Row]:
    """The rows measured so far; read inside the block of a request."""
    return [row for run in request.runs for row in ([run.prompt] if run.prompt else []) + list(run.generated)]


# The absolute positions of GPT-2 and BERT would count padding on the left.
SIDES = [("llama", "left"), ("mistral", "left"), ("gemma2", "right"), ("gpt2", "right"), ("bert", "right")]


@pytest.mark.parametrize(("family", "side"), SIDES)
def test_the_row_of_each_sequence_is_its_last_real_one(family: str, side: str) -> None:
    """Against eager attention on each sequence alone: padding on either side must not count."""
    one, lists = model(family), prompts(4, seed=1)
    with monitored(one, generated=0) as monitor, monitor.request() as r, torch.no_grad():
        one(**padded(lists, side))
        row = rows_of(r)[0]
    expected = torch.stack([last_entropies(model(family), ids) for ids in lists])
    assert torch.allclose(row.entropy.double(), expected, atol=2e-5)
    assert [s is not None for s in r.report.scores] == [True] * 4


def generated(one: Any, batch: dict[str, Any], **options: Any) -> torch.Tensor:
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | options
    out: torch.Tensor = one.generate(**batch, **settings)
    return out


def test_the_prompt_and_every_second_token_are_measured() -> None:
    one, lists = model(), prompts(2, seed=2)
    with monitored(one, generated=3) as monitor, monitor.request() as r:
        out = generated(one, padded(lists, "left"))
        rows = rows_of(r)
    longest = max(map(len, lists))
    assert [row.count.tolist() for row in rows] == [[len(ids) + new for ids in lists] for new in (0, 2, 4, 6)]
    for row, new in zip(rows, (0, 2, 4, 6), strict=True):
        for place, ids in enumerate(lists):
            new_tokens = out[place, longest : longest + new].tolist()
            assert torch.allclose(row.entropy[place].double(), last_entropies(model(), ids + new_tokens), atol=5e-5)


def test_rows_after_the_end_of_a_sequence_do_not_count() -> None:
    """Rows of sequences that have ended are padding while the model continues with the others."""
    one, lists = model(), prompts(3, seed=3)
    free = generated(one, padded(lists, "left"))[:, -8:].tolist()
    end = next(token for token in free[0][1:4] if token not in free[1] and token not in free[2])
    with monitored(one, generated=3) as monitor, monitor.request() as r:
        generated(one, padded(lists, "left"), eos_token_id=end)
        counts = torch.stack([row.valid for row in rows_of(r)])
    length = free[0].index(end) + 1
    assert counts[:, 1:].all()
    assert counts[:, 0].tolist() == [True] + [2 * number < length for number in (1, 2, 3)]
    assert r.report.sequences[0].rows == int(counts[:, 0].sum())


def test_score_alarm_and_heads_follow_from_the_rows(tmp_path: Path) -> None:
    """Computed again by hand, from what is saved."""
    one, batch = model(), padded(prompts(5, seed=4), "left")
    with monitored(one, false_alarms=0.4) as monitor, monitor.request() as r:
        generated(one, batch)
        rows = rows_of(r)
    known = json.loads(monitor.save(tmp_path / "monitor.json").read_text(encoding="utf-8"))
    heads, kinds = heads_of(one), [known["prompt"]] + [known["later"]] * 2
    for place, found in enumerate(r.report.sequences):
        scores, above = [], []
        for row, kind in zip(rows, kinds, strict=True):
            mean, scale, weights, (centre, spread) = (kind[name] for name in ("mean", "scale", "weights", "range"))
            above.append([(h - m) / s for h, m, s in zip(row.entropy[place].tolist(), mean, scale, strict=True)])
            scores.append((sum(x * w for x, w in zip(above[-1], weights, strict=True)) - centre) / spread)
        assert found.score == pytest.approx(max(scores), abs=1e-5)
        assert found.alarm == (max(scores) > monitor.thresholds["generated"])
        worst = above[scores.index(max(scores))]
        order = sorted(range(len(heads)), key=lambda column: -worst[column]) if found.alarm else []
        assert [(head.layer, head.head) for head in found.heads] == [heads[column] for column in order]
        assert [head.excess for head in found.heads] == pytest.approx([worst[column] for column in order], abs=1e-5)
    assert 0 < sum(found.alarm for found in r.report.sequences) < 5


def test_outputs_of_the_model_do_not_change() -> None:
    one, batch = model(), padded(prompts(3, seed=6), "left")
    attributes, hooks = set(vars(one)), len(one._forward_hooks) + len(one._forward_pre_hooks)
    logits, output = one(**batch).logits, generated(one, batch)
    monitor = monitored(one)
    assert torch.equal(one(**batch).logits, logits)
    assert torch.equal(generated(one, batch), output)
    monitor.close()
    monitor.close()
    assert torch.equal(one(**batch).logits, logits)
    assert (set(vars(one)), len(one._forward_hooks) + len(one._forward_pre_hooks)) == (attributes, hooks)
    assert installed(one) is None


def test_a_policy_stays_and_takes_effect() -> None:
    one, batch = sm.apply(model(), sm.policies.Constant(2.0)), padded(prompts(1), "left")
    output = generated(one, batch)
    reports: list[Report] = []
    with monitored(one, callback=reports.append):
        assert torch.equal(generated(one, batch), output)
        with sm.applied(one, sm.policies.Constant(0.5)):
            generated(one, batch)
    assert reports[0].scores != reports[1].scores
    assert isinstance(sm.policy_of(one), sm.policies.Constant)


def test_what_is_one_request() -> None:
    """A call of `generate`, a forward pass without a cache, and everything in a block."""
    one, lists, reports = model(), prompts(3, seed=7), list[Report]()
    ids = torch.tensor([lists[0]])
    with monitored(one, every=1, callback=reports.append) as monitor, torch.no_grad():
        for prompt in lists:
            generated(one, padded([prompt], "left"), max_new_tokens=4)
        out = one(ids)
        assert [report.sequences[0].rows for report in reports] == [3, 3, 3, 1]
        one(ids[:, :1], past_key_values=out.past_key_values)  # continues an unknown request
        assert len(reports) == 4
        with monitor.request() as both:
            generated(one, padded(lists[:1], "left"), max_new_tokens=4)
            generated(one, padded(lists[1:], "left"), max_new_tokens=4)
        with monitor.request() as loop:
            out = one(ids)
            for _ in range(2):
                out = one(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values)
    assert both.report.scores == pytest.approx([report.scores[0] for report in reports[:3]], abs=1e-4)
    assert [len(report.sequences) for report in reports[4:]] == [3, 1]
    assert loop.report.sequences[0].rows == 3


@pytest.mark.parametrize(
    "options",
    [{"prefill_chunk_size": 5}, {"cache_implementation": "static"}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}],
    ids=lambda options: next(iter(options)),
)
def test_other_ways_to_generate(options: dict[str, Any]) -> None:
    """The row of the prompt does not depend on how the prompt is read."""
    one, ids, reports = model(), prompts(1, seed=8, least=14)[0], list[Report]()
    if "cache_implementation" in options:
        options = {**options, "disable_compile": True}
    with monitored(one, callback=reports.append) as monitor:
        with monitor.request() as r:
            generated(one, padded([ids], "left"), **options)
            first = rows_of(r)[0]
        generated(one, padded([ids], "left"), **options)
    assert torch.allclose(first.entropy[0].double(), last_entropies(model(), ids), atol=5e-5)
    assert [report.why for report in reports] == [None, None]
    assert len(r.report.scores) == options.get("num_beams", 1)


def test_a_sequence_without_a_score_leaves_the_others() -> None:
    """One is NaN, one only padding."""
    one, batch = model(), padded([[5, 6, 7], [5, 90, 7], [8]], "left")
    batch["attention_mask"][2] = 0
    with monitored(one, reference=[[min(token, 80) for token in ids] for ids in prompts(30)]) as monitor:
        with torch.no_grad():
            one.model.embed_tokens.weight[90] = torch.nan
        with monitor.request() as r, torch.no_grad():
            one(**batch)
    assert [score is None for score in r.report.scores] == [False, True, True]
    assert [sequence.why for sequence in r.report.sequences] == [None, NOT_A_NUMBER, PADDING]
    assert r.report.why == NOT_A_NUMBER
    with pytest.raises(ArgumentError, match="attention is NaN"):
        reference_rows(one, [[5, 90, 7]] * 30)


def test_an_error_inside_never_reaches_the_model(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, batch, reports = model(), padded(prompts(1), "left"), list[Report]()
    output = generated(one, batch)

    def fail(report: Report) -> None:
        reports.append(report)
        raise RuntimeError("out of paper")

    with monitored(one, callback=fail), monkeypatch.context() as broken:
        broken.setattr(Row, "see", lambda self, seen: 1 / 0)
        assert torch.equal(generated(one, batch), output)
        one(**batch)
    assert [report.scores for report in reports] == [[None], [None]]
    assert all(report.why == "the monitor failed: ZeroDivisionError: division by zero" for report in reports)
    assert sum("the monitor failed" in record.message for record in caplog.records) == 1


def test_an_error_of_the_model_is_no_request() -> None:
    one, reports = model(), list[Report]()
    with monitored(one, callback=reports.append) as monitor:
        with pytest.raises(IndexError):
            one(torch.tensor([[5, 1000]]))
        with pytest.raises(IndexError), monitor.request():
            generated(one, {"input_ids": torch.tensor([[5, 1000]])})
        assert reports == []
        one(torch.tensor([[5, 6]]))
    assert len(reports) == 1


def test_pause_and_resume() -> None:
    one, reports = model(), list[Report]()
    with monitored(one, callback=reports.append) as monitor:
        monitor.pause()
        one(torch.tensor([[5, 6]]))
        generated(one, {"input_ids": torch.tensor([[5, 6]])})
        with monitor.request() as r:
            one(torch.tensor([[5, 6]]))
        assert len(reports) == 1
        assert (r.report.scores, r.report.why) == ([], NOT_OBSERVED)
        monitor.resume()
        one(torch.tensor([[5, 6]]))
    assert len(reports) == 2


def test_a_copy_is_not_monitored() -> None:
    one, reports, batch = model(), list[Report](), padded(prompts(1), "left")
    with monitored(one, callback=reports.append):
        other = copy.deepcopy(one)
        with torch.no_grad():
            other.lm_head.weight.normal_()
        output = generated(other, batch)
        other(**batch)
        assert reports == []
        assert not torch.equal(output, generated(one, batch))
    assert torch.equal(output, generated(other, batch))


def test_one_line_of_json_for_each_request(caplog: pytest.LogCaptureFixture) -> None:
    one = model()
    with caplog.at_level(logging.INFO), monitored(one, logger=logging.getLogger("service"), false_alarms=0.9):
        generated(one, padded(prompts(2), "left"))
    lines = [record for record in caplog.records if record.name == "service"]
    assert len(lines) == 1
    assert "\n" not in lines[0].message
    line = json.loads(lines[0].message)
    assert (line["event"], line["alarm"]) == ("sharpmax.monitor", True)
    assert lines[0].levelno == logging.WARNING
    assert [set(one) for one in line["sequences"]] == [{"score", "threshold", "tokens", "rows", "why", "heads"}] * 2


def test_saved_and_read_back(tmp_path: Path) -> None:
    one, batch = model(), padded(prompts(2, seed=9), "left")
    with monitored(one, false_alarms=0.3) as monitor, monitor.request() as first:
        generated(one, batch)
    path = monitor.save(tmp_path / "monitor.json")
    with Monitor.load(one, path) as again, again.request() as second:
        generated(one, batch)
    assert first.report == second.report
    assert (again.false_alarms, again.every, again.generated) == (0.3, 2, 2)
    assert again.thresholds == monitor.thresholds


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    one, other, path = model(), model(), tmp_path / "monitor.json"
    with monitored(one) as monitor:
        monitor.save(path)
    with torch.no_grad():
        other.lm_head.weight.add_(1.0)
    with pytest.raises(ArgumentError, match="learn again"):
        Monitor.load(other, path)
    with pytest.raises(FileFormatError, match="cannot be read"):
        Monitor.load(one, tmp_path / "missing.json")
    for text, wanted in (("{", "cannot be read"), ("[]", "not saved by")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(FileFormatError, match=wanted):
            Monitor.load(one, path)
    assert installed(one) is None


def test_a_model_has_one_monitor() -> None:
    one = model()
    with monitored(one), pytest.raises(ArgumentError, match="close the other one"):
        monitored(one)
    assert installed(one) is None


def test_reference_rows_do_not_depend_on_how_they_are_batched(monkeypatch: pytest.MonkeyPatch) -> None:
    one, lists = model(), prompts(12, seed=10)
    together, exist = reference_rows(one, lists, every=2, generated=2)
    monkeypatch.setattr(monitoring, "_AT_ONCE_ON_CPU", 1)
    alone, exist_alone = reference_rows(one, lists, every=2, generated=2)
    assert torch.allclose(together, alone, atol=5e-4)
    assert torch.equal(exist, exist_alone)
