"""Places in a transformers model where somebody beside it hears of passes and of `generate`, and how to leave them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MethodType
from typing import TYPE_CHECKING, Any

from sharpmax.errors import reject

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["attach", "check_free"]

_MARK = "_sharpmax_attached"
_GENERATE = "generate"

Arguments = tuple[Any, ...]
Options = dict[str, Any]


def check_free(model: PreTrainedModel) -> None:
    """Refuse a model that somebody is beside already."""
    if _MARK in vars(model):
        reject("model", "a model that is watched already", "one monitor at a time", "close the other one first")


def attach(
    model: PreTrainedModel,
    before: Callable[[Arguments, Options], None],
    after: Callable[[Any], None],
    generating: Callable[[Arguments, Options], AbstractContextManager[Any]],
) -> list[Callable[[], Any]]:
    """Call `before` and `after` each pass (with its outcome, None for an error), and `generate` inside `generating`.

    Returns what to call, last first, to leave the model as it was. Copies of the model are left alone: these are
    functions, which a copy shares, and not methods of an object that it would copy too.
    """
    check_free(model)
    vars(model)[_MARK] = True

    def entering(this: Any, args: Arguments, kwargs: Options) -> None:
        if this is model:
            before(args, kwargs)

    def leaving(this: Any, args: Arguments, kwargs: Options, out: Any) -> None:
        if this is model:
            after(out)

    return [
        lambda: vars(model).pop(_MARK, None),
        model.register_forward_pre_hook(entering, with_kwargs=True).remove,
        model.register_forward_hook(leaving, with_kwargs=True, always_call=True).remove,
        *_around_generate(model, generating),
    ]


def _around_generate(
    model: PreTrainedModel, generating: Callable[[Arguments, Options], AbstractContextManager[Any]]
) -> list[Callable[[], Any]]:
    if not hasattr(model, _GENERATE):
        return []
    own = vars(model).get(_GENERATE)
    kind: Any = type(model)

    @functools.wraps(kind.generate)
    def generate(this: Any, *args: Any, **kwargs: Any) -> Any:
        if this is not model:
            return type(this).generate(this, *args, **kwargs)
        with generating(args, kwargs):
            return kind.generate(this, *args, **kwargs) if own is None else own(*args, **kwargs)

    vars(model)[_GENERATE] = bound = MethodType(generate, model)

    def restore() -> None:
        if vars(model).get(_GENERATE) is bound:  # somebody else may have wrapped it meanwhile
            del vars(model)[_GENERATE]
            vars(model).update({} if own is None else {_GENERATE: own})

    return [restore]
