"""Which losses may overwrite their logits: those whose logits are provably read by nobody else.

A cross entropy in place turns its logits into probabilities, and these into a gradient. Let R be the tensors whose
memory the logits may be: what made them, through every op that may hand on a view. A loss may overwrite R if

    (1) all of R is made within the stretch (a block, or a segment), and nothing of R leaves it
    (2) no op reads R after the loss, and none before it keeps an operand or a result in R for its backward pass
    (3) each element of the logits has a place of its own: no view on the way repeats elements, or is one of several
        that one op gives (autograd lets nobody write to those)
    (4) nothing of the stretch is handed to a second run, which would find probabilities in place of logits

Views are looked at with suspicion, where `passes.flow` counts bytes by its best guess: a reshape may copy or not, and
an op that torch's schema does not vouch for may do anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from autoptd.ops import library as ops
from autoptd.passes.analysis.activations import recomputed_steps
from autoptd.passes.analysis.dataflow import DataflowStep, Flow, Value, op_base
from autoptd.passes.analysis.saved_tensors import saved_tensors
from autoptd.passes.opcall import OpCall
from autoptd.passes.rules.table import RULES

aten = torch.ops.aten
WIDE = (torch.float32, torch.float64)  # in which losses are computed

_OURS = frozenset({ops.cross_entropy, ops.attention, ops.grouped_mm, ops.valid_count, ops.element_count})
# which may return their operand, or a view of it, though their schemas do not say so
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
_OUTSIDE: _Tensor = ("", "")  # whatever was there before the stretch


def is_loss(step: DataflowStep) -> bool:
    """Whether a step is the cross entropy that may be in place."""
    return step.call is not None and step.call.target is ops.cross_entropy


def losses_in_place(region: Flow, policy: str, *, regather: bool = False) -> dict[str, bool]:
    """The losses of a stretch under a recompute policy that are in place where a plan says so, by name of their node.

    True: in their logits; False: in a copy of them. A loss that reads what is gathered again is not in place at all: it
    does not run again, and what it saves is told apart from its operands by their memory (`runtime.recompute`).
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
    """Whether the loss that is this step may overwrite its logits. `ordered`: whether steps run in this order."""
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
    """Whether a result may lie in the memory of an operand. Conversions between placements may."""
    return step.call is None or not writes_anew(step.call)


def writes_anew(call: OpCall) -> bool:
    """Whether an op's results are provably new tensors.

    A schema says of every op with a kernel of its own what its results alias. Those composed of others only promise
    nothing (a dropout that is off returns its operand), but for those that have a rule.
    """
    if not _is_known(call):
        return False
    if not isinstance(call.target, torch._ops.OpOverload):
        return True
    if any(r.alias_info is not None for r in call.target._schema.returns) or call.target in _MUTE:
        return False
    if op_base(call) == "einsum":  # of one operand it may be a permutation
        return len(call.operands) > 1
    return call.target in RULES or not call.target.has_kernel_for_dispatch_key(
        torch.DispatchKey.CompositeImplicitAutograd
    )


def _is_known(call: OpCall) -> bool:
    """Whether an op is torch's or ours; a user's own may do, and keep, what it likes."""
    if isinstance(call.target, torch._ops.OpOverload):
        return call.target.namespace == "aten"
    return call.target in _OURS


def _one_to_one(step: DataflowStep) -> bool:
    """Whether a view shows no element twice, and is the only one that its op gives."""
    return step.call is None or (len(step.outputs) == 1 and op_base(step.call) in _ONE_TO_ONE)


def _kept(step: DataflowStep) -> Iterable[Value]:
    """Operands and results that are kept for the backward pass."""
    if step.call is None or not any(t.requires_grad for t in step.call.outputs):
        return ()
    if not _is_known(step.call):
        return (*step.operands, *step.outputs)
    keeps = saved_tensors(step.call)
    return (*(step.operands[i] for i in keeps.operands), *(step.outputs[i] for i in keeps.outputs))


def _origins(region: Flow) -> _Origins:
    """The tensors in whose memory each tensor may lie; itself, where its op may write it anew."""
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
    """Whether a second run reads tensors of the first one: `autoptd.codegen.recompute` writes which.

    One of the whole stretch makes its own. What gathers again hands over nothing where each product that reads a
    gathered tensor gives one result, which no other of these `readers` reads.
    """
    if policy == "ops" or (policy == "selective" and recomputed_steps(region.steps, policy)):
        return True
    inside = {_key(v) for step in readers for v in step.operands}
    return any(s.view or len(s.outputs) > 1 or any(_key(v) in inside for v in s.outputs) for s in readers)


def _gathered_operands(region: Flow) -> Sequence[DataflowStep]:
    """The ops that read a tensor which tp gathers."""
    gathered = {s.outputs[0].storage for s in region.steps if s.node is None and s.outputs[0].storage.gathered_from}
    return [s for s in region.steps if s.node is not None and any(v.storage in gathered for v in s.operands)]
