"""Parameters that are gathered while the next step begins, or under ZeRO 3 for each pass: none is read before it is
complete, or after it is freed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoptd.errors import RuntimeFault
from autoptd.layout.layout import Layout, TensorSpec
from autoptd.layout.mesh import Mesh
from autoptd.layout.placements import B
from autoptd.ops.group import Handle
from autoptd.ops.stage import Stage
from autoptd.ops.tp_axis import Axis
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.runtime.trainer import Trainer
from autoptd.runtime.zero import param_buffers as buffers
from autoptd.runtime.zero import param_gather as gathering
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


# ---- ZeRO 3: when a block's parameters are freed in backward ----


class Product(nn.Module):
    """tanh(x·w); `also`: what it calls then. `whole`: return x too."""

    def __init__(self, also: nn.Module | None = None, *, whole: bool = False) -> None:
        super().__init__()
        self.also, self.whole = also, whole
        self.weight = nn.Parameter(torch.empty(4, 4, device="meta", dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(x @ self.weight)
        if self.also is not None:
            y = torch.tanh(self.also(y) @ self.weight.T)
        return (x, y) if self.whole else y


class Calls(Stage):
    """Blocks in a row: one that returns its input, one that is called three times, one that calls another block."""

    inputs = ("x",)
    is_last = True

    def __init__(self, tp: Axis) -> None:
        super().__init__(tp)
        self.first, self.inner, self.giver = Product(), Product(), Product(whole=True)
        self.outer = Product(self.inner)

    def forward(self, *counts: Any, x: Tensor, **given: Any) -> Tensor:
        x, y = self.giver(self.first(x))
        for block in (self.inner, self.inner, self.outer, self.first, self.inner):
            y = block(x + y)
        return y.sum()


def called(zero: int) -> list[dict[str, Tensor]]:
    """Return the gradients of two steps of two microbatches; freed parameters are NaN."""
    names = [f"{name}.weight" for name in ("first", "inner", "giver", "outer")]
    specs = {name: TensorSpec(B, (4, 4), block=name.removesuffix(".weight")) for name in names}
    layout = Layout(Mesh(dp=2), 1, 2, ("x",), specs, precision="fp64", zero=zero)
    random = torch.Generator().manual_seed(0)
    values = {name: torch.randn(4, 4, dtype=torch.float64, generator=random) / 2 for name in names}
    batches = torch.randn(2, 4, 4, dtype=torch.float64, generator=random)

    def body(c: Communicators) -> dict[str, Tensor]:
        made = Trainer(Calls(Axis(c.tp)), layout, c, "sgd", lr=0.1)
        made.load_parameters(values)
        found = {}
        for step, batch in enumerate(batches):
            made.train_step({"x": batch[2 * c.dp.rank :][:2]})
            found |= {f"{step} {name}": x for name, x in made.gradients().items()}
        return found

    return run_lockstep(layout.mesh, body)


def poison(self: buffers.Buffer, bucket: Any) -> None:
    whole = self.whole(bucket)
    whole.untyped_storage().resize_(whole.numel() * whole.itemsize)
    whole.fill_(torch.nan)


def freed_too_early(patch: pytest.MonkeyPatch) -> bool:
    """Return whether ZeRO 3 differs from ZeRO 0."""
    expected = called(0)
    patch.setattr(buffers.Buffer, "free", poison)
    try:
        found = called(3)
    except RuntimeFault as fault:
        assert "finite" in str(fault), fault
        return True
    pairs = [(x, by_name[name]) for by_name, others in zip(found, expected, strict=True) for name, x in others.items()]
    return not all(torch.allclose(x, y, 1e-13, 1e-13) for x, y in pairs)


def test_blocks_that_call_others_or_return_their_input_are_freed_when_they_are_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not freed_too_early(monkeypatch)


@pytest.mark.fault("a block freed too early")
def test_a_block_that_is_freed_when_one_that_it_calls_begins_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are numbered as they end, not as they begin."""
    whole = gathering.Gathering._leave

    def leave(self: gathering.Gathering, unit: gathering.GatherUnit, out: Any) -> None:
        self._calls += 1
        unit.entered = self._calls
        whole(self, unit, out)

    monkeypatch.setattr(gathering.Gathering, "_leave", leave)
    assert freed_too_early(monkeypatch)


@pytest.mark.fault("a block freed too early")
def test_a_block_that_is_freed_whenever_another_begins_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gathering.Gathering._return_to
    monkeypatch.setattr(
        gathering.Gathering, "_return_to", lambda self, unit, call, last, grad: whole(self, unit, call, 0, grad)
    )
    assert freed_too_early(monkeypatch)
