"""The README's examples run as written and print what it says they print."""

from __future__ import annotations

import contextlib
import io
import json
import re
import warnings
from pathlib import Path

from sharpmax.errors import OutOfRangeWarning

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_examples_print_what_the_readme_shows() -> None:
    programs, outputs = blocks("python"), blocks("text")
    assert len(programs) == len(outputs) >= 2
    names: dict[str, object] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OutOfRangeWarning)
        for program, output in zip(programs, outputs, strict=True):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(program, names)
            assert printed.getvalue() == output


def test_the_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make ([\w-]+)", "".join(blocks("sh")), flags=re.MULTILINE):
        assert f"\n{target}:" in makefile


def test_the_measured_table_is_the_committed_benchmark() -> None:
    bench = json.loads((ROOT / "benchmarks" / "cpu.json").read_text(encoding="utf-8"))["tables"]["bench"]
    rows = re.findall(r"^\| `([\w/-]+)` \| ([\d.]+) \| ([\d.]+)× \|", README, flags=re.MULTILINE)
    assert len(rows) >= 3
    for case, seconds, ratio in rows:
        assert f"{bench[case]['median_s']:.3f}" == seconds
        assert f"{bench[case]['ratio']:.2f}" == ratio
