"""torch.export prints the graph so far when it fails, thousands of lines for a large model, and logs what kind it was.
What went wrong, and in which line, is what the error that follows says."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch.export import _trace


@contextmanager
def silent_export() -> Iterator[None]:
    """What `torch.export._trace` (private to torch; seen in 2.13.0) prints and logs of a failure is not shown."""
    log: logging.Logger = _trace.log
    was_off = log.disabled
    vars(_trace)["print"] = lambda *args, **kwargs: None  # found before the builtin one
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = was_off
        vars(_trace).pop("print", None)
