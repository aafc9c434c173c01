"""`sharpmax clrs`: fine-tune on algorithms as text, and evaluate at larger sizes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from sharpmax.cli import options
from sharpmax.cli.options import data_folder, number, policies_given, resolve_device, sizes_from
from sharpmax.cli.run import (
    check_extras,
    check_resume,
    command_line,
    finish,
    out_folder,
    print_report,
    resumable,
    show_results,
)
from sharpmax.cli.terminal import bar, progress, say

_PolicyRate = Annotated[float, typer.Option("--policy-lr", metavar="X", help="Peak learning rate of the policy.")]
_BatchTokens = Annotated[int, number("Tokens per step, over devices.", "--batch-tokens")]
_SaveEvery = Annotated[int, number("Steps between checkpoints.", "--save-every")]
_MIXED = 4.0  # small models are bound by kernel launches: padding costs little
_MINUTES = typer.Option("--minutes", metavar="X", help="Stop after this many minutes.")
_VARIANT = "none, a policy, learn:KIND or band:LOW:HIGH."


def train(
    context: typer.Context,
    model: options.Model = "smollm2",
    policy: Annotated[str, typer.Option(metavar="V", help=_VARIANT)] = "none",
    algorithms: options.Algorithms = None,
    dataset: options.Dataset = None,
    sizes: Annotated[str | None, options.sizes("by algorithm")] = None,
    lr: options.LearningRate = 5e-4,
    policy_lr: _PolicyRate = 1e-2,
    batch_tokens: _BatchTokens = 65_536,
    per_cell: options.PerCell = 2000,
    steps: Annotated[int | None, options.steps("one pass")] = None,
    minutes: Annotated[float | None, _MINUTES] = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.TrainingDtype = "auto",
    tokens_at_once: Annotated[int, options.tokens_at_once()] = 16_384,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the layers with torch.")] = False,
    processes: options.Processes = 1,
    data: options.Data = None,
    out: options.Out = Path("clrs-train"),
    save_every: _SaveEvery = 200,
    resume: options.Resume = False,
    as_json: options.AsJson = False,
) -> None:
    """Train a model, or a new one (scratch:10m), with or without a policy."""
    from sharpmax.experiments.clrs import training
    from sharpmax.experiments.clrs.data import Documents, Source, algorithms_from
    from sharpmax.experiments.run_folder import RUN
    from sharpmax.lazy import require
    from sharpmax.models.language import context_of, load_language_model
    from sharpmax.results import FILE_NAME, load

    recipe = training.FineTuneRecipe(
        steps=steps, minutes=minutes, batch_tokens=batch_tokens, tokens_at_once=tokens_at_once, rate=lr,
        policy_rate=policy_lr, compiled=compiled, save_every=save_every, seed=seed,
    )  # fmt: skip
    recipe = recipe.of_variant(next(iter(policies_given(context)), "none"), "--policy")
    check_resume(context, RUN)
    place, precision = resolve_device(context)
    chosen = None if sizes is None else tuple(sizes_from(sizes, least=1))
    source = Source(algorithms_from(algorithms), per_cell, seed, chosen, dataset)
    state = require("accelerate", "hf", "sharpmax clrs train").PartialState(cpu=place.type == "cpu")
    with progress() as note, state.main_process_first():
        examples = source.examples("train", data_folder(data), processes=processes, note=note)
        note(f"loading {model}")
        if training.is_scratch(model):
            language = training.scratch_model(model, training.scratch_tokenizer(examples), seed)
        else:
            language = load_language_model(model)
        documents = Documents.of(language.tokenizer, examples, context_of(language.model), note)
        prepared = training.FineTuning(language, documents, source.to_dict(), recipe, place, precision == "bfloat16")
    # All processes of a training write to one folder; the main process prints and saves.
    folder = out_folder(context, "" if state.is_main_process else f"process-{state.process_index}")
    if state.is_main_process:
        prepared.claim(folder, resume=resume)
    saved = folder / FILE_NAME
    if resume and saved.is_file():
        say(f"{folder} is complete")
        show_results(context, load(saved), _print_training)
        return
    with resumable(folder, RUN), progress() as show:
        tables = prepared.train(folder, resume=resume, progress=lambda *done: show("training", *done))
    if state.is_main_process:
        finish(context, tables, folder, _print_training, files=[folder / training.MODEL])
        training.forget_states(folder)


def _print_training(tables: Mapping[str, Any]) -> None:
    setting, speed, curve = tables["setting"], tables["speed"]["tokens_per_second"], tables["curve"]
    dropped = setting["examples"]["dropped"]
    say(
        f"{setting['model']}, {setting['policy_describe']}: {setting['steps']:,} steps of "
        f"{setting['batch_tokens']:,} tokens, {setting['epochs']:.2f} passes over "
        f"{setting['examples']['count']:,} examples"
        + (f", of which {dropped:,} were too long for the model and left out" if dropped else "")
    )
    say(f"loss on answers: {curve[0][1]:.3f} at first, {curve[-1][1]:.3f} at the end")
    if speed is not None:
        say(f"{speed:,.0f} tokens/s")


def evaluate(
    context: typer.Context,
    models: Annotated[list[str], typer.Argument(metavar="MODELS", help="Outputs of clrs train, or models.")],
    algorithms: options.Algorithms = None,
    dataset: options.Dataset = None,
    sizes: Annotated[str | None, options.sizes("test sizes")] = None,
    per_cell: options.PerCell = 100,
    longest: Annotated[
        int | None, number("Maximum tokens of question and answer.", show_default="the models' context")
    ] = None,
    score: Annotated[bool, typer.Option("--score", help="Score expected answers; decode nothing.")] = False,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    tokens_at_once: Annotated[int, options.tokens_at_once()] = 65_536,
    processes: options.Processes = 1,
    data: options.Data = None,
    out: options.Out = Path("clrs-evaluate"),
    resume: options.Resume = False,
    draw: options.Draw = True,
    as_json: options.AsJson = False,
) -> None:
    """Compare exact answers of trained models by algorithm and size.

    Decoding is greedy. A model is tested with the policy that is saved beside it.
    """
    from sharpmax.experiments.clrs.data import Source, algorithms_from
    from sharpmax.experiments.clrs.evaluation import ANSWERS, Evaluation, trained_sizes, training_of, variants_named
    from sharpmax.experiments.run_folder import RUN, RunStore
    from sharpmax.results import FILE_NAME

    wanted = None if sizes is None else tuple(sizes_from(sizes, least=1))
    chosen = algorithms_from(algorithms)
    check_resume(context, RUN)
    place, kind = resolve_device(context)
    check_extras("clrs evaluate", ("transformers", "hf"), ("scipy.stats", "fit"), draw=draw)
    with progress() as note:
        note("loading models")
        variants = variants_named(list(models), device=place.type, dtype=kind)
        training = {
            one.name: training_of(Path(word))
            for word, one in zip(models, variants, strict=True)
            if one.run is not None and (Path(word) / FILE_NAME).is_file()
        }
        if algorithms is None:
            chosen = tuple(trained_sizes(variants)) or chosen
        source = Source(chosen, per_cell, seed, wanted, dataset)
        questions = source.examples("test", data_folder(data), processes=processes, note=note)
        setting = {"data": source.to_dict(), "dtype": kind, "device": place.type, **({"scored": True} if score else {})}
        evaluation = Evaluation(variants, questions, tokens_at_once, setting, longest)
    folder = out_folder(context)
    store = RunStore(folder, ANSWERS)
    store.claim(evaluation.identity(), resume=resume)
    with resumable(folder, RUN), bar("answering", len(variants) * len(evaluation.questions)) as advance:
        evaluation.run(store, advance)
    finish(context, evaluation.tables(store, seed) | {"training": training}, folder, _print_answers)


def _print_answers(tables: Mapping[str, Any]) -> None:
    print_report(tables)
    for name, speed in tables["speed"].items():
        if speed["tokens_per_second"] is not None:
            say(f"{name}: {speed['tokens']:,} tokens generated, {speed['tokens_per_second']:,.0f} per second")


def compare(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="scratch:1m, :10m, :30m, or any model.")
    ] = "scratch:10m",
    variants: Annotated[str, typer.Option(metavar="V,V", help=_VARIANT, show_default="these five")] = (
        "none,paper,learn:ssmax,learn:rows,band:0.05:0.7"
    ),
    algorithms: options.Algorithms = None,
    sizes: Annotated[str, options.sizes("4 to 16")] = "4,5,6,7,8,9,10,11,12,13,14,15,16",
    test_sizes: Annotated[str, typer.Option(metavar="N,N", help="Sizes to test at.")] = "4,8,12,16,17,18,20,24,32",
    lr: options.LearningRate = 1e-3,
    policy_lr: _PolicyRate = 2e-3,
    batch_tokens: _BatchTokens = 24_576,
    per_cell: options.PerCell = 2000,
    test_per_cell: Annotated[int, number("Test questions per algorithm and size.")] = 100,
    steps: Annotated[int | None, options.steps("as many as fit in --minutes")] = None,
    minutes: Annotated[float, _MINUTES] = 5.0,
    seeds: options.Seeds = 2,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    tokens_at_once: Annotated[int, options.tokens_at_once()] = 24_576,
    processes: options.Processes = 1,
    data: options.Data = None,
    out: options.Out = Path("clrs-compare"),
    save_every: _SaveEvery = 1000,
    resume: options.Resume = False,
    draw: options.Draw = True,
    as_json: options.AsJson = False,
) -> None:
    """Train and test variants of one model for the same number of steps.

    Each variant and seed runs in a process. The others are compared with the first variant.
    """
    from sharpmax.experiments.clrs.comparison import VariantComparison
    from sharpmax.experiments.clrs.data import Source, algorithms_from
    from sharpmax.experiments.clrs.training import FineTuneRecipe
    from sharpmax.experiments.run_folder import RUN, RunStore

    check_resume(context, RUN)
    place, precision = resolve_device(context)
    extras = ("accelerate", "hf"), ("joblib", "reproduce"), ("scipy.stats", "fit")
    check_extras("clrs compare", *extras, draw=draw)
    recipe = FineTuneRecipe(
        steps=steps, minutes=None if steps is not None else minutes, batch_tokens=batch_tokens, mixed=_MIXED,
        tokens_at_once=tokens_at_once, rate=lr, policy_rate=policy_lr, save_every=save_every, seed=seed,
    )  # fmt: skip
    words = tuple(word.strip() for word in variants.split(","))
    for word in words:
        recipe.of_variant(word, "--variants")
    names = algorithms_from(algorithms)
    trained, tested = sizes_from(sizes, least=4), sizes_from(test_sizes, least=4, option="--test-sizes")
    folder = out_folder(context)
    comparison = VariantComparison(
        model, words, tuple(range(seed, seed + seeds)), recipe, Source(names, per_cell, seed, tuple(trained)),
        Source(names, test_per_cell, seed, tuple(tested)), folder, data_folder(data), place.type,
        precision == "bfloat16", command_line(context),
    )  # fmt: skip
    store = RunStore(folder)
    store.claim(comparison.identity(), resume=resume)
    with resumable(folder, RUN), progress() as show:
        comparison.training.examples("train", comparison.data, processes=processes, note=show)
        comparison.testing.examples("test", comparison.data, processes=processes, note=show)
        comparison.run(store, show)
    finish(context, comparison.tables(store, seed), folder, _print_answers)
