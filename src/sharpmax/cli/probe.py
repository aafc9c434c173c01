"""`sharpmax probe`: which heads of a model lose focus as inputs grow."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from sharpmax.cli import options
from sharpmax.cli.options import choice, policies_given, policies_named, resolve_device, sizes_from
from sharpmax.cli.run import check_extras, finish, out_folder
from sharpmax.cli.terminal import progress


def probe(
    context: typer.Context,
    model: options.Model,
    task: Annotated[str | None, options.task("kv,text")] = None,
    policy: options.PolicyOption = None,
    rows: Annotated[str, choice("last", "log", "all", help="Rows of a prompt to measure: last, log or all.")] = "last",
    text: options.TextFile = None,
    sizes: Annotated[str | None, options.sizes("up to the model's context")] = None,
    prompts: Annotated[int | None, options.prompts("12, fewer of long ones")] = None,
    seed: options.Seed = 0,
    device: options.ModelDevice = "auto",
    dtype: options.Dtype = "float32",
    out: options.Out = Path("probe"),
    draw: options.Draw = True,
    as_json: options.AsJson = False,
) -> None:
    """Find the attention heads that lose focus as inputs grow.

    The model reads prompts of growing size. A head disperses where the entropy of its last row rises with the
    number of tokens. Sizes up to 64 items (512 tokens of text) give a forecast of the larger ones, which are then
    measured. The task `text` reads plain text. The defaults take smollm2 about five minutes on two CPU cores.
    """
    from sharpmax.files import display_name
    from sharpmax.integrations.transformers.application import applied
    from sharpmax.probing.measurement import check_task
    from sharpmax.probing.probe import load_model
    from sharpmax.probing.probe import probe as probe_model
    from sharpmax.tasks.text import text_from_file

    tasks = None if task is None else [word.strip() for word in task.split(",")]
    for word in tasks or ():
        check_task(word)
    chosen_sizes = None if sizes is None else sizes_from(sizes, least=1)
    policy_name, chosen = next(iter(policies_named(policies_given(context)).items()), (None, None))
    plain = None if text is None else text_from_file(text)
    _, kind = resolve_device(context)
    check_extras("probe", ("transformers", "hf"), draw=draw)
    with progress() as show:
        show(f"loading {model}")
        language = load_model(model, device=context.params["device"], dtype=kind)
        folder = out_folder(context)
        with nullcontext() if chosen is None else applied(language.model, chosen):
            found = probe_model(
                language.model, language.tokenizer, name=display_name(language.name), tasks=tasks, sizes=chosen_sizes,
                prompts=prompts, rows=rows, text=plain, seed=seed, progress=show,
            )  # fmt: skip
    tables = found.tables()
    tables["setting"]["policy"] = policy_name
    finish(context, tables, folder)
