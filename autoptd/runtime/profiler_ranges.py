"""Ranges of a profiler around what a rank does, in the plan's words: `F3 stage 1 blocks.4 … blocks.7`.

Nothing is recorded, and nothing made, while no profiler runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.profiler import record_function

from autoptd.schedule import Action, Actions


def profiling() -> bool:
    """Whether a torch profiler records this thread. A private function of torch, as seen in 2.13."""
    return bool(torch.autograd._profiler_enabled())


def in_ranges(actions: Actions, name_of: Callable[[Action], str]) -> Iterator[Action]:
    """The actions; what is done with each before the next is asked for, is in its range."""
    for action in actions:
        if profiling():
            with record_function(name_of(action)):
                yield action
        else:
            yield action
