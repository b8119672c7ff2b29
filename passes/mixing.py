"""Ops that mix samples are refused: data-parallel ranks and microbatches would each mix their own share only.

Where samples lie in a tensor, `samples.py` says; an op's rule says what becomes of that dim. Samples stay apart where
their factor of the op's loops is one and the same in all operands, and goes on into every output:

    b h, o h -> b o       a layer
    . h -> . h            a norm over the batch, a shift of samples: needs the dim whole
    b h -> h              a sum over the batch
    b h, c h -> b c       every sample with every other, as contrastive losses pair them

What sums over samples and leads to the loss alone, never back to them, is what `reduce_loss.py` is about. An op of
which the rules do not say so is tried: some samples are changed, and the results of the others must stay. What moves
by numbers that were computed, such as tokens to the experts that a router chose, is taken on trust. Batch normalisation
has an error of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import sympy
from torch import fx

from autoptd.errors import UnsupportedOp
from autoptd.passes.discover import keeps_apart
from autoptd.passes.flow import op_base
from autoptd.passes.graph import info, infos, is_getitem, op_call, op_name, operands, source_line
from autoptd.passes.loops import Loops, bind
from autoptd.passes.prove import frozen
from autoptd.passes.rules import RULES
from autoptd.passes.samples import SamplePlace, counts_samples, grows, sample_place
from autoptd.passes.trace import BATCH, Traced
from autoptd.passes.work import work

_ACROSS = "works across samples"
_ARITHMETIC = ("add", "sub", "rsub", "mul", "div", "pow", "remainder", "floor_divide")
_MAKING = ("new_", "zeros", "ones", "full", "empty")  # take shape and type alone
_PICKING = ("index", "gather", "scatter", "take")  # by indices, which may say anything


def refuse_mixed_samples(graph: fx.Graph, traced: Traced) -> None:
    """Raise UnsupportedOp at the first op whose result for one sample depends on the others."""
    varying, chosen = _depending(graph, traced)
    returning = _returning(graph)
    checked = varying & returning
    seen: dict[Hashable, str] = {}  # of ops that are alike
    for node in graph.nodes:
        if node.op != "call_function" or is_getitem(node) or node not in checked:
            continue
        if any(o in chosen for o in operands(node)):
            continue
        places = {i: sample_place(o) for i, o in enumerate(operands(node)) if o in varying}
        known = {i: place for i, place in places.items() if place is not None}
        call = op_call(node)
        key = node.target, frozen(call.args), frozen(tuple(call.kwargs.items())), call.outputs, tuple(known.items())
        if known and key not in seen:
            seen[key] = (_mixes if node.target in RULES else _seen_to_mix)(node, known)
        reason = seen.get(key, "")
        if op_base(call) in _ARITHMETIC and _has_batch(node.args):
            reason = "computes with the number of samples"
        if reason:
            raise UnsupportedOp(
                f"{op_name(node)} {reason}: what it gives for one sample depends on the others of its batch, of which "
                "each microbatch and data-parallel rank has its own share",
                where=source_line(node),
                fix="compute it for every sample by itself; only the loss may sum over them",
            )


def _depending(graph: fx.Graph, traced: Traced) -> tuple[set[fx.Node], set[fx.Node]]:
    """Nodes that depend on samples; of them integers and booleans that were computed from floating-point numbers."""
    varying, chosen = set[fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        if node.op == "placeholder":
            if node.name in traced.inputs and counts_samples(info(node)):
                varying.add(node)
        elif node.op == "call_function" and not varying.isdisjoint(node.all_input_nodes):
            if not is_getitem(node) and op_base(op_call(node)).startswith(_MAKING):
                continue
            varying.add(node)
            whole = all(not t.dtype.is_floating_point for t in infos(node))
            if whole and any(o in chosen or infos(o)[0].dtype.is_floating_point for o in node.all_input_nodes):
                chosen.add(node)
    return varying, chosen


def _returning(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that count samples, and those that lead to one that does."""
    found = set[fx.Node]()
    for node in reversed(graph.nodes):
        if node.op == "call_function" and (
            any(counts_samples(t) for t in infos(node)) or not found.isdisjoint(node.users)
        ):
            found.add(node)
    return found


def _has_batch(args: Sequence[object]) -> bool:
    """Whether a number among the arguments is another one for another number of samples."""
    numbers = [a for a in args if isinstance(a, sympy.Basic)]
    return any(a.subs(BATCH, 2) != a.subs(BATCH, 4) for a in numbers)


def _seen_to_mix(node: fx.Node, places: Mapping[int, SamplePlace]) -> str:
    """The same by trying the op on small tensors; what cannot be tried, the table of rules is believed about."""
    call, given = op_call(node), [sample_place(node, i) for i in range(len(infos(node)))]
    told = [place for place in (*places.values(), *given) if place is not None]
    lost = any(p is None and counts_samples(t) for p, t in zip(given, call.outputs, strict=True))
    apart: bool | None = None
    if not lost and all(place == SamplePlace(place.dim) for place in told):
        dims, there = {i: place.dim for i, place in places.items()}, [None if p is None else p.dim for p in given]
        apart = keeps_apart(call, dims, there)
    if apart is None:
        apart = node.target not in RULES or work(call).kind == "view"
    return "" if apart else _ACROSS


def _mixes(node: fx.Node, places: Mapping[int, SamplePlace]) -> str:
    """How an op mixes samples, which lie in its operands as `places` say; empty where it does not."""
    call = op_call(node)
    picks = op_base(call).startswith(_PICKING)
    if picks and any(not t.dtype.is_floating_point and counts_samples(t) for t in call.operands[1:]):
        return ""
    loops = bind(RULES[call.target].text(call), call)
    found = set[str]()
    for i, place in places.items():
        names = _factors(loops, i, place)
        if not names:
            return _seen_to_mix(node, places)
        found.update(names)
    if len(found) > 1:
        return "pairs samples with each other"
    (name,) = found
    there = loops.places[name][len(call.operands) :]
    return "adds samples up" if any(place is None for place in there) else ""


def _factors(loops: Loops, operand: int, place: SamplePlace) -> list[str]:
    """Names of the factors of an operand's dim of samples that grow with the batch."""
    return [
        name
        for name, where in loops.places.items()
        if (here := where[operand]) is not None and here.dim == place.dim and grows(loops.sizes[name])
    ]
