"""Which of transformers' models take a policy: `python docs/supported_models.py docs/reference/supported-models.md`.

Every model type is built small on the meta device, without weights, and asked. It takes a few minutes.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from sharpmax.errors import UnsupportedError
from sharpmax.files import write_text
from sharpmax.integrations.transformers.folding import check_only_queries
from sharpmax.integrations.transformers.projections import query_layer
from sharpmax.integrations.transformers.support import attention_modules

LAYERS = (
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "num_decoder_layers",
    "depth", "num_encoder_layers", "encoder_num_hidden_layers", "decoder_num_hidden_layers",
)  # fmt: skip
REFUSED = {
    "attends without": "attends outside transformers' attention interface, at least in part; `skip_unsupported=True` "
    "leaves that part out",
    "differently by name": "computes something else under another attention name",
    "scales its queries": "scales its queries by position in a way that cannot be switched off",
    "no attention layer": "has no softmax attention",
    "which a policy does not know": "has attention with arguments of its own",
    "does not say": "does not say how many heads it has or which attention it uses",
    "no eager attention": "has no eager attention to compare with",
}
NOT_FOLDED = {
    "position bias": "adds a position bias",
    "caps its logits": "caps its logits",
    "scales its queries by position": "has a temperature of its own, which only `apply` replaces",
}
ORDER = [("yes", "yes"), ("yes", "no"), ("no", "no"), ("?", "?")]


def model_types() -> Iterator[tuple[str, str]]:
    """Every model type with the class that is asked: the language model where there is one, else the base model."""
    for kind in sorted({**MODEL_MAPPING_NAMES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}):
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind) or MODEL_MAPPING_NAMES[kind]
        yield kind, name if isinstance(name, str) else name[0]


def smaller(config: Any, layers: int = 2) -> Any:
    """The same configuration with few layers, wherever it and those inside it say how many."""
    for name in LAYERS:
        if isinstance(vars(config).get(name), int) and vars(config)[name] > layers:
            setattr(config, name, layers)
    for value in list(vars(config).values()):
        if isinstance(value, transformers.PreTrainedConfig):
            smaller(value, layers)
    return config


def build(kind: str, name: str, *, whole: bool = False) -> Any:
    """A model of a type on the meta device; None if its default configuration makes none here."""
    with contextlib.suppress(Exception), torch.device("meta"):
        config = transformers.CONFIG_MAPPING[kind]
        for change in [lambda one: one] if whole else [smaller, lambda one: one]:
            with contextlib.suppress(Exception):
                return getattr(transformers, name)(change(config()))
    return None


def verdict(kind: str, name: str) -> tuple[str, str, str]:
    """Whether a policy can be applied, whether a constant one can be folded, and why not."""
    model = build(kind, name)
    if model is None:
        return "?", "?", "cannot be built from its default configuration alone"
    found = asked(model)
    # The first layers of a hybrid model may be without attention.
    return asked(build(kind, name, whole=True) or model) if found[2] == REFUSED["no attention layer"] else found


def asked(model: Any) -> tuple[str, str, str]:
    """The verdict on a model; a reason that an error gives comes in the words of the page."""
    reasons, apply = REFUSED, "no"
    try:
        modules = attention_modules(model)
        reasons, apply = NOT_FOLDED, "yes"
        for layer, one in enumerate(modules):
            check_only_queries(one, layer, type(model).__name__)
            query_layer(one, f"layer {layer}")
    except UnsupportedError as problem:
        known = (short for part, short in reasons.items() if part in str(problem))
        return apply, "no", next(known, "has a query projection of another form")
    return "yes", "yes", ""


def page() -> str:
    """The page in Markdown."""
    found: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for number, (kind, name) in enumerate(model_types()):
        found[verdict(kind, name)].append(kind)
        print(f"\r{number} {kind:40}", end="", file=sys.stderr, flush=True)
    total = sum(map(len, found.values()))
    taken = sum(len(kinds) for (apply, _, _), kinds in found.items() if apply == "yes")
    rows = [
        f"| {apply} | {fold} | {reason or '—'} | {len(kinds)} | {', '.join(kinds)} |"
        for (apply, fold, reason), kinds in sorted(
            found.items(), key=lambda row: (ORDER.index(row[0][:2]), -len(row[1]))
        )
    ]
    return "\n".join(
        [
            "# Supported models",
            "",
            f"*{taken} of {total} model types of transformers {transformers.__version__} take a policy.*",
            "",
            "`apply`: whether `sm.apply` takes the model with its default configuration. `fold`: whether its weights",
            "can hold a constant policy; `sm.fold` checks the result numerically before it returns it. Each type was",
            "built small and without weights, as a language model where it has one. For modules that are not",
            "transformers models see [Any torch module](../how-to/torch-modules.md).",
            "",
            "| apply | fold | why not | types | model types |",
            "|---|---|---|---|---|",
            *rows,
            "",
            "Made by `python docs/supported_models.py docs/reference/supported-models.md`.",
            "",
        ]
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    transformers.logging.set_verbosity_error()
    write_text(Path(sys.argv[1]), page())
