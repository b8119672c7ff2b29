"""The planning benchmark: its cases, and the figures that it derives from measurements."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autoptd.models import load_model, model_names
from benchmarks.planning import (
    DEEP,
    DEPTH_WORLD,
    WORLDS,
    Case,
    Measured,
    answer,
    cases,
    figures,
    line,
    main,
    measure,
    shallow_copy,
)

PLAN = {"mesh": {"cp": 1, "dp": 2, "pp": 4, "tp": 8}, "predicted": {"step_time_s": 1.2345}}
NOTHING = {"error": {"what": "no plan fits: 9 meshes", "where": "closest: dp1\nstage 0 lacks 3 GiB", "fix": ""}}


def took(wall_s: float, gigabytes: float = 1.0, code: int | None = 0, plan: dict | None = None) -> Measured:
    return Measured(wall_s, int(gigabytes * 1e9), code, PLAN if plan is None else plan)


def test_every_shipped_model_on_every_world() -> None:
    found = cases(model_names(), WORLDS)
    assert len(found) == len(set(found)) == 4 * len(model_names())
    assert Case("t5-3b", 16384).command == ["plan", "t5-3b", "--world", "16384", "--cluster", "dgx-h100", "--json"]


def test_figures() -> None:
    results = {
        Case("a", 64): took(2.0),
        Case("a", 16384): took(7.0, 1.5),
        Case("b", 64): took(4.0, code=1, plan=NOTHING),
        Case("b", 16384): took(11.0, 2.5),
        Case(DEEP, DEPTH_WORLD): took(6.0),
        Case(f"{DEEP}, 12 layers", DEPTH_WORLD, path="12.json"): took(3.0, 9.0),
    }
    found = {f.name: (f.value, f.met, f.note) for f in figures(results)}
    assert found["slowest case"] == (11.0, False, "b on 16384; 4 of 5 within")
    assert found["median"] == (6.0, False, "")  # without the copy with few layers
    assert found["largest peak memory"] == (2.5, False, "b on 16384")
    assert found["growth from world 64 to 16,384"] == (3.5, False, "a")
    assert found["growth from 12 to 126 layers"] == (2.0, False, f"{DEEP} on 1,024")
    assert found["no answer"] == (0, True, "")
    printed = [" ".join(str(f).split()) for f in figures({Case("a", 64): took(5.1)})]
    assert printed[:2] == ["slowest case 5.10 s ≤ 10 s pass a on 64; 1 of 1 within", "median 5.10 s ≤ 5 s MISS"]


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        (took(1.0), "dp 2 pp 4 tp 8, 1.23 s a step"),
        (took(1.0, code=1, plan=NOTHING), "no plan fits; stage 0 lacks 3 GiB"),
        (took(1.0, code=None, plan={}), "stopped"),
        (took(1.0, code=3, plan={}), "exit code 3"),
    ],
)
def test_answers(measured: Measured, said: str) -> None:
    assert answer(measured) == said
    assert measured.answered == (measured.code in (0, 1))


def test_what_is_over_a_bar_is_marked() -> None:
    assert [" ! " in line(Case("a", 8), m) for m in (took(9.0), took(11.0), took(1.0, 2.1))] == [False, True, True]


def test_the_copy_with_few_layers(tmp_path: Path) -> None:
    model, _ = load_model(str(shallow_copy(tmp_path)))
    deep, _ = load_model(DEEP)
    assert (model.config.num_hidden_layers, deep.config.num_hidden_layers) == (12, 126)
    assert type(model) is type(deep) and model.config.hidden_size == deep.config.hidden_size


def test_a_case_in_a_process_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    """Run a model that does not exist (everything but planning), and one that is stopped while it starts."""
    refused = measure(Case("gtp2", 8))
    assert refused.code == 2 and not refused.answered and "gtp2" in refused.answer["error"]["what"]
    assert refused.wall_s > 0 and refused.peak_bytes > 1e7
    stopped = measure(Case("gtp2", 8), limit_s=0.01)
    assert stopped.code is None and not stopped.answered
    main(["--models", "gtp2", "--worlds", "8"])
    printed = capfd.readouterr().out
    assert "there is no model 'gtp2'" in printed
    assert re.search(r"no answer +1.00 .* MISS", printed)
