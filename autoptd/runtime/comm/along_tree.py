"""Values of all ranks, merged along the tree of ranks (`layout/rank_tree.py`), over a group of the world on the host.

    up      each rank merges its value with those of the ranks below it, and sends the result to the rank above
    down    rank 0 has the result of all ranks, and each rank passes it on to those below

A rank exchanges messages with at most 33 others, whatever the world. Its bytes do not grow with the world either, if
those of a merged value do not: `Reasons` has the first few in full, and the number of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from autoptd.layout.rank_tree import children, parent

SHOWN = 4  # ranks whose reasons an error quotes
T = TypeVar("T")


@dataclass(frozen=True)
class Reasons:
    """Errors that ranks found: the texts of the first ranks, and the number of ranks that found one."""

    first: tuple[tuple[int, str], ...] = ()
    count: int = 0

    @staticmethod
    def of(rank: int, text: str) -> Reasons:
        """Return the reason of one rank; an empty text is none."""
        return Reasons(((rank, text),), 1) if text else Reasons()

    def merged(self, other: Reasons) -> Reasons:
        return Reasons(tuple(sorted(self.first + other.first)[:SHOWN]), self.count + other.count)

    def more(self) -> list[str]:
        """Return `["and 3 more"]` for reasons that are not quoted, or []."""
        left = self.count - len(self.first)
        return [f"and {left} more"] if left else []


def to_root(mine: T, merge: Callable[[T, T], T], group: dist.ProcessGroup | None) -> T:
    """Return the values of all ranks, merged, on rank 0; on others, those of the ranks below. A collective.

    Values are pickled. `merge` gives the same in any order. Without a group there is one rank.
    """
    if group is None:
        return mine
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    for below in children(rank, world):
        mine = merge(mine, _received(below, group))
    if rank:
        dist.send_object_list([mine], parent(rank), group)
    return mine


def from_root(value: T, group: dist.ProcessGroup | None) -> T:
    """Return rank 0's value on every rank. A collective."""
    if group is None:
        return value
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if rank:
        value = _received(parent(rank), group)
    for below in children(rank, world):
        dist.send_object_list([value], below, group)
    return value


def of_all(mine: T, merge: Callable[[T, T], T], group: dist.ProcessGroup | None) -> T:
    """Return the values of all ranks, merged, on every rank. A collective."""
    return from_root(to_root(mine, merge, group), group)


def _received(source: int, group: dist.ProcessGroup) -> Any:
    found: list[Any] = [None]
    dist.recv_object_list(found, source, group)
    return found[0]
