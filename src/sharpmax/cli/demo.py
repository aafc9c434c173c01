"""`sharpmax demo`: dispersion and its cure on a small example."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sharpmax.cli.terminal import out_folder, print_table, progress, say, wrote

__all__ = ["add_to", "demo"]


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: sharpmax demo --out demo --seed 1")(demo)


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the figure and results.json.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Seed of the random logits, 0 or more.")] = 0,
) -> None:
    """Show in a few seconds how softmax loses the best of n items as n grows, and what brings it back."""
    from sharpmax.experiments.demo import dispersion_tables, what_to_see
    from sharpmax.experiments.provenance import typed
    from sharpmax.experiments.results import FILE_NAME, collect, load
    from sharpmax.report.figures import draw

    folder = out_folder(out)
    with progress() as note:
        note("sharpening rows of 16 … 16,384 items")
        tables = dispersion_tables(seed)
    saved = collect(typed("demo", out=out, seed=seed), tables, seed=seed).save(folder / FILE_NAME)
    _print(tables)
    with progress() as note:
        note("drawing")
        # Drawn from the file, as anybody can do again later.
        figures = draw(load(saved).tables, folder)
    wrote([*figures, saved])
    say()
    say(what_to_see(tables))


def _print(tables: dict[str, Any]) -> None:
    setting, theory = tables["setting"], tables["theory"]
    say(
        f"One query wants one of n items. Its logit lies {setting['margin']:g} nats above the others', which are "
        f"random within {setting['range']:g} nats. Means of {setting['draws']} draws."
    )
    say(
        f"Theory: with logits within {theory['spread']:g} nats, plain softmax can give half of the weight to one item "
        f"among {theory['horizon']:.0f} at most (sharpness horizon)."
    )
    say()
    arms = list(tables["weight"])
    for table, title, key, form in (
        ("weight", "weight of the best item (%); bound: most for plain softmax", "largest_weight", "#.3g"),
        ("entropy", "entropy (nats); bound: least for plain softmax", "least_entropy", ".3f"),
    ):
        rows = [
            [f"{int(n):,}", *(format(tables[table][arm][n]["mean"], form) for arm in arms), format(limit, form)]
            for n, limit in theory[key].items()
        ]
        print_table(title, ["items n", *arms, "bound"], rows)
