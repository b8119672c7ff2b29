"""Cluster of a published run: the shipped one with the run's devices, at the link rates that the row states."""

from __future__ import annotations

import re
from functools import cache

from autoptd.cost_models.cluster import Cluster, Link
from benchmarks.published.rows import Row, Unsupported

# Rows state the nominal memory of a device, in 10^9 or 2^30 bytes; nvidia-smi reports a little less.
_MEMORY_TOLERANCE = 0.06
# Words in a link's name, or in the text of a row, that identify the network; InfiniBand if none does.
_NETWORKS = {"efa": ("efa",), "omni-path": ("omni-path", "opa"), "roce": ("roce", "rdma"), "ethernet": ("ethernet",)}
_USUAL = "infiniband"
_BITS = 8
_GRAPH_LAUNCH_S = 1.5e-6  # between two kernels of a CUDA graph (quoted from memory)
_SAME = {"H800": "H100"}  # with slower links, which rows state


@cache
def shipped() -> tuple[Cluster, ...]:
    """Return every shipped cluster of GPUs."""
    return tuple(c for c in map(Cluster.load, Cluster.names()) if c.device.reported_names or c.name != "local")


def cluster_of(row: Row) -> Cluster:
    """Return the cluster of a run. Raises Unsupported, naming the device, if no shipped cluster has it."""
    row.need("gpu_type", "n_gpus")
    template = _template(row)
    inner, *outer = template.levels
    inside, between = row.intra_node_bw_GBps_per_gpu_per_direction, row.inter_node_bw_Gbps_per_gpu
    ranks = _used(row.gpus_per_node or inner.ranks, row.n_gpus)
    inner = inner.model_copy(update={"ranks": ranks, **_rate_update(inner, inside, 1e9)})
    if outer and between is not None:
        outer = [*outer[:-1], _link(outer[-1], row, between * 1e9 / _BITS)]
    levels = (inner, *outer)
    if levels != template.levels:
        template = template.model_copy(update={"name": f"{template.name}, links as published", "levels": levels})
    if row.cuda_graph.startswith("full"):  # the host launches one graph a step
        device = template.device.model_copy(update={"dispatch_s": 0.0, "launch_s": _GRAPH_LAUNCH_S})
        return template.model_copy(update={"name": f"{template.name}, one graph", "device": device})
    return template


def _used(ranks: int | None, gpus: int | None) -> int | None:
    """Return how many of a node's `ranks` a run uses: as many as divide its GPUs, such as 64 of the 72 of an NVL72."""
    if ranks is None or gpus is None or gpus <= ranks:
        return ranks
    return max(n for n in range(1, ranks + 1) if gpus % n == 0)


def _rate_update(link: Link, rate: float | None, unit: float) -> dict[str, object]:
    """Return the updates of a link for a stated rate; the rate of a single GPU is then unknown."""
    if rate is None or rate * unit == link.bytes_per_s:
        return {}
    return {"bytes_per_s": rate * unit, "port_bytes_per_s": None}


def _link(link: Link, row: Row, bytes_per_s: float) -> Link:
    """Return the link between nodes at the row's rate, with latency and sustained fraction of the shipped link."""
    kind = network(row.inter_node_link)
    known = network(link.name) == kind
    return link.model_copy(
        update={**_rate_update(link, bytes_per_s, 1.0), "name": link.name if known else f"{kind} (as {link.name})"}
    )


def _template(row: Row) -> Cluster:
    """Return the shipped cluster with the row's device; preferring its network, its node size and DGX."""
    assert row.gpu_type is not None
    family = _family(row.gpu_type)
    same = [c for c in shipped() if _family(c.device.name) == family]
    stated = row.gpu_memory_gb or _memory_in(row.gpu_type)
    fitting = [c for c in same if _memory_agrees(c, stated)]
    if not fitting:
        memory = f" with {stated:g} GB" if stated else ""
        raise Unsupported(f"no shipped cluster has {row.gpu_type}{memory}")
    kind = network(row.inter_node_link)

    def unlike(cluster: Cluster) -> tuple[bool, bool, bool, str]:
        nodes = row.gpus_per_node is not None and cluster.gpus_per_node != row.gpus_per_node
        return network(cluster.levels[-1].name) != kind, nodes, not cluster.name.startswith("dgx-"), cluster.name

    return min(fitting, key=unlike)


def _family(device: str) -> str:
    """Return the GPU family: `A100` for `A100-SXM4-80GB`, `GB200` for `GB200-NVL72`."""
    found = re.search(r"[A-Z]+\d+", device.upper())
    family = found.group() if found else device.upper()
    return _SAME.get(family, family)


def _memory_in(device: str) -> float | None:
    """Return the memory in a device's name, 80 for `A100-SXM4-80GB`; None if it has none."""
    found = re.search(r"(\d+)GB\b", device.upper())
    return float(found.group(1)) if found else None


def _memory_agrees(cluster: Cluster, gpu_memory_gb: float | None) -> bool:
    if gpu_memory_gb is None:
        return True
    stated = (gpu_memory_gb * 10**9, gpu_memory_gb * 2**30)
    return any(abs(cluster.device.memory_bytes / size - 1) <= _MEMORY_TOLERANCE for size in stated)


def network(text: str) -> str:
    """Return `infiniband`, `roce`, `efa`, `omni-path` or `ethernet`; InfiniBand if the text names none."""
    words = text.lower()
    return next((kind for kind, signs in _NETWORKS.items() if any(sign in words for sign in signs)), _USUAL)
