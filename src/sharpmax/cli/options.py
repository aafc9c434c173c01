"""Options that commands share, each written once, and what their values mean."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sharpmax.errors import ArgumentError, reject
from sharpmax.files import parse_json

if TYPE_CHECKING:
    import torch

    from sharpmax.policies.base import Policy

_DTYPES = ("auto", "float32", "bfloat16", "float16")


def completion(module: str, names: str) -> Callable[[str], list[str]]:
    """Shell completion from a collection of names, imported on use; after a comma it completes the next name."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        known = getattr(importlib.import_module(f"sharpmax.{module}"), names)
        return [f"{before}{comma}{name}" for name in known if name.startswith(last)]

    return complete


def choice(help: str, *allowed: str, name: str = "", **more: Any) -> Any:
    """An option that takes one of the values in `allowed`; `name` if it is not that of the parameter."""

    def check(param: typer.CallbackParam, value: str | None) -> str | None:
        if value is not None and value not in allowed:
            reject(param.opts[0], repr(value), ", ".join(allowed))
        return value

    def complete(incomplete: str) -> list[str]:
        return [word for word in allowed if word.startswith(incomplete)]

    names = (name,) if name else ()
    return typer.Option(*names, help=help, callback=check, autocompletion=complete, **{"metavar": "NAME", **more})


def number(help: str, *names: str, least: int = 1, **more: Any) -> Any:
    """An option that takes a whole number from `least`."""

    def check(param: typer.CallbackParam, value: int | None) -> int | None:
        if value is not None and value < least:
            reject(param.opts[0], value, f"{least} or more")
        return value

    return typer.Option(*names, help=help, metavar="N", callback=check, **more)


def _check_seed(seed: int) -> int:
    from sharpmax.provenance import check_seed

    check_seed(seed)
    return seed


def out(shown: str | bool = True) -> Any:
    """Output folder; `shown` is the default in help."""
    return typer.Option("--out", metavar="DIR", help="Output folder.", show_default=shown)


def policy(shown: str | bool = True) -> Any:
    """A policy by name, file or folder; `shown` is the default in help."""
    complete = completion("policies.registry", "NAMED")
    text = "auto, a name, a file or a folder."
    return typer.Option("--policy", metavar="P", help=text, show_default=shown, autocompletion=complete)


def prompts(shown: str | bool = True) -> Any:
    """Number of prompts; `--limit` is lm-evaluation-harness's name for it."""
    return number("Prompts per size.", "--prompts", "--limit", show_default=shown)


def sizes(shown: str | bool = True) -> Any:
    """Input sizes."""
    return typer.Option("--sizes", metavar="N,N", help="Sizes: 8,16,64, or 8..64 to double.", show_default=shown)


def steps(shown: str | bool = True) -> Any:
    """Training steps."""
    return number("Training steps.", "--steps", show_default=shown)


def task(shown: str | bool = True, metavar: str = "T,T") -> Any:
    """Tasks for language models."""
    text = "kv, json, needle, …, formats, ruler, or a Python file."
    complete = completion("tasks.registry", "TASKS")
    return typer.Option("--task", metavar=metavar, help=text, show_default=shown, autocompletion=complete)


def tokens_at_once(*older: str) -> Any:
    """Tokens per forward pass; `older` are further names."""
    return number("Tokens per forward pass.", "--tokens-at-once", *older)


