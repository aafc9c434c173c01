"""Random inputs for one short call of any transformers model: what its signature and configuration ask for."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["example_inputs"]

_TOKENS = 24
_FRAMES = 256  # of sound: convolutions leave an eighth of them or more
_SAMPLES = 8_000
_TEXT = ("input_ids", "decoder_input_ids")
_ARRAYS = ("pixel_values", "input_features", "input_values", "inputs_embeds", "query_embeds", "hidden_states")


def example_inputs(model: PreTrainedModel) -> Iterator[dict[str, Any]]:
    """Keyword arguments that the model may take, the likeliest first; not every one of them has to fit."""
    make = _Maker(model)
    names = set(inspect.signature(model.forward).parameters)
    main = model.main_input_name if isinstance(model.main_input_name, str) else "pixel_values"
    fixed = {"use_cache": False} if "use_cache" in names else {}
    text = {name: make.tokens() for name in _TEXT if name in names}
    if "bbox" in names and text:
        text["bbox"] = torch.zeros(1, _TOKENS, 4, dtype=torch.int64, device=make.device)
    decoder = {name: value for name, value in text.items() if name == "decoder_input_ids"}
    others = [
        name for name in (main, "pixel_values", "input_features", "input_values", "inputs_embeds") if name in names
    ]
    for name in dict.fromkeys(others):
        if name in text:
            yield {**fixed, **text}
            continue
        for extra in make.arrays(name, names):
            yield {**fixed, **decoder, **extra}
            if "input_ids" in text:
                yield {**fixed, **text, **extra}
    if text:
        yield {**fixed, **text}
    yield {name: value.to(make.device) for name, value in model.dummy_inputs.items()}


class _Maker:
    """Random arrays in the sizes that a configuration names, or one of its parts."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.device, self.dtype = model.device, model.dtype
        self._generator = torch.Generator().manual_seed(0)
        parts = [value for value in vars(model.config).values() if hasattr(value, "to_dict")]
        self._configs = [model.config, *parts]

    def tokens(self) -> Tensor:
        """Random tokens without the special ones, which may stand for an image or for padding."""
        vocabulary = self.number("vocab_size", default=2)
        special = {
            value for config in self._configs for name, value in vars(config).items()
            if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
        }  # fmt: skip
        plain = [token for token in range(min(vocabulary, 4096)) if token not in special] or [0]
        longest = self.number("max_position_embeddings", "n_positions", "max_target_positions", default=_TOKENS + 8)
        length = max(2, min(_TOKENS, longest - 4))
        drawn = torch.randint(len(plain), (1, length), generator=self._generator)
        return torch.tensor(plain)[drawn].to(self.device)

    def arrays(self, name: str, names: set[str]) -> Iterator[dict[str, Any]]:
        """Inputs of that name that are no tokens."""
        for shape in self._shapes(name, names):
            values = torch.randn(tuple(shape), generator=self._generator).to(self.device, self.dtype)
            if "grid_thw" in names or "image_grid_thw" in names:
                grid = "grid_thw" if "grid_thw" in names else "image_grid_thw"
                yield {name: values, grid: torch.tensor([[1, 8, 8]], device=self.device)}
            elif f"{name}_mask" in names:
                yield {name: values, f"{name}_mask": torch.ones(1, max(shape[1:]), dtype=torch.int64).to(self.device)}
            yield {name: values}

    def _shapes(self, name: str, names: set[str]) -> Iterator[Sequence[int]]:
        channels = self.number("num_channels", "in_channels", "in_chans", default=3)
        width = self.number("hidden_size", "d_model", "n_embd", "embed_dim", default=0)
        if name.endswith("_embeds"):
            yield 1, _TOKENS, width
        elif "grid_thw" in names or "image_grid_thw" in names:  # patches of an image, in a row
            patch = self.number("patch_size", default=14)
            yield 64, channels * self.number("temporal_patch_size", default=1) * patch * patch
            yield 64, width
        elif name.startswith("pixel_values"):
            sides = self._pair("image_size", default=224)
            frames = self.number("num_frames", "frames", default=2)
            yield from ((1, channels, *sides), (1, frames, channels, *sides), (1, 1, channels, *sides))
        elif name == "past_values":
            length = self.number("context_length", default=64)
            yield from ((1, length, self.number("num_input_channels", "input_size", default=1)), (1, length))
        else:
            bins = [
                size for key in ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "input_dim")
                if (size := self.number(key, default=0))
            ]  # fmt: skip
            source = self.number("max_source_positions", "max_length", default=_FRAMES)
            for size in bins:
                yield from ((1, _FRAMES, size), (1, size, 2 * source), (1, source, size), (1, size, _FRAMES))
            yield from ((1, _SAMPLES), (1, 1, _SAMPLES))

    def number(self, *names: str, default: int) -> int:
        """The first of these options that is a number, in the configuration or one of its parts."""
        return self._pair(*names, default=default)[0]

    def _pair(self, *names: str, default: int) -> tuple[int, int]:
        for config in self._configs:
            for name in names:
                value: Any = getattr(config, name, None)
                if isinstance(value, dict):
                    value = [value.get("height"), value.get("width")]
                pair = list(value)[:2] if isinstance(value, (list, tuple)) else [value]
                if pair and all(isinstance(one, int) and one > 0 for one in pair):
                    return pair[0], pair[-1]
        return default, default
