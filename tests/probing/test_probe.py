"""`sharpmax.probe` on a tiny language model and on every kind of family."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sharpmax as sm
from sharpmax.errors import ArgumentError, ArgumentTypeError
from sharpmax.integrations.transformers.interface import installed
from sharpmax.models.scoring import encode
from sharpmax.policies.basic import Constant
from sharpmax.probing.findings import KINDS
from sharpmax.probing.inputs import Passage, ProbeInputs, own_inputs, task_inputs, text_inputs
from sharpmax.probing.measurement import measure
from sharpmax.probing.probe import ProbeResult
from sharpmax.results import load
from sharpmax.tasks.registry import get_task
from tests.calibration.small import TEXT, same, snapshot
from tests.experiments.evaluate import tiny
from tests.integrations.families import FAMILIES, Family

SIZES = [8, 16, 32, 64]


@pytest.fixture(scope="module")
def found() -> ProbeResult:
    return sm.probe(tiny.model(), tiny.tokenizer(), sizes=SIZES, prompts=2, text=TEXT, name="tiny")


def test_the_tables_are_those_of_the_contract(found: ProbeResult) -> None:
    tables = json.loads(json.dumps(found.tables(), allow_nan=False))
    setting = tables["setting"]
    assert setting["model"] == "tiny"
    assert (setting["family"], setting["layers"], setting["heads"]) == ("llama", tiny.LAYERS, tiny.HEADS)
    assert setting["tasks"] == ["kv", "text"]
    assert setting["sizes"] == {"kv": SIZES, "text": SIZES}
    assert setting["unit"] == {"kv": "items", "text": "tokens"}
    assert setting["fit_up_to"] == {"kv": 16, "text": 16}
    assert setting["policy"] is None
    assert setting["context"] == tiny.ROOM
    assert len(tables["verdict"]) == 3
    for task in ("kv", "text"):
        heads = tables[f"heads/{task}"]
        assert set(heads) == {f"{layer}.{head}" for layer in range(tiny.LAYERS) for head in range(tiny.HEADS)}
        for about in heads.values():
            assert about["kind"] in KINDS
            assert about["slope_low"] <= about["slope"] <= about["slope_high"]
            assert list(about["curve"]) == [str(size) for size in SIZES]
            assert list(about["forecast"]) == ["32", "64"]
            for cell in about["curve"].values():
                assert cell["effective"] == pytest.approx(math.exp(cell["entropy"]))
                assert 0.0 <= cell["entropy"] <= math.log(cell["count"]) + 1e-9
            assert set(about["horizon"]) == {"tokens", "low", "high"}
        layers = tables[f"layers/{task}"]
        ranked = sorted(layers, key=lambda layer: layers[layer]["rank"])
        assert [layers[layer]["rank"] for layer in ranked] == list(range(1, tiny.LAYERS + 1))
        assert layers[ranked[0]]["slope"] >= layers[ranked[-1]]["slope"]
        assert all(sum(about["kinds"].values()) == tiny.HEADS for about in layers.values())
        errors = tables[f"forecast/{task}"]
        assert errors["fitted"] == [8, 16]
        assert list(errors["tested"]) == ["32", "64"]
        assert errors["tested"]["64"]["heads"] == tiny.LAYERS * tiny.HEADS
        assert errors["method"] in errors["methods"]
        assert tables[f"chain/{task}"]["pairs"] == tiny.LAYERS - 1


def test_numbers_are_those_of_eager_attention() -> None:
    """Entropy, top, sink and local weight of the last row, from the weights that eager attention returns."""
    model = tiny.model()
    read = text_inputs(TEXT, tiny.tokenizer(), 64, [32, 64], 2)
    measured = measure(model, read, "last", lambda passage, size: None)
    model.set_attn_implementation("eager")
    for size in (32, 64):
        for place, one in enumerate(read.passages[size]):
            out = model(input_ids=one.inputs["input_ids"], output_attentions=True)
            weights = torch.stack(out.attentions)[:, 0, :, -1].double()
            expected = {
                "entropy": torch.special.entr(weights).sum(-1),
                "top": weights.amax(-1),
                "sink": weights[..., 0],
                "local": weights[..., -16:].sum(-1),
                "count": torch.full(weights.shape[:2], float(size)),
            }
            for name, value in expected.items():
                np.testing.assert_allclose(measured[size][name][place], value.numpy(), rtol=1e-4, atol=1e-5)


def test_the_same_seed_gives_the_same_and_the_model_is_left_alone(found: ProbeResult) -> None:
    model = tiny.model().train()
    before = snapshot(model)
    again = sm.probe(model, tiny.tokenizer(), sizes=SIZES, prompts=2, text=TEXT, name="tiny")
    assert same(before, snapshot(model))
    assert again.tables() == found.tables()


def test_a_policy_takes_part(found: ProbeResult) -> None:
    """Sharper rows have less entropy: a policy that probing took out would show in none."""
    model = sm.apply(tiny.model(), Constant(3.0))
    sharper = sm.probe(model, tiny.tokenizer(), tasks=["kv"], sizes=SIZES, prompts=2)
    assert installed(model) is not None
    assert sharper.setting["policy"] == "β = 3"
    pairs = zip(found.heads("kv").values(), sharper.heads("kv").values(), strict=True)
    lower = [b["curve"]["64"]["entropy"] < a["curve"]["64"]["entropy"] for a, b in pairs]
    assert all(lower[: tiny.HEADS])  # the first layer reads the same; later ones read something else
    assert np.mean(lower) > 0.8


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


def test_key_replication_is_among_the_methods() -> None:
    found = sm.probe(tiny.model(), tiny.tokenizer(), tasks=["kv"], sizes=[16, 32, 48, 64], prompts=2)
    methods = found.tables()["forecast/kv"]["methods"]
    assert "crowding" in methods
    assert set(methods["crowding"]["tested"]) == {"48", "64"}
    lines = sm.probe(tiny.model(), tiny.tokenizer(), tasks=["kv"], sizes=[16, 32, 64], prompts=2, rows="log")
    assert "crowding" not in lines.tables()["forecast/kv"]["methods"]  # it knows the last row alone


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tasks": ["nothing"]}, r"task: got 'nothing'; allowed: one of \[.*'kv'.*'text'\]"),
        ({"tasks": ["kv", "kv"]}, "tasks: got .* each once"),
        ({"tasks": []}, "tasks: got .* one or several"),
        ({"tasks": ["kv"], "sizes": [8]}, r"sizes: got \[8\] for 'kv'; allowed: two sizes or more"),
        ({"sizes": [8, 0]}, "sizes: got 0; allowed: whole numbers from 1"),
        ({"tasks": ["kv"], "sizes": [8, 512]}, "sizes: got 512 for the task 'kv', a prompt of .* tokens"),
        ({"prompts": 0}, "prompts: got 0"),
        ({"rows": "first"}, "rows: got 'first'"),
        ({"inputs": {4: [{}], 8: [{}]}, "sizes": [8]}, "inputs: got inputs together with tasks or sizes"),
        ({"tokenizer": None}, r"tokenizer: got None; allowed: the model's tokenizer .*or give inputs"),
        ({"tasks": "kv"}, r"tasks: got 'kv'; .*write tasks=\['kv'\]"),
        ({"model": torch.nn.Linear(2, 2)}, "model: got Linear"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=says):
        sm.probe(**{"model": tiny.model(), "tokenizer": tiny.tokenizer(), **options})


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


@pytest.mark.parametrize("name", ["gpt2", "gemma", "bert", "vit"])
def test_the_same_probe_in_every_family(name: str) -> None:
    """Heads whose queries are nothing are uniform: slope 1 and that kind, whatever the family.

    That is what can be compared between families: slopes, kinds, top weights and horizons. "local" cannot: it means
    the nearest keys before the row only in models that look back, so bidirectional ones have no such head. The first
    key is a sink in a language model and a class token in BERT and ViT. Sizes of patches are not sizes of tokens.
    """
    family = FAMILIES[name]
    changes: dict[str, Any] = {"image_size": 16, "patch_size": 4} if family.kind == "image" else {}
    model = family.build(**changes)
    plain = sm.probe(model, inputs=inputs(family, model))
    assert (plain.setting["layers"], plain.setting["heads"]) == (2, 4)
    kinds = {about["kind"] for about in plain.heads().values()}
    assert kinds <= set(KINDS)
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


WORDS = tiny.tokenizer()

KV = get_task("kv")


def ids(one: Passage) -> list[int]:
    found: list[int] = one.inputs["input_ids"][0].tolist()
    return found


def test_prompts_end_where_the_answer_begins() -> None:
    read = task_inputs(KV, WORDS, None, [8], 3, seed=5).passages[8]
    for prompt, one in zip(KV.prompts(8, 3, seed=5), read, strict=True):
        reply = encode(WORDS, prompt)
        assert ids(one) == list(reply.ids[: reply.start])


def test_sizes_and_amounts_follow_from_the_model() -> None:
    found = task_inputs(KV, WORDS, 600, None, None, seed=0)
    assert found.sizes == (8, 16, 32)
    assert all(one.length <= 600 for passages in found.passages.values() for one in passages)
    assert task_inputs(KV, WORDS, None, None, 1, seed=0).sizes == KV.sizes
    long = text_inputs(TEXT * 8, WORDS, 8192, None, None)
    assert {size: len(one) for size, one in long.passages.items()} == {
        64: 12, 128: 12, 256: 12, 512: 12, 1024: 8, 2048: 4, 4096: 2, 8192: 2,
    }  # fmt: skip
    asked = text_inputs(TEXT * 8, WORDS, 8192, [64, 4096], 3)
    assert {len(one) for one in asked.passages.values()} == {3}
    with pytest.raises(ArgumentError, match=r"sizes: got 64 for the task 'kv', a prompt of \d+ tokens; .*up to 600"):
        task_inputs(KV, WORDS, 600, [8, 64], 1, seed=0)
    with pytest.raises(ArgumentError, match="sizes: got 512 for text; allowed: 2 … 300 tokens"):
        text_inputs(TEXT, WORDS, 300, [64, 512], 1)
    with pytest.raises(ArgumentError, match="smallest prompt is no longer than 50 tokens"):
        task_inputs(KV, WORDS, 50, None, None, seed=0)


def test_windows_of_text_end_alike() -> None:
    """Sizes are compared on the same last tokens; otherwise the difference is which tokens these are."""
    found = text_inputs(TEXT, WORDS, 512, None, None)
    assert found.nested
    ends: set[tuple[int, ...]] = set()
    for place in range(12):
        windows = [ids(found.passages[size][place]) for size in found.sizes]
        for small, large in itertools.pairwise(windows):
            assert large[-len(small) :] == small
        ends.add(tuple(windows[0]))
    assert len(ends) == 12


def test_special_tokens_are_around_each_window_and_count() -> None:
    from tokenizers.processors import TemplateProcessing

    words = tiny.tokenizer()
    end = words.eos_token_id
    words.backend_tokenizer.post_processor = TemplateProcessing(single="</s> $A </s>", special_tokens=[("</s>", end)])
    found = text_inputs(TEXT, words, 64, [16, 32], 2, causal=False)
    for size in (16, 32):
        for one in found.passages[size]:
            assert one.length == size
            assert ids(one)[0] == ids(one)[-1] == end
            assert end not in ids(one)[1:-1]


@pytest.mark.parametrize(
    ("unit", "sizes", "known"),
    [
        ("items", (8, 16, 32, 64, 128, 256, 512), 64),
        ("tokens", (64, 128, 256, 512, 1024), 512),
        ("tokens", (64, 128, 256, 512), 128),  # all are small: half of them
        ("items", (128, 256, 512), 256),  # all are large: two of them
    ],
)
def test_what_forecasts_may_know(unit: str, sizes: tuple[int, ...], known: int) -> None:
    assert ProbeInputs("any", unit, {size: [] for size in sizes}).fit_up_to == known


def test_inputs_of_the_callers_own() -> None:
    one, two = ({"input_ids": torch.zeros(1, n, dtype=torch.long)} for n in (4, 8))
    found = own_inputs({8: [two, two], 4: one})  # type: ignore[dict-item]
    assert {size: len(passages) for size, passages in found.passages.items()} == {4: 1, 8: 2}
    assert found.sizes == (4, 8)
    with pytest.raises(ArgumentTypeError, match=r"inputs: got list; allowed: a mapping"):
        own_inputs([one])  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="two sizes or more"):
        own_inputs({4: [one]})
    with pytest.raises(ArgumentError, match=r"inputs: got .* for 8; allowed: for each size"):
        own_inputs({4: [one], 8: [torch.zeros(2)]})  # type: ignore[list-item]
