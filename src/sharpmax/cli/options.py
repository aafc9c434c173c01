"""Options shared by commands, their parsing, and shell completion."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from sharpmax.errors import ArgumentError, reject
from sharpmax.files import parse_json

if TYPE_CHECKING:
    import torch

    from sharpmax.policies.base import Policy

Offer = Callable[[str], list[str]]
"""From the beginning of a word to the words that it may become."""


def words(*known: str) -> Offer:
    """Offer these."""

    def offer(incomplete: str) -> list[str]:
        return _beginning(known, incomplete)

    return offer


def policies(incomplete: str) -> list[str]:
    """Offer the policies that come with the package."""
    from sharpmax.policies.registry import NAMED

    return _beginning(NAMED, incomplete)


def kinds(incomplete: str) -> list[str]:
    """Offer kinds of policies that can be learned, after a comma the next one."""
    from sharpmax.calibration.data import KINDS

    return _beginning(KINDS, incomplete)


def tasks(incomplete: str) -> list[str]:
    """Offer tasks for language models, after a comma the next one."""
    from sharpmax.tasks.registry import TASKS

    return _beginning(TASKS, incomplete)


def sized_tasks(incomplete: str) -> list[str]:
    """Offer tasks for small models."""
    from sharpmax.tasks.sized_registry import SIZED_TASKS

    return _beginning(SIZED_TASKS, incomplete)


def methods(incomplete: str) -> list[str]:
    """Offer what can be compared."""
    from sharpmax.experiments.compare.methods import SHIPPED_METHODS

    return _beginning(SHIPPED_METHODS, incomplete)


def algorithms(incomplete: str) -> list[str]:
    """Offer the algorithms of CLRS-Text, after a comma the next one."""
    from sharpmax.tasks.clrs_text.sizes import ALGORITHMS

    return _beginning(ALGORITHMS, incomplete)


def _beginning(known: Iterable[str], incomplete: str) -> list[str]:
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{word}" for word in known if word.startswith(last)]


DEVICES = ("auto", "cpu", "cuda", "mps")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def sizes_from(text: str, *, least: int = 2, option: str = "--sizes") -> list[int]:
    """Numbers of items from "16,32,64", or doubling from "8..64"; ascending and each once.

    >>> sizes_from("64, 16,16"), sizes_from("8..100,512")
    ([16, 64], [8, 16, 32, 64, 512])
    """
    found: set[int] = set()
    for word in text.split(","):
        ends = [_whole(end, least) for end in word.strip().replace("_", "").split("..")]
        if None in ends or len(ends) > 2 or ends != sorted(filter(None, ends)):
            allowed = (
                f"whole numbers from {least} to 16777216 with commas between them, as 16,32,64, or 8..64 for doubling"
            )
            reject(option, repr(text), allowed)
        low, high = (end for end in (ends[0], ends[-1]) if end is not None)
        while low <= high:
            found.add(low)
            low *= 2
    return sorted(found)


def _whole(word: str, least: int) -> int | None:
    return int(word) if word.isascii() and word.isdigit() and least <= int(word) <= 2**24 else None


def share_from(option: str, text: str, *, most: float = 1.0) -> float:
    """A share above 0 and up to `most` from "0.5%" or "0.005".

    A bare number of 1 or more, or above `most`, is rejected: "1" could mean 1% or 100%.

    >>> share_from("--budget", "0.5%"), share_from("--budget", "0.005")
    (0.005, 0.005)
    """
    word = text.strip()
    number, mark, rest = word.partition("%")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not mark and math.isfinite(value) and (value >= 1.0 or value > most):
        raise ArgumentError(f"{option}: got {word}; write {word}% or {value / 100.0:g}")
    share = value / 100.0 if mark else value
    if rest or not 0.0 < share <= most:
        reject(option, repr(text), f"a share above 0 and up to {100 * most:g}%, as 0.5% or 0.005")
    return share


def device_named(name: str) -> torch.device:
    """The device a user asked for; "auto" is a GPU where there is one."""
    import torch

    if name not in DEVICES:
        reject("--device", repr(name), ", ".join(DEVICES))
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return torch.device("cuda" if there["cuda"] else "cpu")
    if not there[name]:
        reject("--device", repr(name), "a device of this machine", "use --device cpu")
    return torch.device(name)


def dtype_named(name: str, device: torch.device, *, without: str = "") -> str:
    """The dtype a user asked for; "auto" is bfloat16 on a GPU. `without` is one that a command cannot use."""
    allowed = [known for known in DTYPES if known != without]
    if name not in allowed:
        reject("--dtype", repr(name), ", ".join(allowed))
    if name == "auto":
        return "bfloat16" if device.type == "cuda" else "float32"
    return name


def data_folder(given: Path | None) -> Path:
    """Where examples of CLRS-Text are made: what arms share, so that it is not in the folder of one of them."""
    from sharpmax.models.smollm2 import cache_folder

    return cache_folder() / "clrs-text" if given is None else given


@dataclass(frozen=True)
class NamedPolicy:
    """A policy, what to call it, and the task it was calibrated on where that is written beside it."""

    name: str
    policy: Policy
    calibrated_on: str | None = None


def policy_named(text: str) -> NamedPolicy:
    """The policy a user asked for: a name, a file, a folder that holds one, `log-length:64` or `constant:1.5`.

    >>> policy_named("constant:1.5").policy.describe()
    'β = 1.5'
    """
    from sharpmax.policies.registry import NAMED, load_policy

    policy, path = load_policy(text), Path(text)
    if text in NAMED or not path.exists():
        return NamedPolicy(text, policy)
    folder = path if path.is_dir() else path.parent
    return NamedPolicy(path.resolve().name if path.is_dir() else path.stem, policy, _calibrated_on(folder))


def word_shown(word: str) -> str:
    """A name as it is; a file or folder without anything of this machine, as `files_given` calls it."""
    from sharpmax.provenance import without_machine

    return without_machine(Path(word)) if _is_path(word) else word


def files_given(words: Sequence[str | Path | None], data: Sequence[str | Path | None] = ()) -> list[dict[str, Any]]:
    """What results say of the files that a command names, each by its name in the command.

    Of `words` (policies, tasks, normalisers) with their text, so that the command can be run again from the results
    alone; of `data` (texts, datasets, weights) with what tells them from others. Words that are no files are left out.
    """
    found = []
    for word in map(str, filter(None, [*words, *data])):
        if not _is_path(word):
            continue
        path = Path(word)
        file = _policy_in(path) or path if path.is_dir() else path
        if not file.is_file():
            continue
        content = file.read_bytes()
        about = {"name": word_shown(word), "sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
        if word in map(str, filter(None, words)):
            about["text"] = content.decode("utf-8-sig", errors="replace")
        found.append(about)
    return found


def _is_path(word: str) -> bool:
    from sharpmax.policies.registry import NAMED
    from sharpmax.tasks.registry import TASKS

    return word not in NAMED and word not in TASKS and Path(word).exists()


def _policy_in(folder: Path) -> Path | None:
    from sharpmax.policies.registry import IN_FOLDERS

    return next((folder / name for name in IN_FOLDERS if (folder / name).is_file()), None)


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


WHAT, LEARNING, AMOUNT, PLACE, OUTPUT = (
    "What to run",
    "How it learns",
    "How much",
    "Where it runs",
    "What comes out",
)
PANELS = (WHAT, LEARNING, AMOUNT, PLACE, OUTPUT)
"""The groups of options in help, in the order in which every command shows them."""


def value(metavar: str, panel: str, text: str, *names: str, **more: Any) -> Any:
    """An option with a value; without `names` it has that of its parameter."""
    return typer.Option(*names, metavar=metavar, help=text, rich_help_panel=panel, **more)


def flag(names: str, panel: str, text: str, **more: Any) -> Any:
    """An option that is there or not."""
    return typer.Option(names, help=text, rich_help_panel=panel, **more)


def task(names: Any, *, several: bool = False, shown: str | bool = True) -> Any:
    """What a model is asked; `names` knows those that come with the package."""
    return value(
        "T,T" if several else "T",
        WHAT,
        "kv, max, needle, multi-kv, houses, prices, json, or a Python file that defines one.",
        "--task",
        show_default=shown,
        autocompletion=names,
    )


def policy(shown: str | bool = True) -> Any:
    """What raises β; `shown` says what happens without it."""
    return value(
        "P",
        WHAT,
        "A name as paper, a file, a folder, log-length:64 or constant:1.5.",
        "--policy",
        show_default=shown,
        autocompletion=policies,
    )


def sizes(shown: str | bool = True) -> Any:
    """How large the inputs are."""
    return value("N,N", AMOUNT, "Sizes of the inputs: 8..64 doubles, 8,64 lists.", "--sizes", show_default=shown)


def prompts(shown: str | bool = True) -> Any:
    """How many prompts; the second name is the one that lm-evaluation-harness has for it."""
    return value(
        "N", AMOUNT, "Prompts of each size; more are more precise.", "--prompts", "--limit", show_default=shown
    )


def steps(shown: str | bool = True) -> Any:
    """How long a training is."""
    return value("N", AMOUNT, "Steps of each training.", "--steps", show_default=shown)


def tokens_at_once(*older: str) -> Any:
    """What limits memory; `older` are names it had before."""
    text = "Tokens a device holds at once: fewer need less memory."
    return value("N", PLACE, text, "--tokens-at-once", *older)


def out(shown: str | bool = True) -> Any:
    """Where files go; without it, into a folder with the name of the command."""
    return value("DIR", OUTPUT, "Folder to write to.", "--out", show_default=shown)


Model = Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, local folder or the alias smollm2.")]
PolicyOption = Annotated[str | None, policy("none")]
TextFile = Annotated[
    Path | None,
    value("FILE", WHAT, "Plain text to read.", "--text", show_default="Python's documentation"),
]
Algorithms = Annotated[
    str | None,
    value(
        "A,A",
        WHAT,
        "Algorithms of CLRS-Text.",
        "--algorithms",
        show_default="all 30, or those trained on",
        autocompletion=algorithms,
    ),
]
Dataset = Annotated[
    Path | None,
    value("FILE", WHAT, "Examples of your own instead of generated ones.", "--dataset"),
]
LearningRate = Annotated[float, value("X", LEARNING, "Learning rate at its highest.", "--lr", "--rate")]  # fmt: skip
Samples = Annotated[
    int,
    value("N", AMOUNT, "Test inputs per seed and size; more are more precise.", "--samples"),
]
PerCell = Annotated[int, value("N", AMOUNT, "Examples of each algorithm and size.", "--per-cell")]
Seeds = Annotated[
    int,
    value("N", AMOUNT, "How many models, each trained from a seed of its own.", "--seeds"),
]
Seed = Annotated[
    int,
    value("N", AMOUNT, "Seed of all that is drawn at random; of several, the first.", "--seed"),
]
Device = Annotated[
    str,
    value(
        "D",
        PLACE,
        "auto (a GPU where there is one), cpu, cuda or mps.",
        "--device",
        autocompletion=words(*DEVICES),
    ),
]
Dtype = Annotated[
    str,
    value(
        "D",
        PLACE,
        "float32, bfloat16, float16 or auto (bfloat16 on a GPU).",
        "--dtype",
        autocompletion=words(*DTYPES),
    ),
]
Processes = Annotated[int, value("N", PLACE, "Processes that generate examples.", "--processes")]
Data = Annotated[
    Path | None,
    value("DIR", PLACE, "Folder for generated examples.", "--data", show_default="the user's cache"),
]
Out = Annotated[Path, out()]
Resume = Annotated[bool, flag("--resume", OUTPUT, "Go on with the interrupted run in --out, which must hold one.")]
Draw = Annotated[bool, flag("--draw/--no-draw", OUTPUT, "Draw figures and page, or save numbers only.")]
AsJson = Annotated[bool, flag("--json", OUTPUT, "Print one JSON document and nothing else.")]


BEGIN, LANGUAGE, TRAINING, TOOLS = "Begin here", "A language model of your own", "Train and compare", "Tools"
"""The groups of commands in help."""


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_type_of_flags(super().get_params(ctx))

    def get_help_option(self, ctx: Any) -> Any:
        option: Any = super().get_help_option(ctx)
        if option is not None:
            option.rich_help_panel = OUTPUT
        return option


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_type_of_flags(super().get_params(ctx))


def in_order(names: Sequence[str]) -> type[TyperGroup]:
    """A group that shows its commands in this order: Typer would put those that have commands of their own last."""

    class Ordered(_Group):
        def list_commands(self, ctx: Any) -> list[str]:
            return sorted(super().list_commands(ctx), key=names.index)

    return Ordered


def _without_type_of_flags(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


def add(app: typer.Typer, function: Callable[..., Any], *, example: str, panel: str | None = None) -> None:
    """Add a function as the command of its name; its docstring is the help, `example` a line that anybody can type."""
    told = app.command(
        help=_paragraphs(inspect.getdoc(function) or ""),
        epilog=f"Example: {example}",
        rich_help_panel=panel,
        cls=_Command,
    )
    told(function)


def add_group(app: typer.Typer, name: str, about: str, *, example: str, panel: str) -> typer.Typer:
    """Add a command that has commands of its own."""
    group = typer.Typer(help=about, epilog=f"Example: {example}", cls=_Group)
    app.add_typer(group, name=name, rich_help_panel=panel)
    return group


def _paragraphs(text: str) -> str:
    # A terminal breaks lines by itself; those of the source would be broken twice.
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
