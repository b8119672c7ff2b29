"""The strategies that the search chooses from, and the parameters that tp must split.

A tp axis splits every matrix that it can: whole weights with a split sequence would be data or context parallelism,
which have axes of their own, with their own memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from autoptd.layout.placements import BP, P, Split
from autoptd.passes.analysis.flops import work
from autoptd.passes.fold import Folded
from autoptd.passes.graph import infos, op_call, operands
from autoptd.passes.opcall import OpCall, Size, Sizes
from autoptd.passes.rules.factors import Strategy
from autoptd.passes.sharding.expert_regions import expert_dims
from autoptd.passes.sharding.sharding import expand_kind
from autoptd.passes.trace.traced import SEQUENCE


def legal_strategies(
    folded: Folded, ranks: int, sizes: Sizes, *, sequence_parallel: bool = True, experts_whole: bool = False
) -> dict[str, dict[int, list[Strategy]]]:
    """Return the strategies that the search may choose from, per kind and op.

    fp64 plans serve to compare results with one process to the last digits. Ops that the model runs in lower precision
    (a norm or a loss in float32) then get no strategies with partial values, which would be rounded before the sum.
    """
    found = {k: expand_kind(s, ranks, sizes) for k, s in folded.representatives.items()}
    if not sequence_parallel:
        found = {
            k: {
                i: [s for s in each if not _splits_tokens(op_call(folded.representatives[k].nodes[i]), s)]
                for i, each in o.items()
            }
            for k, o in found.items()
        }
    if experts_whole:
        for kind, segment in folded.representatives.items():
            dims = expert_dims(segment)
            for i, each in found[kind].items():
                found[kind][i] = [s for s in each if not _splits_experts(segment.nodes[i], s, dims)]
    parameters = [infos(n)[0].dtype for s in folded.segments for n in s.parameters]
    if torch.float64 not in parameters:
        return found
    return {
        kind: {i: [s for s in each if _keeps_digits(op_call(nodes[i]), s)] for i, each in options.items()}
        for kind, options in found.items()
        for nodes in [folded.representatives[kind].nodes]
    }


def _splits_tokens(call: OpCall, strategy: Strategy) -> bool:
    tensors = [*zip(call.operands, strategy.needs, strict=True), *zip(call.outputs, strategy.gives, strict=True)]
    return any(isinstance(p, Split) and counts_tokens(t.shape[p.dim]) for t, p in tensors)


def _splits_experts(node: fx.Node, strategy: Strategy, dims: Mapping[fx.Node, int]) -> bool:
    placed = [*zip(operands(node), strategy.needs, strict=True)]
    if node in dims:
        placed += [(node, placement) for placement in strategy.gives]
    return any(isinstance(p, Split) and dims.get(n) == p.dim for n, p in placed)


def counts_tokens(size: Size) -> bool:
    return not isinstance(size, int) and SEQUENCE in size.free_symbols


def _keeps_digits(call: OpCall, strategy: Strategy) -> bool:
    tensors = [*zip(call.operands, strategy.needs, strict=True), *zip(call.outputs, strategy.gives, strict=True)]
    low = [p for t, p in tensors if t.dtype.is_floating_point and t.dtype != torch.float64]
    return not low or (BP not in low and P not in low and not strategy.collectives)


def is_weight(node: fx.Node) -> bool:
    """Return whether a parameter is an operand of a product or the table of a lookup, possibly through views."""
    for user in node.users:
        if user.target in (torch.ops.aten.t.default, torch.ops.aten.transpose.int, torch.ops.aten.reshape.default):
            if is_weight(user):
                return True
        elif user.target is torch.ops.aten.embedding.default or work(op_call(user)).kind == "matmul":
            return True
    return False
