"""Products around the ring of tp: the numbers of one process, under each way to run a step."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from autoptd.compile.program import make_program, read_sharding
from autoptd.layout.mesh import Mesh
from autoptd.testing.parity import train_in_lockstep
from tests.parity.parity_check import Variant, alone, batches, check, complaints, parallel, planned, source, with_files
from tests.parity.test_parity_recompute import made_for, measured, predicted, saved_by_norms

RING = Variant(bulk=True, overlap=("p2p", "tp"))
WAYS = {
    "1f1b": RING,
    "zero-bubble": replace(RING, schedule="zero-bubble", micro=1, clip_norm=0.7),
    "recomputed": replace(RING, recompute="full"),
    "zero 3": replace(RING, zero=3),
    "gathered again": replace(RING, gathers="again"),
}
MODELS = ("llama", "gpt2", "mixtral", "t5")
PIPELINES = [(name, tp, way) for name in MODELS for tp in (2, 4) for way in WAYS]
REST = [
    ("llama", Mesh(1, 4, 2), replace(RING, recompute="selective", gathers="again", loss="in_place")),
    ("llama", Mesh(1, 2, 2, cp=2), RING),
    ("gpt2", Mesh(2, 2, 2), replace(RING, schedule="zero-bubble-v", virtual=2, overlap=("dp", "p2p", "tp"), micro=1)),
]


def emitted(name: str, mesh: Mesh, variant: Variant) -> str:
    plan = planned(name, mesh, variant)
    assert plan.not_runnable == ()
    return "".join(make_program(source(name), plan, read_sharding(source(name), plan)).files.values())


@pytest.mark.parametrize(("name", "tp", "way"), PIPELINES)
def test_overlap_changes_no_number(name: str, tp: int, way: str) -> None:
    mesh = Mesh(2, tp, 1) if way == "zero 3" else Mesh(1, tp, 2)
    text = emitted(name, mesh, WAYS[way])
    assert "tp.gather_linear" in text
    assert "tp.linear_scatter" in text or name == "mixtral"  # some plans for it only sum
    assert ("again=True" in text) == (way == "gathered again")
    assert not check(name, mesh, WAYS[way], "adamw")


@pytest.mark.parametrize(("name", "mesh", "variant"), REST, ids=[f"{n}-{v.recompute}-{m}" for n, m, v in REST])
def test_overlap_beside_other_options(name: str, mesh: Mesh, variant: Variant) -> None:
    assert "tp.gather_linear" in emitted(name, mesh, variant)
    assert not check(name, mesh, variant, "adamw")


@pytest.mark.parametrize("gathers", ["kept", "again"])
@pytest.mark.parametrize("policy", ["none", "selective"])
@pytest.mark.parametrize("name", ["llama", "nanogpt"])
def test_kept_bytes_are_those_predicted(name: str, policy: str, gathers: str) -> None:
    made = made_for(name, 2, policy, gathers=gathers, overlap=["p2p", "tp"])
    assert "tp.gather_linear" in "".join(made.program.files.values())
    assert measured(name, made, policy) - saved_by_norms(name, policy) == predicted(name, made, policy)


@pytest.mark.fault("a bias on every rank")
@pytest.mark.parametrize(
    ("pattern", "by"),
    [
        (r"tp\.pad\((self\.mlp\.c_proj\.bias), dim=0\)", r"tp.all_gather(\1, dim=0)"),
        (r"(mlp\.c_fc\.weight\.t\(\), self\.mlp\.c_fc\.bias)", r"\1 * 2"),
    ],
)
def test_an_edited_bias_is_seen(pattern: str, by: str) -> None:
    made = parallel("gpt2", planned("gpt2", Mesh(1, 2, 1), RING), "adamw", None)
    files = {name: re.sub(pattern, by, text) for name, text in made.program.files.items()}
    assert files != made.program.files, "nothing was planted"
    found = train_in_lockstep(with_files(made, files), batches("gpt2", 2))
    assert complaints("gpt2", found, alone("gpt2", "adamw", None, 2))
