"""TabPFN v1 beyond the 1,024 rows it was trained on, as published and with attention that sharpens with their number.

TabPFN v1 is no dependency: download its source archive (it holds the weights) and pass the folder.

    pip download --no-deps --no-binary :all: tabpfn==0.1 && tar xzf tabpfn-0.1.tar.gz
    python examples/tabpfn.py tabpfn-0.1
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sharpmax as sm

TRAINED = 1024
TEST = 500
SIZES = (512, 1024, 2048, 4096)
FEATURES = 100  # TabPFN's inputs have so many columns, filled up with zeros


def load(folder: Path) -> Any:
    """The network of TabPFN v1 with its weights."""
    here = Path(__file__).resolve().parent  # where this file would be found in the package's place
    sys.path = [str(folder), *(path for path in sys.path if Path(path).resolve() != here)]
    transformer, encoders = importlib.import_module("tabpfn.transformer"), importlib.import_module("tabpfn.encoders")
    file = next((folder / "tabpfn" / "models_diff").glob("*.cpkt"))
    weights, _, config = torch.load(file, map_location="cpu", weights_only=True)
    width = config["emsize"]
    model = transformer.TransformerModel(
        encoders.Linear(FEATURES, width, replace_nan_by_zero=True), config["max_num_classes"], width, config["nhead"],
        width * config["nhid_factor"], config["nlayers"], y_encoder=encoders.Linear(1, width),
    )  # fmt: skip
    weights = {name.removeprefix("module."): value for name, value in weights.items() if "criterion" not in name}
    model.load_state_dict(weights)
    return model.eval()


def synthetic(seed: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """A table of 10 normal columns whose label is the larger of two outputs of a random network, 5% flipped."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 10))
    hidden = np.tanh(x @ rng.normal(size=(10, 24)) / 1.5)
    score = hidden @ rng.normal(size=24) + 0.5 * np.tanh(hidden @ rng.normal(size=(24, 24))) @ rng.normal(size=24)
    y = (score > np.median(score)).astype(np.int64)
    return x, np.where(rng.random(rows) < 0.05, 1 - y, y)


def inputs(x: np.ndarray, y: np.ndarray, train: int) -> tuple[Any, int]:
    """The table as TabPFN reads it: columns standardised on the training rows and scaled by how many there are."""
    x = (x - x[:train].mean(0)) / (x[:train].std(0) + 1e-6)
    used = x.shape[1]
    table = torch.zeros(len(x), 1, FEATURES)
    table[:, 0, :used] = torch.from_numpy(x.clip(-100, 100)).float() * FEATURES / used
    return (table, torch.from_numpy(y).float()[:, None]), train


def predicted(model: Any, x: np.ndarray, y: np.ndarray, train: int, classes: int) -> Tensor:
    """Class probabilities of the rows after the first `train`."""
    source, position = inputs(x, y, train)
    with torch.inference_mode():
        out: Tensor = model(source, single_eval_pos=position)[:, 0, :classes]
    return out.softmax(-1)


def tables() -> dict[str, list[tuple[np.ndarray, np.ndarray]]]:
    """Six synthetic tables, and handwritten digits (64 pixels, 10 classes, 1,797 rows) as a real one."""
    found = {"synthetic": [synthetic(seed, max(SIZES) + TEST) for seed in range(6)]}
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        return found
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    found["digits"] = [(x[order], y[order])]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the unpacked archive, tabpfn-0.1")
    model = load(parser.parse_args().folder)
    example = {"src": inputs(*synthetic(0, 40), 30)[0], "single_eval_pos": 30}
    policies = {"published": "none", "log-length:1024": f"log-length:{TRAINED}"}
    print(f"{'table':10} {'rows':>6}" + "".join(f"{name + ' acc':>22}{'loss':>8}" for name in policies) + "   β")
    for name, drawn in tables().items():
        classes = int(max(y.max() for _, y in drawn)) + 1
        for train in [size for size in (*SIZES, 1297) if size + TEST <= len(drawn[0][1])]:
            cells = []
            for policy in policies.values():
                right, loss = [], []
                with sm.applied(model, policy, example_inputs=example):
                    for x, y in drawn:
                        # The test rows are the last ones at every size.
                        chosen = np.r_[:train, len(y) - TEST : len(y)]
                        p = predicted(model, x[chosen], y[chosen], train, classes)
                        truth = torch.from_numpy(y[-TEST:])
                        right.append((p.argmax(-1) == truth).double().mean().item())
                        loss.append(-p.gather(1, truth[:, None]).clamp_min(1e-9).log().mean().item())
                cells.append(f"{100 * np.mean(right):21.1f}%{np.mean(loss):8.4f}")
            beta = max(1.0, math.log(train) / math.log(TRAINED))
            print(f"{name:10} {train:6}" + "".join(cells) + f"{beta:6.2f}", flush=True)


if __name__ == "__main__":
    main()
