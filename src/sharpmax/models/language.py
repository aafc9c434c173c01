"""Load a causal language model: the alias smollm2, a local folder, a GGUF file or a hub id."""

from __future__ import annotations

import hashlib
import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sharpmax.errors import ArgumentError, SharpmaxError, reject, reject_type
from sharpmax.lazy import require
from sharpmax.models.smollm2 import read_gguf, smollm2_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_OF_ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def any_length(device: torch.device) -> AbstractContextManager[None]:
    """Attention kernels without a plan per length, for work whose lengths change from call to call.

    On newer GPUs torch prefers cuDNN, which plans anew for every shape: a good part of a second, again and again.
    """
    return sdpa_kernel(_OF_ANY_LENGTH) if device.type == "cuda" else nullcontext()


ALIASES: Mapping[str, Callable[[], Path]] = MappingProxyType({"smollm2": smollm2_folder})
"""Models that come from a Python package: the function makes their folder on first use."""

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)

SPLIT = "split"
"""The device of a model that is spread over all devices, the CPU and the disk."""

_ALLOWED = f"{', '.join(ALIASES)}, the folder of a saved model, a GGUF file or a hub id"
_CAUSAL = "a causal language model"
_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class LanguageModel:
    """A causal language model, frozen and in evaluation mode, with its tokenizer."""

    name: str
    """The name it was requested by."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load_language_model(
    name: str, *, device: str | Mapping[str, int | str] = "cpu", dtype: str = "float32", trust_remote_code: bool = False
) -> LanguageModel:
    """Load a model by its alias (`smollm2`), from the folder of a saved model, from a GGUF file or by its hub id.

    `device` is one device, "split" for accelerate's `device_map="auto"` (all GPUs, then the CPU, then the disk), or a
    device map of modules. Weights are read from safetensors and GGUF files alone; those of a GGUF file are
    dequantised. Code that comes with a model is run only if it is trusted.
    """
    if dtype not in DTYPES:
        reject("dtype", repr(dtype), f"one of {list(DTYPES)}")
    placed: dict[str, Any] = {"dtype": DTYPES[dtype]}
    if device == SPLIT or not isinstance(device, str):
        require("accelerate", "hf", "a model on several devices")
        placed["device_map"] = "auto" if isinstance(device, str) else dict(device)
    else:
        _check_device(device)
    transformers = require("transformers", "hf", "a language model")
    with _one_line(name):
        model, tokenizer, missing = _load(transformers, name, trust_remote_code, placed)
    _check_causal(name, model, missing)
    if "device_map" not in placed:
        model = model.to(device)
    if model.device.type == "meta":
        reject("device", f"{device}, which leaves the embeddings on the disk", "a map that puts them on a device")
    return LanguageModel(name, model.eval().requires_grad_(False), tokenizer)


def read_config(name: str, *, trust_remote_code: bool = False) -> Any:
    """The configuration of a model by its alias, folder or hub id; its weights are not read."""
    transformers = require("transformers", "hf", "a language model")
    place, local = _place(name)
    with _one_line(name):
        return transformers.AutoConfig.from_pretrained(
            place, local_files_only=local, trust_remote_code=trust_remote_code
        )


@contextmanager
def _one_line(name: str) -> Iterator[None]:
    """Models fail to load in many ways: say in one line that a name is none."""
    with quiet():
        try:
            yield
        except SharpmaxError:
            raise
        except Exception as problem:
            essence = _essence(problem)
            todo = "; if you trust it, pass trust_remote_code" if "custom code" in essence else ""
            raise ArgumentError(f"model: got {name!r} ({essence}); allowed: {_ALLOWED}{todo}") from None


def _load(
    transformers: ModuleType, name: str, trust_remote_code: bool, placed: Mapping[str, Any]
) -> tuple[Any, Any, list[str]]:
    if name.lower().endswith(".gguf") and Path(name).expanduser().is_file():
        return (*read_gguf(Path(name).expanduser().absolute(), **placed), [])
    place, local = _place(name)
    options = {"local_files_only": local, "trust_remote_code": trust_remote_code}
    config = read_config(name, trust_remote_code=trust_remote_code)
    own = getattr(config, "auto_map", None) or {}
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and "AutoModelForCausalLM" not in own:
        reject("model", f"{name!r}, which is of the kind {config.model_type!r}", _CAUSAL)
    tokenizer = transformers.AutoTokenizer.from_pretrained(place, **options)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        place, use_safetensors=True, output_loading_info=True, **options, **placed
    )
    if name in ALIASES:
        model.name_or_path = model.config._name_or_path = tokenizer.name_or_path = name
    return model, tokenizer, sorted(info["missing_keys"])


def _place(name: str) -> tuple[str, bool]:
    """The name or path for transformers, and whether it is a local folder."""
    if name in ALIASES:
        return str(ALIASES[name]()), True
    folder = Path(name).expanduser()
    if name and folder.exists():
        if not (folder / "config.json").is_file():
            reject("model", f"{name!r}, which is not a folder with a config.json", _ALLOWED)
        return str(folder), True
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        reject("model", f"{name!r}, which is neither a folder that exists nor a hub id", _ALLOWED)
    return name, False


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as problem:
        allowed = "a device that torch can use here, such as cpu"
        raise ArgumentError(f"device: got {device!r} ({_essence(problem)}); allowed: {allowed}") from None


def _check_causal(name: str, model: Any, missing: list[str]) -> None:
    if missing:
        first = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        given = f"{name!r}, whose files lack {len(missing)} of the weights of a {type(model).__name__} ({first})"
        reject("model", given, f"{_CAUSAL} with all of its weights")
    # The attention modules of encoders that transformers would load here have is_causal=False.
    if {module.is_causal for module in model.modules() if hasattr(module, "is_causal")} == {False}:
        given = f"{name!r}, an encoder ({model.config.model_type}): its tokens see those after them"
        reject("model", given, _CAUSAL)


def _essence(problem: BaseException) -> str:
    """The first sentence of an error, on one line."""
    text = " ".join(str(problem).split()) or type(problem).__name__
    return re.split(r"\. (?=[A-Z])", text)[0].rstrip(".:")[:240]


def context_of(model: PreTrainedModel) -> int | None:
    """The longest input of a model in tokens; None where its configuration does not state it."""
    found = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def check_tokenizer(tokenizer: Any, todo: str = "") -> PreTrainedTokenizerBase:
    """Return `tokenizer`, or refuse ids, texts and names."""
    if not (callable(tokenizer) and hasattr(tokenizer, "decode")):
        given = "None" if tokenizer is None else f"a {type(tokenizer).__name__}"
        reject_type("tokenizer", given, "the model's tokenizer (transformers.AutoTokenizer.from_pretrained)", todo)
    found: PreTrainedTokenizerBase = tokenizer
    return found


def weights_fingerprint(model: PreTrainedModel) -> str:
    """A hash of every value of every tensor; the same on every device and in every dtype that holds the values."""
    digest = hashlib.sha256()
    saved = model.state_dict().keys()
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in saved)
    for name, tensor in itertools.chain(model.named_parameters(), buffers):
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        for part in torch.split(_in_memory(model, name, tensor).detach().flatten(), _AT_ONCE):
            value = part.cpu()
            if value.is_floating_point() and value.dtype != torch.float64:
                value = value.float()  # exact: the same numbers, loaded in another dtype
            digest.update(value.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def _in_memory(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor, from the CPU or the disk if that is where accelerate keeps them."""
    if not tensor.is_meta or not hasattr(model, "hf_device_map"):
        return tensor
    utils = require("accelerate.utils", "hf", "a model on several devices")
    module, _, leaf = name.rpartition(".")
    with utils.align_module_device(model.get_submodule(module), "cpu"):
        found: torch.Tensor = getattr(model.get_submodule(module), leaf).detach().clone()
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers and the hub inside the block; restore their verbosity afterwards."""
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    logs: tuple[Any, Any] = logging, hub
    bars = logging.is_progress_bar_enabled()
    verbosities = [log.get_verbosity() for log in logs]
    for log in logs:
        log.set_verbosity_error()
    logs[0].disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, verbosity in zip(logs, verbosities, strict=True):
            log.set_verbosity(verbosity)
        if bars:
            logs[0].enable_progress_bar()
