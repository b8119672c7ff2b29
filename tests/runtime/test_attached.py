"""Groups whose ranks read each other's memory give what threads give, and nothing is overwritten while it is read."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from autoptd.errors import RuntimeFault
from autoptd.runtime import attached
from autoptd.runtime.attached import AttachedGroup, attach, read_memory
from autoptd.runtime.comm import Communicators, Group
from autoptd.runtime.gloo import GlooGroup
from autoptd.runtime.lockstep import run_lockstep
from autoptd.runtime.mesh import Mesh
from autoptd.runtime.pool import Pool

pytestmark = pytest.mark.ranks
MESH = Mesh(2, 2, 1)
LATE_S = 0.3


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4) as made:
        if not all(made.run(MESH, are_attached)):
            assert not can_read_a_child(), "the system allows it, and the ranks did not agree to it"
            pytest.skip("processes may not read each other's memory here")
        made.run(MESH, prepare)
        yield made


def can_read_a_child() -> bool:
    """Whether the system lets a process read another one's memory at all: nothing is easier than that of a child."""
    says = "import ctypes, sys; x = ctypes.create_string_buffer(b'there')\n"
    says += "print(ctypes.addressof(x), flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", says], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    out = torch.zeros(5, dtype=torch.uint8)
    try:
        assert child.stdout is not None
        read_memory(child.pid, int(child.stdout.readline()), out)
    except (RuntimeError, AssertionError):  # the second where there is no such call
        return False
    finally:
        child.communicate("")
    return bytes(out.tolist()) == b"there"


def are_attached(c: Communicators) -> bool:
    return all(isinstance(group, AttachedGroup) for group in (c.dp, c.tp, c.world))


def prepare(c: Communicators) -> None:
    """Everything is large, and has several pieces."""
    attached.LEAST_BYTES, attached.PIECE_BYTES = 0, 256


def every_size(c: Communicators) -> dict[str, Tensor]:
    """Of integers, so that sums are exact in any order; sizes that ranks and pieces do not divide among them."""
    results: dict[str, Tensor] = {}
    groups: dict[str, Group] = {"tp": c.tp, "dp": c.dp, "world": c.world}
    for name, group in groups.items():
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
            for n in (0, 1, 3, 37, 1000):
                key = f"{name} {dtype} {n}"
                x = (torch.arange(group.size * n) * 7 + c.rank).remainder(16).to(dtype)
                own = x[group.rank * n : (group.rank + 1) * n]
                results[f"{key} sum"] = group.all_reduce(x[: group.size * n - 1].clone() if n else x.clone())
                results[f"{key} largest"] = group.all_reduce(x.clone(), "max")
                results[f"{key} gather"] = group.all_gather(own)
                results[f"{key} scatter"] = group.reduce_scatter(x.view(group.size, n).clone())
                group.reduce_scatter_later(own, x).wait()
                group.all_gather_later(x, own).wait()
                results[f"{key} in place"] = x
        results[f"{name} bool"] = group.all_gather(torch.tensor([True, c.rank == 1]))
    return results


def pairs(pool: Pool, body: Callable[..., Any], *args: Any) -> list[tuple[Any, Any]]:
    """What each rank finds as a process, and as a thread."""
    return list(zip(pool.run(MESH, body, *args), run_lockstep(MESH, lambda c: body(c, *args)), strict=True))


def test_every_size_is_that_of_threads(pool: Pool) -> None:
    for real, threads in pairs(pool, every_size):
        for name, value in real.items():
            assert value.dtype == threads[name].dtype and torch.equal(value, threads[name]), name


