"""The paper's single attention head over a set, for many seeds at once and with any normaliser; and its layers.

Weights, inputs and outputs have the seed as first axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sharpmax.normalisers.base import Normaliser, normaliser
from sharpmax.tasks.max_retrieval import CLASSES, FEATURES, items_and_query

Activation = Callable[[Tensor], Tensor]

_THRESHOLD = 0.5


def step(x: Tensor) -> Tensor:
    """1 where x > 0, else 0; the gradient is that of the sigmoid.

    >>> step(torch.tensor([-1.0, 0.5, 3.0]))
    tensor([0., 1., 1.])
    """
    return _straight_through((x > 0).to(x.dtype), torch.sigmoid(x))


def hard_threshold(x: Tensor) -> Tensor:
    """x where x > 1/2, else 0: a jump of 1/2; the gradient is that of GELU.

    >>> hard_threshold(torch.tensor([-1.0, 0.4, 0.75]))
    tensor([0.0000, 0.0000, 0.7500])
    """
    return _straight_through(torch.where(x > _THRESHOLD, x, 0.0), F.gelu(x))


def _straight_through(value: Tensor, smooth: Tensor) -> Tensor:
    # smooth − smooth is exactly 0, so the value is what it is to the bit.
    return value.detach() + (smooth - smooth.detach())


ACTIVATIONS: Mapping[str, Activation] = {"gelu": F.gelu, "step": step, "hard-threshold": hard_threshold}


_GROUP = 256


class Linear(nn.Module):
    """One linear layer per seed: [S, ..., in] -> [S, ..., out]."""

    def __init__(self, seeds: int, size_in: int, size_out: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(seeds, size_in, size_out))
        self.bias = nn.Parameter(torch.zeros(seeds, 1, size_out)) if bias else None

    def reset(self, generators: Sequence[torch.Generator]) -> None:
        """Each seed's weights from its own generator: normal with variance 1/in (LeCun's), biases 0."""
        with torch.no_grad():
            for weight, generator in zip(self.weight, generators, strict=True):
                weight.normal_(std=len(weight) ** -0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """The layer of each seed on its own rows."""
        # The gradient of a weight is a sum over all rows. Cut into groups, a GPU forms it in many places at once.
        rows = x[0, ..., 0].numel()
        groups = rows // _GROUP if torch.is_grad_enabled() and rows % _GROUP == 0 else 1
        grouped = x.reshape(len(x) * groups, rows // groups, x.shape[-1])
        weight = self.weight[:, None].expand(-1, groups, -1, -1).flatten(0, 1)
        if self.bias is None:
            y = torch.bmm(grouped, weight)
        else:
            y = torch.baddbmm(self.bias[:, None].expand(-1, groups, -1, -1).flatten(0, 1), grouped, weight)
        return y.reshape(*x.shape[:-1], -1)


class Mlp(nn.Module):
    """Two linear layers with an activation between them, and GELU behind them if `active_out`."""

    def __init__(
        self,
        seeds: int,
        size_in: int,
        size_hidden: int,
        size_out: int,
        *,
        active_out: bool = False,
        activation: Activation = F.gelu,
    ) -> None:
        super().__init__()
        self.first = Linear(seeds, size_in, size_hidden)
        self.second = Linear(seeds, size_hidden, size_out)
        self._active_out, self._activation = active_out, activation

    def forward(self, x: Tensor) -> Tensor:
        """[S, ..., in] -> [S, ..., out]."""
        y = self.second(self._activation(self.first(x)))
        return F.gelu(y) if self._active_out else y


class Norm(nn.Module):
    """Layer normalisation with a gain and an offset per seed."""

    def __init__(self, seeds: int, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(seeds, width))
        self.offset = nn.Parameter(torch.zeros(seeds, width))

    def forward(self, x: Tensor) -> Tensor:
        """[S, ..., W] -> [S, ..., W]."""
        shape = (len(x), *[1] * (x.ndim - 2), x.shape[-1])
        return F.layer_norm(x, x.shape[-1:]) * self.gain.view(shape) + self.offset.view(shape)


class Normalisers(nn.Module):
    """A normaliser for every seed, each with learned parameters of its own where that kind has any."""

    def __init__(self, seeds: Sequence[int], name: str, options: Mapping[str, Any]) -> None:
        super().__init__()
        each = []
        for seed in seeds:
            # Parameters of a user's own kind may begin at random; they too belong to the seed.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                each.append(normaliser(name, **options))
        # Not a submodule: its own parameters are replaced by the stacked ones.
        self._one = (each[0],)
        learned = [dict(one.named_parameters()) for one in each]
        self.learned = nn.ParameterDict(
            {
                key.replace(".", "/"): nn.Parameter(torch.stack([one[key].detach() for one in learned]))
                for key in learned[0]
            }
        )
        for key, held in each[0].named_buffers():
            self.register_buffer(f"held/{key.replace('.', '/')}", held)

    @property
    def kind(self) -> Normaliser:
        """The normaliser of the first seed, for what all of them have in common."""
        return self._one[0]

    def forward(
        self, q: Tensor, k: Tensor, *, mask: Tensor, is_causal: bool = False, scale: float | None = None
    ) -> Tensor:
        """Weights [S, ..., Lq, Lk] from q [S, ..., Lq, D], k [S, ..., Lk, D] and a mask [S, ..., Lq, Lk]."""
        held = {key.removeprefix("held/").replace("/", "."): tensor for key, tensor in self.named_buffers()}

        def weights(learned: Mapping[str, Tensor], q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
            named = {key.replace("/", "."): tensor for key, tensor in learned.items()}
            options = {"mask": mask, "is_causal": is_causal, "scale": scale}
            found: Tensor = torch.func.functional_call(self.kind, (named, held), (q, k), options)
            return found

        if not len(self.learned):
            return weights({}, q, k, mask)
        return torch.func.vmap(weights)(dict(self.learned.items()), q, k, mask)


def initialise(model: nn.Module, seeds: Sequence[int]) -> None:
    """Draw the weights of every linear layer; a seed's do not depend on which other seeds stand beside it."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    for layer in model.modules():
        if isinstance(layer, Linear):
            layer.reset(generators)


