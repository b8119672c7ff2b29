"""Activations that one rank saves for a block's backward pass, and ops that it recomputes, by recompute policy.

    none        saves every tensor that autograd saves: once, however many ops save it; views of one storage once
    selective   recomputes attention's core, which is the fused op, or the ops that make or read a tensor quadratic in
                the sequence length; saves the core's inputs instead (Korthikanti et al. 2022, section 5)
    ops         saves the results of attention and of every other product with a weight, counted through the block in
                program order; recomputes the rest (torchtitan's `selective` with option `op`, parallelize_llama.py)
    full        saves the block's inputs (Chen et al. 2016): those with a gradient, and those that no other block reads
    logits      saves what enters a head, and a number per row, instead of logits; both passes compute them in chunks of
                the vocabulary, as one op with the loss (`heads.py`, ops/linear_cross_entropy.py)
    offload     keeps in host memory what `none` saves, except received tensors without gradient, which all blocks share

None recomputes a decision: an op that makes integers of floating-point numbers, or sorts, as the choice of experts. A
second run might decide a tie in another way, and rows would meet other experts in backward than in forward.

Neither parameters nor prelude tensors (masks, rotary tables), computed once for all blocks, count as activations. The
emitted program saves a tensor gathered over tp in gathered form. With `regather` a rank saves its own part and
re-gathers in backward, as Megatron does (Korthikanti et al. 2022, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch

from autoptd.ops import library as ops
from autoptd.passes.analysis.dataflow import RANKS, DataflowStep, Flow, Number, Storage, flow, join_heads
from autoptd.passes.analysis.flops import work
from autoptd.passes.analysis.saved_tensors import ATTENTION
from autoptd.passes.fold import Folded, Segment
from autoptd.passes.graph import is_float, op_name
from autoptd.passes.opcall import Size
from autoptd.passes.sharding.sharding import KindSharding

POLICIES = ("none", "selective", "ops", "full", "logits", "offload")


@dataclass(frozen=True)
class SavedActivations:
    """A storage that is saved for backward; `op` is the first op that saves it."""

    storage: Storage
    op: str

    @property
    def tensor(self) -> str:
        return self.storage.name

    @property
    def elements(self) -> sympy.Expr:
        """Elements on one rank, in the sizes' symbols and `t`."""
        return self.storage.elements

    @property
    def itemsize(self) -> int:
        return self.storage.dtype.itemsize

    @property
    def quadratic(self) -> bool:
        return self.storage.quadratic


def saved_activations(
    segments: Sequence[Segment],
    kinds: Mapping[str, KindSharding],
    policy: str = "none",
    *,
    regather: bool = False,
) -> tuple[SavedActivations, ...]:
    """Return what consecutive segments (one block, or one segment) save per microbatch. Raises ValueError."""
    return saved_in_flow(flow(segments, kinds), policy, regather=regather)


def saved_in_flow(region: Flow, policy: str = "none", *, regather: bool = False) -> tuple[SavedActivations, ...]:
    """Return what the segments of a flow save per microbatch. Raises ValueError."""
    if policy == "logits":
        return saved_in_flow(join_heads(region))
    if policy == "offload":
        shared = {v.storage for v in region.received if not v.info.requires_grad}
        return tuple(kept for kept in saved_in_flow(region) if kept.storage in shared)
    recomputed_ids = set(map(id, recomputed_steps(region.steps, policy)))
    found: dict[Storage, str] = {}
    if policy == "full":
        found = _inputs(region)
        found |= {v.storage: step.name for step in region.steps if decides(step) for v in step.outputs}
        return tuple(SavedActivations(storage, op) for storage, op in found.items())
    if policy == "ops":
        found = _inputs(region)
        for step in region.steps:
            if id(step) not in recomputed_ids and not step.view:
                wanted = decides(step) or any(v.info.requires_grad for v in step.outputs)
                results = [v.storage for v in step.outputs if wanted]
                extra = [s for s in step.saved if s.name.startswith(f"{step.outputs[0].name}:")]
                for storage in (*results, *extra):
                    found.setdefault(storage, step.name)
    else:
        for step in region.steps:
            if id(step) not in recomputed_ids:
                saved: Iterable[Storage] = step.saved
            else:  # a core saves its inputs
                saved = [v.storage for v in step.operands if not _made_by(v.storage, region.steps, recomputed_ids)]
            for storage in saved:
                found.setdefault(storage, step.name)
    return tuple(SavedActivations(s, op) for s, op in _counted(found.items(), regather))


def _made_by(storage: Storage, steps: Sequence[DataflowStep], recomputed_ids: set[int]) -> bool:
    makers = (s for s in steps if not s.view and any(v.storage == storage for v in s.outputs))
    return any(id(s) in recomputed_ids for s in makers)


def _counted(found: Iterable[tuple[Storage, str]], regather: bool) -> Iterator[tuple[Storage, str]]:
    """Yield each storage once, without parameters and prelude; under `regather` a gathered one as the rank's part."""
    seen: set[Storage] = set()
    for storage, op in found:
        while regather and storage.gathered_from is not None:
            storage = storage.gathered_from
        if storage not in seen and storage.origin not in ("parameter", "prelude"):
            seen.add(storage)
            yield storage, op


