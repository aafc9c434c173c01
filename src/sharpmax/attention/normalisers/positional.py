"""Normalisers that depend on where a key stands, not only on its logit."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from sharpmax.attention.normalisers.base import Normaliser, key_distance, live_softmax, positive_whole

__all__ = ["Local", "StickBreaking"]


class StickBreaking(Normaliser):
    """σ(s_j)·Π (1 − σ(s_j')) over the visible keys j' after j (Tan et al., 2024): the latest key takes first.

    Depends on the order of the keys. A row sums to at most 1: what no key takes is left over.

    >>> StickBreaking()(torch.tensor([[1.0]]), torch.tensor([[0.0], [0.0], [0.0]]))
    tensor([[0.1250, 0.2500, 0.5000]])
    """

    name: ClassVar[str] = "stick-breaking"
    disperses: ClassVar[str] = (
        "no: the latest keys keep theirs whatever n is; a key d places back gets at most (1 − σ(min s))^d"
    )
    can_disperse: ClassVar[bool] = False
    sums_to_one: ClassVar[bool] = False
    order_dependent: ClassVar[bool] = True

    def normalise(self, logits: Tensor, live: Tensor) -> Tensor:
        """Sums of log σ from the last key backwards, exponentiated at the end."""
        passed_on = torch.where(live, F.logsigmoid(-logits), 0.0)
        # Summed without the key itself, not with it and then subtracted: 1000.001 − 1000 has no digits left.
        left = F.pad(passed_on[..., 1:].flip(-1).cumsum(-1).flip(-1), (0, 1))
        return (F.logsigmoid(logits) + left).exp()


class Local(Normaliser):
    """Softmax over the keys less than `window` places away from the row's own position, i + Lk − Lq.

    Depends on the order of the keys. With `is_causal` these are the last `window` positions; hidden keys
    among them are not made up for by earlier ones.

    >>> Local(window=2)(torch.zeros(3, 4), torch.zeros(3, 4), is_causal=True)
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.0000, 0.5000, 0.5000]])
    """

    name: ClassVar[str] = "local"
    disperses: ClassVar[str] = "no: a row sees fewer than 2·window keys whatever n is, none further away"
    can_disperse: ClassVar[bool] = False
    order_dependent: ClassVar[bool] = True

    def __init__(self, window: int = 16) -> None:
        super().__init__()
        self.window = positive_whole("window", window)

    def visible(self, q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        """What the mask leaves visible, inside the window."""
        return super().visible(q, k, mask, is_causal) & (key_distance(q, k).abs() < self.window)

    def normalise(self, logits: Tensor, live: Tensor) -> Tensor:
        """Softmax over the live keys, which the window has narrowed."""
        return live_softmax(logits, live)

    def extra_repr(self) -> str:
        """The window."""
        return f"window={self.window}"
