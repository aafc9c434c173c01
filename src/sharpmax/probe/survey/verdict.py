"""Three sentences for somebody who decides: how many heads lose focus, where it begins, and if it can be foreseen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sharpmax.probe.survey.findings import HALF, Findings
from sharpmax.probe.survey.forecast import error
from sharpmax.probe.survey.kinds import LOSES_FOCUS
from sharpmax.theory.bounds import whole

__all__ = ["verdict"]

_GOOD, _FAIR = 0.25, 0.5
"""Errors of a forecast in nats: e^0.25 is an effective number of keys that is off by 28%, e^0.5 by 65%."""


def verdict(model: str, found: Sequence[Findings]) -> list[str]:
    """Three sentences about the first task, with what the others say where it is short."""
    return [_how_many(model, found), _where(found[0]), _foreseen(found[0])]


def _how_many(model: str, found: Sequence[Findings]) -> str:
    first = found[0]
    losing = np.isin(first.kinds, LOSES_FOCUS)
    said = f"{_share(first)} of {model}'s {first.known:,} attention heads lose focus as inputs grow"
    said += f" from {_sizes(first)}"
    if losing.any():
        effective = first.curves["effective"]
        low, high = (float(np.median(effective[end][losing])) for end in (0, -1))
        said += f": in the middle one of them the weight is shared by {_many(low)} tokens at first and {_many(high)}"
        said += " in the end"
    others = "".join(f"; on {one.task} ({_sizes(one)}) it is {_share(one)}" for one in found[1:])
    return f"{said}{others}."


def _where(found: Findings) -> str:
    slopes = found.layer_slopes
    rising = [layer for layer in found.order if slopes[layer] > 0.0][:3]
    said = "No layer loses focus on average"
    if rising:
        named = _joined([str(layer) for layer in rising])
        said = (
            f"Layer{'s' if len(rising) > 1 else ''} {named} of {len(slopes)} go{'' if len(rising) > 1 else 'es'} first"
        )
    top = found.curves["top"]
    focused, still = top[0] >= HALF, top[-1] >= HALF
    began = int(focused.sum())
    if not began:
        return f"{said}; no head has half of its weight on one token even in the smallest inputs."
    lost = focused & ~still
    ends = found.horizon[lost & np.isfinite(found.horizon)]
    many = int(lost.sum())
    said += f"; {began:,} heads have half of their weight on one token in the smallest inputs"
    if not many or not ends.size:
        return f"{said}, and none of them has lost that in the largest."
    by = whole(np.median(ends))
    return f"{said}, and {many:,} of them have lost that in the largest, half of these by {by:,} tokens."


def _foreseen(found: Findings) -> str:
    forecast = found.forecast
    if forecast is None or not forecast.values:
        return "There is no forecast: that takes two sizes to learn from and a larger one to test it at."
    size = max(forecast.values)
    measured = {name: found.curves[name][found.sizes.index(size)] for name in ("entropy", "top")}
    off = error(forecast.values[size], measured)["entropy"]
    if off["median"] is None:
        return "There is no forecast: the model gives no numbers."
    known = f"Inputs of up to {found.fit_up_to:,} {found.unit}"
    how = "foretell" if off["median"] <= _GOOD else "roughly foretell" if off["median"] <= _FAIR else "do not foretell"
    return (
        f"{known} {how} what happens at {size:,}: the forecast of a head's entropy is off by {off['median']:.2f} nats "
        f"in the middle head and by up to {off['p90']:.2f} in nine of ten."
    )


def _share(found: Findings) -> str:
    many = sum(found.counted(kind) for kind in LOSES_FOCUS)
    return f"{many:,} ({many / max(1, found.known):.0%})"


def _sizes(found: Findings) -> str:
    keys = np.nanmax(found.curves["count"], axis=(1, 2))
    sizes = f"{found.sizes[0]:,} to {found.sizes[-1]:,} {found.unit}"
    return sizes if found.unit == "tokens" else f"{sizes} ({_many(keys[0])} to {_many(keys[-1])} tokens)"


def _many(value: float) -> str:
    return f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


def _joined(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
