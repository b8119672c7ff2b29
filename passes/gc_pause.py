"""Pausing the cyclic garbage collector: its scans of millions of objects that live until planning ends take a fifth of
the time (gpt3-175b on 64 GPUs: 21.1 s with the collector, 17.1 s and 0.04 GB more peak memory without), and a third of
that of importing everything for it (1.25 s with the collector, 0.8 s without).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Suspend cyclic garbage collection; usable as a context manager and as a decorator."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
