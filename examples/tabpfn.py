"""TabPFN v1 beyond the 1,024 rows it was trained on, as published and with attention that sharpens with their number.

TabPFN v1 is no dependency: download its source archive, which holds the weights, from
https://pypi.org/project/tabpfn/0.1/#files and pass the unpacked folder.

    tar xzf tabpfn-0.1.tar.gz
    python examples/tabpfn.py tabpfn-0.1
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sharpmax as sm

TRAINED = 1024
TEST = 500
SIZES = {"synthetic": (1024, 2048, 4096), "digits": (1024, 1297)}
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


def tables() -> dict[str, list[tuple[np.ndarray, np.ndarray]]]:
    """Six synthetic tables, and handwritten digits (64 pixels, 10 classes, 1,797 rows) as a real one."""
    found = {"synthetic": [synthetic(seed, max(SIZES["synthetic"]) + TEST) for seed in range(6)]}
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
    example = inputs(*synthetic(0, 40), 30)
    policies = {"published": "none", "log-length:1024": f"log-length:{TRAINED}"}
    print(f"{'table':10} {'rows':>6}" + "".join(f"{name + ' acc':>22}{'loss':>8}" for name in policies) + "   β")
    for name, drawn in tables().items():
        classes = int(max(y.max() for _, y in drawn)) + 1
        for train in SIZES[name]:
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
