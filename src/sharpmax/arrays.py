"""The array operations that row statistics and policies are written in, for torch and for JAX.

Dense statistics and every policy are written once, in terms of these operations. Reductions are over the last axis,
which is a row of logits.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from sharpmax.errors import reject, reject_type

_WITH_FLOAT64 = ("cpu", "cuda")
"""The torch devices known to support float64. Apple's (mps) and some others do not."""

Array = Any
"""A `torch.Tensor` or a `jax.Array`."""


class Ops:
    """The operations that both libraries spell alike. Subclasses add the others."""

    inf = math.inf

    def __init__(self, library: Any) -> None:
        self.library = library
        self.where = library.where
        self.exp = library.exp
        self.expm1 = library.expm1
        self.log = library.log
        self.log1p = library.log1p
        self.isnan = library.isnan
        self.ones_like = library.ones_like
        self.zeros_like = library.zeros_like
        self.stack = library.stack
        self.float32, self.float64 = library.float32, library.float64

    @property
    def widest(self) -> Any:
        """The widest floating dtype on the device of the arrays."""
        return self.float64

    def at_least(self, x: Array, floor: Array) -> Array:
        """max(x, floor) elementwise; NaN stays NaN and the gradient of a floored entry is 0."""
        return self.where(x < floor, floor, x)

    def at_most(self, x: Array, ceiling: Array) -> Array:
        """min(x, ceiling) elementwise; NaN stays NaN and the gradient of a cut entry is 0."""
        return self.where(x > ceiling, ceiling, x)

    def sum(self, x: Array) -> Array:
        """Sum over the last axis."""
        return x.sum(-1)

    def max(self, x: Array) -> Array:
        """Maximum over the last axis."""
        return self.library.amax(x, -1)

    def argmax(self, x: Array) -> Array:
        """Position of a maximum on the last axis."""
        return x.argmax(-1)

    def lowest(self, dtype: Any) -> float:
        """The most negative finite number of a dtype."""
        return float(self.library.finfo(dtype).min)

    def statistics_dtype(self, x: Array) -> Any:
        """The dtype of statistics: float32, or float64 for float64 input."""
        return self.float64 if x.dtype == self.float64 else self.float32

    def broadcast_mask(self, mask: Array, shape: tuple[int, ...]) -> Array:
        """A boolean mask, broadcast to a shape; raises an error if it is not boolean or does not fit."""
        if not is_array(mask) or mask.dtype != self.library.bool:
            given = f"dtype {mask.dtype}" if is_array(mask) else type(mask).__name__
            reject_type("mask", given, "a boolean array, True where a logit takes part")
        try:
            return self.library.broadcast_to(mask, shape)
        except (RuntimeError, ValueError):
            reject("mask", f"shape {tuple(mask.shape)}", f"a shape that broadcasts to {shape}")


class TorchOps(Ops):
    """The operations on torch tensors."""

    def __init__(self) -> None:
        import torch

        super().__init__(torch)
        self.moveaxis = torch.movedim  # vmap does not support torch.moveaxis, which is the same
        self.is_floating = torch.is_floating_point

    # Methods, because torch 2.11 cannot compile a tensor method that is stored as an attribute.

    def cast(self, x: Array, dtype: Any) -> Array:
        """The array in another dtype."""
        return x.to(dtype)

    def stop_gradient(self, x: Array) -> Array:
        """The array without its history."""
        return x.detach()

    # One operation instead of the two of `Ops`, which shows in the time of a generated token.

    def at_least(self, x: Array, floor: Array) -> Array:
        """max(x, floor) elementwise; NaN stays NaN and the gradient of a floored entry is 0."""
        return self.library.clamp(x, min=floor)

    def at_most(self, x: Array, ceiling: Array) -> Array:
        """min(x, ceiling) elementwise; NaN stays NaN and the gradient of a cut entry is 0."""
        return self.library.clamp(x, max=ceiling)

    def positions(self, count: int, like: Array) -> Array:
        """0 … count − 1, on the device of `like`."""
        return self.library.arange(count, device=like.device)

    def param(self, values: Any, like: Array) -> Array:
        """Numbers as an array with the dtype and device of `like`."""
        return self.library.as_tensor(values, dtype=like.dtype, device=like.device)

    def concrete(self, x: Array) -> bool:
        """Whether values can be read: not while tracing, transforming or capturing a CUDA graph."""
        torch = self.library
        if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
            return False
        return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


