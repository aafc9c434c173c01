"""Fold one constant per head into the files of a checkpoint, tensor by tensor, or write it as a PEFT adapter."""

from __future__ import annotations

import copy
import json
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sharpmax.errors import ArgumentError, FileFormatError, UnsupportedError, reject
from sharpmax.files import parse_json, read_json
from sharpmax.integrations.constants import engine_rule
from sharpmax.integrations.gguf import FoldedFile
from sharpmax.integrations.transformers.application import policy_for_model
from sharpmax.integrations.transformers.folding import MARK, check_not_folded, constants_of, fold
from sharpmax.integrations.transformers.interface import modules_of
from sharpmax.integrations.transformers.projections import Scaling, query_scaling
from sharpmax.integrations.transformers.support import require_transformers
from sharpmax.lazy import require
from sharpmax.models.language import ALIASES, first_sentence, new_folder
from sharpmax.ops.sharpen import policies_of
from sharpmax.policies.base import Policy
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.registry import BESIDE

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf")
_ALLOWED = "the folder of a checkpoint in safetensors files, a hub id, smollm2 or a GGUF file"
_INDEX = "model.safetensors.index.json"
_SMALL = {"vocab_size": 512, "intermediate_size": 128, "moe_intermediate_size": 64}


class _Stored(NamedTuple):
    """A tensor in a safetensors file: where its `size` bytes start."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def fold_checkpoint(
    name: str | os.PathLike[str],
    policy: Policy | str | os.PathLike[str] | None,
    out: str | os.PathLike[str],
    *,
    as_adapter: bool = False,
) -> FoldedFile:
    """Write a copy of a checkpoint with `policy`, one constant per head, in its query weights to the new folder `out`.

    `name` is the folder of a checkpoint in safetensors files, `smollm2` or a hub id. Files are copied and the query
    weights replaced in the copies, in their own dtype and one tensor at a time. Weights in other formats are not
    copied. A small model made from the configuration shows whether weights of this family can hold a policy.
    `config.json` gets the key `sharpmax_folded`; a checkpoint with that key cannot be folded again.

    The rule of Ministral 3 (`ministral3:4096`) changes no weights. The configuration of a Llama or Mistral becomes that
    of a Ministral 3, with the keys from which transformers and vLLM compute the rule.

    With `as_adapter` the folder holds a PEFT (IA)³ adapter instead, which multiplies the queries.
    """
    folder, target = _folder(str(name)), Path(out)
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        reject("out", repr(str(target)), "a new or empty folder", "a checkpoint is never written over another")
    config = read_json(folder / "config.json", "model")
    model = _without_weights(folder, config)
    if str(name) in ALIASES:
        model.config._name_or_path = str(name)
    chosen = policy_for_model(model, policy, foldable=True)
    rule = None if as_adapter else engine_rule(chosen)
    if rule is not None:
        with new_folder(target) as partial:
            _write_checkpoint(partial, folder, [])
            _write_config(partial, {**_with_rule(model, *rule), MARK: chosen.describe()})
        return FoldedFile(target, len(modules_of(model)), 0.0)
    modules, family = modules_of(model), type(model).__name__
    betas = constants_of(model, modules, chosen)
    if betas:
        row = policies_of(chosen, next(iter(betas)))
        _try_small(type(model), model.config, {type(one.module) for one in modules}, row)
    names = {module: name for name, module in model.named_modules()}
    made = [query_scaling(modules[layer], beta, f"layer {layer} of {family}") for layer, beta in betas.items()]
    scalings = [(names[one.layer], one) for one in made]
    with new_folder(target) as partial:
        if as_adapter:
            error = 0.0
            _write_adapter(partial, config.get("_name_or_path") or folder.name, family, scalings)
        else:
            error = _write_checkpoint(partial, folder, scalings)
            _write_config(partial, {**config, MARK: chosen.describe()} if betas else config)
    return FoldedFile(target, len(betas), error)


def _with_rule(model: Any, beta: float, length: int) -> dict[str, Any]:
    """The configuration of the Ministral 3 with the weights of `model` and the rule 1 + β·ln(1 + ⌊position/length⌋)."""
    body: dict[str, Any] = model.config.to_dict()
    rotary, kind = body.get("rope_parameters") or {}, type(model).__name__
    reasons = {
        f"{kind}": kind not in ("LlamaForCausalLM", "MistralForCausalLM"),
        f"rotary positions of the type {rotary.get('rope_type')!r}": rotary.get("rope_type") != "default",
        "biases": body.get("attention_bias") or body.get("mlp_bias"),
        "a sliding window": body.get("sliding_window"),
    }
    if found := next((reason for reason, there in reasons.items() if there), None):
        allowed = "a Llama or Mistral without biases, windows and scaled rotary positions, for a rule of the length"
        reject("model", found, allowed, "fold constants (sharpmax.integrations.transformers.nearest_constant)")
    own, unknown = {"original_max_position_embeddings": length}, ("_name_or_path", "attention_bias", "mlp_bias")
    return {
        **{key: value for key, value in body.items() if key not in unknown},
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "rope_parameters": {**rotary, **own, "llama_4_scaling_beta": beta},  # for transformers
        "llama_4_scaling": {**own, "beta": beta},  # for vLLM
    }


def _write_config(folder: Path, body: Any) -> None:
    (folder / "config.json").write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def _folder(name: str) -> Path:
    """The folder of a checkpoint given by alias, path or hub id; the latter is downloaded."""
    path = ALIASES[name]() if name in ALIASES else Path(name).expanduser()
    if not path.exists():
        hub = require("huggingface_hub", "hf", "a model of the hub")
        try:
            path = Path(hub.snapshot_download(name, ignore_patterns=[f"*{end}" for end in _OTHER_WEIGHTS]))
        except Exception as problem:  # an invalid name, the network, a gated model
            raise ArgumentError(f"model: got {name!r} ({first_sentence(problem)}); allowed: {_ALLOWED}") from None
    if not (path / "config.json").is_file():
        reject("model", f"{name!r}, which is not a folder with a config.json", _ALLOWED)
    return path


def _without_weights(folder: Path, body: Any) -> Any:
    """The model of a configuration on the meta device, where weights take no memory."""
    if not isinstance(body, dict):
        raise FileFormatError(f"model: {str(folder / 'config.json')!r} is not a configuration")
    check_not_folded(str(folder), body.get(MARK))
    if body.get("quantization_config"):
        method = body["quantization_config"].get("quant_method", "unknown")
        reject("model", f"weights quantised by {method!r}", "a checkpoint that is not quantised, or a GGUF file")
    transformers: Any = require_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        kind = getattr(transformers, str((config.architectures or [""])[0]), None)
        with torch.device("meta"):
            return (kind or transformers.AutoModelForCausalLM)._from_config(config)
    except Exception as problem:  # transformers raises many types of errors for a configuration
        raise ArgumentError(f"model: got {str(folder)!r} ({first_sentence(problem)}); allowed: {_ALLOWED}") from None


def _try_small(kind: Any, config: Any, modules: set[type], row: tuple[Policy, ...]) -> None:
    """Fold the policies of a layer into a small random model of the same kind; `fold` compares it with `apply`."""
    layers = config.get_text_config().num_hidden_layers
    for count in (2, 4, 8, 16, layers):
        small = copy.deepcopy(config)
        text = small.get_text_config()
        text.num_hidden_layers = min(count, layers)
        for key, value in list(vars(text).items()):
            if isinstance(value, (list, tuple)) and len(value) == layers:
                setattr(text, key, value[:count])
            elif key in _SMALL or key.endswith("_token_id"):
                setattr(text, key, _SMALL.get(key))
        with torch.device("meta"):
            found = modules_of(kind._from_config(small))
        if {type(one.module) for one in found} == modules:
            break
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = kind._from_config(small).float().eval()
        for weight in model.parameters():
            if weight.numel() and bool((weight == weight.flatten()[0]).all()):
                # A parameter that is initialised to 0, such as a position bias, would not show its effect.
                weight.data.add_(0.3 * torch.randn(weight.shape))
    fold(model, PerHead(tuple(row if len(row) > 1 else row * one.heads for one in found)))


def _stored(folder: Path) -> dict[str, _Stored]:
    """Every tensor in the safetensors files of a checkpoint."""
    files = sorted(folder.glob("*.safetensors"))
    if (folder / _INDEX).is_file():
        index = read_json(folder / _INDEX, "model")
        files = sorted({folder / name for name in index["weight_map"].values()})
    if not files:
        reject("model", f"{str(folder)!r}, which has no safetensors files", "a checkpoint in safetensors files")
    return {name: one for file in files for name, one in _header(file)}


def _header(file: Path) -> Iterator[tuple[str, _Stored]]:
    """The tensors of a safetensors file: the length of the header in 8 bytes, the header as JSON, the data."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            body = parse_json(opened.read(min(length, 1 << 30)))
        body.pop("__metadata__", None)
        for name, about in body.items():
            start, end = about["data_offsets"]
            if 8 + length + end > file.stat().st_size:
                raise ValueError(f"it ends before {name} does")
            yield name, _Stored(file, about["dtype"], tuple(about["shape"]), 8 + length + start, end - start)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as problem:
        raise FileFormatError(
            f"model: {str(file)!r} is not a whole safetensors file ({problem}); get it again"
        ) from None