def _inputs(region: Flow) -> dict[Storage, str]:
    """Return what recomputed segments hold of what they receive; all blocks share other tensors without gradient."""
    distinct = {v.storage: v for v in region.received}
    return {storage: "block" for storage, v in distinct.items() if v.info.requires_grad or v.alone}


def repeated_steps(steps: Sequence[DataflowStep], policy: str, *, early_stop: bool = True) -> list[DataflowStep]:
    """Return the steps that the second run of a block executes, conversions and views included. Raises ValueError.

    `early_stop`: the second run of a whole block ends once it has what the backward pass reads, before the last op that
    saves its operands (ops/recompute.py; torch.utils.checkpoint without reentrance); Megatron's runs to the end.
    """
    found = recomputed_steps(steps, policy)
    saving = [i for i, s in enumerate(steps) if s.saved]
    if not (early_stop and saving and policy in ("full", "ops")):
        return found
    last = steps[saving[-1]]
    results, operands = ({v.storage for v in values} for values in (last.outputs, last.operands))
    own = any(s in results or s not in operands for s in last.saved)
    reached = set(map(id, steps[: saving[-1] + own]))
    return [s for s in found if id(s) in reached]


def recomputed_steps(steps: Sequence[DataflowStep], policy: str) -> list[DataflowStep]:
    """Return the steps that a policy recomputes, conversions and views included. Raises ValueError."""
    match policy:
        case "none" | "offload" | "logits":
            return []
        case "full":
            return [s for s in steps if not decides(s)]
        case "selective":
            return [s for s in steps if _is_core(s) and not decides(s)]
        case "ops":
            saved_products = [s for s in steps if _reads_weight(s)][::2]
            saved_ids = {id(s) for s in saved_products} | {id(s) for s in steps if _is_fused(s) or _is_scatter(s)}
            return [s for s in steps if id(s) not in saved_ids and not decides(s)]
    raise ValueError(f"unknown recompute policy {policy!r}; known: {', '.join(POLICIES)}")


def decides(step: DataflowStep) -> bool:
    """Return whether an op decides something: it makes integers of floating-point numbers, or an order by a sort.

    Sums over the batch count as decisions: they are small, and taking them again would communicate again.
    """
    if step.node is None or step.call is None or step.view:
        return False
    if step.node.target is ops.sum_over_batch:
        return True
    if op_name(step.node) in ("sort", "argsort"):
        return True
    of_floats = any(t.dtype.is_floating_point for t in step.call.operands)
    kinds = [t.dtype for t in step.call.outputs]
    return of_floats and any(not is_float(kind) and kind != torch.bool for kind in kinds)


def _is_core(step: DataflowStep) -> bool:
    return _is_fused(step) or step.touches_quadratic


def _is_fused(step: DataflowStep) -> bool:
    return step.call is not None and step.call.target in ATTENTION


def _is_scatter(step: DataflowStep) -> bool:
    return step.collective == "reduce_scatter"


def _reads_weight(step: DataflowStep) -> bool:
    if step.call is None or not any(v.storage.origin == "parameter" for v in step.operands):
        return False
    return work(step.call).kind == "matmul"


def block_segments(folded: Folded) -> tuple[Segment, ...]:
    """Return the segments of one repetition of the unit that repeats most: a layer."""
    unit = max(folded.units, key=lambda u: (u.count, u.length))
    return folded.segments[unit.first : unit.first + unit.length]


# ---- sums ----


def symbolic_bytes(items: Iterable[SavedActivations], names: Mapping[int, sympy.Expr] | None = None) -> sympy.Expr:
    """Return Σ elements × itemsize, with sizes named as in `resymbolise`."""
    total = sympy.Integer(0)
    for item in items:
        elements = resymbolise(item.storage.shape, names or {}) * item.itemsize
        total += elements / RANKS if item.storage.split else elements
    return sympy.expand(total)


def nbytes(items: Iterable[SavedActivations], number: Number, ranks: int, cp: int = 1) -> int:
    """Return the bytes on one rank at given sizes; with `cp` above 1, `number` gives those of one cp rank."""
    return sum(k.storage.nbytes(number, ranks, cp) for k in items)


def resymbolise(shape: Sequence[Size], names: Mapping[int, sympy.Expr]) -> sympy.Expr:
    """Return the elements of a shape in named sizes: (b, s, 3072) by {768: h} gives 4 b s h.

    A size without a name becomes a multiple of the largest named size (above 1) that divides it, or stays a number.
    """

    def named(size: Size) -> sympy.Expr:
        if not isinstance(size, int):
            return size
        divisors = [n for n in names if n > 1 and size % n == 0]
        return size // max(divisors) * names[max(divisors)] if divisors else sympy.Integer(size)

    return sympy.expand(sympy.Mul(*map(named, shape)))


def split_by_order(expression: sympy.Expr, width: sympy.Symbol, tokens: sympy.Symbol) -> tuple[sympy.Expr, sympy.Expr]:
    """Return (terms of order tokens × width or tokens², lower ones): norm statistics and row sums have no width."""
    large: list[sympy.Expr] = []
    small: list[sympy.Expr] = []
    for term in sympy.Add.make_args(sympy.expand(expression)):
        degree = sympy.degree(term, tokens) if term.has(tokens) else 0
        (large if term.has(width) or degree > 1 else small).append(term)
    return sympy.Add(*large), sympy.Add(*small)
