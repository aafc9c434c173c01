"""The shapes that are measured, at full size or scaled down for a quick look."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sharpmax.errors import reject

__all__ = ["FULL_LENGTH", "SMALLEST_LENGTH", "Shape", "decode_shapes", "prefill_shapes"]

FULL_LENGTH = 16_384
"""The longest of the eight shapes; targets are judged where `length` is this."""

SMALLEST_LENGTH = 16

_PAGE = 64


@dataclass(frozen=True)
class Shape:
    """Queries `[B, H, Lq, D]` against keys and values `[B, Hkv, Lk, D]`, which may lie in pages.

    A shape that `counts` belongs to the mean that its target is about. One that is run `once` is there to show that
    it runs.
    """

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    width: int
    causal: bool = False
    page_size: int | None = None
    counts: bool = True
    once: bool = False

    @property
    def name(self) -> str:
        """What the case is called.

        >>> Shape(1, 32, 8, 16384, 16384, 128, causal=True).name, Shape(8, 32, 8, 1, 32768, 128, page_size=64).name
        ('1 × 32 on 8 heads × 16,384, D 128, causal', '8 × 32,768 keys, D 128, paged')
        """
        if self.queries == 1:
            return f"{self.batch} × {self.keys:,} keys, D {self.width}" + (", paged" if self.page_size else "")
        heads = f"{self.heads} heads" if self.heads == self.kv_heads else f"{self.heads} on {self.kv_heads} heads"
        return f"{self.batch} × {heads} × {self.queries:,}, D {self.width}, {'causal' if self.causal else 'full'}"

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Query rows of all heads."""
        return self.batch * self.heads * self.queries

    @property
    def product_flops(self) -> float:
        """Arithmetic of one matrix product over the pairs that are seen."""
        return 2.0 * self.rows * self.keys * self.width * (0.5 if self.causal else 1.0)

    @property
    def cache_bytes(self) -> int:
        """Keys and values in 16 bits."""
        return 2 * 2 * self.batch * self.kv_heads * self.keys * self.width

    def to_dict(self) -> dict[str, Any]:
        """The numbers as plain JSON values."""
        return asdict(self)


def prefill_shapes(length: int = FULL_LENGTH) -> list[Shape]:
    """The eight shapes, and one of 131,072 tokens that shows that it runs."""
    long, short, longest = (_scaled(n, length) for n in (16_384, 4_096, 131_072))
    eight = [
        Shape(batch, 32, kv_heads, n, n, width, causal)
        for batch, kv_heads, n in ((4, 32, short), (1, 8, long))
        for width in (64, 128)
        for causal in (False, True)
    ]
    return [*eight, Shape(1, 8, 2, longest, longest, 128, causal=True, counts=False, once=True)]


def decode_shapes(length: int = FULL_LENGTH) -> list[Shape]:
    """One new token: the caches of 32,768 keys and more count, a million keys show that it runs."""
    many, most, few, million = (_scaled(n, length) for n in (32_768, 131_072, 8_192, 1_048_576))
    return [
        Shape(8, 32, 8, 1, many, 128),
        Shape(1, 32, 8, 1, most, 128),
        Shape(8, 32, 8, 1, many, 128, page_size=_PAGE),
        Shape(64, 32, 8, 1, few, 128, counts=False),
        Shape(1, 32, 8, 1, million, 128, counts=False, once=True),
    ]


def _scaled(n: int, length: int) -> int:
    if not SMALLEST_LENGTH <= length <= FULL_LENGTH:
        reject("length", length, f"{SMALLEST_LENGTH} … {FULL_LENGTH}")
    return max(2, n * length // FULL_LENGTH)
