"""A constant per head in a GGUF file: β times what the original holds, every other byte as it was."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import sharpmax as sm
from sharpmax.errors import ArgumentError, FileFormatError, SharpmaxError
from sharpmax.integrations import gguf as folding
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import Constant, LogScale, PerFrequency
from sharpmax.policies.log_linear import LogLinear
from sharpmax.policies.per_head import PerHead
from tests.test_errors import check_answers

gguf = pytest.importorskip("gguf")
HEADS, KEYS, WIDTH, EMBEDDING = 4, 2, 32, 256
BETAS = [[2.0, 1.0, 0.7, 3.1], [1.0, 1.0, 1.0, 1.3]]
POLICY = PerHead.of(Constant, value=BETAS)
RULE = LogScale(0.5, 64.0, steps=True, shift=1.0)
TYPES = folding.TYPES
# The fp16 scales in blocks of types that gguf-py cannot quantise to: random bytes are no sane scale.
HALVES = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ1_S": (0,), "IQ2_XXS": (0,),
    "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip


def weight(kind: str, rows: int, seed: int) -> NDArray[Any]:
    """Random weights of a type, as the bytes of their blocks or as numbers."""
    rng = np.random.default_rng(seed)
    wanted = gguf.GGMLQuantizationType[kind]
    if kind not in HALVES:
        made: NDArray[Any] = gguf.quants.quantize(rng.normal(size=(rows, EMBEDDING)).astype(np.float32), wanted)
        return made
    block, size = gguf.GGML_QUANT_SIZES[wanted]
    blocks = rng.integers(0, 256, (rows * EMBEDDING // block, size), np.uint8)
    for place in HALVES[kind]:
        blocks[:, place : place + 2] = rng.uniform(1e-3, 2e-3, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def write(
    path: Path, kind: str = "Q8_0", *, fused: bool = False, bias: bool = False, gain: int = 0,
    architecture: str = "llama", heads: Any = HEADS, keys: int = KEYS, more: Callable[[Any], None] = lambda file: None,
) -> Path:  # fmt: skip
    """A tiny file with two layers and the tensors that matter here, and some that do not."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(1024)
    writer.add_embedding_length(EMBEDDING)
    writer.add_head_count(heads)
    writer.add_int32(f"{architecture}.attention.head_count_kv", keys)
    writer.add_key_length(WIDTH)
    writer.add_value_length(WIDTH)
    writer.add_token_list([f"token {number}" for number in range(50)])
    writer.add_bool("odd.flag", True)
    writer.add_array("odd.numbers", [1.5, float("nan")])

    def put(name: str, data: NDArray[Any], kind: str = "F32") -> None:
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])

    put("token_embd.weight", weight("F16", 50, 9), "F16")
    for layer in range(2):
        part, rows = ("qkv", (HEADS + 2 * KEYS) * WIDTH) if fused else ("q", HEADS * WIDTH)
        put(f"blk.{layer}.attn_{part}.weight", weight(kind, rows, layer), kind)
        if bias:
            put(f"blk.{layer}.attn_{part}.bias", np.arange(1, rows + 1, dtype=np.float32))
        if gain:
            put(f"blk.{layer}.attn_q_norm.weight", np.arange(1, gain + 1, dtype=np.float32))
        put(f"blk.{layer}.attn_k.weight", weight(kind, KEYS * WIDTH, layer + 5), kind)
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(path: Path) -> tuple[dict[str, Any], dict[str, tuple[bytes, NDArray[np.float32]]]]:
    """Metadata and, of every tensor, the bytes and the numbers: what the gguf package reads."""
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {}
    for one in reader.tensors:
        tensors[one.name] = one.data.tobytes(), gguf.quants.dequantize(np.array(one.data), one.tensor_type)
    return fields, tensors


def check(source: Path, out: Path, changed: str, factor: Callable[[int], NDArray[Any]], tolerance: float) -> None:
    """The tensors called `changed` are `factor(layer)` times what they were; all else is as it was."""
    (old_fields, old), (new_fields, new) = read(source), read(out)
    assert json.loads(new_fields.pop("sharpmax.policy")) is not None
    assert new_fields.pop("GGUF.kv_count") == old_fields.pop("GGUF.kv_count") + 1
    assert repr(new_fields) == repr(old_fields)
    assert list(new) == list(old)
    for name, (data, numbers) in old.items():
        if changed not in name:
            assert new[name][0] == data, name
            continue
        times = factor(int(name.split(".")[1])).astype(np.float64)
        wanted = numbers * (times[:, None] if numbers.ndim == 2 else times)
        still = times == 1.0
        assert np.array_equal(new[name][1][still], numbers[still])
        assert np.abs(new[name][1] - wanted).max() <= tolerance * np.abs(wanted).max()


