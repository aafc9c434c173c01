"""Evaluate trained heads on sets of growing size: fit policies, measure every variant on the same sets, make tables."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from sharpmax.arrays import in_float64
from sharpmax.errors import OutOfRangeWarning
from sharpmax.experiments.engine import one_thread_each, without_denormals
from sharpmax.experiments.stacked_training import recipe_named
from sharpmax.experiments.statistics import auroc, compare, seed_mean
from sharpmax.models.stacked import WIDTH, SingleHeads
from sharpmax.models.weights import Trained
from sharpmax.ops.softmax import softmax
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import LogLength
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.polynomial import PAPER, Polynomial
from sharpmax.results import json_values
from sharpmax.stats.statistics import RowStats, centred, dense_stats
from sharpmax.tasks.sized import CLASSES, draw, seeded

T = TypeVar("T")
X = TypeVar("X")
Size = TypeVar("Size", bound=int | tuple[int, int])

HARD = "hard"
"""The variant that takes only the item with the largest logit: the limit of temperature 0."""

Progress = Callable[[int], None]
"""Called with the number of items read since the last call."""

SIZES = tuple(2**power for power in range(4, 15))
"""Sizes of the paper's test: 16 … 16,384 items."""

_BASELINE = (98.6, 97.1, 94.3, 89.7, 81.3, 70.1, 53.8, 35.7, 22.6, 15.7, 12.4)
_ADAPTIVE = (98.6, 97.1, 94.5, 89.9, 82.1, 72.5, 57.7, 39.4, 24.9, 17.5, 14.0)

PUBLISHED = {
    "softmax": {str(n): value for n, value in zip(SIZES, _BASELINE, strict=True)},
    "paper": {str(n): value for n, value in zip(SIZES, _ADAPTIVE, strict=True)},
}
"""The paper's accuracy by variant and size."""

_HEAT_SETS, _HEAT_ITEMS = 32, 16
_HEAT_VARIANTS = ("softmax", "entropy-target")

_PAGE = {"cpu": 2**15, "cuda": 2**22}  # items drawn together
_AT_ONCE = {"cpu": 2**15, "cuda": 2**19}  # items read together, which take about 2 GB on a GPU
_BLOCK = 2**12
_REACH = 40.0

# Search for the best β: steps, and tolerance and range of ln β.
_STEPS, _TOLERANCE, _LEAST, _MOST = 60, 1e-9, math.log(1e-4), math.log(1e4)

_LEAST_POINTS = 50  # to fit a polynomial


@dataclass(frozen=True)
class Read:
    """Features h [B, n, 128] and logits s [B, n] of a head on some sets. Logits of masked items are −inf."""

    head: SingleHeads
    features: Tensor
    logits: Tensor
    priority: Tensor
    best: Tensor
    answer: Tensor


def side_by_side(work: Callable[[X], T], over: Sequence[X], device: torch.device) -> list[T]:
    """work(x) for every x, in inference mode; on a CPU in parallel, one thread each."""

    def one(x: X) -> T:
        with without_denormals(), torch.inference_mode():  # both are settings of a thread
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
    """Read `samples` sets, page by page; `stream` seeds the random numbers."""
    device = _device_of(head)
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


def _device_of(head: SingleHeads) -> torch.device:
    return next(head.parameters()).device


def _features(head: SingleHeads, items: Tensor) -> Tensor:
    if items.device.type != "cpu":
        return head.features(items[None])[0]
    # In blocks, so that hidden layers stay in the cache of a CPU.
    rows = items.flatten(0, 1)
    h = torch.empty(len(rows), WIDTH)
    for start in range(0, len(rows), _BLOCK):
        h[start : start + _BLOCK] = head.features(rows[None, start : start + _BLOCK])[0]
    return h.view(*items.shape[:2], WIDTH)


@dataclass(frozen=True)
class Measured:
    """Results at one size: arrays [heads, samples] by variant; `confidence` is that of plain softmax."""

    correct: Mapping[str, np.ndarray]
    entropy: Mapping[str, np.ndarray]
    top_weight: Mapping[str, np.ndarray]
    confidence: np.ndarray


