"""`sharpmax.probe` on a tiny language model and on every kind of family."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sharpmax as sm
from sharpmax.errors import ArgumentError
from sharpmax.policies.basic import Constant
from sharpmax.probing.forecast import predict
from sharpmax.probing.measurement import Numbers, ProbeInputs
from sharpmax.probing.probe import RULE, ProbeResult, kinds_of, tables_of
from sharpmax.results import load
from tests.calibration.small import TEXT, same, snapshot
from tests.experiments.evaluate import tiny
from tests.integrations.families import FAMILIES, Family
from tests.probing.test_forecast import rising
from tests.probing.test_measurement import KEYS, readings
from tests.probing.test_measurement import SIZES as MANY

SIZES = [8, 16, 32, 64]


@pytest.fixture(scope="module")
def found() -> ProbeResult:
    return sm.probe(tiny.model(), tiny.tokenizer(), sizes=SIZES, prompts=2, text=TEXT, name="tiny")


def test_the_tables_are_those_of_the_contract(found: ProbeResult) -> None:
    tables = json.loads(json.dumps(found.tables(), allow_nan=False))
    expected = {
        "model": "tiny", "family": "llama", "layers": tiny.LAYERS, "heads": tiny.HEADS, "tasks": ["kv", "text"],
        "sizes": {"kv": SIZES, "text": SIZES}, "unit": {"kv": "items", "text": "tokens"}, "policy": None,
        "fit_up_to": {"kv": 16, "text": 16}, "context": tiny.ROOM,
    }  # fmt: skip
    assert expected.items() <= tables["setting"].items()
    assert len(tables["verdict"]) == 3
    for task in ("kv", "text"):
        heads = tables[f"heads/{task}"]
        assert set(heads) == {f"{layer}.{head}" for layer in range(tiny.LAYERS) for head in range(tiny.HEADS)}
        for about in heads.values():
            assert about["kind"] in RULE
            assert about["slope_low"] <= about["slope"] <= about["slope_high"]
            assert list(about["curve"]) == [str(size) for size in SIZES]
            assert list(about["forecast"]) == ["32", "64"]
            for cell in about["curve"].values():
                assert cell["effective"] == pytest.approx(math.exp(cell["entropy"]))
                assert 0.0 <= cell["entropy"] <= math.log(cell["count"]) + 1e-9
            assert set(about["horizon"]) == {"tokens", "low", "high"}
        errors = tables[f"forecast/{task}"]
        assert errors["fitted"] == [8, 16]
        assert list(errors["tested"]) == ["32", "64"]
        assert errors["tested"]["64"]["heads"] == tiny.LAYERS * tiny.HEADS
        assert errors["method"] == ("line" if task == "text" else "replication and line, 3 to 1")


def test_the_same_seed_gives_the_same_and_the_model_is_left_alone(found: ProbeResult) -> None:
    model = tiny.model().train()
    before = snapshot(model)
    again = sm.probe(model, tiny.tokenizer(), sizes=SIZES, prompts=2, text=TEXT, name="tiny")
    assert same(before, snapshot(model))
    assert again.tables() == found.tables()


def test_progress_goes_up_to_its_end() -> None:
    steps: list[tuple[str, int, int]] = []
    sm.probe(
        tiny.model(), tiny.tokenizer(), tasks=["kv"], sizes=[16, 24, 32], prompts=1,
        progress=lambda what, done, total, remark: steps.append((what, done, total)),
    )  # fmt: skip
    done = [now for _, now, total in steps if total]
    assert done == sorted(done)
    assert steps[-1][1] == steps[-1][2] > 0
    assert {what for what, _, _ in steps} == {"preparing prompts", "reading kv", "forecasting kv"}


def test_key_replication_needs_last_rows_and_no_policy_that_reads_rows() -> None:
    settings: dict[str, Any] = {"tasks": ["kv"], "sizes": [16, 32, 48], "prompts": 2}
    for model, rows, policy in (
        (tiny.model(), "log", None),
        (sm.apply(tiny.model(), Constant(1.5)), "last", "β = 1.5"),
    ):
        found = sm.probe(model, tiny.tokenizer(), rows=rows, **settings)
        assert found.tables()["forecast/kv"]["method"] == "line"
        assert found.setting["policy"] == policy


def test_a_model_that_computes_nan_has_a_verdict_without_numbers() -> None:
    model = tiny.model()
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.fill_(torch.nan)
    found = sm.probe(model, tiny.tokenizer(), tasks=["kv"], sizes=[8, 16, 32], prompts=1)
    tables = json.loads(json.dumps(found.tables(), allow_nan=False))
    assert {about["kind"] for about in tables["heads/kv"].values()} == {"unknown"}
    assert len(tables["verdict"]) == 3
    assert str(found)


def inputs(family: Family, model: Any) -> dict[int, list[dict[str, Any]]]:
    """Two calls of each size; images grow in patches, text in tokens."""
    if family.kind == "image":
        sides = {4: 8, 16: 16, 64: 32, 256: 64}  # patches of 4 × 4 pixels in an image
        return {
            size: [{"pixel_values": torch.randn(1, 3, side, side), "interpolate_pos_encoding": True} for _ in range(2)]
            for size, side in sides.items()
        }
    return {size: [{"input_ids": torch.randint(3, 97, (1, size))} for _ in range(2)] for size in SIZES}


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit"])
def test_the_same_probe_in_every_family(name: str) -> None:
    """Heads whose queries are nothing are uniform: slope 1 and that kind, whatever the family."""
    family = FAMILIES[name]
    changes: dict[str, Any] = {"image_size": 16, "patch_size": 4} if family.kind == "image" else {}
    model = family.build(**changes)
    plain = sm.probe(model, inputs=inputs(family, model))
    assert (plain.setting["layers"], plain.setting["heads"]) == (2, 4)
    kinds = {about["kind"] for about in plain.heads().values()}
    assert kinds <= set(RULE)
    if family.kind in ("encoder", "image"):
        assert "local" not in kinds
    assert plain.tables()["forecast/own"]["tested"]
    with torch.no_grad():
        for part, weight in model.named_parameters():
            if any(word in part for word in ("q_proj", "query", "c_attn")):
                weight.fill_(0.0)
    uniform = sm.probe(model, inputs=inputs(family, model))
    for about in uniform.heads().values():
        assert about["slope"] == pytest.approx(1.0, abs=1e-4)
        assert about["kind"] == "uniform"
        assert about["horizon"]["tokens"] is None


def test_every_sequence_of_a_batch_is_a_prompt_and_padding_before_it_does_not_count() -> None:
    model = FAMILIES["llama"].build()
    ids = {size: torch.randint(3, 97, (2, size)) for size in (6, 12)}
    single = sm.probe(model, inputs={size: [{"input_ids": row[None]} for row in both] for size, both in ids.items()})
    padded = {}
    for size, both in ids.items():
        filled = torch.cat([torch.zeros(2, 5, dtype=torch.long), both], dim=1)
        mask = torch.cat([torch.zeros(2, 5, dtype=torch.long), torch.ones_like(both)], dim=1)
        padded[size] = [{"input_ids": filled, "attention_mask": mask}]
    batch = sm.probe(model, inputs=padded)
    assert batch.setting["prompts_of_size"] == {"own": {"6": 2, "12": 2}}
    for one, other in zip(single.heads().values(), batch.heads().values(), strict=True):
        assert one["curve"]["12"]["count"] == other["curve"]["12"]["count"] == 12.0
        assert other["curve"]["12"]["entropy"] == pytest.approx(one["curve"]["12"]["entropy"], abs=1e-4)


def test_result_is_shown_and_saved(found: ProbeResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found.show()
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == found.verdict
    kinds = [about["kind"] for about in found.heads("kv").values()]
    assert lines[3].startswith("Heads on kv: ")
    assert all(f"{kinds.count(kind)} {kind}" in lines[3] for kind in set(kinds))
    file = found.save(tmp_path / "new")
    assert file.name == "results.json"
    saved = load(file)
    assert saved.tables == json.loads(json.dumps(found.tables()))
    assert saved.provenance["seed"] == found.setting["seed"]
    with pytest.raises(ArgumentError, match=r"task: got 'max'; allowed: one of \['kv', 'text'\]"):
        found.heads("max")


def test_a_frame_has_a_row_for_each_head_and_size(found: ProbeResult) -> None:
    pytest.importorskip("pandas")
    frame = found.to_frame()
    assert len(frame) == 2 * tiny.LAYERS * tiny.HEADS * len(SIZES)
    one = frame[(frame.task == "text") & (frame.layer == 1) & (frame["head"] == 2) & (frame["size"] == 64)]
    about = found.heads("text")["1.2"]
    assert one.entropy.item() == about["curve"]["64"]["entropy"]
    assert one.forecast_top.item() == about["forecast"]["64"]["top"]
    assert one.slope.item() == about["slope"]


def result(*shown: tuple[str, dict[int, dict[str, Numbers]]]) -> ProbeResult:
    """The result of readings with a forecast by lines, by task."""
    inputs = ProbeInputs("any", "items", {size: [] for size in MANY})
    found = {}
    for task, read in shown:
        curves = {name: np.stack([one[name].mean(0) for one in read.values()]) for name in ("entropy", "top", "count")}
        found[task] = tables_of(inputs, read, True, predict(curves, MANY, 64, {}), seed=0)
    by_task = {"sizes": list(MANY), "unit": "items", "fit_up_to": 64}
    setting = {name: {task: value for task, _ in shown} for name, value in by_task.items()}
    return ProbeResult({"model": "some-model", **setting}, found)


def test_three_sentences_and_layers_ranked_by_slope() -> None:
    def falling(n: float) -> Numbers:
        """Heads that rise lose their top weight."""
        return np.clip(0.5 - 0.2 * (rising(n) - 1.0) + 0.01, 0.0, 1.0)

    still = readings(lambda n: np.array([[0.1, 0.1]]))
    found = result(("kv", readings(rising, falling)), ("text", still))
    assert found.verdict == [
        "4 (44%) of some-model's 9 heads lose focus as inputs grow from 8 to 512 items; on text 0 (0%).",
        "Layers that disperse most: 1, 2, 0 of 3. Heads with half of their weight on one token: 9 in the smallest "
        "inputs, 3 in the largest.",
        "Forecast from sizes up to 64, entropy at 512 is off by 0.00 nats (median head) and 0.00 (90th percentile).",
    ]
    layers = found.tables()["layers/kv"]
    assert {layer: about["rank"] for layer, about in layers.items()} == {"0": 3, "1": 1, "2": 2}
    assert layers["1"]["slope"] == pytest.approx(0.6)
    assert str(found).splitlines()[3:] == ["Heads on kv: 5 sharp, 4 dispersing.", "Heads on text: 2 sharp."]


def test_errors_of_a_forecast_leave_out_heads_without_numbers() -> None:
    rises = np.array([[0.0, 3.0, np.nan, -1.0]])
    found = result(("kv", readings(lambda n: np.full((1, 4), 1.0) + (n > KEYS[64]) * rises)))
    cell = found.tables()["forecast/kv"]["tested"]["512"]
    assert cell["entropy"] == {"median": 1.0, "p90": pytest.approx(2.6), "bias": pytest.approx(-2 / 3)}
    assert "at 512 is off by 1.00 nats" in found.verdict[2]


@pytest.mark.parametrize(
    ("expected", "given"),
    [
        ("sharp", {"slope": -0.5}),
        ("sharp", {"slope": 0.25 - 1e-9}),
        ("dispersing", {"slope": 0.25}),
        ("uniform", {"slope": 0.99, "entropy": math.log(500.1), "local": 0.6}),
        ("sink", {"sink": 0.5, "slope": 0.6}),
        ("local", {"local": 0.5, "slope": 0.6}),
        ("dispersing", {"local": 0.9, "slope": 0.6, "causal": False}),
        ("dispersing", {"local": 0.9, "slope": 0.6, "count": 20.0, "entropy": 1.5}),
        ("unknown", {"slope": math.nan}),  # NaN compares as False: such a head must not be called sharp
        ("unknown", {"entropy": math.nan}),
    ],
)
def test_kinds_of_heads(expected: str, given: dict[str, Any]) -> None:
    head = {"slope": 0.0, "causal": True, "entropy": 1.0, "sink": 0.1, "local": 0.1, "count": 1000.0} | given
    rise, causal = np.array([[head.pop("slope")]]), head.pop("causal")
    assert kinds_of(rise, {name: np.array([[value]]) for name, value in head.items()}, causal) == expected