def per_row(rows: int) -> Callable[[int], NDArray[Any]]:
    """β of every query row, then ones."""
    return lambda layer: np.concatenate([np.repeat(BETAS[layer], WIDTH), np.ones(rows - HEADS * WIDTH)])


@pytest.mark.parametrize("kind", TYPES)
def test_query_rows_are_multiplied(kind: str, tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", kind)
    before = source.read_bytes()
    made = sm.fold(source, POLICY, out=tmp_path / "new" / "out.gguf")
    assert made.layers == 2
    assert made.error < 2.0**-8
    assert made.path == tmp_path / "new" / "out.gguf"
    check(source, made.path, "attn_q.", per_row(HEADS * WIDTH), {"F32": 1e-7, "BF16": 2.0**-8}.get(kind, 2.0**-9))
    with pytest.raises(ArgumentError, match=r"already holds a policy \(sharpmax\.policy\); fold the original"):
        sm.fold(made.path, POLICY, out=tmp_path / "new" / "twice.gguf")
    assert source.read_bytes() == before
    assert [file.name for file in made.path.parent.iterdir()] == ["out.gguf"]
    if kind not in ("F32", "F16", "BF16"):  # a block has one or two fp16 scales, and nothing else changes
        old, new = (np.frombuffer(read(one)[1]["blk.0.attn_q.weight"][0], np.uint8) for one in (source, made.path))
        assert 0 < (old != new).sum() <= 4 * old.size // gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]


PER_LAYER = [[1.7] * HEADS, [0.6] * HEADS]


@pytest.mark.parametrize(
    ("made", "betas", "changed", "rows", "tolerance"),
    [
        ({"kind": "Q4_K", "fused": True, "bias": True, "architecture": "phi3"}, BETAS, "attn_qkv.", 256, 2.0**-9),
        ({"bias": True, "architecture": "qwen2", "heads": [HEADS, HEADS]}, BETAS, "attn_q.", 128, 2.0**-9),
        ({"gain": WIDTH, "architecture": "qwen3"}, PER_LAYER, "attn_q_norm.", WIDTH, 1e-7),
        ({"gain": HEADS * WIDTH, "architecture": "olmo2"}, BETAS, "attn_q_norm.", 128, 1e-7),
    ],
    ids=["fused", "bias", "gain per layer", "gain per head"],
)
def test_other_places_of_queries(
    made: dict[str, Any], betas: Any, changed: str, rows: int, tolerance: float, tmp_path: Path
) -> None:
    source = write(tmp_path / "model.gguf", **made)
    out = sm.fold(str(source), PerHead.of(Constant, value=betas), out=str(tmp_path / "out.gguf")).path
    factor = per_row(rows) if betas is BETAS else lambda layer: np.full(rows, betas[layer][0])
    check(source, out, changed, factor, tolerance)


def test_what_cannot_be_right_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def refused(policy: Policy, out: str = "out.gguf", **options: Any) -> None:
        source = write(Path("model.gguf"), **options)
        before = source.read_bytes()
        try:
            sm.fold(source, policy, out=out)
        finally:
            assert source.read_bytes() == before

    policies = {name: getattr(sm.policies, name) for name in sm.policies.__all__}
    names = {"refused": refused, "more": methodcaller, "np": np, "POLICY": POLICY, "RULE": RULE, "WIDTH": WIDTH}
    check_answers("gguf", policies | names, least=21)
    assert [file.name for file in tmp_path.iterdir()] == ["model.gguf"]


def test_a_rule_of_the_length_makes_a_llama_a_mistral3(tmp_path: Path) -> None:
    """`tests/engines` compares what llama.cpp makes of such a file."""
    source = write(tmp_path / "model.gguf", more=lambda writer: writer.add_string("general.name", "llama.block_count"))
    made = sm.fold(source, RULE, out=tmp_path / "out.gguf")
    assert (made.layers, made.error) == (2, 0.0)
    (old_fields, old), (new_fields, new) = read(source), read(made.path)
    assert {name: data for name, (data, _) in new.items()} == {name: data for name, (data, _) in old.items()}
    assert json.loads(new_fields.pop("sharpmax.policy")) == RULE.to_dict()
    assert new_fields.pop("mistral3.attention.temperature_scale") == 0.5
    assert new_fields.pop("mistral3.rope.scaling.original_context_length") == 64
    assert new_fields.pop("general.architecture") == "mistral3"
    assert new_fields.pop("GGUF.kv_count") == old_fields.pop("GGUF.kv_count") + 3
    assert old_fields.pop("general.architecture") == "llama"
    wanted = {re.sub("^llama", "mistral3", name): value for name, value in old_fields.items()}
    assert repr(new_fields) == repr(wanted)
    assert new_fields["general.name"] == "llama.block_count"


def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, copy = write(tmp_path / "model.gguf"), folding._copy

    def slow(*given: Any) -> int:
        with source.open("ab") as file:
            file.write(b"more")
        return copy(*given)

    monkeypatch.setattr(folding, "_copy", slow)
    with pytest.raises(ArgumentError, match="changed while it was read"):
        sm.fold(source, Constant(1.5), out=tmp_path / "out.gguf")
    assert list(tmp_path.iterdir()) == [source]


def test_a_wrong_copy_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "model.gguf")
    monkeypatch.setattr(folding, "_scaled", lambda data, rows: data)
    with pytest.raises(SharpmaxError, match=r"layer 0, head 0: Q8_0 holds β = 1\.5"):
        sm.fold(source, Constant(1.5), out=tmp_path / "out.gguf")
    assert list(tmp_path.iterdir()) == [source]


