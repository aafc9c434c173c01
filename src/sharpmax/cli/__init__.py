"""The command line: `sharpmax COMMAND`, one module per command.

Typer and rich come with the extra `cli`, so the modules of the commands are imported late.
"""

import contextlib
import importlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import sharpmax
from sharpmax.errors import SharpmaxError
from sharpmax.files import FULL, FULL_DISK
from sharpmax.lazy import require

if TYPE_CHECKING:
    from typer import Typer

__all__ = ["answer", "main", "make_app"]

_FAILED = 1
_USAGE_ERROR = 2
_INTERRUPTED = 130
_OURS = "sharpmax: internal error; please report it with the lines above and the output of: sharpmax env"

_COMMANDS = {
    "reproduce": "sharpmax reproduce --train --steps 2000 --seeds 1 --out quick",
    "explore": "sharpmax explore --out explore --no-open",
    "probe": "sharpmax probe smollm2 --task kv --sizes 8..64 --out probe",
    "calibrate": "sharpmax calibrate smollm2 --task kv --budget 0.01 --out calibrate",
    "evaluate": "sharpmax evaluate smollm2 --policy auto --task kv,houses",
    "fold": "sharpmax fold smollm2 --policy calibrate/policy-constant.json --out folded",
    "horizon": "sharpmax horizon smollm2 --mass 0.5 --out horizon",
    "compare": "sharpmax compare softmax ssmax hard --steps 2000 --seeds 2 --sizes 16..1024",
    "bench": "sharpmax bench --cpu --out benchmarks",
    "report": "sharpmax report before after --out comparison",
    "env": "sharpmax env --json",
    "clrs train": "sharpmax clrs train --policy paper --out clrs-paper",
    "clrs evaluate": "sharpmax clrs evaluate clrs-none clrs-paper --out clrs-evaluate",
    "clrs compare": "sharpmax clrs compare scratch:1m --algorithms minimum --minutes 1",
}
"""Commands in the order of the help, with their examples. `clrs train` is the function `train` of the module `clrs`."""

_stdout: list[TextIO] = []
"""With --json, the stream for `answer`; all other output goes to stderr."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    A usage error prints one line to stderr and returns 2; a limit of this machine prints one line and returns 1.
    `--debug` adds the traceback. An internal error always prints it, because a second run may take hours.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot print ≤ or β shows a question mark; a run must not crash at its end.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    _stdout.append(sys.stdout)
    try:
        for package in ("typer", "rich"):
            require(package, "cli", "the sharpmax command")
        with contextlib.redirect_stdout(sys.stderr if "--json" in words else sys.stdout):
            code = make_app()(words, prog_name="sharpmax", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe. Otherwise Python reports it again when it closes stdout.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED
    except Exception as problem:
        code, message = _error_for_users(problem)
        if debug or message is None:
            traceback.print_exc()
        print(_OURS if message is None else f"sharpmax: error: {' '.join(message.split())}", file=sys.stderr)
        return code
    finally:
        _stdout.pop()


def make_app() -> "Typer":
    """Return the app with all commands."""
    import typer

    def top(
        context: typer.Context,
        version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
        # `main` reads it, so that it also works after a command; it is declared for the help.
        debug: Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")] = False,
    ) -> None:
        if version:
            print(f"sharpmax {sharpmax.__version__}")
            raise typer.Exit
        if context.invoked_subcommand is None:
            print(context.get_help())
            raise typer.Exit(_USAGE_ERROR)

    app = typer.Typer(
        help="Keep attention sharp as inputs grow: measure, predict and fix softmax dispersion.",
        epilog="Example: sharpmax reproduce --out reproduce",
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # plain help: a command fits on a screen
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(top)
    clrs_help = "Fine-tune and test models on algorithms as text (CLRS-Text)."
    clrs = typer.Typer(help=clrs_help, epilog=f"Example: {_COMMANDS['clrs train']}")
    app.add_typer(clrs, name="clrs")
    for words, example in _COMMANDS.items():
        group, _, name = words.rpartition(" ")
        module = importlib.import_module(f"sharpmax.cli.{group or ('report' if name == 'explore' else name)}")
        (clrs if group else app).command(name, epilog=f"Example: {example}")(getattr(module, name))
    return app


def _error_for_users(problem: Exception) -> tuple[int, str | None]:
    """Return the exit code and the message; the message of an internal error is None."""
    if isinstance(problem, SharpmaxError):
        return _USAGE_ERROR, str(problem)
    # A usage error. Some versions of Typer bring their own copy of click, so its type cannot be checked.
    format_message: Any = getattr(problem, "format_message", None)
    if callable(format_message):
        command = getattr(getattr(problem, "ctx", None), "command_path", "sharpmax")
        return _USAGE_ERROR, f"{format_message().rstrip('. ')}; see: {command} --help"
    if isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError":
        return _FAILED, f"out of memory ({str(problem) or 'of this machine'}); use smaller sizes, or --dtype bfloat16"
    if isinstance(problem, OSError) and problem.strerror:
        where = f": {problem.filename}" if problem.filename else ""
        todo = FULL_DISK if problem.errno in FULL else "--debug shows more"
        return _FAILED, f"{problem.strerror}{where}; {todo}"
    return _FAILED, None


def answer(document: Any) -> None:
    """Print plain values as JSON, in the format of saved files."""
    print(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False), file=_stdout[-1])
