"""The wheel and the sdist: what is in them, how large they are, and that the wheel alone works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from sharpmax.cli import env

pytest.importorskip("build", reason="needs the extra dev")
pytest.importorskip("hatchling", reason="needs the extra dev")

ROOT = Path(__file__).parents[2]
SMOKE = Path(__file__).with_name("smoke.py")
MOST = 15e6
LEFT = ("torch", "numpy")
"""All that the core may import from other packages."""

ALONE = f"""
import sys, importlib.metadata
from importlib.machinery import PathFinder

# What torch itself needs: the closure of what it declares.
names, todo = set(), {list(LEFT)!r}
while todo:
    name = todo.pop().lower().replace("_", "-")
    if name in names:
        continue
    names.add(name)
    try:
        declared = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        continue
    todo += [line.split(";")[0].split(">")[0].split("<")[0].split("=")[0].split("[")[0].split("!")[0].strip("( ")
             for line in declared if "extra ==" not in line]
modules = {{module for module, dists in importlib.metadata.packages_distributions().items()
           if any(dist.lower().replace("_", "-") in names for dist in dists)}}
others = set(importlib.metadata.packages_distributions()) - modules - {{"sharpmax"}}

class OnlyTorchAndNumpy:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in others:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        return None

sys.meta_path.insert(0, OnlyTorchAndNumpy())
assert {{"typer", "rich", "scipy", "transformers", "matplotlib"}} <= others
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheel and sdist, built with what is installed here."""
    folder: Path = tmp_path_factory.mktemp("dist")
    words = ["-m", "build", "--no-isolation", "--skip-dependency-check", "--wheel", "--sdist", "--outdir", str(folder)]
    done = subprocess.run([sys.executable, *words, str(ROOT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (file,) = built.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel in it and nothing else."""
    folder: Path = tmp_path_factory.mktemp("installed")
    words = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(folder), str(wheel)]
    subprocess.run([sys.executable, *words], check=True)
    return folder


def run(installed: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Python with the installed wheel before any other sharpmax."""
    environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1", **more}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=environment, cwd=installed, check=False
    )


def test_the_wheel_holds_the_package_and_its_data(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
        about = {name.rpartition("/")[2] for name in file.namelist() if ".dist-info/" in name}
    source = ROOT / "src"
    files = [path for path in (source / "sharpmax").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert names == {path.relative_to(source).as_posix() for path in files}
    for needed in (
        "py.typed", "report/templates/report.html.jinja", "report/templates/report.js", "policies/data/smollm2.json",
        "models/data/max-retrieval-paper.safetensors",
    ):  # fmt: skip
        assert f"sharpmax/{needed}" in names
    assert {"LICENSE", "METADATA", "entry_points.txt"} <= about


def test_the_sdist_holds_what_builds_tests_and_documents_it(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    for needed in (
        "pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "constraints.txt",
        "src/sharpmax/__init__.py", "tests/packaging/smoke.py", "docs/gpu.md", "results/reproduce/results.json",
        "results/reproduce/accuracy.png", "benchmarks/cpu.json",
    ):  # fmt: skip
        assert needed in names, needed
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", "dist", "build"))]
    assert path.stat().st_size <= MOST


def test_the_wheel_is_small(wheel: Path, installed: Path) -> None:
    assert wheel.stat().st_size <= MOST
    files = [path for path in installed.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) <= MOST


def test_with_torch_and_numpy_alone_the_core_works(installed: Path) -> None:
    program = f"{ALONE}\nimport runpy, sharpmax\nassert sharpmax.__file__.startswith({str(installed)!r})\n"
    done = run(installed, "-c", program + f"runpy.run_path({str(SMOKE)!r})['SMOKES']['core']()")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^extra cli +not installed \(no typer, rich\): pip install 'sharpmax\[cli\]'$", done.stdout, re.M)
    assert not re.search(r"^extra \S+ +installed$", done.stdout.replace("extra triton", ""), re.M)


def test_the_command_is_installed(installed: Path) -> None:
    script = installed / "bin" / "sharpmax"
    done = run(installed, str(script), "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("sharpmax ")


# Those of reproduce, cli and report are used by half of the test suite.
@pytest.mark.parametrize("extra", sorted({"core", *env.EXTRAS} - {"models"}))
def test_a_tiny_use_of_each_extra(extra: str, installed: Path, tmp_path: Path) -> None:
    module = {"core": "torch", "lm-eval": "lm_eval", "monitor": "prometheus_client"}.get(extra)
    for name in [module] if module else env.EXTRAS[extra]:
        pytest.importorskip(name)
    done = run(installed, str(SMOKE), extra, RAY_USAGE_STATS_ENABLED="0", HF_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"{extra}: works\n")


def test_every_extra_has_a_smoke_and_env_knows_it() -> None:
    declared = _extras()
    scope: dict[str, Any] = {}
    exec(
        compile(SMOKE.read_text(encoding="utf-8"), str(SMOKE), "exec"),
        {"__name__": "smoke", "__file__": str(SMOKE)},
        scope,
    )
    assert set(scope["SMOKES"]) - {"core"} == set(declared) - {"dev"} == set(env.EXTRAS)


def test_env_asks_for_the_packages_that_an_extra_brings() -> None:
    """Modules have other names than packages; what an extra takes from another one is its own too."""
    declared = _extras()
    modules = {"lm-eval": "lm_eval", "prometheus-client": "prometheus_client"}

    def brought(extra: str) -> set[str]:
        found: set[str] = set()
        for line in declared[extra]:
            if inside := re.match(r"sharpmax\[(.*)\]", line):
                found = found.union(*(brought(other) for other in inside[1].split(",")))
            else:
                package = re.split(r"[>=<;\s\[]", line)[0]
                found.add(modules.get(package, package))
        return found

    for extra, known in env.EXTRAS.items():
        assert set(known) - {"clrs"} == brought(extra), extra


def _extras() -> dict[str, list[str]]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.split("[project.optional-dependencies]")[1].split("\n[")[0]
    found = re.findall(r"^([a-z-]+) = \[(.*?)\]$", section, flags=re.DOTALL | re.MULTILINE)
    return {name: re.findall(r'"([^"]*)"', body) for name, body in found}
