"""Parameters of a stage (storage, dtype, gradients) and the memory peak of its blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import fx

from autoptd.cost_models.dispatch import QUANTILE, fullest
from autoptd.layout.host_memory import pinned_bytes
from autoptd.layout.placements import Placement
from autoptd.layout.placements import kind as kind_of
from autoptd.passes.analysis.dataflow import CONVERTED
from autoptd.passes.analysis.flops import CASTS, LOOKUPS, work
from autoptd.passes.analysis.fusion import is_row_op
from autoptd.passes.analysis.liveness import Peak, Walk, cuts_logits
from autoptd.passes.analysis.saved_tensors import ATTENTION
from autoptd.passes.fold import Folded, Segment
from autoptd.passes.graph import infos, is_getitem, op_call, operands
from autoptd.passes.sharding.expert_regions import expert_regions
from autoptd.passes.sharding.sharding import Sharding
from autoptd.passes.sharding.shared_masks import converting, shared_masks
from autoptd.search.constraints.options import SearchOptions
from autoptd.search.meshes import OFFLOAD
from autoptd.search.sharding.dispatch_cost import experts_of
from autoptd.search.sharding.fp8 import saved_in_fp8
from autoptd.search.sharding.tensors import Sharded, Tensors


@dataclass(frozen=True)
class Held:
    """A parameter on a stage. `order`: its position in forward order; `numel`: local elements."""

    order: int
    numel: int
    placement: Placement
    frozen: bool

    @cached_property
    def buffer(self) -> str:
        """The class of the buffer that it is in."""
        return kind_of(self.placement)


def parameter_dtypes(folded: Folded) -> dict[str, torch.dtype]:
    """Return parameter -> its own dtype, which may differ from the plan's (frozen integers, say)."""
    nodes = (*(p for s in folded.segments for p in s.parameters), *folded.unused_parameters)
    return {folded.traced.parameters[node.name]: infos(node)[0].dtype for node in nodes}


def kinds_with_gradient(folded: Folded) -> frozenset[str]:
    """Return the kinds through which gradients flow: backward reads their parameters too."""
    kinds = folded.representatives.items()
    return frozenset(kind for kind, segment in kinds if any(t.requires_grad for n in segment.nodes for t in infos(n)))


def block_peak(
    tensors: Tensors, sharded: Sharded, segments: Sequence[Segment], policy: str, method: SearchOptions
) -> Peak:
    """Return the memory of consecutive segments per microbatch under a recompute policy, cached by their kinds.

    What all segments of a kind receive is left out: a stage holds it once (`ChunkParameters.held_beside`).
    """
    key = _key(segments, policy, method)
    if key not in sharded.peaks:
        found, sizes = _walk(tensors, sharded, segments, policy, method)
        like, common = tensors.workbook.first_like(segments), tensors.workbook.facts.common_inputs
        elsewhere = {s.receives[i].name for s in like for i in common[s.kind]}
        sharded.peaks[key] = found.peak_of(sizes, elsewhere)
    return sharded.peaks[key]


def block_pinned(tensors: Tensors, sharded: Sharded, segments: Sequence[Segment], method: SearchOptions) -> int:
    """Return the bytes of pinned memory that consecutive segments take per microbatch under the policy "offload": a
    tensor for each storage that they move, cached by their kinds."""
    key, known = _key(segments, OFFLOAD, method), sharded.memo.setdefault("pinned bytes", {})
    if key not in known:
        stay = {saved.storage for saved in _walk(tensors, sharded, segments, OFFLOAD, method)[0].kept}
        found, sizes = _walk(tensors, sharded, segments, "none", replace(method, gathers="kept"))
        at = dict(zip(found.storages, sizes, strict=True))
        known[key] = sum(pinned_bytes(at[saved.storage]) for saved in found.kept if saved.storage not in stay)
    return int(known[key])


def _key(segments: Sequence[Segment], policy: str, method: SearchOptions) -> tuple[object, ...]:
    of_sizes = tuple(s.kind for s in segments), policy, method.gathers, method.loss
    return *of_sizes, method.kernels, method.fp8, method.ep, method.routing, method.context