def measure(
    heads: Sequence[SingleHeads],
    variants: Sequence[Mapping[str, Policy | None]],
    sizes: Sequence[Size],
    samples: int,
    stream: Sequence[int],
    progress: Progress = lambda items: None,
) -> dict[Size, Measured]:
    """Evaluate the variants of each head (the same names for all, `softmax` first) and `hard` at each size.

    All variants of a head see the same sets. Heads see different ones, so that their spread includes sampling error.
    """

    def one(task: tuple[Size, int]) -> dict[tuple[str, str], np.ndarray]:
        size, position = task
        reads = read(heads[position], size, samples, (*stream, position), progress)
        pages = [measure_page(batch, variants[position]) for batch in reads]
        return {name: torch.cat([page[name] for page in pages]).cpu().numpy() for name in pages[0]}

    # Longest first, so that no long task remains at the end.
    tasks = [(size, position) for size in reversed(sizes) for position in range(len(heads))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OutOfRangeWarning)  # rows outside the fitted range are part of the results
        found = dict(zip(tasks, side_by_side(one, tasks, _device_of(heads[0])), strict=True))

    def gathered(size: Size) -> Measured:
        by_head = [found[size, position] for position in range(len(heads))]
        fields: dict[str, dict[str, np.ndarray]] = {}
        for field, name in by_head[0]:
            fields.setdefault(field, {})[name] = np.stack([one[field, name] for one in by_head])
        return Measured(fields["correct"], fields["entropy"], fields["top_weight"], fields["confidence"]["softmax"])

    return {size: gathered(size) for size in sizes}


def measure_page(batch: Read, variants: Mapping[str, Policy | None]) -> dict[tuple[str, str], Tensor]:
    """The fields of `Measured` for one head and the sets it has just read: [B] by field and variant."""
    s, h = _near(batch)
    visible = s > -torch.inf
    x, _ = centred(s, visible)
    # Policies may depend on the number of items, which includes those that `_near` left out.
    parts, measured = dense_stats(s, visible).flatten()
    in_set = batch.logits > -torch.inf
    plain = RowStats.unflatten(measured, [in_set.sum(-1), *parts[1:]])
    found: dict[tuple[str, str], Tensor] = {}
    weights = []
    for name, policy in variants.items():
        scaled, stats = x, plain
        if policy is not None:
            beta = policy.beta(plain, lambda b: dense_stats(x * b[:, None].to(x.dtype), visible))
            scaled = x * beta[:, None].to(x.dtype)
            stats = dense_stats(scaled, visible)
        found["entropy", name], found["top_weight", name] = stats.entropy, stats.top_weight
        weights.append(scaled.masked_fill(~visible, -torch.inf).softmax(-1))
    pooled = torch.matmul(torch.stack(weights, dim=1), h)
    # Items are sorted by logit, so hard attention takes the first one.
    scores = batch.head.classify(torch.cat((pooled, h[:, :1]), dim=1)[None])[0]
    right = scores.argmax(-1) == batch.answer[:, None]
    found |= {("correct", name): right[:, column] for column, name in enumerate((*variants, HARD))}
    found["confidence", "softmax"] = scores[:, 0].softmax(-1).amax(-1)
    return found


def _near(batch: Read) -> tuple[Tensor, Tensor]:
    """Logits and features of the items with a visible weight, largest logit first.

    At β ≥ 1 an item `_REACH` nats below the top weighs less than e^−40 of it. All such items together are a million
    times below the rounding of float32, and skipping them saves most of the work.
    """
    reach = batch.logits > batch.logits.amax(-1, keepdim=True) - _REACH
    count = int(reach.sum(-1).max())
    s, order = batch.logits.topk(count)
    h = batch.features.gather(1, order[..., None].expand(-1, -1, WIDTH))
    return s.masked_fill(s <= s[:, :1] - _REACH, -torch.inf), h


