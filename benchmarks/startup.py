"""Seconds until all ranks of a job are connected, and a rank's part of it in a world of 16,384.

Real processes, over gloo on this machine: one process imports torch and autoptd and forks the ranks, since each import
takes seconds of a core. A run ends when every rank has made all of its groups and channels and a number has gone
through each. Simulated ranks: one process takes the place of some ranks of each kind of mesh, one after the other, in a
world of torch's "fake" backend, which answers at once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoptd.layout.mesh import Mesh
from autoptd.ops.group import Group
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.listening import on_loopback
from autoptd.runtime.comm.processes import connect_processes
from autoptd.runtime.faults.heartbeat import Timeouts

WORLDS = 8, 16, 32, 64
BAR_S, BAR_RANK_S = 60.0, 5.0  # all processes of the largest world; the set-up of a simulated rank
SIMULATED = 16_384
KINDS = {
    "data": Mesh(dp=SIMULATED),
    "tensors": Mesh(dp=2048, tp=8),
    "pipeline": Mesh(dp=128, tp=8, pp=16),
    "chunks": Mesh(dp=64, tp=16, pp=16, virtual=3),
    "interleaved": Mesh(dp=256, tp=4, pp=16, virtual=4),
    "two-stages": Mesh(dp=1024, tp=8, pp=2, virtual=2),
    "v": Mesh(dp=128, tp=8, pp=16, virtual=2, stage_order="v"),
    "context": Mesh(dp=16, tp=8, pp=16, cp=8),
    "experts": Mesh(dp=256, tp=4, pp=16, ep=64),
    "all": Mesh(dp=32, tp=4, pp=16, cp=8, ep=8, virtual=2, stage_order="v"),
    "shared-experts": Mesh(dp=32, tp=4, pp=16, cp=8, ep=64, etp=1, virtual=2),
}


def mesh_of(world: int) -> Mesh:
    """Return a mesh with all axes that a small world has room for, and a pipeline laid as a V."""
    pp, cp = (4 if world >= 32 else 2), (2 if world >= 16 else 1)
    return Mesh(dp=world // (2 * pp * cp), tp=2, pp=pp, cp=cp, ep=2, virtual=2, stage_order="v")


def all_groups(c: Communicators) -> list[Group]:
    """Return all groups of a rank; those that a trainer may need besides are made."""
    shards = c.within_dp(2) if c.mesh.copies % 2 == 0 else ()
    tied = c.over_stages((0, c.mesh.pp - 1)) if c.mesh.pp > 1 else None
    stage = c.make_group("stage", c.mesh.stage_ranks(c.stage))
    made = [c.world, c.tp, c.dp, c.cp, c.data, c.pp, c.ep, c.edp, *shards, stage]
    return made if tied is None else [*made, tied]


def exchange(c: Communicators, groups: Sequence[Group]) -> None:
    """Send a number through every group and channel, and check what comes."""
    for group in groups:
        total = float(group.all_reduce(torch.tensor([group.rank + 1.0])))
        assert total == group.size * (group.size + 1) / 2, (c.rank, group)
    edges = c.mesh.route.edges()
    handles = []
    for edge, way in c.edges:
        if edges[edge][way == "backward"] == c.stage:
            handles.append(c.edges[edge, way].send(torch.tensor([100.0 * edge + (way == "forward")])))
    for edge, way in c.edges:
        if edges[edge][way == "backward"] != c.stage:
            got = torch.zeros(1)
            c.edges[edge, way].receive(got).wait()
            assert float(got) == 100 * edge + (way == "forward"), (c.rank, edge, way)
    for handle in handles:
        handle.wait()


def groups_made() -> int:
    """Return how many process groups torch has made in this process, the world's among them."""
    return len(dist.distributed_c10d._world.pg_names)


def _rank(pipe: Connection, rank: int, world: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
    try:
        with on_loopback():
            c = connect_processes(mesh_of(world), torch.device("cpu"), limits=Timeouts(silent_s=60))
            exchange(c, all_groups(c))
        pipe.send((groups_made(), ""))
    except BaseException:  # noqa: BLE001  reported by the parent
        pipe.send((0, traceback.format_exc()))
    pipe.recv()  # until all ranks are done


def connected_s(world: int) -> tuple[float, int]:
    """Fork the ranks of a world; return seconds until all have exchanged messages, and the most groups of a rank."""
    context = multiprocessing.get_context("fork")
    port = _free_port()
    begin, ranks, pipes = time.perf_counter(), [], []
    for rank in range(world):
        mine, theirs = context.Pipe()
        ranks.append(context.Process(target=_rank, args=(theirs, rank, world, port)))
        ranks[-1].start()
        pipes.append(mine)
    found = [pipe.recv() for pipe in pipes]
    took = time.perf_counter() - begin
    for pipe, process in reversed([*zip(pipes, ranks, strict=True)]):  # rank 0 holds the store of the others
        pipe.send(None)
        process.join()
    if failed := [(rank, text) for rank, (_, text) in enumerate(found) if text]:
        raise RuntimeError(f"{len(failed)} ranks failed; rank {failed[0][0]}:\n{failed[0][1]}")
    return took, max(groups for groups, _ in found)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def simulated_s(mesh: Mesh, rank: int) -> tuple[float, int]:
    """Return seconds of the processor for a rank's groups in a world that answers at once, and their number."""
    begin = time.process_time()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=mesh.world)
    try:
        all_groups(connect_processes(mesh, torch.device("cpu")))
        return time.process_time() - begin, groups_made()
    finally:
        dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="*", default=WORLDS, help="numbers of processes (default 8 to 64)")
    worlds = parser.parse_args(argv).worlds
    for world in worlds:
        took, groups = connected_s(world)
        verdict = "" if world < WORLDS[-1] else f"; bar {BAR_S:g} s: {'pass' if took <= BAR_S else 'MISS'}"
        print(f"{world:6} processes, {mesh_of(world)}: {took:6.1f} s, at most {groups} groups{verdict}", flush=True)
    for name, mesh in KINDS.items():
        found = [simulated_s(mesh, rank) for rank in (0, mesh.world // 2 + 5, mesh.world - 1)]
        took, groups = max(took for took, _ in found), max(groups for _, groups in found)
        verdict = f"bar {BAR_RANK_S:g} s: {'pass' if took <= BAR_RANK_S else 'MISS'}"
        print(f"{mesh.world:6} ranks, {name}: {took:.3f} s a rank, at most {groups} groups; {verdict}")


if __name__ == "__main__":
    main()
