"""Profiler ranges around a rank's actions, with names such as `F3 stage 1 blocks.4 … blocks.7`.

Nothing is recorded while no profiler runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.profiler import record_function

from autoptd.schedule import Action, Actions


def profiling() -> bool:
    """Return whether a torch profiler records this thread. Uses a private function of torch, as of 2.13."""
    return bool(torch.autograd._profiler_enabled())


def in_ranges(actions: Actions, name_of: Callable[[Action], str]) -> Iterator[Action]:
    """Yield the actions; the profiler range of each lasts until the next is requested."""
    for action in actions:
        if profiling():
            with record_function(name_of(action)):
                yield action
        else:
            yield action
