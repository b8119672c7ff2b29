"""Tensors of the prelude computed anew for one rank's own tokens, such as the numbers of its rows.

`token_rows.py` proved that they may be. On the cp axis `context_parallel_graph.py` reads them; on the tp axis
`own_tokens` rewrites a graph for the ops whose strategies need them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
from torch import fx, nn

from autoptd.layout.placements import O
from autoptd.passes.fold import Folded, Segment
from autoptd.passes.graph import infos, operands, output_of, substitute
from autoptd.passes.rules.factors import of_own_tokens
from autoptd.passes.sharding.sharding import KindSharding, Sharding, ops_of
from autoptd.passes.trace.traced import LOCAL, SEQUENCE

ORIGIN = ("nn_module_stack", "stack_trace")  # keys of a node's meta


@dataclass
class OwnPrelude:
    """Copies, in `graph`, of prelude nodes that `new` maps to their counterparts there.

    `own_size`: a size of all tokens -> that of a rank's own; `own_input`: the model's input -> its own tokens.
    """

    graph: fx.Graph
    new: Mapping[fx.Node, fx.Node]
    own_size: Callable[[sympy.Expr], Any]
    own_input: Callable[[fx.Node], fx.Node]
    made: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def of(self, node: fx.Node) -> fx.Node:
        """Return the node that computes a prelude tensor from a rank's own tokens alone."""
        if not any(counts_tokens(size) for t in infos(node) for size in t.shape):
            return self.new[node]
        if node.op == "placeholder":
            return self.own_input(node)
        if node not in self.made:
            args, kwargs = self._sized((substitute(node.args, self.of), dict(node.kwargs)))
            made = self.graph.create_node(node.op, node.target, args, kwargs, name=f"own_{node.name}")
            made.meta = {k: v for k, v in node.meta.items() if k in ORIGIN}
            found = tuple(replace(t, shape=self._sized(t.shape)) for t in infos(node))
            made.meta["info"] = found if isinstance(node.meta["info"], tuple) else found[0]
            self.made[node] = made
        return self.made[node]

    def _sized(self, value: Any) -> Any:
        if isinstance(value, sympy.Basic):
            return self.own_size(value)
        if isinstance(value, dict):
            return {k: self._sized(v) for k, v in value.items()}
        return type(value)(map(self._sized, value)) if isinstance(value, (tuple, list)) else value


def counts_tokens(size: Any) -> bool:
    """Return whether a size depends on the number of tokens, of a sample or of one cp rank."""
    return isinstance(size, sympy.Basic) and not {SEQUENCE, LOCAL}.isdisjoint(size.free_symbols)


def own_tokens(folded: Folded, sharding: Sharding) -> Folded:
    """Return the graph in which ops on a tp rank's own tokens read the prelude of these alone."""
    reads = {segment.index: _reads(segment, sharding.kinds[segment.kind]) for segment in folded.segments}
    if not any(reads.values()):
        return folded
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    own = OwnPrelude(graph, new, lambda size: of_own_tokens(size, sharding.ranks), lambda node: new[node])
    readers = {node: index for index, found in reads.items() for node in found}
    for node in folded.traced.graph.graph.nodes:
        if node.op == "output":
            continue
        taken = reads[readers[node]][node] if node in readers else ()
        copies = {o: own.of(o) for o in taken}
        new[node] = graph.node_copy(node, lambda n, copies=copies: copies.get(n) or new[n])  # type: ignore[misc]
        assert new[node].name == node.name, (new[node].name, node.name)
        new[node].meta.pop("op", None)  # of the op before
    for node, copy in own.made.items():  # shapes are whole ones, as of all tensors of own tokens
        copy.meta["info"] = node.meta["info"]
    segments = tuple(_moved(segment, new) for segment in folded.segments)
    return rebuilt(folded, graph, new, segments, tuple(own.made.values()))


def _reads(segment: Segment, decided: KindSharding) -> dict[fx.Node, list[fx.Node]]:
    """Return the ops of a segment that read tensors of the prelude for their own tokens, with these."""
    found = {
        node: [
            o
            for o, p in zip(operands(node), decided.strategies[i].needs, strict=True)
            if p == O and o in segment.prelude
        ]
        for i, node in ops_of(segment)
    }
    return {node: taken for node, taken in found.items() if taken}


def _moved(segment: Segment, new: Mapping[fx.Node, fx.Node]) -> Segment:
    """Return a segment in a graph that `new` maps its nodes to; its ops say what it reads of the prelude."""
    nodes = tuple(new[n] for n in segment.nodes)
    main = {*nodes, *(new[n] for n in (*segment.parameters, *segment.receives))}
    return replace(
        segment,
        nodes=nodes,
        parameters=tuple(new[n] for n in segment.parameters),
        prelude=tuple(dict.fromkeys(o for n in nodes for o in operands(n) if o not in main)),
        receives=tuple(new[n] for n in segment.receives),
        sends=tuple(new[n] for n in segment.sends),
    )


def rebuilt(
    folded: Folded,
    graph: fx.Graph,
    new: Mapping[fx.Node, fx.Node],
    segments: tuple[Segment, ...],
    extra: Sequence[fx.Node] = (),
    results: Mapping[fx.Node, fx.Node] | None = None,
) -> Folded:
    """Return `folded` on a graph that `new` maps its nodes to, with these segments.

    `extra`: nodes of its prelude. `results`: its results where they are others than in `new`.
    """
    made = {**new, **(results or {})}
    loss, sums = made[folded.loss], tuple(made[n] for n in folded.sums)
    graph.output((loss, *(new[n] for n in folded.counts)))
    output_of(graph).kwargs = {"sums": sums}
    graph.lint()
    module = fx.GraphModule(nn.Module(), graph)
    module.meta = dict(folded.traced.graph.meta)
    return replace(
        folded,
        traced=replace(folded.traced, graph=module),
        prelude=(*(new[n] for n in folded.prelude), *extra),
        segments=segments,
        loss=loss,
        sums=sums,
        counts=tuple(new[n] for n in folded.counts),
        unused_parameters=tuple(new[n] for n in folded.unused_parameters),
        representatives={},
    )
