"""Training recipes, and models of several seeds trained side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from sharpmax.errors import reject


@dataclass(frozen=True)
class Recipe:
    """Everything that training depends on besides its seed and its length."""

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
        # The paper says "L2 1e-3": as a penalty of ½·1e-3·Σw² on the loss it lands on the paper's baseline.
        Recipe("paper", "Adam, rate 1e-3, L2 penalty 1e-3, as in the paper", l2=1e-3, decay=False),
        # Of the rates 1e-3, 3e-3 and 5e-3 the one with the least loss on 5 … 16 items; at 5e-3 some seeds diverge.
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
"""Steps whose data are drawn together; a training can be saved between blocks."""

_WARM_UP = 3

M = TypeVar("M", bound=nn.Module)

Draw = Callable[[int, int, int], Sequence[Tensor]]
"""Data of a seed for the steps of a block, from (seed, number of the block, steps in it): [steps, batch, ...] each."""

Losses = Callable[[M, Sequence[Tensor]], Tensor]
"""The loss of each seed [S] from the model and one step's data, [S, batch, ...] each."""


class StackedTraining(Generic[M]):
    """Models of several seeds in training, at some step of `steps`; `initial` makes them as they are before it."""

    def __init__(
        self,
        initial: Callable[[], M],
        losses: Losses[M],
        draw: Draw,
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
            # Adam's "weight decay" is this gradient of ½·l2·Σw².
            weight_decay=recipe.l2,
            fused=fused,
            foreach=None if fused else False,
            capturable=on_gpu,
        )
        self._draw = draw
        # Data of `BLOCK` steps, [steps, seeds, batch, ...], and a cursor that walks over them on the device itself.
        self._parts = [torch.stack([part] * len(seeds), dim=1) for part in draw(seeds[0], 0, BLOCK)]
        self._rates = torch.zeros(BLOCK, device=device)
        self._cursor = torch.zeros(1, dtype=torch.long, device=device)
        self._total = torch.zeros(len(seeds), device=device)
        self._advance = self._one_step
        self._one_step()  # brings the optimiser's state into being; what it changed is undone
        self._fresh()
        if on_gpu:
            self._advance = self._captured()

    def state(self) -> dict[str, Tensor]:
        """Everything that changes in training, by name, as copies on the CPU."""
        return _copied(self._moving())

    def restore(self, state: Mapping[str, Tensor], step: int) -> None:
        """Go back (or ahead) to a state that `state()` gave after `step` steps."""
        with torch.no_grad():
            for name, tensor in self._moving().items():
                tensor.copy_(state[name])
        self.step = step

    def heads(self) -> dict[str, Tensor]:
        """The weights alone, as copies on the CPU."""
        return _copied(self.model.state_dict())

    def next_block(self) -> Tensor:
        """Do the steps up to the next multiple of `BLOCK` (or the end); the mean loss of each seed over them."""
        index, offset = divmod(self.step, BLOCK)
        count = min(BLOCK - offset, self.steps - self.step)
        for lane, seed in enumerate(self.seeds):  # the data of a seed do not depend on the other seeds
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
        # Seeds share no weight, so the gradient of the sum is that of each one's own loss.
        losses.sum().backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._total += losses.detach()
        self._cursor += 1

    def _captured(self) -> Callable[[], None]:
        """A step as one CUDA graph: launching its many small kernels one by one takes longer than they do."""
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
        except RuntimeError:  # a user's own normaliser may need the host, which no graph can
            torch.cuda.synchronize()
            advance = self._one_step
        self._fresh()
        return advance

    def _fresh(self) -> None:
        """Undo the steps of the warm-up."""
        initial = self._initial().state_dict()
        zeros = {name: torch.zeros_like(tensor) for name, tensor in self._moving().items()}
        self.restore(zeros | {f"heads.{name}": tensor for name, tensor in initial.items()}, step=0)

    def _moving(self) -> dict[str, Tensor]:
        tensors = {f"heads.{name}": tensor for name, tensor in self.model.state_dict(keep_vars=True).items()}
        for name, parameter in self.model.named_parameters():
            for kind, tensor in self._optimizer.state[parameter].items():
                tensors[f"{kind}.{name}"] = tensor
        return tensors


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
