"""Small models of many seeds at once, with any normaliser: the paper's single attention head, and encoders.

Weights, inputs and outputs have the seed as first axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sharpmax.errors import reject
from sharpmax.normalisers.base import Normaliser, normaliser
from sharpmax.tasks.sized import CLASSES, FEATURES, SizedTask, items_and_query

Activation = Callable[[Tensor], Tensor]


def step(x: Tensor) -> Tensor:
    """1 where x > 0, else 0; the gradient is that of the sigmoid.

    >>> step(torch.tensor([-1.0, 0.5, 3.0]))
    tensor([0., 1., 1.])
    """
    smooth = torch.sigmoid(x)
    return (x > 0).to(x.dtype) + (smooth - smooth.detach())


def hard_threshold(x: Tensor) -> Tensor:
    """x where x > 1/2, else 0: a jump of 1/2; the gradient is that of GELU.

    >>> hard_threshold(torch.tensor([-1.0, 0.4, 0.75]))
    tensor([0.0000, 0.0000, 0.7500])
    """
    smooth = F.gelu(x)
    return torch.where(x > 0.5, x, 0.0).detach() + (smooth - smooth.detach())


ACTIVATIONS: Mapping[str, Activation] = {"gelu": F.gelu, "step": step, "hard-threshold": hard_threshold}

_GROUP = 256


class Linear(nn.Module):
    """One linear layer per seed: [S, ..., in] -> [S, ..., out]."""

    def __init__(self, seeds: int, size_in: int, size_out: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(seeds, size_in, size_out))
        self.bias = nn.Parameter(torch.zeros(seeds, 1, size_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer of each seed to its rows."""
        # The gradient of a weight is a sum over all rows. With groups of rows, a GPU computes it in parallel.
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
    """Two linear layers with an activation between them."""

    def __init__(
        self, seeds: int, size_in: int, size_hidden: int, size_out: int, activation: Activation = F.gelu
    ) -> None:
        super().__init__()
        self.first = Linear(seeds, size_in, size_hidden)
        self.second = Linear(seeds, size_hidden, size_out)
        self._activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """[S, ..., in] -> [S, ..., out]."""
        return self.second(self._activation(self.first(x)))  # type: ignore[no-any-return]


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
    """One normaliser per seed; learned parameters, if the kind has any, belong to the seed."""

    def __init__(self, seeds: Sequence[int], name: str, options: Mapping[str, Any]) -> None:
        super().__init__()
        each = []
        for seed in seeds:
            # Parameters of a custom kind may be initialised at random, too.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                each.append(normaliser(name, **options))
        # In a tuple, so that it is not a submodule: the stacked parameters replace its own.
        self._one = (each[0],)
        parameters, buffers = torch.func.stack_module_state(each)
        self.learned = nn.ParameterDict({key.replace(".", "/"): value for key, value in parameters.items()})
        for key, value in buffers.items():
            self.register_buffer(f"held/{key.replace('.', '/')}", value)

    @property
    def kind(self) -> Normaliser:
        """The normaliser of the first seed."""
        return self._one[0]

    def forward(
        self, q: Tensor, k: Tensor, *, mask: Tensor, is_causal: bool = False, scale: float | None = None
    ) -> Tensor:
        """Weights [S, ..., Lq, Lk] from q [S, ..., Lq, D], k [S, ..., Lk, D] and a mask [S, ..., Lq, Lk]."""
        state = {key.replace("/", "."): value for key, value in self.learned.items()}
        state |= {key.removeprefix("held/").replace("/", "."): value for key, value in self.named_buffers()}

        def weights(state: Mapping[str, Tensor], q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
            options = {"mask": mask, "is_causal": is_causal, "scale": scale}
            found: Tensor = torch.func.functional_call(self.kind, dict(state), (q, k), options)
            return found

        return torch.func.vmap(weights)(state, q, k, mask) if state else weights({}, q, k, mask)


def initialise(model: nn.Module, seeds: Sequence[int]) -> None:
    """Initialise every linear layer: normal weights of variance 1/in (LeCun's), biases 0.

    The weights of a seed do not depend on the other seeds.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, Linear):
                for weight, generator in zip(layer.weight, generators, strict=True):
                    weight.normal_(std=len(weight) ** -0.5, generator=generator)


WIDTH = 128


@dataclass(frozen=True)
class Reading:
    """Class logits [S, B, A, C] at the asked positions, those of argmax attention, and statistics of the last layer.

    Argmax attention takes the key with the largest weight in each head. If it is wrong, the keys are ranked wrong; if
    it is right and the model is not, the error is due to dispersion. `entropy` and top weight `top` [S, B, H, A] are
    those of normalised rows; `first` [S, B, A] is the key with the largest weight summed over heads.
    """

    scores: Tensor
    argmax_scores: Tensor
    entropy: Tensor
    top: Tensor
    first: Tensor


def summarise_rows(weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`entropy`, `top` and `first` of a `Reading` for weights [S, B, H, A, L], which need not sum to 1."""
    share = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    return torch.special.entr(share).sum(-1), share.amax(-1), share.mean(2).argmax(-1)


def most_weighted(weights: Tensor, values: Tensor) -> Tensor:
    """The value [S, B, H, A, D] of the key with the largest weight in each head, from values [S, B, H, L, D]."""
    each = weights.argmax(-1, keepdim=True)
    return values.gather(-2, each.expand(*each.shape[:-1], values.shape[-1]))


class SingleHeads(nn.Module):
    """The paper's single head over a set; every input and output has the seeds as first axis.

    `normalisers` replace softmax, and `activation` replaces GELU inside the feed-forward networks.
    """

    def __init__(
        self, seeds: int, *, width: int = WIDTH, activation: Activation = F.gelu, normalisers: Normalisers | None = None
    ) -> None:
        super().__init__()
        self.items = Mlp(seeds, FEATURES, width, width, activation)
        self.question = Mlp(seeds, 1, width, width, activation)
        self.q, self.k, self.v = (Linear(seeds, width, width, bias=False) for _ in range(3))
        self.classes = Mlp(seeds, width, width, CLASSES, activation)
        self.normalisers = normalisers

    @classmethod
    def initial(
        cls,
        seeds: Sequence[int],
        normaliser: str | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
        *,
        width: int = WIDTH,
        feed_forward: str = "gelu",
    ) -> SingleHeads:
        """Untrained heads; the weights of a seed do not depend on the other seeds."""
        normalisers = None if normaliser is None else Normalisers(seeds, normaliser, options)
        heads = cls(len(seeds), width=width, activation=ACTIVATIONS[feed_forward], normalisers=normalisers)
        initialise(heads, seeds)
        return heads

    def features(self, items: Tensor) -> Tensor:
        """h for items [S, ..., n, 11]: [S, ..., n, W]."""
        return F.gelu(self.items(items))

    def logits(self, features: Tensor, query: Tensor) -> Tensor:
        """s for h [S, ..., n, W] and queries [S, ...]: [S, ..., n]."""
        return torch.matmul(features, self._direction(self._asked(query))[..., None])[..., 0]

    def weights(self, features: Tensor, query: Tensor, visible: Tensor) -> Tensor:
        """Attention weights of h [S, ..., n, W] for queries [S, ...]: [S, ..., n]."""
        if self.normalisers is None:
            return self.logits(features, query).masked_fill(~visible, -torch.inf).softmax(-1)
        q, k = self._asked(query), features
        if type(self.normalisers.kind).score is Normaliser.score:
            q = self._direction(q)
        else:  # its scores are not dot products, so K has to be applied to the keys
            k = self.k(features)
        found: Tensor = self.normalisers(q[..., None, :], k, mask=visible[..., None, :], scale=1.0)
        return found[..., 0, :]

    def classify(self, pooled: Tensor) -> Tensor:
        """Class logits for Σ p_i h_i [S, ..., W]: [S, ..., 10]."""
        return self.classes(self.v(pooled))  # type: ignore[no-any-return]

    def forward(self, items: Tensor, query: Tensor, visible: Tensor) -> Tensor:
        """Class logits [S, ..., 10] of whole sets."""
        h = self.features(items)
        return self.classify(torch.matmul(self.weights(h, query, visible)[..., None, :], h)[..., 0, :])

    def answer(self, inputs: Tensor, visible: Tensor, asked: int = 1) -> Tensor:
        """Class logits [S, B, 1, 10] for rows [S, B, n + 1, 13] of `sharpmax.tasks.sized.MAX`."""
        return self(*items_and_query(inputs), visible[..., :-1])[..., None, :]  # type: ignore[no-any-return]

    def read(self, inputs: Tensor, visible: Tensor, asked: int = 1) -> Reading:
        """The answer and statistics of the attention rows."""
        items, query = items_and_query(inputs)
        h = self.features(items)
        weights = self.weights(h, query, visible[..., :-1])[:, :, None, None, :]
        h = h[:, :, None]
        scores = self.classify(torch.cat((torch.matmul(weights, h), most_weighted(weights, h)), dim=2)[..., 0, :])
        return Reading(scores[:, :, :1], scores[:, :, 1:], *summarise_rows(weights))

    def _asked(self, query: Tensor) -> Tensor:
        return self.q(F.gelu(self.question(query[..., None])))  # type: ignore[no-any-return]

    def _direction(self, q: Tensor) -> Tensor:
        """Kᵀ q, whose dot product with h is the logit."""
        return torch.bmm(q.reshape(len(q), -1, q.shape[-1]), self.k.weight.mT).reshape(q.shape)


_CONVOLUTION = 4
_MAX_WEIGHTS = {"cpu": 2**22, "cuda": 2**27}
"""The number of attention weights in memory at once without gradients."""


class Encoders(nn.Module):
    """Transformer encoders of one to a few layers for one task; every input and output has the seeds as first axis.

    Pre-norm; attention is global or causal and has no position encoding, which could fail at sizes beyond training.
    For tasks where order matters, a short convolution at the input adds the three preceding positions to each.
    """

    def __init__(
        self,
        seeds: Sequence[int],
        normaliser: str,
        options: Mapping[str, Any],
        task: SizedTask,
        *,
        width: int = 128,
        heads: int = 4,
        depth: int = 1,
        causal: bool = False,
        feed_forward: str = "gelu",
    ) -> None:
        super().__init__()
        if width % heads:
            reject("width", width, f"a multiple of the number of heads, {heads}")
        self._tokens, count = task.tokens, len(seeds)
        self.embed = Linear(count, task.tokens, width) if task.tokens else Mlp(count, task.features, width, width)
        self.neighbours = Linear(count, _CONVOLUTION * width, width) if task.ordered else None
        self.layers = nn.ModuleList(
            _Layer(seeds, normaliser, options, width, heads, causal=causal, feed_forward=feed_forward)
            for _ in range(depth)
        )
        self.norm = Norm(count, width)
        self.classes = Linear(count, width, task.classes)
        initialise(self, seeds)

    def answer(self, inputs: Tensor, visible: Tensor, asked: int) -> Tensor:
        """Class logits [S, B, A, C] at the last `asked` positions of inputs [S, B, L] or [S, B, L, F]."""
        x = self._before_last_layer(inputs, visible)
        return self.classes(self.norm(self.layers[-1](x, visible, asked)))  # type: ignore[no-any-return]

    def read(self, inputs: Tensor, visible: Tensor, asked: int) -> Reading:
        """The answer and statistics of the attention rows of the last layer."""
        last: Any = self.layers[-1]
        x, argmax, statistics = last.read(self._before_last_layer(inputs, visible), visible, asked)
        return Reading(self.classes(self.norm(x)), self.classes(self.norm(argmax)), *statistics)

    def _before_last_layer(self, inputs: Tensor, visible: Tensor) -> Tensor:
        if self._tokens:
            # `one_hot` would synchronise with the GPU to check the range of the tokens.
            inputs = (inputs[..., None] == torch.arange(self._tokens, device=inputs.device)).to(self.norm.gain.dtype)
        x: Tensor = self.embed(inputs)
        if self.neighbours is not None:
            x = x * visible[..., None]
            around = [F.pad(x, (0, 0, back, 0))[..., : x.shape[-2], :] for back in range(_CONVOLUTION)]
            x = x + self.neighbours(torch.cat(around, dim=-1))
        for layer in list(self.layers)[:-1]:
            x = layer(x, visible, x.shape[-2])
        return x


class _Layer(nn.Module):
    """Attention and a feed-forward network with residual connections."""

    def __init__(
        self,
        seeds: Sequence[int],
        normaliser: str,
        options: Mapping[str, Any],
        width: int,
        heads: int,
        *,
        causal: bool,
        feed_forward: str,
    ) -> None:
        super().__init__()
        count = len(seeds)
        self.before = Norm(count, width)
        self.q, self.k, self.v = (Linear(count, width, width, bias=False) for _ in range(3))
        self.out = Linear(count, width, width, bias=False)
        self.between = Norm(count, width)
        self.feed = Mlp(count, width, 2 * width, width, ACTIVATIONS[feed_forward])
        self.normalisers = Normalisers(seeds, normaliser, options)
        self._heads, self._causal = heads, causal

    def forward(self, x: Tensor, visible: Tensor, rows: int) -> Tensor:
        """The last `rows` positions of x [S, B, L, W] after this layer."""
        pooled = [torch.matmul(weights, v) for weights, v in self._attention(x, visible, rows)]
        return self._added(x, pooled)

    def read(self, x: Tensor, visible: Tensor, rows: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The outputs, those with argmax attention, and the entropy, top weight and its key of each row."""
        pooled, argmax, summaries = [], [], []
        for weights, v in self._attention(x, visible, rows):
            pooled.append(torch.matmul(weights, v))
            argmax.append(most_weighted(weights, v))
            summaries.append(summarise_rows(weights))
        summary = [torch.cat(parts, dim=-1) for parts in zip(*summaries, strict=True)]
        return self._added(x, pooled), self._added(x, argmax), summary

    def _attention(self, x: Tensor, visible: Tensor, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Weights and values of the last `rows` rows; without gradients in parts, to save memory."""
        y = self.before(x)
        q, k, v = self.q(y[..., -rows:, :]), self.k(y), self.v(y)
        q, k, v = (one.unflatten(-1, (self._heads, -1)).transpose(-2, -3) for one in (q, k, v))
        length = k.shape[-2]
        at_once = max(1, _MAX_WEIGHTS.get(q.device.type, _MAX_WEIGHTS["cpu"]) // k[..., 0].numel())
        # A normaliser assumes that its rows are the last ones, which matters if visible keys depend on the position.
        positional = type(self.normalisers.kind).visible is not Normaliser.visible and not self._causal
        if torch.is_grad_enabled() or positional:
            at_once = rows
        for start in range(0, rows, at_once):
            part = q[..., start : start + at_once, :]
            keys = length - rows + start + part.shape[-2] if self._causal else length
            mask = visible[:, :, None, None, :keys]
            weights = self.normalisers(part, k[..., :keys, :], mask=mask, is_causal=self._causal)
            yield weights, v[..., :keys, :]

    def _added(self, x: Tensor, pooled: list[Tensor]) -> Tensor:
        found = torch.cat(pooled, dim=-2)
        x = x[..., -found.shape[-2] :, :] + self.out(found.transpose(-2, -3).flatten(-2))
        return x + self.feed(self.between(x))  # type: ignore[no-any-return]