def best_beta(logits: Tensor, wanted: Tensor) -> Tensor:
    """The β at which softmax(β·logits) gives the item `wanted` [...] of each row [..., n] the most weight, in float64.

    The slope of the weight in β is the weight times s_wanted − E_β[s]. E_β[s] rises with β from the plain mean to the
    maximum, and the best β is where it equals s_wanted. It is ∞ if the wanted item has the largest logit, and 0 if it
    is not above the plain mean, where no temperature helps. Otherwise it is searched between 1e-4 and 1e4. Logits of
    −inf are not part of their row; rows with NaN give NaN.

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
    # Newton's method in u = ln β, where the slope of E[s] is β·Var[s]; bisection where a step leaves the bracket.
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
class Fitted:
    """What was fitted to one recipe's heads: policies by variant for each head, and the polynomial's table."""

    variants: list[dict[str, Policy | None]]
    polynomial: dict[str, Any] | None
    left_out: dict[str, str]  # variants that could not be fitted, and why


def fit(
    heads: Sequence[SingleHeads],
    sizes: Sequence[int],
    samples: int,
    seed: int,
    train_sizes: tuple[int, int],
    progress: Progress,
) -> Fitted:
    """Fit all policies on `fit_samples(samples)` sets per size, which the evaluation does not see."""
    plain: list[dict[str, Policy | None]] = [{"softmax": None} for _ in heads]
    inside = measure(heads, plain, [train_sizes], 2048, (seed, 0), progress)[train_sizes]
    targets = inside.entropy["softmax"].mean(axis=1)

    def surveyed(task: tuple[int, int]) -> list[dict[str, np.ndarray]]:
        size, position = task
        reads = read(heads[position], size, fit_samples(samples), (seed, 1, position), progress)
        return [_survey(batch) for batch in reads]

    tasks = [(size, position) for size in reversed(sizes) for position in range(len(heads))]
    points = [page for pages in side_by_side(surveyed, tasks, _device_of(heads[0])) for page in pages]
    survey = {name: np.concatenate([page[name] for page in points]) for name in points[0]}
    table, refit = _polynomial(survey)
    log_length = LogLength(reference=train_sizes[1])
    common: dict[str, Policy | None] = {"softmax": None, "paper": PAPER, "refit": refit, "log-length": log_length}
    left_out = {}
    if refit is None:
        del common["refit"]
        left_out["refit"] = (
            f"{int(_usable(survey['beta']).sum())} wrongly ranked inputs are too few to fit a polynomial on "
            f"({_LEAST_POINTS} are needed); more --samples, --seeds or larger --sizes give more"
        )
    variants = [{**common, "entropy-target": EntropyTarget(float(target))} for target in targets]
    return Fitted(variants, table, left_out)


def _survey(batch: Read) -> dict[str, np.ndarray]:
    """Entropy and best β of each set; β is NaN where the best item already has the largest logit."""
    missed = batch.logits.argmax(-1) != batch.best
    best = torch.full(missed.shape, torch.nan, dtype=torch.float64)
    best[missed.cpu()] = best_beta(batch.logits[missed], batch.best[missed]).cpu()
    entropy = measure_page(batch, {"softmax": None})["entropy", "softmax"]
    return {"entropy": entropy.cpu().numpy(), "beta": best.numpy()}


def _polynomial(survey: Mapping[str, np.ndarray]) -> tuple[dict[str, Any] | None, Policy | None]:
    """The paper's procedure: a polynomial of degree 4 through (entropy, best β) of the wrongly ranked inputs.

    The best β grows without bound as the wanted item comes close to the top; inputs with a large one are left out.
    """
    used, ends = _usable(survey["beta"]), PAPER.acts_on
    entropy, beta = survey["entropy"][used].astype(np.float64), survey["beta"][used]
    if len(beta) < _LEAST_POINTS:
        return None, None
    policy = Polynomial.fit(entropy, beta)
    shown = np.linspace(0, len(beta) - 1, min(1000, len(beta))).round().astype(int)
    grid = np.linspace(0.0, max(policy.fitted_on[1], 6.5), 200)
    table = {
        "coefficients": list(policy.coefficients),
        "fitted_on": list(policy.fitted_on),
        "paper_acts_on": None if ends is None else [float(end) if np.isfinite(end) else None for end in ends],
        "r2": float(1.0 - (beta - np.polyval(policy.coefficients, entropy)).var() / beta.var()),
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
    return np.asarray((beta > 0.0) & (beta <= 10.0))


def _short(values: np.ndarray) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


def fit_samples(samples: int) -> int:
    """Sets per size for fitting, given those for evaluation."""
    return max(32, samples // 4)


def items_to_read(sizes: Sequence[int], samples: int, heads: int) -> int:
    """About how many items an evaluation reads, to show progress."""
    return (samples + fit_samples(samples)) * sum(sizes) * heads


def reproduce_tables(
    trained: Sequence[Trained],
    sizes: Sequence[int],
    samples: int,
    seed: int,
    device: torch.device,
    progress: Progress = lambda items: None,
) -> dict[str, Any]:
    """The tables of every recipe's heads, evaluated on the same sets."""
    tables: dict[str, Any] = {}
    policies: dict[str, Any] = {}
    left_out: dict[str, Any] = {}
    for weights in trained:
        heads = [weights.heads([position]).to(device) for position in range(len(weights.seeds))]
        fitted = fit(heads, sizes, samples, seed, recipe_named(weights.recipe).sizes, progress)
        measured = measure(heads, fitted.variants, sizes, samples, (seed, 2), progress)
        suffix = "" if weights.recipe == "paper" else f"/{weights.recipe}"
        tables |= {name + suffix: table for name, table in _tables(measured, fitted, heads, seed).items()}
        described = {name: policy.describe() for name, policy in fitted.variants[0].items() if policy is not None}
        targets = [one["entropy-target"].target for one in fitted.variants]  # type: ignore[union-attr]
        described["entropy-target"] = (
            "β ≥ 1 such that H is the head's mean entropy on training sizes, "
            f"{min(targets):.3g} … {max(targets):.3g} nat"
        )
        policies[weights.recipe], left_out[weights.recipe] = described, fitted.left_out
    about = {w.recipe: {"steps": w.steps, "seeds": w.seeds} for w in trained}
    tables["published"] = PUBLISHED
    tables["weights"] = {w.recipe: about[w.recipe] | {"trained": dict(w.provenance)} for w in trained}
    tables["setting"] = {
        "recipes": {recipe: {"describe": recipe_named(recipe).summary, **one} for recipe, one in about.items()},
        "sizes": sizes,
        "samples": samples,
        "train_sizes": recipe_named(trained[0].recipe).sizes,
        "classes": CLASSES,
        "policies": policies,
        "left_out": left_out,
    }
    return json_values(tables)


