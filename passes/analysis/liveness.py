"""Peak memory of consecutive segments on one rank.

    forward     saved so far + tensors made and not yet read for the last time + the op's own workspace
    backward    saved and not yet used + gradients in flight + gradients that the op makes + its own workspace;
                recomputed tensors are alive from the moment the last of their ops is reached (a block: from the start),
                offloaded ones from their first use

A gradient passes through a view or an addition without a copy, and a second gradient of one tensor is added in place
(torch's InputBuffer does so if it has the only reference). A parameter's gradient lives until its hook has added it to
the main gradients, which are counted elsewhere. Tensors are freed after their last use.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import sympy
from numpy.typing import NDArray

from autoptd.ops import library as ops
from autoptd.passes.analysis.activations import SavedActivations, recomputed_steps, saved_in_flow
from autoptd.passes.analysis.dataflow import GRADIENT_OF, DataflowStep, Flow, Number, Storage, Value, flow, join_heads
from autoptd.passes.analysis.flops import work
from autoptd.passes.analysis.lifetimes import Lifetimes, LifetimeWriter, Moment, most_bytes
from autoptd.passes.analysis.overwriting import losses_in_place
from autoptd.passes.analysis.workspace import Workspace, workspace
from autoptd.passes.fold import Folded, Segment
from autoptd.passes.opcall import Chunked, TensorInfo, target_name
from autoptd.passes.sharding.sharding import KindSharding, Sharding, ops_of

_ELSEWHERE = ("parameter", "prelude")  # origins of storages that are counted elsewhere
_PASSING = ("add", "sub")  # ops that pass the incoming gradient on, unless an operand is broadcast


class Peak(NamedTuple):
    """Bytes of consecutive segments for one microbatch: saved for backward (`kept`), and the peak of each pass.

    The peaks include what these segments save, and nothing of other segments. `waiting`: gradients that a split
    backward pass holds from B to W.
    """

    kept: int
    forward: int
    backward: int
    waiting: int = 0

    def above(self, nbytes: int) -> Peak:
        """Return the peak of the same segments if they keep so many more bytes."""
        return Peak(self.kept + nbytes, self.forward + nbytes, self.backward + nbytes, self.waiting)

    @property
    def temporary(self) -> int:
        """Bytes at the higher peak beyond those saved for backward."""
        return max(self.forward, self.backward) - self.kept


@dataclass(frozen=True)
class Walk:
    """Lifetimes of storages in both passes of consecutive segments, and what is kept; `peak` adds up their bytes.

    `backward` ends with the moments of a recomputing forward pass, if there is one. `waiting`: gradients that are held
    between the parts of a split backward pass.
    """

    kept: tuple[SavedActivations, ...]
    forward: Lifetimes
    backward: Lifetimes
    waiting: tuple[Storage, ...] = ()

    @cached_property
    def storages(self) -> tuple[Storage, ...]:
        """Every storage that is alive at some moment."""
        spans = (storage for storage, _, _ in (*self.forward.spans, *self.backward.spans))
        return tuple(dict.fromkeys((*(k.storage for k in self.kept), *spans, *self.waiting)))

    @cached_property
    def _placed(self) -> tuple[list[int], list[int], NDArray[np.int64], NDArray[np.int64]]:
        """The indices of the storages that are kept, and that wait, and the spans of each pass by index."""
        at = {storage: i for i, storage in enumerate(self.storages)}
        kept, waiting = [at[k.storage] for k in self.kept], [at[storage] for storage in self.waiting]
        return kept, waiting, self.forward.placed(at), self.backward.placed(at)

    def sizes(
        self, number: Number, ranks: int, cp: int = 1, known: dict[Storage, int] | None = None
    ) -> tuple[int, ...]:
        """Return the bytes of each storage: `number` evaluates a symbolic size on a cp rank, `ranks` is the tp size.

        `known`: bytes worked out before for equal arguments, and a place for these."""
        known = {} if known is None else known
        known.update((s, s.nbytes(number, ranks, cp)) for s in self.storages if s not in known)
        return tuple(known[s] for s in self.storages)

    def peak(self, number: Number, ranks: int, cp: int = 1) -> Peak:
        """Return the peak at given sizes; see `sizes`."""
        return self.peak_of(self.sizes(number, ranks, cp))

    def shared(self, sizes: Sequence[int], shares: Mapping[str, float]) -> Sequence[int]:
        """Return the sizes of the storages on a rank.

        `shares`: tensor -> its bytes and those of its gradient, relative to its size in the graph (1 if absent).
        """
        if not shares:
            return sizes
        names = (s.name.removeprefix(GRADIENT_OF) for s in self.storages)
        return [round(size * shares.get(name, 1)) for size, name in zip(sizes, names, strict=True)]

    def peak_of(self, sizes: Sequence[int], elsewhere: Collection[str] = ()) -> Peak:
        """Return the peak, given the `sizes` of the storages. `elsewhere`: received tensors that are counted elsewhere,
        as several blocks hold them together. Their gradients count here."""
        if elsewhere:
            given = (s.origin == "received" and s.name in elsewhere for s in self.storages)
            sizes = [0 if is_elsewhere else size for size, is_elsewhere in zip(sizes, given, strict=True)]
        (which, later, forward, backward), table = self._placed, np.array(sizes, dtype=np.int64)
        kept, waiting = (sum(sizes[i] for i in chosen) for chosen in (which, later))
        highest = most_bytes(backward, table) if self.backward.names else kept
        return Peak(kept, most_bytes(forward, table), highest, waiting)

    def fullest(self, number: Number, ranks: int, cp: int = 1) -> tuple[str, sympy.Expr]:
        """Return the step of the peak (`backward of cross_entropy`), and its bytes in the sizes' symbols and t."""

        def size(moment: Moment) -> int:
            return sum(s.nbytes(number, ranks, cp) for s in moment[1])

        text, alive = max((*self.forward.moments(), *self.backward.moments()), key=size)
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
    if policy == "logits":
        return walk_flow(join_heads(region))
    regather = regather and policy != "offload"
    saved = saved_in_flow(region, policy, regather=regather)
    everything = saved_in_flow(region, "none", regather=regather)
    in_place = losses_in_place(region, policy, regather=regather) if in_place_loss else {}
    kept, whole = ({k.storage for k in found} for found in (saved, everything))
    forward = _forward(region, kept, in_place)
    backward = _backward(region, kept, whole, policy, in_place)
    if policy in ("full", "ops"):  # the recomputing pass saves everything
        backward = backward.then(_forward(region, whole, in_place, "recomputing ", {*kept, *_arriving(region)}))
    return Walk(saved, forward, backward, waiting_gradients(region, policy))


