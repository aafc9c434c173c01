"""`sharpmax clrs`: fine-tune on algorithms as text, and evaluate at larger sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sharpmax.cli import options
from sharpmax.cli.json_output import answer
from sharpmax.cli.options import (
    TRAINING,
    add,
    add_group,
    data_folder,
    device_named,
    dtype_named,
    files_given,
    policy_named,
    sizes_from,
    word_shown,
)
from sharpmax.cli.report import finish, require_drawing
from sharpmax.cli.terminal import bar, check_resume, out_folder, print_table, progress, say, steps_shown, stopped
from sharpmax.errors import reject


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
    from sharpmax.experiments.clrs.data import Source, algorithms_from, examination, trained_sizes
    from sharpmax.experiments.clrs.evaluation import Exam, Shard, arms_named
    from sharpmax.experiments.clrs.scores import exam_tables, trainings
    from sharpmax.experiments.run_folder import RUN
    from sharpmax.files import display_name
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
        f"clrs evaluate {' '.join(display_name(word) for word in models)}", algorithms=algorithms, sizes=sizes,
        per_cell=per_cell, longest=longest, trace=trace, no_trace=trace is False, dataset=dataset, without=without,
        tokens_at_once=tokens_at_once, device=place.type, dtype=dtype, seed=seed, out=out,
    )  # fmt: skip  # of the whole, whatever part this one was
    results = collect(command, tables, seed=seed, files=files_given([], [dataset, without]))
    finish(results, results.save(folder / FILE_NAME), print_exam, draw=draw, as_json=as_json)


def print_exam(tables: Mapping[str, Any]) -> None:
    """Print right final answers by algorithm and size, their means, and what the page says of them first and last."""
    from sharpmax.report.clrs import group_names, groups, headline, notes

    arms = list(tables["accuracy"])
    rows = [row for name in tables["majority"] for row in _rows(tables, arms, name)]
    print_table(
        "Right final answers (%)", ["algorithm", "size", "trained on", *arms, "most frequent answer"], rows, labels=2
    )
    names, titles = groups(tables), group_names(tables)
    lines = []
    for table, what in (("means", "final answer"), ("means_exact", "whole text")):
        lines += [[arm, what, *(_cell(tables[table][arm][name]) for name in names)] for arm in arms]
    print_table("Means over algorithms (%)", ["arm", "exact", *(titles[name] for name in names)], lines, labels=2)
    for sentence in (*headline(tables), *notes(tables)):
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


def add_to(app: typer.Typer) -> None:
    """Add the command and its parts."""
    clrs = add_group(
        app,
        "clrs",
        "Fine-tune on CLRS-Text with and without sharp attention, and measure larger sizes.",
        example="sharpmax clrs train --policy paper --out clrs-paper",
        panel=TRAINING,
    )
    add(clrs, train, example="sharpmax clrs train smollm2 --policy paper --per-cell 500 --out clrs-paper")
    add(clrs, evaluate, example="sharpmax clrs evaluate clrs-none clrs-paper --out clrs-exam")


def train(
    model: options.Model = "smollm2",
    policy: Annotated[str, options.policy()] = "none",
    learn_policy: Annotated[
        str | None,
        options.value(
            "KIND",
            options.WHAT,
            "Learn a policy per head as well: constant, length, entropy or rows.",
            autocompletion=options.kinds,
        ),
    ] = None,
    algorithms: options.Algorithms = None,
    trace: Annotated[bool, options.flag("--trace", options.WHAT, "Answers with the steps of the algorithm.")] = False,
    dataset: options.Dataset = None,
    largest: Annotated[
        int | None,
        options.value(
            "N", options.WHAT, "Learn from sizes up to N; larger ones are asked about.", show_default="each algorithm's"
        ),
    ] = None,
    lr: options.LearningRate = 5e-4,
    policy_lr: Annotated[
        float,
        options.value("X", options.LEARNING, "Learning rate of a learned policy at its highest."),
    ] = 1e-2,
    batch_tokens: Annotated[
        int,
        options.value("N", options.LEARNING, "Tokens of a step, on all devices together."),
    ] = 65_536,
    row_tokens: Annotated[
        int,
        options.value(
            "N", options.LEARNING, "Tokens of a packed row; longer examples have rows of twice the room, and so on."
        ),
    ] = 512,
    weigh: Annotated[
        str,
        options.value(
            "WHAT",
            options.LEARNING,
            "What counts alike in the loss: tokens of answers, or answers.",
            autocompletion=options.words("tokens", "answers"),
        ),
    ] = "tokens",
    per_cell: options.PerCell = 2000,
    cell_text: Annotated[
        int | None,
        options.value("N", options.AMOUNT, "Characters of each algorithm and size at most.", show_default="all"),
    ] = None,
    steps: Annotated[int | None, options.steps("as many as --epochs takes")] = None,
    epochs: Annotated[
        float | None,
        options.value("X", options.AMOUNT, "Passes over the examples.", show_default="1 without --steps"),
    ] = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    tokens_at_once: Annotated[int, options.tokens_at_once()] = 16_384,
    gradient_checkpointing: Annotated[
        bool, options.flag("--gradient-checkpointing", options.PLACE, "Less memory for a third more work.")
    ] = False,
    compiled: Annotated[
        bool, options.flag("--compile", options.PLACE, "Let torch compile the layers: faster after about a minute.")
    ] = False,
    processes: options.Processes = 1,
    data: options.Data = None,
    out: options.Out = Path("clrs-train"),
    save_every: Annotated[int, options.value("N", options.OUTPUT, "Steps between states to go on from.")] = 200,
    resume: options.Resume = False,
    as_json: options.AsJson = False,
) -> None:
    """Fine-tune a language model on classical algorithms as text, with a policy in every attention row or without.

    Two runs that differ in --policy read the same examples in the same order from the same weights. The loss counts
    answers alone. For several GPUs: accelerate launch -m sharpmax.cli clrs train …
    """
    from sharpmax.experiments.clrs.data import Source, algorithms_from, training_examples
    from sharpmax.experiments.clrs.recipe import NONE, Recipe
    from sharpmax.experiments.clrs.trained import prepare, trained_tables
    from sharpmax.experiments.clrs.training import MODEL, forget_states
    from sharpmax.experiments.run_folder import RUN
    from sharpmax.files import display_name
    from sharpmax.lazy import require
    from sharpmax.models.language import load_language_model
    from sharpmax.provenance import typed
    from sharpmax.results import FILE_NAME, collect, load

    if steps is not None and epochs is not None:
        reject("--epochs", epochs, "nothing together with --steps", "give one of the two")
    chosen = None if policy == NONE else policy_named(policy)
    recipe = Recipe(
        policy=None if chosen is None else chosen.policy, policy_name=NONE if chosen is None else chosen.name,
        learn=learn_policy, steps=steps, epochs=1.0 if epochs is None else epochs, batch_tokens=batch_tokens,
        row_tokens=row_tokens, tokens_at_once=tokens_at_once, weigh=weigh, rate=lr, policy_rate=policy_lr,
        checkpointing=gradient_checkpointing, compiled=compiled, save_every=save_every, seed=seed,
    )  # fmt: skip
    check_resume(resume, out, RUN)
    place = device_named(device)
    bfloat16 = dtype_named(dtype, place, without="float16") == "bfloat16"
    source = Source(algorithms_from(algorithms), per_cell, trace, seed, dataset, cell_text, largest)
    accelerate = require("accelerate", "hf", "sharpmax clrs train")
    state = accelerate.PartialState(cpu=place.type == "cpu")
    name = display_name(model)
    with progress() as note:
        note(f"loading {model}")
        language = load_language_model(model)
        with state.main_process_first():
            examples = training_examples(source, data_folder(data), processes=processes, note=note)
        prepared = prepare(language, examples, source, recipe, model=name, bfloat16=bfloat16, note=note)
    # The processes of one training write to one folder, and the first of them speaks for all.
    folder = out_folder(out, "" if state.is_main_process else f"process-{state.process_index}")
    if state.is_main_process:
        prepared.claim(folder, resume=resume)
    saved = folder / FILE_NAME
    if resume and saved.is_file():
        say(f"{folder} is complete")
        finish(load(saved), None, print_trained, as_json=as_json)
        return
    try:
        with steps_shown() as tell:
            tables = trained_tables(
                prepared, folder, device=place, bfloat16=bfloat16, resume=resume,
                progress=lambda step, total, remark: tell("training", step, total, remark),
            )  # fmt: skip
    except KeyboardInterrupt:
        stopped(folder, RUN)
        raise
    if not state.is_main_process:
        return
    command = typed(
        f"clrs train {name}", policy=word_shown(policy), learn_policy=learn_policy, algorithms=algorithms,
        per_cell=per_cell, cell_text=cell_text, largest=largest, trace=trace, dataset=dataset, steps=steps,
        epochs=epochs, batch_tokens=batch_tokens, row_tokens=row_tokens, tokens_at_once=tokens_at_once, weigh=weigh,
        lr=lr, policy_lr=policy_lr, gradient_checkpointing=gradient_checkpointing, compile=compiled,
        device=place.type, dtype=dtype, seed=seed, out=out,
    )  # fmt: skip
    results = collect(command, tables, seed=seed, files=files_given([policy], [dataset]))
    results.save(saved)
    forget_states(folder)
    finish(results, saved, print_trained, files=[folder / MODEL], as_json=as_json)


def print_trained(tables: Mapping[str, Any]) -> None:
    """Say what came of a training."""
    setting, speed, curve = tables["setting"], tables["speed"], tables["curve"]
    dropped = setting["examples"]["dropped"]
    say(
        f"{setting['model']}, {setting['policy_describe']}: {setting['steps']:,} steps of "
        f"{setting['batch_tokens']:,} tokens, {setting['epochs']:.2f} passes over "
        f"{setting['examples']['count']:,} examples"
        + (f", of which {dropped:,} were too long for the model and left out" if dropped else "")
    )
    say(f"loss on answers: {curve[0][1]:.3f} at first, {curve[-1][1]:.3f} at the end")
    if speed["tokens_per_second"] is not None:
        share = "" if speed["share"] is None else f", {100 * speed['share']:.0f}% of the GPU's measured matrix rate"
        rate = speed["model_flops_per_second"] / 1e12
        say(f"{speed['tokens_per_second']:,.0f} tokens/s, {rate:.3g} TFLOP/s by 6·N·D{share}")
