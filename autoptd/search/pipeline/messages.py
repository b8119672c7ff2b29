"""Times of P2P messages between neighbouring stages, from the links that each edge of the pipeline uses.

A stage is `width` ranks (dp, cp and tp), of which the i-th sends to the i-th of the next stage. A transfer ends with
its slowest message. Stages send at the same time, so all messages of a round (`StageMap.rounds`) that leave a node
share its NICs, including those of the dp, cp and tp ranks of one stage:

    nodes of 4 GPUs, pp 8, width 1      3 edges inside the node, the fourth alone on its NICs, 3 inside …
    nodes of 4 GPUs, pp 4, width 2      one edge inside the node, one on which two ranks send out of it, …
    nodes of 4 GPUs, pp 2, width 6      4 of 6 messages leave the first node and share its NICs

Scatter-gather P2P sends slices of what all tp ranks hold alike. A gradient may be a partial value where its tensor is
whole (`Bp`): it is sent whole, so that a message takes another time backward than forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.collectives import collective_s, lanes_between, message_s
from autoptd.cost_models.paths import Lane
from autoptd.schedule import StageMap
from autoptd.search.constraints.options import SearchOptions
from autoptd.search.meshes import Candidate

Lanes = tuple[Lane, ...]  # distinct lanes of the messages of one edge
Bytes = tuple[int, int]  # of one message of a rank: equal on all tp ranks, and not
BothWays = tuple[float, float]  # seconds of a message forward, and of its gradients backward


@lru_cache(maxsize=256)
def edge_lanes(cluster: Cluster, route: StageMap, width: int) -> tuple[Mapping[int, int], tuple[Lanes, ...]]:
    """Return edge -> index of its lanes, and the different lanes, for stages of `width` ranks.

    Raises ClusterError for ranks outside the cluster."""
    found, known = dict[int, int](), dict[Lanes, int]()
    for edges in route.rounds():
        ends = [(first * width, second * width) for first, second in edges.values()]
        for edge, lanes in zip(edges, lanes_between(cluster, ends, width), strict=True):
            found[edge] = known.setdefault(lanes, len(known))
    return found, tuple(known)


class Messages:
    """Seconds of the messages of one candidate.

    `crossing`: for each boundary between segments, local bytes of the tensors that cross it and of their gradients."""

    def __init__(
        self, cluster: Cluster, candidate: Candidate, method: SearchOptions, crossing: Sequence[tuple[Bytes, Bytes]]
    ) -> None:
        self.cluster, self.tp, self.world = cluster, candidate.tp, candidate.world
        self.route, self.crossing = candidate.route, crossing
        self.sliced = method.sends == "slices" and self.tp > 1
        self._edges, self._lanes = edge_lanes(cluster, self.route, candidate.tp * candidate.dp * method.cp)
        self._known: dict[tuple[int, Bytes], float] = {}

    def both_ways_s(self, stage: int, place: int) -> BothWays:
        """Return seconds of messages if `stage` ends before segment `place`; 0 if the next is on the same rank."""
        at = self._edges.get(self.route.edge(stage))
        if at is None or place >= len(self.crossing):
            return 0.0, 0.0
        forward, backward = (self._message_s(at, nbytes) for nbytes in self.crossing[place])
        return forward, backward

    def _message_s(self, at: int, nbytes: Bytes) -> float:
        if not any(nbytes):
            return 0.0
        if (at, nbytes) not in self._known:
            self._known[at, nbytes] = self._seconds(self._lanes[at], *nbytes)
        return self._known[at, nbytes]

    def send_s(self, stage: int, place: int) -> float:
        """Return seconds of the quicker of both messages, for bounds."""
        return min(self.both_ways_s(stage, place))

    def sends_s(self, cuts: Sequence[tuple[int, int]]) -> tuple[BothWays, ...]:
        """Return seconds of the messages after each stage but the last."""
        return tuple(self.both_ways_s(stage, last + 1) for stage, (_, last) in enumerate(cuts[:-1]))

    def _seconds(self, lanes: Lanes, whole: int, split: int) -> float:
        if not self.sliced or not whole:
            return message_s(whole + split, self.cluster, lanes)
        gathered = collective_s("all_gather", whole, self.cluster, self.tp, 1, self.world)
        return message_s(whole / self.tp + split, self.cluster, lanes) + gathered

    @cached_property
    def _places(self) -> dict[tuple[Bytes, Bytes], int]:
        """The bytes of messages -> the last place where a stage that sends so many may end."""
        return {nbytes: place for place, nbytes in enumerate(self.crossing) if place}

    def least_sends_s(self) -> tuple[float, ...]:
        """Return the least seconds of a message after each stage but the last, over all places where it may end."""
        each = (
            (self.send_s(stage, place) for place in self._places.values()) for stage in range(self.route.stages - 1)
        )
        return tuple(min(seconds, default=0.0) for seconds in each)

    def send_table_s(self) -> NDArray[np.float64]:
        """Return seconds of both messages together, [stage, last segment]; 0 for the last of either."""
        n = len(self.crossing)
        found = np.zeros((self.route.stages, n))
        rows: dict[int | None, NDArray[np.float64]] = {}  # by lanes
        for stage in range(self.route.stages - 1):
            at = self._edges.get(self.route.edge(stage))
            if at not in rows:
                known = {nbytes: sum(self.both_ways_s(stage, place)) for nbytes, place in self._places.items()}
                rows[at] = np.array([known[crossing] for crossing in self.crossing[1:]])
            found[stage, :-1] = rows[at]
        return found
