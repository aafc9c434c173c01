"""`sharpmax evaluate`: a language model as it comes and under policies, on the same prompts and the same text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sharpmax.cli import options
from sharpmax.cli.options import LANGUAGE, add, device_named, dtype_named, files_given, policies_named, sizes_from
from sharpmax.cli.report import finish, require_drawing
from sharpmax.cli.terminal import bar, check_resume, out_folder, print_table, progress, say, stopped
from sharpmax.errors import reject

if TYPE_CHECKING:
    from sharpmax.report.tables import Table

_SIZES, _PROMPTS, _WINDOWS, _QUESTIONS = "8..64", 50, 3, 8


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    example = "sharpmax evaluate smollm2 --policy log-length:64 --policy smollm2 --task kv,houses --sizes 8..512"
    add(app, evaluate, example=example, panel=LANGUAGE)


def evaluate(
    model: options.Model,
    task: Annotated[str, options.task(options.tasks, several=True)] = "kv",
    policy: Annotated[list[str] | None, options.policy("none")] = None,
    text: options.TextFile = None,
    with_text: Annotated[
        bool, options.flag("--with-text/--no-text", options.WHAT, "Measure perplexity, or leave it out.")
    ] = True,
    lm_eval: Annotated[
        str | None,
        options.value("T,T", options.WHAT, "Tasks for EleutherAI's harness to run as well.", "--lm-eval"),
    ] = None,
    lm_eval_path: Annotated[
        Path | None,
        options.value("DIR", options.WHAT, "Folder with task files for the harness.", "--lm-eval-path"),
    ] = None,
    sizes: Annotated[str, options.sizes()] = _SIZES,
    prompts: Annotated[int, options.prompts()] = _PROMPTS,
    lengths: Annotated[
        str | None,
        options.value(
            "N,N", options.AMOUNT, "Tokens in a window of text.", show_default="2048,6144 where the model can"
        ),
    ] = None,
    windows: Annotated[
        int,
        options.value(
            "N", options.AMOUNT, "Windows of each length; two CPU cores take about 20 s for one of 6,144 tokens."
        ),
    ] = _WINDOWS,
    questions: Annotated[
        int,
        options.value("N", options.AMOUNT, "Chat questions whose own answers are scored too."),
    ] = _QUESTIONS,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "float32",
    out: options.Out = Path("evaluate"),
    resume: options.Resume = False,
    draw: options.Draw = True,
    as_json: options.AsJson = False,
) -> None:
    """Compare a language model as it comes with itself under policies: right answers, perplexity, time and memory.

    --policy may be given several times. The defaults are chosen for smollm2, one policy and two CPU cores to take less
    than ten minutes, half of it for text (see --no-text and --windows). What is known is kept in DIR/answers.json.
    """
    from sharpmax.experiments.evaluate.cells import FILE_NAME as ANSWERS
    from sharpmax.experiments.evaluate.plan import Plan, prepare
    from sharpmax.experiments.evaluate.tables import evaluate_tables, work
    from sharpmax.experiments.evaluate.variants import BASE
    from sharpmax.models.language import load_language_model
    from sharpmax.provenance import check_seed
    from sharpmax.results import FILE_NAME, collect
    from sharpmax.tasks.registry import get_task

    for name, value, least in (("prompts", prompts, 1), ("windows", windows, 1), ("questions", questions, 0)):
        if value < least:
            reject(f"--{name}", value, f"{least} or more")
    check_seed(seed)
    if text is not None and not with_text:
        reject("--text", repr(str(text)), "nothing together with --no-text", "give one of the two")
    if lm_eval_path is not None and lm_eval is None:
        reject("--lm-eval-path", repr(str(lm_eval_path)), "a folder together with --lm-eval")
    chosen = policies_named(policy or [], taken=[BASE])
    plan = Plan(
        arms={one.name: one.policy for one in chosen},
        calibrated_on={one.name: one.calibrated_on for one in chosen},
        tasks=tuple(get_task(word.strip()) for word in task.split(",")),
        sizes=tuple(sizes_from(sizes, least=1)),
        prompts=prompts,
        seed=seed,
        with_text=with_text,
        text=text,
        lengths=None if lengths is None else tuple(sizes_from(lengths, option="--lengths")),
        windows=windows,
        questions=questions,
        harness=() if lm_eval is None else tuple(name.strip() for name in lm_eval.split(",")),
        harness_path=lm_eval_path,
    )
    check_resume(resume, out, ANSWERS)
    place = device_named(device)
    kind = dtype_named(dtype, place)
    _require(draw=draw, harness=lm_eval is not None)
    with progress() as note:
        note(f"loading {model}")
        language = load_language_model(model, device=place.type, dtype=kind)
        note("checking every policy, size and length")
        material = prepare(language, plan)
    folder = out_folder(out)
    try:
        with bar("evaluating", work(language, plan, material)) as advance:
            tables = evaluate_tables(language, plan, material, folder, resume=resume, progress=advance)
    except KeyboardInterrupt:
        stopped(folder, ANSWERS)
        raise
    command = _typed(
        model, policy or [], task, sizes=sizes, prompts=prompts, text=text, lengths=lengths, windows=windows,
        questions=questions, no_text=not with_text, device=place.type, dtype=kind, seed=seed, out=out,
        lm_eval=lm_eval, lm_eval_path=lm_eval_path,
    )  # fmt: skip
    files = files_given([*(policy or []), *(word.strip() for word in task.split(","))], [text])
    results = collect(command, tables, seed=seed, files=files)
    finish(results, results.save(folder / FILE_NAME), _print, draw=draw, as_json=as_json)


def _require(*, draw: bool, harness: bool) -> None:
    """Ask for everything that could stop the run before it begins."""
    from sharpmax.lazy import require

    require("transformers", "hf", "sharpmax evaluate")
    require("scipy.stats", "fit", "sharpmax evaluate")
    if draw:
        require_drawing()
    if harness:
        require("lm_eval", "lm-eval", "--lm-eval")


def _typed(model: str, policies: Sequence[str], tasks: str, **options: Any) -> str:
    """The command line without anything of this machine."""
    from sharpmax.provenance import typed

    start = typed("evaluate")

    def option(name: str, value: Any) -> str:
        return typed("evaluate", **{name: value}).removeprefix(f"{start} ")

    def given(word: str) -> Any:
        return Path(word) if Path(word).exists() else word

    chosen = [option("policy", given(word)) for word in policies]
    listed = [option("task", given(word.strip())).removeprefix("--task ") for word in tasks.split(",")]
    words = [option("model", given(model)).removeprefix("--model "), *chosen, "--task", ",".join(listed)]
    return " ".join([start, *words, typed("evaluate", **options).removeprefix(start).strip()])


def _print(tables: Mapping[str, Any]) -> None:
    from sharpmax.report import evaluate as report
    from sharpmax.report.tables import named, present

    accuracies = [report.accuracy_table(tables, task) for task in named(tables, "accuracy")]
    others = report.perplexity_table(tables), report.cost_table(tables), report.harness_table(tables)
    for table in present(*accuracies, *others, report.summary_table(tables)):
        _print_grid(table)
    for sentence in (*report.headline(tables), *report.notes(tables)):
        say(sentence)
    say()


def _print_grid(grid: Table) -> None:
    rows = [[f"{cell.text} ({cell.small})" if cell.small else cell.text for cell in row] for row in grid.rows]
    heads = [f"{cell.text} {cell.small}".strip() for cell in grid.head]
    print_table(grid.title, heads, rows)
    say(grid.note)
