"""The executor: runs one rank's action list (compute, messages, end of the step) in exactly its order.

A rank holds one or more chunks of the model; each F, B, W names its chunk. A receive is posted one message ahead of the
action that waits for it, so that the transfer overlaps with compute; as the channel is a FIFO, this changes no order. A
sent tensor is kept alive until its send completes. At most two sends per channel are in flight, as in the deadlock
proof of the schedule. A chunk passes tensors to a chunk of the same rank by reference.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autoptd.errors import RuntimeFault
from autoptd.ops.dropout import DropoutKey
from autoptd.ops.group import Handle
from autoptd.ops.stage import Stage, Wire
from autoptd.runtime.batch import Microbatch, sample_count
from autoptd.runtime.batch_counts import BatchSums, LossOfSums, LossTotal
from autoptd.runtime.comm.handshake import exchange
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.messages import At, Edge, Inbox, MessagePart, Tensors
from autoptd.runtime.profiler_ranges import in_ranges
from autoptd.runtime.split_backward import Root, WeightBackward, backward_inputs
from autoptd.schedule import (
    RECEIVES,
    SENDS,
    SENDS_UNDER_WAY,
    Action,
    Actions,
    StageMap,
    channel_of,
    peer_of,
    receives_posted,
)


class BackwardHooks(Protocol):
    """Calls of the executor around backward passes: gather parameters, reduce their gradients."""

    def start_sum(self, chunk: int) -> None:
        """Called for the SUM of a chunk, right before the pass that completes its gradients."""
        ...

    def before_backward(self, chunk: int, kind: str) -> None:
        """Called before chunk `chunk` starts a B or W pass (`kind`)."""
        ...

    def before_weights(self, parameters: Sequence[Tensor]) -> None:
        """Called within a W pass before it computes the gradients of `parameters`."""
        ...

    def after_backward(self, chunk: int, whole: bool) -> None:
        """Called after a B or W pass; `whole`: no W of this microbatch is to follow."""
        ...


@dataclass(frozen=True)
class _Chunk:
    """One of this rank's stages and its neighbours: what is the same in all steps, so that actions look nothing up.

    `number`: of the stage in the model. `modules`: as text. `before`, `after`: the chunk of the previous and of the
    next stage if this rank holds it. By kind of send and receive: `edges`, the channel if the neighbour is another
    rank; `wires`, all of them for activations, those with gradients for gradients.
    """

    stage: Stage
    number: int
    modules: str
    before: int | None
    after: int | None
    edges: Mapping[str, Edge]
    wires: Mapping[str, tuple[Wire, ...]]

    @staticmethod
    def of(rank: int, chunk: int, stage: Stage, route: StageMap, modules: Sequence[str]) -> _Chunk:
        """Describe chunk `chunk` of pipeline rank `rank`. `modules`: of each stage of the model, or ()."""
        number = route.stage(rank, chunk)
        hops = [route.hop(rank, chunk, step) for step in (-1, 1)]
        before, after = (there[1] if there and there[0] == rank else None for there in hops)
        ends = [Action(kind, 0, chunk) for kind in ("RF", "SF", "RB", "SB")]
        edges = {end.kind: channel_of(rank, end, route) for end in ends if peer_of(rank, end, route) is not None}
        back, on = (tuple(w for w in wires if w.requires_grad) for wires in (stage.receives, stage.sends))
        wires = {"RF": stage.receives, "SF": stage.sends, "RB": on, "SB": back}
        return _Chunk(stage, number, modules[number] if modules else "", before, after, edges, wires)


class Executor:
    """Runs action lists on one rank; `stages` are its chunks."""

    def __init__(
        self,
        stages: Sequence[Stage],
        communicators: Communicators,
        dropout: DropoutKey,
        recomputed: Collection[str] = (),
        slices: bool = False,
        modules: Sequence[str] = (),
    ) -> None:
        """`recomputed`: parameters of recomputed blocks, whose gradients are computed in B. `modules`: each stage's
        modules, as text for errors and profilers. `slices`: scatter-gather P2P of tensors that are replicated over tp
        (Narayanan et al. 2021, section 4.1)."""
        self._slices = communicators.tp.size if slices else 1
        route = communicators.mesh.route
        self._chunks = [_Chunk.of(communicators.stage, k, each, route, modules) for k, each in enumerate(stages)]
        named = ((name, p) for stage in stages for name, p in stage.named_parameters())
        self._at_once = frozenset(id(p) for name, p in named if name in recomputed)
        self._comm = communicators
        self._dropout = dropout
        self._handshaken = False

    def run(
        self,
        actions: Actions,
        microbatches: Sequence[Microbatch],
        counts: Callable[[], Tensors],
        loss: LossTotal,
        end: Mapping[str, Callable[[], None]],
        gradients: BackwardHooks | None = None,
        counted: int | None = None,
        scale: float = 1.0,
        loss_of_sums: LossOfSums | None = None,
        sums: BatchSums | None = None,
    ) -> None:
        """Run every action in order. The last stage adds its losses, or what they are functions of, to `loss`.

        `end`: functions for REDUCE, STEP and GATHER. `gradients`: hooks of backward passes. `counted`: the losses of
        that many first microbatches are added, by default of all. `scale`: the loss scale, by which all gradients are
        multiplied. `loss_of_sums`: the loss as a function of the partial sums, if it is one. `sums`: takes the sums for
        buffers, in training only. Raises RuntimeFault.
        """
        run = _StepState(self, actions, microbatches, counts, loss, gradients, counted, scale, loss_of_sums, sums)
        if not self._handshaken and run.training:
            run.handshake()
            self._handshaken = True
        do: dict[str, Callable[[Action], None]] = {
            "F": run.forward,
            "B": run.backward,
            "W": run.weights,
            "RF": run.receive_activations,
            "SF": run.send_activations,
            "RB": run.receive_gradients,
            "SB": run.send_gradients,
        }
        status = self._comm.watch.status
        for action in in_ranges(actions, self._range):
            chunk = self._chunks[action.chunk]
            runs = "" if action.microbatch is None else chunk.modules
            status.enter(str(action), chunk.number, action.microbatch, runs)
            if action.kind == "SUM":
                assert gradients is not None
                gradients.start_sum(action.chunk)
                continue
            if action.microbatch is None:
                end[action.kind]()
                continue
            makes = gradients if action.kind in ("B", "W") else None
            try:
                if makes is not None:
                    makes.before_backward(action.chunk, action.kind)
                do[action.kind](action)
                if makes is not None:
                    makes.after_backward(action.chunk, action.kind == "W" or not run.splits_backward)
            except BaseException as error:
                status.attribute(error, chunk.stage)
                if not isinstance(error, RuntimeError):
                    raise
                where = f"{status.here}, rank {self._comm.rank} ({self._comm.mesh})"
                raise RuntimeFault(f"{type(error).__name__}: {error}", where=where) from error
        run.finish_sends()
        status.leave()

    def _range(self, action: Action) -> str:
        chunk = self._chunks[action.chunk]
        modules = chunk.modules if action.microbatch is not None else ""
        return " ".join(filter(None, (f"{action} stage {chunk.number}", modules)))


class _StepState:
    """The state of one step, by microbatch and chunk."""

    def __init__(
        self,
        executor: Executor,
        actions: Actions,
        microbatches: Sequence[Microbatch],
        counts: Callable[[], Tensors],
        loss: LossTotal,
        gradients: BackwardHooks | None,
        counted: int | None,
        scale: float,
        loss_of_sums: LossOfSums | None,
        sums: BatchSums | None,
    ) -> None:
        self.loss_of_sums, self.sums = loss_of_sums, sums
        self.hooks = gradients
        self.counted = len(microbatches) if counted is None else counted
        self.chunks, self.comm, self.dropout = executor._chunks, executor._comm, executor._dropout
        self.actions, self.microbatches, self.counts = actions, microbatches, counts
        kinds = {action.kind for action in actions}
        self.training, self.splits_backward = "B" in kinds, "W" in kinds
        self.at_once = executor._at_once
        self.first = [0, *accumulate(map(sample_count, microbatches))]  # first sample of each in this dp rank's share
        self.weight_passes: dict[At, WeightBackward] = {}  # W passes whose B is done
        self.sizes = [[_sizes(chunk.stage, mb) for mb in microbatches] for chunk in self.chunks]
        self.parts: dict[tuple[str, int, tuple[int, ...]], list[MessagePart]] = {}  # by kind, chunk, sizes
        self.received: dict[At, Tensors] = {}
        self.outputs: dict[At, Tensors] = {}  # until they are sent or handed over; the last stage's until backward
        self.edges: dict[At, Sequence[GradientEdge | None]] = {}  # by which their gradients enter the graph
        self.gradients: dict[At, Tensors] = {}
        self.sending: dict[Edge, deque[Handle]] = {}  # by message
        self.loss, self.scale = loss, scale
        self.slices = executor._slices
        messages: dict[Edge, deque[tuple[At, list[MessagePart]]]] = {}
        for action in actions:
            if action.kind in RECEIVES:
                edge = self.chunks[action.chunk].edges[action.kind]
                messages.setdefault(edge, deque()).append((_at(action), self._parts(action.kind, *_at(action))))
        c = self.comm
        most = receives_posted(actions)
        self.inboxes = {edge: Inbox(c.edges[edge], order, c.tp, c.device, most) for edge, order in messages.items()}

    # ---- messages ----

    def _parts(self, kind: str, i: int, chunk: int) -> list[MessagePart]:
        """Return the tensors of a message as they go through the channel."""
        sizes = self.sizes[chunk][i]
        key = kind, chunk, tuple(sizes.values())
        if (found := self.parts.get(key)) is None:
            wires, gradient = self.chunks[chunk].wires[kind], kind in ("SB", "RB")
            slices = [self.slices if wire.is_whole(gradient=gradient) else 1 for wire in wires]
            found = [MessagePart(tuple(w.shape(**sizes)), w.dtype, n) for w, n in zip(wires, slices, strict=True)]
            self.parts[key] = found
        return found

    def handshake(self) -> None:
        """Compare every message of this step with the neighbouring ranks. Raises RuntimeFault."""
        lines: dict[bool, dict[Edge, list[str]]] = {True: {}, False: {}}
        ends = self.comm.mesh.route.edges()
        for number, direction in self.comm.edges:
            sends = ends[number][direction == "backward"] == self.comm.stage
            lines[sends][number, direction] = []
        for action in self.actions:
            if action.kind in (*SENDS, *RECEIVES):
                edge = self.chunks[action.chunk].edges[action.kind]
                lines[action.kind in SENDS][edge].extend(self._message(action, edge[1]))
        out, into = (
            [(self.comm.edges[e], texts) for e, texts in sorted(lines[sent].items())] for sent in (True, False)
        )
        exchange(out, into, self.comm.device)

    def _message(self, action: Action, direction: str) -> list[str]:
        """Describe each tensor of a message in a line; edge i follows stage i, on both sides."""
        i, chunk = _at(action)
        here = self.chunks[chunk]
        edge = here.number if action.kind in ("SF", "RB") else here.number - 1
        where = f"{direction} edge {edge} microbatch {i}"
        pairs = zip(here.wires[action.kind], self._parts(action.kind, i, chunk), strict=True)
        return [f"{where}: {wire.name} {part.dtype} {list(part.shape)}" for wire, part in pairs]

    def _send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        edge = self.chunks[action.chunk].edges[action.kind]
        under_way = self.sending.setdefault(edge, deque())
        if len(under_way) == SENDS_UNDER_WAY:
            under_way.popleft().wait()
        parts, rank = self._parts(action.kind, *_at(action)), self.comm.tp.rank
        cut = [part.cut(x, rank) for part, x in zip(parts, tensors, strict=True)]
        under_way.append(self.comm.edges[edge].send(*cut))

    def finish_sends(self) -> None:
        for under_way in self.sending.values():
            while under_way:
                under_way.popleft().wait()

    # ---- actions ----

    def receive_activations(self, action: Action) -> None:
        at = _at(action)
        self._take(at, self.inboxes[self.chunks[at[1]].edges["RF"]].take(at))

    def _take(self, at: At, tensors: Tensors) -> None:
        for wire, x in zip(self.chunks[at[1]].wires["RF"], tensors, strict=True):
            x.requires_grad_(wire.requires_grad and self.training)
        self.received[at] = tensors

    def forward(self, action: Action) -> None:
        (i, chunk), here = _at(action), self.chunks[action.chunk]
        stage, own = here.stage, here.before
        self.dropout.sample = self.first[i]
        if own is not None:
            self._take((i, chunk), tuple(x.detach() for x in self.outputs[i, own]))
        given: dict[str, Any] = {name: self.microbatches[i][name] for name in stage.inputs}
        if stage.is_last or stage.reads_counts:
            given["counts"] = self.counts()
        received = self.received.get((i, chunk), ())
        if (replicas := getattr(stage, "dp", None)) is not None:
            replicas.mode.counted = i < self.counted
        made: Tensors = stage(*received, **given) if stage.summed or not stage.is_last else (stage(*received, **given),)
        if stage.summed:
            made, sums = made[: -len(stage.summed)], made[-len(stage.summed) :]
            if self.sums is not None:
                self.sums.add(stage, sums)
        self.outputs[i, chunk] = made
        if not stage.is_last:
            self._check_outputs(i, chunk)
            if self.training:  # under no_grad a view of a parameter says that it requires a gradient, but has no edge
                self.edges[i, chunk] = [get_gradient_edge(x) if x.requires_grad else None for x in made]
        elif i < self.counted:
            self.loss.add(made[0].detach(), self.first[i])
        if own is not None:
            del self.outputs[i, own]
        if not self.training:
            self.received.pop((i, chunk), None)

    def _check_outputs(self, i: int, chunk: int) -> None:
        wires, parts = self.chunks[chunk].wires["SF"], self._parts("SF", i, chunk)
        for wire, part, x in zip(wires, parts, self.outputs[i, chunk], strict=True):
            if x.shape != part.shape or x.dtype != part.dtype:
                expects = f"{part.dtype} {list(part.shape)}"
                raise RuntimeFault(
                    f"{wire.name} is {x.dtype} {list(x.shape)}, but the next stage expects {expects}",
                    where=f"stage {self.comm.stage}, microbatch {i}",
                )

    def send_activations(self, action: Action) -> None:
        at = _at(action)
        self._send(action, [x.detach() for x in self.outputs.pop(at)])

    def receive_gradients(self, action: Action) -> None:
        at = _at(action)
        self.gradients[at] = self.inboxes[self.chunks[at[1]].edges["RB"]].take(at)

    def backward(self, action: Action) -> None:
        (i, chunk), here = _at(action), self.chunks[action.chunk]
        self.dropout.sample = self.first[i]
        roots: list[Root] = []  # an output that depends on frozen parameters only has no gradient
        if here.stage.is_last:
            (share,) = self.outputs.pop((i, chunk))
            if share.requires_grad:
                roots = [(get_gradient_edge(share), self._gradient_of(share, self.first[i]))]
        else:
            if here.after is not None:
                self.gradients[i, chunk] = self._returned(i, here.after)
            both = zip(here.wires["SF"], self.edges.pop((i, chunk)), strict=True)
            awaited = [edge for wire, edge in both if wire.requires_grad]
            pairs = zip(awaited, self.gradients.pop((i, chunk)), strict=True)
            roots = [(edge, grad) for edge, grad in pairs if edge is not None]
        if roots and self.splits_backward:
            inputs = [x for x in self.received.get((i, chunk), ()) if x.requires_grad]
            self.weight_passes[i, chunk] = backward_inputs(roots, inputs, self.at_once)
        elif roots:
            torch.autograd.backward([edge for edge, _ in roots], [grad for _, grad in roots])

    def _gradient_of(self, share: Tensor, sample: int) -> Tensor | None:
        """Return the gradient of the loss with respect to a microbatch's share; None for 1."""
        if self.loss_of_sums is not None:
            gradient = self.loss.gradient_of(self.loss_of_sums.gradient(self.loss.values), share, sample)
            return (gradient * self.scale).to(share.dtype)
        return None if self.scale == 1 else torch.full_like(share, self.scale)

    def weights(self, action: Action) -> None:
        later = self.weight_passes.pop(_at(action), None)
        if later is not None:
            self.dropout.sample = self.first[_at(action)[0]]
            later(self.hooks.before_weights if self.hooks else None)

    def _returned(self, i: int, chunk: int) -> Tensors:
        """Return the gradients of what a chunk received, and forget both."""
        pairs = zip(self.chunks[chunk].wires["RF"], self.received.pop((i, chunk)), strict=True)
        leaves = [x for wire, x in pairs if wire.requires_grad]
        return tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)

    def send_gradients(self, action: Action) -> None:
        self._send(action, self._returned(*_at(action)))


def _at(action: Action) -> At:
    assert action.microbatch is not None
    return action.microbatch, action.chunk


def _sizes(stage: Stage, microbatch: Microbatch) -> dict[str, int]:
    return {symbol: microbatch[name].shape[dim] for symbol, (name, dim) in stage.sizes.items()}
