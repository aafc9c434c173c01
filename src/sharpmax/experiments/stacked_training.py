"""Training recipes, training models of several seeds at once, and resumable training of the paper's heads."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sharpmax.errors import ArgumentError, reject
from sharpmax.experiments.engine import one_thread_each, without_denormals
from sharpmax.experiments.run_folder import check_identity
from sharpmax.models.stacked import SingleHeads
from sharpmax.models.weights import Trained, load_tensors, must_fit, save_tensors
from sharpmax.provenance import provenance
from sharpmax.tasks.sized import VERSION, draw, seeded


@dataclass(frozen=True)
class Recipe:
    """All settings of a training except its seeds and its length."""

    name: str
    summary: str
    l2: float
    decay: bool
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    warmup: int = 0
    batch: int = 128
    sizes: tuple[int, int] = (5, 16)

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step, 0 … steps − 1."""
        rate = self.learning_rate * (0.5 * (1.0 + math.cos(math.pi * step / steps)) if self.decay else 1.0)
        return rate * min(1.0, (step + 1) / (self.warmup + 1))


STEPS = 100_000
"""Length of a full training, as in the paper."""

RECIPES = {
    recipe.name: recipe
    for recipe in (
        # The paper says "L2 1e-3". As a penalty of ½·1e-3·Σw² on the loss it reproduces the paper's baseline.
        Recipe("paper", "Adam, rate 1e-3, L2 penalty 1e-3, as in the paper", l2=1e-3, decay=False),
        # The rate with the lowest loss on 5 … 16 items, out of 1e-3, 3e-3 and 5e-3, where some seeds diverge.
        Recipe(
            "sharp",
            "Adam, rate 3e-3 after 1,000 steps of warm-up, falling to 0 as a cosine, no L2 penalty",
            l2=0.0,
            decay=True,
            learning_rate=3e-3,
            warmup=1000,
        ),
    )
}


def recipe_named(name: str) -> Recipe:
    """The recipe of that name."""
    if name not in RECIPES:
        reject("recipe", repr(name), " or ".join(map(repr, RECIPES)))
    return RECIPES[name]


BLOCK = 100
"""Steps whose data are drawn together. A training can be saved between blocks."""

_WARM_UP = 3

M = TypeVar("M", bound=nn.Module)


