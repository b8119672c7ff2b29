"""From a run to its `Cluster`: the shipped cluster with those devices, with the links that the row states."""

from __future__ import annotations

import re
from functools import cache

from autoptd.cost_models.cluster import Cluster, Link
from benchmarks.published.rows import Row, Unsupported

# Rows give a device's memory as its data sheet does, in 10^9 or 2^30 bytes; nvidia-smi reports a little less.
_MEMORY_TOLERANCE = 0.06
# Words by which a link's name, or the text of a row, shows what kind of network it is; what shows none is InfiniBand.
_NETWORKS = {"efa": ("efa",), "omni-path": ("omni-path", "opa"), "roce": ("roce", "rdma"), "ethernet": ("ethernet",)}
_USUAL = "infiniband"
_BITS = 8


@cache
def shipped() -> tuple[Cluster, ...]:
    """Every shipped cluster of GPUs, by name."""
    return tuple(c for c in map(Cluster.load, Cluster.names()) if c.device.reported_names or c.name != "local")


def cluster_of(row: Row) -> Cluster:
    """The cluster of a run. Raises Unsupported where no shipped one has the device, naming the device."""
    row.need("gpu_type", "n_gpus")
    pattern = _pattern(row)
    inner, *outer = pattern.levels
    inside, between = row.intra_node_bw_GBps_per_gpu_per_direction, row.inter_node_bw_Gbps_per_gpu
    inner = inner.model_copy(update={"ranks": row.gpus_per_node or inner.ranks, **_at(inner, inside, 1e9)})
    if outer and between is not None:
        outer = [*outer[:-1], _link(outer[-1], row, between * 1e9 / _BITS)]
    levels = (inner, *outer)
    if levels == pattern.levels:
        return pattern
    return pattern.model_copy(update={"name": f"{pattern.name}, links as published", "levels": levels})


def _at(link: Link, rate: float | None, unit: float) -> dict[str, object]:
    """What changes of a link at a stated rate; what one GPU alone reaches is then not known."""
    if rate is None or rate * unit == link.bytes_per_s:
        return {}
    return {"bytes_per_s": rate * unit, "port_bytes_per_s": None}


def _link(link: Link, row: Row, bytes_per_s: float) -> Link:
    """The link between nodes at the row's rate. A cluster of that network keeps its latency and sustained fraction."""
    kind = network(row.inter_node_link)
    known = network(link.name) == kind
    return link.model_copy(
        update={**_at(link, bytes_per_s, 1.0), "name": link.name if known else f"{kind} (as {link.name})"}
    )


def _pattern(row: Row) -> Cluster:
    """The shipped cluster with this device; of several, the one with this network, nodes of this size, the plainest."""
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
    """`A100` of `A100-SXM4-80GB`; `GB200` of `GB200-NVL72`."""
    found = re.search(r"[A-Z]+\d+", device.upper())
    return found.group() if found else device.upper()


def _memory_in(device: str) -> float | None:
    """80 of `A100-SXM4-80GB`."""
    found = re.search(r"(\d+)GB\b", device.upper())
    return float(found.group(1)) if found else None


def _memory_agrees(cluster: Cluster, gpu_memory_gb: float | None) -> bool:
    if gpu_memory_gb is None:
        return True
    stated = (gpu_memory_gb * 10**9, gpu_memory_gb * 2**30)
    return any(abs(cluster.device.memory_bytes / size - 1) <= _MEMORY_TOLERANCE for size in stated)


def network(text: str) -> str:
    """`infiniband`, `roce`, `efa`, `omni-path` or `ethernet`; InfiniBand where the text names none."""
    words = text.lower()
    return next((kind for kind, signs in _NETWORKS.items() if any(sign in words for sign in signs)), _USUAL)
