"""Exclude a candidate by what its ranks can hold in whole segments, which the linear relaxation divides.

A rank holds a run of segments for each of its chunks, and so a number n of each kind of equal segments. Where an even
share is five halves of a layer, some rank has three of the longer ones. With n, rank k takes at least

    T_k(n) = max over λ of  sum_i n_i (forward_i + backward_i + λ state_i + least of (seconds + λ alive_k kept))
             - λ budget_k

per microbatch: λ is a price of memory in seconds per byte, and each segment takes the option of recomputation that
costs least. All cuts take `limit_s` or more unless each rank has an n_k, of those that runs can add up to, with

    (1)  microbatches T_k(n_k) + forward passes of a segment on each rank before + reduction of n_k  <  limit_s
         microbatches T_k(n_k) + passes of a segment on each rank before                             <  limit_s
    (2)  sum_k w_k T_k(n_k) + reduction of n_0 + known_s < limit_s,  w, known_s: of an average of chains (`Chains`)
    (3)  sum_k n_k = the segments of the model

The n that meet (1) are listed for each rank. Prices prove that none of them meet (2) and (3) too (Lagrange): if for
any π, and any ρ >= 0,

    sum_k max over n of (π n - ρ w_k T_k(n))  <  π (segments of the model) - ρ limit_s

They are improved by subgradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoptd.schedule import StageMap
from autoptd.search.critical_paths import PathWeights
from autoptd.search.pipeline.lp_bound import BlockOptions
from autoptd.search.pipeline.windows import Floats, Ints

_MOST = 10_000  # contents that are listed: longer shares are hardly more than fractions
_TURNS = 40  # improvements of the prices
_ROUNDING = 1e-9
_AIM = 2e-3  # relative: how far below zero prices are meant to bring the difference of both sides


class RankCosts(NamedTuple):
    """Costs of a rank. `kinds`: of each kind of segment; `alive`: in-flight microbatches of any chunk, at least;
    `before_s`: least seconds of the forward passes before its first, and with the backward passes after its last."""

    kinds: Sequence[BlockOptions]
    alive: float
    budget_bytes: float
    before_s: tuple[float, float]


class Chains(NamedTuple):
    """An average of chains of `search/critical_paths.py`. `passes`: the times that it passes a stage of each rank, at
    least, [F, B or W; rank]; `known_s`: of its messages, and of the last segment, whose stage it passes more often;
    `reduces`: whether the reduction of the first rank ends it."""

    passes: Floats
    known_s: float
    reduces: bool

    @staticmethod
    def of(path: PathWeights, route: StageMap, last: BlockOptions, sends_s: Sequence[float], reduces: bool) -> Chains:
        """Return the chains for ranks. `last`: the model's last segment; `sends_s`: of messages after each stage."""
        ranks = [path.passes[:, list(route.stages_of(rank))].min(axis=1) for rank in range(route.ranks)]
        more = path.passes[:, -1] - ranks[route.holder(route.stages - 1)]
        last_s = float(more @ (last.forward_s, last.backward_s - last.weight_s, last.weight_s))
        return Chains(np.stack(ranks, axis=1), path.sends_s(sends_s) + last_s, reduces)


class Contents(NamedTuple):
    """Contents that a rank can hold: `counts` of segments, [content, kind], and if the model begins and ends there."""

    counts: Ints
    first: NDArray[np.bool_]
    last: NDArray[np.bool_]


def most_of(kinds: Sequence[int], seconds: Floats, most_s: float) -> tuple[int, ...]:
    """Return the most segments of each kind that a rank can hold within `most_s`. `kinds`: of the model's segments;
    `seconds`: of each kind, without recomputation."""
    whole = np.bincount(kinds, minlength=len(seconds))
    return tuple(np.minimum(whole, most_s / np.maximum(seconds, most_s / len(kinds))).astype(int).tolist())


@lru_cache(maxsize=256)
def contents(
    kinds: tuple[int, ...], most: tuple[int, ...], uncut: frozenset[int], chunks: int, together: bool
) -> Contents | None:
    """Return what ranks of `chunks` runs of segments can hold of at most so many of each kind; None if that is too much
    to list. `uncut`: segments that begin no run; `together`: whether the model begins and ends on one rank."""
    shape = tuple(n + 1 for n in most)
    if math.prod(shape) > _MOST:
        return None

    def with_one(held: NDArray[np.bool_], runs: Ints) -> NDArray[np.bool_]:
        more = np.zeros_like(held)
        for run in runs.tolist():
            left = tuple(slice(size - n) for n, size in zip(run, shape, strict=True))
            more[tuple(slice(n, None) for n in run)] |= held[left]
        return more

    begin, end, inner = _runs(kinds, most, uncut)
    inside = [np.zeros(shape, dtype=bool)]  # by number of runs that neither begin nor end the model
    inside[0][(0,) * len(shape)] = True
    for _ in range(chunks):
        inside.append(with_one(inside[-1], inner))
    begun, ended = with_one(inside[chunks - 1], begin), with_one(inside[chunks - 1], end)
    ways = [with_one(with_one(inside[chunks - 2], begin), end)] if together else [begun, ended]
    found = [inside[chunks], *ways]
    holders = np.repeat(np.arange(len(found)), [int(held.sum()) for held in found])
    last = 1 if together else 2
    return Contents(np.concatenate([np.argwhere(held) for held in found]), holders == 1, holders == last)


