"""Dataflow of segments that are compiled: what stays within a fused kernel takes no memory.

A result that only ops of its own kernel read is never written, nor is its gradient. Where autograd would save it, the
kernel's inputs are saved instead, and the backward kernel computes it again (`fusion.py`). What products read is saved
as it is: torch's partitioner does not compute again what the backward pass would have to write
(`ban_recompute_materialized_backward` of torch._functorch.config). Fused kernels have no workspace.

Ops that compiled code calls as they are, since they draw or communicate (`runtime/torch_compile.py`), are no part of a
kernel: they write and save what they do in eager code. Kernels fused by hand (`fused`) are not taken so: published runs
of Megatron-LM hold what autograd saves of every op.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from autoptd.ops import library as ops
from autoptd.passes.analysis.dataflow import DataflowStep, Flow, Storage, Value
from autoptd.passes.analysis.fusion import Fusion
from autoptd.passes.analysis.saved_tensors import DROPOUT
from autoptd.passes.fold import Segment

_EAGER = DROPOUT | ops.DRAWS
_IN_REGISTERS = 1  # elements that are allocated of a tensor that no kernel writes


@dataclass(frozen=True)
class KernelFacts:
    """Positions in a segment's nodes: ops, and those whose results stay within a kernel.

    `again`, `unread`: for some ops, the operands that the backward pass reads to compute others again, and the extra
    tensors of autograd that it does not read.
    """

    ops: frozenset[int]
    inner: frozenset[int]
    again: Mapping[int, tuple[int, ...]]
    unread: Mapping[int, tuple[int, ...]]


def kernel_facts(segment: Segment) -> KernelFacts:
    """Return the facts of a segment; equal for all segments of its kind."""
    found, at = Fusion.of(segment.nodes, segment.sends, "compiled"), {n: i for i, n in enumerate(segment.nodes)}
    return KernelFacts(
        ops=frozenset(at[n] for n in found.ops),
        inner=frozenset(at[n] for n in found.ops if found.kinds[n] == "memory" and not found.leaves(n)),
        again={at[n]: places for n, places in found.read_again().items()},
        unread={at[n]: places for n in found.ops if (places := found.large(n))},
    )


def fused_flow(region: Flow, segments: Sequence[Segment], facts: Mapping[str, KernelFacts]) -> Flow:
    """Return a flow in which tensors that stay within kernels take no memory. facts: of each kind of segment.

    A loss by hand, which overwrites its logits, is not fused: leave its segment out of `facts`.
    """
    write = _FusedWriter()
    for segment in segments:
        if (found := facts.get(segment.kind)) is not None:
            write.read(segment, found)
    for step in region.steps:
        if _is_outside(step):
            write.inner -= {v.storage.name.partition("[")[0] for v in (*step.operands, *step.outputs)}
    return Flow(
        tuple(map(write.value, region.received)),
        tuple(map(write.step, region.steps)),
        tuple(map(write.value, region.sent)),
        region.heads,
    )


@dataclass
class _FusedWriter:
    fused: set[fx.Node] = field(default_factory=set)
    inner: set[str] = field(default_factory=set)  # storages of results that stay within a kernel
    again: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    unread: set[str] = field(default_factory=set)  # storages

    def read(self, segment: Segment, facts: KernelFacts) -> None:
        nodes = segment.nodes
        self.fused |= {nodes[i] for i in facts.ops}
        self.inner |= {nodes[i].name for i in facts.inner}
        self.again |= {nodes[i]: places for i, places in facts.again.items()}
        self.unread |= {f"{nodes[i].name}:{place}" for i, places in facts.unread.items() for place in places}

    def value(self, x: Value) -> Value:
        stored = self.storage(x.storage)
        return x if stored is x.storage else replace(x, storage=stored)

    def storage(self, x: Storage) -> Storage:
        within = x.origin == "made" and x.name.partition("[")[0] in self.inner
        return replace(x, max_elements=_IN_REGISTERS) if within else x

    def step(self, x: DataflowStep) -> DataflowStep:
        operands, outputs = tuple(map(self.value, x.operands)), tuple(map(self.value, x.outputs))
        if _is_outside(x):
            return replace(x, operands=operands, outputs=outputs)
        again = () if x.node is None else self.again.get(x.node, ())
        saved = [*map(self.storage, x.saved), *(operands[i].storage for i in again)]
        kept = tuple(dict.fromkeys(s for s in saved if not s.max_elements and s.name not in self.unread))
        return replace(x, operands=operands, outputs=outputs, saved=kept, compiled=x.node in self.fused)


def _is_outside(step: DataflowStep) -> bool:
    """Return whether a step is no part of a kernel: a conversion that communicates, a draw, or a cross entropy over a
    vocabulary that is split over ranks."""
    if step.node is None:
        return not step.view
    return step.node.target in _EAGER or (step.node.target is ops.cross_entropy and step.ranks)


def computes_loss(segment: Segment) -> bool:
    """Return whether a segment computes a cross entropy."""
    return any(node.target is ops.cross_entropy for node in segment.nodes)
