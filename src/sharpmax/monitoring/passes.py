"""Rows that a model computes anyway, pass by pass: the last of each prompt, and that of every so many tokens."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sharpmax.errors import UnsupportedError
from sharpmax.integrations.transformers.observers import Seen
from sharpmax.stats.call import without_autocast

_LAST = slice(-1, None)
_AT_ONCE, _AT_ONCE_CPU = 1 << 22, 1 << 16
"""Logits kept until they are measured together: many, to launch few kernels, or what the cache of a core holds."""

_MASKS = 2
"""How many masks the layers of one model share: most have one, some another for layers with a window."""


@dataclass(frozen=True, eq=False)
class Row:
    """One row of every sequence of a batch: entropies `[B, heads]` over all layers, and visible keys `[B]`."""

    entropy: Tensor
    count: Tensor
    counts: Tensor | None = None
    """Which sequences it says something about `[B]`: not mere padding, and not at their end before. None: all."""


class Pass:
    """One pass through a model while its layers report it; `places` `[B]` are the rows to look at, None the last."""

    def __init__(self, places: Tensor | None = None, counts: Tensor | None = None) -> None:
        self._places, self._counts = places, counts
        self._logits: dict[int, Tensor] = {}
        self._kept = 0
        self._negative: dict[int, Tensor] = {}
        # Layers with a window see less than the others: what counts is how far back any of them sees.
        self._keys = 0
        self._visible: Tensor | None = None
        self._counted: deque[Tensor] = deque(maxlen=_MASKS)

    def see(self, seen: Seen) -> None:
        """Measure the row of every sequence in one layer."""
        if seen.queries == 0 or seen.keys == 0:
            return
        with without_autocast(seen.query.device):
            logits = (seen if self._places is None else seen.own_rows(self._places)).rows(_LAST)
            # Every operation here counts while a token is generated, so the rest is left for all layers at once.
            self._logits[seen.layer] = logits.scaled(None)[:, :, 0]
        self._kept += logits.values.numel()
        if self._kept > (_AT_ONCE_CPU if seen.query.device.type == "cpu" else _AT_ONCE):
            self._measure()
        if logits.hidden is None:
            self._keys = max(self._keys, seen.keys)
        elif not any(seen.mask is one for one in self._counted):
            visible = (~logits.hidden).expand(seen.batch, -1, 1, seen.keys).sum(-1).amax((1, 2))
            self._visible = (
                visible if self._visible is None else torch.maximum(self._visible, visible.to(self._visible.device))
            )
            if seen.mask is not None:
                self._counted.append(seen.mask)

    def _measure(self) -> None:
        """−H of the rows whose logits are known, in one go for those of a kind."""
        self._kept = 0
        alike: dict[Any, list[int]] = {}
        for layer, logits in self._logits.items():
            alike.setdefault((logits.shape[-1], logits.device, logits.dtype), []).append(layer)
        for (_, device, _), layers in alike.items():
            rows = [self._logits.pop(layer) for layer in layers]
            with without_autocast(device):
                logs = torch.cat(rows, dim=1).log_softmax(-1)
                found = torch.linalg.vecdot(logs.exp(), logs)
            self._negative.update(zip(layers, found.split([one.shape[1] for one in rows], dim=1), strict=True))

    def row(self) -> Row | None:
        """What was seen, layers in their order; None if nothing was."""
        self._measure()
        if not self._negative:
            return None
        found = [self._negative[layer] for layer in sorted(self._negative)]
        entropy = -torch.cat([one.to(found[0].device) for one in found], dim=1)
        count = torch.full((len(entropy),), self._keys, device=entropy.device)
        return Row(
            entropy, count if self._visible is None else self._visible.to(count.device).clamp_min(count), self._counts
        )


@dataclass(eq=False)
class Run:
    """The sequences of one batch from their prompt on, as one cache holds them."""

    ends: frozenset[int] = frozenset()
    """Tokens that end a sequence: what a model computes after one, while the others go on, is about padding."""

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
        """A pass with these arguments of the model: how to look at it (None: not at all), and if it generates."""
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
        # Of several tokens the first is the model's own, and the others are guesses at what it will say next.
        places = None if length == 1 else torch.zeros(len(tokens), dtype=torch.long, device=tokens.device)
        return Pass(places, _both(self._real, None if self._ended is None else ~self._ended)), True

    def end(self, row: Row, generates: bool) -> None:
        """Keep what a pass showed."""
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
