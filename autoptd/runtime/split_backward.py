"""A backward pass in two halves: gradients of what a stage received at once, those of its parameters later.

Qi et al. 2023 (Zero Bubble Pipeline Parallelism) call them B and W. The graph of a stage is a spine, the nodes on a way
from its outputs to what it received, and branches that lead from nodes of the spine to parameters alone:

    B   runs the spine, and notes what arrives at every node that a branch hangs on
    W   runs these nodes once more, for their branches alone: autograd does what is asked for, so that a product makes
        the gradient of its input in B, and that of its weight in W

Some parameters have their gradient in B all the same: those that several nodes of the spine lead to, those that hang on
a node written in Python (whose backward is one piece), and those of recomputed blocks (W would recompute them again).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Root = tuple[Tensor, Tensor | None]  # an output and its gradient; None for a loss


@dataclass
class _Join:
    """A node of the spine, the parameters of its branches, and the gradients that arrived at it."""

    node: Node
    branch: tuple[Tensor, ...]
    arrived: tuple[Tensor | None, ...] = ()


class Later:
    """The half that is left; call it once."""

    def __init__(self, joins: Sequence[_Join], roots: Sequence[Root]) -> None:
        self._joins, self._roots = joins, roots  # outputs are kept, and the graph with them

    def __call__(self, before: Callable[[Sequence[Tensor]], None] | None = None) -> None:
        """Accumulate the gradients of the parameters; `before` is told of which ones next."""
        for join in self._joins:
            if before is not None:
                before(join.branch)
            came = [(GradientEdge(join.node, k), g) for k, g in enumerate(join.arrived) if g is not None]
            if came:
                edges, gradients = [edge for edge, _ in came], [g for _, g in came]
                torch.autograd.backward(edges, gradients, retain_graph=True, inputs=join.branch)
        self._joins = self._roots = ()


def backward_of_inputs(roots: Sequence[Root], inputs: Sequence[Tensor], at_once: Collection[int] = ()) -> Later:
    """Accumulate the gradients of `inputs` (leaves), and of parameters whose id is in `at_once`; what is left."""
    edges = [get_gradient_edge(x) for x, _ in roots]
    order = _in_order(edge.node for edge in edges)
    received = {get_gradient_edge(x).node for x in inputs}
    spine, leads_to = _spine(order, received)
    if not any(edge.node in spine for edge in edges):  # nobody waits for anything
        torch.autograd.backward([x for x, _ in roots], [g for _, g in roots])
        return Later((), ())
    branches = {node: _branch(node, spine, leads_to) for node in order if node in spine and node not in received}
    branches |= {edge.node: leads_to[edge.node] for edge in edges if edge.node not in spine}
    hangs_on: dict[int, int] = {}
    for found in branches.values():
        for key in found:
            hangs_on[key] = hangs_on.get(key, 0) + 1
    now: dict[int, Tensor] = {}
    joins = []
    for node, found in branches.items():
        later: dict[int, Tensor] = {}
        for key, parameter in found.items():
            at = now if hangs_on[key] > 1 or key in at_once or isinstance(node, BackwardCFunction) else later
            at[key] = parameter
        if later:
            joins.append(_Join(node, tuple(later.values())))
    handles = [join.node.register_prehook(_noting(join)) for join in joins]
    try:
        torch.autograd.backward(
            [x for x, _ in roots], [g for _, g in roots], retain_graph=True, inputs=[*inputs, *now.values()]
        )
    finally:
        for handle in handles:
            handle.remove()
    return Later(joins, roots)


def _noting(join: _Join) -> Callable[[tuple[Tensor | None, ...]], None]:
    def note(arrived: tuple[Tensor | None, ...]) -> None:
        join.arrived = arrived

    return note


def _in_order(starts: Iterable[Node]) -> list[Node]:
    """Every node that these lead to, each after those that it leads to."""
    done: dict[Node, None] = {}
    for start in starts:
        stack = [(start, iter(_next(start)))]
        seen = {start}
        while stack:
            node, rest = stack[-1]
            following = next((n for n in rest if n not in done and n not in seen), None)
            if following is None:
                done[node] = None
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(_next(following))))
    return list(done)


def _next(node: Node) -> list[Node]:
    return [following for following, _ in node.next_functions if following is not None]


def _spine(order: Sequence[Node], received: Collection[Node]) -> tuple[set[Node], dict[Node, dict[int, Tensor]]]:
    """The nodes that lead to what was received, and the parameters that each node leads to, by id."""
    spine, leads_to = set(received), dict[Node, dict[int, Tensor]]()
    for node in order:
        if any(following in spine for following in _next(node)):
            spine.add(node)
        own = getattr(node, "variable", None)
        found = {} if own is None or node in received else {id(own): own}
        for following in _next(node):
            if following not in spine:
                found |= leads_to[following]
        leads_to[node] = found
    return spine, leads_to


def _branch(node: Node, spine: Collection[Node], leads_to: dict[Node, dict[int, Tensor]]) -> dict[int, Tensor]:
    """What a node of the spine leads to beside it."""
    return {key: p for following in _next(node) if following not in spine for key, p in leads_to[following].items()}