class StackedTraining(Generic[M]):
    """Training of models of several seeds at once, at step `step` of `steps`.

    `initial()` builds the untrained models. `losses(model, data)` is the loss of each seed [S] from one step's data,
    tensors [S, batch, ...]. `draw(seed, block, count)` draws a seed's data for the `count` steps of a block, tensors
    [steps, batch, ...].
    """

    def __init__(
        self,
        initial: Callable[[], M],
        losses: Callable[[M, Sequence[Tensor]], Tensor],
        draw: Callable[[int, int, int], Sequence[Tensor]],
        recipe: Recipe,
        seeds: Sequence[int],
        steps: int,
        device: torch.device,
    ) -> None:
        self.recipe, self.seeds, self.steps, self.device, self.step = recipe, tuple(seeds), steps, device, 0
        self._initial, self._losses = initial, losses
        self.model = initial().to(device)
        self._rate = torch.zeros((), device=device)
        on_gpu = device.type == "cuda"
        fused = device.type in ("cpu", "cuda")
        self._optimizer = torch.optim.Adam(
            self.model.parameters(),
            lr=self._rate,
            betas=recipe.betas,
            # Adam's "weight decay" is the gradient of ½·l2·Σw².
            weight_decay=recipe.l2,
            fused=fused,
            foreach=None if fused else False,
            capturable=on_gpu,
        )
        self._draw = draw
        # Data of `BLOCK` steps, [steps, seeds, batch, ...], and the current step in it, on the device.
        self._parts = [torch.stack([part] * len(seeds), dim=1) for part in draw(seeds[0], 0, BLOCK)]
        self._rates = torch.zeros(BLOCK, device=device)
        self._cursor = torch.zeros(1, dtype=torch.long, device=device)
        self._total = torch.zeros(len(seeds), device=device)
        self._advance = self._one_step
        self._one_step()  # creates the optimiser's state
        self._reset()
        if on_gpu:
            self._advance = self._captured()

    def state(self) -> dict[str, Tensor]:
        """Weights and optimiser state by name, as copies on the CPU."""
        return _copied(self._tensors())

    def restore(self, state: Mapping[str, Tensor], step: int) -> None:
        """Continue from what `state()` returned after `step` steps."""
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                tensor.copy_(state[name])
        self.step = step

    def heads(self) -> dict[str, Tensor]:
        """The weights, as copies on the CPU."""
        return _copied(self.model.state_dict())

    def next_block(self) -> Tensor:
        """Train to the next multiple of `BLOCK`, or the end. Return the mean loss of each seed over these steps."""
        index, offset = divmod(self.step, BLOCK)
        count = min(BLOCK - offset, self.steps - self.step)
        for lane, seed in enumerate(self.seeds):  # a seed's data do not depend on other seeds
            for target, source in zip(self._parts, self._draw(seed, index, BLOCK), strict=True):
                target[:, lane] = source
        rates = [self.recipe.rate(step, self.steps) for step in range(index * BLOCK, (index + 1) * BLOCK)]
        self._rates.copy_(torch.tensor(rates))
        self._cursor.fill_(offset)
        self._total.zero_()
        for _ in range(count):
            self._advance()
        self.step += count
        return self._total / count

    def _one_step(self) -> None:
        self._rate.copy_(self._rates.index_select(0, self._cursor)[0])
        losses = self._losses(self.model, [part.index_select(0, self._cursor)[0] for part in self._parts])
        self._optimizer.zero_grad(set_to_none=True)
        # Seeds share no weights, so the gradient of the sum is that of each seed's loss.
        losses.sum().backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._total += losses.detach()
        self._cursor += 1

    def _captured(self) -> Callable[[], None]:
        """A step as one CUDA graph, since launching its many small kernels takes longer than running them."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                self._one_step()
        torch.cuda.current_stream().wait_stream(stream)
        self._optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        advance: Callable[[], None] = graph.replay
        try:
            with torch.cuda.graph(graph):
                self._one_step()
        except RuntimeError:  # a user's normaliser may synchronise with the host, which a graph cannot
            torch.cuda.synchronize()
            advance = self._one_step
        self._reset()
        return advance

    def _reset(self) -> None:
        """Undo the warm-up steps."""
        initial = self._initial().state_dict()
        zeros = {name: torch.zeros_like(tensor) for name, tensor in self._tensors().items()}
        self.restore(zeros | {f"heads.{name}": tensor for name, tensor in initial.items()}, step=0)

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {f"heads.{name}": tensor for name, tensor in self.model.state_dict(keep_vars=True).items()}
        for name, parameter in self.model.named_parameters():
            for kind, tensor in self._optimizer.state[parameter].items():
                tensors[f"{kind}.{name}"] = tensor
        return tensors


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


class Training(StackedTraining[SingleHeads]):
    """Training of the paper's single heads."""

    def __init__(self, recipe: Recipe, seeds: Sequence[int], steps: int, device: torch.device) -> None:
        def data(seed: int, block: int, steps: int) -> list[Tensor]:
            sets = draw((steps, recipe.batch), recipe.sizes, seeded(device, seed, block))
            return [sets.items, sets.query, sets.visible, sets.answer]

        super().__init__(lambda: SingleHeads.initial(seeds), _losses, data, recipe, seeds, steps, device)


def _losses(heads: SingleHeads, data: Sequence[Tensor]) -> Tensor:
    items, query, visible, answer = data
    scores = heads(items, query, visible)
    losses = F.cross_entropy(scores.flatten(0, 1), answer.flatten(), reduction="none")
    return losses.view(answer.shape).mean(-1)


Progress = Callable[[str, int, float], None]
"""Called with a recipe, its current step, and its mean loss."""

