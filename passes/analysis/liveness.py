"""Peak memory of consecutive segments on one rank.

    forward     saved so far + tensors made and not yet read for the last time + the op's own workspace
    backward    saved and not yet used + gradients in flight + gradients that the op makes + its own workspace;
                recomputed tensors are alive from the moment the last of their ops is reached (a block: from the start)

A gradient passes through a view or an addition without a copy, and a second gradient of one tensor is added in place
(torch's InputBuffer does so if it has the only reference). A parameter's gradient lives until its hook has added it to
the main gradients, which are counted elsewhere. Tensors are freed after their last use.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import sympy
from numpy.typing import NDArray

from autoptd.ops import library as ops
from autoptd.passes.analysis.activations import SavedActivations, recomputed_steps, saved_in_flow
from autoptd.passes.analysis.dataflow import GRADIENT_OF, DataflowStep, Flow, Number, Storage, Value, flow
from autoptd.passes.analysis.overwriting import losses_in_place
from autoptd.passes.analysis.workspace import workspace
from autoptd.passes.fold import Folded, Segment
from autoptd.passes.opcall import Chunked, TensorInfo, target_name
from autoptd.passes.sharding.sharding import KindSharding, Sharding, ops_of

_PASSING = ("add", "sub")  # ops that pass the incoming gradient on, unless an operand is broadcast
Sums = tuple[NDArray[np.int32], NDArray[np.int64]]  # indices of what is added up (0: nothing), where each sum begins
_Moment = tuple[str, frozenset[Storage]]  # the step, and the storages alive


@dataclass(frozen=True)
class Peak:
    """Bytes of consecutive segments for one microbatch: saved for backward (`kept`), and the peak of each pass.

    The peaks include what these segments save, and nothing of other segments.
    """

    kept: int
    forward: int
    backward: int

    @property
    def temporary(self) -> int:
        """Bytes at the higher peak beyond those saved for backward."""
        return max(self.forward, self.backward) - self.kept


@dataclass(frozen=True)
class Walk:
    """All moments of consecutive segments, each with the storages alive then; `peak` evaluates them at given sizes."""

    kept: tuple[SavedActivations, ...]
    forward: tuple[_Moment, ...]
    backward: tuple[_Moment, ...]

    @cached_property
    def storages(self) -> tuple[Storage, ...]:
        """Every storage that is alive at some moment."""
        moments = (alive for _, alive in (*self.forward, *self.backward))
        return tuple({k.storage for k in self.kept}.union(*moments))

    @cached_property
    def _alive(self) -> tuple[Sums, Sums, Sums]:
        """The storages that are added up, by index: all that is kept, and each moment of the two passes."""
        at = {s: i for i, s in enumerate(self.storages, 1)}

        def sums(moments: Sequence[Collection[Storage]]) -> Sums:
            lengths = [0, *(1 + len(alive) for alive in moments)]
            found = [i for alive in moments for i in (0, *(at[s] for s in alive))]
            return np.array(found, dtype=np.int32), np.cumsum(lengths)[:-1]

        forward, backward = ([alive for _, alive in moments] for moments in (self.forward, self.backward))
        return sums([[k.storage for k in self.kept]]), sums(forward), sums(backward)

    def sizes(self, number: Number, ranks: int, cp: int = 1) -> tuple[int, ...]:
        """Return the bytes of each storage: `number` evaluates a symbolic size on a cp rank, `ranks` is the tp size."""
        return tuple(s.nbytes(number, ranks, cp) for s in self.storages)

    def peak(self, number: Number, ranks: int, cp: int = 1) -> Peak:
        """Return the peak at given sizes; see `sizes`."""
        return self.peak_of(self.sizes(number, ranks, cp))

    def peak_of(self, sizes: Sequence[int], shares: Mapping[str, float] | None = None) -> Peak:
        """Return the peak, given the `sizes` of the storages.

        `shares`: tensor -> its bytes and those of its gradient, relative to its size in the graph (1 if absent).
        """
        if shares:
            names = (s.name.removeprefix(GRADIENT_OF) for s in self.storages)
            sizes = [round(size * shares.get(name, 1)) for size, name in zip(sizes, names, strict=True)]
        table = np.array([0, *sizes], dtype=np.int64)
        (kept,), forward, backward = (
            np.add.reduceat(table[which], starts) if len(starts) else starts for which, starts in self._alive
        )
        return Peak(int(kept), int(forward.max(initial=0)), int(backward.max(initial=0 if len(backward) else kept)))

    def fullest(self, number: Number, ranks: int, cp: int = 1) -> tuple[str, sympy.Expr]:
        """Return the step of the peak (`backward of cross_entropy`), and its bytes in the sizes' symbols and t."""

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
    """Return the moments of consecutive segments (one block, or one segment) under a policy. Raises ValueError.

    `in_place_loss`: a hand-written cross entropy turns the logits into probabilities, and those into their gradient, in
    place (Megatron-LM, vocab_parallel_cross_entropy), or in a copy if other ops may read the logits.
    """
    return walk_flow(flow(segments, kinds), policy, regather=regather, in_place_loss=in_place_loss)


