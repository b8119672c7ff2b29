"""How long a step of many microbatches takes, without playing all of them.

A pipeline settles: from some round on, every rank does what it did a few rounds before, equally much later. What
follows is then known without playing it, and so is the end, which begins from where a shorter step's end begins. So a
step of n microbatches is played, and if it has settled before its last round,

    makespan(m) = makespan(n) + (m - n) / cycle * (time that a cycle takes)

is exact for every m that is n and some cycles. This is the periodic regime of timed event graphs (Baccelli et al. 1992,
Synchronization and Linearity, theorem 3.109; quoted from memory), whose cycle is as many microbatches as are under way
on the slowest loop: one where a rank is the slowest, up to as many as there are ranks where messages to and fro are.
That it has been reached is checked, not assumed. Where it has not, more microbatches are played, at last all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from autoptd.cost_models.simulate import simulate
from autoptd.cost_models.step_times import Overlap, StageTimes
from autoptd.cost_models.timeline import ActionLike, RankRecord, Timeline
from autoptd.schedule import Schedule, StageMap

_EQUAL = 1e-12  # of the makespan: what two cycles may differ by
_DRAIN = 2  # times the ranks: rounds at the end of a step that may be unlike the others
_ROUNDS = 3  # times the ranks: microbatches that are played at first


def makespan_s(
    lists: Callable[[int], Schedule],
    microbatches: int,
    times: Sequence[StageTimes],
    overlap: Overlap | None = None,
    period: int = 1,
    route: StageMap | None = None,
) -> float:
    """Seconds of a step, as `simulate(lists(microbatches), times, overlap, route)` has it.

    `lists` gives the schedule of so many microbatches; after each `period` of them its rounds are alike. Raises what
    `simulate` raises.
    """
    rounds = -(-_ROUNDS * len(times) // period)
    while 2 * (played := rounds * period + microbatches % period) < microbatches:
        timeline = simulate(lists(played), times, overlap, route)
        settled = _settled(timeline, period)
        if settled is not None:
            cycle, cycle_s = settled
            if more := (microbatches - played) % cycle:
                played += more
                timeline = simulate(lists(played), times, overlap, route)
            return timeline.makespan_s + (microbatches - played) // cycle * cycle_s
        rounds *= 2
    return simulate(lists(microbatches), times, overlap, route).makespan_s


def _settled(timeline: Timeline, period: int) -> tuple[int, float] | None:
    """(microbatches of a cycle, its seconds), if all ranks did the same in the last two; None if not.

    What a round depends on lies at most as many rounds back as there are ranks: that many are compared, and one more.
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
    """[period, action]: when the actions of a rank's last whole periods ended, or their messages were there.

    A round is as many forwards as the rank has chunks and all that follows them, up to the next one; the last round,
    with all that the end of the step holds, is left out, and so are those before it that a V drains with, which are
    unlike the ones before them. Periods count from the last on back while each is like the next and does of everything
    as much as of the forward (none of GPipe's do). Parameters that are gathered beside the first forward of a chunk
    delay that one, and are there when it ends; gradients are reduced beside the last round.
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
    for at, _, there_s in record.sent:
        if first <= at < end:
            marks[at - first] = there_s
    return marks.reshape(-1, length)


def _is_whole(shape: Sequence[tuple[str, int]], actions: Sequence[ActionLike]) -> bool:
    """Whether a period does of everything that is done per microbatch as much as of the forward, on each chunk."""
    once = Counter(shape)
    kinds = {(a.kind, a.chunk) for a in actions if a.kind in ("F", "B", "W")}
    return len({once[kind] for kind in kinds}) == 1 and once["F", 0] > 0