_KIND = "training"
_SAVE_EVERY_S = 5.0
_SHOW_EVERY_S = 0.25


def weights_path(folder: Path, recipe: str) -> Path:
    """The file of the trained weights in a folder."""
    return folder / f"weights-{recipe}.safetensors"


def state_path(folder: Path, recipe: str) -> Path:
    """The file of the state from which a training resumes."""
    return folder / f"training-{recipe}.safetensors"


def train(
    recipes: Sequence[Recipe],
    seeds: Sequence[int],
    steps: int,
    device: torch.device,
    folder: Path,
    *,
    command: str,
    resume: bool = False,
    progress: Progress = lambda recipe, step, loss: None,
    save_every_s: float = _SAVE_EVERY_S,
) -> list[Trained]:
    """Train every recipe, or resume its training, and write the weights. A state is saved every few seconds.

    All recipes are checked before the first one starts. On a CPU one thread trains, so that results do not depend on
    the number of threads.
    """
    runs = [_prepared(Training(recipe, seeds, steps, device), folder, resume=resume) for recipe in recipes]
    with one_thread_each() if device.type == "cpu" else nullcontext():
        return [_trained(*run, folder, command, progress, save_every_s) for run in runs]


def _prepared(training: Training, folder: Path, *, resume: bool) -> tuple[Training, dict[str, Any]]:
    """Restore the training from its saved state, if any. Return it with its settings and the seconds so far."""
    recipe = training.recipe
    about: dict[str, Any] = {
        "recipe": recipe.name, "settings": repr(recipe), "seeds": list(training.seeds), "steps": training.steps,
        "device": training.device.type, "task": VERSION,
    }  # fmt: skip
    file = state_path(folder, recipe.name)
    if not file.exists():
        if weights_path(folder, recipe.name).exists():
            raise ArgumentError(
                f"--out: {str(folder)!r} holds weights of recipe {recipe.name!r} already; test them with --weights, or "
                "choose another folder"
            )
        return training, about | {"seconds": 0.0}
    tensors, saved = load_tensors(file, _KIND)
    if not resume:
        raise ArgumentError(
            f"--out: {str(folder)!r} holds a training of recipe {saved.get('recipe')!r} at step {saved.get('step')} of "
            f"{saved.get('steps')}; add --resume to go on with it, or choose another folder"
        )
    check_identity(file, saved, about)
    with must_fit(file, "the training", "remove it to train from the start"):
        step, seconds = int(saved["step"]), float(saved["seconds"])
        if not 0 <= step <= training.steps:
            raise ValueError(f"step {step} of {training.steps}")
        training.restore(tensors, step)
    return training, about | {"seconds": seconds}


def _trained(
    training: Training, about: dict[str, Any], folder: Path, command: str, progress: Progress, save_every_s: float
) -> Trained:
    name, steps = training.recipe.name, training.steps
    file, result = state_path(folder, name), weights_path(folder, name)
    if training.step == steps and result.exists():
        return Trained.load(result)
    for unfinished in folder.glob(f".{file.name}.*.partial"):  # of a killed run
        unfinished.unlink(missing_ok=True)
    saved = shown = time.monotonic()
    began = saved - about["seconds"]

    def save() -> None:
        about.update(step=training.step, seconds=time.monotonic() - began)
        save_tensors(file, _KIND, training.state(), about)

    progress(name, training.step, math.nan)
    with without_denormals():  # trained heads have denormal gradients
        while training.step < steps:
            loss = training.next_block()
            now = time.monotonic()
            # Reading the loss synchronises with the GPU.
            if now - shown >= _SHOW_EVERY_S or training.step == steps:
                progress(name, training.step, float(loss.mean()))
                shown = now
            if now - saved >= save_every_s:
                save()
                saved = time.monotonic()
    save()
    origin = provenance(training.seeds[0]) | {"command": command, "seconds": round(about["seconds"], 1)}
    trained = Trained(name, steps, training.seeds, training.heads(), origin)
    trained.save(result)
    return trained
