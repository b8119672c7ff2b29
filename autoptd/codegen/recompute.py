"""What a block's source says of recomputation: which ops are a core that runs again, and whose results are kept.

selective       def core(q, k, v): …           a function within forward for each run of ops that run again
                out = recompute(core, q, k, v)
ops             x = keep(F.linear, x, w)       the whole block runs again, but for what is kept
gathers again   def core(x): …                 a run of ops that read a tensor which tp gathers: it is gathered again,
                    x = tp.all_gather(x, …)    the ops are not
                    return spare(F.linear, x, w)
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from torch import fx

from autoptd.ops import library as ops
from autoptd.passes.analysis.activations import recomputed_steps
from autoptd.passes.analysis.dataflow import DataflowStep, Flow, flow
from autoptd.passes.analysis.overwriting import losses_in_place
from autoptd.passes.fold import Segment
from autoptd.passes.graph import operands
from autoptd.passes.sharding.context_parallel_graph import convert
from autoptd.passes.sharding.sharding import Sharding

Converted = tuple[str, str]  # a tensor's name and the placement that it is brought into
Placed = tuple[int, fx.Node]  # position in the segment, node


@dataclass(frozen=True)
class Again:
    """Nodes and conversions of a piece: those of the core, those whose results are kept.

    `spare`: of the core, those that do not run again either, and whose results nobody there reads; `views`: those that
    stand in one run with who reads them.
    """

    core: frozenset[fx.Node] = frozenset()
    core_conversions: frozenset[Converted] = frozenset()
    kept: frozenset[fx.Node] = frozenset()
    kept_conversions: frozenset[Converted] = frozenset()
    spare: frozenset[fx.Node] = frozenset()
    views: frozenset[fx.Node] = frozenset()
    products: frozenset[fx.Node] = frozenset()  # of those that are kept, those that a policy keeps: calls all of them

    def written(self, node: fx.Node, text: str) -> str:
        """An op's text: `keep(F.linear, x, w)`, `spare(F.linear, x, w)`, or as it is.

        What reads a gathered tensor and is no call of a function (a sum, a cast) does run again: that costs little.
        """
        by = "spare" if node in self.spare else "keep" if node in self.kept else ""
        return kept_text(text, by) if by and (node in self.products or _is_function(text)) else text


def again_of(segments: Sequence[Segment], sharding: Sharding, policy: str, gathers_again: bool = False) -> Again:
    """What the policy says of these segments, step by step as `passes.activations` counts it.

    `gathers_again`: what tp gathers is gathered again in the backward pass, where the block does not run again.
    """
    if gathers_again and policy in ("none", "selective"):
        return _with_gathers(segments, sharding, _of_policy(segments, sharding, policy))
    return _of_policy(segments, sharding, policy)


def in_place_of(
    segments: Sequence[Segment], sharding: Sharding, policy: str, gathers_again: bool = False
) -> dict[str, bool]:
    """The losses of these segments that a plan may have in place, as `passes.liveness` counts them."""
    if not any(node.target is ops.cross_entropy for s in segments for node in s.nodes):
        return {}
    return losses_in_place(flow_of(segments, sharding), policy, regather=gathers_again)


def _of_policy(segments: Sequence[Segment], sharding: Sharding, policy: str) -> Again:
    if policy not in ("selective", "ops"):
        return Again()
    steps = flow_of(segments, sharding).steps
    again = recomputed_steps(steps, policy)
    if policy == "selective":
        return Again(core=_with_tokens(segments, _nodes(again, segments)), core_conversions=_conversions(again))
    rest = set(map(id, again))
    kept = [s for s in steps if id(s) not in rest and not s.view]
    nodes = _nodes(kept, segments)
    return Again(kept=nodes, kept_conversions=_conversions(kept), products=nodes)


def _with_gathers(segments: Sequence[Segment], sharding: Sharding, again: Again) -> Again:
    """And what reads a gathered tensor: the conversions run again there, the ops do not."""
    steps = flow_of(segments, sharding).steps
    gathered = {s.outputs[0].storage for s in steps if s.node is None and s.outputs[0].storage.gathered_from}
    conversions = [s for s in steps if s.node is None and s.outputs[0].storage in gathered]
    readers = _nodes([s for s in steps if any(v.storage in gathered for v in s.operands)], segments) - again.core
    names = {s.node.name for s in steps if s.node and s.view and s.outputs[0].storage in gathered}
    views = frozenset(n for s in segments for n in s.nodes if n.name in names)
    core = again.core | readers | views
    spare = frozenset(n for n in readers if not isinstance(n.meta["info"], tuple) and core.isdisjoint(n.users))
    return replace(
        again,
        core=core,
        core_conversions=again.core_conversions | _conversions(conversions),
        kept=again.kept | (readers - spare),
        spare=spare,
        views=views,
    )


def flow_of(segments: Sequence[Segment], sharding: Sharding) -> Flow:
    """The steps of segments as the memory model counts them: at full length, also where they are those of a cp rank.

    Their nodes are then others, of the same names: a cut of the tokens leaves names as they are.
    """
    if sharding.whole is None:
        return flow(segments, sharding.kinds)
    return flow([sharding.whole.segments[s.index] for s in segments], sharding.whole.kinds)


def _nodes(steps: Sequence[DataflowStep], segments: Sequence[Segment]) -> frozenset[fx.Node]:
    """The nodes of these segments that do the steps."""
    names = {s.node.name for s in steps if s.node is not None and not s.view}
    return frozenset(n for s in segments for n in s.nodes if n.name in names)


def _with_tokens(segments: Sequence[Segment], core: frozenset[fx.Node]) -> frozenset[fx.Node]:
    """And the conversions of the cp axis for it alone: it keeps a rank's own part of its operands."""
    conversions = (n for s in segments for n in s.nodes if n.target is convert)
    return core | {n for n in conversions if n.users and core.issuperset(n.users)}


