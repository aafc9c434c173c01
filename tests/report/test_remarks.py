"""Remarks of policies on a page: what they say of rows, without what they say to the reader of a log."""

from __future__ import annotations

import pytest
import torch

from sharpmax.errors import OutOfRangeWarning
from sharpmax.policies.polynomial import PAPER
from sharpmax.report.words import merged
from sharpmax.stats.dispatch import row_stats


def test_what_a_policy_really_says_ends_with_the_range_it_is_made_for() -> None:
    flat = row_stats(torch.zeros(1, 1, 2, 16), torch.zeros(1, 1, 1000, 16))
    with pytest.warns(OutOfRangeWarning) as caught:
        PAPER.warn_outside(flat)
    (warning,) = caught
    (said,) = merged([str(warning.message)])
    assert said.endswith(f"the range this policy is made for ({PAPER.describe()})")