def forward_bytes(region: Flow, saved: Collection[str], number: Number, ranks: int, cp: int = 1) -> list[int]:
    """Return the bytes alive at each step of a forward pass that saves the storages of these names."""
    values = (*region.received, *(v for step in region.steps for v in (*step.operands, *step.outputs)))
    storages = {*(v.storage for v in values), *(s for step in region.steps for s in step.saved)}
    moments = _forward(region, {s for s in storages if s.name in saved}, {}).moments()
    return [sum(s.nbytes(number, ranks, cp) for s in alive) for _, alive in moments]


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


def _forward(
    region: Flow,
    saved: set[Storage],
    in_place: Mapping[str, bool],
    name: str = "",
    always: Collection[Storage] = (),
) -> Lifetimes:
    """Return the lifetimes in a forward pass. `in_place`: as from `losses_in_place`; `always`: alive besides."""
    found, last = LifetimeWriter(always), dict[Storage, int]()
    for i, step in enumerate(region.steps):
        last.update((value.storage, i) for value in (*step.operands, *step.outputs))
    ends = _by_moment((s, i) for s, i in last.items() if s not in saved)
    unread = [v.storage for v in region.received if v.storage not in last and v.storage not in saved]
    ends.setdefault(0, []).extend(unread)
    sent, alive, own = {v.storage for v in region.sent}, set[Storage](), _own(region)

    def begin(storages: Iterable[Storage]) -> None:
        new = dict.fromkeys(s for s in storages if s not in alive and s.origin not in _ELSEWHERE)
        found.hold(new)
        alive.update(new)

    def end(storages: Iterable[Storage]) -> None:
        old = [s for s in storages if s in alive]
        found.release(old)
        alive.difference_update(old)

    begin(v.storage for v in region.received)
    for i, step in enumerate(region.steps):
        begin((*(s for s in step.saved if s in saved), *(v.storage for v in step.outputs)))
        text = step.node.name if step.node is not None else ""
        if in_place.get(text):  # the tensor of the logits' size that it saves has their memory
            end([step.operands[0].storage])
        found.moment(name + step.name, () if text in in_place else own[i][0])
        end(s for s in ends.get(i, ()) if s not in sent)
    return found.finish()


