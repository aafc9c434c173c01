"""`sharpmax horizon`: how many tokens until a head cannot be sharp, certified from weights and measured on prompts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from sharpmax.cli import options
from sharpmax.cli.options import LANGUAGE, add, device_named, dtype_named, files_given, policy_named, word_shown
from sharpmax.cli.report import finish
from sharpmax.cli.terminal import out_folder_if_used, print_table, progress, say, steps_shown
from sharpmax.errors import reject
from sharpmax.theory.bounds import whole


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    add(app, horizon, example="sharpmax horizon smollm2 --mass 0.5 --out horizon", panel=LANGUAGE)


def horizon(
    model: options.Model,
    policy: options.PolicyOption = None,
    mass: Annotated[
        float,
        options.value("W", options.WHAT, "The weight on one token that counts as sharp."),
    ] = 0.5,
    certified_only: Annotated[
        bool, options.flag("--certified-only", options.WHAT, "Weights alone, no prompts: nothing is measured.")
    ] = False,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "float32",
    out: options.Out = Path("horizon"),
    as_json: options.AsJson = False,
) -> None:
    """Say of every head how many tokens it can be sharp over: certified for any input, and measured on prompts.

    A certified horizon follows from the weights alone, and no input whatever passes it; where it lies further out than
    anyone will read it is called vacuous. A measured horizon is what prompts of growing size show, with its
    uncertainty, and says nothing of other inputs. Prompts of up to 1,024 tokens are read; sharpmax probe reads more.
    """
    from sharpmax.experiments.tables import check_consistent, horizon_tables
    from sharpmax.files import display_name
    from sharpmax.integrations.transformers.application import applied
    from sharpmax.lazy import require
    from sharpmax.models.language import load_language_model
    from sharpmax.probing.certified import certify
    from sharpmax.probing.horizons import measure_horizons
    from sharpmax.provenance import check_seed, typed
    from sharpmax.results import FILE_NAME, collect

    check_seed(seed)
    if not 0.0 < mass < 1.0:
        reject("--mass", mass, "a share strictly between 0 and 1")
    place, chosen = device_named(device), None if policy is None else policy_named(policy)
    kind = dtype_named(dtype, place)
    require("transformers", "hf", "sharpmax horizon")
    with progress() as note:
        note(f"loading {model}")
        language = load_language_model(model, device=place.type, dtype=kind)
    with (
        out_folder_if_used(out) as folder,
        applied(language.model, None if chosen is None else chosen.policy) as sharp,
    ):
        with steps_shown() as tell:
            certificate = certify(sharp, mass, lambda done, total: tell("certifying", done, total, ""))
            measured = None
            if not certified_only:
                measured = measure_horizons(
                    sharp,
                    language.tokenizer,
                    mass,
                    seed=seed,
                    progress=lambda done, total: tell("measuring", done, total, ""),
                )
                check_consistent(certificate, measured, sharp.dtype)
        name = display_name(model)
        setting = {
            "model": name,
            "policy": None if chosen is None else chosen.name,
            "device": place.type,
            "dtype": kind,
            "seed": seed,
        }
        tables = horizon_tables(certificate, measured, setting)
        command = typed(
            f"horizon {name}", mass=mass, certified_only=certified_only,
            policy=None if policy is None else word_shown(policy), device=place.type, dtype=kind, seed=seed, out=out,
        )  # fmt: skip
        results = collect(command, tables, seed=seed, files=files_given([policy]))
        saved = results.save(folder / FILE_NAME)
    finish(results, saved, _print, as_json=as_json)


def _print(tables: Mapping[str, Any]) -> None:
    from sharpmax.probing.horizons import LONGEST

    for sentence in tables["verdict"]:
        say(sentence)
    say()
    setting, measured = tables["setting"], tables["setting"]["prompts"] is not None
    columns = ["layer", "certified spread (least, median)", "certified horizon", "informative heads"]
    if measured:
        columns += ["measured spread (median, most)", "measured horizon", "heads never / falling / holding"]
    rows = []
    for number, layer in tables["layers"].items():
        certain, seen = layer["certified"], layer["measured"]
        row = [number, f"{certain['smallest']:,.1f}  {certain['median']:,.1f}", _tokens(certain["tokens"], "vacuous")]
        row.append(f"{certain['informative']} of {certain['heads']}")
        if seen is not None:
            row += [f"{seen['spread']:.1f}  {seen['widest']:.1f}", _tokens(seen["tokens"], "–")]
            row.append(f"{seen['before']} / {seen['at']} / {seen['beyond']}")
        rows.append(row)
    title = f"{setting['model']}: tokens until no token holds {100 * setting['mass']:g}% of the weight of a head"
    print_table(title, columns, rows)
    by = ", ".join(f"{name} {value:,.1f}" for name, value in tables["certified"]["median_by"].items())
    say(f"Certified spread in nats, median over heads: {tables['certified']['median']:,.1f}; by argument: {by}.")
    if measured:
        say(f"Measured spread in nats, median over heads: {tables['measured']['spread']:,.1f}{_first_to_fall(tables)}.")
        say(f"No prompt of more than {LONGEST:,} tokens was read; sharpmax probe MODEL reads longer ones.")
    say(f"Informative: {setting['rule']}.")
    say()


def _first_to_fall(tables: Mapping[str, Any]) -> str:
    """The measured horizons of the heads that fall first, each with its interval."""
    seen = [(name, one["measured"]) for name, one in tables["heads"].items() if one["measured"]["kind"] == "at"]
    told = [
        f"{name} at {_tokens(one['tokens'], '–')} ({_tokens(one['low'], 'before')} … {_tokens(one['high'], 'beyond')})"
        for name, one in sorted(seen, key=lambda pair: pair[1]["tokens"])[:3]
    ]
    return f"; measured horizons that come first, with 95% intervals: {', '.join(told)}" if told else ""


def _tokens(count: float | None, otherwise: str) -> str:
    # A horizon is the largest number of tokens that fits: it is never rounded up.
    return otherwise if count is None else f"{whole(count):,}"
