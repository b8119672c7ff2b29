"""Every method of a Parallel that waits for other ranks does so within the watchdog's context: outside of it, a rank
that dies would be seen as torch's broken connection, without its cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autoptd
import autoptd.evaluating
from autoptd.checkpoint import saver
from autoptd.errors import RuntimeFault
from autoptd.runtime.faults.calls import Calls
from autoptd.runtime.faults.heartbeat import Cause
from autoptd.runtime.faults.rank_status import Unwatched
from autoptd.runtime.faults.watchdog import Timeouts, Watchdog
from autoptd.runtime.trainer import Trainer

Call = Callable[[autoptd.Parallel, Path], Any]
BATCH = {"input": torch.ones(4, 4)}
METHODS = ("train_step()", "eval_step()", "train_step()")


class Watched(Unwatched):
    """Raises the cause for a broken connection, as a watchdog does."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, ConnectionError):
            raise RuntimeFault("rank 1 was killed") from None


CALLS: dict[str, tuple[Any, str, Call]] = {
    "state_dict": (Trainer, "state_dict", lambda par, folder: par.state_dict()),
    "gradients": (Trainer, "gradients", lambda par, folder: par.gradients()),
    "local_tensors": (Trainer, "local_tensors", lambda par, folder: par.local_tensors()),
    "first evaluation": (
        autoptd.evaluating,
        "check_same_program",
        lambda par, folder: par.evaluate([BATCH], {"sum": lambda out, batch: out.sum(-1)}),
    ),
    "save": (saver, "group_of_members", lambda par, folder: par.save(folder)),
    "load": (saver, "group_of_members", lambda par, folder: par.load(folder)),
    "resume": (saver, "group_of_members", lambda par, folder: par.resume(folder)),
    "finish_saving": (saver, "group_of_members", lambda par, folder: par.finish_saving()),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_connection_that_breaks_is_explained(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    par = autoptd.parallelize(
        model, world=1, inputs={"input": BATCH["input"][:2]}, loss=lambda out: out.square().mean(), batch=4
    )
    par.train_step(BATCH)
    holder, method, call = CALLS[name]

    def broken(*_: Any, **__: Any) -> None:
        raise ConnectionError("connection closed by peer")

    monkeypatch.setattr(holder, method, broken)
    monkeypatch.setattr(saver.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(par._running, "communicators", replace(par._running.communicators, watch=Watched()))
    with pytest.raises(RuntimeFault, match="rank 1 was killed"):
        call(par, tmp_path)


@pytest.mark.parametrize("name", ["state_dict", "gradients", "local_tensors"])
def test_a_call_is_one_that_ranks_compare(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    par = autoptd.parallelize(
        model, world=1, inputs={"input": BATCH["input"][:2]}, loss=lambda out: out.square().mean(), batch=4
    )
    par.train_step(BATCH)
    status = par._running.communicators.watch.status

    def communicates(*_: Any) -> dict[str, torch.Tensor]:
        status.communicates()
        return par._source.model.state_dict()

    monkeypatch.setattr(Trainer, name, communicates)
    getattr(par, name)()
    assert status.calls.last.method == f"{name}()"


@pytest.mark.parametrize(
    ("state", "known", "told"), [("gone", 1, True), ("gone", 3, False), ("gone", 0, False), ("stopped", 1, False)]
)
def test_a_rank_that_crashed_may_have_been_in_another_method(
    state: str, known: int, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of two collectives with different sizes end one process, before the calls are compared."""
    first, second = (Watchdog(dist.HashStore(), rank, 2, Timeouts(), None) for rank in (0, 1))
    for each, methods in ((first, METHODS[:3]), (second, METHODS[:known])):
        each.status.calls = Calls()
        for method in methods:
            each.status.calls.add(method)
    beat = second._beat(1)
    monkeypatch.setattr(type(beat.process), "state", lambda self: state)
    first._poller.beats[1], first._poller.missed_ticks[1] = beat, first.limits.silent_ticks
    proposed = list[Cause]()
    monkeypatch.setattr(first, "_propose", proposed.append)
    first._check_neighbour()
    assert ["rank 0 called eval_step(), and rank 1 perhaps" in cause.fix for cause in proposed] == [told]
