"""Which dim of a tensor counts samples, also where it does so among others: after a reshape of (b, s, h) to (b s, h).

A dim of size b is the samples' own. Where b is only a factor of a size, the notations of the ops that led there tell on
which side of it the other factors stand: `d0 d1 -> (d0 d1)` carries the factor b of one shape to its place in the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy
from torch import fx

from autoptd.passes.graph import infos, is_getitem, op_call, operands
from autoptd.passes.loops import Place, bind
from autoptd.passes.opcall import Size, TensorInfo
from autoptd.passes.trace import BATCH
from autoptd.passes.unknown import rule_for
from autoptd.passes.views import quotient


@dataclass(frozen=True)
class SamplePlace:
    """Dim `dim` is (outer, samples, inner)."""

    dim: int
    outer: Size = 1
    inner: Size = 1


Found = SamplePlace | None
_KEY = "sample_place"  # in a node's meta


def sample_place(node: fx.Node, output: int = 0) -> Found:
    """Where samples lie in an output of a node; None where no dim counts them, or none that can be told."""
    if is_getitem(node):
        owner, index = node.args
        assert isinstance(owner, fx.Node) and isinstance(index, int)
        return sample_place(owner, index)
    key = f"{_KEY} {output}"
    if key not in node.meta:
        node.meta[key] = _own(infos(node)[output]) or _handed_on(node, output)
    found: Found = node.meta[key]
    return found


def counts_samples(tensor: TensorInfo) -> bool:
    """Whether the tensor grows with the batch."""
    return any(grows(size) for size in tensor.shape)


def grows(size: Size) -> bool:
    """Whether a size grows with the batch."""
    return not isinstance(size, int) and BATCH in size.free_symbols


def _own(tensor: TensorInfo) -> Found:
    dims = [dim for dim, size in enumerate(tensor.shape) if grows(size)]
    return SamplePlace(dims[0]) if len(dims) == 1 and tensor.shape[dims[0]] == BATCH else None


def _handed_on(node: fx.Node, output: int) -> Found:
    if node.op != "call_function" or not counts_samples(infos(node)[output]):
        return None
    call = op_call(node)
    rule = rule_for(call)
    if rule is None:
        return None
    loops = bind(rule.text(call), call)
    for position, operand in enumerate(operands(node)):
        place = sample_place(operand)
        if place is None:
            continue
        for factor, places in loops.places.items():
            source, target = places[position], places[len(call.operands) + output]
            if source is not None and target is not None:
                length = infos(node)[output].shape[target.dim]
                found = _moved(place, loops.sizes[factor], source, target, length)
                if found is not None:
                    return found
    return None


def _moved(place: SamplePlace, size: Size, before: Place, after: Place, length: Size) -> Found:
    """Where samples go if they lie within one factor, of `size`, now at `after` in a dim of this length."""
    if before.dim != place.dim or not grows(size):
        return None
    outside = quotient(place.outer, before.outer)  # of the factor's own, what stands before the samples
    inside = None if outside is None else quotient(size, outside * BATCH)
    if outside is None or inside is None:
        return None
    outer = sympy.sympify(after.outer * outside)
    inner = quotient(length, outer * BATCH)
    if inner is None or grows(outer) or grows(inner):
        return None
    return SamplePlace(after.dim, _plain(outer), _plain(inner))


def _plain(size: Size) -> Size:
    return int(size) if not isinstance(size, int) and size.is_Integer else size
