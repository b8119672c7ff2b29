"""A tree of all ranks, so that no rank exchanges messages with many others: rank r is above 32 r + 1 to 32 r + 32."""

from __future__ import annotations

_CHILDREN = 32


def children(parent: int, world: int) -> range:
    """Return the ranks below a rank."""
    first = _CHILDREN * parent + 1
    return range(first, max(first, min(first + _CHILDREN, world)))


def parent(child: int) -> int:
    """Return the rank above one that is not the root, rank 0."""
    return (child - 1) // _CHILDREN
