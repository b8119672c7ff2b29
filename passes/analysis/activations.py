"""What one rank keeps of a block's forward pass for its backward pass, and what it computes again, by policy.

    none        every tensor that autograd saves, once however many ops save it; views of one storage once
    selective   all but attention's core: the ops between what is linear in the sequence and back, those that make or
                read a tensor quadratic in it; or the fused op. The core keeps what it reads (Korthikanti et al. 2022,
                section 5)
    ops         results of attention and of every other product with a weight, counted through the block in program
                order; the rest again (torchtitan's `selective` with option `op`, parallelize_llama.py)
    full        what the block receives (Chen et al. 2016)

Parameters are no activations, and prelude (masks, rotary tables) is computed once for all blocks: neither is counted.
A tensor gathered over tp stays gathered in the emitted program; Megatron keeps the rank's own part and gathers it once
more in the backward pass (Korthikanti et al. 2022, section 4.2.2): `regather`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import sympy
from torch import fx

from autoptd.passes.analysis.dataflow import RANKS, DataflowStep, Flow, Number, Storage, Value, flow
from autoptd.passes.analysis.flops import work
from autoptd.passes.analysis.saved_tensors import ATTENTION
from autoptd.passes.fold import Folded, Segment
from autoptd.passes.opcall import Size
from autoptd.passes.sharding.sharding import KindSharding

POLICIES = ("none", "selective", "ops", "full")


@dataclass(frozen=True)
class SavedActivations:
    """A storage that is kept. `op` is the first that saves it."""

    storage: Storage
    op: str

    @property
    def tensor(self) -> str:
        return self.storage.name

    @property
    def elements(self) -> sympy.Expr:
        """On one rank, in the sizes' symbols and `t`."""
        return self.storage.elements

    @property
    def itemsize(self) -> int:
        return self.storage.dtype.itemsize

    @property
    def quadratic(self) -> bool:
        return self.storage.quadratic


def kept(
    segments: Sequence[Segment],
    kinds: Mapping[str, KindSharding],
    policy: str = "none",
    *,
    regather: bool = False,
) -> tuple[SavedActivations, ...]:
    """What is kept of consecutive segments (one block, or one segment) per microbatch. Raises ValueError."""
    return kept_of(flow(segments, kinds), policy, regather=regather)


def kept_of(region: Flow, policy: str = "none", *, regather: bool = False) -> tuple[SavedActivations, ...]:
    """`kept` of a flow."""
    again = set(map(id, recomputed_steps(region.steps, policy)))
    found: dict[Storage, str] = {}
    if policy == "full":
        return tuple(SavedActivations(v.storage, "block") for v in _distinct(region.received) if v.info.requires_grad)
    if policy == "ops":
        found = {v.storage: "block" for v in region.received if v.info.requires_grad}
        for step in region.steps:
            if id(step) not in again and not step.view:
                results = [v.storage for v in step.outputs if any(t.info.requires_grad for t in step.outputs)]
                extra = [s for s in step.kept if s.name.startswith(f"{step.outputs[0].name}:")]
                for storage in (*results, *extra):
                    found.setdefault(storage, step.name)
    else:
        for step in region.steps:
            if id(step) not in again:
                saved: Iterable[Storage] = step.kept
            else:  # a core keeps what it reads
                saved = [v.storage for v in step.operands if not _made_by(v.storage, region.steps, again)]
            for storage in saved:
                found.setdefault(storage, step.name)
    return tuple(SavedActivations(s, op) for s, op in _counted(found.items(), regather))


def _made_by(storage: Storage, steps: Sequence[DataflowStep], again: set[int]) -> bool:
    makers = (s for s in steps if not s.view and any(v.storage == storage for v in s.outputs))
    return any(id(s) in again for s in makers)


def _counted(found: Iterable[tuple[Storage, str]], regather: bool) -> Iterator[tuple[Storage, str]]:
    """Each once, without parameters and prelude; gathered tensors as their parts if they are gathered again."""
    seen: set[Storage] = set()
    for storage, op in found:
        while regather and storage.gathered_from is not None:
            storage = storage.gathered_from
        if storage not in seen and storage.origin not in ("parameter", "prelude"):
            seen.add(storage)
            yield storage, op


def _distinct(values: Iterable[Value]) -> Iterator[Value]:
    return iter({v.storage: v for v in values}.values())


