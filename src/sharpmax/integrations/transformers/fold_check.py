"""Compare a folded model with the applied policy on example inputs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sharpmax.errors import UnsupportedError, reject
from sharpmax.integrations.transformers.application import applied
from sharpmax.integrations.transformers.attention import Layer
from sharpmax.integrations.transformers.projections import scale_queries
from sharpmax.integrations.transformers.support import LAYER, NAMES, AttentionModule, require_transformers
from sharpmax.ops.attention import policies_of, rules_of
from sharpmax.policies.base import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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


# In a layer, in float32 at least: a difference is rounding if it is small beside what the policy changes, or beside
# the numbers themselves.
_OF_CHANGE, _OF_SIZE = 1e-3, 2e-5
# In the model as a whole, where the rounding of its own dtype adds up: the layers are checked closely before.
_OF_CHANGE_WHOLE, _ROUNDINGS_WHOLE = 0.25, 64


class FoldCheck:
    """Compares a model before (`before`) and after (`after`) the β of some layers go into its weights.

    Each layer is compared by itself, on what it is given when the model runs on an example: the same module in float32
    with the policy applied and with β folded in. So errors of layers do not add up, and low precision does not hide
    them. Then the outputs of the whole model are compared.
    """

    def __init__(
        self, model: PreTrainedModel, modules: Sequence[AttentionModule], policy: Policy, betas: Mapping[int, Tensor]
    ) -> None:
        self.modules = modules
        self._model, self._policy, self._betas = model, policy, betas
        self._left = dict(betas)
        self._runs: list[tuple[PreTrainedModel, Mapping[str, Any], Tensor]] = []
        self._sharp: list[Tensor] = []
        self._inside = False
        self._problem = ""

    def before(self, given: Mapping[str, Any] | None) -> None:
        """Compare every layer, and keep what the model computes without and with the policy."""
        if not self._betas:
            return
        handles = [
            self.modules[layer].module.register_forward_pre_hook(self._comparing(layer), with_kwargs=True)
            for layer in self._betas
        ]
        try:
            if given is not None:
                self._try(self._model, given)
                if not self._runs:
                    reject(
                        "example_inputs",
                        f"{sorted(given)}, for which the model raised {self._problem}",
                        "keyword arguments of one call of the model",
                    )
            base = require_transformers().PreTrainedModel
            for part in self._model.modules():
                if isinstance(part, base):
                    self._try_examples(part)
        finally:
            for handle in handles:
                handle.remove()
        if self._left:
            first, family = next(iter(self._left)), type(self._model).__name__
            reason = f" ({self._problem})" if self._problem else ""
            raise UnsupportedError(
                f"model: no example could be made that reaches layer {first} of {family} "
                f"({type(self.modules[first].module).__name__}), one of {len(self._left)} such layers, so the folded "
                f"model cannot be compared with the policy{reason}; pass example_inputs=, keyword arguments for one "
                "call of the model"
            )
        with applied(self._model, self._policy, skip_unsupported=True):
            self._sharp = [self._outputs(part, inputs) for part, inputs, _ in self._runs]

    def after(self) -> None:
        """Compare what the model computes now with what it computed with the policy."""
        for (part, inputs, plain), sharp in zip(self._runs, self._sharp, strict=True):
            folded = self._outputs(part, inputs)
            eps = torch.finfo(self._model.dtype).eps
            error, change, size = _sizes(sharp, folded, plain, _root)
            if not error <= max(_OF_CHANGE_WHOLE * change, _ROUNDINGS_WHOLE * eps * size):
                raise UnsupportedError(
                    f"model: the folded {type(part).__name__} is not the model with the policy applied: its outputs "
                    f"differ by {error:.2g}, where the policy changes them by {change:.2g} (root mean square); "
                    "apply the policy instead (sharpmax.apply)"
                )

    def _try_examples(self, part: PreTrainedModel) -> None:
        """Run a part of the model on examples until one works, if layers in it have not been compared yet."""
        own = {id(module) for module in part.modules()}
        for inputs in example_inputs(part) if not self._runs or part is not self._model else ():
            if not any(id(self.modules[layer].module) in own for layer in self._left):
                return
            if self._try(part, inputs):
                return

    def _try(self, part: PreTrainedModel, inputs: Mapping[str, Any]) -> bool:
        try:
            plain = self._outputs(part, inputs)
        except UnsupportedError:
            raise
        except Exception as problem:  # whatever a model raises for an input that is not for it
            self._problem = self._problem or f"{type(problem).__name__}: {problem}".splitlines()[0][:200]
            return False
        self._runs.append((part, inputs, plain))
        return True

    def _outputs(self, part: PreTrainedModel, inputs: Mapping[str, Any]) -> Tensor:
        with _still(part):
            return _floats(part(**inputs))

    def _comparing(self, layer: int) -> Any:
        """A hook that compares the module with itself folded on the arguments of the call."""

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._inside or layer not in self._left:
                return
            self._inside = True
            try:
                self._compare(layer, *_widened((args, kwargs)))
            finally:
                self._inside = False
            del self._left[layer]

        return hook

    def _compare(self, layer: int, args: Any, kwargs: Any) -> None:
        one, family = self.modules[layer], type(self._model).__name__
        module: Any = copy.deepcopy(one.module)
        if any(weight.dtype.itemsize < 4 for weight in module.parameters() if weight.is_floating_point()):
            module.float()
        alone = AttentionModule(module, module.config, one.heads, one.inner, one.function, one.arguments)

        def outputs() -> Tensor:
            return _floats(module(*pytree.tree_map(_own, args), **pytree.tree_map(_own, kwargs)))

        plain = outputs()
        rules = rules_of(policies_of(self._policy, layer))
        vars(module)[LAYER] = Layer(one.inner, one.function, one.heads, rules, layer)
        module.config._attn_implementation_internal = NAMES[one.inner]
        sharp = outputs()
        del vars(module)[LAYER]
        module.config._attn_implementation_internal = one.inner
        scale_queries(alone, self._betas[layer], f"layer {layer} of {family}")
        folded = outputs()
        error, change, size = _sizes(sharp, folded, plain, _most)
        if not error <= _OF_CHANGE * change + _OF_SIZE * size:
            raise UnsupportedError(
                f"model: in layer {layer} of {family} ({type(module).__name__}) a logit is more than query times key, "
                "as where a bias is part of the mask or is added to the query: with β in the weights its output "
                f"differs by {error:.2g}, where the policy changes it by {change:.2g}; apply the policy instead "
                "(sharpmax.apply)"
            )


@contextmanager
def _still(part: nn.Module) -> Iterator[None]:
    """Evaluation mode, and everything as it was afterwards: what is drawn at random is the same every time."""
    training = [module for module in part.modules() if module.training]
    devices = {weight.device.index for weight in part.parameters() if weight.is_cuda}
    part.eval()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for module in training:
            module.training = True


def _widened(tree: Any) -> Any:
    """Arguments in float32 at least, without caches, which a call would add to."""
    cache = require_transformers("cache_utils").Cache

    def one(value: Any) -> Any:
        if isinstance(value, cache):
            return None
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype.itemsize >= 4:
            return value
        # What hides a key in a mask of low precision hides it in float32 by another number.
        hidden = value <= torch.finfo(value.dtype).min
        return value.float().masked_fill(hidden, torch.finfo(torch.float32).min)

    return pytree.tree_map(one, tree, is_leaf=lambda value: isinstance(value, cache))


def _own(value: Any) -> Any:
    """A tensor that a call may change in place."""
    return value.clone() if isinstance(value, Tensor) else value


def _floats(outputs: Any) -> Tensor:
    """All floating-point numbers of a model's outputs in one row, in float64 on the CPU."""
    leaves = (leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return torch.cat(
        [torch.zeros(1, dtype=torch.float64), *(leaf.detach().cpu().double().flatten() for leaf in leaves)]
    )


def _differences(a: Tensor, b: Tensor) -> Tensor:
    """0 where both are the same infinity or both undefined."""
    return (a - b).masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0)


def _sizes(sharp: Tensor, other: Tensor, plain: Tensor, norm: Callable[[Tensor], Tensor]) -> tuple[float, float, float]:
    """How large the error, what the policy changes and the numbers themselves are."""
    found = _differences(sharp, other), _differences(sharp, plain), sharp.nan_to_num(0.0, 0.0, 0.0)
    return float(norm(found[0])), float(norm(found[1])), float(norm(found[2]))


def _most(x: Tensor) -> Tensor:
    return x.abs().max()


def _root(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()