def test_damaged_files_end_in_one_line(tmp_path: Path) -> None:
    """Cut anywhere or with any byte of the header changed, a file is folded or refused, never a crash."""
    whole = write(tmp_path / "model.gguf").read_bytes()
    header = whole.index(b"blk.1.attn_k.weight") + 60
    cut = [whole[:size] for size in (0, 3, 10, 24, 100, header - 20, header, len(whole) - 40)]
    for data in cut:
        (tmp_path / "cut.gguf").write_bytes(data)
        with pytest.raises(
            FileFormatError, match=r"^model: .*cut\.gguf' is not a whole GGUF file \(.+\); get it again$"
        ):
            sm.fold(tmp_path / "cut.gguf", Constant(1.5), out=tmp_path / "out.gguf")
    refused = []
    for place in range(0, header, 5):
        odd = bytearray(whole)
        odd[place] ^= 0xFF
        (tmp_path / "odd.gguf").write_bytes(odd)
        try:
            sm.fold(tmp_path / "odd.gguf", Constant(1.5), out=tmp_path / "out.gguf").path.unlink()
        except SharpmaxError as problem:
            refused.append(str(problem))
    assert len(refused) > 50
    assert not any("\n" in one for one in refused)


def test_constants_need_no_torch(tmp_path: Path) -> None:
    """Importing it would take more time and memory than all the rest."""
    source, out = write(tmp_path / "model.gguf"), tmp_path / "out.gguf"
    code = (
        "import sys; from sharpmax.cli import main; "
        f"assert main(['fold', {str(source)!r}, '--policy', 'smollm2-constant', '--out', 'x.gguf']) == 2; "
        f"assert main(['fold', {str(source)!r}, '--policy', 'constant:2', '--out', {str(out)!r}]) == 0; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=1200)


def other_weights(writer: Any) -> None:
    """What a Llama has besides, so that it can run."""
    writer.add_feed_forward_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH)
    writer.add_tensor("output_norm.weight", np.ones(EMBEDDING, np.float32))
    rng = np.random.default_rng(0)
    shapes = {"attn_v": (KEYS * WIDTH, EMBEDDING), "attn_output": (EMBEDDING, HEADS * WIDTH)}
    shapes |= {"ffn_gate": (64, EMBEDDING), "ffn_up": (64, EMBEDDING), "ffn_down": (EMBEDDING, 64)}
    for layer in range(2):
        for name, shape in shapes.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", 0.1 * rng.normal(size=shape).astype(np.float32))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.full(EMBEDDING, 0.2, np.float32))


def test_what_transformers_reads_is_the_applied_policy(tmp_path: Path) -> None:
    """Constants of every kind; with a β per rotary frequency rows lie in another order in the file."""
    transformers = pytest.importorskip("transformers")
    values = np.linspace(0.5, 2.0, WIDTH // 2)
    frequencies = (PerFrequency(tuple(np.roll(values, head).tolist())) for head in range(2))
    row = (*frequencies, LogLinear(level=math.log(3.0)), Constant(1.7))
    write(tmp_path / "plain.gguf", "F32", more=other_weights)
    sm.fold(tmp_path / "plain.gguf", PerHead((row, row)), out=tmp_path / "folded.gguf")
    plain, folded = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=f"{name}.gguf").eval()
        for name in ("plain", "folded")
    )
    ids = torch.arange(40)[None]
    with torch.no_grad():
        before, found = plain(ids).logits, folded(ids).logits
        with sm.applied(plain, PerHead((row, row))):
            wanted = plain(ids).logits
    assert (wanted - before).abs().max() > 0.1
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
