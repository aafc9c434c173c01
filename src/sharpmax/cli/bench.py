"""`sharpmax bench`: speed, memory and accuracy on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sharpmax.cli import answer, options
from sharpmax.cli.options import number, resolve_device
from sharpmax.cli.run import check_extras, command_line, draw_saved, finish, out_folder
from sharpmax.cli.terminal import print_table, progress, say, wrote
from sharpmax.errors import MissingExtraError, UnsupportedError, reject

if TYPE_CHECKING:
    import torch

_MODEL = "smollm2"


def bench(
    context: typer.Context,
    cpu: Annotated[bool, typer.Option("--cpu/--gpu", help="Device to measure.")] = True,
    probe: Annotated[bool, typer.Option("--probe", help="Measure the cost of capturing rows.")] = False,
    monitor: Annotated[bool, typer.Option("--monitor", help="Measure a monitor's AUROC and cost.")] = False,
    training: Annotated[bool, typer.Option("--training", help="Measure the cost per training step.")] = False,
    host: Annotated[bool, typer.Option("--host", help="Measure host time per call.")] = False,
    generate: Annotated[
        str | None, typer.Option("--generate", metavar="MODEL", help="Measure transformers' generate, or `random`.")
    ] = None,
    policy: Annotated[list[str] | None, options.policy("four")] = None,
    together: Annotated[int | None, number("Prompts at a time.", show_default="1 and 16")] = None,
    static: Annotated[bool, typer.Option("--static/--no-static", help="Also a compiled static cache.")] = True,
    length: Annotated[int | None, number("Keys.", show_default="16384, --probe 8192, others 2048")] = None,
    repeat: Annotated[int | None, number("Rounds.", show_default="5, --gpu 20, --probe 3, --monitor 12")] = None,
    prompts: Annotated[int, options.prompts()] = 100,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "float32",
    out: Annotated[Path | None, options.out("print only")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Time row statistics and attention next to PyTorch's own.

    A case that disagrees with the float64 reference is not timed, and the exit code is 1. --gpu adds the training step
    and decode, next to the fastest kernel, and draws a figure. --probe measures smollm2 with and without capture.
    --monitor measures false alarms, detected mistakes and time per token. --generate measures prefill and time per
    token with and without policies, on a GPU also at 8,192 tokens. --device and --dtype belong to the last three.
    """
    given = [
        *(["--probe"] * probe), *(["--monitor"] * monitor), *(["--gpu"] * (not cpu)), *(["--host"] * host),
        *(["--generate"] * (generate is not None)), *(["--training"] * training),
    ]  # fmt: skip
    if len(given) > 1:
        reject(given[0], f"both {given[0]} and {given[1]}", "one of the two")
    unused = {"prompts": monitor, "device": monitor or host or generate or training, "dtype": monitor or generate}
    unused |= dict.fromkeys(("policy", "together", "static"), bool(generate))
    context.params.update({name: None for name, used in unused.items() if not used})
    if training:
        _bench_training(context)
    elif monitor:
        _bench_monitor(context)
    elif generate is not None or host:
        _bench_latency(context)
    elif not cpu:
        _bench_gpu(context)
    else:
        _bench_cpu(context, probe=probe)


def _bench_cpu(context: typer.Context, *, probe: bool) -> None:
    from sharpmax.experiments.benchmarks import cpu as bench

    rounds, length = (bench.PROBE_ROUNDS, bench.PROBE_LENGTH) if probe else (bench.ROUNDS, bench.FULL_LENGTH)
    make: Callable[..., dict[str, Any]] = bench.probe_tables if probe else bench.cpu_tables
    asked = _amounts(context, rounds, length)
    folder = None if context.params["out"] is None else out_folder(context)
    with progress() as note:
        tables = make(**asked, seed=context.params["seed"], note=note)
    finish(context, tables, folder, _print_cases, name="probe.json" if probe else "cpu.json")
    _fail_if([name for name, entry in tables["bench"].items() if not entry.get("agrees", True)])


def _bench_gpu(context: typer.Context) -> None:
    import torch

    from sharpmax.experiments.benchmarks.gpu import ROUNDS, gpu_entries, save, slug, with_origin
    from sharpmax.experiments.benchmarks.gpu_inputs import FULL_LENGTH

    device, seed = _gpu(), context.params["seed"]
    asked = _amounts(context, ROUNDS, FULL_LENGTH)
    folder = None if context.params["out"] is None else out_folder(context)
    with progress() as note:
        entries = gpu_entries(device, **asked, seed=seed, note=note)
    if not context.params["as_json"]:
        _print_gpu(entries)
    known = with_origin(entries, command=command_line(context), seed=seed)
    if folder is not None:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        saved = save(folder / f"{slug(name)}.json", known)
        wrote([saved])
        # A machine with a GPU need not have what draws, and its time is not to be lost.
        try:
            wrote(draw_saved(saved))
        except MissingExtraError as missing:
            say(f"No figure: {missing}; then: sharpmax report {saved}")
    if context.params["as_json"]:
        answer(known)
    _fail_if([f"{one['kind']} {one['case']}" for one in entries if not one["agrees"]])


