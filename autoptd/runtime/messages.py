"""Messages between pipeline stages: their tensors, and the receiving end of a channel."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from autoptd.ops.group import Group, Handle
from autoptd.runtime.comm.interfaces import Channel

Tensors = tuple[Tensor, ...]
At = tuple[int, int]  # microbatch, chunk
Edge = tuple[int, str]  # number and direction, as `channel_of` returns them


@dataclass(frozen=True)
class MessagePart:
    """A tensor of a message. `slices`: number of tp ranks that each send an equal, padded slice; 1: sent whole."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    slices: int

    @property
    def width(self) -> int:
        """The number of elements of a slice."""
        return -(-math.prod(self.shape) // self.slices)

    def cut(self, x: Tensor, rank: int) -> Tensor:
        """Return the slice that tp rank `rank` sends."""
        if self.slices == 1:
            return x.contiguous()
        flat = x.reshape(-1)[rank * self.width : (rank + 1) * self.width]
        return F.pad(flat, (0, self.width - flat.numel())) if flat.numel() < self.width else flat.contiguous()

    def empty(self, device: torch.device) -> Tensor:
        """Return an uninitialised tensor to receive into."""
        shape = self.shape if self.slices == 1 else (self.width,)
        return torch.empty(shape, dtype=self.dtype, device=device)

    def whole(self, x: Tensor, tp: Group) -> Tensor:
        """Assemble the tensor from the slices of all tp ranks. A collective over tp if there are several."""
        if self.slices == 1:
            return x
        return tp.all_gather(x).view(-1)[: math.prod(self.shape)].view(self.shape)


@dataclass
class Inbox:
    """The receiving end of a channel, which takes messages in the order of the action list."""

    channel: Channel
    expected: deque[tuple[At, list[MessagePart]]]
    tp: Group
    device: torch.device
    most: int  # receives that are posted at once
    posted: deque[tuple[At, list[tuple[MessagePart, Tensor]], Handle]] = field(default_factory=deque)

    def _post(self) -> None:
        at, parts = self.expected.popleft()
        outs = [(part, part.empty(self.device)) for part in parts]
        self.posted.append((at, outs, self.channel.receive(*(out for _, out in outs))))

    def take(self, at: At) -> Tensors:
        """Return the tensors of a microbatch for a chunk; post the next receives ahead."""
        while len(self.posted) < self.most and self.expected:
            self._post()
        found, outs, handle = self.posted.popleft()
        assert found == at, (found, at)
        handle.wait()
        return tuple(part.whole(out, self.tp) for part, out in outs)
