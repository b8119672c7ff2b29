"""Options fixed by hand: each is obeyed, the rest is searched exhaustively, and the cost of the option is reported."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from fnmatch import fnmatch
from functools import cache
from typing import Any

import pytest
import torch

import autoptd
import autoptd.api
import autoptd.cli.main as cli
from autoptd.answers.constraint_costs import pin_costs, pin_texts, pins_of, pins_text
from autoptd.answers.query import PlanQuery
from autoptd.cost_models.cluster import Cluster
from autoptd.errors import AutoptdError, DoesNotFit, PlanError
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.passes.graph import module_path
from autoptd.passes.sharding.sharding import parameter_splits
from autoptd.plans.model import Plan
from autoptd.progress import Silent
from autoptd.search.constraints.named import Modules, read_named
from autoptd.search.constraints.options import DIMENSIONS, read_constraints, schedules_and_chunks
from autoptd.search.meshes import Candidate
from autoptd.search.pipeline.partition import even_cuts
from autoptd.search.planner import Planner, Task
from autoptd.search.runners_up import Answer
from tests.search.every_plan import Cuts, least_seconds

SEQ, WORLD, BATCH = 64, 4, 8
ATTENTION = "*.attention"


def gpt(layers: int = 2) -> NanoGPT:
    with torch.device("meta"):
        return NanoGPT(GPTSizes(vocab=512, max_seq=SEQ, width=128, layers=layers, heads=4))


@cache
def traced(layers: int = 2) -> autoptd.TracedModel:
    return autoptd.trace(gpt(layers), seq=SEQ)


@cache
def cluster(memory_bytes: float) -> Cluster:
    """Make a cluster of two-device nodes with slow links, no launch times, and little memory."""
    base = Cluster.of("H100-SXM5-80GB", 2, 30e9, 3e9)
    quick = {"launch_s": 1e-9, "dispatch_s": 1e-9, "context_bytes": 0, "memory_bytes": int(memory_bytes)}
    return base.model_copy(update={"device": base.device.model_copy(update=quick)})


def planner(fix: dict[str, Any], dimensions: tuple[str, ...] = (), memory_bytes: float = 1e12) -> Planner:
    source = traced()
    constraints = read_constraints({"headroom": 0, **fix}).searching(*dimensions)
    task = Task(
        source.folded, cluster(memory_bytes), WORLD, BATCH, source.sizes, "bf16", "adamw", constraints, effort=None
    )
    return Planner(task, Silent(), source.known)


@cache
def free(dimensions: tuple[str, ...], memory_bytes: float) -> Answer:
    return planner({}, dimensions, memory_bytes).answer()


PINS: list[dict[str, Any]] = [
    {"dp": 2},
    {"tp": 2},
    {"pp": 2},
    {"micro": 2},
    {"zero": 0},
    {"recompute": "full"},
    {"stages": "even"},
    {"headroom": 0.002},
    {"max_tp": 1},
    {"cuts": ["blocks.1"]},
    {"whole": ["blocks.1"]},
    {"whole": [ATTENTION]},
    {"splits": {"*.qkv.weight": "S0/3"}},
    {"sequence_parallel": False},
    {"cp": 2},
    {"virtual": 2},
    {"schedule": "zero-bubble"},
    {"shards": 2},
]
DIMENSION_OF = {"cp": "cp", "virtual": "virtual", "schedule": "zero-bubble", "shards": "shards"}


def searched_for(fix: dict[str, Any]) -> tuple[str, ...]:
    return tuple(sorted(DIMENSION_OF[name] for name in fix if name in DIMENSION_OF))


def may_be(c: Candidate, fix: dict[str, Any]) -> bool:
    """Return whether a candidate of the free search satisfies `fix`, from the definition of each option."""
    wanted = {n: v for n, v in fix.items() if n in ("dp", "tp", "pp", "micro", "cp", "virtual", "schedule")}
    if "schedule" in fix and c.pp == 1:  # without a pipeline all schedules are equal
        del wanted["schedule"]
    if "shards" in fix and c.zero and min(fix["shards"], c.dp * c.cp) != (c.shards or c.dp * c.cp):
        return False
    if any(getattr(c, name) != value for name, value in wanted.items()) or c.tp > fix.get("max_tp", c.tp):
        return False
    if fix.get("zero", c.zero) != c.zero and c.dp * c.cp > 1:
        return False
    if "splits" in fix and c.tp == 1:
        return False
    return "cuts" not in fix or c.pp * c.virtual == len(fix["cuts"]) + 1


def cut_as(cuts: Cuts, fix: dict[str, Any]) -> bool:
    """Return whether stages begin and end as `fix` demands."""
    segments = traced().folded.segments
    stage_of = {i: k for k, (first, last) in enumerate(cuts) for i in range(first, last + 1)}
    for name in ("blocks", "blocks.0", "blocks.1", "blocks.0.attention", "blocks.1.attention"):
        held = {stage_of[s.index] for s in segments if any(_within(module_path(n), name) for n in s.nodes)}
        if len(held) > 1 and any(fnmatch(name, pattern) for pattern in fix.get("whole", ())):
            return False
    if "cuts" in fix:
        names = [traced().folded.traced.parameters[segments[first].parameters[0].name] for first, _ in cuts[1:]]
        if any(not _within(a, b) for a, b in zip(names, fix["cuts"], strict=True)):
            return False
        before = [segments[first - 1].nodes for first, _ in cuts[1:]]
        if any(_within(module_path(n), b) for nodes, b in zip(before, fix["cuts"], strict=True) for n in nodes):
            return False
    if fix.get("stages") == "even":
        return cuts == even_cuts(traced().folded, len(cuts))
    return True


def _within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def obeyed(answer: Answer, fix: dict[str, Any], memory_bytes: float) -> None:
    staged = answer.staged
    assert may_be(staged.candidate, fix)
    assert cut_as(staged.solution.boundaries, fix)
    assert staged.method.schedule == fix.get("schedule", staged.method.schedule)
    if "recompute" in fix:
        recomputed = {i for policies in staged.solution.policies for i in policies}
        assert {2, 3, 4, 5} <= recomputed
    limit = memory_bytes * (1 - fix.get("headroom", 0.0))
    assert all(m.needed - m.overhead <= limit for m in staged.memory)
    lies = parameter_splits(traced().folded, staged.sharded.sharding)
    for pattern in fix.get("whole", ()):
        assert {lies[n] for n in lies if fnmatch(n, f"{pattern}.*")} <= {"B", "Bp"}
    for pattern, placement in fix.get("splits", {}).items():
        assert {lies[n] for n in lies if fnmatch(n, pattern)} == {placement}


CASES = [(fix,) for fix in PINS] + [
    (a, b) for a, b in itertools.combinations(PINS, 2) if not a.keys() & b.keys() and {*a, *b} != {"stages", "cuts"}
]


def answered(fix: dict[str, Any], dimensions: tuple[str, ...], memory_bytes: float) -> Answer | AutoptdError:
    try:
        return planner(fix, dimensions, memory_bytes).answer()
    except (PlanError, DoesNotFit) as error:
        return error


def check(fix: dict[str, Any], memory_bytes: float) -> None:
    """Assert that the constrained search finds the best of all plans that satisfy the constraints."""
    dimensions = searched_for(fix)
    again = {"recompute": fix["recompute"]} if "recompute" in fix else {}
    kept = [c for c in planner(again, dimensions, memory_bytes).space() if may_be(c, fix)]
    found = answered(fix, dimensions, memory_bytes)
    try:
        oracle = planner({n: v for n, v in fix.items() if n in TENSORS}, dimensions, memory_bytes)
        best, _ = least_seconds(oracle, candidates=kept, keep=lambda cuts: cut_as(cuts, fix))
    except PlanError:
        best = math.inf
    if isinstance(found, AutoptdError):
        assert best == math.inf, (fix, found)
        assert found.what and found.fix
        return
    obeyed(found, fix, memory_bytes)
    assert found.staged.seconds == pytest.approx(best, rel=1e-9), fix
    if "whole" not in fix:  # tp by itself never combines whole weights with split tokens
        assert found.staged.seconds >= free(dimensions, memory_bytes).staged.seconds * (1 - 1e-9), fix


TENSORS = ("headroom", "splits", "sequence_parallel", "whole")  # what the oracle takes from the search: ILP, limit
PLENTY, SCARCE = 1e12, 2.02e9  # bytes: NCCL alone takes 1.5e9 to 2e9, so state and activations decide


@pytest.mark.parametrize("fix", PINS, ids=str)
def test_a_pin_leaves_the_best_of_the_plans_that_obey_it(fix: dict[str, Any]):
    check(fix, SCARCE)


@pytest.mark.parametrize("start", range(3))
def test_pairs_of_pins_do(start: int):
    pairs = [a | b for a, b in CASES[len(PINS) :] if not searched_for(a | b)]
    for fix in pairs[start::21]:
        check(fix, PLENTY)


def test_no_stage_begins_or_ends_inside_of_what_is_whole():
    search = planner({"whole": ["blocks.1"], "pp": 2, "tp": 1})
    first = search.candidates()[0]
    assert not isinstance(search.costs.solved(first), AutoptdError)
    stages, last = search.costs.stages(first), len(traced().folded.segments) - 1
    assert [traced().folded.segments[i].name for i in stages.method.uncut] == ["blocks.1.{norm_2,up,down}"]
    may_end = [i for i in range(last) if i + 1 not in stages.method.uncut]
    assert [i for i in range(last) if stages.passes(0, 0, i) is not None] == may_end
    assert [i for i in range(last) if stages.passes(1, i + 1, last) is not None] == may_end
    windows = stages.problem.windows(math.inf)
    lengths = {(e, n) for e in range(last + 1) for n in range(last) if math.isfinite(windows.lower_s[0, e, n])}
    starts = {0, *(i + 1 for i in may_end)}
    assert lengths == {(e, e - a) for a in starts for e in [*may_end, last] if 0 <= e - a < last}


def test_schedules_and_chunks_are_searched_as_far_as_they_are_free():
    def tried(fix: dict[str, Any], *dimensions: str) -> tuple[list[str], list[int]]:
        return schedules_and_chunks(read_constraints(fix).searching(*dimensions))

    assert tried({}) == (["1f1b"], [1])
    assert tried({}, "virtual") == (["1f1b", "interleaved"], [1, 2, 3, 4, 5, 6, 7, 8, 10, 12])
    assert tried({"kernels": "compiled"}, "zero-bubble", "zero-bubble-v") == (["1f1b"], [1])
    assert tried({"virtual": 1}, *DIMENSIONS) == (["1f1b", "zero-bubble"], [1])
    assert tried({}, "zero-bubble-v") == (["1f1b", "zero-bubble-v"], [1])
    assert tried({"schedule": "zero-bubble-v"}) == (["zero-bubble-v"], [2])
    assert tried({"schedule": "1f1b"}, *DIMENSIONS) == (["1f1b"], [1])
    assert tried({"virtual": 2}, *DIMENSIONS) == (["interleaved"], [2])
    assert tried({"schedule": "interleaved"}, "virtual") == (["interleaved"], [1, 2, 3, 4, 5, 6, 7, 8, 10, 12])
    found = planner({"schedule": "interleaved"}, ("virtual",)).candidates()
    assert found and all(c.virtual > 1 and c.pp > 1 for c in found)
    found = planner({}, ("zero-bubble-v",)).candidates()
    assert {(c.schedule, c.virtual) for c in found if c.pp > 1} == {("1f1b", 1), ("zero-bubble-v", 2)}
    with pytest.raises(PlanError, match="schedule 'zero-bubble-v' with virtual 3"):
        read_constraints({"schedule": "zero-bubble-v", "virtual": 3})


# --- names --------------------------------------------------------------------------------------------------------


class Tied(torch.nn.Module):
    """Two towers and a head tied to the first table; the towers meet in an op of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(32, 16)
        self.left = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16))
        self.right = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16))
        self.head = torch.nn.Linear(16, 32, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.left(self.table(x))
        return self.head(self.right(2.0 * x)).square().mean()


def test_names_of_modules_are_found_in_the_graph():
    model = Tied()
    source = autoptd.trace(model, inputs={"x": torch.zeros(4, 8, dtype=torch.long)})
    modules = Modules(source.folded)
    assert modules.begins["table"] == 0
    # the doubling before it is the model's own op: the tower still begins a stage
    assert modules.begins["right"] == modules.begins["right.0"] > modules.begins["left"]
    (table,) = read_named(source.folded, read_constraints({"whole": "head"})).whole
    assert model.get_parameter(table) is model.head.weight
    other = "head.weight" if table == "table.weight" else "table.weight"
    with pytest.raises(PlanError, match=f"{other} is tied to {table}"):
        read_named(source.folded, read_constraints({"splits": {other: "S0"}}))
    pins = read_named(source.folded, read_constraints({"whole": ["left", "right"], "cuts": ["right"]}))
    inside = {i for i in range(1, len(source.folded.segments)) if i not in pins.uncut}
    assert pins.starts[0] in inside
    for tower in ("left", "right"):
        held = [s.index for s in source.folded.segments if any(_within(module_path(n), tower) for n in s.nodes)]
        assert set(held[1:]) <= pins.uncut and held[0] not in pins.uncut


def test_a_module_kept_whole_may_have_any_number_of_heads():
    fix = {"tp": 2, "pp": 1, "whole": ["*.attention"]}
    with torch.device("meta"):
        odd = autoptd.trace(NanoGPT(GPTSizes(vocab=512, max_seq=SEQ, width=96, layers=1, heads=3)), seq=SEQ)
    with pytest.raises(PlanError, match="3 attention heads do not divide by tp 2"):
        autoptd.plan(odd, world=2, cluster="dgx-h100", batch=4, fix=fix | {"whole": []})
    plan = autoptd.plan(odd, world=2, cluster="dgx-h100", batch=4, fix=fix)
    assert plan.mesh.tp == 2
    lies = plan.splits.parameters
    assert lies["blocks.0.attention.qkv.weight"] in ("B", "Bp") and lies["blocks.0.up.weight"].startswith("S")


def test_what_a_pin_of_one_layer_means_for_its_like_is_noted():
    constraints = {"world": 2, "cluster": "dgx-h100", "batch": 4}
    one = {"splits": {"blocks.1.attention.qkv.weight": "B"}, "headroom": 0.125, "max_tp": 2}
    plan = autoptd.plan(traced(), **constraints, fix=one | {"tp": 2})
    assert plan.splits.parameters["blocks.0.attention.qkv.weight"] == "B"
    assert any("also apply to: blocks.0.attention.qkv.weight" in note for note in plan.notes)
    assert "12.5 % of each device's memory is left free (headroom)" in plan.notes
    alone = autoptd.plan(traced(), **constraints, fix=one | {"tp": 1})
    assert not any("as well" in note for note in alone.notes)


# --- cost of pins -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def asked() -> PlanQuery:
    fix = {"tp": 2, "kernels": "fused", "whole": ("*.attention", "head"), "cuts": ["blocks.1"]}
    return PlanQuery(traced(), WORLD, cluster(PLENTY), BATCH, fix, {"exact": True}, "small")


def test_each_pin_is_dropped_alone_and_all_together(asked: PlanQuery):
    assert [text for _, text in pin_texts(asked.fix)] == [
        "tp=2",
        "kernels=fused",
        "whole *.attention",
        "whole head",
        "cut blocks.1",
    ]
    rows = pin_costs(asked, asked.plan())
    dropped = {0: {n: v for n, v in asked.fix.items() if n != "tp"}, 2: asked.fix | {"whole": ("head",)}}
    for at, fix in (dropped | {5: {"kernels": "fused"}}).items():
        assert rows[at].found == replace(asked, fix=fix).plan()
    assert [row.searched for row in rows] == [True, False, True, True, True, True, False]
    assert rows[-2].what == "all that are searched" and rows[-1].what == "all constraints"
    for row in rows:
        assert row.cost_s == pytest.approx(row.chosen.predicted.step_time_s - row.found.predicted.step_time_s)
    text = pins_text("title", rows)
    assert "kernels fused → compiled (the default, not searched)" in " ".join(text.split())
    assert f"{rows[-2].cost:+.1%}" in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_pin_without_which_there_is_no_plan_says_why(asked: PlanQuery):
    nothing = PlanQuery(traced(), WORLD, cluster(1e9), BATCH, {"memory": "ignore"}, name="small")
    (only,) = pin_costs(nothing, nothing.plan())
    assert only.cost is None and "does not fit" in pins_text("", [only])
    assert only.to_data()["refused"].startswith("does not fit: stage")


def test_one_pattern_of_several_is_dropped():
    fix = {"splits": {"a": "S0", "b": "B"}, "whole": "x", "overlap": ["dp", "p2p"]}
    asked = PlanQuery(traced(), WORLD, cluster(PLENTY), BATCH, fix)
    pins = {pin.text: pin for pin in pins_of(fix)}
    assert list(pins) == ["split a=S0", "split b=B", "whole x", "overlap=dp+p2p"]
    assert pins["split a=S0"].dropped(asked).fix == fix | {"splits": {"b": "B"}}
    both = pins["split b=B"].dropped(pins["split a=S0"].dropped(asked))
    assert "splits" not in both.fix and "whole" not in pins["whole x"].dropped(asked).fix


# --- from a shell -------------------------------------------------------------------------------------------------


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.setattr(autoptd.api, "trace", lambda *_, **__: traced())

    def run(*words: str) -> tuple[int, str, str]:
        code = cli.main(
            ["plan", "tests.search.constraints.test_options:gpt", "--world", "4", "--cluster", "dgx-h100", *words]
        )
        return code, *capsys.readouterr()

    return run


def test_constraints_from_a_shell(shell: Any):
    words = ["--fix", "tp=2,headroom=0.1,max_tp=2", "--cut", "blocks.1", "--whole", ATTENTION]
    code, text, _ = shell(*words, "--split", "*.up.weight=S0", "--json")
    plan = Plan.from_json(text)
    assert code == 0 and (plan.mesh.tp, plan.mesh.pp, [s.first for s in plan.stages]) == (2, 2, [0, 4])
    assert plan.splits.parameters["blocks.0.up.weight"] == "S0"
    assert plan.splits.parameters["blocks.0.attention.qkv.weight"] in ("B", "Bp")
    code, text, _ = shell(*words, "--pins")
    assert code == 0 and "Cost of each constraint" in text and "cut blocks.1" in text
    data = json.loads(shell(*words, "--pins", "--json")[1])
    assert [row["dropped"] for row in data["without"]][3:5] == [["cut blocks.1"], ["whole *.attention"]]


def test_how_far_the_search_goes_from_a_shell(shell: Any, monkeypatch: pytest.MonkeyPatch):
    given: dict[str, Any] = {}
    real = autoptd.api.plan
    monkeypatch.setattr(autoptd.api, "plan", lambda *a, **k: (given.update(k), real(*a, **k))[1])
    words = ["--exact", "--time-limit", "30"]
    code, text, _ = shell(*words, "--fix", "cp=2", "--json")
    assert code == 0 and Plan.from_json(text).mesh.cp == 2
    assert (given["exact"], given["time_limit_s"]) == (True, 30.0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--split", "q_proj"], "'q_proj' is not PATTERN=PLACEMENT"),
        (["--split", "*.up.weight=S0", "--split", "*.up.weight=S1"], "'*.up.weight' is split twice"),
        (["--fix", "headroom=1"], "headroom is a fraction, at least 0 and less than 1"),
        (["--fix", "max_tp=0"], "max_tp is a whole number from 1"),
        (["--pins"], "--pins is for constraints"),
        (["--pins", "--pareto", "--fix", "tp=2"], "not allowed with argument"),
        (["--cut", " "], "an empty name"),
        (["--time-limit", "0"], "'0' is not a number of seconds"),
        (["--cut", "blocks.7"], "no module is called 'blocks.7'"),
        (["--whole", "*.atention"], "no module is called '*.atention'"),
    ],
    ids=str,
)
def test_mistakes_are_answered_with_one_error(shell: Any, words: list[str], said: str):
    code, text, errors = shell(*words)
    assert (code, text) == (2, "")
    assert said in errors and errors.count("autoptd: ") == 1


