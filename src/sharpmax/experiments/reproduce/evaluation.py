"""Trained heads on sets of growing size: what is fitted, every variant on the same sets, and the tables."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from sharpmax import theory
from sharpmax.arrays import in_float64
from sharpmax.errors import OutOfRangeWarning
from sharpmax.experiments.engine import one_thread_each, without_denormals
from sharpmax.experiments.stacked_training import recipe_named
from sharpmax.experiments.statistics import auroc, compare, seed_mean
from sharpmax.lazy import require
from sharpmax.models.single_head import WIDTH, SingleHeads
from sharpmax.models.weights import Trained
from sharpmax.ops.softmax import softmax
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import LogLength
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.polynomial import PAPER, Polynomial
from sharpmax.results import json_values
from sharpmax.stats.dense import centred, dense_stats
from sharpmax.stats.statistics import RowStats
from sharpmax.tasks.max_retrieval import CLASSES, Sets, draw, seeded

T = TypeVar("T")
X = TypeVar("X")
Size = TypeVar("Size", bound=int | tuple[int, int])

HARD = "hard"
"""The variant that takes the item with the largest logit alone: the limit of any temperature that goes to 0."""

Progress = Callable[[int], None]
"""Called with the number of items read since the last call."""

SIZES = tuple(2**power for power in range(4, 15))
"""Numbers of items the paper tests on: 16 … 16,384."""

_BASELINE = (98.6, 97.1, 94.3, 89.7, 81.3, 70.1, 53.8, 35.7, 22.6, 15.7, 12.4)
_ADAPTIVE = (98.6, 97.1, 94.5, 89.9, 82.1, 72.5, 57.7, 39.4, 24.9, 17.5, 14.0)

PUBLISHED = {
    "softmax": {str(n): value for n, value in zip(SIZES, _BASELINE, strict=True)},
    "paper": {str(n): value for n, value in zip(SIZES, _ADAPTIVE, strict=True)},
}
"""The paper's accuracy by variant and size."""

_HEAT_SETS, _HEAT_ITEMS = 32, 16
_HEAT_VARIANTS = ("softmax", "entropy-target")
_GRID = 2**14

_PAGE = {"cpu": 2**15, "cuda": 2**22}  # items that are drawn together
_AT_ONCE = {"cpu": 2**15, "cuda": 2**19}  # items that are read together: on a GPU they take about 2 GB
_BLOCK = 2**12
_REACH = 40.0

# Of the best β: steps, tolerance and range of the search in ln β.
_STEPS, _TOLERANCE, _LEAST, _MOST = 60, 1e-9, math.log(1e-4), math.log(1e4)

# Of what is fitted: the largest β, and the fewest points and wrong answers to fit on.
_LARGEST_BETA, _LEAST_POINTS, _LEAST_WRONG = 10.0, 50, 10
_IN_DISTRIBUTION_SETS = 2048
_PLOTTED = 1000


@dataclass(frozen=True)
class Read:
    """A head's features h [B, n, 128] and logits s [B, n] of some sets; logits are −inf where an item is masked."""

    head: SingleHeads
    features: Tensor
    logits: Tensor
    priority: Tensor
    best: Tensor
    answer: Tensor

    def scores(self, pooled: Tensor) -> Tensor:
        """Class logits of Σ p_i h_i: [B, ..., 128] -> [B, ..., 10]."""
        return self.head.classify(pooled[None])[0]


def side_by_side(work: Callable[[X], T], over: Sequence[X], device: torch.device) -> list[T]:
    """work(x) for every x, in inference mode; on a CPU several at a time, each on one thread."""

    def one(x: X) -> T:
        with without_denormals(), torch.inference_mode():  # both hold for the thread that asks for them
            return work(x)

    if device.type != "cpu":
        return [one(x) for x in over]
    with one_thread_each() as threads, ThreadPoolExecutor(threads) as pool:
        return list(pool.map(one, over))