def overwritten(c: Communicators, what: str) -> Tensor:
    """The first rank comes late; the others overwrite what they gave as soon as they may."""
    group, n = c.world, 4096
    x = torch.arange(group.size * n, dtype=torch.float64) + c.rank
    out = x.new_empty(n if what == "scatter" else x.numel())
    if group.rank == 0:
        time.sleep(LATE_S)
    match what:
        case "scatter":
            group.reduce_scatter_later(out, x).wait()
        case "gather":
            group.all_gather_later(out, x[:n]).wait()
        case "sum":
            group.all_reduce_later(x).wait()
            out.copy_(x)
    x.fill_(-1)
    return out


@pytest.mark.parametrize("what", ["scatter", "gather", "sum"])
def test_nothing_is_overwritten_before_all_have_read_it(pool: Pool, what: str) -> None:
    assert all(torch.equal(real, threads) for real, threads in pairs(pool, overwritten, what))


def crosswise(c: Communicators) -> list[Tensor]:
    """Two groups, waited for in one order by some ranks and in the other by others."""
    x, y = (torch.arange(4096, dtype=torch.float32) + c.rank + i for i in (0, 5))
    started = [c.dp.all_reduce_later(x), c.tp.all_reduce_later(y)]
    for handle in started if c.rank % 3 else reversed(started):
        handle.wait()
    return [x, y]


def two_of_one_group(c: Communicators) -> list[Tensor]:
    """A rank begins the second when the first is over, the others at once: words of one are not those of the other."""
    x, y = (torch.arange(64, dtype=torch.float32) + c.rank + i for i in (0, 5))
    started = [c.world.all_reduce_later(x)]
    if c.rank == 0:
        started[0].wait()
        time.sleep(LATE_S)
    started.append(c.world.all_reduce_later(y))
    for handle in started:
        handle.wait()
    return [x, y]


@pytest.mark.parametrize("body", [crosswise, two_of_one_group])
def test_several_under_way(pool: Pool, body: Callable[[Communicators], list[Tensor]]) -> None:
    assert all(torch.equal(x, y) for real, threads in pairs(pool, body) for x, y in zip(real, threads, strict=True))


def sums(c: Communicators) -> list[Tensor]:
    """Of numbers whose sum depends on the order."""
    draw = torch.Generator().manual_seed(c.rank)
    given = [torch.randn(2000, generator=draw, dtype=torch.float32) for _ in range(3)]
    return [c.world.all_reduce(x) for x in given]


def test_sums_are_the_same_bits_on_every_rank_and_run(pool: Pool) -> None:
    first, *others = [*pool.run(MESH, sums), *pool.run(MESH, sums)]
    for other in others:
        assert all(map(torch.equal, first, other))


def one_cannot(c: Communicators) -> tuple[str, Tensor]:
    """On one rank of the world the others' memory cannot be read."""
    assert isinstance(c.world, GlooGroup)
    there = attached._is_there
    if c.rank == 2:
        attached._is_there = lambda _: False
    try:
        made = attach(GlooGroup(c.world.group))
    finally:
        attached._is_there = there
    return type(made).__name__, made.all_reduce(torch.full((5,), float(c.rank)))


def test_all_send_messages_where_one_cannot_read(pool: Pool) -> None:
    for kind, total in pool.run(MESH, one_cannot):
        assert kind == "GlooGroup" and total.tolist() == [6.0] * 5


def test_a_process_that_is_gone_cannot_be_read() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    with pytest.raises(RuntimeError, match=f"the memory of process {child.pid} cannot be read: No such process"):
        read_memory(child.pid, torch.zeros(1).data_ptr(), torch.zeros(1))


def broken(c: Communicators) -> None:
    if c.rank == 1:

        def fail(process: int, address: int, out: Tensor) -> None:
            raise RuntimeError(f"the memory of process {process} cannot be read: planted")

        attached.read_memory = fail
    c.world.all_reduce(torch.ones(1000))


def test_what_a_reader_meets_is_raised_by_who_waits(pool: Pool) -> None:
    with pytest.raises(RuntimeFault, match=r"(?s)rank 1 failed.*cannot be read: planted"):
        pool.run(MESH, broken)
