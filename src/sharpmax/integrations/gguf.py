"""Fold one constant per head into a GGUF file, the format of llama.cpp and Ollama.

A quantised weight is a small integer times an fp16 scale, which a block of weights shares. β times a row of the query
projection therefore has the same integers and other scales. Nothing is requantised.

llama.cpp also computes one length rule, in the architecture `mistral3`. This architecture is `llama` with the rule, so
a `llama` file gets the rule by other metadata.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sharpmax.errors import ArgumentError, FileFormatError, UnsupportedError, reject
from sharpmax.files import new_file
from sharpmax.integrations.constants import engine_rule, weight_factors
from sharpmax.lazy import require
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import check_frequencies
from sharpmax.policies.registry import AUTO, packaged_for, resolve_policy

KEY = "sharpmax.policy"
"""The metadata key that holds the policy of a folded file, as JSON."""

MOST_ERROR = 2.0**-7
"""The largest relative error, root mean square over the query weights of a head, that a folded file may have.

fp16 has 11 significant bits, but fewer for the small scales of some types (Q6_K, Q3_K).
"""

# The offsets of the fp16 scales in a block of each type, in bytes.
_SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ1_S": (0,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,),
    "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
TYPES = ("F32", "F16", "BF16", *_SCALES)
"""The types of query weights that can be scaled."""

# Architectures of llama.cpp whose logits are query times key, and whose fused projections start with the queries.
_ARCHITECTURES = (
    "arcee", "cohere2", "command-r", "deepseek", "exaone", "falcon", "gemma", "gemma3", "glm4", "gpt2", "gptneox",
    "granite", "granitemoe", "internlm2", "llama", "minicpm", "nemotron", "olmo", "olmo2", "olmoe", "orion", "phi2",
    "phi3", "qwen", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "seed_oss", "smollm3", "stablelm", "starcoder",
    "starcoder2", "xverse",
)  # fmt: skip
# The two rows of a head with the same rotary frequency are neighbours, or half a head apart.
_PAIRS_SIDE_BY_SIDE = ("arcee", "cohere2", "command-r", "granite", "internlm2", "llama", "minicpm", "olmo", "smollm3")
_PAIRS_HALF_APART = ("gemma", "gemma3", "olmo2", "phi3", "qwen", "qwen2", "qwen2moe", "qwen3", "qwen3moe")
_NOT_ONLY_QUERIES = {
    "attn_logit_softcapping": "caps its logits (softcap)",
    "attention.max_alibi_bias": "adds a position bias to its logits (ALiBi)",
    "attention.clamp_kqv": "clips its queries",
    "attention.temperature_scale": "has a temperature by position",
}


_BEFORE_FIELDS = 24
"""Bytes before the first metadata field: magic, version, number of tensors, number of fields."""


class FoldedFile(NamedTuple):
    """A file or folder with a policy in its weights."""

    path: Path
    layers: int
    """The number of layers whose attention changed."""

    error: float
    """The largest relative rounding error, root mean square, of a head (GGUF) or a tensor (checkpoint)."""


class _Rows(NamedTuple):
    """The query rows of one head in one tensor, and β of each row or one β for all rows."""

    where: str
    kind: Any  # of gguf.GGMLQuantizationType
    offset: int
    size: int
    beta: tuple[float, ...]


def fold_file(
    path: str | os.PathLike[str],
    policy: Policy | str | os.PathLike[str] | None,
    out: str | os.PathLike[str],
) -> FoldedFile:
    """Write a copy of a GGUF file with `policy`, one constant per head, in its query weights to the new file `out`.

    Blocks keep their integers and get other fp16 scales. The metadata key `sharpmax.policy` is added; everything else
    is copied byte for byte. Every head of the copy is read back and compared with β times the original before the copy
    is renamed to `out`.

    The rule of Ministral 3 (`ministral3:4096`) changes no weights. A file of the architecture `llama` becomes one of
    `mistral3`, with the keys from which llama.cpp computes the rule.
    """
    source, target = Path(path), Path(out)
    chosen = packaged_for(*identity(source), foldable=True)[1] if policy == AUTO else resolve_policy(policy)
    if target.exists() or target.is_symlink():
        reject("out", f"{str(target)!r}, which exists", "the path of a new file", "a model is never written over")
    header = _Header(source)
    header.check_plain()
    rule = engine_rule(chosen)
    if rule is None:
        factors = weight_factors(chosen, header.heads(), source.name, header.get("context_length"))
    else:
        header.check_takes_rule()
        factors = {}
    rows = [one for layer, betas in factors.items() for one in _query_rows(header, layer, betas)]
    error = 0.0
    with source.open("rb") as file, new_file(target) as copy:
        start = _copy(file, copy, header, chosen, rule)
        for one in rows:
            file.seek(header.data + one.offset)
            old = file.read(one.size)
            copy.seek(start + one.offset)
            copy.write(_scaled(old, one))
            copy.seek(start + one.offset)
            error = max(error, _error(old, copy.read(one.size), one))
        after = source.stat()
        if (after.st_size, after.st_mtime_ns) != header.state:
            raise ArgumentError(f"model: {str(source)!r} changed while it was read; fold it again when it is whole")
    return FoldedFile(target, len(factors) if rule is None else len(header.heads()), error)


def identity(path: str | os.PathLike[str]) -> tuple[str, int, int, str, str]:
    """Architecture, number of layers, number of heads, file name and model name from the header of a GGUF file."""
    header = _Header(Path(path))
    heads = header.heads()
    return header.architecture, len(heads), max(heads), header.path.name, str(header.metadata.get("general.name", ""))


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether a path means a GGUF file, by its suffix or by the first bytes of the file."""
    if Path(path).suffix.lower() == ".gguf":
        return not Path(path).is_dir()
    try:
        with Path(path).open("rb") as file:
            return file.read(4) == b"GGUF"
    except (OSError, ValueError):
        return False


