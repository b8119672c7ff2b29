"""Run one stage's action list: compute, messages, and the end of the step, in exactly the order of the list.

A receive is posted one message ahead of the action that waits for it, so that the transfer overlaps computing; the
channel is a FIFO, so this changes no order. A sent tensor is kept until its send is complete; a third one waits for the
first, which the proof of the schedule includes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autoptd.errors import RuntimeFault
from autoptd.runtime.batch import Microbatch
from autoptd.runtime.comm import Channel, Communicators, Handle
from autoptd.runtime.handshake import exchange
from autoptd.runtime.randomness import DropoutKey
from autoptd.runtime.stage import Stage, Wire
from autoptd.schedule import SENDS_UNDER_WAY, Actions

Tensors = tuple[Tensor, ...]


@dataclass
class _Inbox:
    """The receiving end of a channel: messages in the order of the action list."""

    channel: Channel
    wires: tuple[Wire, ...]
    sizes: Mapping[int, Mapping[str, int]]  # of each microbatch
    order: list[int]
    device: torch.device
    posted: list[tuple[int, list[tuple[Tensor, Handle]]]] = field(default_factory=list)

    def _post(self) -> None:
        i = self.order.pop(0)
        outs = [torch.empty(w.shape(**self.sizes[i]), dtype=w.dtype, device=self.device) for w in self.wires]
        self.posted.append((i, [(out, self.channel.receive(out)) for out in outs]))

    def take(self, microbatch: int) -> Tensors:
        """The tensors of a microbatch; posts the next receive."""
        while len(self.posted) < 2 and self.order:
            self._post()
        i, parts = self.posted.pop(0)
        assert i == microbatch, (i, microbatch)
        for _, handle in parts:
            handle.wait()
        return tuple(out for out, _ in parts)


class Executor:
    """One stage's step. `end` maps REDUCE, STEP and GATHER to what they do."""

    def __init__(self, stage: Stage, communicators: Communicators, dropout: DropoutKey) -> None:
        self._stage = stage
        self._comm = communicators
        self._dropout = dropout
        self._shaken = False
        self._returned = tuple(wire for wire in stage.receives if wire.requires_grad)
        self._awaited = tuple(wire for wire in stage.sends if wire.requires_grad)

    def run(
        self,
        actions: Actions,
        microbatches: Sequence[Microbatch],
        counts: Tensors,
        loss: Tensor,
        end: Mapping[str, Callable[[], None]],
        before_last_backward: Callable[[], None],
    ) -> None:
        """Every action in order. The last stage adds its share of the loss to `loss`, 0-dim float64."""
        run = _Run(self, actions, microbatches, counts, loss)
        last_backward = next((a for a in reversed(actions) if a.kind == "B"), None)
        if not self._shaken and last_backward is not None:
            run.shake_hands()
            self._shaken = True
        do: dict[str, Callable[[int], None]] = {
            "F": run.forward,
            "B": run.backward,
            "RF": run.receive_activations,
            "SF": run.send_activations,
            "RB": run.receive_gradients,
            "SB": run.send_gradients,
        }
        for action in actions:
            if action.microbatch is None:
                end[action.kind]()
                continue
            if action == last_backward:
                before_last_backward()
            try:
                do[action.kind](action.microbatch)
            except RuntimeError as error:
                where = f"{action} of stage {self._comm.stage}, rank {self._comm.rank} ({self._comm.mesh})"
                raise RuntimeFault(f"{type(error).__name__}: {error}", where=where) from error
        run.finish_sends()