class NarrowTorchOps(TorchOps):
    """The operations on torch tensors of a device without float64."""

    @property
    def widest(self) -> Any:
        """float32."""
        return self.float32


class JaxOps(Ops):
    """The operations on JAX arrays."""

    def __init__(self) -> None:
        import jax
        import jax.numpy

        super().__init__(jax.numpy)
        self.moveaxis = jax.numpy.moveaxis
        self.cast = jax.numpy.astype
        self.stop_gradient = jax.lax.stop_gradient
        self._tracer = jax.core.Tracer
        self._canonical = jax.dtypes.canonicalize_dtype

    @property
    def widest(self) -> Any:
        """float64 if x64 is on, else float32. It can be switched at any time."""
        return self._canonical(self.float64)

    def positions(self, count: int, like: Array) -> Array:
        """0 … count − 1."""
        return self.library.arange(count)

    def param(self, values: Any, like: Array) -> Array:
        """Numbers as an array with the dtype of `like`."""
        return self.library.asarray(values, dtype=like.dtype)

    def is_floating(self, x: Array) -> bool:
        """Whether the dtype is a floating one."""
        return bool(self.library.issubdtype(x.dtype, self.library.floating))

    def concrete(self, x: Array) -> bool:
        """Whether values can be read: not while tracing."""
        return not isinstance(x, self._tracer)


def _is_jax(x: object) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.Array)


def is_array(x: object) -> bool:
    """Whether x is an array of one of the two libraries."""
    torch = sys.modules.get("torch")
    return _is_jax(x) or (torch is not None and isinstance(x, torch.Tensor))


def in_float64(x: Array) -> Array:
    """A torch tensor in float64, on its device or, if that has no float64, on the CPU."""
    return (x if x.device.type in _WITH_FLOAT64 else x.cpu()).double()


_ops: dict[type[Ops], Ops] = {}


def ops_for(x: Array) -> Any:
    """The operations for the library and the device of `x`."""
    kind: type[TorchOps] | type[JaxOps] = TorchOps  # callers refuse anything that is not an array
    if _is_jax(x):
        kind = JaxOps
    elif hasattr(x, "device") and x.device.type not in _WITH_FLOAT64:
        kind = NarrowTorchOps
    if kind not in _ops:
        _ops[kind] = kind()
    return _ops[kind]


def check_width(q: Array, k: Array) -> None:
    """Refuse queries and keys of different head sizes, or of none."""
    if q.shape[-1] != k.shape[-1]:
        reject("k", f"head size {k.shape[-1]}", f"the head size of q, {q.shape[-1]}")
    if q.shape[-1] == 0:
        reject("q", "head size 0", "a head size of 1 or more")


def check_heads(q: Array, k: Array, enable_gqa: bool) -> tuple[int, int]:
    """The number of key heads, and of query heads per key head. Raises an error if they do not fit."""
    if k.ndim != q.ndim:
        reject("k", f"shape {tuple(k.shape)}", f"{q.ndim} dimensions, as q has {tuple(q.shape)}")
    heads, key_heads = (x.shape[-3] if x.ndim > 2 else 1 for x in (q, k))
    if heads != key_heads:
        given = f"{key_heads} heads for {heads} query heads"
        if not enable_gqa:
            reject("k", given, f"{heads} heads", "pass enable_gqa=True if heads share keys")
        if key_heads == 0 or heads % key_heads:
            reject("k", given, "a number of heads that divides the query's")
    return key_heads, heads // key_heads if key_heads else 1


def check_scale(scale: float | None, width: int) -> float:
    """The factor of the logits, 1/√head size unless given."""
    if scale is None:
        return 1.0 / math.sqrt(width)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        reject_type("scale", type(scale).__name__, "a number or None (1/√head size)")
    if not math.isfinite(scale):
        reject("scale", scale, "a finite number or None (1/√head size)")
    return float(scale)
