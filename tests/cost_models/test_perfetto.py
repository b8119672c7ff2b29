"""The trace of a simulated step: well formed, complete, and every message tied to both of its ends."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from autoptd.cost_models.perfetto import STREAMS, trace, trace_text
from autoptd.cost_models.simulate import simulate
from autoptd.cost_models.step_times import ChunkTimes, Overlap, StageTimes
from autoptd.cost_models.timeline import Timeline
from autoptd.schedule import EARLY, Schedule, step_lists

CHUNK = ChunkTimes(1, 2, 1, 0.25, 0.5, 0.125, 0.0625)


def played(
    kind: str = "interleaved", virtual: int = 2, overlap: Overlap | None = None, early: tuple[str, ...] = ()
) -> tuple[Schedule, Timeline]:
    schedule = step_lists(kind, 3, 6, virtual, early)
    times = [StageTimes((CHUNK,) * virtual, reduce_s=3, step_s=1, gather_s=2)] * 3
    return schedule, simulate(schedule, times, overlap)


def of_phase(events: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == phase]


CASES = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zero-bubble", 1)]
OVERLAPS = [(Overlap(), ()), (Overlap(tp=True), EARLY), (Overlap(p2p=False), ()), (Overlap(), ("SUM",))]


@pytest.mark.parametrize(("kind", "virtual"), CASES)
@pytest.mark.parametrize(("overlap", "early"), OVERLAPS, ids=str)
def test_the_trace_is_well_formed(kind: str, virtual: int, overlap: Overlap, early: tuple[str, ...]):
    schedule, timeline = played(kind, virtual, overlap, early)
    events = json.loads(trace_text(timeline))["traceEvents"]
    slices = of_phase(events, "X")
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(timeline.makespan_s * 1e6)

    compute = Counter(f"{e['pid']} {e['name']}" for e in slices if e["cat"] == "compute")
    assert compute == Counter(f"{r} {a}" for r, actions in enumerate(schedule) for a in actions if a.kind in KINDS)

    for stream in {(e["pid"], e["tid"]) for e in slices}:  # slices of one thread do not overlap
        own = sorted((e["ts"], e["dur"]) for e in slices if (e["pid"], e["tid"]) == stream)
        assert all(a + d <= b + 1e-3 for (a, d), (b, _) in pairwise(own)), STREAMS[stream[1]]
    for names, key in ((("process_name",), ("pid",)), (("thread_name",), ("pid", "tid"))):
        named = {tuple(e[k] for k in key) for e in of_phase(events, "M") if e["name"] in names}
        assert named == {tuple(e[k] for k in key) for e in slices}


KINDS = ("F", "B", "W", "STEP")


def test_communication_that_overlaps_not_takes_its_seconds_on_its_own_thread():
    _, timeline = played(overlap=Overlap())
    seconds = Counter[str]()
    for event in of_phase(trace(timeline)["traceEvents"], "X"):
        seconds[event["cat"]] += event["dur"] / 1e6
    assert seconds["dp"] == pytest.approx(3 * (3 + 2))
    assert seconds["tp"] == pytest.approx(3 * 2 * 6 * 0.75)
    messages = 6 * (3 * 2 - 1)  # of each microbatch, one between any two neighbours of six stages
    assert seconds["send forward"] == seconds["receive forward"] == pytest.approx(messages * 0.125)
    assert seconds["send backward"] == seconds["receive backward"] == pytest.approx(messages * 0.0625)


def test_every_send_flows_into_its_receive():
    schedule, timeline = played()
    events = trace(timeline)["traceEvents"]
    slices = {(e["pid"], e["tid"], e["ts"]): e for e in of_phase(events, "X")}
    starts, ends = ({e["id"]: e for e in of_phase(events, phase)} for phase in "sf")
    assert starts.keys() == ends.keys()
    assert len(starts) == sum(action.kind in ("SF", "SB") for actions in schedule for action in actions)
    for number, start in starts.items():
        source, target = (slices[e["pid"], e["tid"], e["ts"]] for e in (start, ends[number]))
        a, b = source["args"], target["args"]
        step = 1 if source["name"].startswith("SF") else -1
        assert b["chunk"] * 3 + target["pid"] == a["chunk"] * 3 + source["pid"] + step, "the next stage of the model"
        assert a["microbatch"] == b["microbatch"]
        assert target["name"].startswith("RF" if step > 0 else "RB")
        assert (source["ts"], source["dur"]) == (target["ts"], target["dur"])


def test_names_of_ranks():
    _, timeline = played()
    events = trace(timeline, ["embed", "h.0", "head"])["traceEvents"]
    named = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert named == ["stage 0: embed", "stage 1: h.0", "stage 2: head"]


def test_one_event_in_full():
    timeline = simulate(step_lists("1f1b", 1, 1), [StageTimes(forward_s=0.5, backward_s=2)])
    assert of_phase(trace(timeline)["traceEvents"], "X")[1] == {
        "ph": "X",
        "pid": 0,
        "tid": 0,
        "cat": "compute",
        "name": "B0",
        "ts": 500_000.0,
        "dur": 2_000_000.0,
        "args": {"microbatch": 0, "chunk": 0},
    }
