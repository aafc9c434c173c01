"""A stand-in for Apple's GPU: tensors that say they live on `mps`, are computed on the CPU, and are never float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

MPS = torch.device("meta")


class Placed(torch.Tensor):
    """A tensor on that device; `held` has its values."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Placed:
        _refuse(held.dtype)
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=MPS, storage_offset=held.storage_offset()
        )
        made.held = held
        return made

    def tolist(self) -> Any:
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return run(func, args, kwargs or {})


def _refuse(dtype: Any) -> None:
    if dtype in (torch.float64, torch.complex128):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.")


def run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation on the values: what comes out is on the device where something that went in was, or where asked."""
    found: list[Placed] = []

    def held(x: Any) -> Any:
        if isinstance(x, Placed):
            found.append(x)
            return x.held
        return torch.device("cpu") if isinstance(x, torch.device) and x.type == "meta" else x

    plain, named = tree_map(held, args), tree_map(held, kwargs)
    asked = kwargs.get("device")
    if found:
        _refuse(kwargs.get("dtype"))
    there = bool(found) if asked is None else torch.device(asked).type == "meta"
    out = function(*plain, **named)
    if function in (torch.ops.aten.copy_.default, torch.ops.aten.index_put_.default):
        there = isinstance(args[0], Placed)
    for before in (*args, *kwargs.values()):
        if isinstance(before, Placed) and out is before.held:  # in place
            return before
    return tree_map_only(torch.Tensor, Placed, out) if there else out


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(function, args, kwargs or {})


class _Made(TorchFunctionMode):
    """`torch.tensor` puts numbers on a device by a way of its own."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if function in (torch.tensor, torch.as_tensor) and device is not None:
            made = function(*args, **{**kwargs, "device": "cpu"})
            return made.to(device)
        return function(*args, **kwargs)


@contextmanager
def stand_in() -> Iterator[str]:
    """The name of a device that has no float64, for as long as the block lasts."""
    with _Mode(), _Made():
        yield "meta"
