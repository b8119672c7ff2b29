"""Kernel fusion: groups of ops that share a kernel, and each op's memory traffic in forward and backward.

    eager      every op is its own kernel
    fused      hand-written kernels, as in Megatron-LM and Transformer Engine: adjacent pointwise ops are one kernel,
               with the row op (softmax, a norm) that reads their result if any; nothing is fused after a row op
    compiled   every connected group of memory-bound ops is one kernel, as in TorchInductor

Ops share a group only if no path between them contains a product (matmul, attention). A group reads each outside tensor
once and writes only tensors read outside it. Its backward pass reads what autograd saves, except pointwise results
inside the group, and in compiled kernels what a row op saves besides: these are recomputed instead of saved. Views
count as the tensor that they are views of.

The result is independent of placements: it gives positions of operands and outputs, and callers compute their bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import sympy
import torch
from networkx.utils import UnionFind
from torch import fx

from autoptd.passes.analysis.flops import work
from autoptd.passes.analysis.saved_tensors import SavedForBackward, saved_tensors
from autoptd.passes.graph import is_getitem, numel, op_call, operands

aten = torch.ops.aten
KERNELS = ("eager", "fused", "compiled")
_ROW_NAMES = ("softmax", "norm", "cross_entropy", "sum", "mean", "var", "amax", "logsumexp", "nll_loss")


@dataclass(frozen=True)
class MemoryTraffic:
    """Memory traffic of one op, as positions of operands and outputs in its `OpCall`.

    `launches`: kernels that start at this op. The backward pass reads `kept_operands`, `kept_outputs` and `kept_extra`
    (positions in `SavedForBackward.extra`). `sums`: operand -> number of times that its gradient is accumulated.
    """

    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    launches: int = 1
    kept_operands: tuple[int, ...] = ()
    kept_outputs: tuple[int, ...] = ()
    kept_extra: tuple[int, ...] = ()
    gradients_read: tuple[int, ...] = ()  # outputs
    gradients_written: tuple[int, ...] = ()  # operands
    backward_launches: int = 1
    sums: Mapping[int, int] = field(default_factory=dict)
    rows: bool = False  # part of a kernel that needs whole rows: softmax, a norm


def traffic(nodes: Iterable[fx.Node], sent: Iterable[fx.Node], kernels: str) -> dict[fx.Node, MemoryTraffic]:
    """Return the traffic of each op of a segment except views; `sent` are the tensors that other segments read."""
    return Fusion.of(nodes, sent, kernels).traffic()


def base(node: fx.Node) -> fx.Node:
    """Return the node whose storage a view or a `getitem` shares."""
    while True:
        if is_getitem(node):
            node = node.args[0]  # type: ignore[assignment]
        elif node.op == "call_function" and work(op_call(node)).kind == "view" and operands(node):
            node = operands(node)[0]
        else:
            return node


def is_row_op(node: fx.Node) -> bool:
    """Return whether an op needs a whole row before it writes any result, which ends a hand-written kernel."""
    name = str(node.target)
    return any(part in name for part in _ROW_NAMES)


class Fusion:
    """The groups of a segment's ops under a choice of kernels, and what they read and write."""

    @staticmethod
    def of(nodes: Iterable[fx.Node], sent: Iterable[fx.Node], kernels: str) -> Fusion:
        """Return the groups of a segment. sent: the tensors that other segments read."""
        return Fusion([n for n in nodes if not is_getitem(n)], set(map(base, sent)), kernels)

    def __init__(self, ops: list[fx.Node], sent: set[fx.Node], kernels: str) -> None:
        if kernels not in KERNELS:
            raise ValueError(f"unknown kernels {kernels!r}; known: {', '.join(KERNELS)}")
        self.kernels, self.sent = kernels, sent
        self.kinds = {n: work(op_call(n)).kind for n in ops}
        self.ops = [n for n in ops if self.kinds[n] != "view"]
        self.inside = set(self.ops)
        self.bases = {n: [base(o) for o in operands(n)] for n in self.ops}
        self.saved: dict[fx.Node, SavedForBackward] = {n: saved_tensors(op_call(n)) for n in self.ops}
        self._large: dict[fx.Node, tuple[int, ...]] = {}
        self.group = self._groups()
        self.rows = {self.group[n] for n in self.ops if self.kinds[n] == "memory" and is_row_op(n)}
        self.readers: dict[fx.Node, set[fx.Node]] = {}  # tensor -> groups that read it
        for node in self.ops:
            for source in self.bases[node]:
                self.readers.setdefault(source, set()).add(self.group[node])
        self._find_recomputing()

    def _find_recomputing(self) -> None:
        memory = [n for n in self.ops if self.kinds[n] == "memory"]
        self.recomputing = {self.group[n] for n in memory if self._computes_again(n)}

    def _groups(self) -> dict[fx.Node, fx.Node]:
        """Return op -> representative of its group. An op joins the groups on its own level that it reads from."""
        groups = UnionFind(self.ops)
        level: dict[fx.Node, int] = {}  # number of products on the longest path to an op
        for node in self.ops:
            memory = self.kinds[node] == "memory"
            depth = max((level[s] for s in self.bases[node] if s in level), default=0)
            level[node] = depth if memory else depth + 1
            if not memory or self.kernels == "eager":
                continue
            for source in self.bases[node]:
                near = source in self.inside and self.kinds[source] == "memory" and level[source] == depth
                if near and (self.kernels == "compiled" or not is_row_op(source)):
                    groups.union(source, node)
        return {node: groups[node] for node in self.ops}

    def read_again(self) -> dict[fx.Node, tuple[int, ...]]:
        """Return op -> the operands that its group's backward pass reads to compute intermediates again."""
        self._begin()
        found = {node: self._inputs_again(node, self._reads(node), self.saved[node]) for node in self.ops}
        return {node: places for node, places in found.items() if places}

    def _begin(self) -> None:
        self.read: set[tuple[fx.Node, fx.Node]] = set()  # tensors from outside that a group has read
        self.kept: set[tuple[fx.Node, fx.Node]] = set()  # the same for its backward pass

    def _reads(self, node: fx.Node) -> list[int]:
        """Return the operands from outside that a group meets for the first time."""
        group, sources = self.group[node], self.bases[node]
        return [i for i, s in enumerate(sources) if not self._inside(s, group) and self._first(self.read, node, s)]

    # ---- memory traffic ----

    def traffic(self) -> dict[fx.Node, MemoryTraffic]:
        self._begin()
        launched: set[fx.Node] = set()
        found = {}
        for node in self.ops:
            found[node] = self._of(node, launched)
        return self._with_sums(found)

    def _of(self, node: fx.Node, launched: set[fx.Node]) -> MemoryTraffic:
        group, saved = self.group[node], self.saved[node]
        call = op_call(node)
        reads = self._reads(node)
        gradients = [i for i in reads if call.operands[i].requires_grad]
        trained = any(t.requires_grad for t in call.outputs)
        keeps = tuple(saved.outputs) if is_row_op(node) or self.leaves(node) else ()
        writes = tuple(range(len(call.outputs))) if self.leaves(node) else keeps
        first = group not in launched
        launched.add(group)
        return MemoryTraffic(
            reads=tuple(reads),
            writes=writes,
            launches=int(first),
            kept_operands=tuple(
                i
                for i in saved.operands
                for source in [self.bases[node][i]]
                if self.leaves(source) and self._first(self.kept, node, source)
            )
            + self._inputs_again(node, reads, saved),
            kept_outputs=keeps,
            kept_extra=tuple(i for i in range(len(saved.extra)) if i not in self.large(node)),
            gradients_read=tuple(i for i, t in enumerate(call.outputs) if t.requires_grad) if self.leaves(node) else (),
            gradients_written=tuple(gradients) if trained else (),
            backward_launches=int(first and trained),
            rows=group in self.rows,
        )

    def _inputs_again(self, node: fx.Node, reads: list[int], saved: SavedForBackward) -> tuple[int, ...]:
        """Return the operands that backward reads to recompute intermediates of the group that are not saved."""
        if self.group[node] not in self.recomputing:
            return ()
        call, sources = op_call(node), self.bases[node]
        wanted = [i for i in reads if i not in saved.operands and call.operands[i].requires_grad]
        return tuple(i for i in wanted if self._first(self.kept, node, sources[i]))

    def _computes_again(self, node: fx.Node) -> bool:
        """Return whether autograd would save an intermediate of the group that is not read outside it."""
        saved = self.saved[node]
        if self.large(node):
            return True
        inner = [s for i, s in enumerate(self.bases[node]) if i in saved.operands and not self.leaves(s)]
        return bool(inner) or bool(saved.outputs and not is_row_op(node) and not self.leaves(node))

    def large(self, node: fx.Node) -> tuple[int, ...]:
        """Return which extra tensors autograd would save that compiled kernels compute again: those as large as the
        first operand, such as the probabilities of a cross entropy."""
        if self.kernels != "compiled" or self.kinds[node] != "memory" or not operands(node):
            return ()
        if node not in self._large:
            size = numel(op_call(node).operands[0].shape)
            extra = enumerate(self.saved[node].extra)
            self._large[node] = tuple(i for i, x in extra if sympy.expand(numel(x.shape) - size) == 0)
        return self._large[node]

    def _first(self, seen: set[tuple[fx.Node, fx.Node]], node: fx.Node, source: fx.Node) -> bool:
        """Return whether an op's group meets a tensor for the first time; a product reads every operand itself."""
        key = self.group[node], source
        if self.kinds[node] == "memory" and key in seen:
            return False
        seen.add(key)
        return True

    def _inside(self, source: fx.Node, group: fx.Node) -> bool:
        return source in self.inside and self.group[source] == group

    def leaves(self, node: fx.Node) -> bool:
        """Return whether a node's result is read outside its group."""
        if node not in self.inside:
            return True
        return node in self.sent or bool(self.readers.get(node, set()) - {self.group[node]})

    def _with_sums(self, found: dict[fx.Node, MemoryTraffic]) -> dict[fx.Node, MemoryTraffic]:
        """Add `sums`: all but the first of the gradients that reach a tensor from different kernels accumulate."""
        reached: Counter[fx.Node] = Counter(self.sent & self.inside)
        for node in reversed(self.ops):
            sums: Counter[int] = Counter()
            for i in found[node].gradients_written:
                source = self.bases[node][i]
                if source.op != "placeholder" or source in self.inside:
                    sums[i] += int(reached[source] > 0)
                    reached[source] += 1
            if any(sums.values()):
                found[node] = replace(found[node], sums={i: n for i, n in sums.items() if n})
        return found
