"""Times of a step: their text form, and what is no set of times."""

from __future__ import annotations

import pytest

from autoptd.cost_models.step_times import ChunkTimes, Overlap, StageTimes, times_from_data, times_to_data
from autoptd.errors import PlanError


def test_times_read_back():
    chunks = (ChunkTimes(1, 2, 0.5, 3, 4, 5, 6), ChunkTimes(7, 8))
    times = (StageTimes(chunks, 1, 2, 3), StageTimes((ChunkTimes(9, 1), ChunkTimes(3, 4)), 4, 5, 6))
    data = times_to_data(times)
    assert [entry["forward_s"] for entry in data] == [1, 9, 7, 3], "in the order of the model's stages"
    assert ["step_s" in entry for entry in data] == [True, True, False, False]
    assert times_from_data(data, 2) == times


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ([{"forward_s": 1.0}], r"times\[0\]: lacks backward_s"),
        ([{"forward_s": 1.0, "backward_s": 1.0, "sideward_s": 1.0}], r"times\[0\]: has unknown sideward_s"),
        ([{"forward_s": 1.0, "backward_s": 1.0, "weight_s": 2.0}], r"times\[0\].weight_s"),
        ([{"forward_s": 1.0, "backward_s": 1.0}] * 3, "3 stages are not a whole number of chunks on 2 ranks"),
    ],
)
def test_times_that_cannot_be_read(data: list[dict[str, float]], told: str):
    with pytest.raises(PlanError, match=told):
        times_from_data(data, 1 if len(data) == 1 else 2)


def test_one_chunk_in_short():
    assert StageTimes(forward_s=1, backward_s=2, step_s=3) == StageTimes((ChunkTimes(1, 2),), step_s=3)
    for wrong in ({}, {"chunks": (ChunkTimes(1, 2),), "forward_s": 1}):
        with pytest.raises(ValueError, match="give chunks"):
            StageTimes(**wrong)


def test_parameters_are_shared_out_by_backward():
    assert StageTimes((ChunkTimes(1, 3), ChunkTimes(5, 1))).shares() == [0.75, 0.25]
    assert StageTimes((ChunkTimes(1, 0), ChunkTimes(5, 0))).shares() == [0.5, 0.5]


def test_overlap_in_words():
    assert Overlap.of(("dp", "tp")) == Overlap(tp=True, dp=True, p2p=False)
    assert Overlap.of(("p2p",)) == Overlap()
    with pytest.raises(ValueError, match="unknown stream 'pp'"):
        Overlap.of(("pp",))
