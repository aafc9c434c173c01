"""`python -m quality`: put mutants into rows, policies and theory, and print how many the tests notice."""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from quality.hunt import hunt
from quality.log import ROOT, Log
from quality.mutants import ROOMS, files, mutants_of
from quality.page import page_tables, terminal, with_tables
from quality.scores import covered, justified, mutation

LOG, COVERING = ROOT / "build" / "quality" / "mutants.jsonl", ROOT / "build" / "quality" / "covering.json"


def main() -> None:
    """Run, print, and with --record keep."""
    parser = argparse.ArgumentParser(prog="python -m quality", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every mutant, not a sample; an hour or so")
    parser.add_argument("--sample", type=int, default=200, help="how many mutants (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default: %(default)s)")
    parser.add_argument("--patience", type=float, default=30.0, help="seconds of tests for each (default: %(default)s)")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="stop then; the next run goes on; 0 only shows what is known"
    )
    parser.add_argument("--only", default="", help="mutants whose file, function or text holds this")
    parser.add_argument("--coverage", type=Path, help="the JSON report of coverage, to be shown beside")
    parser.add_argument("--record", action="store_true", help="write benchmarks/quality.json and docs/quality.md")
    given = parser.parse_args()

    every = [one for file in files(*ROOMS) for one in mutants_of(file) if given.only in one.key]
    chosen = every
    if not given.all and given.sample < len(every):
        chosen = sorted(random.Random(given.seed).sample(every, given.sample), key=lambda one: one.key)
    excused = {key for one in justified() for key in one.mutants}
    # In an order of its own, so that a run that is cut short is a fair sample.
    hunted = random.Random(given.seed).sample(left := [one for one in chosen if one.key not in excused], len(left))
    hunt(hunted, Log(LOG, given.patience), COVERING, given.minutes)

    log = Log(LOG, given.patience)
    rooms = mutation(chosen, log, excused)
    seed = "" if chosen is every else f", seed {given.seed}"
    tables: dict[str, Any] = {
        "sample": f"{rooms['all']['mutants']:,} of {len(every):,} mutants{seed}",
        "mutation": rooms,
        "left": sorted(one.key for one in hunted if (outcome := log.of(one)) is not None and not outcome.found),
    }
    if given.coverage is not None:
        tables["coverage"], tables["lacking"] = covered(given.coverage)
    print(terminal(tables))
    if given.record:
        words = [word for word in ("--all" * given.all, "--record", f"--patience {given.patience:g}") if word]
        _record(tables, f"make quality QUALITY='{' '.join(words)}'")


def _record(tables: dict[str, Any], command: str) -> None:
    # In a process of its own: here the package is not imported, so that mutants can be put into it.
    script = "import json; from sharpmax.provenance import provenance; print(json.dumps(provenance(None)))"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    saved = {"schema": 1, "command": command, "provenance": json.loads(told), "tables": tables}
    text = json.dumps(saved, indent=2, ensure_ascii=False) + "\n"
    (ROOT / "benchmarks" / "quality.json").write_text(text, encoding="utf-8")
    page = ROOT / "docs" / "quality.md"
    tabled = with_tables(page.read_text(encoding="utf-8"), page_tables(saved, justified()))
    page.write_text(tabled, encoding="utf-8")


if __name__ == "__main__":
    main()
