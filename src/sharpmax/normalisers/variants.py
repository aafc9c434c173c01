"""The normalisers: softmax and its temperature variants, sparse, unnormalised and positional ones."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sharpmax.arrays import in_float64
from sharpmax.lazy import require
from sharpmax.normalisers.base import Normaliser, key_distance, positive_whole, visible_softmax
from sharpmax.policies.base import Policy, check_number
from sharpmax.policies.registry import resolve_policy
from sharpmax.stats.statistics import centred, dense_stats


class Softmax(Normaliser):
    """exp(s)/Σ exp(s) over the visible keys."""

    name = "softmax"
    disperses = "yes: with logits of spread δ no key among n gets more than e^δ/(e^δ + n − 1)"

    def normalise(self, logits: Tensor, visible: Tensor) -> Tensor:
        """Softmax over the visible keys."""
        return visible_softmax(logits, visible)


class Adaptive(Normaliser):
    """softmax(β·s) with β from the row's own statistics by a policy. Gradients flow through β.

    With per-head policies, the third axis from the end is the heads, `[..., H, Lq, Lk]`.

    >>> q, k = torch.tensor([[1.0]]), torch.tensor([[0.5], [-0.5], [-0.5], [-0.5]])
    >>> Adaptive("paper")(q, k)
    tensor([[0.6301, 0.1233, 0.1233, 0.1233]])
    """

    name = "adaptive"
    disperses = "yes with the paper's polynomial: β ≤ 2.42, and 1 beyond H = 5.94; not if a policy holds the entropy"

    def __init__(self, policy: Policy | str | None = "paper") -> None:
        super().__init__()
        self.policy: Policy = resolve_policy(policy)

    def normalise(self, logits: Tensor, visible: Tensor) -> Tensor:
        """β from the dense statistics of each row, then softmax of the scaled row."""
        # Relative to the row's maximum, so that β does not scale the rounding errors of a common offset.
        relative, _ = centred(logits, visible)
        beta = self.policy.beta(dense_stats(logits, visible), lambda at: dense_stats(at[..., None] * relative, visible))
        return visible_softmax(beta[..., None] * relative, visible)


class ScalableSoftmax(Normaliser):
    """softmax(s·ln n·logits) with n visible keys and a learnable scalar s (Nakanishi, 2025).

    The initial s is 1/ln 16, which makes a row of 16 keys plain softmax.
    """

    name = "ssmax"
    disperses = "yes while s·δ < 1: a leader by δ has weight about n^(s·δ − 1); no beyond, where it goes to 1"

    def __init__(self, s: float = 1.0 / math.log(16)) -> None:
        super().__init__()
        # In float64 for logits of float64; `.to(dtype)` converts it like any parameter.
        self.s = nn.Parameter(torch.tensor(check_number("s", s), dtype=torch.float64))

    def normalise(self, logits: Tensor, visible: Tensor) -> Tensor:
        """Softmax at β = s·ln n."""
        log_n = visible.sum(-1, keepdim=True).to(logits.dtype).log()
        return visible_softmax(self.s.to(logits.dtype) * log_n * logits, visible)


# Both sparse maps give weight 0 to every key more than 2 below the maximum, so lower logits can be clamped.
_FAR_BELOW = -4.0


class Sparsemax(Normaliser):
    """The point of the simplex closest to the logits (Martins & Astudillo, 2016); needs the extra `entmax`."""

    name = "sparsemax"
    disperses = "no for a leader: ahead by g it keeps at least min(1, g); yes among close rivals (uniform: 2/√n)"

    def __init__(self) -> None:
        super().__init__()
        package: Any = require("entmax", "entmax", f"normaliser({self.name!r})")
        self._map = getattr(package, self.name)

    def normalise(self, logits: Tensor, visible: Tensor) -> Tensor:
        """The map of the `entmax` package, for logits relative to the maximum, clamped and in float64.

        The package sums squares of all logits of a row. −inf and large offsets give NaN, and in float32 the weights of
        one leader over 16,384 near-ties sum to 0.9991.
        """
        wide = in_float64(logits)
        visible = visible.to(wide.device)
        relative, _ = centred(wide, visible)
        bounded = torch.where(visible, relative.clamp(min=_FAR_BELOW), _FAR_BELOW)
        weights: Tensor = self._map(bounded, dim=-1)
        return weights.to(logits.dtype).to(logits.device)


class Entmax15(Sparsemax):
    """1.5-entmax, halfway between softmax and sparsemax (Peters et al., 2019); needs the extra `entmax`."""

    name = "entmax15"
    disperses = "no for a leader: ahead by g it keeps at least min(1, g/2)²; yes among close rivals (ties: 1/n)"


class Hard(Normaliser):
    """All weight on the largest visible logit, the first one on ties; the gradient is that of softmax."""

    name = "hard"
    disperses = "no: one key has weight 1 whatever n is (its softmax gradient does disperse)"

    def normalise(self, logits: Tensor, visible: Tensor) -> Tensor:
        """One-hot values with a straight-through gradient."""
        soft = visible_softmax(logits, visible)
        top = torch.where(visible, logits, -math.inf).argmax(-1, keepdim=True)
        # soft − soft is exactly 0, so the values are exactly one-hot.
        return torch.zeros_like(soft).scatter(-1, top, 1.0) + (soft - soft.detach())


class TopK(Normaliser):
    """Softmax over the k largest visible logits, the first ones on ties."""

    name = "top-k"
    disperses = "no: the largest of k weights is at least 1/k whatever n is"

    def __init__(self, k: int = 8) -> None:
        super().__init__()
        self.k = positive_whole("k", k)

    def normalise(self, logits: Tensor, visible: Tensor) -> Tensor:
        """Softmax over the first k visible keys in descending order."""
        # The order of ties is undefined for torch.topk, but not for a stable sort.
        order = torch.where(visible, logits, -math.inf).sort(dim=-1, descending=True, stable=True).indices
        kept = torch.zeros_like(visible).scatter(-1, order[..., : self.k], True)
        return visible_softmax(logits, kept & visible)


class Sigmoid(Normaliser):
    """σ(s + bias) for each key on its own; the default bias is −ln n for n visible keys.

    Each weight is at most 1, and a row sums to at most n.
    """

    name = "sigmoid"
    disperses = (
        "yes with the bias −ln n: a weight falls like e^s/n, though no rival takes it; "
        "no with a fixed bias, but the rivals' sum then grows with n"
    )

    def __init__(self, bias: float | None = None) -> None:
        super().__init__()
        self.bias = None if bias is None else check_number("bias", bias)

    def normalise(self, logits: Tensor, visible: Tensor) -> Tensor:
        """Elementwise sigmoid."""
        if self.bias is not None:
            return torch.sigmoid(logits + self.bias)
        return torch.sigmoid(logits - visible.sum(-1, keepdim=True).to(logits.dtype).log())


class SoftmaxPlusOne(Normaliser):
    """exp(s)/(1 + Σ exp(s)): softmax with one more key of logit 0 and value 0, so weights may sum to less than 1."""

    name = "softmax-plus-one"
    disperses = "yes: it is softmax with one more key, so no weight exceeds softmax's"

    def normalise(self, logits: Tensor, visible: Tensor) -> Tensor:
        """Softmax times the share of the visible keys."""
        # With L = ln Σ exp(s), Σ/(1 + Σ) is σ(L), which does not overflow.
        total = torch.where(visible, logits, -math.inf).logsumexp(-1, keepdim=True)
        return visible_softmax(logits, visible) * torch.sigmoid(total)


class Linear(Normaliser):
    """φ(q)·φ(k)/Σ φ(q)·φ(k) with φ = elu + 1 (Katharopoulos et al., 2020), as a matrix of weights.

    `scale` cancels. There are no logits, so a float mask can only hide keys. Features are at least e⁻³⁰, so that their
    sum is not 0.
    """

    name = "linear"
    disperses = "yes: bounded queries and keys have bounded scores, which share a total of 1"
    adds_mask = False

    def score(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """Products of positive features."""
        # elu(x) + 1 in two parts: expm1(x) + 1 would round features below 1e-7 to 0.
        features_q, features_k = (x.clamp(-30.0, 0.0).exp() + x.clamp(min=0.0) for x in (q, k))
        return features_q @ features_k.mT

    def normalise(self, logits: Tensor, visible: Tensor) -> Tensor:
        """Each score divided by the sum of the visible ones."""
        scores = torch.where(visible, logits, 0.0)
        return scores / scores.sum(-1, keepdim=True)


class StickBreaking(Normaliser):
    """σ(s_j)·Π (1 − σ(s_j')) over the visible keys j' after j (Tan et al., 2024): the latest key comes first.

    It depends on the order of the keys. A row sums to at most 1.
    """

    name = "stick-breaking"
    disperses = "no: the latest keys keep theirs whatever n is; a key d places back gets at most (1 − σ(min s))^d"

    def normalise(self, logits: Tensor, visible: Tensor) -> Tensor:
        """Sums of log σ from the last key backwards, exponentiated at the end."""
        passed_on = torch.where(visible, F.logsigmoid(-logits), 0.0)
        # Sum without the key itself; subtracting it from a sum that includes it would cancel digits.
        left = F.pad(passed_on[..., 1:].flip(-1).cumsum(-1).flip(-1), (0, 1))
        return (F.logsigmoid(logits) + left).exp()


class Local(Softmax):
    """Softmax over the keys less than `window` places away from the row's own position, i + Lk − Lq.

    With `is_causal` these are the last `window` positions. Hidden keys among them are not replaced by earlier ones.
    """

    name = "local"
    disperses = "no: a row sees fewer than 2·window keys whatever n is, none further away"

    def __init__(self, window: int = 16) -> None:
        super().__init__()
        self.window = positive_whole("window", window)

    def visible(self, q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        """Return the visible keys inside the window."""
        return super().visible(q, k, mask, is_causal) & (key_distance(q, k).abs() < self.window)
