"""Bounds of the candidates that a search leaves behind, since others like them were no better.

Those with equal passes are excluded together, by the one that needs least memory: what fits a candidate of ZeRO 0, of
groups or of less offload, fits it too and takes no longer there, but for the step's end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from autoptd.search.meshes import Candidate
from autoptd.search.pipeline.lower_bounds import CandidateBounds
from autoptd.search.pipeline.stages import Stages
from autoptd.search.visit.candidate_queue import NEVER, QueueEntry

# of the best step, tried as bounds
_SHARES = (0.7, 0.75, 0.8, 0.83, 0.86, 0.88, 0.9, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99, 0.995)


class LeftBehind:
    """The bounds of what is left, for a best step of `best_s`."""

    def __init__(self, best_s: float, bounds: CandidateBounds, stages: Callable[[Candidate], Stages]) -> None:
        self._best_s, self._bounds, self._stages = best_s, bounds, stages
        self._close_s: dict[Candidate, float] = {}

    def raise_bounds(self, entries: Iterable[QueueEntry]) -> None:
        """Raise the bounds of entries whose tensors are split, by closer bounds of all cuts, until one cannot be: it
        decides the gap."""
        left = [e for e in entries if not e.closed and e.split_s < NEVER and e.bound_s < self._best_s * _SHARES[-1]]
        for bound_s in (share * self._best_s for share in _SHARES):
            groups: dict[Candidate, list[QueueEntry]] = {}
            for e in sorted(left, key=lambda e: e.bound_s):
                if e.bound_s < bound_s:
                    groups.setdefault(self._lightest(e.candidate), []).append(e)
            for lightest, alike in groups.items():
                shares = dict.fromkeys(e.candidate.offload for e in alike)
                apart = ([e for e in alike if e.candidate.offload == share] for share in shares)
                if self._raise(lightest, alike, bound_s):
                    continue
                if len(shares) == 1 or not all(self._raise(lightest, some, bound_s) for some in apart):
                    return

    def _lightest(self, c: Candidate) -> Candidate:
        """Return a candidate without offload whose passes and reductions take no longer, in no more memory."""
        c = c._replace(offload=0.0)
        lighter = c._replace(zero=1, shards=0) if c.zero < 2 else c
        return lighter if self._bounds.reduces_no_faster(c, lighter) else c

    def _raise(self, lightest: Candidate, alike: Sequence[QueueEntry], bound_s: float) -> bool:
        """Raise the bounds of alike entries if no cut of theirs takes less."""
        if lightest.pp == 1:
            return False
        stages = self._stages(lightest._replace(offload=max(e.candidate.offload for e in alike)))
        end_s = min(self._bounds.with_end_s(e.candidate, 0.0) for e in alike)
        if stages.fixed or not self._are_excluded(stages, bound_s - end_s):
            return False
        for e in alike:
            e.bound_s = max(e.bound_s, bound_s)
        return True

    def _are_excluded(self, stages: Stages, limit_s: float) -> bool:
        c = stages.candidate
        if c not in self._close_s:
            self._close_s[c] = stages.bound_by_chains(close=True).seconds
        return self._close_s[c] >= limit_s or stages.excludes(limit_s, close=True)
