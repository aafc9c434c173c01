"""Queries and keys of every head as linear maps of a ball, for certified bounds."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sharpmax.errors import UnsupportedError
from sharpmax.integrations.transformers.interface import modules_of
from sharpmax.integrations.transformers.projections import Projection, exact, projections
from sharpmax.integrations.transformers.support import AttentionModule

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class Ball:
    """Every output of a normalisation of d numbers: gain·z + bias with ‖z‖ ≤ √d, and z of mean 0 if `centred`."""

    gain: Tensor
    bias: Tensor
    centred: bool
    epsilon: float

    @classmethod
    def of(cls, norm: nn.Module, where: str) -> Ball:
        """The outputs of a module; UnsupportedError for one that is not known."""
        weight: Any = getattr(norm, "weight", None)
        if isinstance(norm, nn.LayerNorm) and len(norm.normalized_shape) == 1:
            ones = torch.ones(norm.normalized_shape, dtype=torch.float64)
            gain = ones if weight is None else exact(weight)
            bias: Any = norm.bias
            return cls(gain, torch.zeros_like(ones) if bias is None else exact(bias), True, norm.eps)
        epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if isinstance(weight, Tensor) and weight.ndim == 1 and isinstance(epsilon, float):
            gain = exact(weight)
            with torch.no_grad():
                output = exact(norm(torch.ones_like(weight)))
            # Some families store the gain, some the gain minus 1: the output tells which.
            for offset in (0.0, 1.0):
                if torch.allclose(output * math.sqrt(1.0 + epsilon), gain + offset, rtol=1e-2, atol=1e-2):
                    return cls(gain + offset, torch.zeros_like(gain), False, epsilon)
        raise UnsupportedError(
            f"model: {where} has a normalisation {type(norm).__name__} that no certificate knows; "
            "allowed: LayerNorm and RMSNorm with a gain"
        )

    @property
    def radius(self) -> float:
        """The largest ‖z‖."""
        return math.sqrt(len(self.gain))

    def folded(self, matrix: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """A linear map of the output, matrix `[..., D, d]` and bias `[..., D]`, as one of z."""
        through = matrix * self.gain
        if self.centred:
            through = through - through.mean(-1, keepdim=True)
        return through, bias + matrix @ self.bias

    def points(self, inputs: Tensor, epsilon: float | None = None) -> Tensor:
        """z for inputs `[..., d]`; with an epsilon of 0 instead of the module's own, z is never shorter."""
        if self.centred:
            inputs = inputs - inputs.mean(-1, keepdim=True)
        square = inputs.square().mean(-1, keepdim=True) + (self.epsilon if epsilon is None else epsilon)
        return inputs / torch.where(square > 0, square, 1.0).sqrt()


@dataclass(frozen=True)
class Feed:
    """The normalisations, by name, whose outputs an attention module makes queries and keys of."""

    queries: str
    keys: str
    first: bool  # whether what they normalise is the embedding of the input and nothing else


@dataclass(frozen=True)
class Family:
    """How the models of a family are put together."""

    feed: Callable[[str], Feed | None]  # from the name of an attention module; None where it is not known
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


_NORMS = {"q_norm": "k_norm", "q_layernorm": "k_layernorm"}


@dataclass(frozen=True, eq=False)
class Side:
    """The queries, or the keys, of a layer: matrix·z + bias with z from a ball, then perhaps normalised once more."""

    ball: Ball
    matrix: Tensor  # `[heads, D, d]` in float64, the gain of the normalisation before it included
    bias: Tensor  # `[heads, D]`
    after: Ball | None  # the normalisation of each head, where there is one

    @property
    def constant(self) -> bool:
        """Whether there is anything in it that does not shrink with z."""
        return bool(self.bias.any()) or (self.after is not None and bool(self.after.bias.any()))

    def bounded(self) -> tuple[Tensor, float, Tensor]:
        """Matrix, largest norm of its input and bias: what comes out whatever goes in."""
        if self.after is None:
            return self.matrix, self.ball.radius, self.bias
        width = len(self.after.gain)
        matrix, bias = self.after.folded(torch.eye(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64))
        heads = len(self.matrix)
        return matrix.expand(heads, -1, -1), self.after.radius, bias.expand(heads, -1)

    def of(self, inputs: Tensor, head: int, epsilon: float | None) -> Tensor:
        """What a head makes `[N, D]` of inputs `[N, d]` that are not normalised yet; `epsilon` as in `Ball.points`."""
        made = self.ball.points(inputs, epsilon) @ self.matrix[head].T + self.bias[head]
        if self.after is None:
            return made
        return self.after.points(made, epsilon) * self.after.gain + self.after.bias


@dataclass(frozen=True, eq=False)
class LayerProjections:
    """An attention layer: logits scale·q·k of turned queries and keys, perhaps capped, perhaps with a bias added."""

    number: int
    heads: int
    query: Side
    key: Side
    first: bool  # whether its inputs are normalised embeddings
    scale: float
    pairs: int  # entries i and i + pairs of queries and keys are turned together by their position, for i < pairs
    cap: float | None
    bias_spread: Tensor  # `[heads]`, the largest minus the smallest number that positions add to a logit
    window: int | None  # the most keys a row can see


