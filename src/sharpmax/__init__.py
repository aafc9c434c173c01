"""sharpmax: measure, predict and fix softmax dispersion, the loss of focus of attention as inputs grow."""

from typing import TYPE_CHECKING

from sharpmax.lazy import lazy_exports

if TYPE_CHECKING:
    from sharpmax import normalisers as normalisers
    from sharpmax import policies as policies
    from sharpmax import tasks as tasks
    from sharpmax import theory as theory
    from sharpmax.calibration.calibrate import calibrate as calibrate
    from sharpmax.calibration.learnable import learnable as learnable
    from sharpmax.integrations.transformers import applied as applied
    from sharpmax.integrations.transformers import apply as apply
    from sharpmax.integrations.transformers import fold as fold
    from sharpmax.integrations.transformers import policy_of as policy_of
    from sharpmax.integrations.transformers import restore as restore
    from sharpmax.monitoring.monitor import monitor as monitor
    from sharpmax.ops.attention import attention as attention
    from sharpmax.ops.decode import decode as decode
    from sharpmax.ops.softmax import entropy as entropy
    from sharpmax.ops.softmax import softmax as softmax
    from sharpmax.policies import load_policy as load_policy
    from sharpmax.probing.capture import capture as capture
    from sharpmax.probing.probe import probe as probe
    from sharpmax.stats.dispatch import row_stats as row_stats
    from sharpmax.stats.statistics import RowStats as RowStats
    from sharpmax.theory import horizon as horizon

__version__ = "0.1.0"

_homes = {
    "RowStats": "sharpmax.stats.statistics",
    "applied": "sharpmax.integrations.transformers",
    "apply": "sharpmax.integrations.transformers",
    "attention": "sharpmax.ops.attention",
    "calibrate": "sharpmax.calibration.calibrate",
    "capture": "sharpmax.probing.capture",
    "decode": "sharpmax.ops.decode",
    "entropy": "sharpmax.ops.softmax",
    "fold": "sharpmax.integrations.transformers",
    "horizon": "sharpmax.theory",
    "learnable": "sharpmax.calibration.learnable",
    "load_policy": "sharpmax.policies",
    "monitor": "sharpmax.monitoring.monitor",
    "normalisers": "sharpmax.normalisers",
    "policies": "sharpmax.policies",
    "policy_of": "sharpmax.integrations.transformers",
    "probe": "sharpmax.probing.probe",
    "restore": "sharpmax.integrations.transformers",
    "row_stats": "sharpmax.stats.dispatch",
    "softmax": "sharpmax.ops.softmax",
    "tasks": "sharpmax.tasks",
    "theory": "sharpmax.theory",
}

__all__ = sorted(_homes)

__getattr__, __dir__ = lazy_exports(__name__, _homes)
