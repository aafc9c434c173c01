"""Attention statistics of every head while a model trains, QK-clip, and a loss that keeps entropy in a band.

`AttentionObserver` measures every k-th step of any training loop. `trainer_callback` and `lightning_callback` add it
to transformers' Trainer and to Lightning. `QKClip` scales down the queries and keys of heads whose logits grow too
large. `EntropyBand` gives a differentiable penalty.

Steps that are not measured have no overhead. A measured step runs without `torch.compile`.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from sharpmax.errors import SharpmaxError, UnsupportedError, reject
from sharpmax.files import read_json, write_text
from sharpmax.integrations import torch_modules
from sharpmax.integrations.transformers.folding import check_not_shared, check_only_queries
from sharpmax.integrations.transformers.interface import install, installed, modules_of, observe, restoring
from sharpmax.integrations.transformers.projections import Projection, projections, query_layer
from sharpmax.integrations.transformers.support import check_model, is_torch_module, require_transformers
from sharpmax.policies.base import Remeasure
from sharpmax.results import FILE_NAME, collect
from sharpmax.stats.call import AttentionCall, without_autocast
from sharpmax.stats.dispatch import measure
from sharpmax.stats.statistics import RowStats

STATE = "attention.json"
"""The file in a checkpoint of transformers' Trainer with the measurements up to the checkpoint."""

_NEEDS = frozenset({"count", "max", "lse", "mean"})
_COLLAPSED, _DISPERSED = 0.05, 0.95  # shares of ln n

Grid = list[list[float]]
"""A number for each head of each layer."""


@dataclass(frozen=True)
class StepStatistics:
    """Statistics of each head in one step, `[layer][head]`: means over rows of at least two keys."""

    step: int
    entropy: Grid  # in nats
    relative_entropy: Grid  # H / ln n: 0 is a collapsed head, 1 a dispersed one
    top_weight: Grid
    max_logit: Grid  # the largest of all rows

    def metrics(self, by_head: bool = False) -> dict[str, float]:
        """The metrics to log; `by_head` adds the entropy and the largest logit of each head."""
        relative = list(chain.from_iterable(self.relative_entropy))
        found = {
            "attention/entropy": fmean(chain.from_iterable(self.entropy)),
            "attention/relative_entropy": fmean(relative),
            "attention/top_weight": fmean(chain.from_iterable(self.top_weight)),
            "attention/max_logit": max(chain.from_iterable(self.max_logit)),
            "attention/collapsed_heads": fmean(one < _COLLAPSED for one in relative),
            "attention/dispersed_heads": fmean(one > _DISPERSED for one in relative),
        }
        for name, grid in (("entropy", self.entropy), ("max_logit", self.max_logit)) if by_head else ():
            for layer, row in enumerate(grid):
                found |= {f"attention/{name}/{layer}.{head}": value for head, value in enumerate(row)}
        return found


def _unwrapped(module: nn.Module) -> Any:
    """The transformers model inside wrappers (DDP, torch.compile, PEFT, a LightningModule), or the module itself."""
    if is_torch_module(module):
        return module
    base = require_transformers().PreTrainedModel
    return next(part for part in module.modules() if isinstance(part, base))


class _Measurement:
    """Sums over the attention calls of one step.

    Only calls inside the model's forward pass count: gradient checkpointing repeats them in the backward pass.
    """

    def __init__(self, model: Any, heads: Sequence[int]) -> None:
        # By layer, `[5, heads]`: the number of rows of at least two keys; their sums of entropy, entropy / ln n and
        # top weight; the largest logit.
        device = next(model.parameters()).device
        nothing = torch.tensor([[0.0]] * 4 + [[-math.inf]], device=device)
        self._found = {layer: nothing.expand(-1, count) for layer, count in enumerate(heads)}
        self._inside = False
        self._undo = ExitStack()
        if heads:
            self._undo.callback(observe(model, self))
            self._undo.callback(model.register_forward_pre_hook(lambda *_: self._enter(True)).remove)
            self._undo.callback(model.register_forward_hook(lambda *_: self._enter(False), always_call=True).remove)
        else:
            self._undo.enter_context(torch_modules.observed(model, self))
        if "torch._dynamo" in sys.modules:  # compiled code has no observable attention calls
            self._undo.enter_context(torch.compiler.set_stance("force_eager"))
        self.close = self._undo.close

    def _enter(self, inside: bool) -> None:
        self._inside = inside

    def wants_call(self) -> bool:
        """Whether the model is in its forward pass."""
        return self._inside

    def __call__(self, call: AttentionCall) -> None:
        """Add the rows of a call."""
        with without_autocast(call.q.device):
            plain = call.softcap is None and call.after_cap is None
            stats = measure(call, "auto", _NEEDS) if plain else call.logits(slice(None)).measure(_NEEDS)
        several, entropy = stats.count > 1, stats.entropy
        relative = entropy / stats.count.clamp_min(2).log()
        parts = torch.stack([several.to(entropy.dtype), entropy, relative, stats.top_weight])
        sums = torch.where(several, parts, 0.0).transpose(1, 2).flatten(2).sum(-1).float()
        peaks = torch.where(stats.count > 0, stats.max, -torch.inf).transpose(0, 1).flatten(1).amax(-1).float()
        before = self._found.get(call.layer)
        if before is not None:
            sums, peaks = before[:4] + sums, torch.maximum(before[4], peaks)
        self._found[call.layer] = torch.cat([sums, peaks[None]])

    def statistics(self, step: int) -> StepStatistics | None:
        """The statistics over all processes; None if no attention ran."""
        if not self._found:
            return None
        layers = [self._found[layer] for layer in sorted(self._found)]
        sums, peaks = torch.split(torch.cat(layers, dim=1), [4, 1])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(sums)
            torch.distributed.all_reduce(peaks, torch.distributed.ReduceOp.MAX)
        if not sums[0].sum():
            return None
        rows = torch.cat([sums[1:] / sums[0].clamp_min(1.0), peaks])
        widths = [one.shape[1] for one in layers]
        return StepStatistics(step, *([part.tolist() for part in torch.split(row, widths)] for row in rows.cpu()))


