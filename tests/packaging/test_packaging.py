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

from sharpmax.cli.env import describe
from tests.packaging.smoke import SMOKES

hatchling = pytest.importorskip("hatchling.build", reason="needs the extra dev")

ROOT = Path(__file__).parents[2]
SMOKE = Path(__file__).with_name("smoke.py")
MOST = 15e6


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheel and sdist, built with what is installed here, and the wheel's files in a folder of their own."""
    folder: Path = tmp_path_factory.mktemp("dist")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        wheel, _ = hatchling.build_wheel(str(folder)), hatchling.build_sdist(str(folder))
    with zipfile.ZipFile(folder / wheel) as file:
        file.extractall(folder / "installed")
    return folder


def run_smokes(built: Path, *names: str, path: Path | None = None, site: bool = True, **more: str) -> str:
    """Run smokes with the wheel before any other sharpmax: what they print."""
    folders = [built / "installed", *([path] if path else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), **more}
    command = [sys.executable, *([] if site else ["-S"]), str(SMOKE), *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=built, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [name for name in names if f"{name}: works\n" not in done.stdout] == []
    return done.stderr


def test_the_wheel_holds_the_package_and_its_data(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
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


def test_with_torch_and_numpy_alone_the_core_works(built: Path, tmp_path: Path) -> None:
    # Without site, Python sees its own library and these folders.
    printed = run_smokes(built, "core", path=links_to(["torch", "numpy", "filelock"], tmp_path), site=False)
    assert "the sharpmax command needs the package 'typer'" in printed


SLOW = {"jax", "language", "lm-eval", "models", "ray", "reproduce"}
"""Other tests run these commands and engines, and `make package` the smokes of all extras."""


def test_a_tiny_use_of_extras(built: Path, tmp_path: Path) -> None:
    """In one process, because each import of torch takes seconds."""
    installed = [extra for extra, state in describe()["extras"].items() if state["installed"]]
    run_smokes(built, *(extra for extra in installed if extra not in SLOW), HF_HOME=str(tmp_path))


def test_every_extra_has_a_smoke() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.split("[project.optional-dependencies]")[1].split("\n[")[0]
    declared = set(re.findall(r"^([a-z-]+) = \[", section, flags=re.MULTILINE))
    assert set(SMOKES) - {"core"} == declared - {"dev", "docs"}