class _Header:
    """The header of a GGUF file: everything before the data of its tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            before = path.stat()
            reader = _reader(path)
            self.metadata: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        except OSError as problem:
            allowed = "a GGUF file you may read"
            raise ArgumentError(f"model: got {str(path)!r} ({problem.strerror}); allowed: {allowed}") from None
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError, struct.error) as problem:
            reason = str(problem).strip("'") or "damaged"
            raise FileFormatError(f"model: {str(path)!r} is not a whole GGUF file ({reason}); get it again") from None
        self.state = before.st_size, before.st_mtime_ns
        self.tensors: dict[str, Any] = {one.name: one for one in reader.tensors}
        infos = [one.field for one in reader.tensors]
        self.fields_end = min((one.offset for one in infos), default=0)
        self.infos_end = max((one.offset + sum(int(part.nbytes) for part in one.parts) for one in infos), default=0)
        self.starts = {name: one.offset for name, one in reader.fields.items() if one.offset >= _BEFORE_FIELDS}
        self.data, self.alignment = int(reader.data_offset), int(reader.alignment)
        self.architecture = str(self.metadata.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a metadata key of the architecture."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def count(self, key: str, default: int, layer: int) -> int:
        """A positive integer of the architecture for a layer; the file has one for all layers or one for each."""
        found = self.get(key, default)
        if isinstance(found, list) and layer < len(found):
            found = found[layer]
        if not isinstance(found, int) or found < 1:
            raise FileFormatError(f"model: {self.architecture}.{key} is {str(found)[:80]}; allowed: 1 or more")
        return found

    def heads(self) -> list[int]:
        """The number of heads of every layer; limited, because a damaged number could exhaust the memory."""
        layers, heads = self.get("block_count"), self.get("attention.head_count")
        known = isinstance(layers, int) and layers <= len(self.tensors)
        counts = heads if isinstance(heads, list) else [heads] * layers if known else []
        if not counts or len(counts) != layers or not all(one in range(1 << 16) for one in counts):
            raise FileFormatError(
                f"model: {str(self.path)!r} does not say how many heads and layers it has "
                f"({self.architecture}.block_count is {layers}, attention.head_count is {str(heads)[:80]})"
            )
        return counts

    def check_plain(self) -> None:
        """Refuse a file that already has a policy, or whose logits are not proportional to its queries."""
        path, name = str(self.path), self.architecture
        if KEY in self.metadata:
            raise ArgumentError(f"model: {path!r} already holds a policy ({KEY}); fold the original file instead")
        parts = self.metadata.get("split.count", 1)
        if parts not in (0, 1):
            raise UnsupportedError(
                f"model: {path!r} is one of {parts} parts; join them first with llama-gguf-split --merge"
            )
        reason = next((words for key, words in _NOT_ONLY_QUERIES.items() if self.get(key)), "")
        if not reason and any(".attn_sinks" in tensor for tensor in self.tensors):
            reason = "has attention sinks (attn_sinks), which are logits without a query"
        if reason:
            raise UnsupportedError(
                f"model: {name} {reason}, so scaling the query is not scaling the logits of its softmax"
            )
        if name not in _ARCHITECTURES:
            reject("model", f"the architecture {name!r}", ", ".join(_ARCHITECTURES), "fold its checkpoint instead")

    def check_takes_rule(self) -> None:
        """Refuse a file that is not also one of the architecture `mistral3`, but for the rule."""
        scaled = [key for key in self.metadata if key.startswith("llama.rope.scaling.")]
        other = [
            name for name in self.tensors if name == "rope_freqs.weight" or name.endswith(("_exps.weight", ".bias"))
        ]
        if self.architecture != "llama" or scaled or other:
            given = " with ".join([f"the architecture {self.architecture!r}", *scaled[:1], *other[:1]])
            allowed = "llama without experts, biases and scaled rotary positions, for a rule of the length"
            reject("model", given, allowed, "fold constants (sharpmax.integrations.transformers.nearest_constant)")


def _reader(path: Path) -> Any:
    gguf: Any = require("gguf", "models", "a GGUF file")
    kinds = gguf.GGUFValueType

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        """Reads a list in one step. The package makes arrays for every token: 3 s and 400 MB for SmolLM2."""

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != kinds.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            inner, count = kinds(self._get(orig_offs, np.uint32)[0]), int(self._get(orig_offs + 4, np.uint64)[0])
            begin = end = orig_offs + 12
            if inner == kinds.STRING:
                for _ in range(count):
                    end += 8 + int(struct.unpack_from("<Q", self.data, end)[0])
                parts: list[Any] = []  # lists of strings are not needed
            else:
                parts = [self._get(begin, self.gguf_scalar_to_np[inner], count)]
                end += parts[0].nbytes
            return end - orig_offs, parts, list(range(len(parts))), [kinds.ARRAY, inner]

    reader = Reader(path)
    if reader.byte_order != "I":
        raise ValueError("it is big-endian")
    return reader


def _in_file_order(betas: list[tuple[float, ...]], width: int, architecture: str) -> list[tuple[float, ...]]:
    """The β of every head; if there is one per row, in the order of the rows in the file."""
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


def _query_rows(header: _Header, layer: int, factors: list[list[float]]) -> Iterator[_Rows]:
    """The rows to scale in a layer: the gain of the query's normalisation, otherwise weight and bias."""
    heads, prefix = len(factors), f"blk.{layer}.attn_"
    part = "q" if f"{prefix}q.weight" in header.tensors else "qkv"
    weight = header.tensors.get(f"{prefix}{part}.weight")
    if weight is None:
        raise UnsupportedError(f"model: layer {layer} has neither {prefix}q.weight nor {prefix}qkv.weight")
    inputs, *shape = map(int, weight.shape)
    rows = math.prod(shape)
    default = rows // heads if part == "q" else header.count("embedding_length", 0, layer) // heads
    width = header.count("attention.key_length", default, layer)
    wanted = heads * width
    if part == "qkv":
        shared = header.count("attention.head_count_kv", heads, layer)
        wanted += shared * (width + header.count("attention.value_length", width, layer))
    if len(shape) != 1 or rows != wanted:
        raise UnsupportedError(
            f"model: {weight.name} has {rows} rows, where {wanted} are expected for {heads} heads of {width}"
        )
    betas = _in_file_order([tuple(row) for row in factors], width, header.architecture)
    gain = header.tensors.get(f"{prefix}q_norm.weight")
    changed = part if gain is None else "q_norm"
    for tensor in (header.tensors.get(f"{prefix}{changed}.{end}") for end in ("weight", "bias")):
        if tensor is None:
            continue
        kind, count, begin = tensor.tensor_type, tensor.n_elements, tensor.data_offset - header.data
        if kind.name not in TYPES:
            reject("model", f"{tensor.name} of the type {kind.name}", ", ".join(TYPES))
        if gain is not None and count == width and heads > 1:
            if len(set(betas)) > 1:
                raise UnsupportedError(
                    f"policy: layer {layer} of {header.architecture} normalises its queries with one gain for all "
                    "heads, so its heads need the same β; learn one β per layer with `sharpmax calibrate --foldable`"
                )
            yield _Rows(f"layer {layer}", kind, begin, tensor.n_bytes, betas[0])
            continue
        elements = width * inputs if tensor is weight else width  # of one head
        if count != (heads * width if gain is not None else rows * elements // width):
            raise UnsupportedError(f"model: {tensor.name} has {count} numbers, which {heads} heads of {width} do not")
        size = tensor.n_bytes * elements // count
        for head, beta in enumerate(betas):
            if set(beta) != {1.0}:
                yield _Rows(f"layer {layer}, head {head}", kind, begin + head * size, size, beta)


def _scaled(data: bytes, rows: _Rows) -> bytes:
    """β times the weights; of quantised weights only the scales change."""
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import quantize

    kind = rows.kind.name
    if kind in TYPES[:3]:
        blocks: NDArray[Any] = quantize(_times(_dequantised(data, rows), rows.beta), rows.kind)
        finite: NDArray[Any] = _dequantised(blocks.tobytes(), rows)
    else:
        blocks = np.frombuffer(data, np.uint8).reshape(-1, GGML_QUANT_SIZES[rows.kind][1]).copy()
        places = [slice(at, at + 2) for at in _SCALES[kind]]
        finite = np.stack([_times(blocks[:, place].copy().view("<f2"), rows.beta) for place in places])
        for place, scale in zip(places, finite, strict=True):
            blocks[:, place] = scale.view(np.uint8)
    if not np.isfinite(finite).all():
        held = kind if kind in TYPES[:3] else f"the fp16 scales of {kind}"
        raise UnsupportedError(
            f"policy: β = {max(rows.beta):.4g} in {rows.where} gives numbers that {held} cannot hold (overflow); "
            "allowed: a smaller β, or a file of type F32 or BF16"
        )
    return blocks.tobytes()


def _times(numbers: NDArray[Any], beta: tuple[float, ...]) -> NDArray[Any]:
    """Numbers times β; they are split evenly among the factors, in order."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        rows = numbers.astype(np.float64).reshape(len(beta), -1) * np.array(beta)[:, None]
        scaled: NDArray[Any] = rows.reshape(numbers.shape).astype(numbers.dtype)
    return scaled


def _dequantised(data: bytes, rows: _Rows) -> NDArray[np.float32]:
    from gguf.quants import dequantize

    found: NDArray[np.float32] = dequantize(np.frombuffer(data, np.uint8), rows.kind)
    return found


def _copy(file: BinaryIO, copy: BinaryIO, header: _Header, policy: Policy, rule: tuple[float, int] | None) -> int:
    """Copy the file with more metadata fields; return the offset of the tensor data."""
    magic, version, tensors, count = struct.unpack("<4sIQQ", file.read(_BEFORE_FIELDS))
    fields, added = file.read(header.fields_end - _BEFORE_FIELDS), [_field(KEY, 8, _text(json.dumps(policy.to_dict())))]
    if rule is not None:
        fields = _as_mistral3(fields, header)
        added.append(_field("mistral3.attention.temperature_scale", 6, struct.pack("<f", rule[0])))
        added.append(_field("mistral3.rope.scaling.original_context_length", 4, struct.pack("<I", rule[1])))
    copy.write(struct.pack("<4sIQQ", magic, version, tensors, count + len(added)))
    copy.write(fields + b"".join(added))
    copy.write(file.read(header.infos_end - header.fields_end))
    copy.write(bytes(-copy.tell() % header.alignment))
    start = copy.tell()
    file.seek(header.data)
    shutil.copyfileobj(file, copy, 1 << 24)
    return start


def _as_mistral3(fields: bytes, header: _Header) -> bytes:
    """Metadata fields under the names that the architecture `mistral3` has for them."""
    parts = []
    for (name, start), end in zip(header.starts.items(), [*header.starts.values(), header.fields_end][1:], strict=True):
        after_name = fields[start + len(_text(name)) - _BEFORE_FIELDS : end - _BEFORE_FIELDS]
        if name == "general.architecture":
            after_name = struct.pack("<I", 8) + _text("mistral3")
        parts.append(_text(re.sub(r"^llama\.", "mistral3.", name)) + after_name)
    return b"".join(parts)


def _field(key: str, kind: int, value: bytes) -> bytes:
    return _text(key) + struct.pack("<I", kind) + value


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _error(old: bytes, new: bytes, rows: _Rows) -> float:
    """The relative error of scaled rows, root mean square; an UnsupportedError if it is too large."""
    wanted = _times(_dequantised(old, rows).astype(np.float64), rows.beta)
    # np.linalg.norm starts threads for every head, which is slow on a busy machine.
    off, norm = (math.sqrt(np.square(x).sum()) for x in (_dequantised(new, rows) - wanted, wanted))
    if not off <= MOST_ERROR * norm:
        raise UnsupportedError(
            f"policy: {rows.where}: {rows.kind.name} holds β = {max(rows.beta):.4g} times its weights only with an "
            f"error of {off / max(norm, 1e-300):.2%}, because they are too small for fp16; at most {MOST_ERROR:.2%} "
            "is allowed; use a larger β, or a file of type F32 or BF16"
        )
    return off / norm if norm else 0.0