class _Run:
    """The state of one step, by microbatch."""

    def __init__(
        self, executor: Executor, actions: Actions, microbatches: Sequence[Microbatch], counts: Tensors, loss: Tensor
    ) -> None:
        self.stage, self.comm, self.dropout = executor._stage, executor._comm, executor._dropout
        self.returned, self.awaited = executor._returned, executor._awaited
        self.actions, self.microbatches, self.counts = actions, microbatches, counts
        self.training = any(action.kind == "B" for action in actions)
        self.sizes = {i: _sizes(self.stage, mb) for i, mb in enumerate(microbatches)}
        self.inboxes: dict[str, _Inbox] = {}
        self.received: dict[int, Tensors] = {}
        self.outputs: dict[int, Tensors] = {}
        self.gradients: dict[int, Tensors] = {}
        self.sending: dict[str, deque[list[Handle]]] = {"SF": deque(), "SB": deque()}  # by microbatch
        self.loss = loss
        for kind, channel, wires in (
            ("RF", self.comm.forward_in, self.stage.receives),
            ("RB", self.comm.backward_in, self.awaited),
        ):
            if channel is not None:
                self.inboxes[kind] = _Inbox(channel, wires, self.sizes, self._order(kind), self.comm.device)

    def _order(self, kind: str) -> list[int]:
        return [a.microbatch for a in self.actions if a.kind == kind and a.microbatch is not None]

    def shake_hands(self) -> None:
        """Compare every message of this step with the neighbours'."""
        s, c = self.stage, self.comm
        out = [(c.forward_out, "SF", s.sends, c.stage), (c.backward_out, "SB", self.returned, c.stage - 1)]
        into = [(c.forward_in, "RF", s.receives, c.stage - 1), (c.backward_in, "RB", self.awaited, c.stage)]
        exchange(
            [(ch, self._messages(kind, wires, edge)) for ch, kind, wires, edge in out if ch is not None],
            [(ch, self._messages(kind, wires, edge)) for ch, kind, wires, edge in into if ch is not None],
            c.device,
        )

    def _messages(self, kind: str, wires: tuple[Wire, ...], edge: int) -> list[str]:
        direction = "forward" if kind.endswith("F") else "backward"
        return [
            f"{direction} edge {edge} microbatch {i}: {w.name} {w.dtype} {list(w.shape(**self.sizes[i]))}"
            for i in self._order(kind)
            for w in wires
        ]

    def receive_activations(self, i: int) -> None:
        tensors = self.inboxes["RF"].take(i)
        for wire, x in zip(self.stage.receives, tensors, strict=True):
            x.requires_grad_(wire.requires_grad and self.training)
        self.received[i] = tensors

    def forward(self, i: int) -> None:
        self.dropout.microbatch = i
        given = {name: self.microbatches[i][name] for name in self.stage.inputs}
        if self.stage.is_last:
            share = self.stage(*self.received.get(i, ()), **given, counts=self.counts)
            self.loss += share.detach()
            self.outputs[i] = (share,)
        else:
            self.outputs[i] = self.stage(*self.received.get(i, ()), **given)
            self._check_outputs(i)
        if not self.training:
            self.received.pop(i, None)

    def _check_outputs(self, i: int) -> None:
        for wire, x in zip(self.stage.sends, self.outputs[i], strict=True):
            shape = tuple(wire.shape(**self.sizes[i]))
            if tuple(x.shape) != shape or x.dtype != wire.dtype:
                raise RuntimeFault(
                    f"{wire.name} is {x.dtype} {list(x.shape)}, but the next stage expects {wire.dtype} {list(shape)}",
                    where=f"stage {self.comm.stage}, microbatch {i}",
                )

    def send_activations(self, i: int) -> None:
        assert self.comm.forward_out is not None
        self._send("SF", self.comm.forward_out, [x.detach() for x in self.outputs[i]])
        if not self.training:
            del self.outputs[i]

    def receive_gradients(self, i: int) -> None:
        self.gradients[i] = self.inboxes["RB"].take(i)

    def backward(self, i: int) -> None:
        self.dropout.microbatch = i
        outputs = self.outputs.pop(i)
        if self.stage.is_last:
            roots: list[tuple[Tensor, Tensor | None]] = [(outputs[0], None)]
        else:
            awaited = [x for wire, x in zip(self.stage.sends, outputs, strict=True) if wire.requires_grad]
            roots = list(zip(awaited, self.gradients.pop(i), strict=True))
        # behind frozen parameters nothing needs a gradient
        roots = [(x, grad) for x, grad in roots if x.requires_grad]
        if roots:
            torch.autograd.backward([x for x, _ in roots], [grad for _, grad in roots])

    def send_gradients(self, i: int) -> None:
        assert self.comm.backward_out is not None
        pairs = zip(self.stage.receives, self.received.pop(i), strict=True)
        leaves = [x for wire, x in pairs if wire.requires_grad]
        gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
        self._send("SB", self.comm.backward_out, gradients)

    def _send(self, kind: str, channel: Channel, tensors: Sequence[Tensor]) -> None:
        under_way = self.sending[kind]
        if len(under_way) == SENDS_UNDER_WAY:
            _wait(under_way.popleft())
        under_way.append([channel.send(x.contiguous()) for x in tensors])

    def finish_sends(self) -> None:
        for under_way in self.sending.values():
            while under_way:
                _wait(under_way.popleft())


def _wait(handles: Sequence[Handle]) -> None:
    for handle in handles:
        handle.wait()


def _sizes(stage: Stage, microbatch: Microbatch) -> dict[str, int]:
    return {symbol: microbatch[name].shape[dim] for symbol, (name, dim) in stage.sizes.items()}