def recomputed(
    segments: Sequence[Segment], kinds: Mapping[str, KindSharding], policy: str, *, early_stop: bool = True
) -> list[fx.Node]:
    """The ops that run again before the backward pass of a block, in program order. Views are left out: they are free.

    `early_stop`: a full recompute ends once it has what the backward pass reads, before the last op that saves its
    operands (torch.utils.checkpoint without reentrance); Megatron's runs to the end. Raises ValueError.
    """
    steps = flow(segments, kinds).steps
    again = recomputed_steps(steps, policy)
    if policy == "full" and early_stop:
        saving = [i for i, s in enumerate(steps) if s.kept]
        last = saving[-1] if saving else 0
        results = {v.storage for v in steps[last].outputs} if steps else set()
        own = any(s in results or s not in {v.storage for v in steps[last].operands} for s in steps[last].kept)
        again = list(steps[: last + 1 if own else last])
    return [s.node for s in again if s.node is not None and not s.view]


def recomputed_steps(steps: Sequence[DataflowStep], policy: str) -> list[DataflowStep]:
    """The steps, conversions and views among them, that a policy runs again. Raises ValueError."""
    match policy:
        case "none":
            return []
        case "full":
            return list(steps)
        case "selective":
            return [s for s in steps if _is_core(s)]
        case "ops":
            kept_products = [s for s in steps if _reads_weight(s)][::2]
            stay = {id(s) for s in kept_products} | {id(s) for s in steps if _is_fused(s) or _is_scatter(s)}
            return [s for s in steps if id(s) not in stay]
    raise ValueError(f"unknown recompute policy {policy!r}; known: {', '.join(POLICIES)}")


def _is_core(step: DataflowStep) -> bool:
    return _is_fused(step) or step.touches_quadratic


def _is_fused(step: DataflowStep) -> bool:
    return step.call is not None and step.call.target in ATTENTION


def _is_scatter(step: DataflowStep) -> bool:
    return step.collective == "reduce_scatter"


def _reads_weight(step: DataflowStep) -> bool:
    if step.call is None or work(step.call).kind != "matmul":
        return False
    return any(v.storage.origin == "parameter" for v in step.operands)


def block_segments(folded: Folded) -> tuple[Segment, ...]:
    """The segments of one repetition of the unit that repeats most: a layer."""
    unit = max(folded.units, key=lambda u: (u.count, u.length))
    return folded.segments[unit.first : unit.first + unit.length]


# ---- sums ----


def symbolic_bytes(items: Iterable[SavedActivations], names: Mapping[int, sympy.Expr] | None = None) -> sympy.Expr:
    """Σ elements × itemsize, with sizes named as `resymbolise` does."""
    total = sympy.Integer(0)
    for item in items:
        elements = resymbolise(item.storage.shape, names or {}) * item.itemsize
        total += elements / RANKS if item.storage.split else elements
    return sympy.expand(total)


def nbytes(items: Iterable[SavedActivations], number: Number, ranks: int, cp: int = 1) -> int:
    """The same at given sizes, those of one of `cp` ranks, in whole bytes."""
    return sum(k.storage.nbytes(number, ranks, cp) for k in items)


def resymbolise(shape: Sequence[Size], names: Mapping[int, sympy.Expr]) -> sympy.Expr:
    """The elements of a shape with sizes named: (b, s, 3072) by {768: h} is 4 b s h, (b, 12, s, s) by {12: a} a b s².

    A size that is no name is a multiple of the largest name that divides it, or stays a number. Sizes above 1 only.
    """

    def named(size: Size) -> sympy.Expr:
        if not isinstance(size, int):
            return size
        divisors = [n for n in names if n > 1 and size % n == 0]
        return size // max(divisors) * names[max(divisors)] if divisors else sympy.Integer(size)

    return sympy.expand(sympy.Mul(*map(named, shape)))


def below(expression: sympy.Expr, width: sympy.Symbol, tokens: sympy.Symbol) -> tuple[sympy.Expr, sympy.Expr]:
    """(terms of order tokens × width or tokens², terms below): norm statistics and row sums are those without width."""
    large: list[sympy.Expr] = []
    small: list[sympy.Expr] = []
    for term in sympy.Add.make_args(sympy.expand(expression)):
        degree = sympy.degree(term, tokens) if term.has(tokens) else 0
        (large if term.has(width) or degree > 1 else small).append(term)
    return sympy.Add(*large), sympy.Add(*small)