def _tables(
    measured: Mapping[int, Measured], fitted: Fitted, heads: Sequence[SingleHeads], seed: int
) -> dict[str, Any]:
    """The tables of one recipe: means over heads; shares in percent."""

    def by_size(table: str, factor: float) -> dict[str, dict[int, np.ndarray]]:
        """The mean of each head, by variant and size."""
        names = getattr(next(iter(measured.values())), table)
        return {name: {n: factor * getattr(m, table)[name].mean(axis=1) for n, m in measured.items()} for name in names}

    def means(columns: Mapping[str, Mapping[int, np.ndarray]]) -> dict[str, Any]:
        return {name: {n: seed_mean(cell) for n, cell in cells.items()} for name, cells in columns.items()}

    accuracy = by_size("correct", 100.0)
    found = {
        "accuracy": means(accuracy),
        "comparison": {
            variant: {n: compare(cell, accuracy["softmax"][n]) for n, cell in cells.items()}
            for variant, cells in accuracy.items()
            if variant != "softmax"
        },
        "entropy": means(by_size("entropy", 1.0)),
        "top_weight": means(by_size("top_weight", 100.0)),
        "heat": _heat(heads[0], fitted, list(measured), seed),
        "detection": _detection(measured, seed),
    }
    return found if fitted.polynomial is None else found | {"fit": fitted.polynomial}


def _heat(head: SingleHeads, fitted: Fitted, sizes: Sequence[int], seed: int) -> dict[str, Any]:
    """Weights of the items of highest priority in a few sets, for every second size."""
    shown = sizes[::2]

    def weights(n: int) -> dict[str, list[list[float]]]:
        rows: dict[str, list[list[float]]] = {name: [] for name in _HEAT_VARIANTS}
        for batch in read(head, n, _HEAT_SETS, (seed, 3)):
            order = batch.priority.topk(min(_HEAT_ITEMS, n)).indices
            for name in _HEAT_VARIANTS:
                of_items = 100.0 * softmax(batch.logits, policy=fitted.variants[0][name]).gather(-1, order)
                rows[name] += [[float(f"{w:.4g}") for w in row] for row in of_items.tolist()]
        return rows

    found = dict(zip(shown, side_by_side(weights, shown, _device_of(head)), strict=True))
    variants = {name: {n: found[n][name] for n in shown} for name in _HEAT_VARIANTS}
    return {"sizes": shown, "items": _HEAT_ITEMS, "sets": _HEAT_SETS, "variants": variants}


def _detection(measured: Mapping[int, Measured], seed: int) -> dict[str, Any]:
    """AUROC of detecting wrong answers of plain softmax, by size and pooled."""
    columns: dict[str, dict[int | str, np.ndarray]] = {
        "confidence": {n: -m.confidence for n, m in measured.items()},
        "entropy": {n: m.entropy["softmax"] for n, m in measured.items()},
        "correct": {n: m.correct["softmax"] for n, m in measured.items()},
    }
    for by_size in columns.values():
        by_size["pooled"] = np.concatenate(list(by_size.values()), axis=1)
    correct = columns.pop("correct")
    return {
        name: {n: auroc(suspicion, correct[n], seed) for n, suspicion in by_size.items()}
        for name, by_size in columns.items()
    }