WIDTH = 128


class SingleHeads(nn.Module):
    """The single heads of S seeds; every input and output has the seeds as its first axis.

    `normalisers` take the place of softmax, `activation` that of GELU inside the feed-forward networks.
    """

    def __init__(
        self, seeds: int, *, width: int = WIDTH, activation: Activation = F.gelu, normalisers: Normalisers | None = None
    ) -> None:
        super().__init__()
        self.items = Mlp(seeds, FEATURES, width, width, active_out=True, activation=activation)
        self.question = Mlp(seeds, 1, width, width, active_out=True, activation=activation)
        self.q = Linear(seeds, width, width, bias=False)
        self.k = Linear(seeds, width, width, bias=False)
        self.v = Linear(seeds, width, width, bias=False)
        self.classes = Mlp(seeds, width, width, CLASSES, activation=activation)
        self.normalisers = normalisers

    @classmethod
    def initial(cls, seeds: Sequence[int]) -> SingleHeads:
        """Untrained heads; a seed's weights do not depend on which other seeds stand beside it."""
        heads = cls(len(seeds))
        initialise(heads, seeds)
        return heads

    def features(self, items: Tensor) -> Tensor:
        """h for items [S, ..., n, 11]: [S, ..., n, W]."""
        return self.items(items)  # type: ignore[no-any-return]

    def logits(self, features: Tensor, query: Tensor) -> Tensor:
        """s for h [S, ..., n, W] and queries [S, ...]: [S, ..., n]."""
        return torch.matmul(features, self._direction(query)[..., None])[..., 0]

    def weights(self, features: Tensor, query: Tensor, visible: Tensor) -> Tensor:
        """Attention weights of h [S, ..., n, W] for queries [S, ...]: [S, ..., n]."""
        if self.normalisers is None:
            return self.logits(features, query).masked_fill(~visible, -torch.inf).softmax(-1)
        if type(self.normalisers.kind).score is Normaliser.score:
            q, k = self._direction(query), features
        else:  # its scores are no dot products, which K could be moved out of
            q, k = self._asked(query), self.k(features)
        found: Tensor = self.normalisers(q[..., None, :], k, mask=visible[..., None, :], scale=1.0)
        return found[..., 0, :]

    def classify(self, pooled: Tensor) -> Tensor:
        """Class logits for Σ p_i h_i [S, ..., W]: [S, ..., 10]."""
        return self.classes(self.v(pooled))  # type: ignore[no-any-return]

    def forward(self, items: Tensor, query: Tensor, visible: Tensor) -> Tensor:
        """Class logits [S, ..., 10] of whole sets."""
        h = self.features(items)
        return self.classify(torch.matmul(self.weights(h, query, visible)[..., None, :], h)[..., 0, :])

    def _asked(self, query: Tensor) -> Tensor:
        return self.q(self.question(query[..., None]))  # type: ignore[no-any-return]

    def _direction(self, query: Tensor) -> Tensor:
        """Kᵀ Q q: what every h is multiplied with."""
        q = self._asked(query)
        return torch.bmm(q.reshape(len(q), -1, q.shape[-1]), self.k.weight.mT).reshape(q.shape)


