"""Rings over GPUs that are wired to each other one by one, without a switch.

`wiring[i][j]` is the number of links between GPUs i and j of one unit (symmetric, 0 on the diagonal). A link carries
one ring in each direction, so that the bandwidth of a group is the number of rings that fit on its links at once: this
is what NCCL's graph search looks for (src/graph/search.cc). GPUs without a link of their own pass through one that has
links to both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations

from autoptd.errors import ClusterError

MOST_WIRED = 16  # GPUs of a unit
_MOST_LINKS = 64  # between two
_MOST_STEPS = 100_000  # of looking for rings: a second

Wiring = tuple[tuple[int, ...], ...]
_Uses = dict[frozenset[int], int]  # pair of GPUs -> links

# What a ring keeps of its rate where it passes through a GPU: all-reduce of GPUs 0 to 4 of a DGX-1 (V100), where GPU 4
# has links to GPU 0 alone, 37.2 GB/s on two rings, of 2 * 22.5 GB/s; VIA-Research/vTrain, trace/v100/AR_GPU5
RELAYED_FRACTION = 0.82


def links_per_gpu(wiring: Wiring) -> int:
    """Links of the best connected GPU."""
    return max(sum(row) for row in wiring)


def check_wiring(wiring: Wiring, ranks: int | None) -> None:
    """Raises ValueError where the table is not one of a unit of `ranks` GPUs."""
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
    """How many full-rate rings run at once among `members`; 0 where they cannot reach each other.

    Raises ClusterError for wiring with too many ways round to try.
    """
    if len(members) == 2:
        return _between(wiring, *members)
    links = {frozenset(pair): wiring[pair[0]][pair[1]] for pair in combinations(range(len(wiring)), 2)}
    steps = _Steps(members)
    pairs = [pair for pair in links if pair.issubset(members)]
    wired = [pair for pair in pairs if links[pair]]
    direct = [_uses(cycle, {}) for cycle in _cycles(wired, members, steps)]
    if found := _most_at_once(direct, links, members, steps):
        return 2.0 * found  # one each way round
    relays = {pair: through for pair in pairs if not links[pair] and (through := _relay(wiring, *pair)) is not None}
    usable = _cycles([*wired, *relays], members, steps)
    return 2.0 * RELAYED_FRACTION * _most_at_once([_uses(cycle, relays) for cycle in usable], links, members, steps)


class _Steps:
    """How much has been tried among these GPUs."""

    def __init__(self, members: Sequence[int]) -> None:
        self._members, self._left = members, _MOST_STEPS

    def take(self, count: int = 1) -> None:
        self._left -= count
        if self._left < 0:
            raise ClusterError(
                f"the wiring has too many ways round {len(self._members)} GPUs to try them all",
                where="levels[0].wiring",
                fix="leave out `wiring`: such a unit is priced well as one with a switch",
            )


def _between(wiring: Wiring, first: int, second: int) -> float:
    """Links of a pair; through a third GPU, where it has none of its own."""
    if wiring[first][second]:
        return float(wiring[first][second])
    through = _relay(wiring, first, second)
    return 0.0 if through is None else RELAYED_FRACTION * min(wiring[first][through], wiring[through][second])


def _relay(wiring: Wiring, first: int, second: int) -> int | None:
    """The GPU with the most links to both."""
    best = max(range(len(wiring)), key=lambda gpu: (min(wiring[first][gpu], wiring[gpu][second]), -gpu))
    return best if wiring[first][best] and wiring[best][second] else None


def _cycles(pairs: Sequence[frozenset[int]], members: Sequence[int], steps: _Steps) -> Iterator[Sequence[int]]:
    """Every way round all members between such pairs, each direction once."""
    from networkx import Graph, simple_cycles  # clusters with a switch do without

    for cycle in simple_cycles(Graph(pairs)):
        steps.take()
        if len(cycle) == len(members):
            yield cycle


def _uses(cycle: Sequence[int], relays: dict[frozenset[int], int]) -> _Uses:
    """How many links between each pair a way round takes."""
    taken: dict[frozenset[int], int] = {}
    for a, b in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
        through = relays.get(frozenset((a, b)))
        for hop in ((a, b),) if through is None else ((a, through), (through, b)):
            taken[frozenset(hop)] = taken.get(frozenset(hop), 0) + 1
    return taken


def _most_at_once(candidates: list[_Uses], links: _Uses, members: Sequence[int], steps: _Steps) -> int:
    """The largest number of candidates, repeats allowed, that the links carry together.

    Each takes two links of every member, so that no more than half of a member's links are found; where that many are,
    no more is tried.
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
