"""`sharpmax clrs evaluate`: arms answer questions of sizes they were trained on and of larger ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sharpmax.cli import options
from sharpmax.cli.answers import answer
from sharpmax.cli.ending import finish
from sharpmax.cli.reading import data_folder, device_named, dtype_named, files_given, sizes_from
from sharpmax.cli.report import require_drawing
from sharpmax.cli.terminal import bar, check_resume, out_folder, print_table, progress, say, stopped
from sharpmax.errors import reject
from sharpmax.provenance import shown

__all__ = ["evaluate"]


def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODELS", help="Folders that clrs train wrote, or models; the first is compared with."),
    ],
    algorithms: options.Algorithms = None,
    trace: Annotated[
        bool | None,
        options.flag(
            "--trace/--no-trace", options.WHAT, "Answers with the steps of the algorithm.", show_default="as trained"
        ),
    ] = None,
    dataset: options.Dataset = None,
    without: Annotated[
        Path | None,
        options.value("FILE", options.WHAT, "Ask nothing of this dataset: what models learned from."),
    ] = None,
    sizes: Annotated[str | None, options.sizes("those for tests")] = None,
    per_cell: options.PerCell = 100,
    longest: Annotated[
        int | None,
        options.value(
            "N",
            options.AMOUNT,
            "Leave out sizes with questions of more tokens, answers included.",
            show_default="what the models have room for",
        ),
    ] = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    tokens_at_once: Annotated[int, options.tokens_at_once("--batch-tokens")] = 65_536,
    shard: Annotated[
        str,
        options.value(
            "I/N", options.PLACE, "Do the I-th of N parts, alike but for I; the last to end puts them together."
        ),
    ] = "1/1",
    processes: options.Processes = 1,
    data: options.Data = None,
    out: options.Out = Path("clrs-evaluate"),
    resume: options.Resume = False,
    draw: options.Draw = True,
    as_json: options.AsJson = False,
) -> None:
    """Ask trained models for answers, greedily, and compare them: exact answers by algorithm and size.

    A model answers under the policy that is saved beside it. Every answer is kept in DIR as soon as it is given.
    """
    from sharpmax.experiments.clrs.arms import arms_named
    from sharpmax.experiments.clrs.data import Source, algorithms_from, examination, trained_sizes
    from sharpmax.experiments.clrs.exam import Exam
    from sharpmax.experiments.clrs.past import trainings
    from sharpmax.experiments.clrs.scores import exam_tables
    from sharpmax.experiments.clrs.store import Shard
    from sharpmax.experiments.folder import RUN
    from sharpmax.lazy import require
    from sharpmax.provenance import check_seed, typed
    from sharpmax.results import FILE_NAME, collect

    check_seed(seed)
    if tokens_at_once < 1:
        reject("--tokens-at-once", tokens_at_once, "1 or more")
    if longest is not None and longest < 1:
        reject("--longest", longest, "1 or more")
    part = Shard.parse(shard)
    wanted = None if sizes is None else sizes_from(sizes, least=1)
    chosen = None if algorithms is None else algorithms_from(algorithms)
    check_resume(resume, out, RUN)
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
        setting = {"data": source.to_dict(), "dtype": kind, "device": place.type}
        exam = Exam.fitting(arms, questions, tokens_at_once, setting, longest)
    folder = out_folder(out, "" if part.count == 1 else part.name)
    store = exam.store(folder, part, resume=resume)
    try:
        with bar("answering", exam.work(part)) as advance:
            exam.answer(store, folder, part, advance)
    except KeyboardInterrupt:
        stopped(folder, RUN)
        raise
    store.read()
    if missing := exam.missing(store):
        say(f"{missing:,} answers are left to other parts (--shard); the one that ends last puts all together")
        if as_json:
            answer({"missing": missing})
        return
    tables = exam_tables(exam, store, known or trained_sizes([], source.algorithms), seed) | {"training": training}
    command = typed(
        f"clrs evaluate {' '.join(shown(word) for word in models)}", algorithms=algorithms, sizes=sizes,
        per_cell=per_cell, longest=longest, trace=trace, no_trace=trace is False, dataset=dataset, without=without,
        tokens_at_once=tokens_at_once, device=place.type, dtype=dtype, seed=seed, out=out,
    )  # fmt: skip  # of the whole, whatever part this one was
    results = collect(command, tables, seed=seed, files=files_given([], [dataset, without]))
    finish(results, results.save(folder / FILE_NAME), print_exam, draw=draw, as_json=as_json)


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
