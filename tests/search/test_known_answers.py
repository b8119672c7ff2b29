"""Layouts that experts choose by hand, found by the search: the clusters that call for them, and those that do not."""

from __future__ import annotations

import math
import random
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, MixtralConfig

import autoptd
from autoptd.cost_models.cluster import Cluster
from autoptd.errors import DoesNotFit
from autoptd.models.nanogpt import GPTSizes as NanoSizes
from autoptd.models.nanogpt import NanoGPT
from autoptd.passes.trace.traced import BATCH, SEQUENCE
from autoptd.progress import Silent
from autoptd.search.constraints.options import read_constraints
from autoptd.search.planner import Planner, Task
from autoptd.search.runners_up import Answer
from autoptd.search.sharding.tensors import Sharded, Tensors
from tests.search.random_tasks import random_cluster, traced


@cache
def gpt(layers: int, width: int, heads: int, vocab: int = 51200, seq: int = 2048) -> autoptd.TracedModel:
    with torch.device("meta"):
        sizes = NanoSizes(vocab=vocab, max_seq=seq, layers=layers, heads=heads, width=width)
        return autoptd.trace(NanoGPT(sizes), seq=seq)


def found(model: autoptd.TracedModel, cluster: Cluster, world: int, batch: int, **constraints: Any) -> Answer:
    dimensions, fix = constraints.pop("dimensions", ()), constraints.pop("fix", {})
    read = read_constraints({"headroom": 0, **fix}).searching(*dimensions)
    task = Task(model.folded, cluster, world, batch, model.sizes, "bf16", "adamw", read, **constraints)
    return Planner(task, Silent(), model.known).answer()


# ---- Megatron ----

EXPOSED = {"overlap": ["p2p"]}


@pytest.mark.parametrize(("world", "batch"), [(16, 32), (32, 64)])
def test_wide_models_take_tp_inside_a_node_and_pp_across(world: int, batch: int) -> None:
    """Eight layers as wide as GPT-3's (Narayanan et al. 2021, takeaway 1), on nodes of 8 A100 with fast links
    inside: tp stays within the node, each node is a stage, and the rest is dp. Nothing hides sums over dp there."""
    chosen = found(gpt(8, 12288, 96), Cluster.load("p4d"), world, batch, fix=EXPOSED).staged.candidate
    assert 4 <= chosen.tp <= 8 and chosen.dp * chosen.tp <= 8
    assert chosen.pp == world // 8


def test_a_model_that_fills_its_nodes_takes_all_of_each() -> None:
    """Twelve such layers and a small batch on two nodes: tp 8, as Narayanan et al. 2021 ran GPT-3, and two stages."""
    chosen = found(gpt(12, 12288, 96), Cluster.load("p4d"), 16, 16, fix=EXPOSED).staged.candidate
    assert (chosen.dp, chosen.tp, chosen.pp) == (1, 8, 2)


# ---- FSDP ----


@pytest.mark.parametrize("cluster", ["dgx-a100-80gb", "dgx-h100"])
def test_small_models_on_fast_links_are_data_parallel(cluster: str) -> None:
    """GPT-2 of 124M: dp only, with sharded optimizer state (Rajbhandari et al. 2020)."""
    chosen = found(gpt(12, 768, 12, 50304, 1024), Cluster.load(cluster), 8, 64).staged.candidate
    assert (chosen.dp, chosen.tp, chosen.pp) == (8, 1, 1) and chosen.zero == 1


def test_data_parallel_models_that_are_tight_shard_more() -> None:
    """1.3B on eight A100 of 40 GB: still dp only, with sharded gradients (ZeRO 2) or parameters too; with less
    memory parameters in any case (Zhao et al. 2023, FSDP)."""
    model, cluster = gpt(24, 2048, 16, 50304, 1024), Cluster.load("dgx-a100-40gb")
    chosen = found(model, cluster, 8, 64, dimensions=("zero",)).staged.candidate
    assert (chosen.dp, chosen.tp, chosen.pp) == (8, 1, 1) and chosen.zero >= 1
    small = cluster.device.model_copy(update={"memory_bytes": 10 * 2**30})
    tight = found(
        model, cluster.model_copy(update={"device": small}), 8, 64, dimensions=("zero",), fix={"tp": 1, "pp": 1}
    )
    assert tight.staged.candidate.zero == 3
    with pytest.raises(DoesNotFit):
        found(model, cluster.model_copy(update={"device": small}), 8, 64, fix={"tp": 1, "pp": 1})


# ---- slow links ----


@pytest.mark.parametrize(("node", "intra"), [(8, 10e9), (2, 300e9), (1, 300e9)])
def test_no_tp_across_slow_links(node: int, intra: float) -> None:
    """PCIe between all GPUs of a node, or 1 GB/s between nodes of two or one: tp stays within NVLink."""
    cluster = Cluster.of("A100-SXM4-80GB", node, intra, 1e9)
    chosen = found(gpt(8, 4096, 32, 32000), cluster, 8, 32).staged.candidate
    assert chosen.tp <= (1 if intra < 1e11 else node)


