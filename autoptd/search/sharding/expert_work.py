"""The work of one rank whose experts are a part of the model's, given the work of a rank that has all of them.

An average rank computes as many rows either way. Spread over ep ranks they are the rows of fewer experts, more of them
each: fewer weights are read, and tiles of products are fuller. The fullest rank has more rows under natural routing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import fx

from autoptd.cost_models.op_time import OpWork
from autoptd.errors import PlanError
from autoptd.passes.analysis.flops import LOOKUPS
from autoptd.passes.analysis.flops import work as work_of
from autoptd.passes.analysis.fusion import base
from autoptd.passes.fold import Folded, Segment
from autoptd.passes.graph import op_call
from autoptd.passes.sharding.expert_regions import expert_regions
from autoptd.passes.sharding.expert_rows import leaving
from autoptd.search.sharding.kind_cost import KindWork, Works

# Launches of an expert's product by hand-written layers, relative to those of another op: one loop in C++ launches the
# products of all experts. Fitted on simumax_b200, bridge_skills_moe, megatron_bridge_moe_fp8; docs/accuracy.md
LAUNCHES = 0.85
_SUMS = frozenset({torch.ops.aten.sum.dim_IntList})
_ITEMSIZE = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


def spread(work: KindWork, ep: int, merged: bool = False, fullest: float = 1.0) -> KindWork:
    """Return the work of the fullest rank, with the experts spread over `ep` ranks.

    `merged`: the kernels of the exchange restore the order of rows and add up a token's. `fullest`: its rows, relative
    to the average of all ranks.
    """
    if ep == 1 or not any(w.groups for w in work.forward):
        return work

    def of(works: Works) -> Works:
        return tuple(_of_fullest(w, ep, fullest) for w in works if not (merged and w.place == "behind"))

    recomputed = {how: replace(again, works=of(again.works)) for how, again in work.recomputed.items()}
    return replace(
        work, forward=of(work.forward), backward=of(work.backward), weights=of(work.weights), recomputed=recomputed
    )


def _of_fullest(work: OpWork, ep: int, fullest: float) -> OpWork:
    if work.groups:
        return _of_own(work, ep, fullest)
    return replace(work, nbytes=work.nbytes * fullest) if work.place == "experts" and fullest != 1 else work


def _of_own(work: OpWork, ep: int, fullest: float) -> OpWork:
    """Return a grouped product with a rank's own experts only."""
    assert work.m and work.n and work.k
    own = max(1, work.batch // ep)
    rows = work.m if work.groups == "m" else work.k
    extent = math.ceil(rows * work.batch / own * fullest)
    matrix = (work.n * work.k if work.groups == "m" else work.m * work.n) * _ITEMSIZE[work.dtype]
    nbytes = max(0.0, work.nbytes - work.batch * matrix) * fullest + own * matrix
    launches = max(1, round(LAUNCHES * own)) if work.launches > 1 else 1
    found = replace(work, batch=own, launches=launches, flops=work.flops * fullest, nbytes=nbytes)
    return replace(found, m=extent) if work.groups == "m" else replace(found, k=extent)


def places(folded: Folded) -> dict[fx.Node, str]:
    """Return `OpWork.place` of the ops that have one."""
    found: dict[fx.Node, str] = {}
    for segment in folded.representatives.values():
        try:
            regions = expert_regions(segment)
        except PlanError:  # weights of experts that cannot be spread
            continue
        found |= dict.fromkeys(_ahead(n for region in regions for n in region.reads), "ahead")
        found |= dict.fromkeys((n for region in regions for n in region.ops), "experts")
        found |= dict.fromkeys(_behind(segment, {n for r in regions for n in leaving(r, segment)}), "behind")
    return found


def _ahead(reads: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """Yield the lookups that order the rows which experts read."""
    for node in map(base, reads):
        if node.op == "call_function" and node.target in LOOKUPS and node.meta["info"].ndim > 1:
            yield node


def _behind(segment: Segment, rows: set[fx.Node]) -> set[fx.Node]:
    """Return the ops that restore the order of rows that leave experts, and that add up the rows of a token."""
    found = set[fx.Node]()
    for node in segment.nodes:
        if node.op != "call_function" or not rows.intersection(node.all_input_nodes):
            continue
        if node.target in LOOKUPS or node.target in _SUMS:
            found.add(node)
        elif isinstance(node.meta["info"], tuple) or work_of(op_call(node)).kind != "view":
            continue
        rows.add(node)
    return found
