"""The layers that compute the queries and keys of an attention module, and β in the weights of these layers."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from sharpmax.errors import UnsupportedError
from sharpmax.integrations.transformers.support import AttentionModule, require_transformers
from sharpmax.policies.basic import check_frequencies

# Layers whose outputs are the queries, and the corresponding layers of the keys.
_SEPARATE = {"q_proj": "k_proj", "query": "key", "q": "k", "q_attn": ""}
_QUERY_NORMS = ("q_norm", "q_layernorm")
# Normalisations that do not act on queries.
_OTHER_NORMS = ("k_norm", "k_layernorm", "LayerNorm")


@dataclass(frozen=True, eq=False)
class Projection:
    """The outputs `rows` `[heads, D]` of a layer, which are the queries or the keys of an attention module."""

    name: str
    layer: Any
    rows: Tensor

    def matrix(self) -> Tensor:
        """The weights of these outputs, `[heads, D, inputs]` in float64 on the CPU."""
        weight = exact(self.layer.weight)
        # Conv1D keeps its outputs in columns, Linear in rows.
        return (weight if isinstance(self.layer, nn.Linear) else weight.T)[self.rows]

    def bias(self) -> Tensor:
        """The bias of these outputs, `[heads, D]` in float64 on the CPU."""
        bias = self.layer.bias
        return torch.zeros(self.rows.shape, dtype=torch.float64) if bias is None else exact(bias)[self.rows]


def exact(weight: Tensor) -> Tensor:
    """A weight in float64 on the CPU."""
    return weight.detach().cpu().double()


def query_layer(one: AttentionModule, where: str) -> nn.Module:
    """The layer that β is multiplied into: the query's normalisation if there is one, otherwise its projection."""
    for name, child in one.module.named_children():
        if "Norm" in type(child).__name__ and name not in (*_QUERY_NORMS, *_OTHER_NORMS):
            raise UnsupportedError(
                f"model: {where} has a normalisation {name!r} that folding does not know; "
                "apply the policy instead (sharpmax.apply)"
            )
    return _query_norm(one) or cast("nn.Module", _projection(one, where).layer)


def _query_norm(one: AttentionModule) -> nn.Module | None:
    norms = (getattr(one.module, name, None) for name in _QUERY_NORMS)
    return next((norm for norm in norms if not isinstance(norm, (type(None), nn.Identity))), None)


def has_one_gain(one: AttentionModule) -> bool:
    """Whether the heads share the gain of their queries' normalisation, which cannot hold one β per head."""
    gain: Any = getattr(_query_norm(one), "weight", None)
    return gain is not None and one.heads > 1 and int(gain.numel()) == _head_width(one, 0)


@dataclass(frozen=True, eq=False)
class Scaling:
    """A factor for each output of a layer that computes the queries, in float64.

    `factor` is `[outputs]`, or has the shape of a normalisation's gain. `offset` is 1 where a normalisation stores its
    gain minus 1.
    """

    layer: nn.Module
    factor: Tensor
    offset: float = 0.0

    def scaled(self, name: str, value: Tensor) -> Tensor:
        """The scaled `value` of the parameter `name`, in float64 on the CPU."""
        factor = self.factor
        if name == "weight" and isinstance(self.layer, nn.Linear):
            factor = factor[:, None]  # Linear keeps its outputs in rows, Conv1D in columns
        offset = self.offset if name == "weight" else 0.0
        return (exact(value) + offset) * factor - offset


def query_scaling(one: AttentionModule, beta: Tensor, where: str) -> Scaling:
    """The scaling by β, `[heads, 1]` or `[heads, D]`; `where` is for errors. Weights may be on the meta device."""
    layer = query_layer(one, where)
    if layer is _query_norm(one):
        return Scaling(layer, _gain_factor(layer, one, beta, where), _gain_offset(layer, where))
    rows = _projection(one, where).rows
    factor = torch.ones(_outputs(layer, where), dtype=torch.float64)
    check_frequencies(beta.shape[1], rows.shape[1])
    factor[rows] = beta
    return Scaling(layer, factor)


def scale_queries(one: AttentionModule, beta: Tensor, where: str) -> None:
    """Multiply the queries of each head by its β, `[heads, 1]` or `[heads, D]`, in place; `where` is for errors."""
    scaling = query_scaling(one, beta, where)
    for name, weight in scaling.layer.named_parameters(recurse=False):
        weight.copy_(scaling.scaled(name, weight))


