"""The base class of normalisers, which turn queries and keys into attention weights; their registry; `attend`.

Checks, masks and hidden keys are handled here, so that each normaliser is a few lines of mathematics on finite logits.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sharpmax.arrays import ops_for
from sharpmax.errors import reject, reject_type
from sharpmax.policies.base import Policy, check_number
from sharpmax.stats.call import (
    broadcast,
    check_like,
    check_mask,
    check_tensors,
    floats_at_least_32,
    hidden_by,
    without_autocast,
)

_kinds: dict[str, type[Normaliser]] = {}


class Normaliser(nn.Module, ABC):
    """Attention weights from queries and keys: q `[..., Lq, D]`, k `[..., Lk, D]` -> `[..., Lq, Lk]`.

    For every normaliser, hidden keys have weight 0, and NaN or inf in them affects neither weights nor gradients. A row
    without visible keys is 0. A row with a visible logit that is not finite is NaN and does not affect other rows. Half
    precision inputs are computed in float32; weights have the dtype of the inputs.

    A subclass defines `name`, by which `normaliser(name)` finds it, `disperses`, and `normalise`, which turns finite
    logits into weights.
    """

    name: ClassVar[str]
    """The name for `normaliser(name)`. A subclass that does not define one is not registered."""

    disperses: ClassVar[str]
    """One line: whether the largest weight among n keys must fall as n grows, with bounded logits, and why."""

    adds_mask: ClassVar[bool] = True
    """Whether finite values of a float mask can be added to the logits. If not, such a mask raises ArgumentError."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            return
        if not isinstance(cls.name, str) or not cls.name:
            reject("name", repr(cls.name), "a non-empty string", f"name the class {cls.__qualname__}")
        if not getattr(cls, "disperses", ""):
            reject("disperses", f"nothing on {cls.__qualname__}", "one line: whether it disperses, and why")
        taken = _kinds.get(cls.name, cls)
        # A notebook cell that runs again, or a reloaded module, replaces its class.
        if (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            reject("name", repr(cls.name), f"a name that is free; taken: {sorted(_kinds)}")
        _kinds[cls.name] = cls

    def __init__(self) -> None:
        super().__init__()

    def extra_repr(self) -> str:
        """Return the options that are numbers or policies."""
        values = {name: getattr(self, name, None) for name in inspect.signature(type(self)).parameters}
        shown = {name: one.describe() if isinstance(one, Policy) else one for name, one in values.items()}
        return ", ".join(f"{name}={one}" for name, one in shown.items() if isinstance(one, (int, float, str)))

    @abstractmethod
    def normalise(self, logits: Tensor, visible: Tensor) -> Tensor:
        """Return weights from logits, both `[..., Lq, Lk]`.

        Logits are finite, at least float32, and 0 where `visible` is False. Every row has a visible key. The weights
        returned for hidden keys do not matter.
        """

    def score(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """Return logits `[..., Lq, Lk]` of finite queries and keys: scale·q·kᵀ."""
        return (q * scale) @ k.mT

    def visible(self, q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        """Return which keys each row sees, boolean `[..., Lq, Lk]`. The last row is aligned with the last key."""
        visible = torch.ones((), dtype=torch.bool, device=q.device)
        if is_causal:
            visible = key_distance(q, k) >= 0
        if mask is not None:
            visible = visible & ~hidden_by(mask)
        batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])  # type: ignore[no-untyped-call, unused-ignore]
        return visible.expand(*batch, q.shape[-2], k.shape[-2])

    def forward(
        self, q: Tensor, k: Tensor, *, mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None
    ) -> Tensor:
        """Return attention weights `[..., Lq, Lk]` in the dtype of q.

        `mask` broadcasts to `[..., Lq, Lk]`. A boolean mask is True for visible keys. A float mask is added to the
        logits; values from −inf to half of `finfo.min` hide the key. With `is_causal`, row i sees key j if
        j ≤ i + Lk − Lq. `scale` is 1/√D by default.
        """
        check_tensors(q, k)
        batch = broadcast(k.shape[:-2], q.shape[:-2])
        if batch is None:
            batches = tuple(k.shape[:-2]), tuple(q.shape[:-2])
            reject("k", f"batch {batches[0]}", f"a batch that broadcasts with the query's {batches[1]}")
        if mask is not None:
            check_mask(mask, q, (*batch, q.shape[-2], k.shape[-2]), "mask")
            if mask.is_floating_point() and not self.adds_mask and bool((~hidden_by(mask) & (mask != 0)).any()):
                given, allowed = "a float mask with finite values other than 0", "a boolean mask, or one of 0 and −inf"
                reject("mask", given, f"{allowed}: {self.name!r} has no logits to add to")
        factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else check_number("scale", scale)
        with without_autocast(q.device):
            visible = self.visible(q, k, mask, is_causal)
            wide = floats_at_least_32(q.dtype)
            (finite_q, q_mark), (finite_k, k_mark) = _finite_rows(q.to(wide)), _finite_rows(k.to(wide))
            logits = self.score(finite_q, finite_k, factor) + q_mark[..., :, None] + k_mark[..., None, :]
            if mask is not None and mask.is_floating_point() and self.adds_mask:
                logits = logits + torch.where(hidden_by(mask), 0.0, mask.to(wide))
            if logits.numel() == 0:
                return logits.to(q.dtype)
            # Replacing the weights of rows without keys, or with logits that are not finite, afterwards would leave
            # 0/0 and NaN·0 in gradients. So `normalise` gets one key with a finite logit for such rows.
            broken = ~(logits.isfinite() | ~visible).all(-1, keepdim=True)
            void = broken | ~visible.any(-1, keepdim=True)
            first = torch.arange(k.shape[-2], device=k.device) == 0
            weights = self.normalise(torch.where(visible & ~void, logits, 0.0), torch.where(void, first, visible))
            if weights.shape != logits.shape:
                reject("normalise", f"shape {tuple(weights.shape)}", f"that of the logits, {tuple(logits.shape)}")
            weights = torch.where(visible, weights, 0.0).masked_fill(visible & broken, math.nan)
        return weights.to(q.dtype)


def normaliser(name: str, **options: Any) -> Normaliser:
    """Create a normaliser by name, with its options."""
    if name not in _kinds:
        reject("name", repr(name), f"one of {sorted(_kinds)}")
    known = inspect.signature(_kinds[name]).parameters
    for option in options:
        if option not in known and not any(one.kind is one.VAR_KEYWORD for one in known.values()):
            reject("options", option, f"{list(known) or 'none'} for {name!r}")
    return _kinds[name](**options)


def normalisers() -> dict[str, type[Normaliser]]:
    """Return the classes of all registered normalisers by name."""
    return dict(sorted(_kinds.items()))


_create = normaliser  # `attend` has a parameter of the same name


def visible_softmax(logits: Tensor, visible: Tensor) -> Tensor:
    """Return the softmax of the visible logits of each row `[..., Lq, Lk]`; each row needs a visible key."""
    return torch.where(visible, logits, -math.inf).softmax(-1)


def key_distance(q: Tensor, k: Tensor) -> Tensor:
    """Return the distance from each key to the row's own position, `[Lq, Lk]`; negative for later keys."""
    queries, keys = q.shape[-2], k.shape[-2]
    own = torch.arange(keys - queries, keys, device=q.device)
    return own[:, None] - torch.arange(keys, device=q.device)


def positive_whole(name: str, value: int) -> int:
    """Return `value`; raise ArgumentError if it is not a whole number of at least 1."""
    if type(value) is not int or value < 1:
        reject(name, repr(value), "a whole number of at least 1")
    return value


def _finite_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Replace vectors `[..., L, D]` that are not finite by 0; return a mark `[..., L]` that is NaN for them, else 0.

    Adding the mark to the logits puts the NaN back, and masking removes it for hidden keys. A NaN in the product itself
    could not be removed: the gradient of a query is Σ dlogit·key, and 0·NaN is NaN.
    """
    sound = x.isfinite().all(-1, keepdim=True)
    return torch.where(sound, x, 0.0), torch.where(sound[..., 0], 0.0, math.nan).to(x.dtype)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    normaliser: Normaliser | str,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return values weighted by a normaliser, given or by name: v `[..., Lk, Dv]` -> `[..., Lq, Dv]`.

    Values of hidden keys have no effect on a row, even if they are NaN or inf. A visible value that is not finite makes
    the output NaN.
    """
    kind = _create(normaliser) if isinstance(normaliser, str) else normaliser
    if not isinstance(kind, Normaliser):
        reject_type("normaliser", type(kind).__name__, "a Normaliser or the name of one")
    weights: Tensor = kind(q, k, mask=mask, is_causal=is_causal, scale=scale)
    check_like(v, k, "v", "k")
    if v.ndim < 2 or v.shape[-2] != k.shape[-2]:
        reject("v", f"shape {tuple(v.shape)}", f"[..., {k.shape[-2]}, Dv], one value per key")
    if broadcast(v.shape[:-2], weights.shape[:-2]) is None:
        batches = tuple(v.shape[:-2]), tuple(weights.shape[:-2])
        reject("v", f"batch {batches[0]}", f"a batch that broadcasts with {batches[1]}, that of q and k")
    finite = v.isfinite()
    out = weights @ torch.where(finite, v, 0.0)
    # This product finds the rows that see such a value. Usually there is no such value.
    if not ops_for(finite).concrete(finite) or not bool(finite.all()):
        visible = kind.visible(q, k, mask, is_causal)
        out = out.masked_fill(visible.to(torch.float32) @ (~finite).to(torch.float32) > 0, math.nan)
    return out
