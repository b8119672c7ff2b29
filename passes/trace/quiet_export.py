"""torch.export prints the graph so far when it fails, thousands of lines for a large model, and logs what kind it was.
What went wrong, and in which line, is what the error that follows says."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch.export import _trace

_ALSO = "torch.fx.experimental.symbolic_shapes"  # warns that it does not know the user's line


@contextmanager
def silent_export() -> Iterator[None]:
    """What `torch.export._trace` (private to torch; seen in 2.13.0) prints and logs of a failure is not shown."""
    logs: list[logging.Logger] = [_trace.log, logging.getLogger(_ALSO)]
    were_off = [log.disabled for log in logs]
    vars(_trace)["print"] = lambda *args, **kwargs: None  # found before the builtin one
    for log in logs:
        log.disabled = True
    try:
        yield
    finally:
        for log, was_off in zip(logs, were_off, strict=True):
            log.disabled = was_off
        vars(_trace).pop("print", None)
