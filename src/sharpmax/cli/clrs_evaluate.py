"""`sharpmax clrs evaluate`: arms answer questions of sizes they were trained on and of larger ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sharpmax.cli.clrs_options import data_folder, dtype_named, shown
from sharpmax.cli.options import device_named, sizes_from
from sharpmax.cli.report import draw_and_name, require_drawing
from sharpmax.cli.terminal import bar, out_folder, print_table, progress, say, wrote
from sharpmax.errors import reject

__all__ = ["evaluate"]


def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL…", help="Folders that clrs train wrote, or models; the first is compared with."),
    ],
    algorithms: Annotated[
        str | None, typer.Option(metavar="A,A,…", help="Algorithms to ask for; without it those trained on.")
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(metavar="N,N", help="Sizes: 8..64 doubles, 8,64 lists; without it those for tests.")
    ] = None,
    per_cell: Annotated[int, typer.Option(help="Questions of each algorithm and size.")] = 100,
    trace: Annotated[
        bool | None,
        typer.Option("--trace/--no-trace", help="Answers with the steps of the algorithm, or as trained without it."),
    ] = None,
    dataset: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Questions of your own instead of generated ones.")
    ] = None,
    without: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Ask nothing of this dataset: what models learned from.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for generated questions; the user's cache without it.")
    ] = None,
    processes: Annotated[int, typer.Option(help="Processes that generate questions.")] = 1,
    batch_tokens: Annotated[int, typer.Option(help="Tokens a device holds at once, answers included.")] = 65_536,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="bfloat16, float32 or auto: bfloat16 on a GPU.")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the questions.")] = 0,
    shard: Annotated[
        str, typer.Option(metavar="I/N", help="Do the I-th of N parts; the last to end puts them together.")
    ] = "1/1",
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for answers, results and page.")] = Path("clrs-exam"),
    resume: Annotated[bool, typer.Option("--resume", help="Ask only what is missing in --out.")] = False,
    draw: Annotated[bool, typer.Option("--draw/--no-draw", help="Draw figures and page, or save numbers only.")] = True,
) -> None:
    """Ask trained models for answers, greedily, and compare them: exact answers by algorithm and size.

    A model answers under the policy that is saved beside it. Every answer is kept in DIR as soon as it is given.
    """
    from sharpmax.experiments.clrs.arms import arms_named
    from sharpmax.experiments.clrs.data import Source, algorithms_from, examination, trained_sizes
    from sharpmax.experiments.clrs.exam import Exam, fitting
    from sharpmax.experiments.clrs.past import trainings
    from sharpmax.experiments.clrs.scores import exam_tables
    from sharpmax.experiments.clrs.store import Shard
    from sharpmax.experiments.provenance import check_seed, typed
    from sharpmax.experiments.results import FILE_NAME, collect
    from sharpmax.lazy import require

    check_seed(seed)
    if batch_tokens < 1:
        reject("--batch-tokens", batch_tokens, "1 or more")
    part = Shard.parse(shard)
    wanted = None if sizes is None else sizes_from(sizes, least=1)
    chosen = None if algorithms is None else algorithms_from(algorithms)
    place = device_named(device)
    kind = dtype_named(dtype, place)
    for package, extra in (("transformers", "hf"), ("scipy.stats", "fit")):
        require(package, extra, "sharpmax clrs evaluate")
    if draw:
        require_drawing()
    with progress() as note:
        note("loading models")
        arms = arms_named(models, device=place.type, dtype=kind)
        training = trainings(models, arms)
        runs = [arm.run for arm in arms if arm.run is not None]
        known = trained_sizes(runs)
        steps = any(run["data"].get("trace") for run in runs) if trace is None else trace
        source = Source(chosen or tuple(known) or algorithms_from(None), per_cell, steps, seed, dataset)
        questions = examination(
            source, wanted, data_folder(data), without=without, processes=processes, note=note
        )  # fmt: skip
        questions, too_long = fitting(arms, questions)
    setting = {"data": source.to_dict(), "dtype": kind, "device": place.type, "too_long": too_long}
    exam = Exam(arms, questions, batch_tokens, setting)
    folder = out_folder(out)
    store = exam.store(folder, part, resume=resume)
    try:
        with bar("answering", exam.work(part)) as advance:
            exam.answer(store, folder, part, advance)
    except KeyboardInterrupt:
        say(f"stopped; the same command with --resume asks only what is missing in {folder}")
        raise
    store.read()
    if missing := exam.missing(store):
        say(f"{missing:,} answers are left to other parts (--shard); the one that ends last puts all together")
        return
    tables = exam_tables(exam, store, known or trained_sizes([], source.algorithms), seed) | {"training": training}
    command = typed(
        f"clrs evaluate {' '.join(shown(word) for word in models)}", algorithms=algorithms, sizes=sizes,
        per_cell=per_cell, trace=trace, no_trace=trace is False, dataset=dataset, without=without,
        batch_tokens=batch_tokens, device=place.type, dtype=dtype, seed=seed,
        shard=None if part.count == 1 else shard, out=out,
    )  # fmt: skip
    saved = collect(command, tables, seed=seed).save(folder / FILE_NAME)
    print_exam(tables)
    wrote([saved])
    if draw:
        draw_and_name(saved)


def print_exam(tables: Mapping[str, Any]) -> None:
    """Print right final answers by algorithm and size, their means, and what the page says of them first and last."""
    from sharpmax.report.clrs import summary
    from sharpmax.report.clrs.facts import group_names, groups

    arms = list(tables["accuracy"])
    rows = [row for name in tables["majority"] for row in _rows(tables, arms, name)]
    print_table("Right final answers (%)", ["algorithm", "size", "trained on", *arms, "most frequent answer"], rows)
    names, titles = groups(tables), group_names(tables)
    lines = []
    for table, what in (("means", "final answer"), ("means_exact", "whole text")):
        lines += [[arm, what, *(_cell(tables[table][arm][name]) for name in names)] for arm in arms]
    print_table("Means over algorithms (%)", ["arm", "exact", *(titles[name] for name in names)], lines)
    for sentence in (*summary.verdict(tables), *summary.care(tables)):
        say(sentence)
    for arm, speed in tables["speed"].items():
        if speed["tokens_per_second"] is not None:
            say(f"{arm}: {speed['tokens']:,} tokens generated, {speed['tokens_per_second']:,.0f} per second")
    say()


def _rows(tables: Mapping[str, Any], arms: Sequence[str], name: str) -> list[list[str]]:
    trained = tables["setting"]["sizes"][name]["trained"]
    return [
        [
            name, size, "yes" if int(size) in trained else "no",
            *(_cell(tables["accuracy"][arm][name][size]) for arm in arms), f"{majority['mean']:.1f}",
        ]
        for size, majority in tables["majority"][name].items()
    ]  # fmt: skip


def _cell(value: Mapping[str, float]) -> str:
    return f"{value['mean']:.1f} ({value['low']:.1f}–{value['high']:.1f})"