def _by_moment(places: Iterable[tuple[Storage, int]]) -> dict[int, list[Storage]]:
    found: dict[int, list[Storage]] = {}
    for storage, i in places:
        found.setdefault(i, []).append(storage)
    return found


def _own(region: Flow) -> Sequence[tuple[list[Storage], list[Storage]]]:
    """Return each step's own workspace in forward and in backward."""
    if "own" not in region.memo:
        region.memo["own"] = [_own_of(step) for step in region.steps]
    return region.memo["own"]  # type: ignore[no-any-return]


def _own_of(step: DataflowStep) -> tuple[list[Storage], list[Storage]]:
    if step.call is None or step.view:
        return [], []
    if step.compiled and work(step.call).kind == "memory":
        return [], []
    found = workspace(step.call)
    if step.compiled and _is_padded(step.outputs[0].info):  # of the gradient, both products take a copy of their own
        copy = step.outputs[0].info
        found = Workspace((*found.forward, copy), (*found.backward, copy, copy))
    return _extra(step, found.forward), _extra(step, found.backward)


def _is_padded(result: TensorInfo) -> bool:
    """Return whether inductor pads a product: rows of its result have an odd number of elements of 16 bits."""
    size = result.shape[-1] if result.ndim else 1
    return isinstance(size, int) and size % 2 == 1 < size and result.dtype.itemsize == 2


def _extra(step: DataflowStep, tensors: Sequence[TensorInfo]) -> list[Storage]:
    limits = [t.max_elements if isinstance(t, Chunked) else 0 for t in tensors]
    return [
        Storage(f"{step.name}'s own {i}", t.shape, t.dtype, step.ranks, max_elements=limit)
        for i, (t, limit) in enumerate(zip(tensors, limits, strict=True))
    ]


def _backward(
    region: Flow, saved: set[Storage], everything: set[Storage], policy: str, in_place: Mapping[str, bool]
) -> Lifetimes:
    steps, found = region.steps, LifetimeWriter()
    first = {s: i for i, step in reversed(list(enumerate(steps))) for s in step.saved}  # its last use in backward
    again = {id(s) for s in recomputed_steps(steps, policy)}
    back = max((i for i, s in enumerate(steps) if id(s) in again), default=-1)
    back = len(steps) - 1 if policy in ("full", "ops") else back
    restored = [s for s in everything - saved if first.get(s, -1) <= back]
    starts = dict[int, list[Storage]]()
    if policy == "offload":
        restored = list(everything - saved)
        lasts = {s: i for i, step in enumerate(steps) for s in step.saved}  # its first use in backward
        starts = _by_moment((s, lasts[s]) for s in restored)
    elif restored:
        starts = {back: restored}
    ends = _by_moment((s, first[s]) for s in (*saved, *restored) if s in first)
    moves = _gradient_moves(region, frozenset(in_place))
    found.hold((*saved, *_arriving(region)))
    for i, step, move in zip(reversed(range(len(steps))), reversed(steps), moves, strict=True):
        found.hold(starts.get(i, ()))
        found.moment(f"backward of {step.name}", move.briefly)
        found.hold(move.passed)
        found.release((*move.used, *ends.get(i, ())))
    return found.finish()


