"""`sharpmax probe`: which heads of a model lose focus as inputs grow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sharpmax.cli import options
from sharpmax.cli.options import (
    LANGUAGE,
    add,
    device_named,
    dtype_named,
    files_given,
    policy_named,
    sizes_from,
    word_shown,
)
from sharpmax.cli.report import finish, require_drawing
from sharpmax.cli.terminal import out_folder_if_used, print_table, progress, say, steps_shown
from sharpmax.errors import reject

if TYPE_CHECKING:
    from sharpmax.probing.probe import ProbeResult


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    add(app, probe, example="sharpmax probe smollm2 --task kv --sizes 8..64 --out probe", panel=LANGUAGE)


def probe(
    model: options.Model,
    task: Annotated[str | None, options.task(options.tasks, several=True, shown="kv,text")] = None,
    policy: options.PolicyOption = None,
    rows: Annotated[
        str,
        options.value(
            "ROWS",
            options.WHAT,
            "Rows of a prompt that count: last, log or all (their mean).",
            autocompletion=options.words("last", "log", "all"),
        ),
    ] = "last",
    text: options.TextFile = None,
    sizes: Annotated[str | None, options.sizes("up to what the model is made for")] = None,
    prompts: Annotated[int | None, options.prompts("12, of long ones fewer")] = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "float32",
    out: options.Out = Path("probe"),
    draw: options.Draw = True,
    as_json: options.AsJson = False,
) -> None:
    """Say which attention heads of a model lose focus as inputs grow, where that begins and what comes next.

    The model reads prompts of growing size. Of each head the entropy of the last row is followed: where it rises with
    the number of tokens, the head disperses. Sizes up to 64 items (512 tokens of text) give a forecast of the larger
    ones, which are then measured. The further task `text` reads plain text. The defaults take smollm2 about five
    minutes on two CPU cores.
    """
    from sharpmax.experiments.tables import probe_under, probed_tables
    from sharpmax.lazy import require
    from sharpmax.probing.capture import check_choice
    from sharpmax.probing.probe import check_task, load_model
    from sharpmax.provenance import check_seed, typed
    from sharpmax.results import FILE_NAME, collect
    from sharpmax.tasks.text import text_from_file

    check_seed(seed)
    check_choice(rows)
    if prompts is not None and prompts < 1:
        reject("--prompts", prompts, "1 or more")
    tasks = None if task is None else [word.strip() for word in task.split(",")]
    for word in tasks or ():
        check_task(word)
    chosen_sizes = None if sizes is None else sizes_from(sizes, least=1)
    named = None if policy is None else policy_named(policy)
    plain = None if text is None else text_from_file(text)
    place = device_named(device)
    kind = dtype_named(dtype, place)
    require("transformers", "hf", "sharpmax probe")
    if draw:
        require_drawing()
    with progress() as note:
        note(f"loading {model}")
        language = load_model(model, device=place.type, dtype=kind)
    with out_folder_if_used(out) as folder:
        with steps_shown() as tell:
            found = probe_under(
                language, None if named is None else named.policy, tasks=tasks, sizes=chosen_sizes, prompts=prompts,
                rows=rows, text=plain, seed=seed, progress=tell,
            )  # fmt: skip
        tables = probed_tables(found, None if named is None else named.name)
        command = typed(
            f"probe {tables['setting']['model']}", task=_each_shown(task), sizes=sizes,
            policy=_each_shown(policy), prompts=prompts, rows=rows, text=text, device=place.type, dtype=kind,
            seed=seed, out=out,
        )  # fmt: skip
        results = collect(command, tables, seed=seed, files=files_given([policy, *(tasks or [])], [text]))
        saved = results.save(folder / FILE_NAME)
    finish(results, saved, lambda _: _print(found), draw=draw, as_json=as_json)


def _each_shown(words: str | None) -> str | None:
    """Names and paths with commas between them, without anything of this machine."""
    return None if words is None else ",".join(word_shown(word.strip()) for word in words.split(","))


def _print(found: ProbeResult) -> None:
    for sentence in found.verdict:
        say(sentence)
    for sheet in found.sheets():
        say()
        print_table(sheet.title, sheet.columns, sheet.rows)
        say(sheet.note)
    say()
