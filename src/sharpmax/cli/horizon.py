"""`sharpmax horizon`: up to how many tokens a head can be sharp, certified from weights and measured on prompts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from sharpmax.cli import options
from sharpmax.cli.options import policies_given, policies_named, resolve_device
from sharpmax.cli.run import check_extras, finish, out_folder
from sharpmax.cli.terminal import print_table, progress, say
from sharpmax.errors import reject
from sharpmax.theory.bounds import whole


def horizon(
    context: typer.Context,
    model: options.Model,
    policy: options.PolicyOption = None,
    mass: Annotated[float, typer.Option(metavar="W", help="Weight on one token that counts as sharp.")] = 0.5,
    certified_only: Annotated[bool, typer.Option("--certified-only", help="Use the weights only.")] = False,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "float32",
    out: options.Out = Path("horizon"),
    as_json: options.AsJson = False,
) -> None:
    """Find up to how many tokens each head can be sharp.

    A certified horizon follows from the weights and holds for every input; it is vacuous if it is longer than any
    realistic input. A measured horizon comes from prompts of up to 1,024 tokens, with its uncertainty;
    `sharpmax probe` measures longer ones.
    """
    from sharpmax.experiments.tables import check_consistent, horizon_tables
    from sharpmax.files import display_name
    from sharpmax.integrations.transformers.application import applied
    from sharpmax.models.language import load_language_model
    from sharpmax.probing.horizons import certify, measure_horizons

    if not 0.0 < mass < 1.0:
        reject("--mass", mass, "a share strictly between 0 and 1")
    name, chosen = next(iter(policies_named(policies_given(context)).items()), (None, None))
    place, kind = resolve_device(context)
    check_extras("horizon", ("transformers", "hf"))
    with progress() as show:
        show(f"loading {model}")
        language = load_language_model(model, device=place.type, dtype=kind)
        folder = out_folder(context)
        with applied(language.model, chosen) as sharp:
            certificate = certify(sharp, mass, partial(show, "certifying"))
            measured = None
            if not certified_only:
                reading = partial(show, "measuring")
                measured = measure_horizons(sharp, language.tokenizer, mass, seed=seed, progress=reading)
                check_consistent(certificate, measured, sharp.dtype)
    setting = {"model": display_name(model), "policy": name, "device": place.type, "dtype": kind, "seed": seed}
    tables = horizon_tables(certificate, measured, setting)
    finish(context, tables, folder, _print)


def _print(tables: Mapping[str, Any]) -> None:
    for sentence in tables["verdict"]:
        say(sentence)
    say()
    setting, rows = tables["setting"], []
    columns = ["layer", "certified spread", "certified horizon", "informative heads"]
    if tables["measured"] is not None:
        columns += ["measured spread", "measured horizon", "never / falling / holding"]
    for number, layer in tables["layers"].items():
        certified, measured = layer["certified"], layer["measured"]
        row = [number, f"{certified['median']:,.1f}", _tokens(certified["tokens"], "vacuous")]
        row.append(f"{certified['informative']} of {certified['heads']}")
        if measured is not None:
            row += [f"{measured['spread']:.1f}", _tokens(measured["tokens"])]
            row.append(f"{measured['before']} / {measured['at']} / {measured['beyond']}")
        rows.append(row)
    title = f"{setting['model']}: tokens until no token holds {100 * setting['mass']:g}% of the weight of a head"
    print_table(f"{title}; spread in nats, median over heads", columns, rows)
    say(f"Informative: {setting['rule']}.")


def _tokens(count: float | None, otherwise: str = "–") -> str:
    # A horizon is the largest number of tokens that fits: it is never rounded up.
    return otherwise if count is None else f"{whole(count):,}"
