"""Recomputation in a block's source: which ops form a recomputed core, and whose results are kept.

selective   def core(q, k, v): …               a function within forward for each run of recomputed ops
            out = recompute(core, q, k, v)
ops         x = keep(F.linear, x, w)           the whole block is recomputed, except for kept results
full        _, chosen = keep(torch.topk, x, 2)     the whole block is recomputed, except for decisions
regather    def core(x): …                     a run of ops that read a tensor gathered by tp: re-gather in backward
                x = tp.all_gather(x, …)        recomputes the all-gather, but not the ops
                return spare(torch.sum, x)
            tp.gather_linear(x, w, again=True)     products alone re-gather by themselves
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from torch import fx

from autoptd.layout.placements import BP, Split
from autoptd.ops import library as ops
from autoptd.passes.analysis.activations import decides, recomputed_steps
from autoptd.passes.analysis.dataflow import DataflowStep, Flow, flow
from autoptd.passes.analysis.overwriting import losses_in_place
from autoptd.passes.fold import Segment
from autoptd.passes.graph import operands
from autoptd.passes.sharding.context_parallel_graph import convert
from autoptd.passes.sharding.expert_parallel_graph import route
from autoptd.passes.sharding.sharding import Sharding, tensor_name
from autoptd.passes.sharding.tp_products import RingScatter, SharedOperand, tp_products

Converted = tuple[str, str]  # a tensor's name and the placement that it is brought into
Placed = tuple[int, fx.Node]  # position in the segment, node


@dataclass(frozen=True)
class Recomputation:
    """The recomputed nodes and conversions of a piece, the core, and those whose results are kept.

    `spare`: nodes of the core that are not recomputed and whose results the core does not read. `views`: nodes of the
    core that are written in the same run as their readers.
    """

    core: frozenset[fx.Node] = frozenset()
    core_conversions: frozenset[Converted] = frozenset()
    kept: frozenset[fx.Node] = frozenset()
    kept_conversions: frozenset[Converted] = frozenset()
    spare: frozenset[fx.Node] = frozenset()
    views: frozenset[fx.Node] = frozenset()
    products: frozenset[fx.Node] = frozenset()  # nodes kept by a policy, all of which are function calls
    shared: frozenset[SharedOperand] = frozenset()  # products beside communication of tp
    scatters: frozenset[RingScatter] = frozenset()

    def written(self, node: fx.Node, text: str) -> str:
        """Return an op's text as `keep(F.linear, x, w)`, `spare(F.linear, x, w)`, or unchanged.

        A reader of a gathered tensor that is not a function call (a sum, a cast) is recomputed, which costs little.
        """
        by = "spare" if node in self.spare else "keep" if node in self.kept else ""
        called = node in self.products and _is_call(text)
        return kept_text(text, by) if by and (called or _is_function(text)) else text


def recomputation_of(
    segments: Sequence[Segment], sharding: Sharding, policy: str, regather: bool = False, rings: bool = False
) -> Recomputation:
    """Apply a policy to segments, with the steps that `passes.analysis.activations` counts.

    `regather`: re-gather in backward what tp gathers, unless the whole block is recomputed. `rings`: multiply around
    the ring of tp. Under "ops", which keeps some products of a tensor and recomputes others, none of these are joined.
    """
    chosen = _of_policy(segments, sharding, policy)
    if regather and policy in ("none", "selective"):
        chosen = _with_gathers(segments, sharding, chosen)
    return _with_products(segments, sharding, chosen, rings) if policy != "ops" and sharding.ranks > 1 else chosen


def in_place_of(
    segments: Sequence[Segment], sharding: Sharding, policy: str, regather: bool = False
) -> dict[str, bool]:
    """Return the losses of these segments that may be computed in place, as the memory model counts them."""
    if not any(node.target is ops.cross_entropy for s in segments for node in s.nodes):
        return {}
    return losses_in_place(flow_of(segments, sharding), policy, regather=regather)


def _of_policy(segments: Sequence[Segment], sharding: Sharding, policy: str) -> Recomputation:
    if policy in ("none", "offload", "logits"):
        return Recomputation()
    steps = flow_of(segments, sharding).steps
    repeated = recomputed_steps(steps, policy)
    if policy == "full":
        nodes = _nodes([s for s in steps if decides(s)], segments) | _routes(segments)
        return Recomputation(kept=nodes, products=nodes)
    if policy == "selective":
        core = _with_tokens(segments, _nodes(repeated, segments))
        return Recomputation(core=core, core_conversions=_conversions(repeated))
    ids = set(map(id, repeated))
    kept = [s for s in steps if id(s) not in ids and not s.view]
    nodes = _nodes(kept, segments) | _routes(segments)
    return Recomputation(kept=nodes, kept_conversions=_conversions(kept), products=nodes)


def _with_gathers(segments: Sequence[Segment], sharding: Sharding, chosen: Recomputation) -> Recomputation:
    """Add to the core the readers of gathered tensors and their conversions; only the conversions are recomputed."""
    steps = flow_of(segments, sharding).steps
    gathered = {s.outputs[0].storage for s in steps if s.node is None and s.outputs[0].storage.gathered_from}
    conversions = [s for s in steps if s.node is None and s.outputs[0].storage in gathered]
    readers = _nodes([s for s in steps if any(v.storage in gathered for v in s.operands)], segments) - chosen.core
    names = {s.node.name for s in steps if s.node and s.view and s.outputs[0].storage in gathered}
    views = frozenset(n for s in segments for n in s.nodes if n.name in names)
    core = chosen.core | readers | views
    spare = frozenset(n for n in readers if not isinstance(n.meta["info"], tuple) and core.isdisjoint(n.users))
    return replace(
        chosen,
        core=core,
        core_conversions=chosen.core_conversions | _conversions(conversions),
        kept=chosen.kept | (readers - spare),
        spare=spare,
        views=views,
    )


def _with_products(
    segments: Sequence[Segment], sharding: Sharding, chosen: Recomputation, rings: bool
) -> Recomputation:
    """Take products beside communication out of the core: those of a tensor that is re-gathered do that themselves."""
    found = [tp_products(segment, sharding.kinds[segment.kind]) for segment in segments]
    shared, again = set(), set[fx.Node]()
    for each in (operand for one in found for operand in one.operands):
        regathered = (tensor_name(each.tensor), str(BP)) in chosen.core_conversions
        if regathered or chosen.core.isdisjoint(each.products):
            ring = rings and isinstance(each.source, Split)
            shared.add(replace(each, again=regathered, ring=ring))
            again |= set(each.products) if regathered else set()
    return replace(
        chosen,
        core=chosen.core - again,
        core_conversions=chosen.core_conversions - {(tensor_name(each.tensor), str(BP)) for each in shared},
        kept=chosen.kept - again,
        spare=chosen.spare - again,
        shared=frozenset(shared),
        scatters=frozenset(s for one in found for s in one.scatters if rings),
    )


def flow_of(segments: Sequence[Segment], sharding: Sharding) -> Flow:
    """Return the steps of segments as the memory model counts them: at full length, even for a cp rank's segments.

    The nodes are then other ones with equal names, since splitting the tokens does not rename nodes.
    """
    if sharding.whole is None:
        return flow(segments, sharding.kinds)
    return flow([sharding.whole.segments[s.index] for s in segments], sharding.whole.kinds)


def _nodes(steps: Sequence[DataflowStep], segments: Sequence[Segment]) -> frozenset[fx.Node]:
    names = {s.node.name for s in steps if s.node is not None and not s.view}
    return frozenset(n for s in segments for n in s.nodes if n.name in names)


def _routes(segments: Sequence[Segment]) -> frozenset[fx.Node]:
    """Return the ops that tell ranks which rows go to whose experts; the graph before has none."""
    return frozenset(n for s in segments for n in s.nodes if n.target is route)


def _with_tokens(segments: Sequence[Segment], core: frozenset[fx.Node]) -> frozenset[fx.Node]:
    """Add conversions of the cp axis that only the core reads, so that a rank's own part of operands is saved."""
    conversions = (n for s in segments for n in s.nodes if n.target is convert)
    return core | {n for n in conversions if n.users and core.issuperset(n.users)}


