"""Policies by name, from files, and from the configurations of models."""

from __future__ import annotations

import functools
import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sharpmax.errors import FileFormatError, UnsupportedError, reject, reject_type
from sharpmax.files import read_json
from sharpmax.policies.base import Policy, check_number, policy_from_dict
from sharpmax.policies.basic import IDENTITY, Constant, LogLength, LogScale
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.polynomial import PAPER

BESIDE = "sharpmax_policy.json"
"""The file that `save_pretrained` writes next to the weights of a model with a policy."""

IN_FOLDERS = ("policy.json", BESIDE)
"""Policy files of a folder. `sharpmax calibrate` writes the first."""

AUTO = "auto"
"""The name of the packaged policy for the model at hand."""

_DATA = Path(__file__).parent / "data"
_MODELS = "models"
_log = logging.getLogger("sharpmax")


def yarn(factor: float) -> Constant:
    """YaRN's constant (1 + 0.1·ln factor)², for models whose rotary positions do not include it.

    >>> yarn(4.0).describe()
    'β = 1.29648'
    """
    return Constant((1.0 + 0.1 * math.log(check_number("factor", factor, at_least=1.0))) ** 2)


BY_NUMBER: Mapping[str, tuple[Callable[[float], Policy], float | None]] = {
    "constant": (Constant, None),
    "log-length": (LogLength, None),
    "ssmax": (lambda scale: LogScale(scale, bias=0.0), None),
    "llama4": (lambda reference: LogScale(0.1, reference, steps=True), 8192.0),
    "ministral3": (lambda reference: LogScale(0.1, reference, steps=True, shift=1.0), 16384.0),
    "inkling": (lambda reference: LogScale(0.1, reference), None),
    "qwen2.5-1m": (lambda reference: LogScale(0.1, reference), 262144.0),
    "qwen": (LogLength, 8192.0),
    "grok2": (LogLength, 1024.0),
    "yarn": (yarn, None),
}
"""Rules with one number: the policy as a function of it, and the number of the published model, if any."""


def load_policy(path_or_name: str | os.PathLike[str]) -> Policy:
    """The policy with a name, of a rule with a number, or from a file or its folder.

    Rules with a number are `constant:1.5`, `log-length:64`, `ssmax:0.4`, `yarn:4`, `inkling:128000`. The rules of
    published models have a default: `llama4` (or `llama4:4096`), `ministral3`, `qwen`, `qwen2.5-1m`, `grok2`.

    >>> load_policy("paper").describe()
    'β = max(1, -0.037·H^4 +0.481·H^3 -2.3·H^2 +4.917·H -1.791) for H > 0.5, extrapolate outside'
    >>> load_policy("llama4").describe()
    'β = 1 + 0.1·ln(1 + ⌊n/8192⌋)'
    """
    if not isinstance(path_or_name, (str, os.PathLike)):
        reject_type("path_or_name", type(path_or_name).__name__, _allowed())
    if isinstance(path_or_name, str) and path_or_name in NAMED:
        return NAMED[path_or_name]()
    path = Path(path_or_name)
    if isinstance(path_or_name, str) and not path.exists() and (found := _with_number(path_or_name)) is not None:
        return found
    if path_or_name and path.is_dir():
        return _read(_file_in(path))
    if path_or_name == AUTO and not path.exists():
        reject("policy", "'auto' without a model", "sharpmax.apply(model, 'auto'), sharpmax.fold and --policy auto")
    if not path.is_file():
        reject("policy", repr(str(path_or_name)), _allowed())
    return _read(path)


def packaged_for(architecture: str, layers: int, heads: int, *names: str, foldable: bool = False) -> tuple[str, Policy]:
    """The name and the packaged policy for a model. Raises ArgumentError if there is none.

    The architecture, the numbers of layers and heads, and one of the model's names must match an entry of
    data/models.json, in which `names` is a regular expression. If the policy of an entry cannot be folded, `foldable`
    names one that can.
    """
    shape = (architecture.removesuffix("_text"), layers, heads)
    entries: dict[str, dict[str, Any]] = read_json(_DATA / f"{_MODELS}.json", "policies")
    fits = {
        policy: about
        for policy, about in entries.items()
        if (about["architecture"], about["layers"], about["heads"]) == shape
    }
    for policy, about in fits.items():
        if any(re.search(about["names"], name, re.IGNORECASE) for name in names):
            chosen = about.get("foldable", policy) if foldable else policy
            _log.warning("policy 'auto' is %r, made for %s", chosen, about["model"])
            return chosen, NAMED[chosen]()
    similar = "".join(f"; {policy!r} was made for {about['model']} of the same shape" for policy, about in fits.items())
    given = f"'auto' for {names[0]!r} ({shape[0]}, {layers} layers × {heads} heads), which has no packaged policy"
    reject("policy", given, f"a name or a file{similar}", "make one: sharpmax calibrate MODEL")


def packaged_for_config(config: Any, *names: str, foldable: bool = False) -> tuple[str, Policy]:
    """As `packaged_for`, for the configuration of a transformers model."""
    text = config.get_text_config()
    layers, heads = (int(getattr(text, name, 0)) for name in ("num_hidden_layers", "num_attention_heads"))
    own = (str(getattr(config, name, None) or "") for name in ("_name_or_path", "_model_name_or_path"))
    known = (*filter(None, (*names, *own)), type(config).__name__)
    return packaged_for(str(text.model_type), layers, heads, *known, foldable=foldable)


