"""Checks between ranks: the port, clocks, the shared file system, and measured links against the cluster file."""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.collectives import collective_s
from autoptd.doctor.facts import Finding, MachineFacts
from autoptd.doctor.machine import check_machine
from autoptd.layout.rank_tree import children, parent
from autoptd.plans.data import MeshSizes
from autoptd.profile.network import Network
from autoptd.profile.record import Case, Measurement
from autoptd.profile.timing import timer
from autoptd.runtime.comm.along_tree import Reasons, from_root, of_all, to_root
from autoptd.runtime.comm.listening import is_one_address

_SIZES = 8 * 1024, 16 * 1024 * 1024  # bytes: one for latency, one for bandwidth
_SHARE_S = 0.5  # time for measuring one size
_SLOW, _BROKEN = 2.0, 10.0  # measured / predicted time: warn above _SLOW, fail if the large size is above _BROKEN
_OFFSET_S = 1.0  # between clocks: beyond it logs and file names of different ranks are out of order
_PINGS = 5
_CONNECT_S = 5.0


# --- the port -----------------------------------------------------------------------------------------------------


def check_port(port: int) -> Finding:
    """Return whether this process can listen on a port."""
    if not 0 < port < 65536:
        return Finding("FAIL", "port", f"{port} is not a port number", "give one from 1024 to 65535: --port N")
    try:
        with _bound("", port):  # bound to every interface, but not accepting connections
            return Finding("ok", "port", f"{port} is free")
    except OSError as error:
        return Finding("FAIL", "port", f"cannot listen on {port}: {error.strerror}", "give another: --port N")


def check_reachable(port: int, group: dist.ProcessGroup) -> Finding:
    """Listen on rank 0 and connect from all other ranks. A collective."""
    rank, host = dist.get_rank(), os.environ.get("MASTER_ADDR", "127.0.0.1")
    first = from_root(check_port(port) if rank == 0 else None, group)
    assert first is not None
    if first.grade != "ok":
        return first
    server = _listening(host, port) if rank == 0 else None
    dist.barrier(group)
    failure = None if rank == 0 else _connection_failure(host, port)
    failures = of_all(Reasons.of(rank, failure or ""), Reasons.merged, group)
    if server is not None:
        server.close()
    if failures.count:
        wrong = [f"rank {i}: {text}" for i, text in failures.first] + failures.more()
        fix = "open the port between the machines, or set MASTER_ADDR to an address that all of them can reach"
        return Finding("FAIL", "port", f"{host}:{port} cannot be reached by {'; '.join(wrong)}", fix)
    return Finding("ok", "port", f"{host}:{port} is free, and all ranks can reach it")


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens where rank 0's store would, as `listening.on_named_interface` chooses it."""
    try:
        server = _bound(host if is_one_address(host) else "", port)
    except OSError:
        server = _bound("", port)
    server.listen(128)
    return server


def _bound(host: str, port: int) -> socket.socket:
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))
    except OSError:
        server.close()
        raise
    return server


def _connection_failure(host: str, port: int) -> str | None:
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError as error:
        return error.strerror or type(error).__name__
    return None


# --- exchanges between ranks ----------------------------------------------------------------------------------------


def check_machines(own: MachineFacts, cluster: Cluster | None, group: dist.ProcessGroup) -> list[Finding]:
    """Return the findings of `check_machine` on the facts of all ranks. A collective."""
    facts = to_root({dist.get_rank(group): own}, lambda a, b: a | b, group)
    here = dist.get_rank(group) == 0
    return from_root(list(check_machine([facts[i] for i in sorted(facts)], cluster)) if here else [], group)


def check_clocks(group: dist.ProcessGroup) -> Finding:
    """Compare the clocks of all ranks with rank 0's, along a tree. A collective.

    offset = theirs - (sent + received) / 2 of the fastest of several pings, exact to half its round trip, plus that of
    the rank above in the tree.
    """
    rank, world = dist.get_rank(), dist.get_world_size(group)
    own = torch.zeros(1, dtype=torch.float64)
    if rank:
        _answer_pings(parent(rank), group)
        dist.recv(own, parent(rank), group=group)
    for other in children(rank, world):
        dist.send(own + _offset_s(other, group), other, group=group)
    mine = {rank: float(own)} if rank else {}
    return judged_clocks(of_all(mine, _furthest, group))


def _furthest(a: Mapping[int, float], b: Mapping[int, float]) -> dict[int, float]:
    """Return the largest of two ranks' offsets, by rank."""
    return dict([max([*a.items(), *b.items()], key=lambda row: (abs(row[1]), -row[0]))] if a or b else [])


def judged_clocks(offsets_s: Mapping[int, float]) -> Finding:
    """Return the finding for the offset of each rank's clock from rank 0's."""
    if not offsets_s:
        return Finding("ok", "clocks", "one rank, nothing to compare")
    rank, worst = max(offsets_s.items(), key=lambda row: abs(row[1]))
    seen = f"at most {abs(worst):.3g} s apart (rank {rank})"
    if abs(worst) > _OFFSET_S:
        return Finding("warn", "clocks", seen, "run a time daemon (chrony, ntpd) on all machines")
    return Finding("ok", "clocks", seen)


