"""Pausing the cyclic garbage collector while planning.

Planning allocates millions of small objects that all live until it is done, and the collector's scans take a fifth of
its time: gpt3-175b on 64 GPUs takes 21.1 s with the collector and 17.1 s without, at 0.04 GB more peak memory.
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
