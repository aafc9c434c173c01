"""`sharpmax clrs`: fine-tune on algorithms as text, and evaluate at larger sizes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from sharpmax.cli import options
from sharpmax.cli.options import choice, data_folder, number, policies_given, policy_named, resolve_device, sizes_from
from sharpmax.cli.run import check_extras, check_resume, finish, out_folder, print_report, resumable, show_results
from sharpmax.cli.terminal import bar, progress, say
from sharpmax.errors import reject


def train(
    context: typer.Context,
    model: options.Model = "smollm2",
    policy: Annotated[str, options.policy()] = "none",
    learn_policy: Annotated[
        str | None,
        typer.Option(
            metavar="KIND", help="Learn constant, length, entropy, rows or ssmax.", autocompletion=options.Kinds
        ),
    ] = None,
    entropy_band: Annotated[
        str | None, typer.Option(metavar="LOW:HIGH", help="Keep the entropy of heads between these · ln n.")
    ] = None,
    algorithms: options.Algorithms = None,
    trace: Annotated[bool, typer.Option("--trace", help="Answers include the algorithm's steps.")] = False,
    dataset: options.Dataset = None,
    largest: Annotated[int | None, number("Largest training size.", show_default="by algorithm")] = None,
    lr: options.LearningRate = 5e-4,
    policy_lr: Annotated[float, typer.Option(metavar="X", help="Peak learning rate of the policy.")] = 1e-2,
    batch_tokens: Annotated[int, number("Tokens per step, over devices.")] = 65_536,
    row_tokens: Annotated[int, number("Tokens per packed row.", least=2)] = 512,
    weigh: Annotated[str, choice("Average over tokens or answers.", "tokens", "answers")] = "tokens",
    per_cell: options.PerCell = 2000,
    cell_text: Annotated[int | None, number("Text per algorithm and size.", show_default="all")] = None,
    steps: Annotated[int | None, options.steps("by --epochs")] = None,
    epochs: Annotated[float | None, typer.Option(metavar="X", help="Passes over the data.", show_default="1")] = None,
    minutes: Annotated[float | None, typer.Option(metavar="X", help="End after so many minutes.")] = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.TrainingDtype = "auto",
    tokens_at_once: Annotated[int, options.tokens_at_once()] = 16_384,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Less memory for a third more compute.")
    ] = False,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the layers with torch.")] = False,
    processes: options.Processes = 1,
    data: options.Data = None,
    out: options.Out = Path("clrs-train"),
    save_every: Annotated[int, number("Steps between checkpoints.")] = 200,
    resume: options.Resume = False,
    as_json: options.AsJson = False,
) -> None:
    """Train a language model (scratch:10m is a new one), with or without a policy."""
    from sharpmax.experiments.clrs.data import Source, algorithms_from, training_examples
    from sharpmax.experiments.clrs.scratch import is_scratch, scratch_model
    from sharpmax.experiments.clrs.training import MODEL, NONE, FineTuneRecipe, forget_states, prepare, trained_tables
    from sharpmax.experiments.run_folder import RUN
    from sharpmax.files import display_name
    from sharpmax.lazy import require
    from sharpmax.models.language import load_language_model
    from sharpmax.results import FILE_NAME, load

    if steps is not None and epochs is not None:
        reject("--epochs", epochs, "nothing together with --steps", "give one of the two")
    chosen = None if policy == NONE else policy_named(*policies_given(context))
    recipe = FineTuneRecipe(
        policy=None if chosen is None else chosen.policy, policy_name=NONE if chosen is None else chosen.name,
        learn=learn_policy, band=_band(entropy_band), minutes=minutes, steps=steps,
        epochs=1.0 if epochs is None else epochs, batch_tokens=batch_tokens,
        row_tokens=row_tokens, tokens_at_once=tokens_at_once, weigh=weigh, rate=lr, policy_rate=policy_lr,
        checkpointing=gradient_checkpointing, compiled=compiled, save_every=save_every, seed=seed,
    )  # fmt: skip
    check_resume(context, RUN)
    place, precision = resolve_device(context)
    source = Source(algorithms_from(algorithms), per_cell, trace, seed, dataset, cell_text, largest)
    accelerate = require("accelerate", "hf", "sharpmax clrs train")
    state = accelerate.PartialState(cpu=place.type == "cpu")
    with progress() as note:
        if not is_scratch(model):
            note(f"loading {model}")
            language = load_language_model(model)
        with state.main_process_first():
            examples = training_examples(source, data_folder(data), processes=processes, note=note)
        if is_scratch(model):
            language = scratch_model(model, examples, seed)
        prepared = prepare(
            language, examples, source, recipe, model=display_name(model), bfloat16=precision == "bfloat16", note=note
        )  # fmt: skip
    # The processes of one training write to one folder, and the first of them speaks for all.
    folder = out_folder(context, "" if state.is_main_process else f"process-{state.process_index}")
    if state.is_main_process:
        prepared.claim(folder, resume=resume)
    saved = folder / FILE_NAME
    if resume and saved.is_file():
        say(f"{folder} is complete")
        show_results(context, load(saved), _print_training)
        return
    with resumable(folder, RUN), progress() as show:
        tables = trained_tables(
            prepared, folder, device=place, bfloat16=precision == "bfloat16", resume=resume,
            progress=lambda step, total, remark: show("training", step, total, remark),
        )  # fmt: skip
    if state.is_main_process:
        finish(context, tables, folder, _print_training, files=[folder / MODEL])
        forget_states(folder)


def _band(text: str | None) -> tuple[float, float] | None:
    """Two numbers from "0.05:0.7"."""
    if text is None:
        return None
    try:
        low, high = map(float, text.split(":"))
    except ValueError:
        low, high = 1.0, 0.0
    if not 0.0 <= low < high <= 1.0:
        reject("--entropy-band", repr(text), "two numbers from 0 to 1, as 0.05:0.7")
    return low, high


def _print_training(tables: Mapping[str, Any]) -> None:
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
        rate = speed["model_flops_per_second"] / 1e12
        say(f"{speed['tokens_per_second']:,.0f} tokens/s, {rate:.3g} TFLOP/s by 6·N·D")


def evaluate(
    context: typer.Context,
    models: Annotated[list[str], typer.Argument(metavar="MODELS", help="Folders of clrs train, or models.")],
    algorithms: options.Algorithms = None,
    trace: Annotated[
        bool | None,
        typer.Option("--trace/--no-trace", help="Answers include the algorithm's steps.", show_default="as trained"),
    ] = None,
    dataset: options.Dataset = None,
    without: Annotated[Path | None, typer.Option(metavar="FILE", help="Leave out questions of this dataset.")] = None,
    sizes: Annotated[str | None, options.sizes("test sizes")] = None,
    per_cell: options.PerCell = 100,
    longest: Annotated[
        int | None, number("Most tokens of question and answer.", show_default="the models' context")
    ] = None,
    score: Annotated[bool, typer.Option("--score", help="Score answers; decode nothing.")] = False,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    tokens_at_once: Annotated[int, options.tokens_at_once("--batch-tokens")] = 65_536,
    processes: options.Processes = 1,
    data: options.Data = None,
    out: options.Out = Path("clrs-evaluate"),
    resume: options.Resume = False,
    draw: options.Draw = True,
    as_json: options.AsJson = False,
) -> None:
    """Compare exact answers of trained models by algorithm and size.

    Decoding is greedy. A model answers under the policy that is saved beside it.
    """
    from sharpmax.experiments.clrs.data import Source, algorithms_from, test_examples, trained_sizes
    from sharpmax.experiments.clrs.evaluation import Evaluation, evaluation_tables, trainings, variants_named
    from sharpmax.experiments.run_folder import RUN

    if score and trace:
        reject("--score", "--trace beside it", "answers without steps", "leave --score out")
    wanted = None if sizes is None else sizes_from(sizes, least=1)
    chosen = None if algorithms is None else algorithms_from(algorithms)
    check_resume(context, RUN)
    place, kind = resolve_device(context)
    check_extras("clrs evaluate", ("transformers", "hf"), ("scipy.stats", "fit"), draw=draw)
    with progress() as note:
        note("loading models")
        variants = variants_named(list(models), device=place.type, dtype=kind)
        training = trainings(list(models), variants)
        runs = [one.run for one in variants if one.run is not None]
        known = trained_sizes(runs)
        steps = any(run["data"].get("trace") for run in runs) if trace is None else trace
        source = Source(chosen or tuple(known) or algorithms_from(None), per_cell, steps, seed, dataset)
        questions = test_examples(source, wanted, data_folder(data), without=without, processes=processes, note=note)
        setting = {"data": source.to_dict(), "dtype": kind, "device": place.type, **({"scored": True} if score else {})}
        evaluation = Evaluation.fitting(variants, questions, tokens_at_once, setting, longest)
    folder = out_folder(context)
    store = evaluation.store(folder, resume=resume)
    total = len(evaluation.variants) * len(evaluation.questions)
    with resumable(folder, RUN), bar("answering", total) as advance:
        evaluation.answer(store, advance)
    tables = evaluation_tables(evaluation, store, known or trained_sizes([], source.algorithms), seed) | {
        "training": training
    }
    finish(context, tables, folder, _print_answers)


def _print_answers(tables: Mapping[str, Any]) -> None:
    print_report()(tables)
    for name, speed in tables["speed"].items():
        if speed["tokens_per_second"] is not None:
            say(f"{name}: {speed['tokens']:,} tokens generated, {speed['tokens_per_second']:,.0f} per second")
