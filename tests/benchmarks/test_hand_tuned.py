"""Hand-tuned plans of published runs: none is predicted faster than the search's plan; the report explains any loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import benchmarks.hand_tuned.search as search
from autoptd.errors import DoesNotFit
from autoptd.search.constraints.options import read_constraints
from autoptd.search.meshes import Candidate
from autoptd.search.planner import Planner
from autoptd.search.runners_up import Answer
from benchmarks.hand_tuned.__main__ import main, read_done
from benchmarks.hand_tuned.report import lines_of, quartiles, table, text
from benchmarks.hand_tuned.search import Comparison, SearchResult, compare
from benchmarks.published.clusters import cluster_of
from benchmarks.published.predict import planner_of, staged
from benchmarks.published.rows import BadRuns, Row, read_rows
from benchmarks.published.run import batches
from tests.benchmarks.sample_runs import tiny

COMPACT = Path(search.__file__).with_name("compact.jsonl")  # each row with its source
MESH = Candidate(dp=4, tp=2, pp=1, micro=1, microbatches=2, zero=1, recompute="auto")
FREE = SearchResult(dimensions=(), seconds=2.0, plan="dp8", considered=10, visited=2)
DONE = Comparison(id="a:0", group="a", model="GPT", devices="8 × A100", own_s=3.0, own="dp4 tp2", free=FREE, used=FREE)


@pytest.fixture(scope="module", params=batches(read_rows(COMPACT)), ids=lambda batch: batch[0].model_name)
def compared(request: pytest.FixtureRequest) -> Iterator[list[Comparison]]:
    yield list(compare(request.param, only_used=True))


def test_no_plan_tuned_by_hand_is_predicted_faster(compared: list[Comparison]) -> None:
    for c in compared:
        assert c.own_s is not None, f"{c.id} is not compared: {c.own}"
        assert c.used is not None and c.used.seconds is not None, f"{c.id}: {c.used}"
        assert c.used.seconds <= c.own_s * (1 + search.ROUNDING), "\n".join(lines_of(c))


def test_compact_set_names_its_sources_and_frameworks() -> None:
    rows = read_rows(COMPACT)
    assert len(rows) >= 10
    assert COMPACT.read_text("utf-8").count('"source"') == len(rows)
    assert all(row.measured_time_s for row in rows)
    assert len({row.framework for row in rows}) >= 5


# ---- the search of a row ----


def test_a_search_of_every_dimension_is_no_slower_than_of_those_that_were_used() -> None:
    (c,) = compare([tiny(n_gpus=4, dp=2, global_batch_size_seqs=4)])
    assert c.free is not None and c.used is not None
    assert set(c.free.dimensions) > set(c.used.dimensions)
    assert c.gain is not None and c.used_gain is not None and c.gain >= c.used_gain >= 0
    assert c.losses == []


def test_written_out_attention_is_not_searched_over_context_parallel_ranks() -> None:
    assert "cp" in search.searchable(tiny())
    assert "cp" not in search.searchable(tiny(attention_impl="unfused"))


def test_dimensions_that_a_plan_uses() -> None:
    assert search.used_by(MESH) == ()
    own = MESH._replace(cp=2, virtual=2, zero=3, shards=2, recompute="selective")
    assert search.used_by(own) == ("cp", "recompute", "shards", "virtual", "zero")


def test_devices_get_the_memory_that_the_own_plan_needs_and_no_less() -> None:
    cluster = cluster_of(tiny())
    have = cluster.device.memory_bytes
    assert search.with_memory(cluster, have) is cluster
    assert search.with_memory(cluster, have + 1).device.memory_bytes == have + 1


def test_equal_searches_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Planner] = []
    answer = Planner.answer

    def counted(self: Planner) -> Answer:
        made.append(self)
        return answer(self)

    monkeypatch.setattr(Planner, "answer", counted)
    rows = [tiny(id="toy:0"), tiny(id="toy:1", dp=8, tp=1), tiny(id="toy:2", global_batch_size_seqs=16)]
    found = list(compare(rows, only_used=True))
    assert [c.id for c in found] == ["toy:0", "toy:1", "toy:2"]
    assert len(made) == 2
    assert found[0].used == found[1].used != found[2].used


def test_a_run_that_is_not_predicted_says_why() -> None:
    (c,) = compare([tiny(arch="moe", n_gpus=8)])
    assert c.own_s is None and "n_experts" in c.own
    assert lines_of(c) == [f"toy:0  not compared: {c.own}"]


# ---- explanations of a loss ----


def _planner(row: Row) -> Planner:
    return planner_of(row, read_constraints({}, assume={"kernels": "fused"}), cluster_of(row))


def test_a_mesh_outside_the_space_is_reported_by_what_is_searched() -> None:
    own, _ = staged(tiny(zero=0))
    odd = replace(own, candidate=own.candidate._replace(micro=3))
    assert search.cause(_planner(tiny()), odd) == "outside the space: micro 3 (searched: 1, 2)"


def test_a_mesh_that_the_search_has_is_not_outside_however_it_recomputes() -> None:
    own, _ = staged(tiny(recompute="full"))
    assert search.cause(_planner(tiny()), own) == "its mesh is as fast in the search, which ended before it got there"
    quick = replace(own, seconds=own.seconds / 1000)
    assert "s with the splits, cuts and recomputation of the search" in search.cause(_planner(tiny()), quick)


def test_a_mesh_that_does_not_fit_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Planner, candidate: Candidate) -> None:
        raise DoesNotFit("too small")

    own, _ = staged(tiny())
    monkeypatch.setattr(Planner, "predict", refuse)
    assert search.cause(_planner(tiny()), own) == "its mesh does not fit by the memory model of the search"


def test_zero_and_shards_change_nothing_with_one_data_parallel_rank() -> None:
    alone = MESH._replace(dp=1, tp=8)
    assert search.differences(alone, alone._replace(zero=0)) == ()
    assert search.differences(MESH, MESH._replace(zero=0)) == ("zero",)
    assert search.differences(MESH, MESH._replace(schedule="zero-bubble")) == ()  # no pipeline, so schedules are equal


def test_a_loss_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    own, cluster = staged(tiny())
    everything = Planner.candidates
    monkeypatch.setattr(search, "staged", lambda row: (replace(own, seconds=1e-9), cluster))
    monkeypatch.setattr(Planner, "candidates", lambda self: [c for c in everything(self) if c.tp == 1])
    (c,) = compare([tiny()], only_used=True)
    assert c.used is not None and c.used.loss == "outside the space: dp 4 (searched: 8) and tp 2 (searched: 1)"
    assert "  LOSS  outside the space: dp 4 (searched: 8) and tp 2 (searched: 1)" in lines_of(c)
    assert text([c]).splitlines()[-2:] == ["losses: 1", f"toy:0: {c.used.loss}"]


# ---- the report ----


def test_stages_in_short() -> None:
    assert search._runs([4, 2, 2, 2, 5]) == "4 2×3 5"
    own, _ = staged(tiny(dp=2, tp=2, pp=2, recompute="full"))
    assert search.one_line(own).startswith("dp2 tp2 pp2 micro1 zero0 · recompute full ")
    assert " · stages " in search.one_line(own)


def test_gains_and_quartiles_by_hand() -> None:
    assert DONE.gain == pytest.approx(0.5)
    assert quartiles([0.0, 0.1, 0.2, 0.3, 0.4]) == pytest.approx((0.0, 0.1, 0.2, 0.3, 0.4))
    slower = DONE.model_copy(update={"id": "b:0", "group": "b", "used": FREE.model_copy(update={"loss": "why"})})
    rows = [line.split(" | ") for line in table([DONE, slower])]
    assert rows[2][:4] == ["| a", "1", "0", "50.0%"]
    assert rows[3][:3] == ["| b", "1", "1"]
    assert rows[4][:3] == ["| all", "2", "1"]


def test_the_command_takes_up_what_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, out = tmp_path / "runs.jsonl", tmp_path / "out.jsonl"
    runs.write_text(tiny().model_dump_json() + "\n" + tiny(id="toy:1", iteration_time_s=None).model_dump_json() + "\n")
    assert main([str(runs), "--json", str(out), "--only-used"]) == 0
    (done,) = read_done(out).values()
    assert done.id == "toy:0" and done.free is None and done.used is not None
    told = done.model_copy(update={"own": "as it was written"})
    out.write_text(told.model_dump_json() + "\n")
    capsys.readouterr()
    assert main([str(runs), "--json", str(out), "--only-used"]) == 0
    assert "as it was written" in capsys.readouterr().out
    assert main([str(runs), "--json", str(out)]) == 0  # asks for the search of every dimension, which the file lacks
    assert read_done(out)["toy:0"].free is not None
    lost = done.model_copy(update={"used": FREE.model_copy(update={"loss": "why"})})
    out.write_text(lost.model_dump_json() + "\n")
    assert main([str(runs), "--json", str(out), "--only-used"]) == 1


def test_a_file_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("{}\n")
    with pytest.raises(BadRuns, match="not a comparison"):
        read_done(out)
    assert main([str(tmp_path / "absent.jsonl")]) == 2
    assert "cannot read" in capsys.readouterr().err
