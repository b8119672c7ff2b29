"""Silence torch.export: on an error it prints the partial graph, thousands of lines for a large model, and logs the
kind of failure; autoptd's own error names the cause and the user's line. It also warns of what torch itself does."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch.export import _trace

_SYMBOLIC_SHAPES = "torch.fx.experimental.symbolic_shapes"  # warns that it does not know the user's line


@contextmanager
def silent_export() -> Iterator[None]:
    """Suppress what `torch.export._trace` (private to torch; seen in 2.13.0) prints and logs about a failure, and a
    warning of its copies."""
    logs: list[logging.Logger] = [_trace.log, logging.getLogger(_SYMBOLIC_SHAPES)]
    were_off = [log.disabled for log in logs]
    vars(_trace)["print"] = lambda *args, **kwargs: None  # shadows the builtin
    for log in logs:
        log.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
            yield
    finally:
        for log, was_off in zip(logs, were_off, strict=True):
            log.disabled = was_off
        vars(_trace).pop("print", None)
