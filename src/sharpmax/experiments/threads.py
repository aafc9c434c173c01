"""How a CPU is used well by many small operations: several pieces of work at a time, each on one thread.

Threads that share a small operation wait for one another longer than they work, above all on a machine that is busy
with something else too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread_each() -> Iterator[int]:
    """Operations take one thread; gives the number of threads there are for them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


@contextmanager
def without_denormals() -> Iterator[None]:
    """Numbers too small for a normal float are 0 for the thread that asks; they would slow a CPU down many times."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