@dataclass(frozen=True)
class RowSummary:
    """Rows of attention: `entropy` and `top` weight [S, B, H, R] as shares of a row, and where they are largest.

    `each` [S, B, H, R] is the key that a head gives most, `first` [S, B, R] the one that all heads together do.
    """

    entropy: Tensor
    top: Tensor
    each: Tensor
    first: Tensor

    @classmethod
    def joined(cls, parts: Sequence[RowSummary]) -> RowSummary:
        """The rows of all parts, in order."""
        names = ("entropy", "top", "each", "first")
        return cls(*(torch.cat([getattr(part, name) for part in parts], dim=-1) for name in names))

    def argmax_values(self, values: Tensor) -> Tensor:
        """The value [S, B, H, R, D] of the key that each head gives most, from values [S, B, H, L, D]."""
        index = self.each[..., None].expand(*self.each.shape, values.shape[-1])
        return values.gather(-2, index)


def summarise_rows(weights: Tensor) -> RowSummary:
    """The summary of weights [S, B, H, R, L], which need not sum to 1."""
    share = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    top = share.max(-1)
    return RowSummary(torch.special.entr(share).sum(-1), top.values, top.indices, share.mean(2).argmax(-1))


@dataclass(frozen=True)
class Reading:
    """Class logits [S, B, A, C] where something is asked, those of argmax attention in the last layer, all summaries.

    Argmax attention takes the key with the largest weight in each head. What it gets wrong is ranked wrong; what it
    gets right where the model does not is lost to dispersion.
    """

    scores: Tensor
    argmax_scores: Tensor
    layers: tuple[RowSummary, ...]


class SetHeads(SingleHeads):
    """Single heads of several seeds that read the rows of `sharpmax.tasks.max_retrieval.MAX`."""

    def __init__(
        self,
        seeds: Sequence[int],
        normaliser: str,
        options: Mapping[str, Any],
        *,
        width: int = WIDTH,
        feed_forward: str = "gelu",
    ) -> None:
        normalisers = Normalisers(seeds, normaliser, options)
        super().__init__(len(seeds), width=width, activation=ACTIVATIONS[feed_forward], normalisers=normalisers)
        initialise(self, seeds)

    def answer(self, inputs: Tensor, visible: Tensor, asked: int = 1) -> Tensor:
        """Class logits [S, B, 1, 10] for rows [S, B, n + 1, 13]."""
        return self(*items_and_query(inputs), visible[..., :-1])[..., None, :]  # type: ignore[no-any-return]

    def read(self, inputs: Tensor, visible: Tensor, asked: int = 1) -> Reading:
        """The answer, and summaries of the attention rows."""
        items, query = items_and_query(inputs)
        h = self.features(items)
        weights = self.weights(h, query, visible[..., :-1])[:, :, None, None, :]
        summary = summarise_rows(weights)
        h = h[:, :, None]
        scores = self.classify(torch.cat((torch.matmul(weights, h), summary.argmax_values(h)), dim=2)[..., 0, :])
        return Reading(scores[:, :, :1], scores[:, :, 1:], (summary,))