def _allowed() -> str:
    numbered = ", ".join(sorted(name for name, (_, usual) in BY_NUMBER.items() if usual is None))
    by_number = f"a rule and its number ({numbered}, as log-length:64)"
    return f"one of {sorted(NAMED)}, {by_number} or the path of a policy file or its folder"


@functools.lru_cache(64)
def _by_number(kind: str, value: float) -> Policy:
    """The policy of a rule and its number: the same object for the same rule, as caches are keyed by object."""
    return BY_NUMBER[kind][0](value)


def _with_number(text: str) -> Policy | None:
    """The policy that a text such as "log-length:64" names; None for other texts."""
    kind, colon, number = text.partition(":")
    if not colon or kind not in BY_NUMBER:
        return None
    try:
        value = float(number)
    except ValueError:
        reject("policy", repr(text), f"{kind}: and a number, as log-length:64 or constant:1.5")
    return _by_number(kind, value)


def _file_in(folder: Path) -> Path:
    found = [folder / name for name in IN_FOLDERS if (folder / name).is_file()]
    if not found:
        given = f"{str(folder)!r}, a folder without {BESIDE} or policy.json"
        reject("policy", given, "a folder that calibrate or a model with a policy applied was saved to")
    if len(found) > 1:
        reject("policy", f"{str(folder)!r}, a folder with both {' and '.join(IN_FOLDERS)}", "the path of one of them")
    return found[0]


@functools.cache
def _packaged(name: str) -> Policy:
    """A policy of the package, learned for a model by `sharpmax calibrate`."""
    return _read(_DATA / f"{name}.json")


def _read(path: Path) -> Policy:
    body = read_json(path, "policy")
    try:
        return policy_from_dict(body)
    except FileFormatError as problem:
        raise FileFormatError(f"{problem} (in {str(path)!r})") from None


def resolve_policy(policy: Policy | str | os.PathLike[str] | None) -> Policy:
    """The policy given as an argument `policy=`."""
    if policy is None:
        return NAMED["none"]()
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, (str, os.PathLike)):
        return load_policy(policy)
    reject_type("policy", type(policy).__name__, f"a Policy, None, {_allowed()}")


NAMED: Mapping[str, Callable[[], Policy]] = {
    "none": lambda: IDENTITY,
    "paper": lambda: PAPER,
    **{
        file.stem: functools.partial(_packaged, file.stem)
        for file in sorted(_DATA.glob("*.json"))
        if file.stem != _MODELS
    },
    **{name: functools.partial(_by_number, name, usual) for name, (_, usual) in BY_NUMBER.items() if usual is not None},
}
"""Policies by name; a name always gives the same object."""


def from_config(config: Any) -> Policy | None:
    """The temperature rule in a model's configuration; None if it has none.

    `config` is the configuration of a transformers model, or any object with the same attributes. Supported are the
    rules of Llama 4 (the layers without rotary positions), Ministral 3 and Mistral 4, Inkling (the full-attention
    layers), Qwen (`use_logn_attn`), Qwen2.5-1M (`dual_chunk_attention_config`) and Grok-2 (`attn_temperature_len`). A
    constant in the rotary positions (YaRN, LongRoPE) is not a rule: it is part of the logits that policies multiply.

    Models count positions, policies count visible keys. With left padding Llama 4 counts the padding too.
    """
    config = getattr(config, "text_config", None) or config

    def read(name: str) -> Any:
        return getattr(config, name, None)

    rotary = read("rope_parameters") or {}
    if read("attn_temperature_tuning"):
        rule = LogScale(float(read("attn_scale")), float(read("floor_scale")), steps=True)
        return _in_layers(config, rule, [not rotary for rotary in read("no_rope_layers")])
    if rotary.get("llama_4_scaling_beta"):
        if read("sliding_window"):
            raise UnsupportedError(
                "config: llama_4_scaling_beta with sliding_window scales by position, which a row of a window does not "
                "show; allowed: sliding_window=None"
            )
        length = float(rotary["original_max_position_embeddings"])
        return LogScale(float(rotary["llama_4_scaling_beta"]), length, steps=True, shift=1.0)
    if read("log_scaling_n_floor"):
        rule = LogScale(float(read("log_scaling_alpha")), float(read("log_scaling_n_floor")))
        return _in_layers(config, rule, ["sliding" not in kind for kind in read("layer_types")])
    if read("use_logn_attn"):
        return LogLength(float(read("seq_length")))
    if read("dual_chunk_attention_config"):
        return LogScale(0.1, float(read("dual_chunk_attention_config")["original_max_position_embeddings"]))
    if read("attn_temperature_len"):
        return LogLength(float(read("attn_temperature_len")))
    return None


def _in_layers(config: Any, rule: Policy, there: list[bool]) -> Policy:
    """A rule in some layers of a model, and β = 1 in the others."""
    heads = config.num_attention_heads
    return rule if all(there) else PerHead(tuple((rule if here else Constant(),) * heads for here in there))
