"""The wheel and the sdist: what is in them, how large they are, and that the wheel alone works."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from sharpmax.cli import env
from tests.packaging.smoke import SMOKES

pytest.importorskip("build", reason="needs the extra dev")
pytest.importorskip("hatchling", reason="needs the extra dev")

ROOT = Path(__file__).parents[2]
SMOKE = Path(__file__).with_name("smoke.py")
MOST = 15e6


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
    assert wheel.stat().st_size <= MOST
    assert sum(path.stat().st_size for path in files) <= MOST


def test_the_sdist_holds_what_builds_tests_and_documents_it(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    for needed in (
        "pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "constraints.txt",
        "conftest.py", "src/sharpmax/__init__.py", "tests/packaging/smoke.py", "docs/gpu.md",
        "results/reproduce/results.json", "docs/images/retrieval.svg", "benchmarks/cpu.json",
    ):  # fmt: skip
        assert needed in names, needed
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", "dist", "build"))]
    assert path.stat().st_size <= MOST


def links_to(packages: list[str], folder: Path) -> Path:
    """A folder with these packages, and what they declare, and nothing else."""
    known: set[str] = set()
    while packages:
        name = re.split(r"[^\w.-]", packages.pop())[0]
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # declared for another system
            continue
        if found.name in known:
            continue
        known.add(found.name)
        packages += [line for line in found.requires or () if "extra ==" not in line]
        for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            (folder / top).symlink_to(str(found.locate_file(top)))
    return folder


def test_with_torch_and_numpy_alone_the_core_works(installed: Path, tmp_path: Path) -> None:
    others = links_to(["torch", "numpy"], tmp_path)
    # Without site, Python sees its own library and these two folders.
    done = run(installed, "-S", str(SMOKE), "core", PYTHONPATH=os.pathsep.join([str(installed), str(others)]))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("core: works\n")
    extras = re.findall(
        r"^extra (\S+) +(installed|not installed \(no .*\): pip install .*)$", done.stdout, re.MULTILINE
    )
    assert {name for name, _ in extras} == set(SMOKES) - {"core"}
    # PyTorch for GPUs brings Triton.
    assert {name for name, state in extras if state == "installed"} <= {"triton"}
    assert "not installed (no rich, typer): pip install 'rich>=" in dict(extras)["cli"]


SLOW = {"language", "lm-eval", "models", "ray", "reproduce"}
"""Other tests run these commands and engines, and `make package` the smokes of all extras."""


def test_a_tiny_use_of_extras(installed: Path, tmp_path: Path) -> None:
    """In one process, because each import of torch takes seconds; jax, which must not load torch, in its own."""
    done = run(installed, str(installed / "bin" / "sharpmax"), "--version")
    assert (done.returncode, done.stderr, done.stdout[:9]) == (0, "", "sharpmax ")
    extras = [extra for extra, state in env.describe()["extras"].items() if state["installed"]]
    for names in (["jax"], [extra for extra in extras if extra not in SLOW | {"jax"}]):
        done = run(installed, str(SMOKE), *names, HF_HOME=str(tmp_path))
        assert done.returncode == 0, done.stdout + done.stderr
        assert [name for name in names if f"{name}: works\n" not in done.stdout] == []


def test_every_extra_has_a_smoke() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.split("[project.optional-dependencies]")[1].split("\n[")[0]
    declared = set(re.findall(r"^([a-z-]+) = \[", section, flags=re.MULTILINE))
    assert set(SMOKES) - {"core"} == declared - {"dev", "docs"}
