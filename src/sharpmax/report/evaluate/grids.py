"""The tables of `sharpmax evaluate`: arms below each other, sizes beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sharpmax.report.evaluate.facts import LEVEL, accuracy, arms, base, columns, policies, tasks
from sharpmax.report.grid import NOTHING, Cell, Grid
from sharpmax.report.tables import Tables, readable, sizes
from sharpmax.report.texts import text_name
from sharpmax.report.words import capital, count, milliseconds, plural, points, probability, share

__all__ = ["accuracy_grids", "cost_grid", "harness_grid", "paired_grids", "perplexity_grid"]

_MARK = "*"


def accuracy_grids(tables: Tables) -> list[Grid]:
    """For each task the share of right answers of every arm at every size."""
    with readable("the accuracies", tables):
        return [_accuracy(tables, task) for task in tasks(tables)]


def paired_grids(tables: Tables) -> list[Grid]:
    """For each task the prompts that a policy gained and lost, and the test of it."""
    with readable("the comparisons", tables):
        return [_paired(tables, task) for task in tasks(tables) if policies(tables)]


def perplexity_grid(tables: Tables) -> Grid | None:
    """Perplexity of every arm on text and on the model's own answers, and how far it rises."""
    if not tables.get("perplexity"):
        return None
    with readable("perplexity", tables):
        known, table = columns(tables), tables["perplexity"]
        return Grid(
            "Perplexity",
            "Lower is better. With the rise against the model as it comes, and its 95% interval over the same texts. "
            + _texts(tables),
            [Cell("arm"), *(Cell(text_name(column)) for column in known)],
            [
                [Cell(arm), *(_perplexity(table[arm].get(c), arm == base(tables)) for c in known)]
                for arm in arms(tables)
            ],
        )


def cost_grid(tables: Tables) -> Grid | None:
    """Time and memory of every arm."""
    if not tables.get("cost"):
        return None
    with readable("the costs", tables):
        setting, table = tables["setting"], tables["cost"]
        memory = any(cells["peak_mib"] is not None for cells in table.values())
        held = "memory of its tensors" if setting["device"] == "cuda" else "memory of the whole process"
        return Grid(
            "Time and memory",
            f"Reading {count(setting['context'])} tokens, then saying one more with a filled cache, on "
            f"{setting['device']} in {setting['dtype']}; medians of {plural(setting['rounds'], 'round')} in which all "
            "arms take turns. With ratios to the model as it comes."
            + (f" Memory: the most that was held meanwhile ({held})." if memory else ""),
            [Cell("arm"), Cell("reading (ms)"), Cell("one token (ms)"), *([Cell("memory (MiB)")] if memory else [])],
            [
                [
                    Cell(arm),
                    *(
                        Cell(milliseconds(cells[f"{k}_ms"]), f"{cells[f'{k}_ratio']:.2f}×")
                        for k in ("prefill", "decode")
                    ),
                    *([Cell(count(cells["peak_mib"]))] if memory else []),
                ]
                for arm, cells in table.items()
            ],
        )


def harness_grid(tables: Tables) -> Grid | None:
    """What EleutherAI's harness found of every arm."""
    table = tables.get("harness")
    if not table:
        return None
    with readable("the harness", tables):
        names = [(task, metric) for task, metrics in table[base(tables)].items() for metric in metrics]
        return Grid(
            "EleutherAI's harness",
            "With the standard errors that the harness gives.",
            [Cell("arm"), *(Cell(task, metric) for task, metric in names)],
            [[Cell(arm), *(_harness(table[arm][task][metric]) for task, metric in names)] for arm in table],
        )


def _accuracy(tables: Tables, task: str) -> Grid:
    known, about = sizes(accuracy(tables, task, base(tables))), tables["setting"]["tasks"][task]
    tests = tables[f"paired/{task}"]
    rows = []
    for arm in arms(tables):
        cells = accuracy(tables, task, arm)
        rows.append([Cell(arm), *(_right(cells[n], tests.get(arm, {}).get(n)) for n in known)])
    return Grid(
        f"Right answers (%): {task}",
        f"{capital(about['summary'])}. {_prompts(tables)} of each size, the same for every arm; with Wilson's 95% "
        f"intervals. {_MARK} differs from the model as it comes (McNemar's exact test, p < {LEVEL:g}, not corrected "
        "for the number of comparisons).",
        [Cell("arm"), *(Cell(f"n = {count(n)}") for n in known)],
        rows,
    )


def _prompts(tables: Tables) -> str:
    return plural(tables["setting"]["prompts"], "prompt")


def _right(cell: Mapping[str, Any], test: Mapping[str, Any] | None) -> Cell:
    shown = test is not None and test["p"] < LEVEL
    return Cell(
        share(cell["mean"]) + (_MARK if shown else ""), f"{share(cell['low'])}–{share(cell['high'])}", strong=shown
    )


def _paired(tables: Tables, task: str) -> Grid:
    table = tables[f"paired/{task}"]
    known = sizes(*table.values())
    return Grid(
        f"Prompts gained and lost: {task}",
        f"Of {_prompts(tables)} of each size: answered rightly under the policy alone (+) and by the model as it comes "
        "alone (−), with McNemar's exact test.",
        [Cell("arm"), *(Cell(f"n = {count(n)}") for n in known)],
        [[Cell(arm), *(_discordant(table[arm].get(n)) for n in known)] for arm in table],
    )


def _discordant(cell: Mapping[str, Any] | None) -> Cell:
    if cell is None:
        return Cell(NOTHING)
    return Cell(f"+{cell['gained']} −{cell['lost']}", probability(cell["p"]), strong=cell["p"] < LEVEL)


def _perplexity(cell: Mapping[str, Any] | None, plain: bool) -> Cell:
    if cell is None:
        return Cell(NOTHING)
    if plain:
        return Cell(f"{cell['mean']:.2f}")
    between = "" if cell["low"] is None else f", {points(cell['low'], 2)} to {points(cell['high'], 2)}"
    return Cell(f"{cell['mean']:.2f}", f"{points(cell['rise'], 2)}%{between}")


def _texts(tables: Tables) -> str:
    setting = tables["setting"]
    said = []
    if text := setting.get("text"):
        windows = plural(setting["windows"], "window")
        said.append(f"Text: {text['source']} (fingerprint {text['fingerprint']}), up to {windows} of each length.")
    if setting.get("questions"):
        asked = plural(setting["questions"], "ordinary question")
        said.append(f"Own answers: what the model as it comes says to {asked}.")
    return " ".join(said)


def _harness(cell: Mapping[str, Any]) -> Cell:
    error = cell["sem"]
    return Cell(f"{cell['mean']:.4g}", "" if error is None else f"± {error:.2g}")
