"""`autoptd simulate`: its output, the trace it writes, its errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import autoptd.cli.main as cli
from autoptd.cli.arguments import SCHEDULE_KINDS
from autoptd.cost_models.simulate import simulate
from autoptd.cost_models.step_times import ChunkTimes, Overlap, StageTimes, times_to_data
from autoptd.errors import PlanError
from autoptd.explain.timeline import _cut_again, chunk_times, picture, report, simulate_plan
from autoptd.layout.execution import ExecutionOptions
from autoptd.plans.model import Plan
from autoptd.schedule import SCHEDULES, parse, route_of, step_lists
from tests.sample_plan import sample_plan

Run = Callable[..., tuple[int, str, str]]
TIMES = (
    StageTimes((ChunkTimes(0.01, 0.02, 0.008, 0.001, 0.002, 0.0005, 0.0),), 0.003, 0.001, 0.002),
    StageTimes((ChunkTimes(0.012, 0.02, 0.008, 0.001, 0.002, 0.0, 0.0005),), 0.003, 0.001, 0.002),
)


def timed_plan(**changes: Any) -> Plan:
    predicted = sample_plan().predicted.model_copy(update={"times": times_to_data(TIMES)})
    return sample_plan(predicted=predicted, **{"method": ExecutionOptions(overlap=("p2p",)), **changes})


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*words: str) -> tuple[int, str, str]:
        code = cli.main(["simulate", *words])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def saved(tmp_path: Path) -> str:
    timed_plan().save(tmp_path / "plan.json")
    return str(tmp_path / "plan.json")


def test_a_plan_keeps_its_times(saved: str):
    schedule, times, overlap = chunk_times(Plan.load(saved))
    assert times == TIMES
    assert schedule == step_lists("1f1b", 2, 4)
    assert overlap == Overlap()
    asked = timed_plan(method=ExecutionOptions(overlap=("dp", "tp")))
    assert chunk_times(asked)[2] == Overlap(tp=False, dp=True, p2p=False)


def test_what_it_prints(run: Run, saved: str):
    code, text, errors = run(saved)
    assert (code, errors) == (0, "")
    lines = text.splitlines()
    makespan_s = simulate(step_lists("1f1b", 2, 4), TIMES).makespan_s
    assert lines[0] == "gpt2-small: 1f1b, 2 stages × 4 microbatches"
    assert lines[1].startswith(f"step {makespan_s * 1e3:.3g} ms, mean bubble ")
    assert "exposed on the busiest stage, 1: tp 12 ms, p2p 500 µs, dp 5 ms" in lines[1]
    assert lines[3].split() == ["stage", "busy", "compute", "tp", "p2p", "dp", "optimizer", "bubble", "in", "flight"]
    assert [line.split()[0] for line in lines[4:6]] == ["0", "1"]
    assert lines[7].startswith("0  F0--") and lines[8].startswith("1  ....")
    assert {len(line) for line in lines[7:9]} == {100}


@pytest.mark.parametrize("width", [40, 80, 100])
def test_the_table_of_many_chunks_fits(width: int):
    plan = timed_plan()
    schedule, timeline = simulate_plan(plan, "interleaved", 12)
    lines = report(plan, schedule, timeline, "interleaved", width).splitlines()
    assert max(map(len, lines)) <= width
    assert "".join(lines).count("+") == 2 * 11, "chunks of both ranks in flight"


def test_actions_show_where_sums_begin(run: Run, tmp_path: Path):
    timed_plan(method=ExecutionOptions(overlap=("dp",))).save(tmp_path / "plan.json")
    schedule = step_lists("1f1b", 2, 4, early=("SUM", "GATHER"))
    _, text, _ = run(str(tmp_path / "plan.json"), "--actions")
    lines = text.partition("Actions of each rank\n")[2].splitlines()
    assert max(map(len, lines)) <= 100
    ranks = "\n".join(line[3:] if line[0] == " " else line for line in lines).replace("\n1  ", "\n|").replace("0  ", "")
    assert parse(" ".join(part.split()) for part in ranks.split("|")) == schedule
    assert all("SUM" in map(str, actions) for actions in schedule)
    _, text, _ = run(str(tmp_path / "plan.json"), "--actions", "--json")
    assert parse(json.loads(text)["actions"]) == schedule


def test_for_machines(run: Run, saved: str):
    code, text, _ = run(saved, "--json")
    data = json.loads(text)
    timeline = simulate(step_lists("1f1b", 2, 4), TIMES)
    assert code == 0
    assert data["makespan_s"] == timeline.makespan_s
    assert data["exposed_s"] == timeline.exposed_s
    assert [stage["in_flight"] for stage in data["stages"]] == [[2], [1]]
    for stage in data["stages"]:
        parts = ("compute_s", "tp_s", "p2p_s", "dp_s", "optimizer_s", "bubble_s")
        assert sum(stage[part] for part in parts) == pytest.approx(timeline.makespan_s)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_schedule_can_be_asked_for(run: Run, saved: str, kind: str):
    virtual = ["--virtual", "2"] if kind == "interleaved" else []
    code, text, _ = run(saved, "--schedule", kind, *virtual)
    assert code == 0
    assert text.startswith(f"gpt2-small: {kind}, 2 stages")
    assert set(SCHEDULES) == set(SCHEDULE_KINDS)


def test_chunks_share_the_work_of_their_rank():
    _, times, _ = chunk_times(timed_plan(), "interleaved", 2)
    assert [len(rank.chunks) for rank in times] == [2, 2]
    for cut, whole in zip(times, TIMES, strict=True):
        for name in ("forward_s", "backward_s", "weight_s", "forward_tp_s", "backward_tp_s"):
            assert sum(getattr(c, name) for c in cut.chunks) == pytest.approx(getattr(whole.chunks[0], name))
        assert (cut.reduce_s, cut.step_s, cut.gather_s) == (whole.reduce_s, whole.step_s, whole.gather_s)
    # the last rank sent nothing forward; now its first chunk does
    assert [chunk.send_forward_s for rank in times for chunk in rank.chunks] == [0.0005] * 3 + [0.0]


def test_messages_between_two_ranks_take_what_they_took():
    """Three ranks; the second and third communicate over a slow link, and so do the last and first, as far as known."""
    old = (0.001, 0.005, 0.0)
    times = tuple(StageTimes(forward_s=0.01, backward_s=0.02, send_forward_s=x) for x in old)

    def sends(kind: str, virtual: int) -> list[float]:
        route = route_of(kind, 3, virtual)
        cut = _cut_again(times, route_of("1f1b", 3, 1), route)
        ahead, back = (
            [getattr(cut[rank].chunks[chunk], name) for rank, chunk in map(route.place, range(route.stages))]
            for name in ("send_forward_s", "send_backward_s")
        )
        assert back[0] == ahead[-1] == 0.0 and back[1:] == ahead[:-1]
        return ahead[:-1]

    assert sends("interleaved", 2) == [0.001, 0.005, 0.005, 0.001, 0.005]
    down, (_, *up) = sends("zero-bubble-v", 2)[:2], sends("zero-bubble-v", 2)[2:]  # the V turns on one rank
    assert (down, up) == ([0.001, 0.005], [0.005, 0.001])


def test_the_trace_is_saved(run: Run, saved: str, tmp_path: Path):
    out = tmp_path / "trace.json"
    code, text, _ = run(saved, "--trace", str(out))
    assert code == 0
    assert text.endswith(f"trace saved to {out}; open it at ui.perfetto.dev\n")
    events = json.loads(out.read_text("utf-8"))["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "s", "f"}
    assert events[0]["args"]["name"] == "stage 0: transformer.wte … transformer.h.1"


def test_mistakes_are_2_and_one_message(run: Run, saved: str, tmp_path: Path):
    sample_plan().save(tmp_path / "untimed.json")
    six = timed_plan(batch=12, schedule=sample_plan().schedule.model_copy(update={"microbatches": 3}))
    six.save(tmp_path / "three.json")
    cases = {
        (str(tmp_path / "nowhere.json"),): "cannot read the plan",
        (str(tmp_path / "untimed.json"),): "has no times of its stages",
        (saved, "--trace", str(tmp_path / "no" / "trace.json")): "does not exist",
        (saved, "--schedule", "1fb1"): "invalid choice: '1fb1'",
        (saved, "--virtual", "2"): "--virtual is for the interleaved schedule",
        (str(tmp_path / "three.json"), "--schedule", "interleaved", "--virtual", "2"): "3 microbatches over 2 ranks",
    }
    for words, said in cases.items():
        code, text, errors = run(*words)
        assert (code, text) == (2, ""), words
        assert said in errors
        assert "Traceback" not in errors
        assert said in json.loads(run(*words, "--json")[1])["error"]["what"]
    assert not (tmp_path / "no").exists()


def test_a_plan_with_times_of_too_few_stages_is_refused():
    with pytest.raises(ValueError, match=r"predicted.times: has 1 entries; one per stage is 2"):
        sample_plan(predicted=sample_plan().predicted.model_copy(update={"times": times_to_data(TIMES)[:1]}))


def test_picture_drawn_by_hand():
    schedule = step_lists("1f1b", 2, 2)
    timeline = simulate(schedule, [StageTimes(forward_s=1, backward_s=2, step_s=1)] * 2)
    assert picture(timeline, 33) == [
        "0  F0-F1-......B0----...B1----STE",
        "1  ...F0-B0----F1-B1----......STE",
    ]
    assert picture(timeline, 32) == [], "a forward would get less than three columns"


def test_an_unreadable_field_is_named():
    times = ({"forward_s": 0.1, "backward_s": 0.1, "sideward_s": 0.1}, {"forward_s": 0.1, "backward_s": 0.1})
    predicted = sample_plan().predicted.model_copy(update={"times": times})
    plan = sample_plan().model_copy(update={"predicted": predicted})
    with pytest.raises(PlanError, match=r"times\[0\]: has unknown sideward_s"):
        chunk_times(plan)
