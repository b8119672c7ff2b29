"""The fullest moment of a stretch of the program on one rank: what is alive beyond what is kept.

    forward     kept so far + tensors made and not yet read for the last time + the op's own workspace
    backward    kept and not yet used + gradients in flight + gradients coming out of the op + its own workspace;
                what is recomputed is back from the moment its last op is reached (a block: from the start)

A gradient passes through a view or an addition without a copy, and a second gradient of one tensor is added in place
(torch's InputBuffer does so where it holds the only reference). A parameter's gradient lives until its hook has added
it to the main gradients, which are counted elsewhere. Tensors are freed after their last use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import sympy

from autoptd.ops import library as ops
from autoptd.passes.analysis.activations import SavedActivations, kept_of, recomputed_steps
from autoptd.passes.analysis.dataflow import DataflowStep, Flow, Number, Storage, Value, flow, op_base
from autoptd.passes.analysis.overwriting import losses_in_place
from autoptd.passes.analysis.workspace import workspace
from autoptd.passes.fold import Folded, Segment
from autoptd.passes.opcall import Stretched, TensorInfo
from autoptd.passes.sharding.sharding import KindSharding, Sharding, ops_of

_PASSING = ("add", "sub")  # ops whose gradient is the incoming one, where no operand is broadcast
_Moment = tuple[str, frozenset[Storage]]


@dataclass(frozen=True)
class Peak:
    """Bytes of a stretch for one microbatch: what stays after its forward pass, and the fullest moment of each pass.

    `forward` and `backward` include what is kept of this stretch, and nothing of others.
    """

    kept: int
    forward: int
    backward: int

    @property
    def temporary(self) -> int:
        """What the fullest moment takes beyond what is kept."""
        return max(self.forward, self.backward) - self.kept


@dataclass(frozen=True)
class Walk:
    """All moments of a stretch, each with the storages that are alive. Sizes enter when a peak is asked for."""

    kept: tuple[SavedActivations, ...]
    forward: tuple[_Moment, ...]
    backward: tuple[_Moment, ...]

    @cached_property
    def _indexed(self) -> tuple[list[Storage], list[tuple[int, ...]], list[tuple[int, ...]], list[int]]:
        kept = [k.storage for k in self.kept]
        moments = [alive for _, alive in (*self.forward, *self.backward)]
        storages = list(dict.fromkeys([*kept, *(s for m in moments for s in sorted(m, key=_order))]))
        at = {s: i for i, s in enumerate(storages)}
        forward = [tuple(at[s] for s in alive) for _, alive in self.forward]
        backward = [tuple(at[s] for s in alive) for _, alive in self.backward]
        return storages, forward, backward, [at[s] for s in kept]

    def peak(self, number: Number, ranks: int, cp: int = 1) -> Peak:
        """At given sizes: `number` gives the value of a symbolic size to one of `cp` ranks, `ranks` is the tp axis'."""
        storages, forward, backward, kept = self._indexed
        sizes = [s.nbytes(number, ranks, cp) for s in storages]
        total = sum(sizes[i] for i in kept)
        return Peak(
            total,
            max((sum(sizes[i] for i in alive) for alive in forward), default=0),
            max((sum(sizes[i] for i in alive) for alive in backward), default=total),
        )

    def fullest(self, number: Number, ranks: int, cp: int = 1) -> tuple[str, sympy.Expr]:
        """Where the fullest moment is (`backward of cross_entropy`), and its bytes in the sizes' symbols and t."""

        def size(moment: _Moment) -> int:
            return sum(s.nbytes(number, ranks, cp) for s in moment[1])

        text, alive = max((*self.forward, *self.backward), key=size)
        terms = (s.elements * s.dtype.itemsize for s in sorted(alive, key=_order))
        return text, sympy.expand(sum(terms, sympy.Integer(0)))


def walk(
    segments: Sequence[Segment],
    kinds: Mapping[str, KindSharding],
    policy: str = "none",
    *,
    regather: bool = False,
    in_place_loss: bool = False,
) -> Walk:
    """The moments of consecutive segments (one block, or one segment) under a recompute policy. Raises ValueError.

    `in_place_loss`: a hand-written cross entropy makes probabilities of the logits, and of these their gradient, in
    place (Megatron-LM, vocab_parallel_cross_entropy), or in a copy where others may read them.
    """
    region = flow(segments, kinds)
    held = kept_of(region, policy, regather=regather)
    everything = kept_of(region, "none", regather=regather)
    in_place = losses_in_place(region, policy, regather=regather) if in_place_loss else {}
    forward = tuple(_forward(region, {k.storage for k in held}, in_place))
    if policy != "none":  # the pass that computes again keeps everything
        again = _forward(region, {k.storage for k in everything}, in_place)
        inputs = frozenset(k.storage for k in held)
    backward = tuple(_backward(region, held, everything, policy, in_place))
    if policy in ("full", "ops"):
        backward += tuple((f"recomputing {text}", alive | inputs) for text, alive in again)
    return Walk(held, forward, backward)


