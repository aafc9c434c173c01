"""What is left of the top item as n grows: n·max p for independent, identically distributed, bounded logits.

By the law of large numbers (Σ e^βs)/n → E[e^βs], while the largest logit tends to the upper end M of what is
drawn at all; hence n·max p → e^βM/E[e^βs], a constant of the distribution: the top item keeps that many times
the uniform weight 1/n, and no more.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sharpmax.errors import reject
from sharpmax.theory._numbers import Number, broadcast, check, check_at_least, give, read

_ROUNDING = 1e-9
"""How far ln E[e^βs] may exceed βM, per unit, before it is a mistake rather than rounding."""


def top_weight_limit(top: Number, log_mean_exp: Number) -> Any:
    """The limit of n·max p from βM, the upper end of the scaled logits, and ln E[e^βs], both in nats.

    M has to be the least upper bound of the distribution, not any bound. The limit is at least 1.

    >>> import math  # logits uniform on [0, 1] at β = 2: E[e^βs] = (e² − 1)/2
    >>> round(top_weight_limit(2.0, math.log(math.expm1(2.0) / 2.0)), 4)
    2.313
    """
    xp, (top, log_mean_exp) = read(top=top, log_mean_exp=log_mean_exp)
    broadcast(top=top.shape, log_mean_exp=log_mean_exp.shape)
    check("top", top, xp.isfinite(top), "finite numbers", "the limit exists for bounded logits only")
    check("log_mean_exp", log_mean_exp, xp.isfinite(log_mean_exp), "finite numbers")
    with np.errstate(over="ignore"):
        excess = top - log_mean_exp
    if not bool((excess >= -_ROUNDING * (1 + xp.abs(top))).all()):
        worst = -float(excess.min())
        reject(
            "log_mean_exp",
            f"a value {worst:g} above top",
            "at most top",
            "pass β·M and ln E[e^(β·s)] of one β",
        )
    with np.errstate(over="ignore", under="ignore"):
        return give(xp.exp(xp.where(excess > 0, excess, 0.0)))


def top_weight_limit_from_sample(logits: Number, beta: Number = 1.0, top: Number | None = None) -> Any:
    """The limit of n·max p estimated from logits `[..., N]` drawn independently: `[...]`, one for each row.

    Without `top`, the upper end M before scaling by `beta`, the largest logit of the row stands in for it:
    the estimate is then N·max p of that row and on the low side, markedly so if values near M are rare.

    >>> round(top_weight_limit_from_sample([0.0, 0.0, 0.0, 1.0]), 4)
    1.9015
    """
    given = {"logits": logits, "beta": beta} | ({} if top is None else {"top": top})
    xp, (logits, beta, *tops) = read(**given)
    if logits.ndim < 1 or 0 in logits.shape:
        reject("logits", f"shape {tuple(logits.shape)}", "an array [..., N] that is not empty")
    check("logits", logits, xp.isfinite(logits), "finite numbers", "leave masked items out")
    check_at_least("beta", beta, 0.0)
    largest = xp.amax(logits, -1)
    upper = tops[0] if tops else largest
    broadcast(logits=logits.shape[:-1], beta=beta.shape, top=upper.shape)
    check("top", upper, xp.isfinite(upper), "finite numbers")
    if not bool((upper >= largest).all()):
        short = f"a value {float((largest - upper).max()):g} under the largest logit"
        reject("top", short, "at least every logit of its row", "pass it before scaling by beta")
    with np.errstate(over="ignore", under="ignore"):
        # Relative to the largest logit, so that no term overflows and at least one does not vanish.
        mean = xp.exp(beta[..., None] * (logits - largest[..., None])).mean(-1)
        return give(xp.exp(beta * (upper - largest)) / mean)