def _runs(kinds: Sequence[int], most: Sequence[int], uncut: frozenset[int]) -> list[Ints]:
    """Return the counts of the runs that begin the model, of those that end it, and of all others, [run, kind]."""
    number = len(kinds)
    before = np.zeros((number + 1, len(most)), dtype=np.int64)
    before[np.arange(1, number + 1), kinds] = 1
    before = before.cumsum(axis=0)
    edges = np.array([i for i in range(number + 1) if i not in uncut])
    first, after = (side.ravel() for side in np.meshgrid(edges, edges))
    runs, shape = before[after] - before[first], tuple(n + 1 for n in most)
    within = (first < after) & (runs <= most).all(axis=1)
    coded = np.ravel_multi_index(tuple(runs[within].T), shape)
    begins, ends = first[within] == 0, after[within] == number
    which = (begins & ~ends, ends & ~begins, ~begins & ~ends)
    return [np.array(np.unravel_index(np.unique(coded[some]), shape)).T for some in which]


def _passes_s(counts: Ints, rank: RankCosts) -> Floats:
    """Return T of each content, infinite where it does not fit."""
    base = np.array([kind.forward_s + kind.backward_s for kind in rank.kinds])
    state = np.array([kind.state for kind in rank.kinds])
    options = [np.array([(there + again, rank.alive * n) for there, again, n in k.options]).T for k in rank.kinds]
    if not math.isfinite(rank.budget_bytes):
        return np.asarray(counts @ (base + [own[0].min() for own in options]))
    prices = np.unique(np.concatenate([[0.0], *(_rates(*own) for own in options)]))
    each = np.stack([(own[0] + np.outer(prices, own[1])).min(axis=1) for own in options], axis=1)
    found = (counts @ (base + np.outer(prices, state) + each).T - prices * rank.budget_bytes).max(axis=1)
    fits = counts @ (state + [own[1].min() for own in options]) <= rank.budget_bytes * (1 + _ROUNDING)
    return np.where(fits, found, np.inf)


def _rates(seconds: Floats, nbytes: Floats) -> Floats:
    """Return the prices of a byte at which one of these options costs as much as another."""
    more_s, saved = seconds - seconds[:, None], nbytes[:, None] - nbytes
    some = (more_s > 0) & (saved > 0)
    return np.asarray(more_s[some] / saved[some])


class WholeSegments:
    """Contents that each rank can hold within `limit_s`, their seconds, and if all ranks hold the model together."""

    def __init__(
        self,
        held: Contents,
        ranks: Sequence[RankCosts],
        model: Sequence[int],
        microbatches: int,
        limit_s: float,
        ending: int,
    ) -> None:
        """`model`: its segments of each kind; `ending`: the rank that holds the last one."""
        self.counts, self.ranks, self.limit_s = held.counts.astype(float), ranks, limit_s
        self.model = np.array(model, dtype=float)
        known = dict[tuple[int, float, float], Floats]()
        self.seconds = np.empty((len(ranks), len(self.counts)))
        self.reduce_s = np.empty_like(self.seconds)
        for k, rank in enumerate(ranks):
            key = id(rank.kinds), rank.alive, rank.budget_bytes
            if key not in known:
                known[key] = _passes_s(held.counts, rank)
            self.seconds[k] = known[key]
            self.reduce_s[k] = self.counts @ [kind.reduce_s for kind in rank.kinds]
        forward_s, both_s = (np.array([rank.before_s[i] for rank in ranks])[:, None] for i in (0, 1))
        most_s = np.maximum(self.reduce_s + forward_s, both_s)
        self.possible = microbatches * self.seconds + most_s < limit_s
        for k in range(len(ranks)):
            self.possible[k] &= (held.first == (k == 0)) & (held.last == (k == ending))

    def are_too_few(self, chains: Chains | None = None) -> bool:
        """Return whether (3) cannot be met, or not together with (2) where `chains` are given."""
        if not self.possible.any(axis=1).all():
            return True
        chain_s = np.zeros_like(self.seconds) if chains is None else self._chain_s(chains)
        left_s = 0.0 if chains is None else self.limit_s - chains.known_s
        barred, rows = np.where(self.possible, 0.0, -np.inf), np.arange(len(self.ranks))
        unit = np.array([kind.forward_s + kind.backward_s for kind in self.ranks[0].kinds])
        unit *= self.limit_s / max(unit @ self.model, 1e-300)  # about the seconds of a step that a segment takes
        price, rate = np.ones(len(unit)), float(chains is not None)
        for _ in range(_TURNS):
            scores = self.counts @ (price * unit) - rate * chain_s + barred
            best = scores.argmax(axis=1)
            excess = scores[rows, best].sum() - (price * unit) @ self.model + rate * left_s
            if excess < -_ROUNDING * self.limit_s:
                return True
            over = (self.counts[best].sum(axis=0) - self.model) * unit
            late = left_s - chain_s[rows, best].sum()
            if not (size := over @ over + late * late):
                return False
            step = (excess + _AIM * self.limit_s) / size
            price, rate = price - step * over, max(0.0, rate - step * late)
        return False

    def _chain_s(self, chains: Chains) -> Floats:
        """Return the least seconds that each content adds to the chains, [rank, content]."""
        found = np.zeros_like(self.seconds)
        for k, (rank, (forward, backward, weight)) in enumerate(zip(self.ranks, chains.passes.T, strict=True)):
            f, b, w = (
                np.array([getattr(kind, f"{name}_s") for kind in rank.kinds])
                for name in ("forward", "backward", "weight")
            )
            own = self.counts @ (forward * f + backward * (b - w) + weight * w)
            again_s = np.where(self.possible[k], self.seconds[k], 0.0) - self.counts @ (f + b)
            found[k] = own + np.maximum(0.0, again_s) * min(forward, backward)
        if chains.reduces:
            found[0] += self.reduce_s[0]
        return np.where(self.possible, found, 0.0)