def _conversions(steps: Sequence[DataflowStep]) -> frozenset[Converted]:
    return frozenset((s.outputs[0].name, str(s.outputs[0].placement)) for s in steps if s.node is None)


def runs_of(
    nodes: Sequence[Placed], core: Collection[fx.Node], views: Collection[fx.Node] = ()
) -> list[tuple[bool, list[Placed]]]:
    """Reorder ops so that those of the core form few runs; ops that do not depend on a run come before it.

    `views`: nodes of the core that are written once one of their readers can be.
    """
    if not core:
        return [(False, list(nodes))]
    left, done = list(nodes), list[tuple[bool, Placed]]()
    inside = {n for _, n in nodes}
    made: set[fx.Node] = set()
    in_core = False  # writing a run of the core

    def is_available(node: fx.Node) -> bool:
        return _owner(node) in made or _owner(node) not in inside

    def is_due(node: fx.Node) -> bool:
        if node in views:
            return not node.users or any(user not in inside or is_due(user) for user in node.users)
        return all(is_available(o) or o in views for o in operands(node))

    while left:
        for placed in list(left):
            node = placed[1]
            if (node in core) == in_core and all(map(is_available, operands(node))) and is_due(node):
                left.remove(placed)
                made.add(node)
                done.append((in_core, placed))
        in_core = not in_core
    return [(in_core, [placed for _, placed in run]) for in_core, run in groupby(done, key=lambda pair: pair[0])]


