"""Whether a model with constants in its weights computes what it computes with the policy applied."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sharpmax.errors import UnsupportedError, reject
from sharpmax.hf.application import applied
from sharpmax.hf.attention import Layer
from sharpmax.hf.example_inputs import example_inputs
from sharpmax.hf.queries import scale_queries
from sharpmax.hf.rules import rules_of
from sharpmax.hf.support import LAYER, NAMES, AttentionModule, require_transformers
from sharpmax.policies import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["FoldCheck"]

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
        self._runs: list[tuple[PreTrainedModel, Mapping[str, Any], list[Tensor], list[Tensor]]] = []
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
            for part, inputs, _, sharp in self._runs:
                sharp.extend(self._outputs(part, inputs))

    def after(self) -> None:
        """Compare what the model computes now with what it computed with the policy."""
        for part, inputs, plain, sharp in self._runs:
            folded = self._outputs(part, inputs)
            eps = torch.finfo(self._model.dtype).eps
            error, change, size = _root(sharp, folded), _root(sharp, plain), _root(sharp, None)
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
        self._runs.append((part, inputs, plain, []))
        return True

    def _outputs(self, part: PreTrainedModel, inputs: Mapping[str, Any]) -> list[Tensor]:
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

        def outputs() -> list[Tensor]:
            return _floats(module(*pytree.tree_map(_own, args), **pytree.tree_map(_own, kwargs)))

        plain = outputs()
        vars(module)[LAYER] = Layer(one.inner, one.function, one.heads, tuple(rules_of(self._policy, layer)), layer)
        module.config._attn_implementation_internal = NAMES[one.inner]
        sharp = outputs()
        del vars(module)[LAYER]
        module.config._attn_implementation_internal = one.inner
        scale_queries(alone, self._betas[layer], f"layer {layer} of {family}")
        folded = outputs()
        error, change, size = _most(sharp, folded), _most(sharp, plain), _most(sharp, None)
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


def _floats(outputs: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(outputs)
    return [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _differences(a: Sequence[Tensor], b: Sequence[Tensor] | None) -> Iterator[Tensor]:
    """Differences in float64 (without `b`, the values), 0 where both are the same infinity or both undefined."""
    for place, x in enumerate(a):
        x = x.double()
        if b is None:
            yield x.nan_to_num(0.0, 0.0, 0.0)
        else:
            y = b[place].double()
            yield (x - y).masked_fill((x == y) | (x.isnan() & y.isnan()), 0.0)


def _most(a: Sequence[Tensor], b: Sequence[Tensor] | None) -> float:
    """The largest difference."""
    return max((float(one.abs().max()) for one in _differences(a, b) if one.numel()), default=0.0)


def _root(a: Sequence[Tensor], b: Sequence[Tensor] | None) -> float:
    """The root mean square of all differences."""
    flat = [one.flatten() for one in _differences(a, b)]
    return float(torch.cat(flat).square().mean().sqrt()) if flat else 0.0