def _bench_monitor(context: typer.Context) -> None:
    from sharpmax.experiments.benchmarks.monitor import CONTEXT, ROUNDS, monitor_tables
    from sharpmax.models.language import load_language_model

    given = context.params
    check_extras("bench --monitor", ("scipy.stats", "fit"))
    place, kind = resolve_device(context)
    asked = _amounts(context, ROUNDS, CONTEXT)
    folder = None if given["out"] is None else out_folder(context)
    with progress() as note:
        note(f"loading {_MODEL}")
        language = load_language_model(_MODEL, device=place.type, dtype=kind)
        tables = monitor_tables(
            language, limit=given["prompts"], seed=given["seed"], rounds=asked["repeat"], context=asked["length"],
            note=note,
        )  # fmt: skip
    finish(context, tables, folder, _print_monitor, name="monitor.json")


def _bench_latency(context: typer.Context) -> None:
    from sharpmax.experiments.benchmarks import latency
    from sharpmax.experiments.benchmarks.gpu import slug

    given = context.params
    place, kind = resolve_device(context)
    given["dtype"] = None if given["generate"] is None else kind
    repeat = given["repeat"] = given["repeat"] or latency.ROUNDS
    folder = None if given["out"] is None else out_folder(context)
    with progress() as note:
        if given["generate"] is None:
            tables = latency.host_tables(place, repeat, given["seed"], note)
        else:
            small = place.type != "cuda"
            contexts = latency.SMALL_CONTEXTS if small else latency.CONTEXTS
            batches = latency.SMALL_BATCHES if small else latency.BATCHES
            note(f"loading {given['generate']}")
            tables = latency.generate_tables(
                latency.model_for(given["generate"], place, kind, given["seed"]), given["generate"],
                policies=given["policy"] or latency.POLICIES,
                contexts=contexts if given["length"] is None else (given["length"],),
                batches=batches if given["together"] is None else (given["together"],),
                tokens=latency.SMALL_TOKENS if small else latency.TOKENS, compiled=given["static"] and not small,
                repeat=repeat, seed=given["seed"], note=note,
            )  # fmt: skip
    what = "host" if given["generate"] is None else "generate"
    finish(context, tables, folder, _print_latency, name=f"{what}-{slug(tables['setting']['device'])}.json")
    _fail_if([name for name, entry in tables["bench"].items() if not entry.get("agrees", True)])


def _print_latency(tables: Mapping[str, Any]) -> None:
    setting = tables["setting"]
    title = f"{setting.get('model', 'calls')} on {setting['device']}, {setting['dtype']}, rounds: {setting['rounds']}"
    forms = {"_ms": ".2f", "_us": ".1f", "ratio": ".2f"}
    named = dict.fromkeys(name for entry in tables["bench"].values() for name in entry)
    columns = [(name, form) for name in named for unit, form in forms.items() if name.endswith(unit)]
    rows = []
    for case, entry in tables["bench"].items():
        wanted = "; ".join(f"{one.replace('_', ' ')} {_target(entry, one)}" for one in entry["targets"])
        rows.append([case, *(_number(entry, name, form) for name, form in columns), wanted or "–"])
    print_table(title, ["case", *(name.replace("_", " ") for name, _ in columns), "target"], rows)


def _bench_training(context: typer.Context) -> None:
    from sharpmax.experiments.benchmarks.training import LENGTH, ROUNDS, training_tables

    place, _ = resolve_device(context)
    context.params.update(dtype=None)
    asked = _amounts(context, ROUNDS, LENGTH if place.type == "cuda" else 64)
    folder = None if context.params["out"] is None else out_folder(context)
    with progress() as note:
        tables = training_tables(**asked, device=place, seed=context.params["seed"], note=note)
    finish(context, tables, folder, _print_training, name="training.json")


def _print_training(tables: Mapping[str, Any]) -> None:
    setting, cost = tables["setting"], tables["training_cost"]
    rows = [
        [name, f"{one['median_ms']:,.1f}", f"{one['ratio']:.2f}", _target(one, "ratio")]
        for name, one in tables["training_bench"].items()
    ]
    title = f"{setting['model']}, {setting['rows']} × {setting['length']:,} tokens on {setting['device']}"
    print_table(title, ["training step", "median ms", "ratio", "target"], rows)
    for name, words in (("observer_percent", "observer"), ("clip_percent", "QK-clip, every head clipped")):
        target = cost["targets"][name]
        allowed = f"target ≤ {target['at_most']:g}%: {_reached(target)}"
        say(f"At every {cost['every']}th step, {words}: {cost[name]:+.2f}% of a step ({allowed}).")
    for name, times in tables.get("profile", {}).items():
        say(f"{name}, ms: " + ", ".join(f"{kind} {value:.1f}" for kind, value in times.items()) + ".")


def _amounts(context: typer.Context, repeat: int, length: int) -> dict[str, int]:
    """Rounds and length, as asked for or the defaults of a benchmark."""
    usual = {"repeat": repeat, "length": length}
    found = {name: value if context.params[name] is None else context.params[name] for name, value in usual.items()}
    context.params.update(found)
    return found