Model = Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, folder, GGUF file, or smollm2.")]
PolicyOption = Annotated[str | None, policy("none")]
TextFile = Annotated[
    Path | None, typer.Option("--text", metavar="FILE", help="Text file.", show_default="Python's documentation")
]
Algorithms = Annotated[
    str | None,
    typer.Option(
        "--algorithms", metavar="A,A", help="Algorithms of CLRS-Text.", show_default="all",
        autocompletion=completion("tasks.clrs_text.sizes", "ALGORITHMS"),
    ),
]  # fmt: skip
Dataset = Annotated[Path | None, typer.Option("--dataset", metavar="FILE", help="Read examples from a file.")]
Kinds = completion("calibration.data", "KINDS")
LearningRate = Annotated[float, typer.Option("--lr", "--rate", metavar="X", help="Peak learning rate.")]
Samples = Annotated[int, number("Test inputs per seed and size.", "--samples")]
PerCell = Annotated[int, number("Examples per algorithm and size.", "--per-cell")]
Seeds = Annotated[int, number("Number of seeds.", "--seeds")]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Random seed (the first of N).", callback=_check_seed)]
Device = Annotated[str, choice("auto, cpu, cuda or mps.", "auto", "cpu", "cuda", "mps", metavar="D")]
ModelDevice = Annotated[
    str, choice("auto, cpu, cuda, mps or split.", "auto", "cpu", "cuda", "mps", "split", metavar="D")
]
Dtype = Annotated[str, choice("auto, float32, bfloat16 or float16.", *_DTYPES, metavar="D")]
TrainingDtype = Annotated[str, choice("auto, float32 or bfloat16.", *_DTYPES[:3], metavar="D")]
Processes = Annotated[int, number("Processes that generate examples.", "--processes")]
Data = Annotated[
    Path | None, typer.Option("--data", metavar="DIR", help="Generated examples.", show_default="user cache")
]
Engine = Annotated[str, choice("local or ray.", "local", "ray", metavar="E")]
Workers = Annotated[int | None, number("Processes on this machine.", "--workers", show_default="by engine")]
Address = Annotated[
    str | None, typer.Option("--address", metavar="HOST:PORT", help="Ray cluster.", show_default="this machine")
]
Out = Annotated[Path, out()]
Resume = Annotated[bool, typer.Option("--resume", help="Resume the interrupted run in --out.")]
Draw = Annotated[bool, typer.Option("--draw/--no-draw", help="Draw figures and page.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]


def sizes_from(text: str, *, least: int = 2, option: str = "--sizes") -> list[int]:
    """Numbers from "16,32,64" or "1k,2k", or doubling from "8..64"; ascending and each once.

    >>> sizes_from("64, 16,16"), sizes_from("8..100,512"), sizes_from("1k..4k")
    ([16, 64], [8, 16, 32, 64, 512], [1024, 2048, 4096])
    """
    found: set[int] = set()
    for word in text.split(","):
        ends = [_whole(end, least) for end in word.strip().replace("_", "").split("..")]
        if None in ends or len(ends) > 2 or ends != sorted(filter(None, ends)):
            allowed = f"whole numbers from {least} to 16777216, as 16,32,64, or 8..64 for doubling"
            reject(option, repr(text), allowed)
        low, high = (end for end in (ends[0], ends[-1]) if end is not None)
        while low <= high:
            found.add(low)
            low *= 2
    return sorted(found)


def _whole(word: str, least: int) -> int | None:
    if word.endswith("k") and word[:-1].isdigit():
        word = str(int(word[:-1]) * 1024)
    return int(word) if word.isascii() and word.isdigit() and least <= int(word) <= 2**24 else None


def bytes_from(option: str, text: str) -> int:
    """A number of bytes from "16G" or "900M".

    >>> bytes_from("--memory", "16G")
    17179869184
    """
    units = {"M": 20, "G": 30}
    number, unit = text.strip()[:-1], text.strip()[-1:].upper()
    try:
        value = float(number) if unit in units else math.nan
    except ValueError:
        value = math.nan
    if not 0.0 < value < math.inf:
        reject(option, repr(text), "a number and G or M, as 16G")
    return int(value * 2 ** units[unit])


def share_from(option: str, text: str, *, most: float = 1.0) -> float:
    """A share above 0 and up to `most` from "0.5%" or "0.005".

    A bare number of 1 or more, or above `most`, is rejected: "1" could mean 1% or 100%.

    >>> share_from("--keep", "0.5%"), share_from("--keep", "0.005")
    (0.005, 0.005)
    """
    word = text.strip()
    digits, mark, rest = word.partition("%")
    try:
        value = float(digits)
    except ValueError:
        value = math.nan
    if not mark and math.isfinite(value) and (value >= 1.0 or value > most):
        raise ArgumentError(f"{option}: got {word}; write {word}% or {value / 100.0:g}")
    share = value / 100.0 if mark else value
    if rest or not 0.0 < share <= most:
        reject(option, repr(text), f"a share above 0 and up to {100 * most:g}%, as 0.5% or 0.005")
    return share


def resolve_device(context: typer.Context) -> tuple[torch.device, str]:
    """The device and dtype that a command runs with; the recorded command names them instead of `auto`.

    A model that is split over several devices begins on the one returned; `context.params` says "split".
    """
    import torch

    given = context.params
    name, dtype = given["device"], given.get("dtype", "auto")
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    split = name == "split"
    if name in ("auto", "split"):
        name = "cuda" if there["cuda"] else "cpu"
    if not there[name]:
        reject("--device", repr(name), "a device of this machine", "use --device cpu")
    if dtype == "auto":
        dtype = "bfloat16" if name == "cuda" else "float32"
    given["device"], given["dtype"] = "split" if split else name, dtype
    return torch.device(name), dtype


def check_engine(context: typer.Context) -> None:
    """Refuse the address of a cluster without the engine that uses it."""
    address = context.params["address"]
    if address is not None and context.params["engine"] != "ray":
        reject("--address", repr(address), "an address together with --engine ray", "add --engine ray")


def data_folder(given: Path | None) -> Path:
    """Folder of CLRS-Text examples: shared between variants, so not in the output folder of one of them."""
    from sharpmax.models.smollm2 import cache_folder

    return cache_folder() / "clrs-text" if given is None else given


@dataclass(frozen=True)
class NamedPolicy:
    """A policy, its name, and the task it was calibrated on where results beside it say so."""

    name: str
    policy: Policy
    calibrated_on: str | None = None


def policy_named(text: str) -> NamedPolicy:
    """The policy that `--policy` names: a name, a file, a folder that holds one, `log-length:64` or `constant:1.5`.

    >>> policy_named("constant:1.5").policy.describe()
    'β = 1.5'
    """
    from sharpmax.policies.registry import NAMED, load_policy

    policy, path = load_policy(text), Path(text)
    if text in NAMED or not path.exists():
        return NamedPolicy(text, policy)
    folder = path if path.is_dir() else path.parent
    return NamedPolicy(path.resolve().name if path.is_dir() else path.stem, policy, _calibrated_on(folder))


def policies_given(context: typer.Context, *, foldable: bool = False) -> list[str]:
    """What --policy names; "auto" becomes the packaged policy made for MODEL, in the recorded command too."""
    from sharpmax.policies.registry import AUTO

    given, model = context.params["policy"], context.params["model"]
    several = isinstance(given, (list, tuple))
    found = [
        _auto(model, foldable) if word == AUTO else word for word in (given if several else [given] if given else [])
    ]
    context.params["policy"] = found if several else next(iter(found), None)
    return found


def _auto(model: str, foldable: bool) -> str:
    from sharpmax.integrations.gguf import identity, is_gguf
    from sharpmax.models.language import read_config
    from sharpmax.policies.registry import packaged_for, packaged_for_config

    if is_gguf(model):
        return packaged_for(*identity(model), foldable=foldable)[0]
    return packaged_for_config(read_config(model), model, foldable=foldable)[0]


def policies_named(texts: Sequence[str], taken: Sequence[str] = ()) -> list[NamedPolicy]:
    """Several policies, each with a name of its own."""
    found: list[NamedPolicy] = []
    for text in texts:
        one = policy_named(text)
        known = {*taken, *(other.name for other in found)}
        numbered = (f"{one.name} ({number})" for number in range(2, len(known) + 3))
        name = one.name if one.name not in known else next(n for n in numbered if n not in known)
        found.append(NamedPolicy(name, one.policy, one.calibrated_on))
    return found


def _calibrated_on(folder: Path) -> str | None:
    """What the results of `sharpmax calibrate` beside a policy say; nothing where there are none."""
    try:
        saved = parse_json((folder / "results.json").read_bytes())
        command, task = saved["command"], saved["tables"]["setting"]["task"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return task if str(command).startswith("sharpmax calibrate") and isinstance(task, str) else None
