"""The policy beside a checkpoint: written by `save_pretrained` of an applied model, found by `apply(model, folder)`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharpmax.errors import UnsupportedError
from sharpmax.hf.interface import Installed, installed
from sharpmax.policies import Policy, resolve_policy
from sharpmax.policies.store import BESIDE as FILE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["FILE", "policy_from", "save_with_policy"]


def policy_from(policy: Policy | str | os.PathLike[str] | None) -> Policy:
    """The policy an argument means, in a model as in every other function that takes one."""
    return resolve_policy(policy)


def save_with_policy(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `save_pretrained` while a policy is applied: saves the model as it is without, and the policy."""
    state = installed(model)
    given = inspect.signature(type(model).save_pretrained).bind(model, *args, **kwargs).arguments
    if given.get("push_to_hub"):
        raise UnsupportedError(
            "push_to_hub: save_pretrained uploads before the policy is written; "
            "allowed: model.push_to_hub(...), which uploads the policy too"
        )
    own = (state.own if state is not None else {}).get("save_pretrained", partial(type(model).save_pretrained, model))
    with _plainly_eager(state):
        own(*args, **kwargs)
    if state is not None and state.policy is not None and given.get("is_main_process", True):
        state.policy.save(Path(given["save_directory"]) / FILE)


@contextmanager
def _plainly_eager(state: Installed | None) -> Iterator[None]:
    """A configuration that outputs attentions can only be saved where it names eager attention itself."""
    configs = [one.config for one in (state.modules if state is not None else ()) if one.config.output_attentions]
    names = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation_internal = "eager"
        yield
    finally:
        for config, name in zip(configs, names, strict=True):
            config._attn_implementation_internal = name
