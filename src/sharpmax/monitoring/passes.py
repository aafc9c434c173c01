"""Entropies of the last row of each prompt, and of every n-th generated token, pass by pass."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sharpmax.errors import UnsupportedError
from sharpmax.stats.call import AttentionCall, Logits, without_autocast

_LAST = slice(-1, None)
_AT_ONCE, _AT_ONCE_CPU = 1 << 22, 1 << 16
"""Logits kept until they are measured together: many, to launch few kernels, or what a core's cache holds."""

_NEEDS = frozenset({"mean"})

_MASKS = 2
"""How many masks the layers of one model share: most have one, some another for layers with a sliding window."""


@dataclass(frozen=True, eq=False)
class Row:
    """One row of every sequence of a batch: entropies `[B, heads]` over all layers, and visible keys `[B]`."""

    entropy: Tensor
    count: Tensor
    counts: Tensor | None = None
    """Which sequences it is valid for `[B]`: not padding alone, and not ended before. None: all."""


class Pass:
    """One pass through a model, measured layer by layer; `places` `[B]` are the rows to measure, None the last."""

    def __init__(self, places: Tensor | None = None, counts: Tensor | None = None) -> None:
        self._places, self._counts = places, counts
        self._logits: dict[int, Tensor] = {}
        self._kept = 0
        self._entropy: dict[int, Tensor] = {}
        # Layers with a sliding window see less than the others: the count is that of the layer that sees most.
        self._keys = 0
        self._visible: Tensor | None = None
        self._counted: deque[Tensor] = deque(maxlen=_MASKS)

    def see(self, call: AttentionCall) -> None:
        """Measure the row of every sequence in one layer."""
        if call.queries == 0 or call.keys == 0:
            return
        with without_autocast(call.q.device):
            logits = (call if self._places is None else call.of_rows(self._places)).logits(_LAST)
            # Every operation here delays a generated token, so the rest is done for all layers at once.
            self._logits[call.layer] = logits.scaled(None)
        self._kept += logits.values.numel()
        if self._kept > (_AT_ONCE_CPU if call.q.device.type == "cpu" else _AT_ONCE):
            self._measure()
        if logits.hidden is None:
            self._keys = max(self._keys, call.keys)
        elif not any(call.mask is one for one in self._counted):
            count = (~logits.hidden).expand(call.batch, -1, 1, call.keys).sum(-1).amax((1, 2))
            self._visible = count if self._visible is None else self._visible.maximum(count.to(self._visible.device))
            if call.mask is not None:
                self._counted.append(call.mask)

    def _measure(self) -> None:
        """The entropy of the rows whose logits are kept, those of equal shape at once."""
        self._kept = 0
        alike: dict[Any, list[int]] = {}
        for layer, logits in self._logits.items():
            alike.setdefault((logits.shape[-1], logits.device, logits.dtype), []).append(layer)
        for (_, device, _), layers in alike.items():
            rows = [self._logits.pop(layer) for layer in layers]
            with without_autocast(device):
                stats = Logits(torch.cat(rows, dim=1), None).measure(_NEEDS)
                found = stats.entropy[:, :, 0].split([one.shape[1] for one in rows], dim=1)
            self._entropy.update(zip(layers, found, strict=True))

    def row(self) -> Row | None:
        """The measured row, layers in their order; None if no layer was measured."""
        self._measure()
        if not self._entropy:
            return None
        found = [self._entropy[layer] for layer in sorted(self._entropy)]
        entropy = torch.cat([one.to(found[0].device) for one in found], dim=1)
        count = torch.full((len(entropy),), self._keys, device=entropy.device)
        if self._visible is not None:
            count = self._visible.to(count.device).clamp_min(count)
        return Row(entropy, count, self._counts)


@dataclass(eq=False)
class Run:
    """The sequences of one batch from their prompt on, as one cache holds them."""

    ends: frozenset[int] = frozenset()
    """Tokens that end a sequence: what a model computes after one, while others of the batch go on, is padding."""

    window: int = 1  # how many of the latest rows of generated tokens to keep
    unread: int | None = None
    """Tokens of the prompt that are still to be read, where that is known: what follows them is guessed."""

    prompt: Row | None = None
    generated: deque[Row] = field(default_factory=deque)
    _steps: int = 0
    _real: Tensor | None = None
    _ended: Tensor | None = None
    _cache: Any = None

    def holds(self, cache: object) -> bool:
        """Whether these are the sequences of a cache."""
        return self._cache is not None and self._cache() is cache

    def keep(self, cache: object) -> None:
        """Remember the cache that goes on with these sequences, without keeping it alive."""
        self._cache = None if cache is None else weakref.ref(cache)

    def begin(self, given: Mapping[str, Any], every: int) -> tuple[Pass | None, bool]:
        """Begin a pass with these arguments: what measures it (None: nothing), and whether it generates."""
        tokens, length = _input(given)
        # Several tokens after a prompt and before any generated one are the prompt's next part.
        generates = self.prompt is not None and (length == 1 or self._steps > 0)
        if not generates:
            guessed = 0 if self.unread is None else max(0, length - self.unread)
            self.unread = None if self.unread is None else max(0, self.unread - length)
            places, self._real = _last_places(given.get("attention_mask"), tokens, guessed)
            return Pass(places, self._real), False
        self._steps += 1
        ids = given.get("input_ids")
        if self.window and self.ends and isinstance(ids, Tensor) and len(ids) > 1:
            over = torch.isin(ids[:, 0], torch.tensor(sorted(self.ends), device=ids.device))
            self._ended = over if self._ended is None else self._ended | over
        if self.window == 0 or self._steps % every:
            return None, True
        # Of several tokens the first is the model's own; the others are guesses of speculative decoding.
        places = None if length == 1 else torch.zeros(len(tokens), dtype=torch.long, device=tokens.device)
        return Pass(places, _both(self._real, None if self._ended is None else ~self._ended)), True

    def end(self, row: Row, generates: bool) -> None:
        """Keep the row of a pass."""
        if not generates:
            self.prompt = row
        elif self.prompt is not None and len(row.entropy) == len(self.prompt.entropy):
            self.generated.append(row)
            while len(self.generated) > self.window:
                self.generated.popleft()


def _input(given: Mapping[str, Any]) -> tuple[Tensor, int]:
    """The tokens that a pass reads, as they are or embedded `[B, L, …]`, and how many of each sequence."""
    found = given.get("input_ids")
    found = given.get("inputs_embeds") if found is None else found
    if not isinstance(found, Tensor) or found.ndim < 2:
        raise UnsupportedError("the model was given neither input_ids [B, L] nor inputs_embeds [B, L, D]")
    return found, found.shape[1]


def _last_places(mask: object, tokens: Tensor, guessed: int) -> tuple[Tensor | None, Tensor | None]:
    """The last place of each sequence that is neither padding nor guessed, and whether it has one; None: the last."""
    batch, length = tokens.shape[:2]
    if not isinstance(mask, Tensor) or mask.ndim != 2 or length == 0 or mask.shape[1] < length:
        return (torch.full((batch,), length - 1 - guessed, device=tokens.device) if guessed else None), None
    real = mask[:, mask.shape[1] - length : mask.shape[1] - guessed] > 0
    last = real.shape[1] - 1 - real.flip(-1).to(torch.uint8).argmax(-1)
    return last, real.any(-1)


def _both(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other.to(one.device)
