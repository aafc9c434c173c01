"""What a probe ends in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from sharpmax.errors import reject
from sharpmax.lazy import require
from sharpmax.probe.survey.findings import Findings
from sharpmax.probe.survey.summary import Sheet, as_html, as_text, forecast_sheet, layers_sheet
from sharpmax.probe.survey.tables import chain_table, forecast_table, heads_table, layers_table
from sharpmax.probe.survey.verdict import verdict
from sharpmax.results import FILE_NAME, collect

__all__ = ["ProbeResult"]


@dataclass(frozen=True, eq=False)
class ProbeResult:
    """Which heads of a model lose focus as inputs grow, where, and how well that can be foreseen."""

    setting: Mapping[str, Any]
    findings: Mapping[str, Findings]
    """By task."""

    @property
    def verdict(self) -> list[str]:
        """Three sentences that say it all."""
        return verdict(str(self.setting["model"]), list(self.findings.values()))

    def heads(self, task: str | None = None) -> dict[str, Any]:
        """Every head by its name, "layer.head", on one task (the first unless told): kind, slope, curve, forecast."""
        return heads_table(self._of(task))

    def tables(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        tables: dict[str, Any] = {"setting": dict(self.setting), "verdict": self.verdict}
        for task, found in self.findings.items():
            tables[f"heads/{task}"] = heads_table(found)
            tables[f"layers/{task}"] = layers_table(found)
            if (errors := forecast_table(found)) is not None:
                tables[f"forecast/{task}"] = errors
            tables[f"chain/{task}"] = chain_table(found)
        return tables

    def sheets(self) -> list[Sheet]:
        """The small tables that are shown."""
        found = [sheet for one in self.findings.values() for sheet in (layers_sheet(one), forecast_sheet(one))]
        return [sheet for sheet in found if sheet is not None]

    def show(self) -> None:
        """Print the verdict and the small tables."""
        print(self)

    def __str__(self) -> str:
        return "\n\n".join(["\n".join(self.verdict), *map(as_text, self.sheets())])

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in self.verdict)
        return f"<ol>{sentences}</ol>" + "".join(map(as_html, self.sheets()))

    def to_frame(self) -> Any:
        """A pandas frame: a row for each task, layer, head and size."""
        pandas = require("pandas", "frame", "ProbeResult.to_frame")
        rows = []
        for task, found in self.findings.items():
            for name, about in heads_table(found).items():
                layer, _, head = name.partition(".")
                own = {"task": task, "layer": int(layer), "head": int(head), "kind": about["kind"]}
                own |= {key: about[key] for key in ("slope", "slope_low", "slope_high")}
                own["horizon"] = about["horizon"]["tokens"]
                for size, values in about["curve"].items():
                    foretold = about["forecast"].get(size, {})
                    more = {f"forecast_{key}": foretold.get(key) for key in ("entropy", "top")}
                    rows.append({**own, "size": int(size), **values, **more})
        return pandas.DataFrame(rows)

    def save(self, folder: str | Path) -> Path:
        """Write `results.json` into a folder, as `sharpmax probe` does, and name it; `sharpmax report` draws it."""
        results = collect(f"sharpmax.probe({self.setting['model']})", self.tables(), seed=self.setting["seed"])
        return results.save(Path(folder) / FILE_NAME)

    def _of(self, task: str | None) -> Findings:
        if task is None:
            return next(iter(self.findings.values()))
        if task not in self.findings:
            reject("task", repr(task), f"one of {list(self.findings)}")
        return self.findings[task]
