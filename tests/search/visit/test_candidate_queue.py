"""The order in which a search takes its candidates."""

from __future__ import annotations

from autoptd.search.meshes import Candidate
from autoptd.search.visit.candidate_queue import CandidateQueue, QueueEntry

PLAIN = Candidate(dp=4, tp=1, pp=2, micro=1, microbatches=8, zero=1, recompute="auto")
TWO_CHUNKS = PLAIN._replace(schedule="interleaved", virtual=2)
FAR = PLAIN._replace(schedule="interleaved", virtual=3, zero=2)


def queue_of(*bounds: tuple[Candidate, float]) -> CandidateQueue:
    queue = CandidateQueue()
    for candidate, bound_s in bounds:
        queue.add(QueueEntry(candidate, bound_s))
    return queue


def taken(queue: CandidateQueue) -> list[Candidate]:
    found = []
    while (e := queue.pop()) is not None:
        found.append(e.candidate)
    return found


def test_plain_meshes_come_first_and_all_by_their_bounds() -> None:
    other = PLAIN._replace(dp=2, tp=2)
    queue = queue_of((FAR, 1.0), (TWO_CHUNKS, 2.0), (PLAIN, 5.0), (other, 4.0))
    assert taken(queue) == [other, PLAIN, FAR, TWO_CHUNKS]


def test_entries_near_the_best_come_before_others() -> None:
    """One choice is different: the schedule, the mesh with its microbatch, or the sharding of state."""
    near = PLAIN._replace(dp=2, tp=2, micro=2, zero=1, schedule="interleaved", virtual=2)
    queue = queue_of((FAR, 1.0), (TWO_CHUNKS, 2.0), (near, 3.0))
    queue.prefer(PLAIN)
    assert taken(queue) == [TWO_CHUNKS, FAR, near]
    queue = queue_of((FAR, 1.0), (TWO_CHUNKS, 2.0), (near, 3.0))
    queue.prefer(TWO_CHUNKS)
    assert taken(queue) == [TWO_CHUNKS, near, FAR]


def test_an_entry_that_moved_is_taken_once() -> None:
    queue = queue_of((FAR, 1.0), (TWO_CHUNKS, 2.0))
    first = queue.pop()
    assert first is not None and first.candidate == FAR
    queue.put(first, 3.0)
    queue.prefer(TWO_CHUNKS)
    assert taken(queue) == [TWO_CHUNKS, FAR] and len(queue.entries) == 2 and FAR in queue


def test_a_turn_ends_after_many_simulations_without_a_better_plan() -> None:
    queue = queue_of((PLAIN, 1.0), (TWO_CHUNKS, 1.0))
    plain, other = queue.entries
    for _ in range(1000):
        queue.count(plain)
        queue.count(other)
    assert queue.has_ended(other) and not queue.has_ended(plain), "that of plain meshes never ends early"
    queue.prefer(FAR)
    assert not queue.has_ended(other)


def test_candidates_that_are_alike_end_early_together() -> None:
    """Two of one number of chunks, and eight of one mesh and schedule, leave others of their turn open."""
    chunks = [TWO_CHUNKS._replace(virtual=virtual) for virtual in range(2, 8)]
    pairs = [(c, c._replace(offload=0.5)) for c in chunks]
    moved = TWO_CHUNKS._replace(offload=1.0)
    queue = queue_of(*((c, 1.0) for pair in pairs for c in pair), (moved, 1.0), (FAR, 1.0))
    *entries, again, far = queue.entries
    for e in entries[:2]:
        assert not queue.has_ended(e)
        queue.count(e)
    assert queue.has_ended(again), "two with two chunks"
    assert not queue.has_ended(entries[2]), "one with three"
    for e in entries[2:8]:
        queue.count(e)
    assert all(queue.has_ended(e) for e in entries), "eight of this mesh and schedule"
    assert not queue.has_ended(far)
    queue.prefer(FAR)
    assert not queue.has_ended(again)
