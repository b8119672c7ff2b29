"""Seconds of sending the rows of a mixture to the ranks of their experts, and back.

    rows      an all-to-all of all rows: a token that k experts take travels k times (NCCL; `collectives`)
    merged    a token travels once to each node that has one of its experts, and from there once to each such rank of
              the node (DeepEP, github.com/deepseek-ai/DeepEP, normal kernels; HybridEP of Megatron-Core): the levels
              transfer concurrently, and one kernel starts all transfers

Experts are chosen evenly: of E experts over n ranks, a token's k different ones leave a rank out with the probability
C(E - E/n, k) / C(E, k). `python -m benchmarks.dispatch` compares both with measured times.

The rows on the fullest of the ranks, relative to the average:

balanced    all ranks get equally many, as forced balancing and padded capacities do
natural     experts' scores have different averages, which vary by `BIAS` of a score's deviation between tokens. Of E
            experts a token takes the k with the highest scores: those beyond z, the normal quantile of 1 - k/E. A bias
            of b deviations changes an expert's rows by b h, with h the normal hazard at z (density / (k/E)): the rarer
            an expert is taken, the more its rows vary. A rank with e experts varies by BIAS h / sqrt(e), and the
            fullest of n ranks is beyond all of n normal variables with the probability that is asked for: its quantile
            q is the normal quantile of q^(1/n)

A pass takes as long as its fullest rank: the median of the fullest counts. Memory must hold the rows of nearly every
pass: `QUANTILE` of it.
"""

from __future__ import annotations

from functools import lru_cache
from math import comb
from statistics import NormalDist

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.collectives import collective_s
from autoptd.cost_models.nccl import common_protocols
from autoptd.cost_models.paths import Path, crossings

# fitted: the step times of Mixtral 8x7B and 8x22B, which route naturally (megatron_release_golden_moe): experts vary by
# 0.35 where a token takes 2 of 8. Where it takes 8 of 128 they then vary by 0.54, and bridge_model_cards asks for that
# at least; docs/accuracy.md
BIAS = 0.275
QUANTILE = 0.99  # of the passes whose rows memory is planned for
MEDIAN = 0.5


def reached(units: int, experts: int, chosen: float) -> float:
    """Return how many of `units`, which hold as many experts each, the `chosen` experts of a token are on, on average.

    `chosen` may be a fraction: then between the values for the whole numbers around it.
    """
    low = int(chosen)
    share = chosen - low
    below = units * (1 - comb(experts - experts // units, low) / comb(experts, low))
    if not share:
        return below
    return (1 - share) * below + share * reached(units, experts, low + 1)


def merged_s(
    tokens: float, token_bytes: float, experts: int, chosen: float, cluster: Cluster, ranks: int, stride: int = 1
) -> float:
    """Return the seconds of a merged dispatch or combine of each rank's `tokens` over `ranks`, `stride` apart."""
    paths = crossings(cluster, ranks, stride)
    return max((_merged_s(tokens * token_bytes, experts, chosen, path, ranks) for path in paths), default=0.0)


def _merged_s(nbytes: float, experts: int, chosen: float, path: Path, ranks: int) -> float:
    """Return the seconds on one path; `nbytes`: of a rank's tokens, once each."""
    if not path:
        return 0.0
    latency_s, transfer_s, members = 0.0, 0.0, ranks
    for crossing in reversed(path):  # outermost first: `members` ranks of the group are in one of its units
        joined = crossing.partners + _inside(crossing.partners, crossing.units)
        units = ranks // members * crossing.units  # of the level below, over all of the group
        sent = reached(min(units, ranks), experts, chosen) * crossing.partners / joined
        transfer_s = max(transfer_s, nbytes * sent / crossing.lane_bytes_per_s)
        latency_s += crossing.link.latency_s
        members = max(1, members // crossing.units)
    return common_protocols(tuple(c.link for c in path))[-1].base_s + latency_s + transfer_s


def _inside(partners: int, units: int) -> float:
    """Return the members of a unit's part of a group that has `partners` in its other `units - 1` units."""
    return partners / max(1, units - 1)


@lru_cache(maxsize=4096)
def dispatch_s(
    how: str,
    tokens: float,
    token_bytes: float,
    experts: int,
    chosen: float,
    cluster: Cluster,
    ranks: int,
    stride: int = 1,
    world: int = 0,
) -> float:
    """Return the seconds of one dispatch or combine: `tokens` of each rank, each to `chosen` of `experts`."""
    if how == "merged":
        return merged_s(tokens, token_bytes, experts, chosen, cluster, ranks, stride)
    return collective_s("all_to_all", tokens * chosen * token_bytes * ranks, cluster, ranks, stride, world)


def spread(experts: int, chosen: float) -> float:
    """Return one standard deviation of the rows of `experts`, relative to their average; `chosen`: experts of a token.

    None where a token takes them all.
    """
    share = chosen / experts
    if share >= 1:
        return 0.0
    normal = NormalDist()
    return BIAS * normal.pdf(normal.inv_cdf(1 - share)) / share


def fullest(ranks: int, experts: int, chosen: float, routing: str, quantile: float = MEDIAN) -> float:
    """Return the rows of the fullest of `ranks` that share `experts`, relative to the average; at least 1.

    `chosen`: experts of a token.
    """
    if routing == "balanced" or ranks == 1:
        return 1.0
    beyond = max(0.0, NormalDist().inv_cdf(quantile ** (1 / ranks)))
    return min(float(ranks), 1 + beyond * spread(experts, chosen) / (max(1, experts // ranks)) ** 0.5)
