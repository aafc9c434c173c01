"""Which normalisation feeds each attention layer, family by family."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sharpmax.errors import UnsupportedError

__all__ = ["FAMILIES", "Family", "Feed", "family_of"]


@dataclass(frozen=True)
class Feed:
    """The normalisations, by name, whose outputs an attention module makes queries and keys of."""

    queries: str
    keys: str
    first: bool
    """Whether what they normalise is the embedding of the input and nothing else."""


@dataclass(frozen=True)
class Family:
    """How the models of a family are put together."""

    feed: Callable[[str], Feed | None]
    """From the name of an attention module; None where it is not known."""

    rotary: bool = False
    positions: tuple[str, ...] = ()
    """Tables of vectors added to the embedding of a token, one of each, by the end of their names."""


def _just_before(norm: str) -> Callable[[str], Feed | None]:
    """A normalisation beside the attention module, in the layer of the last number in its name."""

    def feed(name: str) -> Feed | None:
        layer = re.fullmatch(r"((?:.*\.|)(\d+)\.)[^.\d]+", name)
        return None if layer is None else Feed(layer[1] + norm, layer[1] + norm, layer[2] == "0")

    return feed


def _layer_before(name: str) -> Feed | None:
    """The last normalisation of the layer before, or that of the embeddings."""
    layer = re.fullmatch(r"(.*\.|)encoder\.layer\.(\d+)\.attention\.self", name)
    if layer is None:
        return None
    number = int(layer[2])
    norm = f"{layer[1]}encoder.layer.{number - 1}.output.LayerNorm" if number else f"{layer[1]}embeddings.LayerNorm"
    return Feed(norm, norm, number == 0)


def _t5(name: str) -> Feed | None:
    layer = re.fullmatch(r"(.*\.|)(encoder|decoder)\.block\.(\d+)\.layer\.\d+\.(SelfAttention|EncDecAttention)", name)
    if layer is None:
        return None
    own = f"{name.rpartition('.')[0]}.layer_norm"
    crossed = layer[4] == "EncDecAttention"
    return Feed(own, f"{layer[1]}encoder.final_layer_norm" if crossed else own, not crossed and layer[3] == "0")


_ROTARY = Family(_just_before("input_layernorm"), rotary=True)
_BERT = Family(_layer_before, positions=("embeddings.position_embeddings", "embeddings.token_type_embeddings"))

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"), _ROTARY),
        **dict.fromkeys(("gpt_neox", "phi"), _ROTARY),
        "gpt2": Family(_just_before("ln_1"), positions=("wpe",)),
        "opt": Family(_just_before("self_attn_layer_norm"), positions=("embed_positions",)),
        "t5": Family(_t5),
        "bert": _BERT,
        "roberta": _BERT,
    }
)
"""Families by `config.model_type`."""


def family_of(kind: str) -> Family:
    """A family by its `config.model_type`, or an error that names those that are known."""
    if kind not in FAMILIES:
        raise UnsupportedError(
            f"model: no certificate is known for the family {kind!r}; allowed: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[kind]