def walk_flow(region: Flow, policy: str = "none", *, regather: bool = False, in_place_loss: bool = False) -> Walk:
    """Return the moments of the segments of a flow; see `walk`."""
    saved = saved_in_flow(region, policy, regather=regather)
    everything = saved_in_flow(region, "none", regather=regather)
    in_place = losses_in_place(region, policy, regather=regather) if in_place_loss else {}
    forward = tuple(_forward(region, {k.storage for k in saved}, in_place))
    if policy != "none":  # the recomputing pass saves everything
        again = _forward(region, {k.storage for k in everything}, in_place)
        inputs = frozenset(k.storage for k in saved)
    backward = tuple(_backward(region, saved, everything, policy, in_place))
    if policy in ("full", "ops"):
        backward += tuple((f"recomputing {text}", alive | inputs) for text, alive in again)
    return Walk(saved, forward, backward)


def stage_peak(parts: Iterable[Peak], in_flight: int) -> int:
    """Return the peak bytes of activations of a stage whose blocks, in program order, have these peaks.

    At the stage's peak, the last of `in_flight` microbatches is in some block i: the blocks before i have saved their
    activations for it, and block i is at its own peak.
    """
    before = fullest = 0
    for part in parts:
        fullest = max(fullest, before + max(part.forward, part.backward))
        before += part.kept
    return (in_flight - 1) * before + max(fullest, before)


def _forward(region: Flow, saved: set[Storage], in_place: Mapping[str, bool]) -> Iterator[_Moment]:
    """Yield the moments of a forward pass. `in_place`: as from `losses_in_place`."""
    last: dict[Storage, int] = {}
    for i, step in enumerate(region.steps):
        for value in (*step.operands, *step.outputs):
            last[value.storage] = i
    last |= {v.storage: len(region.steps) for v in region.sent}
    alive = {v.storage for v in region.received}
    for i, step in enumerate(region.steps):
        alive |= {s for s in step.saved if s in saved} | {v.storage for v in step.outputs}
        name = step.node.name if step.node is not None else ""
        if in_place.get(name):  # the tensor of the logits' size that it saves has their memory
            alive.discard(step.operands[0].storage)
        own = step.call is not None and not step.view and name not in in_place
        extra = _extra(step, workspace(step.call).forward if step.call and own else ())
        yield step.name, frozenset(s for s in (*alive, *extra) if s.origin not in ("parameter", "prelude"))
        alive = {s for s in alive if s in saved or last.get(s, -1) > i}


def _extra(step: DataflowStep, tensors: Sequence[TensorInfo]) -> set[Storage]:
    limits = [t.max_elements if isinstance(t, Chunked) else 0 for t in tensors]
    return {
        Storage(f"{step.name}'s own {i}", t.shape, t.dtype, step.ranks, max_elements=limit)
        for i, (t, limit) in enumerate(zip(tensors, limits, strict=True))
    }


def _backward(
    region: Flow,
    saved: Sequence[SavedActivations],
    everything: Sequence[SavedActivations],
    policy: str,
    in_place: Mapping[str, bool],
) -> Iterator[_Moment]:
    steps = region.steps
    first = {s: i for i, step in reversed(list(enumerate(steps))) for s in step.saved}  # its last use in backward
    restored = {k.storage for k in everything} - {k.storage for k in saved}
    again = {id(s) for s in recomputed_steps(steps, policy)}
    back = max((i for i, s in enumerate(steps) if id(s) in again), default=-1)
    back = len(steps) if policy in ("full", "ops") else back
    alive = {k.storage for k in saved}
    gradients = {_key(v): v.gradient for v in region.sent if v.info.requires_grad}
    for i, step in reversed(list(enumerate(steps))):
        if i <= back:
            alive |= {s for s in restored if first.get(s, -1) <= i}
        incoming = [gradients.pop(_key(v)) for v in step.outputs if _key(v) in gradients]
        made: dict[tuple[str, str], Storage] = {}
        if incoming:
            wanted = {_key(v): v for v in step.operands if v.info.requires_grad}
            made = {k: incoming[0] if _passes_gradient(step, v) else v.gradient for k, v in wanted.items()}
        needed = {s for s in step.saved if s.origin not in ("parameter", "prelude")} if incoming else set()
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
    """Return the tensor of the gradient's size that a step saved, which the gradient overwrites; else the gradient."""
    own = (s for s in step.saved if s.dtype == gradient.dtype and sympy.expand(s.elements - gradient.elements) == 0)
    return next(own, gradient)


def _order(storage: Storage) -> tuple[str, bool]:
    """Return a sort key that, unlike the order of a set, is equal in every process."""
    return storage.name, storage.split


def _key(value: Value) -> tuple[str, str]:
    return value.name, str(value.placement)


def _passes_gradient(step: DataflowStep, operand: Value) -> bool:
    """Return whether the incoming gradient becomes the operand's without a new tensor."""
    result = step.outputs[0]
    same = result.info.dtype == operand.info.dtype and len(step.outputs) == 1
    if step.view:
        return same and sympy.expand(result.gradient.elements - operand.gradient.elements) == 0
    if step.call is None or target_name(step.call.target) not in _PASSING:
        return False
    return same and result.info.shape == operand.info.shape and result.placement == operand.placement


def cuts_logits(folded: Folded, sharding: Sharding) -> bool:
    """Return whether a cross entropy reads logits whose vocabulary is split over ranks."""
    return any(
        node.target is ops.cross_entropy and sharding.kinds[kind].strategies[i].implementation
        for kind, segment in folded.representatives.items()
        for i, node in ops_of(segment)
    )
