"""A small GPT and a small cluster, for tests of answers."""

from __future__ import annotations

import torch

from autoptd.cost_models.cluster import Cluster
from autoptd.models.nanogpt import GPTSizes, NanoGPT


def small_gpt() -> torch.nn.Module:
    with torch.device("meta"):
        return NanoGPT(GPTSizes(vocab=1024, max_seq=256, layers=4, heads=8, width=512))


def nodes_of_four(memory_gib: float = 80.0, inter: float = 25e9) -> Cluster:
    """Make a cluster of nodes of four H100 with this much memory, none of it taken by a context."""
    base = Cluster.of("H100-SXM5-80GB", 4, 450e9, inter)
    device = base.device.model_copy(update={"memory_bytes": int(memory_gib * 2**30), "context_bytes": 0})
    return base.model_copy(update={"device": device})
