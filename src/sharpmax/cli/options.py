"""Options that commands share, and how their values are parsed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sharpmax.errors import reject
from sharpmax.provenance import check_seed

if TYPE_CHECKING:
    import torch

    from sharpmax.policies.base import Policy


def choice(*allowed: str, help: str = "", name: str = "", metavar: str = "NAME") -> Any:
    """An option that takes one of the values in `allowed`; `name` if it differs from the parameter's."""
    help = help or f"{', '.join(allowed[:-1])} or {allowed[-1]}."

    def check(param: typer.CallbackParam, value: str | None) -> str | None:
        if value is not None and value not in allowed:
            reject(param.opts[0], repr(value), ", ".join(allowed))
        return value

    return typer.Option(*([name] if name else []), help=help, callback=check, metavar=metavar)


def number(help: str, *names: str, least: int = 1, **more: Any) -> Any:
    """An option that takes a whole number from `least`."""

    def check(param: typer.CallbackParam, value: int | None) -> int | None:
        if value is not None and value < least:
            reject(param.opts[0], value, f"{least} or more")
        return value

    return typer.Option(*names, help=help, metavar="N", callback=check, **more)


def _with_default(make: Callable[..., Any], *names: str, **more: Any) -> Callable[..., Any]:
    """Return a function that makes the option; its argument is the default that the help shows."""
    return lambda shown=True: make(*names, show_default=shown, **more)


out = _with_default(typer.Option, "--out", metavar="DIR", help="Output folder.")
policy = _with_default(typer.Option, "--policy", metavar="P", help="auto, a name, a file or a folder.")
prompts = _with_default(number, "Prompts per size.", "--prompts")
sizes = _with_default(typer.Option, "--sizes", metavar="N,N", help="Sizes: 8,16,64, or 8..64 to double.")
steps = _with_default(number, "Training steps.", "--steps")
_TASKS = "kv, json, needle, …, formats, ruler, or a Python file."
task = _with_default(typer.Option, "--task", metavar="T,T", help=_TASKS)
tokens_at_once = _with_default(number, "Tokens per forward pass.", "--tokens-at-once")

