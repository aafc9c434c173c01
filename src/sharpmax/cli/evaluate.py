"""`sharpmax evaluate`: a language model with and without policies, on the same prompts and the same text."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from sharpmax.cli import options
from sharpmax.cli.options import check_engine, number, policies_given, policies_named, resolve_device, sizes_from
from sharpmax.cli.run import check_extras, check_resume, finish, out_folder, resumable
from sharpmax.cli.terminal import progress
from sharpmax.errors import reject


def evaluate(
    context: typer.Context,
    model: options.Model,
    task: Annotated[str, options.task()] = "kv",
    policy: Annotated[list[str] | None, options.policy("none")] = None,
    text: options.TextFile = None,
    with_text: Annotated[bool, typer.Option("--with-text/--no-text", help="Measure perplexity.")] = True,
    with_cost: Annotated[bool, typer.Option("--with-cost/--no-cost", help="Measure time and memory.")] = True,
    lm_eval: Annotated[str | None, typer.Option(metavar="T,T", help="Tasks of lm-evaluation-harness.")] = None,
    lm_eval_path: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of harness tasks.")] = None,
    sizes: Annotated[str, options.sizes()] = "8..64",
    prompts: Annotated[int, options.prompts()] = 50,
    lengths: Annotated[
        str | None, typer.Option(metavar="N,N", help="Tokens per text and ruler prompt.", show_default="2048,6144")
    ] = None,
    windows: Annotated[int, number("Text windows per length.")] = 3,
    questions: Annotated[int, number("Chat answers to score.", least=0)] = 8,
    seed: options.Seed = 0,
    device: options.ModelDevice = "auto",
    dtype: options.Dtype = "float32",
    engine: options.Engine = "local",
    workers: options.Workers = None,
    address: options.Address = None,
    out: options.Out = Path("evaluate"),
    resume: options.Resume = False,
    draw: options.Draw = True,
    as_json: options.AsJson = False,
) -> None:
    """Measure accuracy, perplexity, time and memory with policies.

    --policy may be repeated. With the defaults, smollm2 takes under ten minutes on two CPU cores, half of it for text.
    """
    from sharpmax.experiments.evaluate import BASE, Plan, evaluate_tables, prepare
    from sharpmax.experiments.evaluate import FILE_NAME as ANSWERS
    from sharpmax.models.language import load_language_model
    from sharpmax.tasks.registry import get_tasks

    if text is not None and not with_text:
        reject("--text", repr(str(text)), "nothing together with --no-text", "give one of the two")
    if lm_eval_path is not None and lm_eval is None:
        reject("--lm-eval-path", repr(str(lm_eval_path)), "a folder together with --lm-eval")
    check_engine(context)
    if device == "split" and engine == "ray":
        reject("--device", repr(device), "one device per cell with --engine ray")
    if workers is not None and engine != "ray":
        reject("--workers", workers, "a number together with --engine ray", "add --engine ray")
    plan = Plan(
        variants=policies_named(policies_given(context), BASE), tasks=get_tasks(task), prompts=prompts, seed=seed,
        sizes=tuple(sizes_from(sizes, least=1)), with_text=with_text, with_cost=with_cost, text=text,
        lengths=None if lengths is None else tuple(sizes_from(lengths, option="--lengths")), windows=windows,
        questions=questions, harness=() if lm_eval is None else tuple(name.strip() for name in lm_eval.split(",")),
        harness_path=lm_eval_path,
    )  # fmt: skip
    check_resume(context, ANSWERS)
    _, kind = resolve_device(context)
    check_extras("evaluate", ("transformers", "hf"), ("scipy.stats", "fit"), draw=draw)
    if lm_eval is not None:
        check_extras("evaluate --lm-eval", ("lm_eval", "lm-eval"))
    with progress() as note:
        note(f"loading {model}")
        language = load_language_model(model, device=context.params["device"], dtype=kind)
        note("checking every policy, size and length")
        plan = plan.for_tokenizer(language.tokenizer)
        material = prepare(language, plan)
    folder = out_folder(context)
    with resumable(folder, ANSWERS), progress() as show:
        tables = evaluate_tables(
            language, plan, material, folder, resume=resume, progress=partial(show, "evaluating"), engine=engine,
            workers=workers, address=address,
        )  # fmt: skip
    finish(context, tables, folder)
