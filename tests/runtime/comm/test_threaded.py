"""The lockstep runner: failures, disagreements and deadlocks are named, nothing hangs, thread state persists."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from autoptd.errors import RuntimeFault
from autoptd.layout.mesh import Mesh
from autoptd.ops.tp_axis import Axis
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep


def test_results_come_by_rank_and_coordinates_are_the_mesh_s() -> None:
    mesh = Mesh(2, 2, 2)
    results = run_lockstep(mesh, lambda c: (c.rank, c.stage, c.dp.rank, c.tp.rank))
    assert results == [(r, *mesh.coordinates(r)) for r in range(8)]


def test_the_first_failure_ends_all_and_is_the_cause() -> None:
    def body(c: Communicators) -> None:
        if c.rank == 3:
            raise ZeroDivisionError("by hand")
        c.world.all_reduce(torch.ones(1))

    start = time.monotonic()
    with pytest.raises(RuntimeFault, match="rank 3 failed: ZeroDivisionError: by hand") as caught:
        run_lockstep(Mesh(8), body)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert time.monotonic() - start < 1


@pytest.mark.parametrize(
    ("odd", "even", "message"),
    [
        (lambda g: g.all_reduce(torch.ones(2)), lambda g: g.all_reduce(torch.ones(3)), r"float32\[2\].*float32\[3\]"),
        (lambda g: g.all_reduce(torch.ones(2)), lambda g: g.all_reduce(torch.ones(2).double()), "float32.*float64"),
        (lambda g: g.all_reduce(torch.ones(2)), lambda g: g.all_gather(torch.ones(2)), "all_reduce.*all_gather"),
        (lambda g: g.all_reduce(torch.ones(2)), lambda g: g.all_reduce(torch.ones(2), "max"), "sum.*max"),
        (lambda g: g.broadcast(torch.ones(2), 0), lambda g: g.broadcast(torch.ones(2), 1), "from 0.*from 1"),
    ],
)
def test_ranks_that_disagree_are_both_named(odd: object, even: object, message: str) -> None:
    def body(c: Communicators) -> None:
        (odd if c.rank % 2 else even)(c.world)  # type: ignore[operator]

    parts = message.split(".*")
    with pytest.raises(RuntimeFault, match=f"ranks . and . disagree.*({message}|{'.*'.join(reversed(parts))})"):
        run_lockstep(Mesh(2), body)


def test_another_order_on_one_rank_is_a_disagreement() -> None:
    def body(c: Communicators) -> None:
        for n in (1, 2) if c.rank else (2, 1):
            c.world.all_reduce(torch.ones(n))

    with pytest.raises(RuntimeFault, match="disagree"):
        run_lockstep(Mesh(4), body)


@pytest.mark.fault("crossed waits")
def test_a_deadlock_is_found_at_once() -> None:
    def body(c: Communicators) -> None:
        one = torch.ones(1)
        if c.stage == 0:
            c.edges[0, "backward"].receive(one).wait()
        else:
            c.edges[0, "forward"].receive(one).wait()

    start = time.monotonic()
    with pytest.raises(RuntimeFault, match=r"(?s)deadlock.*rank 0 in receive.*rank 1 in receive"):
        run_lockstep(Mesh(pp=2), body)
    assert time.monotonic() - start < 1


def test_a_rank_that_returns_early_leaves_no_one_waiting() -> None:
    def body(c: Communicators) -> None:
        if c.rank:
            c.world.all_reduce(torch.ones(1))

    with pytest.raises(RuntimeFault, match=r"(?s)deadlock.*rank 1 in all_reduce.*without ranks \[0\]"):
        run_lockstep(Mesh(2), body)


def test_a_rank_that_never_comes_is_named() -> None:
    def body(c: Communicators) -> None:
        if c.rank == 1:
            time.sleep(0.6)
        c.world.all_reduce(torch.ones(1))

    with pytest.raises(RuntimeFault, match=r"rank 0 waited 0.2 s in all_reduce.* for ranks \[1\]"):
        run_lockstep(Mesh(2), body, timeout_s=0.2)


@pytest.mark.fault("written while sent")
def test_a_message_written_while_under_way_is_caught() -> None:
    def body(c: Communicators) -> None:
        x = torch.ones(2)
        if c.stage == 0:
            handle = c.edges[0, "forward"].send(x)
            x.add_(1)
            c.world.all_reduce(torch.ones(1))
            handle.wait()
        else:
            c.world.all_reduce(torch.ones(1))
            c.edges[0, "forward"].receive(x).wait()

    with pytest.raises(RuntimeFault, match="rank 0 wrote to a tensor that it was still sending"):
        run_lockstep(Mesh(pp=2), body)


def test_checkpointing_saved_tensor_hooks_and_grad_mode_are_per_rank() -> None:
    """Half of the ranks recompute a block that communicates, half save its activations; gradients agree."""

    def body(c: Communicators) -> tuple[Tensor, int]:
        axis, packed = Axis(c.tp), [0]
        x = torch.linspace(0, 1, 6, dtype=torch.float64).requires_grad_()

        def block(y: Tensor) -> Tensor:
            return axis.all_reduce_both(torch.sin(torch.sin(y * (axis.rank + 1))))

        def pack(y: Tensor) -> Tensor:
            packed[0] += 1
            return y

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
            out = checkpoint(block, x, use_reentrant=False) if c.dp.rank == 0 else block(x)
        with torch.set_grad_enabled(c.rank % 2 == 0):
            assert (x * 1).requires_grad == (c.rank % 2 == 0)
        (out**2).sum().backward()
        assert x.grad is not None
        return c.tp.all_reduce(x.grad), packed[0]

    results = run_lockstep(Mesh(dp=2, tp=4), body)
    for gradient, _ in results[1:]:
        torch.testing.assert_close(gradient, results[0][0], rtol=1e-14, atol=0)
    assert results[0][1] < results[-1][1]


def test_speed() -> None:
    """100 collectives of 8 ranks take well under a second."""

    def body(c: Communicators) -> None:
        x = torch.ones(64)
        for _ in range(100):
            c.world.all_reduce(x)

    start = time.monotonic()
    run_lockstep(Mesh(8), body)
    assert time.monotonic() - start < 2
