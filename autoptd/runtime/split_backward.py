"""Split backward: B computes the gradients of a stage's inputs, W later those of its parameters.

B and W are those of Qi et al. 2023 (Zero Bubble Pipeline Parallelism). A stage's autograd graph consists of the input
path, the nodes between its outputs and the tensors it received, and of branches from there to parameters only:

    B   runs the input path and records the gradients that arrive at every node with a branch
    W   reruns these nodes for their branches only: autograd computes only the requested gradients, so a matmul computes
        the gradient of its input in B and that of its weight in W

Some parameters get their gradient in B nevertheless: those reached from several nodes of the input path, those behind a
node written in Python (whose backward cannot be split unless it has a `part`, as those of `ops.axis.products`) or a
group norm, and those of recomputed blocks (or W would recompute them too).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Root = tuple[GradientEdge, Tensor | None]  # where an output's gradient enters the graph; None for a loss
# nodes that compute all their gradients at once: on a CPU, torch 2.13 ends with a segmentation fault where a group norm
# of a channels-last tensor computes those of its parameters alone
_WHOLE = ("NativeGroupNormBackward0",)


@dataclass
class _Intermediate:
    """A node of the input path, the parameters of its branch, and the gradients that arrived at it.

    An output that no received tensor leads to is a branch itself: W runs all of it.
    """

    node: Node
    branch: tuple[Tensor, ...]
    arrived: tuple[Tensor | None, ...] = ()
    part: str = "weights"


class WeightBackward:
    """The W pass of one backward pass; call it once."""

    def __init__(self, intermediates: Sequence[_Intermediate], roots: Sequence[Root]) -> None:
        self._intermediates, self._roots = intermediates, roots  # which keep the graph alive

    def __call__(self, before: Callable[[Sequence[Tensor]], None] | None = None) -> None:
        """Accumulate the parameters' gradients; `before` is called with the next parameters each time."""
        for entry in self._intermediates:
            if before is not None:
                before(entry.branch)
            _compute(entry.node, entry.part)
            pairs = [(GradientEdge(entry.node, k), g) for k, g in enumerate(entry.arrived) if g is not None]
            if pairs:
                edges, gradients = [edge for edge, _ in pairs], [g for _, g in pairs]
                torch.autograd.backward(edges, gradients, retain_graph=True, inputs=entry.branch)
        self._intermediates = self._roots = ()


def backward_inputs(roots: Sequence[Root], inputs: Sequence[Tensor], at_once: Collection[int] = ()) -> WeightBackward:
    """Accumulate the gradients of `inputs` (leaves) and of parameters with ids in `at_once`; return the W pass."""
    edges = [edge for edge, _ in roots]
    graph = _graph(edge.node for edge in edges)
    received = {get_gradient_edge(x).node for x in inputs}
    path, leads_to = _find_path(graph, received)
    if not any(edge.node in path for edge in edges):  # no received tensor needs a gradient
        torch.autograd.backward(edges, [g for _, g in roots])
        return WeightBackward((), ())
    branches = {node: leads_to[node] for node in graph if node in path and node not in received}
    branches |= {edge.node: leads_to[edge.node] for edge in edges if edge.node not in path}
    reached_from: dict[int, int] = {}
    for found in branches.values():
        for key in found:
            reached_from[key] = reached_from.get(key, 0) + 1
    in_b: dict[int, Tensor] = {}
    intermediates = []
    for node, found in branches.items():
        in_w: dict[int, Tensor] = {}
        early = {key for key in found if reached_from[key] > 1 or key in at_once}
        whole = node.name() in _WHOLE
        whole |= isinstance(node, BackwardCFunction) and (bool(early) or not hasattr(node, "part"))
        for key, parameter in found.items():
            at = in_b if whole or key in early else in_w
            at[key] = parameter
        if in_w and node in path:
            _compute(node, "inputs")
            intermediates.append(_Intermediate(node, tuple(in_w.values())))
        elif in_w:  # B does not run it, so nothing arrives there
            intermediates.append(_Intermediate(node, tuple(in_w.values()), _given(node, roots), "both"))
    handles = [entry.node.register_prehook(_recorder(entry)) for entry in intermediates if entry.node in path]
    try:
        torch.autograd.backward(edges, [g for _, g in roots], retain_graph=True, inputs=[*inputs, *in_b.values()])
    finally:
        for handle in handles:
            handle.remove()
    return WeightBackward(intermediates, roots)


def _given(node: Node, roots: Sequence[Root]) -> tuple[Tensor | None, ...]:
    """Return the gradient of each of a node's results, from those of the outputs."""
    given: dict[int, Tensor] = {}
    for edge, gradient in roots:
        if edge.node is node and gradient is not None:
            before = given.get(edge.output_nr)
            given[edge.output_nr] = gradient if before is None else before + gradient
    return tuple(given.get(k) for k in range(max(given, default=-1) + 1))


def _compute(node: Node, part: str) -> None:
    """Choose the gradients that a node written in Python computes when it runs next."""
    if hasattr(node, "part"):
        node.part = part


def _recorder(entry: _Intermediate) -> Callable[[tuple[Tensor | None, ...]], None]:
    def note(arrived: tuple[Tensor | None, ...]) -> None:
        entry.arrived = arrived

    return note


def _graph(starts: Iterable[Node]) -> dict[Node, list[Node]]:
    """Return all nodes reachable from `starts`, each after those that it leads to, and by node those that follow it."""
    opened: dict[Node, list[Node]] = {}
    done: dict[Node, list[Node]] = {}
    stack: list[tuple[Node, Iterator[Node]]] = []

    def open_(node: Node) -> None:
        opened[node] = [following for following, _ in node.next_functions if following is not None]
        stack.append((node, iter(opened[node])))

    for start in starts:
        if start not in opened:
            open_(start)
        while stack:
            node, rest = stack[-1]
            for following in rest:
                if following not in opened:
                    open_(following)
                    break
            else:
                stack.pop()
                done[node] = opened[node]
    return done


def _find_path(
    graph: Mapping[Node, list[Node]], received: Collection[Node]
) -> tuple[set[Node], dict[Node, dict[int, Tensor]]]:
    """Return the nodes that lead to received tensors, and for each node the parameters, by id, that it reaches outside
    them."""
    path, leads_to = set(received), dict[Node, dict[int, Tensor]]()
    for node, follow in graph.items():
        if not path.isdisjoint(follow):
            path.add(node)
        found: dict[int, Tensor] = {}
        for following in follow:
            if following not in path:
                found = found | leads_to[following] if found else leads_to[following]
        if not follow and node not in received:
            own = getattr(node, "variable", None)
            found = {} if own is None else {id(own): own}
        leads_to[node] = found
    return path, leads_to
