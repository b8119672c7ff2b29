"""The origin of a non-finite value: rerun the forward passes of the step and check every module's tensors.

No parameter has changed and dropout draws the same masks, so the values are reproduced. The origin is the first module
that gets finite tensors and returns a non-finite one. Every rank reports its own; the lowest (microbatch, stage) wins.
If all forward passes are finite, a backward pass produced the value, or it was not reproducible.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.runtime.comm.interfaces import Communicators, all_gather_text
from autoptd.runtime.faults.rank_status import RankStatus, Snapshot, ranks

_WIDTH = 512  # bytes of each rank's report
NOWHERE = "all forward passes are finite when rerun: the value came from a backward pass or was not reproducible"


@torch.no_grad()
def origin(stages: Sequence[nn.Module], c: Communicators, forward_passes: Callable[[], object]) -> str:
    """Return a description of the origin, the same on every rank. A collective."""
    found: list[Snapshot] = []
    with _watched(stages, c.watch.status, found):
        forward_passes()
    mine = [found[0].microbatch, found[0].stage, found[0].action, found[0].module] if found else []
    each = [json.loads(text) for text in all_gather_text(json.dumps(mine), c.world, c.device, _WIDTH)]
    if not any(each):
        return NOWHERE
    first = min(report[:2] for report in each if report)
    at = [rank for rank, report in enumerate(each) if report[:2] == first]
    _, _, action, module = each[at[0]]
    parts = [ranks(tuple(at)), f"stage {first[1]}", f"action {action}", f"microbatch {first[0]}", f"module {module}"]
    return "first in " + ", ".join(parts)


@contextmanager
def _watched(stages: Sequence[nn.Module], status: RankStatus, found: list[Snapshot]) -> Iterator[None]:
    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, given: Any, result: Any) -> None:
            if not found and not _finite(_tensors(result)) and _finite(_tensors(given)):
                found.append(replace(status.here, module=name or status.here.module))

        return look

    handles = [module.register_forward_hook(hook(name)) for stage in stages for name, module in stage.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tensors(x: Any) -> Iterable[Tensor]:
    return [x] if isinstance(x, Tensor) else [y for y in x if isinstance(y, Tensor)] if isinstance(x, tuple) else []


def _finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(x.isfinite().all()) for x in tensors if x.is_floating_point())
