"""Selections by a mask that depends on the number of samples alone, and selects equally many elements of each row.

    sim[~torch.eye(n, dtype=torch.bool)].view(n, -1)      all pairs but those of a sample with itself, [n, n - 1]
    sim[alike].view(n, -1)                                the views of the same sample, by alike [n, n]

Contrastive losses are written so. The number of selected elements is a number that depends on data to torch, which
does not know what the mask holds. Here the mask is computed for a few numbers of samples b. If each row has c of them,
where c grows evenly with b, the selection is `ops.marked_columns`, which checks c in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import sympy
import torch
from torch import SymInt, Tensor, fx
from torch.utils import _pytree as pytree

from autoptd.ops import library as ops
from autoptd.passes.batch.batch_dims import makes_new
from autoptd.passes.graph import op_name, plain
from autoptd.passes.opcall import Size, is_random
from autoptd.passes.rewrites.row_selections import Selection, selection
from autoptd.passes.rewrites.traced_values import fake_mode_of, refresh, written
from autoptd.passes.trace.traced import BATCH, Traced

aten = torch.ops.aten
_TRIED = (2, 3, 6)  # numbers of samples
_SHAPED = ("expand_as", "view_as", "reshape_as", "type_as")  # ops that read no values of an operand


def write_equal_selections(graph: fx.Graph, traced: Traced) -> None:
    """Rewrite selections of a known number of elements of each row."""
    nodes = [n for n in graph.nodes if (found := selection(n)) and _is_matrix(found)]
    if not nodes:
        return
    samples = [symbol for symbol, ours in traced.symbol.items() if ours == BATCH]
    trials = [_Trial(graph, samples, number) for number in _TRIED]
    for node in nodes:
        count = _even([trial.in_each_row(selection(node).mask) for trial in trials])  # type: ignore[union-attr]
        if count is not None:
            _take_columns(graph, node, count, samples[0], traced.example[BATCH])


def _is_matrix(found: Selection) -> bool:
    whole = found.first == 0 and found.columns == (0, 1)
    return whole and found.x.meta["val"].ndim == found.mask.meta["val"].ndim == 2


def _even(counts: Sequence[int | None]) -> Size | None:
    """Return the size that is these counts for the numbers of samples tried, if it grows evenly with them."""
    first, second, third = counts
    if first is None or second is None or third is None:
        return None
    slope = sympy.Rational(second - first, _TRIED[1] - _TRIED[0])
    found = slope * (BATCH - _TRIED[0]) + first
    return plain(sympy.expand(found)) if found.subs(BATCH, _TRIED[2]) == third else None


def _take_columns(graph: fx.Graph, node: fx.Node, count: Size, samples: sympy.Symbol, example: int) -> None:
    """Replace a selection by the same number of elements of each row, one after another."""
    found = selection(node)
    assert found is not None
    x = found.x.meta["val"]
    with graph.inserting_before(node), fake_mode_of(graph) as mode:
        taken = graph.call_function(ops.marked_columns, (found.x, found.mask, count))
        taken.meta = {k: v for k, v in node.meta.items() if k in ("nn_module_stack", "stack_trace")}
        columns: Any = count
        if isinstance(count, sympy.Basic):
            hint = int(count.subs(BATCH, example))
            columns = mode.shape_env.create_symintnode(count.subs(BATCH, samples), hint=hint)  # type: ignore[union-attr]
        taken.meta["val"] = x.new_empty(x.shape[0], columns)
        flat = written(graph, node, aten.reshape.default, taken, [-1])
    refresh(node, flat)
    node.replace_all_uses_with(flat)
    graph.erase_node(node)


class _Trial:
    """The tensors of a graph that depend on the number of samples alone, for one such number."""

    def __init__(self, graph: fx.Graph, samples: Sequence[sympy.Symbol], number: int) -> None:
        self.graph, self.at = graph, dict.fromkeys((*samples, BATCH), number)
        self.values: dict[fx.Node, Any] = {}
        self.done: set[fx.Node] = set()

    def in_each_row(self, mask: fx.Node) -> int | None:
        """Return how many elements a mask has in each row; None if that is not known, or not equal."""
        for node in self.graph.nodes:
            if node not in self.done:
                self.done.add(node)
                self._run(node)
            if node is mask:
                break
        if mask not in self.values:
            return None
        counts = self.values[mask].sum(1)
        return int(counts[0]) if bool((counts == counts[0]).all()) else None

    def _run(self, node: fx.Node) -> None:
        """Compute a node, if all that it reads is known."""
        value, given = node.meta.get("val"), node.all_input_nodes
        if node.op != "call_function" or is_random(node.target):
            return
        if isinstance(value, SymInt):
            self.values[node] = self._number(value)
            return
        known = {n: self.values[n] for n in given if n in self.values}
        shaped = node.args[0] if makes_new(node) else node.args[1] if op_name(node) in _SHAPED else None
        if isinstance(shaped, fx.Node) and shaped not in known and (made := self._shaped(shaped)) is not None:
            known[shaped] = made
        if len(known) < len(given) or None in known.values():
            self._forget(node)
            return
        args, kwargs = pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), (node.args, dict(node.kwargs)))
        args = pytree.tree_map_only(sympy.Basic, self._number, args)
        args, kwargs = fx.map_arg((args, kwargs), known.__getitem__)
        try:
            self.values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, ValueError, IndexError, TypeError):  # sizes that the op does not take
            self._forget(node)

    def _number(self, size: Any) -> int | None:
        found = sympy.sympify(size.node.expr if isinstance(size, SymInt) else size).subs(self.at)
        return None if found.free_symbols else int(found)

    def _shaped(self, node: fx.Node) -> Tensor | None:
        """Return a tensor with the shape and dtype of a node, of which no values are read."""
        value = node.meta.get("val")
        shape = [self._number(n) for n in value.shape] if isinstance(value, Tensor) else [None]
        return None if None in shape else torch.zeros(cast(Any, shape), dtype=value.dtype)  # type: ignore[union-attr]

    def _forget(self, node: fx.Node) -> None:
        """Forget tensors that a node writes to what is not known."""
        if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
            return
        named = zip(node.target._schema.arguments, node.args, strict=False)
        changed = [self.values.get(x) for given, x in named if given.is_write]  # type: ignore[arg-type]
        memory = {x.untyped_storage()._cdata for x in changed if isinstance(x, Tensor)}
        for other, x in list(self.values.items()):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata in memory:
                del self.values[other]
