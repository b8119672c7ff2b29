"""A cluster for hand-made plans."""

from __future__ import annotations

from autoptd.cost_models.cluster import Cluster

CLUSTER = Cluster.from_data(
    {
        "name": "test-cluster",
        "device": {
            "name": "test-device",
            "memory_bytes": 80 * 2**30,
            "memory_bytes_per_s": 3e12,
            "matmul_flops_per_s": {"fp64": 6e13, "fp32": 5e14, "bf16": 1e15, "fp16": 1e15},
        },
        "levels": [{"name": "fast", "ranks": 8, "bytes_per_s": 4.5e11, "latency_s": 2e-6}],
    }
)
