"""Updated parameters that are gathered while the next step begins: no parameter is read before it is complete."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from autoptd.errors import RuntimeFault
from autoptd.layout.mesh import Mesh
from autoptd.ops.group import Handle
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.runtime.zero import param_buffers as buffers
from tests.runtime import test_trainer
from tests.runtime import tiny_model as tiny

MESHES = (Mesh(dp=4), Mesh(2, 2, 2), Mesh(dp=2, pp=2, virtual=2))


class _AtLast:
    """A gather that writes nothing before `wait`, like the slowest network."""

    def __init__(self, out: Tensor, handle: Handle, whole: Tensor, done: Callable[[], None]) -> None:
        self.out, self.handle, self.whole, self.done = out, handle, whole, done

    def wait(self) -> None:
        self.handle.wait()
        self.out.copy_(self.whole)
        self.done()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Delay all gathers until they are waited for; return a list with one entry per wait."""
    waited: list[int] = []

    def start_gather(self: Any, bucket: Any) -> Handle:
        if self.main is not None:
            self.data[self.own(bucket)].copy_(self.shard(bucket))
        out = self.data[bucket.start : bucket.stop]
        own, whole = self.data[self.own(bucket)].clone(), torch.empty_like(out)
        handle = self.group.all_gather_later(whole, own)
        return _AtLast(out, handle, whole, lambda: waited.append(1))

    monkeypatch.setattr(buffers.Buffer, "start_gather", start_gather)
    return waited


def trained(mesh: Mesh, *, later: bool, steps: int = 3) -> list[tuple[list[float], dict[str, Tensor]]]:
    layout = replace(tiny.layout(mesh, micro=1, microbatches=4, schedule=kind_of(mesh)), gather_later=later)

    def body(c: Communicators) -> tuple[list[float], dict[str, Tensor]]:
        trainer = test_trainer.build(c, layout, "adamw", lr=0.05)
        losses = []
        for seed in range(steps):
            losses.append(float(trainer.train_step(test_trainer.share(tiny.batch(4 * mesh.dp, seed), c))))
        losses.append(float(trainer.eval_step(test_trainer.share(tiny.batch(4 * mesh.dp, 9), c))))
        trainer.train_step(test_trainer.share(tiny.batch(4 * mesh.dp, 10), c))
        return losses, trainer.state_dict()

    return run_lockstep(mesh, body)


def kind_of(mesh: Mesh) -> str:
    return "interleaved" if mesh.virtual > 1 else "1f1b"


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_late_gathers_change_no_bit(mesh: Mesh, late: list[int]) -> None:
    at_once, later = (trained(mesh, later=late) for late in (False, True))
    for (losses, state), (others, other) in zip(at_once, later, strict=True):
        assert losses == others
        assert all(torch.equal(state[name], other[name]) for name in state)
    assert late


def test_each_bucket_is_waited_for_where_it_is_read(late: list[int]) -> None:
    """The first module of the next step does not wait for all buckets."""
    mesh = Mesh(dp=2)
    layout = replace(tiny.layout(mesh, micro=1, microbatches=2), gather_later=True)

    def body(c: Communicators) -> tuple[int, int]:
        trainer = test_trainer.build(c, layout)
        trainer.train_step(test_trainer.share(tiny.batch(4, 0), c))
        trainer._buffers.gather_parameters()
        under_way = len(trainer._buffers._gathering)
        trainer._buffers.finish_gathers(["embed.weight"])
        left = len(trainer._buffers._gathering)
        trainer.settle()
        assert not trainer._buffers._gathering
        return under_way, left

    for under_way, left in run_lockstep(mesh, body):
        assert under_way == left + 1 > 2


@pytest.mark.fault("read before gathered")
def test_readers_that_do_not_wait_are_caught(late: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers.Buffers, "gather_before", lambda *_: None)
    (losses, _), *_ = trained(Mesh(dp=4), later=True)
    (expected, _), *_ = trained(Mesh(dp=4), later=False)
    assert losses != expected


@pytest.mark.fault("gathers in another order")
@pytest.mark.parametrize("later", [False, True])
def test_a_rank_that_gathers_in_another_order_is_caught(later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: one rank gathers buckets in storage order, the others in reading order. Equal on all ranks it is none."""
    whole = buffers.Buffers.gather_parameters

    def turned(only: int | None) -> Callable[[Any], None]:
        def gather(self: Any) -> None:
            if only is None or self._states[0].buffer.group.rank == only:
                self._states.reverse()
                whole(self)
                self._states.reverse()
            else:
                whole(self)

        return gather

    expected = trained(Mesh(dp=2), later=later)
    monkeypatch.setattr(buffers.Buffers, "gather_parameters", turned(None))
    assert trained(Mesh(dp=2), later=later)[0][0] == expected[0][0]
    monkeypatch.setattr(buffers.Buffers, "gather_parameters", turned(1))
    with pytest.raises(RuntimeFault):
        trained(Mesh(dp=2), later=later)
