"""Memory of a node's host: bytes of what a rank keeps there, and the share that it may take."""

from __future__ import annotations

from collections.abc import Iterable

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.memory import MAIN_BYTES, MOMENTS


def node_ranks(cluster: Cluster, world: int) -> int:
    """Return the ranks of a world that share a full node's host."""
    return min(world, cluster.gpus_per_node or world)


def host_share(cluster: Cluster, world: int) -> float | None:
    """Return the bytes of its host's memory for each rank; None if unknown, or if the host is the device."""
    whole = cluster.device.host.memory_bytes
    return None if whole is None or cluster.device.kind == "cpu" else whole / node_ranks(cluster, world)


def pinned_bytes(nbytes: int) -> int:
    """Return the bytes that torch takes for one tensor in pinned memory: the next power of two.

    Source: aten/src/ATen/core/CachingHostAllocator.h, PowerOf2Ceil; a request of 20.4 GiB took 32 GiB in
    github.com/sgl-project/sglang, pull request 36562.
    """
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0


def host_state_bytes(buffers: Iterable[int], *, precision: str, optimizer: str) -> int:
    """Return the host's bytes for the state of `buffers`, given as elements of a rank's shard whose main copy is there.

    Each has main copies and gradients in pinned memory, and the optimizer's state in memory that is not pinned.
    """
    main, sizes = MAIN_BYTES[precision], list(buffers)
    return 2 * sum(pinned_bytes(main * n) for n in sizes) + main * MOMENTS[optimizer] * sum(sizes)