def _write_checkpoint(partial: Path, folder: Path, scalings: list[tuple[str, Scaling]]) -> float:
    """Copy all files and scale the weights in the copies; return the largest relative rounding error of a tensor."""

    def state() -> list[tuple[str, int, int]]:  # differs after a write to the weights
        found = [(file.name, file.stat()) for file in sorted(folder.glob("*.safetensors"))]
        return [(name, about.st_size, about.st_mtime_ns) for name, about in found]

    stored, before = _stored(folder), state()
    changes: dict[Path, list[tuple[str, _Stored, Scaling]]] = {one.file: [] for one in stored.values()}
    for name, scaling in scalings:
        for key, weight in scaling.layer.named_parameters(recurse=False):
            own = stored.get(f"{name}.{key}")
            if own is None or own.shape != tuple(weight.shape) or own.dtype not in _DTYPES:
                about = "is not in its files" if own is None else f"is {own.dtype} {list(own.shape)} there"
                raise UnsupportedError(
                    f"model: {name}.{key} {about}, where {' or '.join(_DTYPES)} {list(weight.shape)} is expected; "
                    "load the model and fold that: sharpmax.fold(model, policy).save_pretrained(...)"
                )
            changes[own.file].append((key, own, scaling))
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        place = partial / file.relative_to(folder)
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if file in changes or not (hidden or file.suffix in (*_OTHER_WEIGHTS, ".safetensors")):
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)
    (partial / BESIDE).unlink(missing_ok=True)  # a saved policy would act a second time
    error = 0.0
    for file, these in changes.items():
        with (partial / file.name).open("r+b") as copied:
            for key, own, scaling in these:
                error = max(error, _scale_stored(copied, key, own, scaling))
    if state() != before:
        raise ArgumentError(f"model: {str(folder)!r} changed while it was read; fold it again when it is whole")
    return error


