"""The rules of a layer in a form that kernels can be given, and attention with it on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sharpmax.attention.decode import MOST_QUERIES
from sharpmax.attention.fused import differentiates, learns, serves, sharpened, warn_now_and_then
from sharpmax.attention.kernels import decode
from sharpmax.attention.sharp import fitting_beta, scaled_mask, scaled_queries
from sharpmax.hf.logits import Logits
from sharpmax.hf.rules import PolicyRule, Rule
from sharpmax.policies import Constant, Policy
from sharpmax.policies.base import Said
from sharpmax.policies.closed_form import closed_form

__all__ = ["Lowered", "lowered"]


@dataclass(frozen=True)
class Lowered:
    """What the rules of a layer say of each of its heads; plain values, which a compiler takes for constants."""

    policies: tuple[Policy, ...]
    needs: tuple[str, ...]
    code: str
    solved: bool
    """Whether some β is the solution of an equation."""

    smooth: bool
    """Whether the kernels know the gradient of β."""

    said: Said = field(default_factory=Said, repr=False, compare=False)
    """What the model has been warned of."""

    def newest(self, logits: Logits, value: Tensor) -> Tensor | None:
        """Attention of a few queries to keys and values that are read once, `[B, Lq, H, D]`; None where that cannot be.

        Which keys a row sees is what `logits` says. A missing mask hides nothing here, however few queries there are:
        encoders and cross-attention have few of them too.
        """
        q, k, mask = logits.q, logits.k, logits.mask
        if logits.causal or q.shape[2] > MOST_QUERIES or not _on_gpu(q) or decode.obstacle(q, value) is not None:
            return None
        if learns(q, k, value, mask):
            return None
        scale = q.shape[-1] ** -0.5 if logits.scaling is None else logits.scaling
        out: Tensor = decode.decode_op(q, k, value, None, None, mask, scale, self.code, False, causal=False)[0]
        return out.transpose(1, 2).contiguous()

    def sharpened(self, logits: Logits) -> tuple[Tensor, Tensor | None] | None:
        """β·q and the mask that goes with it; None where the kernels cannot be used."""
        q, mask = logits.q, logits.mask
        if self.solved or not _on_gpu(q) or (learns(q, logits.k, mask) and not differentiates(mask, self.smooth)):
            return None
        problem = logits.problem()
        if not serves(problem, q):
            return None
        counts = None if mask is None else problem.counts()
        queries, beta, parts = sharpened(problem, q, counts, self.needs, self.code)
        if not torch.compiler.is_compiling():
            warn_now_and_then(self.policies, problem, parts, self.said)
        if mask is not None and mask.is_floating_point():
            beta = fitting_beta(q, mask, beta)
            queries = scaled_queries(q, beta)
        return queries, scaled_mask(mask, beta)


def _on_gpu(q: Tensor) -> bool:
    return q.is_cuda


def lowered(rules: Sequence[Rule], heads: int) -> Lowered | None:
    """The rules of a layer in that form, if they are made of policies that have one."""
    policies: list[Policy] = [Constant(1.0)] * heads
    said = Said()
    for rule in rules:
        if not isinstance(rule, PolicyRule):
            return None
        said = rule.said
        for place, head in enumerate(range(heads) if rule.heads is None else rule.heads):
            policies[head] = rule.policies[min(place, len(rule.policies) - 1)]
    form = closed_form(policies) if rules else None
    if form is None:
        return None
    return Lowered(tuple(policies), tuple(sorted(form.needs)), form.code, form.solved, form.smooth, said)
