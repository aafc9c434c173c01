"""A constant per head written into a GGUF file, the format of llama.cpp and Ollama: a copy with other scales.

A quantised weight is a small integer times an fp16 scale that a block of weights shares. β times a row of the query
projection is therefore the same integers with other scales: nothing is quantised again.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from sharpmax.errors import ArgumentError, FileFormatError, SharpmaxError, UnsupportedError, reject
from sharpmax.files import new_file, parse_json
from sharpmax.lazy import require
from sharpmax.policies.base import Policy, policy_from_dict
from sharpmax.policies.basic import Constant
from sharpmax.policies.per_frequency import PerFrequency, check_frequencies, constant_factors
from sharpmax.policies.per_head import PerHead, check_shape
from sharpmax.policies.registry import AUTO, packaged_for, resolve_policy

KEY = "sharpmax.policy"
"""The metadata key that holds the policy of a folded file, as JSON."""

MOST_ERROR = 2.0**-7
"""The largest relative error, root mean square over the query weights of a head, that a folded file may have.

fp16 keeps 11 bits, but the scales of some types (Q6_K, Q3_K) are so small that it keeps fewer.
"""

_CHUNK = 1 << 24

# Where a block of each type has its fp16 scales, in bytes.
_SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ1_S": (0,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,),
    "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
TYPES = ("F32", "F16", "BF16", *_SCALES)
"""The types of query weights that can be folded into."""

# Architectures of llama.cpp whose logits are the query times the key, with the queries first in a fused projection.
_ARCHITECTURES = (
    "arcee", "cohere2", "command-r", "deepseek", "exaone", "falcon", "gemma", "gemma3", "glm4", "gpt2", "gptneox",
    "granite", "granitemoe", "internlm2", "llama", "minicpm", "nemotron", "olmo", "olmo2", "olmoe", "orion", "phi2",
    "phi3", "qwen", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "seed_oss", "smollm3", "stablelm", "starcoder",
    "starcoder2", "xverse",
)  # fmt: skip
# Where the rows of a head that share a rotary frequency lie: side by side, or half a head apart.
_PAIRS_SIDE_BY_SIDE = ("arcee", "cohere2", "command-r", "granite", "internlm2", "llama", "minicpm", "olmo", "smollm3")
_PAIRS_HALF_APART = ("gemma", "gemma3", "olmo2", "phi3", "qwen", "qwen2", "qwen2moe", "qwen3", "qwen3moe")
_NOT_ONLY_QUERIES = {
    "attn_logit_softcapping": "caps its logits (softcap)",
    "attention.max_alibi_bias": "adds a position bias to its logits (ALiBi)",
    "attention.clamp_kqv": "clips its queries",
    "attention.temperature_scale": "has a temperature by position",
}
_NUMBERS = "BbHhIif?"  # of the value types 0 to 7; 8 is a string, 9 an array
_LONG_NUMBERS = {10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class FoldedFile:
    """A file or folder with a policy in its weights."""

    path: Path
    layers: int
    """How many layers have other weights than before."""

    error: float
    """The largest relative error of rounding, root mean square: among heads (GGUF) or tensors (checkpoints)."""


@dataclass(frozen=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    """Rows last, as the file has it."""

    kind: str
    offset: int
    """From the beginning of the data."""

    size: int


@dataclass(frozen=True)
class _Header:
    metadata: dict[str, Any]
    tensors: dict[str, _Tensor]
    fields_end: int
    infos_end: int
    data: int
    """Where the data of the tensors begins."""

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the architecture's own."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


@dataclass(frozen=True)
class _Rows:
    """Query rows of one head in one tensor, and what each row is multiplied by."""

    where: str
    kind: str
    offset: int
    size: int
    beta: tuple[float, ...]
    """One factor per row; a single one is for all of them."""

    @property
    def largest(self) -> float:
        return max(self.beta)


def fold_file(
    path: str | os.PathLike[str],
    policy: Policy | str | os.PathLike[str] | None,
    out: str | os.PathLike[str],
) -> FoldedFile:
    """Write a copy of a GGUF file with `policy`, one constant per head, in its query weights to the new file `out`.

    Blocks keep their integers and get other fp16 scales. Everything else stays as it is, byte for byte, but for the
    metadata key `sharpmax.policy`. The copy is read back and every head compared with β times the original before it
    gets its name; the original is only read.
    """
    source, target = Path(path), Path(out)
    chosen = packaged_for(*identity(source), foldable=True)[1] if policy == AUTO else resolve_policy(policy)
    if target.exists() or target.is_symlink():
        reject("out", f"{str(target)!r}, which exists", "the path of a new file", "a model is never written over")
    require("gguf", "models", "a GGUF file")
    with _opened(source) as file:
        before = os.fstat(file.fileno())
        header = _read_header(file, source)
        _check_plain(header, source)
        heads = _heads(header, source)
        check_shape(chosen, heads, source.name)
        betas = _betas(chosen, heads, header.get("context_length"))
        changed = {layer: row for layer, row in enumerate(betas) if any(set(beta) != {1.0} for beta in row)}
        rows = [one for layer, row in changed.items() for one in _query_rows(header, layer, row)]
        with new_file(target) as copy:
            start = _copy(file, copy, header, chosen)
            for one in rows:
                _write_at(copy, start + one.offset, _scaled(_read_at(file, header.data + one.offset, one.size), one))
            copy.flush()
            error = _check(file, header, copy, rows, source)
            after = source.stat()
            if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                raise ArgumentError(f"model: {str(source)!r} changed while it was read; fold it again when it is whole")
            if target.exists():
                reject("out", f"{str(target)!r}, which exists by now", "the path of a new file")
    return FoldedFile(target, len(changed), error)


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as problem:
        raise ArgumentError(
            f"model: got {str(path)!r} ({problem.strerror}); allowed: a GGUF file you may read"
        ) from None


def identity(path: str | os.PathLike[str]) -> tuple[str, int, int, str, str]:
    """Architecture, layers, heads, file name and name of the model in a GGUF file, from its header alone."""
    with _opened(Path(path)) as file:
        header = _read_header(file, Path(path))
    heads = _heads(header, Path(path))
    return header.architecture, len(heads), max(heads), Path(path).name, str(header.metadata.get("general.name", ""))


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether a path means a GGUF file: by its ending or, if there is such a file, by its first bytes."""
    if Path(path).suffix.lower() == ".gguf":
        return not Path(path).is_dir()
    try:
        with Path(path).open("rb") as file:
            return file.read(4) == b"GGUF"
    except (OSError, ValueError):
        return False