def _arriving(region: Flow) -> Iterable[Storage]:
    """Return the gradients that are there when the backward pass of a region begins."""
    return {_key(v): v.gradient for v in region.sent if v.info.requires_grad}.values()


@dataclass(frozen=True)
class _GradientMove:
    """Storages in one step of a backward pass: alive in this moment, gradients that it makes for later steps, and those
    that it was the last to use."""

    briefly: tuple[Storage, ...]
    passed: tuple[Storage, ...]
    used: tuple[Storage, ...]


def _gradient_moves(region: Flow, in_place: frozenset[str]) -> Sequence[_GradientMove]:
    """Return the moves of all steps, the last step first. `in_place`: losses that make no gradient of their own."""
    if in_place not in region.memo:
        gradients = {_key(v): v.gradient for v in region.sent if v.info.requires_grad}
        both = zip(reversed(region.steps), reversed(_own(region)), strict=True)
        region.memo[in_place] = [_gradient_move(step, own[1], gradients, in_place) for step, own in both]
    return region.memo[in_place]  # type: ignore[no-any-return]


def _gradient_move(
    step: DataflowStep, own: Sequence[Storage], gradients: dict[tuple[str, str], Storage], in_place: frozenset[str]
) -> _GradientMove:
    """Return the move of one step, and update the `gradients` in flight."""
    used = tuple(gradients.pop(_key(v)) for v in step.outputs if _key(v) in gradients)
    if not used:
        return _GradientMove((), (), ())
    wanted = {_key(v): v for v in step.operands if v.info.requires_grad}
    made = {k: used[0] if _passes_gradient(step, v) else v.gradient for k, v in wanted.items()}
    needed = [s for s in step.saved if s.origin not in _ELSEWHERE]
    if step.node is not None and step.node.name in in_place:
        made, own = {k: _overwritten(step, gradient) for k, gradient in made.items()}, ()
    parameters = {_key(v) for v in step.operands if v.storage.origin == "parameter"}
    passed = {k: gradient for k, gradient in made.items() if k not in parameters and k not in gradients}
    gradients.update(passed)
    return _GradientMove((*needed, *made.values(), *own), tuple(passed.values()), used)


def waiting_gradients(region: Flow, policy: str = "none") -> tuple[Storage, ...]:
    """Return the gradients that a split backward pass holds from B to W: those that arrive at the ops, between received
    tensors and the loss, with branches to parameters (`runtime/split_backward.py`). Recomputed blocks have none.

    A gradient that is held is not added to in place: the sum is a tensor of its own.
    """
    if policy not in ("none", "selective", "logits"):
        return ()
    gradients = {_key(v): v.gradient for v in region.sent if v.info.requires_grad}
    path, held = {_key(v) for v in region.received if v.info.requires_grad}, dict[Storage, None]()
    for step in region.steps:
        if any(_key(v) in path for v in step.operands):
            path.update(_key(v) for v in step.outputs if v.info.requires_grad)
    for step in reversed(region.steps):
        used = [gradients.pop(_key(v)) for v in step.outputs if _key(v) in gradients]
        wanted = {_key(v): v for v in step.operands if v.info.requires_grad} if used else {}
        if path.intersection(wanted) and not path.issuperset(wanted):
            held.update(dict.fromkeys(used))
        for key, value in wanted.items():
            if key in path and key not in gradients:
                gradients[key] = used[0] if _passes_gradient(step, value) else value.gradient
            elif key in path and gradients[key] in held:
                gradients[key] = value.gradient
    return tuple(held)


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
