"""Real gloo processes compute what the threads of lockstep do."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autoptd.errors import PlanError, RuntimeFault
from autoptd.layout.mesh import Mesh
from autoptd.ops.group import Group
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.processes import connect_processes
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.testing.process_pool import ProcessPool
from tests.runtime import test_trainer
from tests.runtime import tiny_model as tiny

pytestmark = pytest.mark.ranks


def test_a_world_that_is_not_the_plan_s_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for world in (None, "4"):
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        if world is not None:
            monkeypatch.setenv("WORLD_SIZE", world)
        with pytest.raises(PlanError, match=r"for 8 ranks \(dp2 × tp2 × pp2\), but [14] are running"):
            connect_processes(Mesh(2, 2, 2))
    assert not dist.is_initialized()


def test_one_process_needs_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    reference = tiny.train_plain(torch.optim.SGD, test_trainer.batches(Mesh()), lr=0.1)
    try:
        c = connect_processes(Mesh(), torch.device("cpu"))
        test_trainer.check([test_trainer.train(c, tiny.layout(Mesh()), lr=0.1)], reference)
    finally:
        dist.destroy_process_group()


def every_collective(c: Communicators) -> dict[str, Tensor]:
    """Run each method of each group on integers of several dtypes, so that sums are exact in any order."""
    results: dict[str, Tensor] = {}
    groups: dict[str, Group] = {"tp": c.tp, "dp": c.dp, "pp": c.pp, "world": c.world}
    for name, group in groups.items():
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int16):
            x = (torch.arange(group.size * 6).view(group.size, 6) + c.rank).remainder(16).to(dtype)
            flat, part = x.flatten().clone(), torch.empty(6, dtype=dtype)
            results[f"{name} {dtype} sum"] = group.all_reduce(x.clone())
            results[f"{name} {dtype} max"] = group.all_reduce(x.clone(), "max")
            results[f"{name} {dtype} gather"] = group.all_gather(x)
            results[f"{name} {dtype} scatter"] = group.reduce_scatter(x)
            results[f"{name} {dtype} exchange"] = group.all_to_all(x)
            results[f"{name} {dtype} broadcast"] = group.broadcast(x.clone(), group.size - 1)
            if not dtype.is_floating_point:
                continue
            group.reduce_scatter_later(part, flat).wait()
            results[f"{name} {dtype} scatter later"] = part
            own = flat[group.rank * 6 : group.rank * 6 + 6]
            group.reduce_scatter_later(own, flat).wait()
            group.all_gather_later(flat, own).wait()
            results[f"{name} {dtype} in place"] = flat
        told, narrow = torch.tensor([True, c.rank == 1]), torch.full((group.size, 3), c.rank).to(torch.float8_e5m2)
        results[f"{name} bool"], results[f"{name} any"] = group.all_gather(told), group.all_reduce(told.clone(), "max")
        for key, found in (
            ("gather", group.all_gather(narrow)),
            ("one number", group.all_gather(narrow[0, 0])),
            ("exchange", group.all_to_all(narrow)),
            ("broadcast", group.broadcast(narrow.clone(), 0)),
        ):
            results[f"{name} float8 {key}"] = found.float()
    return results


def several_at_once(c: Communicators) -> dict[str, Tensor]:
    """Run collectives of several groups, waited for in different orders on different ranks."""
    rows = (torch.arange(c.dp.size * 40_003, dtype=torch.float32) + c.rank).remainder(1000)
    own = rows[:40_003].clone()
    first, second, whole, gathered = own.clone(), own.clone(), rows.clone(), rows.clone()
    started = [
        c.dp.reduce_scatter_later(first, rows),
        c.tp.all_reduce_later(whole),
        c.dp.reduce_scatter_later(second, rows + 7),
        c.dp.all_gather_later(gathered, own),
    ]
    empty = c.dp.all_gather(torch.empty(0))
    for handle in started if c.rank % 3 else reversed(started):
        handle.wait()
    return {"first": first, "second": second, "whole": whole, "gathered": gathered, "empty": empty}


def test_what_is_waited_for_in_another_order(pool: ProcessPool) -> None:
    mesh = Mesh(2, 2, 2)
    for real, threads in zip(pool.run(mesh, several_at_once), run_lockstep(mesh, several_at_once), strict=True):
        for name, value in real.items():
            assert torch.equal(value, threads[name]), name


def sums(c: Communicators) -> list[Tensor]:
    """Sum numbers whose sum depends on the order."""
    draw = torch.Generator().manual_seed(c.rank)
    given = [torch.randn(2000, generator=draw, dtype=torch.float32) for _ in range(3)]
    return [c.world.all_reduce(x) for x in given]


def test_sums_are_the_same_bits_on_every_rank_and_run(pool: ProcessPool) -> None:
    first, *others = [*pool.run(Mesh(8), sums), *pool.run(Mesh(8), sums)]
    for other in others:
        assert all(map(torch.equal, first, other))


@pytest.mark.parametrize("mesh", [Mesh(2, 2, 2), Mesh(8, 1, 1)], ids=str)
def test_collectives_agree(pool: ProcessPool, mesh: Mesh) -> None:
    for real, threads in zip(pool.run(mesh, every_collective), run_lockstep(mesh, every_collective), strict=True):
        for name, value in real.items():
            assert torch.equal(value, threads[name]), name


def training(c: Communicators, name: str, overlap: bool) -> dict[str, object]:
    layout = tiny.layout(c.mesh, overlap=overlap)
    return test_trainer.train(c, layout, optimizer=name, lr=0.01, weight_decay=0.1)


@pytest.mark.parametrize("mesh", [Mesh(2, 2, 2), Mesh(1, 2, 4), Mesh(8, 1, 1), Mesh(4, 2, 1), Mesh(2, 1, 4)], ids=str)
def test_training_agrees_with_one_process(pool: ProcessPool, mesh: Mesh) -> None:
    batches = test_trainer.batches(mesh)
    reference = tiny.train_plain(torch.optim.AdamW, batches, lr=0.01, weight_decay=0.1)
    results = pool.run(mesh, training, "adamw", True)
    test_trainer.check(results, reference, 1e-11)
    threads = run_lockstep(mesh, lambda c: training(c, "adamw", True))
    for name, value in threads[0]["weights"].items():  # type: ignore[attr-defined]
        torch.testing.assert_close(results[0]["weights"][name], value, rtol=1e-12, atol=1e-14)  # type: ignore[index]


def test_overlap_and_repetition_change_no_bit(pool: ProcessPool) -> None:
    mesh = Mesh(4, 1, 2)
    first, *others = [pool.run(mesh, training, "sgd", overlap) for overlap in (True, False, True)]
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert a["losses"] == b["losses"] and a["norms"] == b["norms"]
            assert all(torch.equal(b["weights"][n], x) for n, x in a["weights"].items())  # type: ignore[index,attr-defined]


def fail_on_three(c: Communicators) -> None:
    if c.rank == 3:
        raise ValueError("out of luck")


def test_a_failed_rank_is_named_and_the_pool_recovers(pool: ProcessPool) -> None:
    with pytest.raises(RuntimeFault, match=r"(?s)rank 3 failed.*out of luck"):
        pool.run(Mesh(8), fail_on_three)
    assert len(pool.run(Mesh(8), every_collective)) == 8


def answer_with_a_lock(c: Communicators) -> object:
    return threading.Lock()


def test_a_result_that_cannot_be_pickled_is_reported(pool: ProcessPool) -> None:
    with pytest.raises(RuntimeFault, match="cannot pickle"):
        pool.run(Mesh(8), answer_with_a_lock)
