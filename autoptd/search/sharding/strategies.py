"""The strategies that the search chooses from, and the parameters that tp must split.

A tp axis splits every matrix that it can: whole weights with a split sequence would be data or context parallelism,
which have axes of their own, with their own memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

import torch
from torch import fx

from autoptd.layout.placements import BP, P, Split
from autoptd.passes.analysis.flops import work
from autoptd.passes.fold import Folded
from autoptd.passes.graph import infos, is_getitem, op_call, operands
from autoptd.passes.opcall import OpCall, Size, Sizes
from autoptd.passes.rules.factors import Strategy
from autoptd.passes.sharding.context_parallel import own_token_strategies
from autoptd.passes.sharding.expert_regions import expert_dims, expert_regions
from autoptd.passes.sharding.sharding import expand_kind, ops_of
from autoptd.passes.trace.traced import SEQUENCE

# How tp splits experts: in any way, by widths alone, or not at all, with rows of its own tokens on each rank (etp 1).
ExpertsOnTp: TypeAlias = Literal["any", "widths", "none"]


def experts_on_tp(tp: int, ep: int, etp: int, counts: Iterable[int]) -> ExpertsOnTp:
    """Return how tp may split experts: by widths alone where an ep rank's number of them cannot be split.

    `counts`: experts of each layer; `etp`: tp ranks that share each expert, 1 or 0 for all.
    """
    if tp > 1 and etp == 1:
        return "none"
    return "widths" if tp > 1 and ep > 1 and any(n % (ep * tp) for n in counts) else "any"


def legal_strategies(
    folded: Folded,
    ranks: int,
    sizes: Sizes,
    *,
    sequence_parallel: bool = True,
    experts: ExpertsOnTp = "any",
    offers: Mapping[str, Mapping[tuple[str, int], frozenset[int]]] | None = None,
) -> dict[str, dict[int, list[Strategy]]]:
    """Return the strategies that the search may choose from, per kind and op.

    `experts`: how tp may split experts; `offers`: the `group_offers` of each kind, where they are known.

    fp64 plans serve to compare results with one process to the last digits. Ops that the model runs in lower precision
    (a norm or a loss in float32) then get no strategies with partial values, which would be rounded before the sum.
    """
    known = offers or {}
    found = {k: expand_kind(s, ranks, sizes, known.get(k)) for k, s in folded.representatives.items()}
    exact = _is_fp64(folded)
    for kind, segment in folded.representatives.items():
        calls = {i: op_call(node) for i, node in ops_of(segment)}
        if not sequence_parallel:
            found[kind] = {i: [s for s in each if not _splits_tokens(calls[i], s)] for i, each in found[kind].items()}
        if exact:
            found[kind] = {i: [s for s in each if _keeps_digits(calls[i], s)] for i, each in found[kind].items()}
        if experts == "widths" and (dims := expert_dims(segment)):
            for i, each in found[kind].items():
                found[kind][i] = [s for s in each if not _splits_experts(segment.nodes[i], s, dims)]
        if experts == "none" and expert_regions(segment):
            own = own_token_strategies(segment, ranks, sizes)
            found[kind] |= {i: [own[node]] for i, node in ops_of(segment) if node in own}
    return found


def rounded_on_own_tokens(folded: Folded, ranks: int, sizes: Sizes) -> fx.Node | None:
    """Return an op that would round partial values in an fp64 plan with etp 1; counts of rows may be rounded."""
    for segment in folded.representatives.values() if _is_fp64(folded) else ():
        for node, strategy in own_token_strategies(segment, ranks, sizes).items() if expert_regions(segment) else ():
            if any(t.requires_grad for t in infos(node)) and not _keeps_digits(op_call(node), strategy):
                return node
    return None


def _is_fp64(folded: Folded) -> bool:
    return torch.float64 in {infos(n)[0].dtype for s in folded.segments for n in s.parameters}


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


_VIEWS = (
    torch.ops.aten.t.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.reshape.default,
    torch.ops.aten.split_with_sizes.default,
)


def is_weight(node: fx.Node) -> bool:
    """Return whether a parameter is an operand of a product or the table of a lookup, possibly through views."""
    for user in node.users:
        if user.target in _VIEWS or is_getitem(user):
            if is_weight(user):
                return True
        elif user.target is torch.ops.aten.embedding.default or work(op_call(user)).kind == "matmul":
            return True
    return False
