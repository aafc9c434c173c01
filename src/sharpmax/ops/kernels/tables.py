"""Policies as tensors of coefficients on the device of the queries, made once for the same policies."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sharpmax.policies.base import Policy
from sharpmax.policies.closed_form import TARGET, ClosedForm, closed_form

_FEW = 512
_Key = tuple[int, ...]
_forms: dict[_Key, tuple[tuple[Policy, ...], ClosedForm | None]] = {}
_tables: dict[tuple[_Key, torch.device], Coefficients] = {}


class Coefficients(NamedTuple):
    """Coefficients `[heads or 1, width]` as an operator gets them, with `ClosedForm.shape`."""

    values: Tensor
    shape: list[int]

    @property
    def stride(self) -> int:
        """From one head to the next; 0 where one row serves every head."""
        return self.values.shape[1] if self.values.shape[0] > 1 else 0

    @property
    def forms(self) -> int:
        """The forms that occur, one bit each."""
        return self.shape[0]

    @property
    def terms(self) -> int:
        """Coefficients of a polynomial."""
        return self.shape[1]

    @property
    def segments(self) -> int:
        """Pieces of a curve."""
        return self.shape[2]

    @property
    def with_var(self) -> bool:
        """Whether a policy reads the variance."""
        return bool(self.shape[3])

    @property
    def solved(self) -> bool:
        """Whether some β is the solution of an equation."""
        return bool(self.forms >> TARGET & 1)


def form_of(policies: tuple[Policy, ...]) -> ClosedForm | None:
    """The closed form of policies; None if they have none."""
    key = tuple(map(id, policies))
    if key not in _forms:
        if len(_forms) >= _FEW:
            _forms.clear()
            _tables.clear()
        # The policies are kept with what was made of them: as long as they exist, nothing else has their id.
        _forms[key] = policies, closed_form(policies)
    return _forms[key][1]


def table_of(policies: tuple[Policy, ...], device: torch.device) -> Coefficients | None:
    """The coefficients of policies on a device; None if they have no closed form.

    While a CUDA graph is captured nothing can be copied to the device, so a first call must come before.
    """
    key = tuple(map(id, policies))
    if torch.compiler.is_compiling():
        shape = _known_shape(key, device)
        if shape == _NO_FORM:
            return None
        if shape:
            return Coefficients(_known_values(key, device), list(shape))
        form = closed_form(policies)
        return None if form is None else Coefficients(_values(form, device), form.shape)
    form = form_of(policies)
    if form is None:
        return None
    if torch._C._len_torch_dispatch_stack():  # what is made in a mode (of fake tensors, say) is good there alone
        return Coefficients(_values(form, device), form.shape)
    if (key, device) not in _tables:
        with torch.inference_mode(False):
            _tables[key, device] = Coefficients(_values(form, device), form.shape)
    return _tables[key, device]


def _values(form: ClosedForm, device: torch.device) -> Tensor:
    return torch.tensor(form.table, dtype=torch.float32, device=device)


# Asked while compiling, the answers are part of the graph: other policies coming and going do not concern it.


_NO_FORM = (-1,)


def _known_shape(key: _Key, device: torch.device) -> tuple[int, ...]:
    if key in _forms and _forms[key][1] is None:
        return _NO_FORM
    return tuple(_tables[key, device].shape) if (key, device) in _tables else ()


def _known_values(key: _Key, device: torch.device) -> Tensor:
    return _tables[key, device].values


# What torch.compiler.assume_constant_result does, without the second and a half it takes to load torch's compiler.
_known_shape.__dict__["_dynamo_marked_constant"] = True
_known_values.__dict__["_dynamo_marked_constant"] = True
