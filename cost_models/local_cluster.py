"""Detection of the cluster that this process runs on, from its visible GPUs."""

from __future__ import annotations

import os

from autoptd.cost_models.cluster import Cluster, with_rate
from autoptd.errors import ClusterError


def default_cluster() -> Cluster:
    """Return the cluster with this machine's GPUs, by name and count; on CPUs `local` under torchrun, else dgx-h100.

    Raises ClusterError under torchrun on GPUs that no shipped cluster has, since nothing is guessed for a real run.
    """
    under_torchrun = "LOCAL_WORLD_SIZE" in os.environ
    gpus = _visible_gpus()
    if not gpus:
        return Cluster.load("local" if under_torchrun else "dgx-h100")
    known = [c for c in map(Cluster.load, Cluster.names()) if {*gpus} <= {*c.device.reported_names}]
    if known:
        return _with_node_of(known[0], len(gpus)) if under_torchrun or len(gpus) > 1 else known[0]
    if under_torchrun:
        raise ClusterError(
            f"no shipped cluster has the GPUs of this machine: {', '.join(sorted({*gpus}))}",
            fix="name a cluster, or write a TOML file for yours (docs/clusters.md) and give its path",
        )
    return Cluster.load("dgx-h100")


def _visible_gpus() -> tuple[str, ...]:
    import torch  # imported late, so that reading a cluster file does not load torch

    return tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _with_node_of(cluster: Cluster, gpus: int) -> Cluster:
    """Return the cluster with nodes of `gpus` GPUs."""
    inner, *outer = cluster.levels
    if gpus == inner.ranks:
        return cluster
    name = f"{cluster.name}, {gpus} GPUs a node"
    return cluster.model_copy(
        update={"name": name, "levels": (with_rate(inner, inner.bytes_per_s, ranks=gpus), *outer)}
    )
