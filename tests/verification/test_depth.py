"""The layers that `verify` runs: the fewest that keep what a plan distinguishes, and faults that need them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import accumulate, groupby, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import autoptd
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.passes.fold import RepeatedUnit
from autoptd.plans.model import Plan
from autoptd.verification.smaller import depth
from autoptd.verification.smaller.smaller import subject_of
from autoptd.verification.verdict import Trial, judge, make_trial
from tests.verification.verified import COMMON, told

STAGES = [  # stages of layers `a b`, * for a recomputed segment, e for one outside all layers; the kept ones
    (["a b a b a b", "a b a b a b", "a b a b"], ["a b", "a b", "a b"]),
    (["a b a b a", "b a b a b"], ["a b a", "b a b"]),
    # recomputed layers and others in one stage, twice: both in the first
    (["a* b* a* b* a b", "a* b* a b a b", "a b a b"], ["a* b* a b", "a b", "a b"]),
    (["a* b* a b", "a b a* b*", "a* b* a b"], ["a* b* a b", "a b a* b*", "a b"]),
    # every stage keeps each kind, and begins and ends as planned
    (["a* b* a b a*", "b* a b", "a* b* a b a*"], ["a* b* a b a*", "b* a b", "a b a*"]),
    (["a", "b* a* b* a b", "a b a", "b* a* b* a b"], ["a", "b* a* b* a b", "a b a", "b* a b"]),
    # e was before a recomputed half of a layer, and such a half never before one that is not recomputed
    (["e a* b* a b", "e a* b* a b"], ["e a* b* a b", "e a* b* a b"]),
    (["e a* b* a* b* a b a* b*", "e a* b* a* b* a b a* b*"], ["e a* b* a b a* b*", "e a* b*"]),
]


@pytest.mark.parametrize(("planned", "expected"), STAGES, ids=[" | ".join(planned) for planned, _ in STAGES])
def test_equal_stages_run_all_their_ways_to_recompute_once(
    planned: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depth, "LEAST", 0)
    texts = " ".join(planned).split()
    runs = [list(run) for _, run in groupby(range(len(texts)), lambda i: texts[i] == "e")]
    units = [RepeatedUnit(run[0], 2, len(run) // 2) for run in runs if texts[run[0]] != "e"]
    ends = accumulate((len(stage.split()) for stage in planned), initial=0)
    stages = [SimpleNamespace(first=first, last=end - 1) for first, end in pairwise(ends)]
    folded: Any = SimpleNamespace(units=units, segments=[SimpleNamespace(kind=text[0]) for text in texts])

    def policies(stage: Any) -> dict[int, str]:
        return {i: "full" for i in range(stage.first, stage.last + 1) if texts[i].endswith("*")}

    plan: Any = SimpleNamespace(stages=stages, policies=policies)
    kept = depth.keep_segments(folded, plan).segments
    assert [" ".join(texts[i] for i in kept if s.first <= i <= s.last) for s in stages] == expected


@cache
def model() -> NanoGPT:
    torch.manual_seed(0)
    return NanoGPT(GPTSizes(vocab=16, max_seq=4, width=4, layers=16, heads=1, dropout=0.0, bias=False))


@cache
def plan() -> Plan:
    """Return a plan of four stages that recompute all layers but their last one."""
    fix = {**COMMON, "dp": 1, "tp": 1, "pp": 4, "virtual": 1, "zero": 0, "recompute": "full"}
    made = autoptd.plan(model(), world=4, batch=4, seq=4, precision="fp32", fix=fix, cluster="dgx-h100")
    stages = tuple(s.model_copy(update={"recompute": s.recompute[:-2]}) for s in made.stages)
    return made.model_copy(update={"stages": stages})


@cache
def trial() -> Trial:
    return make_trial(subject_of(plan(), model()))


def test_a_stage_equal_to_an_earlier_one_runs_one_layer() -> None:
    ran = trial().subject.plan
    assert [(s.last - s.first + 1, len(s.recompute)) for s in ran.stages] == [(6, 2), (4, 2), (2, 0), (6, 2)]
    found = judge(trial(), plan())
    assert found.agrees, told(found)
    assert "16 × blocks.0 → 7" in found.subject.shown


FAULTS = [  # a line of stage 1, and what is planted there
    ("x = recompute(block, x)", "x = recompute(lambda x, block=block: 1.5 * block(x), x)"),
    ("x = block(x)", "x = 1.5 * block(x)"),
]


@pytest.mark.parametrize(("line", "planted"), FAULTS, ids=[line for line, _ in FAULTS])
def test_a_fault_of_a_recomputed_layer_or_of_another_one_beside_it_is_found(line: str, planted: str) -> None:
    """A stage of layers of one policy has one of the two lines."""
    program = trial().program
    file = program.stages[1][0]
    assert file not in {name for name, _ in (*program.stages[:1], *program.stages[2:])}
    assert line in program.files[file]
    files = {**program.files, file: program.files[file].replace(line, planted)}
    found = judge(replace(trial(), program=replace(program, files=files)), plan())
    assert not found.agrees
