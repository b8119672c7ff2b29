"""Rings over GPUs with point-to-point links and no switch.

`wiring[i][j]` is the number of links between GPUs i and j of one unit (symmetric, 0 on the diagonal). A link carries
one ring in each direction, so that the bandwidth of a group is the number of rings that fit on its links at once, which
is what NCCL's graph search maximises (src/graph/search.cc). Two GPUs without a direct link communicate through one that
has links to both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations

from autoptd.errors import ClusterError

MOST_WIRED = 16  # GPUs of a unit
_MOST_LINKS = 64  # between two GPUs
_MOST_STEPS = 100_000  # of the search for rings, which take a second

Wiring = tuple[tuple[int, ...], ...]
_Uses = dict[frozenset[int], int]  # pair of GPUs -> links

# Fraction of a ring's rate left if it is relayed by a GPU: all-reduce of GPUs 0 to 4 of a DGX-1 (V100), where GPU 4
# has links to GPU 0 alone, 37.2 GB/s on two rings, of 2 * 22.5 GB/s; VIA-Research/vTrain, trace/v100/AR_GPU5
RELAYED_FRACTION = 0.82


def links_per_gpu(wiring: Wiring) -> int:
    """Return the number of links of the best connected GPU."""
    return max(sum(row) for row in wiring)


def check_wiring(wiring: Wiring, ranks: int | None) -> None:
    """Raise ValueError if the table is not a valid one of `ranks` GPUs."""
    size = len(wiring)
    if size != ranks or any(len(row) != size for row in wiring):
        raise ValueError(f"wiring must be a table of {ranks} by {ranks} links")
    if any(wiring[i][i] or wiring[i][j] != wiring[j][i] or wiring[i][j] < 0 for i in range(size) for j in range(size)):
        raise ValueError("wiring must be symmetric, at least 0, and 0 on its diagonal")
    if not links_per_gpu(wiring):
        raise ValueError("wiring has no links at all")
    if max(map(max, wiring)) > _MOST_LINKS:
        raise ValueError(f"wiring has {max(map(max, wiring))} links between two GPUs, more than {_MOST_LINKS}")


@cache
def parallel_rings(wiring: Wiring, members: tuple[int, ...]) -> float:
    """Return the number of full-rate rings that run at once among `members`; 0 if they are not connected.

    Raises ClusterError for wiring with too many cycles to try.
    """
    if len(members) == 2:
        return _between(wiring, *members)
    links = {frozenset(pair): wiring[pair[0]][pair[1]] for pair in combinations(range(len(wiring)), 2)}
    steps = _Steps(members)
    pairs = [pair for pair in links if pair.issubset(members)]
    wired = [pair for pair in pairs if links[pair]]
    direct = [_uses(cycle, {}) for cycle in _cycles(wired, members, steps)]
    if found := _most_at_once(direct, links, members, steps):
        return 2.0 * found  # one in each direction
    relays = {pair: through for pair in pairs if not links[pair] and (through := _relay(wiring, *pair)) is not None}
    usable = _cycles([*wired, *relays], members, steps)
    return 2.0 * RELAYED_FRACTION * _most_at_once([_uses(cycle, relays) for cycle in usable], links, members, steps)


class _Steps:
    """Limit on the steps of the search for rings among these GPUs."""

    def __init__(self, members: Sequence[int]) -> None:
        self._members, self._left = members, _MOST_STEPS

    def take(self, count: int = 1) -> None:
        self._left -= count
        if self._left < 0:
            raise ClusterError(
                f"the wiring has too many cycles through {len(self._members)} GPUs to try them all",
                where="levels[0].wiring",
                fix="leave out `wiring`: a unit with so many links is priced well as one with a switch",
            )


def _between(wiring: Wiring, first: int, second: int) -> float:
    """Return the number of links of a pair, or those through a third GPU if it has no direct one."""
    if wiring[first][second]:
        return float(wiring[first][second])
    through = _relay(wiring, first, second)
    return 0.0 if through is None else RELAYED_FRACTION * min(wiring[first][through], wiring[through][second])


def _relay(wiring: Wiring, first: int, second: int) -> int | None:
    """Return the GPU with the most links to both, or None."""
    best = max(range(len(wiring)), key=lambda gpu: (min(wiring[first][gpu], wiring[gpu][second]), -gpu))
    return best if wiring[first][best] and wiring[best][second] else None


def _cycles(pairs: Sequence[frozenset[int]], members: Sequence[int], steps: _Steps) -> Iterator[Sequence[int]]:
    """Yield every cycle through all members along these pairs, in one direction."""
    from networkx import Graph, simple_cycles  # imported late: clusters with a switch do not need it

    for cycle in simple_cycles(Graph(pairs)):
        steps.take()
        if len(cycle) == len(members):
            yield cycle


def _uses(cycle: Sequence[int], relays: dict[frozenset[int], int]) -> _Uses:
    """Return the number of links that a cycle uses between each pair."""
    taken: dict[frozenset[int], int] = {}
    for a, b in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
        through = relays.get(frozenset((a, b)))
        for hop in ((a, b),) if through is None else ((a, through), (through, b)):
            taken[frozenset(hop)] = taken.get(frozenset(hop), 0) + 1
    return taken


def _most_at_once(candidates: list[_Uses], links: _Uses, members: Sequence[int], steps: _Steps) -> int:
    """Return the largest number of candidates, with repeats, that the links carry together.

    Each uses two links of every member, so that half of a member's links is an upper bound; the search stops there.
    """
    best = 0

    def search(usable: list[_Uses], left: _Uses, count: int) -> None:
        nonlocal best
        best = max(best, count)
        steps.take(1 + len(usable))
        usable = [taken for taken in usable if all(left[pair] >= n for pair, n in taken.items())]
        most = count + min(sum(n for pair, n in left.items() if member in pair) // 2 for member in members)
        for at, taken in enumerate(usable):
            if most <= best:
                return
            search(usable[at:], {pair: n - taken.get(pair, 0) for pair, n in left.items()}, count + 1)

    ever = {pair for taken in candidates for pair in taken}
    search(candidates, {pair: n for pair, n in links.items() if pair in ever}, 0)
    return best