def read(
    head: SingleHeads,
    size: int | tuple[int, int],
    samples: int,
    stream: Sequence[int],
    progress: Progress = lambda items: None,
) -> Iterator[Read]:
    """Let the head read `samples` sets, page by page; `stream` names a stream of random numbers."""
    device = device_of(head)
    most = size if isinstance(size, int) else size[1]
    page, at_once = (max(1, items.get(device.type, items["cpu"]) // most) for items in (_PAGE, _AT_ONCE))
    generator = seeded(device, *stream, most)
    for start in range(0, samples, page):
        drawn = draw((min(page, samples - start),), size, generator)
        for sets in drawn.split(at_once):
            h = _features(head, sets.items)
            s = head.logits(h[None], sets.query[None])[0].masked_fill(~sets.visible, -torch.inf)
            yield Read(head, h, s, sets.priority, sets.best, sets.answer)
            progress(len(s) * most)


def device_of(head: SingleHeads) -> torch.device:
    """Where the head's weights are."""
    return next(head.parameters()).device


def _features(head: SingleHeads, items: Tensor) -> Tensor:
    if items.device.type != "cpu":
        return head.features(items[None])[0]
    # On a CPU the layers in between must stay in its cache: wide ones are written to memory and read back.
    rows = items.flatten(0, 1)
    h = torch.empty(len(rows), WIDTH)
    for start in range(0, len(rows), _BLOCK):
        h[start : start + _BLOCK] = head.features(rows[None, start : start + _BLOCK])[0]
    return h.view(*items.shape[:2], WIDTH)


@dataclass(frozen=True)
class Measured:
    """One size: arrays [heads, samples] by variant; `confidence` and `spread` are those of plain softmax."""

    correct: Mapping[str, np.ndarray]
    entropy: Mapping[str, np.ndarray]
    top_weight: Mapping[str, np.ndarray]
    confidence: np.ndarray
    spread: np.ndarray


def measure(
    heads: Sequence[SingleHeads],
    variants: Sequence[Mapping[str, Policy | None]],
    size: Size,
    samples: int,
    stream: Sequence[int],
    progress: Progress = lambda items: None,
) -> Measured:
    """`measure_all` of one size: a number of items, or the least and the largest number of them."""
    return measure_all(heads, variants, [size], samples, stream, progress)[size]


def measure_all(
    heads: Sequence[SingleHeads],
    variants: Sequence[Mapping[str, Policy | None]],
    sizes: Sequence[Size],
    samples: int,
    stream: Sequence[int],
    progress: Progress = lambda items: None,
) -> dict[Size, Measured]:
    """Evaluate the variants of each head (the same names for all, `softmax` first) and `hard` at each size.

    Heads see different sets, so that the spread between them includes the chance of drawing; the variants of a head
    all see the same ones.
    """

    def one(task: tuple[Size, int]) -> dict[str, np.ndarray]:
        size, position = task
        reads = read(heads[position], size, samples, (*stream, position), progress)
        pages = [measure_page(seen, variants[position]) for seen in reads]
        return {name: torch.cat([page[name] for page in pages]).cpu().numpy() for name in pages[0]}

    # The longest first, so that none is left for the end.
    tasks = [(size, position) for size in reversed(sizes) for position in range(len(heads))]
    with warnings.catch_warnings():
        # Where a policy leaves the range it was fitted on is part of the results.
        warnings.simplefilter("ignore", OutOfRangeWarning)
        found = dict(zip(tasks, side_by_side(one, tasks, device_of(heads[0])), strict=True))

    def gathered(size: Size) -> Measured:
        by_head = [found[size, position] for position in range(len(heads))]
        columns = {name: np.stack([one[name] for one in by_head]) for name in by_head[0]}
        correct, entropy, top = (
            {name.partition(" ")[2]: column for name, column in columns.items() if name.startswith(f"{kind} ")}
            for kind in ("correct", "entropy", "top")
        )
        return Measured(correct, entropy, top, columns["confidence"], columns["spread"])

    return {size: gathered(size) for size in sizes}


def measure_page(seen: Read, variants: Mapping[str, Policy | None]) -> dict[str, Tensor]:
    """What `Measured` holds, for one head and the sets it has just read: [B] by the name of field and variant."""
    s, h = _near(seen)
    visible = s > -torch.inf
    x, _ = centred(s, visible)
    # Every item counts, those out of reach too: some policies go by their number.
    parts, measured = dense_stats(s, visible).flatten()
    in_set = seen.logits > -torch.inf
    plain = RowStats.unflatten(measured, [in_set.sum(-1), *parts[1:]])
    least = seen.logits.masked_fill(~in_set, torch.inf).amin(-1)
    found: dict[str, Tensor] = {"spread": seen.logits.amax(-1) - least}
    weights = []
    for name, policy in variants.items():
        scaled, stats = x, plain
        if policy is not None:
            beta = policy.beta(plain, lambda b: dense_stats(x * b[:, None].to(x.dtype), visible))
            scaled = x * beta[:, None].to(x.dtype)
            stats = dense_stats(scaled, visible)
        found[f"entropy {name}"], found[f"top {name}"] = stats.entropy, stats.top_weight
        weights.append(scaled.masked_fill(~visible, -torch.inf).softmax(-1))
    pooled = torch.matmul(torch.stack(weights, dim=1), h)
    # Items come largest logit first, so the first is the one that hard attention takes.
    scores = seen.scores(torch.cat((pooled, h[:, :1]), dim=1))
    right = scores.argmax(-1) == seen.answer[:, None]
    found |= {f"correct {name}": right[:, column] for column, name in enumerate((*variants, HARD))}
    found["confidence"] = scores[:, 0].softmax(-1).amax(-1)
    return found


def _near(seen: Read) -> tuple[Tensor, Tensor]:
    """Logits and features of the items that can weigh anything, largest logit first.

    An item `_REACH` nats under the top weighs less than e^−40 of it at any β ≥ 1. All of them together stay under the
    rounding of float32 by a factor of a million, and leaving them out saves most of the work.
    """
    reach = seen.logits > seen.logits.amax(-1, keepdim=True) - _REACH
    count = int(reach.sum(-1).max())
    s, order = seen.logits.topk(count)
    h = seen.features.gather(1, order[..., None].expand(-1, -1, WIDTH))
    return s.masked_fill(s <= s[:, :1] - _REACH, -torch.inf), h


def best_beta(logits: Tensor, wanted: Tensor) -> Tensor:
    """The β at which softmax(β·logits) gives the item `wanted` [...] of each row [..., n] the largest weight; float64.

    The weight's slope in β is its weight times s_wanted − E_β[s], and E_β[s] rises with β from the plain mean to the
    maximum: the best β is where the two meet. It is ∞ where the wanted item has the largest logit and 0 where it is
    not above the plain mean, so that no temperature helps; otherwise it is looked for between 1e-4 and 1e4. Logits of
    −inf are not part of their row, and a row with NaN has none.

    >>> best_beta(torch.tensor([2.0, 1.5, 0.0, 0.0]), torch.tensor(1))
    tensor(0.8959, dtype=torch.float64)
    """
    logits = in_float64(logits)
    visible, wanted = logits != -torch.inf, wanted.to(logits.device)
    x, _ = centred(logits, visible)
    goal = x.gather(-1, wanted[..., None])[..., 0]
    mean = torch.where(visible, x, 0.0).sum(-1) / visible.sum(-1)
    free = (goal > mean) & (goal < 0.0)
    u, low, high = torch.zeros_like(goal), torch.full_like(goal, _LEAST), torch.full_like(goal, _MOST)
    # Newton's steps in u = ln β, where the slope of E[s] is β·Var[s], halving the bracket wherever they leave it.
    for _ in range(_STEPS):
        beta = u.exp()
        stats = dense_stats(x * beta[..., None], visible)
        gap = goal - stats.mean / beta
        low, high = torch.where(gap > 0, u, low), torch.where(gap > 0, high, u)
        step = u + gap * beta / stats.var.clamp_min(1e-300)
        inside = (step > low) & (step < high)
        after = torch.where(inside, step, 0.5 * (low + high))
        settled = ~free | ((after - u).abs() <= _TOLERANCE)
        u = after
        if bool(settled.all()):
            break
    best = torch.where(goal <= mean, 0.0, u.exp())
    best = torch.where(goal >= 0.0, torch.inf, best)
    best = torch.where(visible.gather(-1, wanted[..., None])[..., 0], best, 0.0)
    return torch.where(mean.isnan(), torch.nan, best)


@dataclass(frozen=True)
class Detector:
    """Logistic regression for "the answer is wrong" on the classifier's confidence and the attention's entropy."""

    weights: tuple[float, float, float]

    @classmethod
    def fit(cls, confidence: np.ndarray, entropy: np.ndarray, correct: np.ndarray) -> Detector | None:
        """Most likely weights with a slight pull to 0; None if there are too few wrong answers to learn from."""
        wrong = ~correct
        if min(wrong.sum(), correct.sum()) < _LEAST_WRONG:
            return None
        x = _design(confidence, entropy)
        sign = np.where(wrong, 1.0, -1.0)

        def loss(w: np.ndarray) -> tuple[float, np.ndarray]:
            margin = sign * (x @ w)
            slope = -sign / (1.0 + np.exp(np.clip(margin, -500.0, 500.0)))
            return float(np.logaddexp(0.0, -margin).sum() + 0.5 * w @ w), x.T @ slope + w

        optimize = require("scipy.optimize", "reproduce", "fitting the failure detector")
        best = optimize.minimize(loss, np.zeros(x.shape[1]), jac=True, method="BFGS")
        return cls(tuple(float(w) for w in best.x))  # type: ignore[arg-type]

    def suspicion(self, confidence: np.ndarray, entropy: np.ndarray) -> np.ndarray:
        """Log-odds that an answer is wrong."""
        return np.asarray(_design(confidence, entropy) @ np.asarray(self.weights))


def _design(confidence: np.ndarray, entropy: np.ndarray) -> np.ndarray:
    # Confidence in float32 rounds to 1 from 1 − 6e-8 on; as log-odds that is where it must stop.
    p = np.clip(np.asarray(confidence, dtype=np.float64), 1e-8, 1.0 - 2.0**-24)
    return np.stack((np.ones_like(p), np.log(p) - np.log1p(-p), np.asarray(entropy, dtype=np.float64)), axis=-1)


@dataclass(frozen=True)
class Fitted:
    """Fitted on one recipe's heads: policies by variant for each head, the polynomial's table, the failure detector."""

    variants: list[dict[str, Policy | None]]
    polynomial: dict[str, Any] | None
    detector: Detector | None
    left_out: dict[str, str]  # what could not be fitted, and why


def fit_samples(samples: int) -> int:
    """Sets of each size for fitting, when `samples` are for evaluation."""
    return max(32, samples // 4)


def fit(
    heads: Sequence[SingleHeads],
    sizes: Sequence[int],
    samples: int,
    seed: int,
    train_sizes: tuple[int, int],
    progress: Progress,
) -> Fitted:
    """Fit everything on `fit_samples(samples)` sets per size, from a stream of random numbers of their own."""
    plain: list[dict[str, Policy | None]] = [{"softmax": None} for _ in heads]
    inside = measure(heads, plain, train_sizes, _IN_DISTRIBUTION_SETS, (seed, 0), progress)
    targets = inside.entropy["softmax"].mean(axis=1)

    def surveyed(task: tuple[int, int]) -> list[dict[str, np.ndarray]]:
        size, position = task
        reads = read(heads[position], size, fit_samples(samples), (seed, 1, position), progress)
        return [_survey(seen) for seen in reads]

    tasks = [(size, position) for size in reversed(sizes) for position in range(len(heads))]
    points = [page for pages in side_by_side(surveyed, tasks, device_of(heads[0])) for page in pages]
    survey = {name: np.concatenate([page[name] for page in points]) for name in points[0]}
    table, refit = _polynomial(survey, sizes)
    detector = Detector.fit(survey["confidence"], survey["entropy"], survey["correct"])
    common: dict[str, Policy | None] = {"softmax": None, "paper": PAPER}
    left_out = {}
    if refit is not None:
        common["refit"] = refit
    else:
        left_out["refit"] = (
            f"{int(_usable(survey['beta']).sum())} wrongly ranked inputs are too few to fit a polynomial on "
            f"({_LEAST_POINTS} are needed); more --samples, --seeds or larger --sizes give more"
        )
    if detector is None:
        left_out["both"] = "too few wrong answers to fit a failure detector on"
    common["log-length"] = LogLength(reference=train_sizes[1])
    variants = [{**common, "entropy-target": EntropyTarget(float(target))} for target in targets]
    return Fitted(variants, table, detector, left_out)


def _survey(seen: Read) -> dict[str, np.ndarray]:
    """Entropy, confidence, whether the answer is right, and the best β: NaN where the best item is on top anyway."""
    found = measure_page(seen, {"softmax": None})
    missed = seen.logits.argmax(-1) != seen.best
    best = torch.full(missed.shape, torch.nan, dtype=torch.float64)
    if bool(missed.any()):
        best[missed.cpu()] = best_beta(seen.logits[missed], seen.best[missed]).cpu()
    columns = {"entropy": found["entropy softmax"], "confidence": found["confidence"], "beta": best}
    columns["correct"] = found["correct softmax"]
    return {name: values.cpu().numpy() for name, values in columns.items()}


def _polynomial(survey: Mapping[str, np.ndarray], sizes: Sequence[int]) -> tuple[dict[str, Any] | None, Policy | None]:
    """The paper's procedure: a polynomial of degree 4 through (entropy, best β) of the inputs that are ranked wrongly.

    The best β is unbounded as the wanted item comes close to the top, and any large one does: those are left out.
    """
    wrong, used = ~np.isnan(survey["beta"]), _usable(survey["beta"])
    entropy, beta = survey["entropy"][used].astype(np.float64), survey["beta"][used]
    if len(beta) < _LEAST_POINTS:
        return None, None
    policy = Polynomial.fit(entropy, beta)
    residual = beta - np.polyval(policy.coefficients, entropy)
    shown = np.linspace(0, len(beta) - 1, min(_PLOTTED, len(beta))).round().astype(int)
    grid = np.linspace(0.0, max(policy.fitted_on[1], 6.5), 200)
    table = {
        "coefficients": list(policy.coefficients),
        "fitted_on": list(policy.fitted_on),
        "threshold": policy.threshold,
        "acts_on": _ends(policy),
        "paper_acts_on": _ends(PAPER),
        "sizes": list(sizes),
        "inputs": len(wrong),
        "wrong": len(beta),
        "dropped": int(wrong.sum() - used.sum()),
        "r2": float(1.0 - residual.var() / beta.var()),
        "points": {"entropy": _short(entropy[shown]), "beta": _short(beta[shown])},
        "curve": {
            "entropy": _short(grid),
            "refit": _short(policy.value_at(grid)),
            "paper": _short(PAPER.value_at(grid)),
        },
        "policy": policy.to_dict(),
    }
    return table, policy


def _usable(beta: np.ndarray) -> np.ndarray:
    return np.asarray((beta > 0.0) & (beta <= _LARGEST_BETA))


def _ends(policy: Polynomial) -> list[float | None] | None:
    ends = policy.acts_on
    return None if ends is None else [float(end) if np.isfinite(end) else None for end in ends]


def _short(values: np.ndarray) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


def items_to_read(sizes: Sequence[int], samples: int, heads: int) -> int:
    """Roughly how many items an evaluation reads, for showing progress."""
    return (samples + fit_samples(samples)) * sum(sizes) * heads


def reproduce_tables(
    trained: Sequence[Trained],
    sizes: Sequence[int],
    samples: int,
    seed: int,
    device: torch.device,
    progress: Progress = lambda items: None,
) -> dict[str, Any]:
    """Evaluate the heads of every recipe on the same sets."""
    began = time.monotonic()
    tables: dict[str, Any] = {}
    policies: dict[str, Any] = {}
    left_out: dict[str, Any] = {}
    for weights in trained:
        heads = [weights.heads([position]).to(device) for position in range(len(weights.seeds))]
        fitted = fit(heads, sizes, samples, seed, recipe_named(weights.recipe).sizes, progress)
        measured = measure_all(heads, fitted.variants, sizes, samples, (seed, 2), progress)
        found = _tables(measured, fitted, heads, seed)
        suffix = "" if weights.recipe == "paper" else f"/{weights.recipe}"
        tables |= {name + suffix: table for name, table in found.items()}
        described = {name: policy.describe() for name, policy in fitted.variants[0].items() if policy is not None}
        targets = [one["entropy-target"].target for one in fitted.variants]  # type: ignore[union-attr]
        described["entropy-target"] = (
            "β ≥ 1 such that H is the head's mean entropy on training sizes, "
            f"{min(targets):.3g} … {max(targets):.3g} nat"
        )
        policies[weights.recipe] = described
        left_out[weights.recipe] = fitted.left_out
    tables["published"] = PUBLISHED
    tables["weights"] = {
        w.recipe: {"steps": w.steps, "seeds": list(w.seeds), "trained": dict(w.provenance)} for w in trained
    }
    tables["setting"] = {
        "recipes": {
            w.recipe: {"describe": recipe_named(w.recipe).summary, "steps": w.steps, "seeds": list(w.seeds)}
            for w in trained
        },
        "sizes": list(sizes),
        "samples": samples,
        "fit_samples": fit_samples(samples),
        "train_sizes": list(recipe_named(trained[0].recipe).sizes),
        "classes": CLASSES,
        "policies": policies,
        "left_out": left_out,
        "seconds": {"evaluate": round(time.monotonic() - began, 1)},
    }
    return json_values(tables)


def _tables(
    measured: Mapping[int, Measured], fitted: Fitted, heads: Sequence[SingleHeads], seed: int
) -> dict[str, Any]:
    names = list(fitted.variants[0])
    accuracy = {
        variant: {n: 100.0 * m.correct[variant].mean(axis=1) for n, m in measured.items()} for variant in (*names, HARD)
    }
    found = {
        "accuracy": {variant: {str(n): seed_mean(cells[n]) for n in cells} for variant, cells in accuracy.items()},
        "comparison": {
            variant: {str(n): compare(cells[n], accuracy["softmax"][n], accuracy[HARD][n]) for n in cells}
            for variant, cells in accuracy.items()
            if variant != "softmax"
        },
        "entropy": {a: {str(n): seed_mean(m.entropy[a].mean(axis=1)) for n, m in measured.items()} for a in names},
        "top_weight": {
            a: {str(n): seed_mean(100.0 * m.top_weight[a].mean(axis=1)) for n, m in measured.items()} for a in names
        },
        "bounds": _bounds(measured, heads),
        "heat": _heat(heads[0], fitted, list(measured), seed),
        "detection": _detection(measured, fitted.detector, seed),
    }
    if fitted.polynomial is not None:
        found["fit"] = fitted.polynomial
    return found


def _bounds(measured: Mapping[int, Measured], heads: Sequence[SingleHeads]) -> dict[str, Any]:
    """What theory says of plain softmax: bounds from each head's largest logit spread, and the limit of large n."""
    spread = np.max([m.spread.max(axis=1) for m in measured.values()], axis=0).astype(np.float64)
    population = side_by_side(_population, heads, device_of(heads[0]))
    return {
        "spread": seed_mean(spread),
        # 1 + e^δ leaves float64 at a spread of 710, its logarithm does not.
        "horizon_log10": seed_mean(np.logaddexp(0.0, spread) / np.log(10.0)),
        "largest_weight": {str(n): 100.0 * float(np.mean(theory.weight_bounds(spread, n)[1])) for n in measured},
        "least_entropy": {str(n): float(np.mean(theory.entropy_floor(spread, n))) for n in measured},
        "most_entropy": {str(n): float(theory.entropy_ceiling(n)) for n in measured},
        "limit_weight": {str(n): 100.0 * float(np.mean([min(1.0, w / n) for w, _ in population])) for n in measured},
        "limit_entropy": {str(n): float(np.mean([max(0.0, h + np.log(n)) for _, h in population])) for n in measured},
    }


def _population(head: SingleHeads) -> tuple[float, float]:
    """For items drawn at random: the limit of n·(top weight), and that of the entropy minus ln n, as n grows."""
    device = next(head.parameters()).device
    priority = ((torch.arange(_GRID, device=device) + 0.5) / _GRID).repeat(CLASSES, 1)
    label = torch.arange(CLASSES, device=device)[:, None].expand(-1, _GRID)
    sets = Sets(priority, label, torch.full((CLASSES,), 0.5, device=device), torch.ones_like(label, dtype=torch.bool))
    h = head.features(sets.items[None])
    s = head.logits(h, sets.query[None]).flatten().cpu().double()
    stats = dense_stats(s, torch.ones_like(s, dtype=torch.bool))
    weight = theory.top_weight_limit(float(stats.max), float(stats.lse) - np.log(len(s)))
    return float(weight), float(stats.entropy) - float(np.log(len(s)))


def _heat(head: SingleHeads, fitted: Fitted, sizes: Sequence[int], seed: int) -> dict[str, Any]:
    """Weights of the items with the highest priority in a few sets, highest first, for every second size."""
    shown = sizes[::2]

    def weights(n: int) -> dict[str, list[list[float]]]:
        rows: dict[str, list[list[float]]] = {name: [] for name in _HEAT_VARIANTS}
        for seen in read(head, n, _HEAT_SETS, (seed, 3)):
            order = seen.priority.topk(min(_HEAT_ITEMS, n)).indices
            for name in _HEAT_VARIANTS:
                of_items = 100.0 * softmax(seen.logits, policy=fitted.variants[0][name]).gather(-1, order)
                rows[name] += [[float(f"{w:.4g}") for w in row] for row in of_items.tolist()]
        return rows

    found = dict(zip(shown, side_by_side(weights, shown, device_of(head)), strict=True))
    variants = {name: {str(n): found[n][name] for n in shown} for name in _HEAT_VARIANTS}
    return {"sizes": list(shown), "items": _HEAT_ITEMS, "sets": _HEAT_SETS, "arms": variants}


def _detection(measured: Mapping[int, Measured], detector: Detector | None, seed: int) -> dict[str, Any]:
    """AUROC of detecting wrong answers of plain softmax, at each size and over all."""
    signals: dict[str, Callable[[Measured], np.ndarray]] = {
        "confidence": lambda m: -m.confidence,
        "entropy": lambda m: m.entropy["softmax"],
    }
    if detector is not None:
        signals["both"] = lambda m: detector.suspicion(m.confidence, m.entropy["softmax"])
    correct = {n: m.correct["softmax"] for n, m in measured.items()}
    found: dict[str, Any] = {}
    for name, signal in signals.items():
        suspicion = {n: signal(m) for n, m in measured.items()}
        found[name] = {str(n): auroc(suspicion[n], correct[n], seed) for n in measured}
        every = [np.concatenate(list(by_size.values()), axis=1) for by_size in (suspicion, correct)]
        found[name]["pooled"] = auroc(every[0], every[1], seed)
    return found
