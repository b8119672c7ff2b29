"""The strategies that the search chooses from, and the parameters that tp must split.

A tp axis splits every matrix that it can: whole weights with a split sequence would be data or context parallelism,
which have axes of their own, with their own memory.
"""

from __future__ import annotations

import torch
from torch import fx

from autoptd.errors import PlanError
from autoptd.layout.placements import BP, P, Split
from autoptd.passes.analysis.flops import work
from autoptd.passes.fold import Folded
from autoptd.passes.graph import infos, op_call, op_name, source_line
from autoptd.passes.opcall import OpCall, Size, Sizes
from autoptd.passes.rules.factors import Strategy
from autoptd.passes.sharding.context_parallel import own_token_strategies
from autoptd.passes.sharding.expert_regions import expert_regions
from autoptd.passes.sharding.sharding import expand_kind, ops_of
from autoptd.passes.trace.traced import SEQUENCE


def legal_strategies(
    folded: Folded, ranks: int, sizes: Sizes, *, sequence_parallel: bool = True, etp: int = 0
) -> dict[str, dict[int, list[Strategy]]]:
    """Return the strategies that the search may choose from, per kind and op.

    `etp` 1: experts are not split, and each rank computes the rows of its own tokens for them.

    fp64 plans serve to compare results with one process to the last digits. Ops that the model runs in lower precision
    (a norm or a loss in float32) then get no strategies with partial values, which would be rounded before the sum.
    """
    found = {k: expand_kind(s, ranks, sizes) for k, s in folded.representatives.items()}
    exact = torch.float64 in {infos(n)[0].dtype for s in folded.segments for n in s.parameters}
    for kind, segment in folded.representatives.items():
        calls = {i: op_call(node) for i, node in ops_of(segment)}
        if not sequence_parallel:
            found[kind] = {i: [s for s in each if not _splits_tokens(calls[i], s)] for i, each in found[kind].items()}
        if exact:
            found[kind] = {i: [s for s in each if _keeps_digits(calls[i], s)] for i, each in found[kind].items()}
        if etp == 1 and expert_regions(segment):
            own = own_token_strategies(segment, ranks, sizes)
            found[kind] |= {i: [own[node]] for i, node in ops_of(segment) if node in own}
            for node, strategy in own.items() if exact else ():
                _check_digits(node, strategy)
    return found


def _check_digits(node: fx.Node, strategy: Strategy) -> None:
    """Raise PlanError for an op on own tokens with partial values in lower precision, other than counts of rows."""
    if any(t.requires_grad for t in infos(node)) and not _keeps_digits(op_call(node), strategy):
        raise PlanError(
            f"etp 1 in fp64: {op_name(node)} would round partial values", where=source_line(node), fix="leave etp out"
        )


def _splits_tokens(call: OpCall, strategy: Strategy) -> bool:
    tensors = [*zip(call.operands, strategy.needs, strict=True), *zip(call.outputs, strategy.gives, strict=True)]
    return any(isinstance(p, Split) and counts_tokens(t.shape[p.dim]) for t, p in tensors)


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
