"""Losses that may overwrite their logits: those whose logits provably no other op reads.

An in-place cross entropy turns its logits into probabilities, and those into a gradient. Let R be the tensors that may
share the logits' memory, traced back through every op that may return a view. A loss may overwrite R if

    (1) all of R is made within the region (a block, or a segment), and nothing of R is sent out of it
    (2) no op reads R after the loss, and none before it saves an operand or a result in R for backward
    (3) each element of the logits has its own memory: no view on the way repeats elements, or is one of several views
        that one op returns (autograd forbids writing to those)
    (4) no recomputation reuses tensors of the first run, since it would find probabilities in place of logits

Views are treated conservatively here: a reshape may or may not copy, and an op without guarantees in its schema may do
anything. (`dataflow`, which only counts bytes, takes the likely case.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from autoptd.ops import library as ops
from autoptd.passes.analysis.activations import recomputed_steps
from autoptd.passes.analysis.dataflow import DataflowStep, Flow, Value
from autoptd.passes.analysis.saved_tensors import saved_tensors
from autoptd.passes.opcall import OpCall, target_name
from autoptd.passes.rules.table import RULES

aten = torch.ops.aten
WIDE = (torch.float32, torch.float64)  # in which losses are computed

_OURS = frozenset(
    {ops.cross_entropy, ops.attention, ops.grouped_mm, ops.sum_by_index, ops.valid_count, ops.element_count}
)
# ops that may return their operand, or a view of it, although their schemas do not say so
_MUTE = frozenset({aten.dropout.default, aten.type_as.default, aten._unsafe_view.default})
_ONE_TO_ONE = frozenset(
    [
        *("alias", "contiguous", "detach", "dropout", "to", "type_as"),  # the same elements
        *("flatten", "reshape", "squeeze", "unflatten", "unsqueeze", "view"),  # in another shape
        *("movedim", "permute", "swapaxes", "t", "transpose"),  # in another order
        *("narrow", "select", "slice"),  # some of them
    ]
)
_Tensor = tuple[str, str]  # name and placement
_OUTSIDE: _Tensor = ("", "")  # any tensor made before the region


def is_loss(step: DataflowStep) -> bool:
    """Return whether a step is a cross entropy, the loss that can run in place."""
    return step.call is not None and step.call.target is ops.cross_entropy


def losses_in_place(region: Flow, policy: str, *, regather: bool = False) -> dict[str, bool]:
    """Return the losses that run in place under a recompute policy if the plan allows it, by name of their node.

    True: in their logits; False: in a copy of them. A loss that reads a tensor re-gathered in backward is never in
    place: it is not recomputed, and its saved tensors are identified by their memory (`ops.recompute`).
    """
    losses = [i for i, step in enumerate(region.steps) if is_loss(step)]
    if not losses:
        return {}
    readers = _gathered_operands(region) if regather and policy in ("none", "selective") else []
    apart = {id(step) for step in readers}
    origins, alone = _origins(region), _hands_over(region, policy, readers)
    return {
        _name(region.steps[i]): not alone and writes_logits(region, i, origins, ordered=not readers)
        for i in losses
        if id(region.steps[i]) not in apart
    }


def _name(step: DataflowStep) -> str:
    assert step.node is not None
    return step.node.name


_Origins = dict[_Tensor, frozenset[_Tensor]]


def writes_logits(region: Flow, at: int, origins: _Origins, ordered: bool = True) -> bool:
    """Return whether the loss at step `at` may overwrite its logits. `ordered`: whether steps run in this order."""
    logits = region.steps[at].operands[0]
    memory = _of(origins, logits)

    def touched(values: Iterable[Value]) -> bool:
        return any(not memory.isdisjoint(_of(origins, v)) for v in values)

    def harmless(i: int, step: DataflowStep) -> bool:
        if touched(_kept(step)):
            return False
        return not touched(step.operands) or may_share(step) or (ordered and i < at)

    return (
        logits.info.dtype in WIDE
        and _OUTSIDE not in memory
        and not touched(region.sent)
        and all(harmless(i, step) for i, step in enumerate(region.steps) if i != at)
        and all(_one_to_one(step) for step in region.steps if may_share(step) and touched(step.outputs))
    )


def may_share(step: DataflowStep) -> bool:
    """Return whether a result may share memory with an operand; conversions between placements may."""
    return step.call is None or not writes_anew(step.call)


def writes_anew(call: OpCall) -> bool:
    """Return whether an op's results are provably new tensors.

    The schema of an op with its own kernel says what its results alias. The schema of a composite op promises nothing
    (a dropout that is off returns its operand), so that only composite ops with a rule count as proved.
    """
    if not _is_known(call):
        return False
    if not isinstance(call.target, torch._ops.OpOverload):
        return True
    if any(r.alias_info is not None for r in call.target._schema.returns) or call.target in _MUTE:
        return False
    if target_name(call.target) == "einsum":  # with one operand it may be a permutation
        return len(call.operands) > 1
    return call.target in RULES or not call.target.has_kernel_for_dispatch_key(
        torch.DispatchKey.CompositeImplicitAutograd
    )


def _is_known(call: OpCall) -> bool:
    """Return whether an op is torch's or autoptd's; a user-defined one may alias and save any tensor."""
    if isinstance(call.target, torch._ops.OpOverload):
        return call.target.namespace == "aten"
    return call.target in _OURS


def _one_to_one(step: DataflowStep) -> bool:
    """Return whether a view has no element twice, and is the only output of its op."""
    return step.call is None or (len(step.outputs) == 1 and target_name(step.call.target) in _ONE_TO_ONE)


def _kept(step: DataflowStep) -> Iterable[Value]:
    """Return operands and results that are saved for backward."""
    if step.call is None or not any(t.requires_grad for t in step.call.outputs):
        return ()
    if not _is_known(step.call):
        return (*step.operands, *step.outputs)
    keeps = saved_tensors(step.call)
    return (*(step.operands[i] for i in keeps.operands), *(step.outputs[i] for i in keeps.outputs))


def _origins(region: Flow) -> _Origins:
    """Return the tensors whose memory each tensor may share, itself included."""
    found: _Origins = {}
    for step in region.steps:
        shared = frozenset[_Tensor]().union(*(_of(found, v) for v in step.operands)) if may_share(step) else frozenset()
        for value in step.outputs:
            found[_key(value)] = shared | {_key(value)}
    return found


def _of(origins: _Origins, value: Value) -> frozenset[_Tensor]:
    return origins.get(_key(value), frozenset({_OUTSIDE}))


def _key(value: Value) -> _Tensor:
    return value.name, str(value.placement)


def _hands_over(region: Flow, policy: str, readers: Sequence[DataflowStep]) -> bool:
    """Return whether a recomputation reads tensors of the first run (`autoptd.codegen.recompute` decides which).

    Recomputing the whole region reads none. Re-gathering in backward reads none if each product that reads a gathered
    tensor has one result, which none of the other `readers` reads.
    """
    if policy == "ops" or (policy == "selective" and recomputed_steps(region.steps, policy)):
        return True
    inside = {_key(v) for step in readers for v in step.operands}
    return any(s.view or len(s.outputs) > 1 or any(_key(v) in inside for v in s.outputs) for s in readers)


def _gathered_operands(region: Flow) -> Sequence[DataflowStep]:
    """Return the ops that read a tensor gathered over tp."""
    gathered = {s.outputs[0].storage for s in region.steps if s.node is None and s.outputs[0].storage.gathered_from}
    return [s for s in region.steps if s.node is not None and any(v.storage in gathered for v in s.operands)]