_DEVICES = ("auto", "cpu", "cuda", "mps")
_DTYPES = ("auto", "float32", "bfloat16", "float16")

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, folder, GGUF file, or smollm2.")]
PolicyOption = Annotated[str | None, policy("none")]
TextFile = Annotated[
    Path | None, typer.Option("--text", metavar="FILE", help="Text file.", show_default="Python's documentation")
]
Algorithms = Annotated[
    str | None, typer.Option("--algorithms", metavar="A,A", help="Algorithms of CLRS-Text.", show_default="all")
]
Dataset = Annotated[Path | None, typer.Option("--dataset", metavar="FILE", help="Read examples from a file.")]
LearningRate = Annotated[float, typer.Option("--lr", metavar="X", help="Peak learning rate.")]
Samples = Annotated[int, number("Test inputs per seed and size.", "--samples")]
PerCell = Annotated[int, number("Examples per algorithm and size.", "--per-cell")]
Seeds = Annotated[int, number("Number of seeds.", "--seeds")]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Random seed (the first of N).", callback=check_seed)]
Device = Annotated[str, choice(*_DEVICES, metavar="D")]
ModelDevice = Annotated[str, choice(*_DEVICES, "split", metavar="D")]
Dtype = Annotated[str, choice(*_DTYPES, metavar="D")]
TrainingDtype = Annotated[str, choice(*_DTYPES[:3], metavar="D")]
Processes = Annotated[int, number("Processes that generate examples.", "--processes")]
Data = Annotated[
    Path | None, typer.Option("--data", metavar="DIR", help="Folder of examples.", show_default="user cache")
]
Engine = Annotated[str, choice("local", "ray", metavar="E")]
Workers = Annotated[int | None, number("Processes on this machine.", "--workers", show_default="by engine")]
Address = Annotated[
    str | None, typer.Option("--address", metavar="HOST:PORT", help="Ray cluster.", show_default="this machine")
]
Out = Annotated[Path, out()]
Resume = Annotated[bool, typer.Option("--resume", help="Resume the interrupted run in --out.")]
Draw = Annotated[bool, typer.Option("--draw/--no-draw", help="Draw figures and page.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]


def sizes_from(text: str, *, least: int = 2, option: str = "--sizes") -> list[int]:
    """Return the sizes of "16,32,64", "1k,2k" or "8..64" (doubling), sorted and without duplicates.

    >>> sizes_from("64, 16,16"), sizes_from("8..100,512"), sizes_from("1k..4k")
    ([16, 64], [8, 16, 32, 64, 512], [1024, 2048, 4096])
    """
    found: set[int] = set()
    for word in text.split(","):
        match = re.fullmatch(r"([0-9]{1,8})(k?)(?:\.\.([0-9]{1,8})(k?))?", word.strip())
        low = int(match[1]) * (1024 if match[2] else 1) if match else 0
        high = int(match[3]) * (1024 if match[4] else 1) if match and match[3] else low
        if not least <= low <= high <= 2**24:
            allowed = f"whole numbers from {least} to 16777216, as 16,32,64, or 8..64 for doubling"
            reject(option, repr(text), allowed)
        while low <= high:
            found.add(low)
            low *= 2
    return sorted(found)


def resolve_device(context: typer.Context) -> tuple[torch.device, str]:
    """Return the device and dtype of a command, and record them instead of `auto`.

    For a model split over several devices, it is the first of them; `context.params` keeps "split".
    """
    import torch

    given = context.params
    name, dtype = given["device"], given.get("dtype", "auto")
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    begins = name if name in there else "cuda" if there["cuda"] else "cpu"
    if not there[begins]:
        reject("--device", repr(name), "a device of this machine", "use --device cpu")
    if dtype == "auto":
        dtype = "bfloat16" if begins == "cuda" else "float32"
    given["device"], given["dtype"] = begins if name == "auto" else name, dtype
    return torch.device(begins), dtype


def check_engine(context: typer.Context) -> None:
    """Reject --address without --engine ray."""
    address = context.params["address"]
    if address is not None and context.params["engine"] != "ray":
        reject("--address", repr(address), "an address together with --engine ray", "add --engine ray")


def data_folder(given: Path | None) -> Path:
    """Return the folder of CLRS-Text examples, which variants share: it is not in their output folders."""
    from sharpmax.models.language import cache_folder

    return cache_folder() / "clrs-text" if given is None else given


def policies_given(context: typer.Context, *, foldable: bool = False) -> list[str]:
    """Return the words of --policy; "auto" becomes the packaged policy for MODEL, also in the recorded command."""
    from sharpmax.integrations.gguf import identity, is_gguf
    from sharpmax.policies.registry import AUTO, packaged_for, packaged_for_config

    given, model = context.params["policy"], context.params["model"]
    several = isinstance(given, (list, tuple))
    words = list(given) if several else [given] if given else []
    if AUTO in words:
        if is_gguf(model):
            made = packaged_for(*identity(model), foldable=foldable)[0]
        else:
            from sharpmax.models.language import read_config  # imports torch, which GGUF files do not need

            made = packaged_for_config(read_config(model), model, foldable=foldable)[0]
        words = [made if word == AUTO else word for word in words]
        context.params["policy"] = words if several else made
    return words


def policies_named(words: Sequence[str], taken: str = "") -> dict[str, Policy]:
    """Load policies by unique names: a repeated name, or `taken`, gets a number.

    >>> [policy.describe() for policy in policies_named(["constant:1.5"]).values()]
    ['β = 1.5']
    """
    from sharpmax.policies.registry import NAMED, load_policy

    found: dict[str, Policy] = {}
    for word in words:
        path = Path(word)
        name = word if word in NAMED or not path.exists() else path.resolve().name if path.is_dir() else path.stem
        names = [name, *(f"{name} ({number})" for number in range(2, len(words) + 3))]
        found[next(one for one in names if one != taken and one not in found)] = load_policy(word)
    return found
