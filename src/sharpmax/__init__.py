"""sharpmax: measure, predict and fix softmax dispersion, the loss of focus of attention as inputs grow."""

from typing import TYPE_CHECKING

import sharpmax.attention  # (light; see below)
import sharpmax.calibrate
import sharpmax.probe  # noqa: F401
from sharpmax.lazy import lazy_exports

if TYPE_CHECKING:
    from sharpmax import policies as policies
    from sharpmax import theory as theory
    from sharpmax.attention import attention as attention
    from sharpmax.attention import decode as decode
    from sharpmax.attention import entropy as entropy
    from sharpmax.attention import normalisers as normalisers
    from sharpmax.attention import softmax as softmax
    from sharpmax.calibrate.calibration import calibrate as calibrate
    from sharpmax.hf import applied as applied
    from sharpmax.hf import apply as apply
    from sharpmax.hf import fold as fold
    from sharpmax.policies import load_policy as load_policy
    from sharpmax.probe.capture import capture as capture
    from sharpmax.probe.survey.probing import probe as probe
    from sharpmax.probe.watch.monitor import monitor as monitor
    from sharpmax.rows import RowStats as RowStats
    from sharpmax.rows import row_stats as row_stats
    from sharpmax.theory import horizon as horizon

__version__ = "0.1.0"

_homes = {
    "RowStats": "sharpmax.rows",
    "applied": "sharpmax.hf",
    "apply": "sharpmax.hf",
    "attention": "sharpmax.attention.sharp",
    "calibrate": "sharpmax.calibrate.calibration",
    "capture": "sharpmax.probe.capture:capture",
    "decode": "sharpmax.attention.decode:decode",
    "entropy": "sharpmax.attention.dense",
    "fold": "sharpmax.hf",
    "horizon": "sharpmax.theory",
    "load_policy": "sharpmax.policies",
    "monitor": "sharpmax.probe.watch.monitor:monitor",
    "normalisers": "sharpmax.attention.normalisers",
    "policies": "sharpmax.policies",
    "probe": "sharpmax.probe.survey.probing",
    "row_stats": "sharpmax.rows",
    "softmax": "sharpmax.attention.dense",
    "theory": "sharpmax.theory",
}

__all__ = [
    "RowStats",
    "applied",
    "apply",
    "attention",
    "calibrate",
    "capture",
    "decode",
    "entropy",
    "fold",
    "horizon",
    "load_policy",
    "monitor",
    "normalisers",
    "policies",
    "probe",
    "row_stats",
    "softmax",
    "theory",
]

# The rooms sharpmax.attention, sharpmax.calibrate and sharpmax.probe share their names with their main functions.
# Loading the (light) rooms above and letting go of the names makes these the functions whichever part is used first.
del globals()["attention"], globals()["calibrate"], globals()["probe"]

__getattr__, __dir__ = lazy_exports(__name__, _homes)
