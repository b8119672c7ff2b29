"""Time of a step of many microbatches by extrapolation from its steady state.

A pipeline reaches a steady state: from some round on, every rank repeats the actions of a few rounds before after a
constant time. The rest of the step need not be simulated, and the drain is that of a shorter step. So a step of n
microbatches is simulated, and if it reaches the steady state before its last round,

    makespan(m) = makespan(n) + (m - n) / cycle * (seconds of a cycle)

is exact for every m that is n plus whole cycles. This is the periodic regime of timed event graphs (Baccelli et al.
1992, Synchronization and Linearity, theorem 3.109; quoted from memory), whose cycle has as many microbatches as are in
flight on the critical loop: one if a rank is the bottleneck, up to the number of ranks if messages back and forth are.
The steady state is checked, not assumed. If it is not reached, more microbatches are simulated, in the end all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from autoptd.cost_models.simulate import simulate
from autoptd.cost_models.step_times import Overlap, StageTimes
from autoptd.cost_models.timeline import ActionLike, RankRecord, Timeline
from autoptd.schedule import Schedule, StageMap

_EQUAL = 1e-12  # tolerance for the difference of two cycles, as a fraction of the makespan
_DRAIN = 2  # rounds at the end of a step that may differ from the others, per rank
_ROUNDS = 3  # microbatches that are simulated at first, per rank


def makespan_s(
    lists: Callable[[int], Schedule],
    microbatches: int,
    times: Sequence[StageTimes],
    overlap: Overlap | None = None,
    period: int = 1,
    route: StageMap | None = None,
) -> float:
    """Return the makespan of `simulate(lists(microbatches), times, overlap, route)`.

    `lists` returns the schedule of a number of microbatches, which repeats every `period` of them. Raises what
    `simulate` raises.
    """
    rounds = -(-_ROUNDS * len(times) // period)
    while 2 * (simulated := rounds * period + microbatches % period) < microbatches:
        timeline = simulate(lists(simulated), times, overlap, route)
        steady = _steady_state(timeline, period)
        if steady is not None:
            cycle, cycle_s = steady
            if more := (microbatches - simulated) % cycle:
                simulated += more
                timeline = simulate(lists(simulated), times, overlap, route)
            return timeline.makespan_s + (microbatches - simulated) // cycle * cycle_s
        rounds *= 2
    return simulate(lists(microbatches), times, overlap, route).makespan_s


def _steady_state(timeline: Timeline, period: int) -> tuple[int, float] | None:
    """Return (microbatches of a cycle, its seconds) if all ranks repeated it at the end, else None.

    A round depends on at most as many earlier rounds as there are ranks, so that one more than these are compared.
    """
    ranks = len(timeline.records)
    periods = [_periods(record, period, ranks) for record in timeline.records]
    count = min(len(rows) for rows in periods)
    if not count:
        return None
    marks = np.concatenate([rows[len(rows) - count :] for rows in periods], axis=1)
    compared = -(-(ranks + 2) // period) + 1
    for cycle in range(1, min(ranks, count - compared) + 1):
        shift = marks[count - compared :] - marks[count - compared - cycle : count - cycle]
        low_s, high_s = float(shift.min()), float(shift.max())
        if high_s - low_s <= _EQUAL * timeline.makespan_s:
            return cycle * period, (low_s + high_s) / 2
    return None


def _periods(record: RankRecord, period: int, ranks: int) -> np.ndarray:
    """Return the end times, [period, action], of the actions (or their messages) in a rank's last equal periods.

    A round is one forward per chunk of the rank and all actions up to the next round. The last round, with the end of
    the step, is left out, and so are the different rounds before it in which a V schedule drains. Going back from
    there, periods are returned while they are equal and have as many backwards and weight passes as forwards (none of
    GPipe's have). Neither all-gathers of parameters, which end with the first forward of a chunk, nor reductions of
    gradients, in the last round, affect them.
    """
    actions = record.actions
    forwards = [at for at, action in enumerate(actions) if action.kind == "F"]
    chunks = 1 + max(action.chunk for action in actions)
    step = period * chunks
    for last in range(len(forwards) - 1, max(step - 1, len(forwards) - 1 - _DRAIN * chunks * ranks), -1):
        end, length = forwards[last], forwards[last] - forwards[last - step]
        shape = [(action.kind, action.chunk) for action in actions[end - length : end]]
        if _is_whole(shape, actions):
            break
    else:
        return np.empty((0, 0))
    first = end
    while first >= length and [(a.kind, a.chunk) for a in actions[first - length : first]] == shape:
        first -= length
    marks = np.array(record.ends_s[first:end])
    for at, _, arrives_s in record.sent:
        if first <= at < end:
            marks[at - first] = arrives_s
    return marks.reshape(-1, length)


def _is_whole(shape: Sequence[tuple[str, int]], actions: Sequence[ActionLike]) -> bool:
    """Return whether a period has each kind of pass on each chunk equally often."""
    once = Counter(shape)
    kinds = {(a.kind, a.chunk) for a in actions if a.kind in ("F", "B", "W")}
    return len({once[kind] for kind in kinds}) == 1 and once["F", 0] > 0
