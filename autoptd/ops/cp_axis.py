"""The cp axis of an emitted program: ranks that share the tokens of a sample.

A sample of s tokens is split into chunks of equal length. A rank holds one chunk, or two with a causal mask:

    in order     rank r of n:  chunk r of n
    zigzag       rank r of n:  chunks r and 2n-1-r of 2n

With zigzag every rank has an early and a late chunk, so that a causal mask gives all ranks equal work (the load balance
of Megatron-LM's and of zhuzilin/ring-flash-attention's zigzag, quoted from memory). Ops on single tokens are not
affected; tensors that depend on positions are computed at full length and then sliced.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from autoptd.ops.axis.slices import from_slices, own_slice, to_slices
from autoptd.ops.dropout import DimSlice
from autoptd.ops.group import Group
from autoptd.ops.tp_axis import Axis


@dataclass(frozen=True)
class TokenChunks:
    """The tokens of one rank along a dim: a concatenation of some of the equal chunks of a sequence.

    `groups`: how many sequences the dim has, one after another, as after a reshape to (b s).
    """

    dim: int
    size: int  # ranks
    chunks: tuple[int, ...]
    groups: int = 1

    def whole(self, index: Tensor, length: int) -> Tensor:
        """Map positions in the rank's tokens, `length` of all sequences, to positions in the whole dim."""
        own = length // self.groups
        width = own // len(self.chunks)
        where = index // own * (own * self.size) + index % width
        for i, chunk in enumerate(self.chunks):
            where = where + (index % own // width == i) * (chunk * width)
        return where


class Tokens(Axis):
    """The conversions of `Axis` for dims of tokens. `zigzag`: each rank holds an early and a late chunk."""

    def __init__(self, group: Group, zigzag: bool = False) -> None:
        super().__init__(group)
        self.zigzag = zigzag

    def chunks(self, rank: int) -> tuple[int, ...]:
        """Return the one or two chunks that a rank holds, in its order."""
        return (rank, 2 * self.size - 1 - rank) if self.zigzag else (rank,)

    def part(self, dim: int, groups: int = 1) -> DimSlice:
        return self.part_of(self.rank, dim, groups)

    def part_of(self, rank: int, dim: int, groups: int = 1) -> TokenChunks:
        return TokenChunks(dim, self.size, self.chunks(rank), groups)

    def _own(self, x: Tensor, dim: int, groups: int) -> Tensor:
        if not self.zigzag:
            return own_slice(x, dim, groups, self.size, self.rank)
        width = self._width(x, dim)
        return torch.cat([x.narrow(dim, chunk * width, width) for chunk in self.chunks(self.rank)], dim)

    def _parts(self, x: Tensor, dim: int, groups: int) -> Tensor:
        if self.zigzag:
            width = self._width(x, dim)
            order = [chunk for rank in range(self.size) for chunk in self.chunks(rank)]
            x = torch.cat([x.narrow(dim, chunk * width, width) for chunk in order], dim)
        return to_slices(x, dim, groups, self.size)

    def _joined(self, slices: Tensor, dim: int, groups: int) -> Tensor:
        x = from_slices(slices, dim, groups)
        if not self.zigzag:
            return x
        order = [chunk for rank in range(self.size) for chunk in self.chunks(rank)]
        width = self._width(x, dim)
        return torch.cat([x.narrow(dim, order.index(i) * width, width) for i in range(len(order))], dim)

    def _width(self, x: Tensor, dim: int) -> int:
        length, count = x.shape[dim], 2 * self.size
        assert length % count == 0, f"dim {dim} of {list(x.shape)} does not divide by {count} chunks"
        return length // count


Parts = tuple[Tensor, ...]


def packed(k: Tensor, v: Tensor) -> Parts:
    """Stack keys and values into one message if their shapes and types agree."""
    alike = k.shape == v.shape and k.dtype == v.dtype
    return (torch.stack((k, v)),) if alike else (k.contiguous(), v.contiguous())


def unpacked(parts: Parts) -> Parts:
    return parts if len(parts) == 2 else parts[0].unbind()
