"""Relation of each tensor's values over microbatches to its value over the batch, derived from the rules of the ops.

    apart    one part per sample; microbatches hold some of them           inputs, activations
    added    the value over the batch is the sum over its microbatches     Σ l, S -> P in the rule table
    same     equal for every microbatch                                    parameters, buffers, counts of the batch
    outer    a function of sums over the batch that is not linear in them  √Σ l, Σ a / Σ b
    mixed    correct only for a batch in one microbatch                    max, median, sort

The batch is treated like a split dim. A rule in which a dim vanishes sums over it; a rule that maps a partial sum to a
partial sum is linear. Other ops are tried: they are run on all rows of small tensors, and on each row separately.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import sympy
import torch
from torch import fx

from autoptd.ops import library as ops
from autoptd.passes.batch.batch_dims import (
    SamplePlace,
    counts_in,
    counts_samples,
    grows,
    makes_new,
    place_anywhere,
    proportional,
    sample_place,
)
from autoptd.passes.custom_grad.proof import ADDS
from autoptd.passes.graph import infos, is_float, is_getitem, op_call, operands
from autoptd.passes.rules.discover import adds_up
from autoptd.passes.rules.factor_notation import Loops
from autoptd.passes.rules.lookup import resolve
from autoptd.passes.trace.traced import Traced


class Over(Enum):
    """Relation of a tensor's values over microbatches to its value over the batch."""

    APART = "apart"
    ADDED = "added"
    SAME = "same"
    OUTER = "outer"
    MIXED = "mixed"


@dataclass(frozen=True)
class Mixes:
    """The reason why a tensor's value over the batch cannot be computed from those of its microbatches."""

    reason: str


State = Over | Mixes
States = dict[fx.Node, State]


def placeholder_state(node: fx.Node, traced: Traced) -> Over:
    """Return the state of a placeholder: inputs with a batch dim are apart."""
    sampled = node.name in traced.inputs and counts_samples(infos(node)[0])
    return Over.APART if sampled else Over.SAME


def over_batch(node: fx.Node, states: Mapping[fx.Node, State]) -> State:
    """Return the state of an op, from those of its operands."""
    found = [states[o] for o in operands(node)]
    if Over.MIXED in found:
        return Over.MIXED
    if node.target is ops.sum_over_batch:
        return Over.SAME
    if any(counts_samples(t) for t in infos(node)):
        return _apart(found)
    if is_getitem(node):
        return found[0]
    if not found or makes_new(node):
        return _of_sizes(node)
    if Over.APART in found:
        return _reduced(node, states) if set(found) <= {Over.APART, Over.SAME} else Mixes(_RETURNS)
    if Over.OUTER in found:
        return Over.OUTER
    if counts_in((*node.args, *node.kwargs.values())):
        return Mixes("computes with the number of samples")
    return _of_sums(node, found) if Over.ADDED in found else Over.SAME


_RETURNS = "broadcasts a sum over a microbatch back to its samples"


def _apart(found: Sequence[State]) -> State:
    return Over.APART if set(found) <= {Over.APART, Over.SAME} else Mixes(_RETURNS)


def _of_sizes(node: fx.Node) -> State:
    """Return the state of an op that reads no values, only sizes."""
    if node.target is ops.element_count:
        size = node.args[0]
        if not isinstance(size, sympy.Basic) or not grows(size):
            return Over.SAME
        return Over.ADDED if proportional(size) else Mixes("computes with the number of samples")
    return Mixes("computes with the number of samples") if counts_in(node.args) else Over.SAME


def _reduced(node: fx.Node, states: Mapping[fx.Node, State]) -> State:
    """Return the state of an op that reduces over samples: added if it sums them."""
    if node.meta.get(ADDS):
        return Over.ADDED
    call = op_call(node)
    places = {i: _place(o) for i, o in enumerate(operands(node)) if states[o] is Over.APART and infos(o)}
    if any(place is None for place in places.values()):
        return Mixes("reads a tensor whose batch dim is unknown")
    known = {i: place for i, place in places.items() if place is not None}
    loops = resolve(call).loops
    if loops is not None and all(t.dtype is not torch.bool for t in call.outputs):
        factors = [_factors(loops, i, place) for i, place in known.items()]
        if all(factors):
            names = {name for found in factors for name in found}
            if len(names) > 1:
                return Mixes("pairs samples with each other")
            gone = all(place is None for place in loops.places[names.pop()][len(call.operands) :])
            if gone and not loops.additive:
                return Over.ADDED
    if adds_up(call, {i: place.dim for i, place in known.items()}):
        return Over.ADDED
    return Mixes("needs all samples of the batch at once")


def _place(node: fx.Node) -> SamplePlace | None:
    """Return the position of the samples; of several that fit a tensor that holds one value everywhere, any."""
    return sample_place(node) or (place_anywhere(infos(node)[0]) if makes_new(node) else None)


def _factors(loops: Loops, operand: int, place: SamplePlace) -> list[str]:
    """Return the names of the factors of an operand's batch dim that depend on the batch."""
    return [
        name
        for name, where in loops.places.items()
        if (here := where[operand]) is not None and here.dim == place.dim and grows(loops.sizes[name])
    ]


def _of_sums(node: fx.Node, found: Sequence[State]) -> State:
    """Return the state of a function of sums: added if it is linear in all of them jointly, else outer."""
    call, sums = op_call(node), frozenset(i for i, state in enumerate(found) if state is Over.ADDED)
    rule = resolve(call).rule
    taken, made = [call.operands[i].dtype for i in sums], [t.dtype for t in call.outputs]
    rounds = torch.bool in (*taken, *made) or (any(map(is_float, taken)) and not all(map(is_float, made)))
    linear = rule is not None and any(sums == each for each in rule.linear(call))
    return Over.ADDED if linear and not rounds else Over.OUTER