def _fail_if(wrong: Sequence[str]) -> None:
    if wrong:
        say(f"Not timed, because results disagree with the reference: {'; '.join(wrong)}.")
        raise typer.Exit(1)


def _gpu() -> torch.device:
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError("--gpu: this machine has no CUDA device that torch can use; use --cpu")
    return torch.device("cuda")


def _print_gpu(entries: Sequence[dict[str, Any]]) -> None:
    from sharpmax.report.gpu import KINDS, TARGET_COLUMNS, columns, of_kind, rows, target_rows

    for kind, title in KINDS.items():
        if of_kind(entries, kind):
            print_table(f"{kind}: {title}, bfloat16", columns(kind), rows(entries, kind))
    print_table("targets", list(TARGET_COLUMNS), target_rows(entries))
    for one in entries:
        if one["problem"]:
            say(f"{one['kind']} {one['case']} fails: {one['problem']}")
    say("* not part of a mean. Ratios are rounded up. Times are the device's; the file has the host's too.")


def _print_monitor(tables: Mapping[str, Any]) -> None:
    setting, false, cost = tables["setting"], tables["false_alarms"]["pooled"], tables["overhead"]
    tasks = [*setting["tasks"], "all"]
    say(f"Detecting wrong answers: {setting['model']}, {setting['dtype']} on {setting['device']}.")
    signals = [
        [name, *(_auroc(tables[f"auroc/{task}"][name]["pooled"]) for task in tasks)] for name in setting["signals"]
    ]
    print_table("AUROC over all sizes (95% interval)", ["signal", *tasks], signals)
    say(
        f"False alarms on {false['n']:,} prompts: {false['mean']:.2f}% ({false['low']:.2f}–{false['high']:.2f}%), "
        f"target {tables['false_alarms']['asked']:g}% ± 1 point: {_reached(false['targets']['off'])}."
    )
    say(
        f"Cost at {cost['context']:,} tokens: {cost['watched_ms']:.2f} ms per token instead of {cost['plain_ms']:.2f}, "
        f"{cost['overhead_percent']:+.1f}% (target ≤ 3%: {_reached(cost['targets']['overhead_percent'])}); the report "
        f"{cost['report_ms']:.2f} ms per request."
    )


def _auroc(cell: Mapping[str, Any]) -> str:
    return "–" if cell["auroc"] is None else f"{cell['auroc']:.3f} ({cell['low']:.2f}–{cell['high']:.2f})"


def _reached(target: Mapping[str, Any]) -> str:
    return {True: "reached", False: "missed", None: "not judged"}[target["reached"]]


def _print_cases(tables: Mapping[str, Any]) -> None:
    """The cases of --cpu and of --probe; ratios are to the first case, those of imports to `import torch`."""
    setting, entries = tables["setting"], tables["bench"]
    columns = ["case", "median s", "ratio", "target", "peak MiB", "ratio", "target", "largest error", "allowed"]
    rows = [
        [
            name, _number(one, "median_s", ".3f") if one.get("agrees", True) else "disagrees",
            _number(one, "ratio", ".2f"), _target(one, "ratio"), _number(one, "peak_mib", ",.0f"),
            _number(one, "peak_ratio", ".2f"), _target(one, "peak_ratio"), *_errors(one),
        ]
        for name, one in entries.items()
    ]  # fmt: skip
    used = [place for place in range(len(columns)) if any(row[place] != "–" for row in rows)]
    what = f"{setting['model']} reads {setting['length']:,} tokens" if "model" in setting else (
        f"attention of {setting['length']:,} keys, {setting['heads']} heads of {setting['head_size']}"
    )  # fmt: skip
    print_table(
        f"{what}, threads: {setting['threads']}, rounds: {setting['rounds']}",
        [columns[place] for place in used],
        [[row[place] for place in used] for row in rows],
    )
    for name, one in entries.items():
        if not one.get("same_output", True):
            say(f"{name} changes the output of the model.")
        if one.get("heavy_modules"):
            say(f"{name} imports {', '.join(one['heavy_modules'])} (target: none).")
        if one.get("extra_mb") is not None:
            say(
                f"{name}: {one['extra_mb']:,.0f} MB of extra memory (target in MB: {_target(one, 'extra_mb')}); the "
                f"matrix of logits would take {one['dense_mb']:,.0f} MB."
            )
    say("Largest errors are against float64.")


def _errors(entry: dict[str, Any]) -> list[str]:
    """The largest error and what is allowed."""
    if "errors" not in entry:
        return ["–", "–"]
    errors = entry["errors"].values()
    return ["not finite" if None in errors else f"{max(errors):.1e}", f"{entry['tolerance']:.0e}"]


def _number(entry: dict[str, Any], quantity: str, form: str) -> str:
    value = entry.get(quantity)
    return "–" if value is None else format(value, form)


def _target(entry: dict[str, Any], quantity: str) -> str:
    target = entry.get("targets", {}).get(quantity)
    if target is None or quantity not in entry:
        return "–"
    return f"≤ {target['at_most']:g}" + {True: ", reached", False: ", missed", None: ""}[target["reached"]]
