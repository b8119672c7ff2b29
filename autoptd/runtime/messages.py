"""Messages between stages as the executor receives them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from autoptd.ops.group import Group, Handle
from autoptd.runtime.comm.interfaces import Channel

Tensors = tuple[Tensor, ...]
At = tuple[int, int]  # microbatch, chunk
Edge = tuple[int, str]  # as `channel_of` names it


@dataclass(frozen=True)
class MessagePart:
    """A tensor of a message. `slices`: the tp ranks that each send a slice of it, padded to equal ones; 1: whole."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    slices: int

    @property
    def width(self) -> int:
        """Elements of a slice."""
        return -(-math.prod(self.shape) // self.slices)

    def cut(self, x: Tensor, rank: int) -> Tensor:
        """What a tp rank sends."""
        if self.slices == 1:
            return x.contiguous()
        flat = x.reshape(-1)[rank * self.width : (rank + 1) * self.width]
        return F.pad(flat, (0, self.width - flat.numel())) if flat.numel() < self.width else flat.contiguous()

    def empty(self, device: torch.device) -> Tensor:
        """For what a tp rank receives."""
        shape = self.shape if self.slices == 1 else (self.width,)
        return torch.empty(shape, dtype=self.dtype, device=device)

    def whole(self, x: Tensor, tp: Group) -> Tensor:
        """A collective on the tp axis."""
        if self.slices == 1:
            return x
        return tp.all_gather(x).view(-1)[: math.prod(self.shape)].view(self.shape)


@dataclass
class Inbox:
    """The receiving end of a channel: messages in the order of the action list."""

    channel: Channel
    expected: deque[tuple[At, list[MessagePart]]]
    tp: Group
    device: torch.device
    posted: deque[tuple[At, list[tuple[MessagePart, Tensor, Handle]]]] = field(default_factory=deque)

    def _post(self) -> None:
        at, parts = self.expected.popleft()
        outs = [(part, part.empty(self.device)) for part in parts]
        self.posted.append((at, [(part, out, self.channel.receive(out)) for part, out in outs]))

    def take(self, at: At) -> Tensors:
        """The tensors of a microbatch on a chunk; posts the next receive."""
        while len(self.posted) < 2 and self.expected:
            self._post()
        found, parts = self.posted.popleft()
        assert found == at, (found, at)
        for _, _, handle in parts:
            handle.wait()
        return tuple(part.whole(out, self.tp) for part, out, _ in parts)


def wait(handles: Sequence[Handle]) -> None:
    for handle in handles:
        handle.wait()