class AttentionObserver:
    """Entropy, largest logit and top weight of every head, every `every` steps of a training loop.

    The model is a transformers model, or any module that calls `scaled_dot_product_attention`; the layers of such a
    module are its calls, in order. `with observer.step():` surrounds everything from the first forward pass of a step
    to the optimizer's step. Passes that accumulate gradients are measured together, and so are the processes of
    `torch.distributed`. `log` is called with the step and the metrics of each measured step. `save` writes
    `results.json` to `out`; `sharpmax report` draws it.

    Heads whose mean entropy is below 0.05 or above 0.95 times ln n count as collapsed or dispersed. `by_head` also logs
    each head's entropy and largest logit. `clip` acts after every measured step.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 20,
        log: Callable[[int, dict[str, float]], None] | None = None,
        out: str | Path | None = None,
        by_head: bool = False,
        clip: QKClip | None = None,
    ) -> None:
        if every < 1:
            reject("every", every, "1 or more steps")
        self.model = _unwrapped(model)
        self.every, self.out = every, None if out is None else Path(out)
        self.history: list[StepStatistics] = []
        self.steps = 0  # completed steps
        self._log, self._by_head, self._clip = log, by_head, clip
        self._heads = [] if is_torch_module(self.model) else [one.heads for one in modules_of(self.model)]
        self._measurement: _Measurement | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Surround one training step."""
        self.begin()
        try:
            yield
        except BaseException:
            self.cancel()
            raise
        self.end()

    def begin(self) -> None:
        """Begin a step. Further calls before `end` have no effect."""
        if self._measurement is None and self.steps % self.every == 0:
            self._measurement = _Measurement(self.model, self._heads)

    def cancel(self) -> _Measurement | None:
        """Stop measuring the current step and return its measurement, if there is one."""
        begun, self._measurement = self._measurement, None
        if begun is not None:
            begun.close()
        return begun

    def end(self) -> StepStatistics | None:
        """End a step; return its statistics if it was measured."""
        self.steps += 1
        begun = self.cancel()
        found = None if begun is None else begun.statistics(self.steps)
        if found is not None:
            clipped = {} if self._clip is None else {"attention/clipped_heads": float(self._clip(found))}
            self.history.append(found)
            if self._log is not None:
                self._log(self.steps, found.metrics(self._by_head) | clipped)
        return found

    def state_dict(self) -> dict[str, Any]:
        """The number of steps and the measurements as plain values, for a checkpoint."""
        return {"steps": self.steps, "history": [asdict(one) for one in self.history]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.steps = int(state["steps"])
        self.history = [StepStatistics(**one) for one in state["history"]]

    def tables(self) -> dict[str, Any]:
        """The measurements as tables of results; values that are not finite are None."""

        def grid(values: Grid) -> list[list[float | None]]:
            return [[float(f"{one:.5g}") if math.isfinite(one) else None for one in row] for row in values]

        heads = [len(row) for row in self.history[-1].entropy] if self.history else self._heads
        setting = {"model": type(self.model).__name__, "every": self.every, "steps": self.steps}
        setting |= {"layers": len(heads), "heads": heads, "collapsed": _COLLAPSED, "dispersed": _DISPERSED}
        measured = [
            {name: value if name == "step" else grid(value) for name, value in asdict(one).items()}
            for one in self.history
        ]
        return {"setting": setting, "training_heads": measured}

    def save(self, folder: str | Path | None = None) -> Path:
        """Write results.json to `folder` (default: `out`); `sharpmax report` draws it."""
        place = self.out if folder is None else Path(folder)
        if place is None:
            reject("folder", None, "a folder, here or as `out` of the observer")
        if not self.history:
            raise SharpmaxError("AttentionObserver.save: no step was measured; surround steps with `observer.step()`")
        return collect("sharpmax training", self.tables(), seed=None).save(place / FILE_NAME)

    def finish(self) -> None:
        """End the training: write results.json to `out`, if it was given and a step was measured."""
        self.cancel()
        if self.out is not None and self.history and _first_process():
            self.save()

    def __repr__(self) -> str:
        return f"AttentionObserver(every={self.every}, steps={self.steps}, measured={len(self.history)})"


def _first_process() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def trainer_callback(trainer: Any, **options: Any) -> AttentionObserver:
    """Add an `AttentionObserver` to a transformers Trainer; it logs through `Trainer.log`.

    `options` are those of `AttentionObserver`; `out` defaults to the trainer's `output_dir`. A resumed training keeps
    the measurements up to its checkpoint.
    """
    base: Any = require_transformers().TrainerCallback
    options = {"out": trainer.args.output_dir, "log": lambda step, metrics: trainer.log(metrics)} | options
    observer = AttentionObserver(trainer.model, **options)

    def state_of(args: Any, state: Any) -> Path:
        return Path(args.output_dir) / f"checkpoint-{state.global_step}" / STATE

    class AttentionCallback(base):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            file = state_of(args, state)
            nothing = {"steps": state.global_step, "history": []}
            observer.load_state_dict(read_json(file, "observer") if file.is_file() else nothing)

        def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            observer.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            observer.end()

        def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if _first_process():
                write_text(state_of(args, state), json.dumps(observer.state_dict()))

        def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            observer.finish()

    trainer.add_callback(AttentionCallback())
    return observer


def lightning_callback(module: nn.Module, **options: Any) -> Any:
    """A Lightning callback whose attribute `observer` is an `AttentionObserver` of the model in `module`.

    It logs with the module's `log_dict`, and Lightning's checkpoints contain its state.
    """
    base: Any = None
    for name in ("lightning.pytorch", "pytorch_lightning"):
        with suppress(ModuleNotFoundError):
            base = base or importlib.import_module(name).Callback
    if base is None:
        raise UnsupportedError("lightning_callback: Lightning is not installed; install it with: pip install lightning")

    latest: dict[str, Any] = {}
    made = AttentionObserver(module, **{"log": lambda step, metrics: latest["module"].log_dict(metrics)} | options)

    class AttentionCallback(base):  # type: ignore[misc]
        observer = made

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            latest["module"] = pl_module
            made.begin()

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step > made.steps:  # otherwise gradients accumulate
                made.end()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            made.finish()

        def state_dict(self) -> dict[str, Any]:
            return made.state_dict()

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            made.load_state_dict(state)

    return AttentionCallback()


class QKClip:
    """Scale down the weights of heads whose largest logit is above `tau`, as MuonClip does.

    The queries and the keys of such a head are each multiplied by √(tau / largest). If query heads share keys, the
    queries are multiplied by the whole factor. Families that normalise their queries (QK-norm), cap their logits, add a
    position bias or share these weights raise an `UnsupportedError`.

    Give it to `AttentionObserver(model, every=1, clip=QKClip(model, tau))` or to a callback.
    """

    def __init__(self, model: nn.Module, tau: float = 100.0) -> None:
        if not 0.0 < tau < math.inf:
            reject("tau", tau, "a finite number above 0")
        self.tau = tau
        self.clipped: list[tuple[int, int, int, float]] = []  # step, layer, head and its largest logit
        found = check_model(_unwrapped(model))
        family = type(found).__name__
        self._layers: list[tuple[Projection, Projection]] = []
        for layer, one in enumerate(modules_of(found)):
            where = f"layer {layer} of {family}"
            check_only_queries(one, layer, family)
            made = projections(one, where)
            if query_layer(one, where) is not made[0].layer:
                raise UnsupportedError(
                    f"model: {where} normalises its queries (QK-norm), so that scaling their projection has no effect; "
                    "logits are bounded by the gains there, and QK-clip is not needed"
                )
            for projection in made:
                check_not_shared(found, projection.layer, layer)
            self._layers.append(made)

    def __call__(self, statistics: StepStatistics) -> int:
        """Scale the heads of a measured step whose largest logit is above `tau`; return their number."""
        before = len(self.clipped)
        for layer, (largest, (queries, keys)) in enumerate(zip(statistics.max_logit, self._layers, strict=True)):
            factors = torch.ones(len(largest), dtype=torch.float64)
            for head, logit in enumerate(largest):
                if not math.isfinite(logit):
                    raise SharpmaxError(
                        f"QKClip: the largest logit of layer {layer}, head {head} is {logit} at step "
                        f"{statistics.step}; go back to an earlier checkpoint, or train with a smaller rate"
                    )
                if logit > self.tau:
                    factors[head] = self.tau / logit
                    self.clipped.append((statistics.step, layer, head, logit))
            if bool((factors < 1.0).any()):
                alone = len(keys.rows) == len(queries.rows)
                _scale(queries, factors.sqrt() if alone else factors)
                if alone:
                    _scale(keys, factors.sqrt())
        return len(self.clipped) - before


@torch.no_grad()
def _scale(projection: Projection, factors: Tensor) -> None:
    """Multiply the outputs of each head by its factor."""
    layer = projection.layer
    columns = not isinstance(layer, nn.Linear)
    outputs = torch.ones(layer.weight.shape[1 if columns else 0], dtype=torch.float64)
    outputs[projection.rows] = factors[:, None]
    scale = outputs.to(layer.weight.device, torch.float32)
    # One rounding: in bfloat16 a factor near 1 would round to 1, and the head would pass tau again.
    layer.weight.copy_(layer.weight.float() * (scale if columns else scale[:, None]))
    if layer.bias is not None:
        layer.bias.copy_(layer.bias.float() * scale)


def entropy_band_loss(stats: RowStats, low: float = 0.05, high: float = 0.95) -> Tensor:
    """Mean squared distance of H / ln n from the range `low` … `high` over rows of at least two keys; differentiable.

    `stats` are those of `sharpmax.row_stats`, `[..., H, Lq]`.
    """
    if not 0.0 <= low < high <= 1.0:
        reject("low, high", (low, high), "0 ≤ low < high ≤ 1, as shares of ln n")
    several = stats.count > 1
    relative = stats.entropy / stats.count.clamp_min(2).log()
    outside = torch.relu(low - relative) + torch.relu(relative - high)
    loss: Tensor = (outside.square() * several).sum() / several.sum().clamp_min(1)
    return loss


class EntropyBand:
    """A penalty that keeps the entropy of heads between `low` and `high` times ln n while a transformers model trains.

    `with band:` surrounds the training, or a step with its backward pass. `band.loss()` is the mean of
    `entropy_band_loss` over the layers of the last forward pass; add it to the loss with a weight. `heads` are
    (layer, head) pairs (default: all heads). The model must not have a policy.
    """

    def __init__(
        self,
        model: nn.Module,
        low: float = 0.05,
        high: float = 0.95,
        heads: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self.model = check_model(_unwrapped(model))
        self.low, self.high = low, high
        counts = [one.heads for one in modules_of(self.model)]
        self._heads: dict[int, tuple[int, ...] | None] = dict.fromkeys(range(len(counts) if heads is None else 0))
        for layer, head in sorted(set(heads or ())):
            if not (0 <= layer < len(counts) and 0 <= head < counts[layer]):
                reject("heads", (layer, head), f"layers 0 … {len(counts) - 1} and heads below {max(counts)}")
            self._heads[layer] = (*(self._heads.get(layer) or ()), head)
        self._losses: list[Tensor] = []
        self._inside = False
        self._undo = ExitStack()

    def __enter__(self) -> EntropyBand:
        state = installed(self.model)
        if state is not None and not state.observed_only:
            raise UnsupportedError("EntropyBand: the model has a policy; restore it first (sharpmax.restore)")
        self._undo.enter_context(restoring(self.model))
        install(self.model, lambda layer: [_BandRule(self, self._heads[layer])] if layer in self._heads else [])
        self._undo.callback(self.model.register_forward_pre_hook(self._begin).remove)
        self._undo.callback(self.model.register_forward_hook(self._end, always_call=True).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _begin(self, *_: Any) -> None:
        self._losses, self._inside = [], True

    def _end(self, *_: Any) -> None:
        self._inside = False

    def add(self, stats: RowStats) -> None:
        """Add the loss of one attention call, unless it is a recomputation in the backward pass."""
        loss = entropy_band_loss(stats, self.low, self.high)
        if self._inside:
            self._losses.append(loss)

    def loss(self) -> Tensor:
        """The penalty of the last forward pass."""
        if not self._losses:
            raise SharpmaxError("EntropyBand.loss: no attention ran inside `with band:`")
        return torch.stack(self._losses).mean()


class _BandRule:
    """A rule with β = 1 that passes the statistics of its rows, with gradients, to a band."""

    needs = frozenset({"count", "entropy"})

    def __init__(self, band: EntropyBand, heads: tuple[int, ...] | None) -> None:
        self.heads, self._band = heads, band

    def beta(self, stats: RowStats, remeasure: Remeasure | None) -> Tensor:
        """1 in every row."""
        self._band.add(stats)
        return torch.ones(1, 1, device=stats.count.device)