def test_a_tp_that_heads_do_not_divide_by_is_searched_only_where_no_mesh_has_another():
    """Whatever the search finds can be fixed by hand, with the same time."""
    with torch.device("meta"):
        odd = autoptd.trace(NanoGPT(GPTSizes(vocab=512, max_seq=SEQ, width=96, layers=1, heads=3)), seq=SEQ)

    def tps(world: int, batch: int, **fix: Any) -> set[int]:
        constraints = read_constraints(fix)
        task = Task(odd.folded, Cluster.load("dgx-h100"), world, batch, odd.sizes, "bf16", "adamw", constraints)
        return {c.tp for c in Planner(task, Silent(), odd.known).space()}

    assert tps(6, 6) == {1, 3}
    with pytest.raises(PlanError, match="3 attention heads do not divide by tp 2") as refused:
        tps(6, 6, dp=3, pp=1, cp=1)
    assert refused.value.fix == "fix fewer of dp, pp, so that tp may be one of 1, 3"
    assert tps(13, 1) == tps(13, 1, tp=13) == {13}, "too few samples, tokens and segments for 13 ranks"
    found = autoptd.plan(odd, world=13, cluster="dgx-h100", batch=1)
    fixed = autoptd.plan(odd, world=13, cluster="dgx-h100", batch=1, fix={"tp": found.mesh.tp})
    assert fixed.predicted.step_time_s == found.predicted.step_time_s
