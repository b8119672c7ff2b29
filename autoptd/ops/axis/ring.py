"""Messages around the ring of the ranks of an axis: each sends to the next rank and receives from the previous one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from autoptd.ops.group import Group


class RingMessage:
    """A message in transfer to the next rank, and the one that arrives from the previous rank.

    `coming`: where that arrives; by default new tensors.
    """

    def __init__(self, group: Group, parts: Sequence[Tensor], coming: Sequence[Tensor] | None = None) -> None:
        self.coming = tuple(torch.empty_like(x) for x in parts) if coming is None else tuple(coming)
        self.handles = [group.shift_later(out, x) for out, x in zip(self.coming, parts, strict=True)]

    def wait(self) -> tuple[Tensor, ...]:
        for handle in self.handles:
            handle.wait()
        return self.coming


def around(
    group: Group, parts: tuple[Tensor, ...], into: Sequence[Tensor] = ()
) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Yield (rank, its parts) of every rank, own first, then of those before; the next arrive while these are used.

    `into`: for each part a tensor [size, ...] in which the others arrive, each at its rank.
    """
    for step in range(group.size):
        owner, following = ((group.rank - s) % group.size for s in (step, step + 1))
        coming = None
        if step < group.size - 1:
            coming = RingMessage(group, parts, [x[following] for x in into] if into else None)
        yield owner, parts
        if coming is not None:
            parts = coming.wait()


def summed_around(group: Group, part: Callable[[int], Tensor]) -> Tensor:
    """Return the sum over ranks of `part(this rank)`, new tensors of one shape, each made while a sum is on its way.

    The sum for rank r begins at rank r + 1 and adds its own part at each rank that it comes to, at r itself last, in
    the type of the tensors: always in the order r + 1, r + 2, …, r.
    """
    arriving: RingMessage | None = None
    for step in range(group.size):
        total = part((group.rank - step - 1) % group.size).contiguous()
        if arriving is not None:
            total += arriving.wait()[0]
        if step < group.size - 1:
            arriving = RingMessage(group, (total,))
    return total
