"""Rows on the fullest of the ranks that hold a mixture's experts, relative to the average.

balanced    all ranks get equally many, as forced balancing and padded capacities do
natural     experts' shares of the rows vary around their average by `SPREAD` of it (one standard deviation). A rank with
            e experts varies by SPREAD / sqrt(e), and the fullest of n ranks is beyond all of n normal variables with the
            probability that is asked for: its quantile q is the normal quantile of q^(1/n)

A pass takes as long as its fullest rank: the median of the fullest counts. Memory must hold the rows of nearly every
pass: `QUANTILE` of it.
"""

from __future__ import annotations

from statistics import NormalDist

# fitted: the step times of runs that route naturally (bridge_model_cards, megatron_release_golden_moe) beside those of
# the same models under forced balancing; docs/accuracy.md
SPREAD = 0.35
QUANTILE = 0.99  # of the passes whose rows memory is planned for
MEDIAN = 0.5


def fullest(ranks: int, experts: int, routing: str, quantile: float = MEDIAN) -> float:
    """Return the rows of the fullest of `ranks` that share `experts`, relative to the average; at least 1."""
    if routing == "balanced" or ranks == 1:
        return 1.0
    beyond = NormalDist().inv_cdf(quantile ** (1 / ranks))
    return min(float(ranks), 1 + max(0.0, beyond) * SPREAD / (max(1, experts // ranks)) ** 0.5)