def stage_peak(parts: Iterable[Peak], in_flight: int) -> int:
    """Bytes of activations at the fullest moment of a stage whose blocks, in program order, have these peaks.

    The last microbatch of `in_flight` is the one that goes to the end and turns: at block i it has kept what blocks
    before i keep, and block i is at its own fullest.
    """
    before = fullest = 0
    for part in parts:
        fullest = max(fullest, before + max(part.forward, part.backward))
        before += part.kept
    return (in_flight - 1) * before + max(fullest, before)


def _forward(region: Flow, held: set[Storage], in_place: Mapping[str, bool]) -> Iterator[_Moment]:
    """`in_place`: the losses that are, and whether they overwrite their logits or a copy."""
    last: dict[Storage, int] = {}
    for i, step in enumerate(region.steps):
        for value in (*step.operands, *step.outputs):
            last[value.storage] = i
    last |= {v.storage: len(region.steps) for v in region.sent}
    alive = {v.storage for v in region.received}
    for i, step in enumerate(region.steps):
        alive |= {s for s in step.kept if s in held} | {v.storage for v in step.outputs}
        name = step.node.name if step.node is not None else ""
        if in_place.get(name):  # what it keeps of the logits' size is where they were
            alive.discard(step.operands[0].storage)
        own = step.call is not None and not step.view and name not in in_place
        extra = _extra(step, workspace(step.call).forward if step.call and own else ())
        yield step.name, frozenset(s for s in (*alive, *extra) if s.origin not in ("parameter", "prelude"))
        alive = {s for s in alive if s in held or last.get(s, -1) > i}


def _extra(step: DataflowStep, tensors: Sequence[TensorInfo]) -> set[Storage]:
    return {
        Storage(f"{step.name}'s own {i}", t.shape, t.dtype, step.ranks, most=t.most if isinstance(t, Stretched) else 0)
        for i, t in enumerate(tensors)
    }


def _backward(
    region: Flow,
    held: Sequence[SavedActivations],
    everything: Sequence[SavedActivations],
    policy: str,
    in_place: Mapping[str, bool],
) -> Iterator[_Moment]:
    steps = region.steps
    first = {s: i for i, step in reversed(list(enumerate(steps))) for s in step.kept}  # its last use, going back
    restored = {k.storage for k in everything} - {k.storage for k in held}
    again = {id(s) for s in recomputed_steps(steps, policy)}
    back = max((i for i, s in enumerate(steps) if id(s) in again), default=-1)
    back = len(steps) if policy in ("full", "ops") else back
    alive = {k.storage for k in held}
    gradients = {_key(v): v.gradient for v in region.sent if v.info.requires_grad}
    for i, step in reversed(list(enumerate(steps))):
        if i <= back:
            alive |= {s for s in restored if first.get(s, -1) <= i}
        incoming = [gradients.pop(_key(v)) for v in step.outputs if _key(v) in gradients]
        made: dict[tuple[str, str], Storage] = {}
        if incoming:
            wanted = {_key(v): v for v in step.operands if v.info.requires_grad}
            made = {k: incoming[0] if _passes(step, v) else v.gradient for k, v in wanted.items()}
        needed = {s for s in step.kept if s.origin not in ("parameter", "prelude")} if incoming else set()
        own = _extra(step, workspace(step.call).backward if step.call and incoming and not step.view else ())
        if step.node is not None and step.node.name in in_place:
            made, own = {k: _overwritten(step, gradient) for k, gradient in made.items()}, set()
        yield (
            f"backward of {step.name}",
            frozenset({*alive, *needed, *gradients.values(), *incoming, *made.values(), *own}),
        )
        parameters = {_key(v) for v in step.operands if v.storage.origin == "parameter"}
        for key, gradient in made.items():
            if key not in parameters:
                gradients.setdefault(key, gradient)
        alive = {s for s in alive if first.get(s, -1) < i}


def _overwritten(step: DataflowStep, gradient: Storage) -> Storage:
    """What a step kept of a gradient's size, or the gradient."""
    own = (s for s in step.kept if s.dtype == gradient.dtype and sympy.expand(s.elements - gradient.elements) == 0)
    return next(own, gradient)


def _order(storage: Storage) -> tuple[str, bool]:
    """The same in every process, which the order of a set is not."""
    return storage.name, storage.split


def _key(value: Value) -> tuple[str, str]:
    return value.name, str(value.placement)


def _passes(step: DataflowStep, operand: Value) -> bool:
    """Whether the incoming gradient is the operand's own, not a new tensor."""
    result = step.outputs[0]
    same = result.info.dtype == operand.info.dtype and len(step.outputs) == 1
    if step.view:
        return same and sympy.expand(result.gradient.elements - operand.gradient.elements) == 0
    if step.call is None or op_base(step.call) not in _PASSING:
        return False
    return same and result.info.shape == operand.info.shape and result.placement == operand.placement


def cuts_logits(folded: Folded, sharding: Sharding) -> bool:
    """Whether a cross entropy reads logits whose vocabulary lies over several ranks."""
    return any(
        node.target is ops.cross_entropy and sharding.kinds[kind].strategies[i].implementation
        for kind, segment in folded.representatives.items()
        for i, node in ops_of(segment)
    )
