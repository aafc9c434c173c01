"""What a calibration ends in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharpmax.calibrate.leash import percent
from sharpmax.calibrate.strength import Candidate
from sharpmax.policies import PerHead

__all__ = ["CalibrationResult"]


@dataclass(frozen=True)
class CalibrationResult:
    """What was learned: the best policy, the best that can be folded, and all candidates."""

    candidates: Mapping[str, Candidate]
    """By kind, for the kinds that keep to the leash."""

    curves: Mapping[str, Sequence[Mapping[str, float]]]
    setting: Mapping[str, Any]
    before: Mapping[str, float]
    """The exam without any policy: `nll` and the share `right`."""

    @property
    def chosen(self) -> Candidate:
        """The candidate with the lowest loss on prompts that no step has seen."""
        return min(self.candidates.values(), key=lambda one: one.nll)

    @property
    def policy(self) -> PerHead:
        """The policy to use."""
        return self.chosen.policy

    @property
    def foldable(self) -> Candidate | None:
        """The candidate that can be folded into the weights."""
        return next((one for one in self.candidates.values() if one.foldable), None)

    def show(self) -> None:
        """Print the candidates, a line each."""
        print(self)

    def __str__(self) -> str:
        lines = [f"as it comes: {100 * self.before['right']:.1f}% right"]
        for kind, one in self.candidates.items():
            rises = ", ".join(f"{name} {percent(rise):+.2f}%" for name, rise in one.rises.items())
            mark = " (chosen)" if one is self.chosen else ""
            lines.append(f"{kind}: {100 * one.right:.1f}% right, {one.touched} heads, perplexity {rises}{mark}")
        return "\n".join(lines)

    def save(self, folder: str | Path) -> list[Path]:
        """Write the chosen policy and each candidate as files that `sharpmax.load_policy` reads."""
        written = [self.policy.save(Path(folder) / "policy.json")]
        return written + [
            one.policy.save(Path(folder) / f"policy-{kind}.json") for kind, one in self.candidates.items()
        ]
