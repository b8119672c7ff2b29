"""Memory of the hosts in a plan: bytes per rank, and notes on what is there, what that takes, and whether it fits."""

from __future__ import annotations

from autoptd.cost_models.cluster import Cluster
from autoptd.layout.host_memory import node_ranks
from autoptd.search.meshes import OFFLOAD
from autoptd.search.pipeline.evaluate import Staged

_GIB = 2**30


def host_bytes(staged: Staged, cluster: Cluster) -> tuple[int, ...]:
    """Return the bytes of one rank of each stage in host memory; () if there are none, or the host is the device."""
    found = tuple(int(memory.host) for memory in staged.memory)
    return found if any(found) and cluster.device.kind != "cpu" else ()


def offload_notes(staged: Staged, cluster: Cluster) -> list[str]:
    """Return a note on the optimizer state in host memory, if there is any: how much, and what its step takes."""
    shares, chunks, c = sorted(set(staged.offload)), staged.chunks, staged.candidate
    if not shares:
        return []
    if cluster.device.kind == "cpu":
        return ["offload moves optimizer state to host memory, which is the device's own here: it saves none"]
    ends = [(chunks.on(rank), list(staged.route.of(staged.solution.boundaries, rank))) for rank in range(c.pp)]
    seconds = max(costs.step_s(runs) for costs, runs in ends)
    share = " to ".join(f"{100 * share:g}%" for share in shares[:: max(1, len(shares) - 1)])  # the least, the most
    return [
        f"{share} of the optimizer state is in host memory. The devices wait {seconds:,.3g} s per step for its update"
    ]


def activation_notes(staged: Staged, cluster: Cluster) -> list[str]:
    """Return a note on the activations in host memory, if there are any, and what the copies take."""
    c, policies = staged.candidate, staged.solution.policies
    if not any(policy == OFFLOAD for own in policies for policy in own.values()):
        return []
    if cluster.device.kind == "cpu":
        return ["offload moves activations to host memory, which is the device's own here: it saves none"]
    ranks = (staged.route.stages_of(rank) for rank in range(c.pp))
    seconds = max(c.microbatches * sum(staged.stages[s].copies_s for s in mine) for mine in ranks)
    return [f"activations of some blocks are in host memory. The devices wait {seconds:,.3g} s per step for the copies"]


def host_notes(staged: Staged, cluster: Cluster) -> list[str]:
    """Return a note on the host memory that a plan takes, if any: of how much, or that this was not checked."""
    found, c = host_bytes(staged, cluster), staged.candidate
    if not found:
        return []
    rank, ranks = max(range(c.pp), key=found.__getitem__), node_ranks(cluster, c.world)
    node = cluster.pools[c.pools[rank] if c.pools else 0].device.host.memory_bytes
    text = (
        f"host memory: {found[rank] / _GIB:,.1f} GiB for the fullest rank, {ranks * found[rank] / _GIB:,.1f} GiB for a "
        "node of such ranks"
    )
    if node is None:
        return [f"{text}. Whether nodes have it was not checked: the cluster has no memory_bytes in [device.host]"]
    return [f"{text}, which has {node / _GIB:,.1f} GiB"]
