"""Loads of ranks, most of which have none, and the least loaded of a range of them, both in logarithmic time."""

from __future__ import annotations


class Loads:
    """The load of each of some ranks, 0 at first."""

    def __init__(self, ranks: int) -> None:
        self._leaves = 1 << (ranks - 1).bit_length()
        self._least: dict[int, tuple[int, int]] = {}  # (load, rank) of the least loaded below a node of a binary tree

    def copy(self) -> Loads:
        made = Loads(self._leaves)
        made._least = dict(self._least)
        return made

    def add(self, rank: int, load: int) -> None:
        node = self._leaves + rank
        self._least[node] = self._node(node)[0] + load, rank
        while node := node // 2:
            self._least[node] = min(self._node(2 * node), self._node(2 * node + 1))

    def least(self, start: int, stop: int) -> tuple[int, int]:
        """Return load and rank of the least loaded of ranks [start, stop), the lowest of equal ones."""
        found, low, high = [], self._leaves + start, self._leaves + stop
        while low < high:
            if low % 2:
                found.append(self._node(low))
                low += 1
            if high % 2:
                high -= 1
                found.append(self._node(high))
            low, high = low // 2, high // 2
        return min(found)

    def _node(self, node: int) -> tuple[int, int]:
        known = self._least.get(node)
        return known or (0, (node << self._leaves.bit_length() - node.bit_length()) - self._leaves)