def _conversions(steps: Sequence[DataflowStep]) -> frozenset[Converted]:
    return frozenset((s.outputs[0].name, str(s.outputs[0].placement)) for s in steps if s.node is None)


def runs_of(
    nodes: Sequence[Placed], core: Collection[fx.Node], views: Collection[fx.Node] = ()
) -> list[tuple[bool, list[Placed]]]:
    """The ops in an order that brings those of the core together: what they do not lead to goes before them.

    `views`: of the core, those that wait until somebody can read them.
    """
    if not core:
        return [(False, list(nodes))]
    left, done = list(nodes), list[tuple[bool, Placed]]()
    inside = {n for _, n in nodes}
    made: set[fx.Node] = set()
    turn = False

    def there(node: fx.Node) -> bool:
        return _owner(node) in made or _owner(node) not in inside

    def is_due(node: fx.Node) -> bool:
        if node in views:
            return not node.users or any(user not in inside or is_due(user) for user in node.users)
        return all(there(o) or o in views for o in operands(node))

    while left:
        for placed in list(left):
            node = placed[1]
            if (node in core) == turn and all(map(there, operands(node))) and is_due(node):
                left.remove(placed)
                made.add(node)
                done.append((turn, placed))
        turn = not turn
    return [(turn, [placed for _, placed in run]) for turn, run in groupby(done, key=lambda pair: pair[0])]


def _owner(node: fx.Node) -> fx.Node:
    """The op that makes a tensor."""
    if node.op == "call_function" and node.target.__name__ == "getitem":  # type: ignore[union-attr]
        owner = node.args[0]
        assert isinstance(owner, fx.Node)
        return owner
    return node


def core_lines(name: str, lines: Sequence[str], known: Collection[str], results: Sequence[str]) -> list[str]:
    """`lines` as a function that is recomputed; `known` are the tensors that it may be given."""
    takes = _reads(lines, known)
    given, back = ", ".join(f"{text}: Tensor" for text in takes), ", ".join(results)
    kind = "Tensor" if len(results) == 1 else f"tuple[{', '.join(['Tensor'] * len(results))}]"
    head = f"def {name}({given}) -> {kind}:"
    body = [f"    {line}" for line in [*lines, f"return {back}"]]
    return ["", head, *body, "", f"{back} = recompute({', '.join([name, *takes])})"]


def _reads(lines: Sequence[str], known: Collection[str]) -> list[str]:
    """The variables that statements read before they assign them, in order."""
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
    """Whether a text is a call of a function that is given all its tensors."""
    called = ast.parse(text, mode="eval").body
    function = called.func if isinstance(called, ast.Call) else None
    while isinstance(function, ast.Attribute):
        function = function.value
    return isinstance(function, ast.Name) and function.id in ("F", "ops", "torch")


def kept_text(call: str, by: str = "keep") -> str:
    """`keep(F.linear, x, w)` for `F.linear(x, w)`."""
    match = re.fullmatch(r"([^\W\d][\w.]*)\((.*)\)", call)
    assert match, f"{call} is no call"
    return f"{by}({match[1]}, {match[2]})"