def _walk(
    tensors: Tensors, sharded: Sharded, segments: Sequence[Segment], policy: str, method: SearchOptions
) -> tuple[Walk, Sequence[int]]:
    """Return the moments of consecutive segments under a policy, and the bytes of each storage."""
    segments = tensors.workbook.first_like(segments)  # whose names the walk has
    shares = expert_shares(segments, method.ep, method.routing, experts_of(sharded)[1])
    if method.cp > 1:
        shares |= dict.fromkeys(converted_masks(segments), method.cp if method.context == "ulysses" else 0.0)
    else:
        masks = shared_mask_types(tensors, sharded)
        shares |= {f"{n.name}{CONVERTED}": 0.0 for s in segments for n in converting(s, masks)}
    if method.kernels == "fused":
        shares |= dict.fromkeys(inside_kernels(segments), 0.0)
    if method.fp8:
        halved = (name for segment in segments for name in saved_in_fp8(segment))
        shares |= {name: shares.get(name, 1.0) / 2 for name in halved}
    loss = f"loss {method.loss}"
    if loss not in sharded.memo:
        sharded.memo[loss] = loss_of(method, tensors.folded, sharded.sharding)
    found = tensors.workbook.walk(
        segments,
        sharded.sharding.kinds,
        policy,
        regather=method.gathers == "again",
        in_place_loss=sharded.memo[loss] == "in_place",
    )
    of_sizes = tuple(s.kind for s in segments), policy, method.gathers, method.loss
    if of_sizes not in sharded.sizes:
        bytes_of = sharded.memo.setdefault("bytes of storages", {})
        sharded.sizes[of_sizes] = found.sizes(tensors.number, tensors.ranks, tensors.cp, bytes_of)
    return found, found.shared(sharded.sizes[of_sizes], shares)


def expert_shares(segments: Sequence[Segment], ep: int, routing: str, chosen: float) -> dict[str, float]:
    """Return the bytes of tensors on the fullest of `ep` ranks, relative to their size in the graph, if different.

    A rank holds its own experts' weights; its rows are counted at a quantile of the fullest rank's. `chosen`: experts
    of a token.
    """
    found: dict[str, float] = {}
    for region in (r for s in segments for r in expert_regions(s)) if ep > 1 else ():
        found |= dict.fromkeys((n.name for n in region.weights), 1 / ep)
        rows = fullest(ep, region.count, chosen, routing, QUANTILE)
        found |= dict.fromkeys((n.name for n in (*region.rows, *region.reads)), rows)
    return found


def shared_mask_types(tensors: Tensors, sharded: Sharded) -> Mapping[fx.Node, torch.dtype]:
    """Return the masks that stages convert once for all their attentions, and into which types."""
    name = f"shared masks, cp {tensors.cp}"
    if name not in sharded.memo:
        found = shared_masks(tensors.folded, sharded.sharding, tensors.number) if tensors.cp == 1 else {}
        sharded.memo[name] = found
    return sharded.memo[name]  # type: ignore[no-any-return]


def converted_masks(segments: Sequence[Segment]) -> Iterator[str]:
    """Yield the copies of boolean masks that attentions save. A ring makes one for each tile, which it does not save;
    under Ulysses, a rank has the rows of all queries, not only of its own."""
    for segment in segments:
        yield from (f"{node.name}{CONVERTED}" for node in segment.nodes if node.target in ATTENTION)


def inside_kernels(segments: Sequence[Segment]) -> Iterator[str]:
    """Yield the tensors inside hand-written gates, whose backward passes compute them again.

    Megatron's SwiGLU, also with the weights of a token's experts, saves its inputs and not the result of silu. A gate
    is a pointwise op that multiplies two tensors of the model.
    """
    for segment in segments:
        gates = {n for n in segment.nodes if _is_pointwise(n) and len(trained(n)) > 1}
        for node in segment.nodes:
            if _is_pointwise(node) and node.users and node not in segment.sends and gates.issuperset(node.users):
                yield node.name


def trained(node: fx.Node) -> set[fx.Node]:
    """Return the different tensors with a gradient that an op reads."""
    return {o for o in operands(node) if any(t.requires_grad for t in infos(o))}


def _is_pointwise(node: fx.Node) -> bool:
    if node.op != "call_function" or is_getitem(node) or isinstance(node.meta["info"], tuple):
        return False
    return work(op_call(node)).kind == "memory" and not is_row_op(node) and node.target not in (LOOKUPS | CASTS)


def loss_of(method: SearchOptions, folded: Folded, sharding: Sharding) -> str:
    """Return `"kept"` or `"in_place"`, resolved for this sharding where none is fixed."""
    if method.loss in ("kept", "in_place"):
        return method.loss
    return "in_place" if cuts_logits(folded, sharding) else "kept"