def layers_of(model: PreTrainedModel) -> list[LayerProjections]:
    """The attention layers of a model, in the order of policies, or an error that says why it has no certificate."""
    kind = str(model.config.model_type)
    family = family_of(kind)
    modules = modules_of(model)
    return [_Reader(model, kind, family).layer(number, one) for number, one in enumerate(modules)]


class _Reader:
    """Reads layers off one model."""

    def __init__(self, model: PreTrainedModel, kind: str, family: Family) -> None:
        self.kind, self.family = kind, family
        self.parts = dict(model.named_modules())
        self.names = {part: name for name, part in self.parts.items()}
        if getattr(model.config, "do_layer_norm_before", True) is False:
            raise UnsupportedError(
                f"model: this {kind} normalises after attention, so nothing bounds its first layer; allowed: "
                "do_layer_norm_before=True"
            )

    def layer(self, number: int, one: AttentionModule) -> LayerProjections:
        where, name = f"layer {number} of {self.kind}", self.names[one.module]
        feed = self.family.feed(name)
        if feed is None or not {feed.queries, feed.keys} <= set(self.parts):
            raise UnsupportedError(
                f"model: what {where} attends to is not known ({name}); allowed: plain self-attention"
            )
        made = projections(one, where)
        group = one.heads // len(made[1].rows)
        query, key = self._sides(one, made, feed, where)
        width = made[0].rows.shape[1]
        pairs, turned = self._rotary(width)
        scale, window = _scale(one, width) * turned, self._window(one)
        cap, bias = self._cap(one), self._bias_spread(name, one.heads)
        return LayerProjections(
            number, one.heads, query, _repeated(key, group), feed.first, scale, pairs, cap, bias, window
        )

    def _sides(self, one: AttentionModule, made: Sequence[Projection], feed: Feed, where: str) -> Iterator[Side]:
        norms = next(((q, k) for q, k in _NORMS.items() if hasattr(one.module, q)), None)
        for i, (projection, name) in enumerate(zip(made, (feed.queries, feed.keys), strict=True)):
            ball = Ball.of(self.parts[name], where)
            after = None if norms is None else Ball.of(getattr(one.module, norms[i]), where)
            if after is not None and len(after.gain) != projection.rows.shape[1]:
                raise UnsupportedError(
                    f"model: {where} normalises all heads of its queries together; allowed: each alone"
                )
            yield Side(ball, *ball.folded(projection.matrix(), projection.bias()), after)

    def _rotary(self, width: int) -> tuple[int, float]:
        """How many pairs turn, and what the rotation multiplies logits by."""
        if not self.family.rotary:
            return 0, 1.0
        turning = [part for part in self.parts.values() if "RotaryEmbedding" in type(part).__name__]
        pairs = {
            len(tensor)
            for part in turning
            for name, tensor in part.named_buffers()
            if name.endswith("inv_freq") and "original" not in name
        }
        if len(pairs) != 1 or 2 * max(pairs) > width:
            raise UnsupportedError(
                f"model: how positions turn the queries of {self.kind} is not known; allowed: one way"
            )
        scalings = [
            value for part in turning for name, value in vars(part).items() if name.endswith("attention_scaling")
        ]
        return pairs.pop(), max((float(value) ** 2 for value in scalings), default=1.0)

    def _cap(self, one: AttentionModule) -> float | None:
        """Only eager attention caps logits; the others of transformers leave the cap out."""
        cap = getattr(one.module, "attn_logit_softcapping", None)
        return float(cap) if cap is not None and self.kind == "gemma2" and one.inner == "eager" else None

    def _bias_spread(self, name: str, heads: int) -> Tensor:
        """T5 adds a table of numbers by distance, that of the first block of its stack in every self-attention."""
        stack = name.partition(".block.")[0]
        table = self.parts.get(f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias")
        if not isinstance(table, nn.Embedding) or not name.endswith("SelfAttention"):
            return torch.zeros(heads, dtype=torch.float64)
        weight = exact(table.weight)
        return weight.amax(0) - weight.amin(0)

    def _window(self, one: AttentionModule) -> int | None:
        # Mistral has one window for all layers.
        holder: Any = one.config if self.kind == "mistral" else one.module
        window = getattr(holder, "sliding_window", None)
        return window if isinstance(window, int) and window > 0 else None


def _repeated(side: Side, group: int) -> Side:
    """Keys that several heads share, once for each of them."""
    return Side(side.ball, side.matrix.repeat_interleave(group, 0), side.bias.repeat_interleave(group, 0), side.after)


def _scale(one: AttentionModule, width: int) -> float:
    scaling = getattr(one.module, "scaling", None)
    if isinstance(scaling, float):
        return scaling
    unscaled = "position_bias" in one.arguments or getattr(one.module, "scale_attn_weights", True) is False
    return 1.0 if unscaled else 1.0 / math.sqrt(width)