def projections(one: AttentionModule, where: str) -> tuple[Projection, Projection]:
    """The projections of the queries and of the keys of a self-attention module."""
    queries = _projection(one, where)
    heads, width = queries.rows.shape
    name = _SEPARATE.get(queries.name, queries.name)
    layer = getattr(one.module, name, None)
    if layer is None:
        raise UnsupportedError(f"model: where the keys of {where} come from is not known ({type(one.module).__name__})")
    if name != queries.name:
        rows = torch.arange(_outputs(layer, where)).view(-1, width)
    elif name == "query_key_value":
        rows = queries.rows + width
    else:
        keys = (_outputs(layer, where) - heads * width) // 2  # as many values follow
        rows = heads * width + torch.arange(keys).view(-1, width)
    return queries, Projection(name, layer, rows)


def _projection(one: AttentionModule, where: str) -> Projection:
    """The projection of the queries."""
    module, heads = one.module, one.heads
    for name in (*_SEPARATE, "c_attn", "Wqkv", "query_key_value", "qkv_proj"):
        layer = getattr(module, name, None)
        if layer is None:
            continue
        outputs = _outputs(layer, where)
        shared = (getattr(one.config, "num_key_value_heads", None) if name == "qkv_proj" else None) or heads
        width, rest = divmod(outputs, heads if name in _SEPARATE else heads + 2 * shared)
        if rest or width != _head_width(one, width):
            break  # something else is made along with the queries
        if name == "query_key_value":  # query, key and value of one head lie side by side
            return Projection(name, layer, torch.arange(outputs).view(heads, 3, width)[:, 0])
        return Projection(name, layer, torch.arange(heads * width).view(heads, width))
    raise UnsupportedError(
        f"model: where the queries of {where} come from is not known ({type(module).__name__}); "
        "apply the policy instead (sharpmax.apply)"
    )


def _outputs(layer: Any, where: str) -> int:
    """The number of outputs of a layer whose weights are a matrix; an error for any other."""
    conv1d = require_transformers("pytorch_utils").Conv1D
    if type(layer) not in (nn.Linear, conv1d) or not layer.weight.is_floating_point():
        raise UnsupportedError(
            f"model: {where} makes its queries by a {type(layer).__name__}, whose weights are not a plain matrix; "
            "load the model unquantized and without adapters first"
        )
    return int(layer.weight.shape[0 if isinstance(layer, nn.Linear) else 1])


def _head_width(one: AttentionModule, default: int) -> int:
    """The size of a head, or `default` if the module does not state it."""
    names = ("head_dim", "head_size", "attention_head_size")
    return next((width for name in names if isinstance(width := getattr(one.module, name, None), int)), default)


def _gain_factor(norm: Any, one: AttentionModule, beta: Tensor, where: str) -> Tensor:
    """The factor for the gain of a normalisation, in the shape of the gain."""
    gain = getattr(norm, "weight", None)
    if gain is None:
        raise UnsupportedError(f"model: {where} normalises its queries without a gain that could hold β")
    if bool((beta == beta[0]).all()) and beta.shape[1] in (1, gain.numel()):
        return beta[0].expand(gain.shape)
    width, rest = divmod(gain.numel(), one.heads)
    if not rest and width == _head_width(one, 0):
        return beta.expand(-1, width).reshape(gain.shape)
    raise UnsupportedError(
        f"policy: {where} normalises its queries with one gain for all heads, so its heads need the same β; learn one "
        "β per layer with `sharpmax calibrate --foldable`"
    )


def _gain_offset(norm: nn.Module, where: str) -> float:
    """0 if a normalisation stores its gain, 1 if it stores the gain minus 1; found by the outputs of a copy."""
    twin: Any = copy.deepcopy(norm).to_empty(device="cpu").float()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in twin.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
        probe = torch.randn(3, *twin.weight.shape, generator=generator)
        wanted, gain = 2 * twin(probe), twin.weight.clone()
        if getattr(twin, "bias", None) is not None:
            twin.bias.mul_(2.0)
        for offset in (0.0, 1.0):
            twin.weight.copy_((gain + offset) * 2.0 - offset)
            if torch.allclose(twin(probe), wanted, rtol=1e-5, atol=1e-6):
                return offset
    raise UnsupportedError(f"model: {where} has a query normalisation {type(norm).__name__} that folding does not know")