def _owner(node: fx.Node) -> fx.Node:
    if node.op == "call_function" and node.target.__name__ == "getitem":  # type: ignore[union-attr]
        owner = node.args[0]
        assert isinstance(owner, fx.Node)
        return owner
    return node


def core_lines(name: str, lines: Sequence[str], known: Collection[str], results: Sequence[str]) -> list[str]:
    """Wrap `lines` into a recomputed function; `known` are the tensors that may be its arguments."""
    takes = _reads(lines, known)
    given, back = ", ".join(f"{text}: Tensor" for text in takes), ", ".join(results)
    kind = "Tensor" if len(results) == 1 else f"tuple[{', '.join(['Tensor'] * len(results))}]"
    head = f"def {name}({given}) -> {kind}:"
    body = [f"    {line}" for line in [*lines, f"return {back}"]]
    return ["", head, *body, "", f"{back} = recompute({', '.join([name, *takes])})"]


def _reads(lines: Sequence[str], known: Collection[str]) -> list[str]:
    """Return the known variables that statements read before they assign them, in order."""
    found: dict[str, None] = {}
    assigned: set[str] = set()
    for statement in ast.parse("\n".join(lines)).body:
        names = [n for n in ast.walk(statement) if isinstance(n, ast.Name)]
        for name in names:
            if isinstance(name.ctx, ast.Load) and name.id in known and name.id not in assigned:
                found[name.id] = None
        assigned |= {n.id for n in names if isinstance(n.ctx, ast.Store)}
    return list(found)


def _is_function(text: str) -> bool:
    """Return whether a text is a call of a library function, which takes all its tensors as arguments."""
    return _called(text) in ("F", "ops", "torch")


def _is_call(text: str) -> bool:
    """Return whether a text is a call of a function or method that a dotted name gives."""
    return bool(_called(text))


def _called(text: str) -> str:
    """Return the first part of the dotted name that a text calls; "" if it is no such call."""
    called = ast.parse(text, mode="eval").body
    function = called.func if isinstance(called, ast.Call) else None
    while isinstance(function, ast.Attribute):
        function = function.value
    return function.id if isinstance(function, ast.Name) else ""


def kept_text(call: str, by: str = "keep") -> str:
    """Return `keep(F.linear, x, w)` for `F.linear(x, w)`."""
    match = re.fullmatch(r"([^\W\d][\w.]*)\((.*)\)", call)
    assert match, f"{call} is not a call"
    return f"{by}({match[1]}, {match[2]})"
