"""Trained heads on sets of growing size: every variant on the same heads and the same items."""

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
from sharpmax.lazy import require
from sharpmax.models.single_head import WIDTH, SingleHeads
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import LogLength
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.polynomial import PAPER, Polynomial
from sharpmax.stats.dense import centred, dense_stats
from sharpmax.stats.statistics import RowStats
from sharpmax.tasks.max_retrieval import draw, seeded

T = TypeVar("T")
X = TypeVar("X")
Size = TypeVar("Size", bound=int | tuple[int, int])

HARD = "hard"
"""The variant that takes the item with the largest logit alone: the limit of any temperature that goes to 0."""

Progress = Callable[[int], None]
"""Called with the number of items read since the last call."""

_PAGE = {"cpu": 2**15, "cuda": 2**22}
_BLOCK = 2**12
_REACH = 40.0
_COPIES = 8


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
    page = max(1, _PAGE.get(device.type, _PAGE["cpu"]) // most)
    generator = seeded(device, *stream, most)
    at_once = max(1, _items_at_once(device) // most)
    for start in range(0, samples, page):
        drawn = draw((min(page, samples - start),), size, generator)
        for sets in drawn.split(at_once):
            h = _features(head, sets.items)
            s = head.logits(h[None], sets.query[None])[0].masked_fill(~sets.visible, -torch.inf)
            yield Read(head, h, s, sets.priority, sets.best, sets.answer)
            progress(len(s) * most)


def _items_at_once(device: torch.device) -> int:
    """Items whose features, with what is computed from them, fit into memory at once."""
    if device.type != "cuda":
        return _PAGE["cpu"]
    free, _ = torch.cuda.mem_get_info(device)
    return int(min(_PAGE["cuda"], free // (_COPIES * 4 * WIDTH)))


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
    return {size: _measured(list(variants[0]), [found[size, p] for p in range(len(heads))]) for size in sizes}


def _measured(variants: Sequence[str], by_head: Sequence[Mapping[str, np.ndarray]]) -> Measured:
    def gather(name: str) -> np.ndarray:
        return np.stack([columns[name] for columns in by_head])

    return Measured(
        correct={variant: gather(f"correct {variant}") for variant in (*variants, HARD)},
        entropy={variant: gather(f"entropy {variant}") for variant in variants},
        top_weight={variant: gather(f"top {variant}") for variant in variants},
        confidence=gather("confidence"),
        spread=gather("spread"),
    )


def measure_page(seen: Read, variants: Mapping[str, Policy | None]) -> dict[str, Tensor]:
    """What `Measured` holds, for one head and the sets it has just read: [B] by the name of field and variant."""
    s, h = _near(seen)
    visible = s > -torch.inf
    x, _ = centred(s, visible)
    plain = _counting_all(dense_stats(s, visible), seen.logits)
    found: dict[str, Tensor] = {"spread": _spread(seen.logits)}
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


def _counting_all(stats: RowStats, logits: Tensor) -> RowStats:
    """The statistics with every item counted, those out of reach too: some policies go by their number."""
    parts, measured = stats.flatten()
    return RowStats.unflatten(measured, [(logits > -torch.inf).sum(-1), *parts[1:]])


def _spread(logits: Tensor) -> Tensor:
    least = logits.masked_fill(logits == -torch.inf, torch.inf).amin(-1)
    return logits.amax(-1) - least


_STEPS = 60
_TOLERANCE = 1e-9
_LEAST, _MOST = math.log(1e-4), math.log(1e4)


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


_LEAST_WRONG = 10


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


_LARGEST_BETA = 10.0
_LEAST_POINTS = 50
_IN_DISTRIBUTION_SETS = 2048
_PLOTTED = 1000


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
    variants = []
    for target in targets:
        policies: dict[str, Policy | None] = {"softmax": None, "paper": PAPER}
        if refit is not None:
            policies["refit"] = refit
        policies["log-length"] = LogLength(reference=train_sizes[1])
        policies["entropy-target"] = EntropyTarget(float(target))
        variants.append(policies)
    detector = Detector.fit(survey["confidence"], survey["entropy"], survey["correct"])
    return Fitted(variants, table, detector, _left_out(survey, refit, detector))


def _left_out(survey: Mapping[str, np.ndarray], refit: Policy | None, detector: Detector | None) -> dict[str, str]:
    reasons = {}
    if refit is None:
        reasons["refit"] = (
            f"{int(_usable(survey['beta']).sum())} wrongly ranked inputs are too few to fit a polynomial on "
            f"({_LEAST_POINTS} are needed); more --samples, --seeds or larger --sizes give more"
        )
    if detector is None:
        reasons["both"] = "too few wrong answers to fit a failure detector on"
    return reasons


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
