"""Tables of policies on the device of the queries."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from sharpmax.policies.closed_form import ClosedForm

__all__ = ["Table", "table_of"]

_FEW = 512


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