def test_slow_links_between_nodes_are_crossed_by_stages() -> None:
    """Nodes of eight with 1 GB/s between: the gradients of dp would take seconds, the activations of pp do not."""
    cluster = Cluster.of("A100-SXM4-80GB", 8, 300e9, 1e9)
    chosen = found(gpt(8, 4096, 32, 32000), cluster, 16, 64).staged.candidate
    assert chosen.pp >= 2 and chosen.dp * chosen.tp <= 8


# ---- sequences ----

# without launch overhead, which the splits ILP (a sum over ops) does not see where whole segments are launch-bound
_H100 = Cluster.load("dgx-h100")
NODE = _H100.model_copy(update={"device": _H100.device.model_copy(update={"dispatch_s": 0.0})})


def layer_collectives(model: autoptd.TracedModel, tp: int, seq: int) -> Counter[str]:
    tensors = Tensors(model.folded, NODE, tp, {BATCH: 1, SEQUENCE: seq}, microbatches=64)
    solved: Sharded = tensors.solve()
    unit = max(model.folded.units, key=lambda u: u.count)
    works = [solved.costs[model.folded.segments[unit.first + i].kind].work for i in range(unit.length)]
    return Counter(name for w in works for name, _ in (*w.forward_collectives, *w.backward_collectives))


def test_long_sequences_with_many_heads_go_all_to_all() -> None:
    """DeepSpeed-Ulysses (Jacobs et al. 2023): tokens are split, and heads in attention only; queries, keys and
    values move to heads and the result back to tokens, in forward and in backward."""
    long = layer_collectives(gpt(3, 1024, 32, 1024, 32768), 8, 32768)
    assert long["all_to_all"] == 4 and long["all_reduce"] == 0
    wide = layer_collectives(gpt(3, 4096, 32, 1024, 2048), 8, 2048)
    assert wide == {"all_gather": 4, "reduce_scatter": 4}  # Korthikanti et al. 2022


# ---- heads ----


def test_a_heavy_head_leaves_its_stage_fewer_layers() -> None:
    """128k words of width 512: the head is as much work as ten of the twelve layers."""
    lengths = {}
    for vocab in (131072, 128):
        answer = found(gpt(12, 512, 8, vocab, 1024), Cluster.load("dgx-a100-80gb"), 4, 64, fix={"pp": 4, "tp": 1})
        lengths[vocab] = [last - first + 1 for first, last in answer.staged.solution.boundaries]
    assert lengths[131072][-1] == 1
    assert lengths[128][-1] > lengths[131072][-1] + 3


# ---- experts ----


def test_experts_are_spread_within_a_node_and_not_beyond() -> None:
    """Eight experts of 0.7 GB per layer: spread over the node, they leave room that tp or pp would pay for."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    with torch.device("meta"):  # the layers of Mixtral 8x7B
        model = AutoModelForCausalLM.from_config(MixtralConfig(num_hidden_layers=8, num_local_experts=8, **sizes))
        model, cluster = autoptd.trace(model, seq=4096), Cluster.load("dgx-h100")
    spread = found(model, cluster, 16, 64).staged
    assert 1 < spread.candidate.ep * spread.candidate.tp <= 8
    assert spread.seconds < found(model, cluster, 16, 64, fix={"ep": 1}).staged.seconds


# ---- monotonicity ----


def _seconds(cluster: Cluster, world: int, batch: int, dimensions: tuple[str, ...]) -> float:
    try:
        model = traced("gpt-2-64-512")
        return found(model, cluster, world, batch, dimensions=dimensions, effort=None).staged.seconds
    except DoesNotFit:
        return math.inf


def _with(cluster: Cluster, memory: float, links: float) -> Cluster:
    own = cluster.device
    device = own.model_copy(
        update={"memory_bytes": own.context_bytes + int(memory * (own.memory_bytes - own.context_bytes))}
    )
    levels = tuple(
        level.model_copy(
            update={
                "bytes_per_s": level.bytes_per_s * links,
                "port_bytes_per_s": level.port_bytes_per_s and level.port_bytes_per_s * links,
            }
        )
        for level in cluster.levels
    )
    return cluster.model_copy(update={"device": device, "levels": levels})


@settings(max_examples=8, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # shrinking takes minutes
@given(
    seed=st.integers(0, 5),
    memory=st.sampled_from([0.001, 0.01, 0.02, 0.03, 0.05]),
    more=st.sampled_from([1.2, 2.0, 8.0]),
    world=st.sampled_from([2, 4, 6]),
    dimensions=st.sampled_from([(), ("zero",), ("recompute",)]),
)
def test_more_memory_or_bandwidth_never_make_it_slower(
    seed: int, memory: float, more: float, world: int, dimensions: tuple[str, ...]
) -> None:
    base = random_cluster(random.Random(seed))
    here = _seconds(_with(base, memory, 1.0), world, 2 * world, dimensions)
    assert _seconds(_with(base, memory * more, 1.0), world, 2 * world, dimensions) <= here * (1 + 1e-9)
    assert _seconds(_with(base, memory, more), world, 2 * world, dimensions) <= here * (1 + 1e-9)