def _scale_stored(file: Any, key: str, own: _Stored, scaling: Scaling) -> float:
    """Scale one tensor in the file; return its relative rounding error, root mean square."""
    dtype = _DTYPES[own.dtype]
    file.seek(own.start)
    old = torch.frombuffer(bytearray(file.read(own.size)), dtype=dtype).view(own.shape)
    wanted = scaling.scaled(key, old)
    new = wanted.to(dtype)
    if not bool(new.isfinite().all()):
        raise UnsupportedError(
            f"policy: β up to {float(scaling.factor.max()):.4g} gives weights that {own.dtype} cannot hold (overflow); "
            "allowed: a smaller β, or a checkpoint in F32 or BF16"
        )
    file.seek(own.start)
    file.write(new.contiguous().view(torch.uint8).numpy().tobytes())
    return float((new.double() - wanted).norm() / wanted.norm().clamp_min(1e-300))


def _write_adapter(partial: Path, base: str, family: str, scalings: list[tuple[str, Scaling]]) -> None:
    """Write an (IA)³ adapter, which multiplies the outputs of the query projections."""
    factors: dict[str, Tensor] = {}
    for name, one in scalings:
        if one.factor.ndim != 1 or type(one.layer).__name__ not in ("Linear", "Conv1D"):
            raise UnsupportedError(
                f"model: {family} normalises its queries ({name}), so that an (IA)³ adapter on their projection has no "
                "effect; fold the checkpoint instead (--as checkpoint)"
            )
        factors[f"base_model.model.{name}.ia3_l"] = one.factor.float()[:, None].contiguous()
    if not factors:
        reject("policy", "β = 1 in every head", "a policy that changes something")
    config = {
        "peft_type": "IA3", "task_type": "CAUSAL_LM" if family.endswith("ForCausalLM") else None,
        "base_model_name_or_path": base,
        "target_modules": [name for name, _ in scalings], "feedforward_modules": [], "inference_mode": True,
        "fan_in_fan_out": type(scalings[0][1].layer).__name__ == "Conv1D", "init_ia3_weights": True,
    }  # fmt: skip
    (partial / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    safetensors: Any = require("safetensors.torch", "hf", "an adapter")
    safetensors.save_file(factors, partial / "adapter_model.safetensors", {"format": "pt"})