def _read_header(file: BinaryIO, path: Path) -> _Header:
    """What comes before the tensors. The gguf package makes an array of every token: 3 s and 400 MB for SmolLM2."""
    try:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return _Parser(view).header()
    except (struct.error, ValueError, OverflowError, RecursionError, KeyError) as problem:
        if isinstance(problem, SharpmaxError):
            raise
        raise FileFormatError(
            f"model: {str(path)!r} is not a whole GGUF file ({str(problem).strip(chr(39)) or 'damaged'}); get it again"
        ) from None


class _Parser:
    def __init__(self, view: mmap.mmap) -> None:
        self._view, self._at = view, 0

    def header(self) -> _Header:
        if self._view[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version = self._number("I")
        if version not in (2, 3):
            raise ValueError(f"version {version}, where 2 and 3 are known, little-endian")
        tensors, fields = self._number("Q"), self._number("Q")
        metadata = {}
        for _ in range(fields):
            key = self._text()
            metadata[key] = self._value(self._number("I"))
        fields_end = self._at
        found = [self._tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"alignment {alignment}")
        data = -(-self._at // alignment) * alignment
        end = 0
        for one in sorted(found, key=lambda tensor: tensor.offset):
            if one.offset < end:
                raise ValueError(f"{one.name} lies over another tensor")
            end = one.offset + one.size
            if data + end > len(self._view):
                raise ValueError(f"it ends before {one.name} does")
        if len({one.name for one in found}) < len(found):
            raise ValueError("two tensors have one name")
        return _Header(metadata, {one.name: one for one in found}, fields_end, self._at, data)

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._view, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value

    def _text(self) -> str:
        return self._bytes(self._number("Q")).decode("utf-8", errors="replace")

    def _bytes(self, size: int) -> bytes:
        if size > len(self._view) - self._at:
            raise ValueError("it ends too early")
        self._at += size
        return self._view[self._at - size : self._at]

    def _value(self, kind: int) -> Any:
        """A value; None in place of lists of texts, such as the vocabulary."""
        if kind == 8:
            return self._text()
        if kind != 9:
            return self._number(_code(kind))
        inner, count = self._number("I"), self._number("Q")
        if inner in (8, 9):
            for _ in range(count):
                if inner == 9:
                    self._value(9)
                else:
                    size = self._number("Q")
                    self._at += size
            return None
        code = np.dtype(f"<{_code(inner)}" if inner != 7 else "?")
        return np.frombuffer(self._bytes(count * code.itemsize), code).tolist()

    def _tensor(self) -> _Tensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self._text()
        shape = tuple(self._number("Q") for _ in range(self._number("I")))
        number, offset = self._number("I"), self._number("Q")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:  # newer than the gguf package; it may be a tensor that is only copied
            return _Tensor(name, shape, f"type {number}", offset, 0)
        block, size = GGML_QUANT_SIZES[kind]
        if shape and shape[0] % block:
            raise ValueError(f"{name} has rows of {shape[0]}, which {kind.name} cannot hold")
        return _Tensor(name, shape, kind.name, offset, math.prod(shape) // block * size)


def _code(kind: int) -> str:
    code = _NUMBERS[kind] if kind < 8 else _LONG_NUMBERS.get(kind)
    if code is None:
        raise ValueError(f"a metadata value of the unknown type {kind}")
    return code


def _check_plain(header: _Header, path: Path) -> None:
    """Refuse a file that has a policy already, or whose logits do not grow in proportion to its queries."""
    if KEY in header.metadata:
        try:
            held = policy_from_dict(parse_json(str(header.metadata[KEY]))).describe()
        except ValueError:
            held = repr(header.metadata[KEY])[:80]
        raise ArgumentError(f"model: {str(path)!r} already holds a policy: {held}; fold the original file instead")
    if header.metadata.get("split.count", 1) not in (0, 1):
        raise UnsupportedError(
            f"model: {str(path)!r} is one of {header.metadata['split.count']} parts; "
            "join them first with llama-gguf-split --merge"
        )
    name = header.architecture
    reason = next((words for key, words in _NOT_ONLY_QUERIES.items() if header.get(key)), "")
    if not reason and any(".attn_sinks" in tensor for tensor in header.tensors):
        reason = "has attention sinks (attn_sinks), which are logits without a query"
    if reason:
        raise UnsupportedError(f"model: {name} {reason}, so scaling the query is not scaling the logits of its softmax")
    if name not in _ARCHITECTURES:
        reject("model", f"the architecture {name!r}", ", ".join(_ARCHITECTURES), "fold its checkpoint instead")


def _heads(header: _Header, path: Path) -> list[int]:
    """The number of heads of every layer, within limits: a damaged number must not fill the memory."""
    layers, heads = header.get("block_count"), header.get("attention.head_count")
    known = isinstance(layers, int) and layers <= len(header.tensors)
    counts = heads if isinstance(heads, list) else [heads] * layers if known else []
    if not counts or len(counts) != layers or not all(one in range(1 << 16) for one in counts):
        raise FileFormatError(
            f"model: {str(path)!r} does not say how many heads and layers it has ({header.architecture}.block_count "
            f"is {layers}, attention.head_count is {str(heads)[:80]})"
        )
    return counts


def _betas(policy: Policy, heads: list[int], longest: Any) -> list[list[tuple[float, ...]]]:
    """β of every head of every layer: one factor, or one per query dimension in the order of transformers."""
    grid = policy.policies if isinstance(policy, PerHead) else [(policy,) * count for count in heads]
    if not all(isinstance(one, (Constant, PerFrequency)) for row in grid for one in row):
        # Torch takes more time and memory than all the rest, and constants do without it.
        from sharpmax.integrations.transformers.folding import check_constant, nearest_constant

        check_constant(policy, longest)
        grid = [tuple(nearest_constant(one, 2) for one in row) for row in grid]
    return [[tuple(factors) for factors in constant_factors(row)] for row in grid]


def _in_file_order(betas: list[tuple[float, ...]], width: int, architecture: str) -> list[tuple[float, ...]]:
    """The factors of every head in the order of the file's rows, where there is one per row."""
    if len(betas[0]) == 1:
        return betas
    check_frequencies(len(betas[0]), width)
    if architecture in _PAIRS_SIDE_BY_SIDE:
        return [tuple(beta[half * width // 2 + i] for i in range(width // 2) for half in (0, 1)) for beta in betas]
    if architecture not in _PAIRS_HALF_APART:
        known = sorted((*_PAIRS_SIDE_BY_SIDE, *_PAIRS_HALF_APART))
        given = f"a β per rotary frequency for the architecture {architecture!r}"
        reject("policy", given, f"{', '.join(known)}", "fold its checkpoint instead, or learn constants")
    return betas


def _query_rows(header: _Header, layer: int, betas: list[tuple[float, ...]]) -> Iterator[_Rows]:
    """What is to be multiplied in a layer: the gain of the query's normalisation, or else weight and bias."""
    heads, prefix = len(betas), f"blk.{layer}.attn_"
    part = "q" if f"{prefix}q.weight" in header.tensors else "qkv"
    weight = header.tensors.get(f"{prefix}{part}.weight")
    if weight is None:
        raise UnsupportedError(f"model: layer {layer} has neither {prefix}q.weight nor {prefix}qkv.weight")
    rows = math.prod(weight.shape[1:])
    default = rows // heads if part == "q" else _count(header, "embedding_length", 0, layer) // heads
    width = _count(header, "attention.key_length", default, layer)
    wanted = heads * width
    if part == "qkv":
        shared = _count(header, "attention.head_count_kv", heads, layer)
        wanted += shared * (width + _count(header, "attention.value_length", width, layer))
    if len(weight.shape) != 2 or rows != wanted:
        raise UnsupportedError(
            f"model: {weight.name} has {rows} rows, where {wanted} are expected for {heads} heads of {width}"
        )
    betas = _in_file_order(betas, width, header.architecture)
    gain = header.tensors.get(f"{prefix}q_norm.weight")
    changed = part if gain is None else "q_norm"
    for tensor in (header.tensors.get(f"{prefix}{changed}.{end}") for end in ("weight", "bias")):
        if tensor is None:
            continue
        if tensor.kind not in TYPES:
            reject("model", f"{tensor.name} of the type {tensor.kind}", ", ".join(TYPES))
        count = math.prod(tensor.shape)
        if gain is not None and count == width and heads > 1:
            if len(set(betas)) > 1:
                logs = [math.log(max(factor, 1e-30)) for beta in betas for factor in beta]
                mean = math.exp(sum(logs) / len(logs))
                raise UnsupportedError(
                    f"policy: layer {layer} of {header.architecture} normalises its queries with one gain for all "
                    "heads, so its heads need the same β; the nearest foldable policy has one β per layer, "
                    f"β = {mean:.4g} here (geometric mean)"
                )
            yield _Rows(f"layer {layer}", tensor.kind, tensor.offset, tensor.size, betas[0])
            continue
        elements = width * weight.shape[0] if tensor is weight else width  # of one head
        if count != (heads * width if gain is not None else rows * elements // width):
            raise UnsupportedError(f"model: {tensor.name} has {count} numbers, which {heads} heads of {width} do not")
        size = tensor.size * elements // count
        for head, beta in enumerate(betas):
            if set(beta) != {1.0}:
                where = f"layer {layer}, head {head}"
                yield _Rows(where, tensor.kind, tensor.offset + head * size, size, beta)


def _count(header: _Header, key: str, default: int, layer: int) -> int:
    """A whole number of the architecture, for all layers or for each of them."""
    found = header.get(key, default)
    if isinstance(found, list) and layer < len(found):
        found = found[layer]
    if not isinstance(found, int) or found < 1:
        raise FileFormatError(f"model: {header.architecture}.{key} is {str(found)[:80]}; allowed: 1 or more")
    return found


def _scaled(data: bytes, rows: _Rows) -> bytes:
    """The same weights times β; only scales change."""
    blocks: NDArray[Any] = np.frombuffer(data, np.uint8).copy()
    if rows.kind == "BF16":
        from gguf.quants import quantize

        blocks = quantize(_times(_dequantised(data, rows.kind), rows.beta), _type(rows.kind))
        finite: NDArray[Any] = _dequantised(blocks.tobytes(), rows.kind)
    elif rows.kind in ("F16", "F32"):
        blocks = finite = _times(blocks.view("<f2" if rows.kind == "F16" else "<f4"), rows.beta)
    else:
        from gguf import GGML_QUANT_SIZES

        cut = blocks.reshape(-1, GGML_QUANT_SIZES[_type(rows.kind)][1])
        places = [slice(at, at + 2) for at in _SCALES[rows.kind]]
        finite = np.stack([_times(cut[:, place].copy().view("<f2"), rows.beta) for place in places])
        for place, scale in zip(places, finite, strict=True):
            cut[:, place] = scale.view(np.uint8)
    if not np.isfinite(finite).all():
        kind = rows.kind if rows.kind in TYPES[:3] else f"the fp16 scales of {rows.kind}"
        raise UnsupportedError(
            f"policy: β = {rows.largest:.4g} in {rows.where} gives numbers that {kind} cannot hold (overflow); "
            "allowed: a smaller β, or a file of type F32 or BF16"
        )
    return blocks.tobytes()


def _times(numbers: NDArray[Any], beta: tuple[float, ...]) -> NDArray[Any]:
    """Numbers that belong to as many rows as there are factors, in their order, times the factors."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        rows = numbers.astype(np.float64).reshape(len(beta), -1) * np.array(beta)[:, None]
        scaled: NDArray[Any] = rows.reshape(numbers.shape).astype(numbers.dtype)
    return scaled


def _type(kind: str) -> Any:
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType[kind]


def _dequantised(data: bytes, kind: str) -> NDArray[np.float32]:
    from gguf.quants import dequantize

    found: NDArray[np.float32] = dequantize(np.frombuffer(data, np.uint8), _type(kind))
    return found


def _copy(file: BinaryIO, copy: BinaryIO, header: _Header, policy: Policy) -> int:
    """Write the header with one more field, and the data as it is; return where the data begins."""
    key, text = KEY.encode(), json.dumps(policy.to_dict()).encode()
    file.seek(0)
    magic, version, tensors, fields = struct.unpack("<4sIQQ", file.read(24))
    copy.write(struct.pack("<4sIQQ", magic, version, tensors, fields + 1))
    copy.write(file.read(header.fields_end - 24))
    copy.write(struct.pack(f"<Q{len(key)}sIQ{len(text)}s", len(key), key, 8, len(text), text))
    copy.write(file.read(header.infos_end - header.fields_end))
    alignment = header.metadata.get("general.alignment", 32)
    copy.write(bytes(-copy.tell() % alignment))
    start = copy.tell()
    file.seek(header.data)
    while chunk := file.read(_CHUNK):
        copy.write(chunk)
    return start


def _check(file: BinaryIO, header: _Header, copy: BinaryIO, rows: list[_Rows], path: Path) -> float:
    """Read the copy back and compare every head with β times the original; the largest relative error."""
    found = _read_header(copy, path)
    fields = 24, header.fields_end - 24
    if found.tensors != header.tensors or _read_at(copy, *fields) != _read_at(file, *fields):
        raise UnsupportedError(f"model: the copy of {str(path)!r} reads differently; is the disk in order?")
    largest = 0.0
    for one in rows:
        original = _dequantised(_read_at(file, header.data + one.offset, one.size), one.kind)
        old = _times(original.astype(np.float64), one.beta)
        new = _dequantised(_read_at(copy, found.data + one.offset, one.size), one.kind)
        off, norm = _norm(new - old), _norm(old)
        if not off <= MOST_ERROR * norm:
            raise UnsupportedError(
                f"policy: {one.where}: {one.kind} holds β = {one.largest:.4g} times its weights only with an error of "
                f"{off / max(norm, 1e-300):.2%}, because they are too small for fp16; at most {MOST_ERROR:.2%} is "
                "allowed; use a larger β, or a file of type F32 or BF16"
            )
        largest = max(largest, off / norm if norm else 0.0)
    return largest


def _norm(numbers: NDArray[np.float64]) -> float:
    return math.sqrt(np.square(numbers).sum())  # np.linalg.norm wakes threads for every head: slow on a busy machine


def _read_at(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)


def _write_at(file: BinaryIO, offset: int, data: bytes) -> None:
    file.seek(offset)
    file.write(data)