def _offset_s(other: int, group: dist.ProcessGroup) -> float:
    """Return by how many seconds another rank's clock is ahead of this one's."""
    answer, best = torch.zeros(1, dtype=torch.float64), (float("inf"), 0.0)
    for _ in range(_PINGS):
        sent = time.time()
        dist.send(answer, other, group=group)
        dist.recv(answer, other, group=group)
        took = time.time() - sent
        best = min(best, (took, float(answer) - sent - took / 2))
    return best[1]


def _answer_pings(other: int, group: dist.ProcessGroup) -> None:
    answer = torch.zeros(1, dtype=torch.float64)
    for _ in range(_PINGS):
        dist.recv(answer, other, group=group)
        answer.fill_(time.time())
        dist.send(answer, other, group=group)


def check_shared(folder: Path, group: dist.ProcessGroup) -> Finding:
    """Check that all ranks see a file that rank 0 writes to the folder of checkpoints. A collective."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    name = ""
    if dist.get_rank() == 0 and os.access(existing, os.W_OK):
        descriptor, path = tempfile.mkstemp(prefix=".autoptd-doctor-", dir=existing)
        os.close(descriptor)
        name = Path(path).name
    name = from_root(name, group)
    probe = existing / (name or f".autoptd-doctor-{secrets.token_hex(8)}")
    rank = dist.get_rank()
    blind = of_all(Reasons.of(rank, "" if probe.exists() else "does not see it"), Reasons.merged, group)
    dist.barrier(group)
    if rank == 0:
        probe.unlink(missing_ok=True)
    if blind.count:
        shown = [*(str(other) for other, _ in blind.first), *blind.more()]
        ranks = f"rank{'s' * (blind.count > 1)} {', '.join(shown)}"
        fix = "give a folder on a file system that all machines share: --checkpoint FOLDER"
        return Finding("FAIL", "shared folder", f"{existing} is not shared between rank 0 and {ranks}", fix)
    return Finding("ok", "shared folder", f"{existing} is shared by all ranks")


# --- links --------------------------------------------------------------------------------------------------------


def check_links(
    device: torch.device, node_ranks: int, mesh: MeshSizes | None, cluster: Cluster | None
) -> Iterator[Finding]:
    """Time all-reduces over each axis of the mesh; without one, within a machine and over all ranks. A collective."""
    network = Network(device, timer(device))
    for name, (ranks, stride) in _axes(network.world, node_ranks, mesh).items():
        points = []
        for size in _SIZES:
            case = Case(
                family="collective", op="all_reduce", dtype="fp32", bytes_moved=size, ranks=ranks, stride=stride
            )
            points.append(network.measure(case, _SHARE_S))
        measured = [point for point in points if isinstance(point, Measurement)]
        if len(measured) < len(points):
            why = "; ".join(point.why for point in points if not isinstance(point, Measurement))
            fix = "set NCCL_DEBUG=INFO and read its log"
            yield Finding("FAIL", f"links, {name}", f"an all-reduce failed: {why}", fix)
        else:
            yield judged_link(name, measured, cluster)


def _axes(world: int, node_ranks: int, mesh: MeshSizes | None) -> dict[str, tuple[int, int]]:
    """Return (ranks of a group, their stride) for each name of an axis, without duplicates."""
    if mesh is not None:
        inner = mesh.cp * mesh.tp
        found = {
            f"tp {mesh.tp}": (mesh.tp, 1),
            f"cp {mesh.cp}": (mesh.cp, mesh.tp),
            f"dp {mesh.dp}": (mesh.dp, inner),
            f"pp {mesh.pp}": (mesh.pp, inner * mesh.dp),
            f"ep {mesh.ep}": (mesh.ep, mesh.etp or mesh.tp),
        }
    else:
        found = {f"{node_ranks} ranks of a machine": (node_ranks, 1), f"all {world} ranks": (world, 1)}
    found = {name: axis for name, axis in found.items() if axis[0] > 1}
    return {name: axis for i, (name, axis) in enumerate(found.items()) if axis not in list(found.values())[:i]}


def judged_link(name: str, points: Sequence[Measurement], cluster: Cluster | None) -> Finding:
    """Return the finding for a small and a large all-reduce, compared with the cluster's predicted times."""
    small, large = points[0], points[-1]
    ranks = large.case.ranks
    rate = 2 * (ranks - 1) / ranks * large.case.nbytes / large.seconds  # bus bandwidth, as nccl-tests defines it
    seen = f"all-reduce of 8 KiB {small.seconds * 1e6:.0f} us, of 16 MiB {rate / 1e9:.3g} GB/s"
    if cluster is None:
        return Finding("ok", f"links, {name}", seen)
    slow = [p.seconds / collective_s("all_reduce", p.case.nbytes, cluster, ranks, p.case.stride) for p in points]
    against = " and ".join(f"{times:.1f}" for times in slow)
    seen += f", {against} times as long as {cluster.name} predicts"
    if max(slow) <= _SLOW:
        return Finding("ok", f"links, {name}", seen)
    fix = "measure the machine (autoptd profile -o cluster.toml), or find the slow link"
    return Finding("FAIL" if slow[-1] > _BROKEN else "warn", f"links, {name}", seen, fix)
