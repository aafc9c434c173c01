"""What a normaliser is: a module from queries and keys to attention weights; the registry of its kinds; `attend`.

The checks, the masks and everything that can go wrong with hidden keys live here once, so that each kind is a
few lines of mathematics about finite logits.
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

    Of every kind: a hidden key has weight exactly 0, and NaN or inf in it reaches neither weights nor
    gradients; a row that sees no key is all 0; a row with a visible logit that is not finite is NaN and
    leaves the others as they are; half precision is computed in float32 and comes back as it went in.

    A kind of one's own has a `name`, by which `normaliser(name)` then finds it, and `normalise`, which turns finite
    logits into weights.
    """

    name: ClassVar[str]
    """What `normaliser(name)` finds it by; a subclass without a name of its own is not registered."""

    disperses: ClassVar[str]
    """One line: whether one leading key among n must lose its weight as n grows, logits staying bounded, and why."""

    adds_mask: ClassVar[bool] = True
    """Whether finite values of a float mask can be added to the logits; else such a mask is refused."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            return
        if not isinstance(cls.name, str) or not cls.name:
            reject("name", repr(cls.name), "a non-empty string", f"name the class {cls.__qualname__}")
        if not getattr(cls, "disperses", ""):
            reject("disperses", f"nothing on {cls.__qualname__}", "one line: whether it disperses, and why")
        taken = _kinds.get(cls.name, cls)
        # A notebook cell run again, or a module reloaded, defines the same class again: that replaces it.
        if (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            reject("name", repr(cls.name), f"a name that is free; taken: {sorted(_kinds)}")
        _kinds[cls.name] = cls

    def __init__(self) -> None:
        super().__init__()

    def extra_repr(self) -> str:
        """The options that are numbers or policies."""
        values = {name: getattr(self, name, None) for name in inspect.signature(type(self)).parameters}
        shown = {name: one.describe() if isinstance(one, Policy) else one for name, one in values.items()}
        return ", ".join(f"{name}={one}" for name, one in shown.items() if isinstance(one, (int, float, str)))

    @abstractmethod
    def normalise(self, logits: Tensor, visible: Tensor) -> Tensor:
        """Weights from logits, both `[..., Lq, Lk]`.

        Logits are finite, at least float32, and 0 where `visible` is False; every row has a visible key. What is
        returned for keys that are not visible does not matter.
        """

    def score(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """Logits `[..., Lq, Lk]` of finite queries and keys; scale·q·kᵀ unless overridden."""
        return (q * scale) @ k.mT

    def visible(self, q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        """Which keys each row sees, boolean `[..., Lq, Lk]`; causal rows are aligned at the last key."""
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
        """Attention weights `[..., Lq, Lk]` in the dtype of q.

        `mask` broadcasts to `[..., Lq, Lk]`: boolean with True = visible, or float and added to the logits,
        where everything from −inf to half of `finfo.min` hides the key. With `is_causal`, row i sees key j if
        j ≤ i + Lk − Lq. `scale` is 1/√D unless given.
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
            # Kinds never meet a row without keys or a logit that is not finite: 0/0 and NaN·0 would come back
            # through their gradients even if their values were replaced afterwards. Such rows get one key.
            broken = ~(logits.isfinite() | ~visible).all(-1, keepdim=True)
            void = broken | ~visible.any(-1, keepdim=True)
            first = torch.arange(k.shape[-2], device=k.device) == 0
            weights = self.normalise(torch.where(visible & ~void, logits, 0.0), torch.where(void, first, visible))
            if weights.shape != logits.shape:
                reject("normalise", f"shape {tuple(weights.shape)}", f"that of the logits, {tuple(logits.shape)}")
            weights = torch.where(visible, weights, 0.0).masked_fill(visible & broken, math.nan)
        return weights.to(q.dtype)


def normaliser(name: str, **options: Any) -> Normaliser:
    """Build a normaliser by its name."""
    if name not in _kinds:
        reject("name", repr(name), f"one of {sorted(_kinds)}")
    known = inspect.signature(_kinds[name]).parameters
    for option in options:
        if option not in known and not any(one.kind is one.VAR_KEYWORD for one in known.values()):
            reject("options", option, f"{list(known) or 'none'} for {name!r}")
    return _kinds[name](**options)


def normalisers() -> dict[str, type[Normaliser]]:
    """All registered kinds, name -> class."""
    return dict(sorted(_kinds.items()))


_made = normaliser  # `attend` has a parameter of that name


def visible_softmax(logits: Tensor, visible: Tensor) -> Tensor:
    """Softmax of the visible logits of each row `[..., Lq, Lk]`; each row needs one."""
    return torch.where(visible, logits, -math.inf).softmax(-1)


def key_distance(q: Tensor, k: Tensor) -> Tensor:
    """How many places each key lies before the row's own position, `[Lq, Lk]`; rows end at the last key."""
    queries, keys = q.shape[-2], k.shape[-2]
    own = torch.arange(keys - queries, keys, device=q.device)
    return own[:, None] - torch.arange(keys, device=q.device)


def positive_whole(name: str, value: int) -> int:
    """`value`, or an error that names the option if it is not a whole number of at least 1."""
    if type(value) is not int or value < 1:
        reject(name, repr(value), "a whole number of at least 1")
    return value


def _finite_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors `[..., L, D]`, 0 where they were not finite, and a mark `[..., L]` that is NaN there, else 0.

    The mark puts the NaN back into the logits, where hidden ones are dropped. Multiplied into them it could
    not be dropped any more: the gradient of a query is Σ dlogit·key, and 0·NaN is NaN.
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
    """Values weighted by a normaliser (or the name of one): v `[..., Lk, Dv]` -> `[..., Lq, Dv]`.

    Values of keys that a row does not see have no effect on it, NaN and inf included; one that it does see
    and that is not finite makes that output NaN.
    """
    kind = _made(normaliser) if isinstance(normaliser, str) else normaliser
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
    # The second product is only needed to find rows that do see such a value, which is hardly ever.
    if not ops_for(finite).concrete(finite) or not bool(finite.all()):
        visible = kind.visible(q, k, mask, is_causal)
        out = out.masked_fill(visible.to(torch.float32) @ (~finite).to(torch.float32) > 0, math.nan)
    return out
