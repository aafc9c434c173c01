"""Tables of policies on the device of the queries."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from sharpmax.policies.base import Policy
from sharpmax.policies.closed_form import ClosedForm, closed_form

_FEW = 512
_MISSING = "?"
_forms: dict[tuple[int, ...], tuple[tuple[Policy, ...], ClosedForm | None, str | None]] = {}


def form_of(policies: tuple[Policy, ...]) -> ClosedForm | None:
    """The closed form of policies, made once for the same ones; None if they have none."""
    key = tuple(map(id, policies))
    if key not in _forms:
        if len(_forms) >= _FEW:
            _forms.clear()
        # The policies are kept with what was made of them: as long as they live, nothing else has their id.
        form = closed_form(policies)
        _forms[key] = (policies, form, _code(form))
    return _forms[key][1]


def code_of(policies: tuple[Policy, ...]) -> str | None:
    """The `code` of the policies' closed form, made once for the same policies; None if they have none.

    A compiler that takes every number for a variable (`dynamic=True`) cannot write it, so a first call comes before.
    """
    key = tuple(map(id, policies))
    code: str | None = _kept(key)
    if code != _MISSING:
        return code
    if torch.compiler.is_compiling():
        return _code(closed_form(policies))
    form_of(policies)
    return _forms[key][2]


def _kept(key: tuple[int, ...]) -> str | None:
    """Asked while compiling, the answer is part of the graph: other policies coming and going do not concern it."""
    return _forms[key][2] if key in _forms else _MISSING


# What torch.compiler.assume_constant_result does, without the second and a half it takes to load torch's compiler.
_kept.__dict__["_dynamo_marked_constant"] = True


def _code(form: ClosedForm | None) -> str | None:
    return None if form is None else form.code


class Table:
    """A `ClosedForm` where a kernel can read it; `stride` is 0 where one row serves every head."""

    def __init__(self, form: ClosedForm, device: torch.device) -> None:
        self.form = form
        self.values: Tensor = torch.tensor(form.table, dtype=torch.float32, device=device)
        self.stride = self.values.shape[1] if len(form.table) > 1 else 0
        self.with_var = "var" in form.needs


@functools.lru_cache(_FEW)
def table_of(code: str, device: torch.device) -> Table:
    """The table of a form's `code`, made once per device and outside of any mode that keeps it from being used again.

    While a CUDA graph is captured nothing can be copied to the device, so a first call must come before.
    """
    with torch.inference_mode(False):
        return Table(ClosedForm.decode(code), device)
