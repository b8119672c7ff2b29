"""Every plan computes what one plain process does: loss, gradients, norm, and the parameters after some steps."""

from __future__ import annotations

import re
from dataclasses import astuple, replace
from itertools import product

import pytest
import torch

from autoptd.layout.mesh import Mesh
from autoptd.testing.parity import Trained, differences, train_in_lockstep
from tests.pairwise import pairwise
from tests.parity.parity_check import MESHES, Variant, alone, batches, case, check, complaints, parallel, planned
from tests.parity.parity_models import FEW_MESHES, MODELS, OFTEN, ONCE

PLAIN = Variant()
# each mesh is used plainly with one optimizer, and with the other in one of these variants, in turn
VARIANTS = (
    Variant(bulk=True),
    Variant(zero=0, micro=1),
    Variant(bulk=True, recompute="full", clip_norm=0.7),
    Variant(zero=0, recompute="full"),
    Variant(bulk=True, sequence_parallel=False),
    Variant(clip_norm=0.7, zero=0, bulk=True),
    Variant(bulk=True, recompute="full"),
)


def variants(name: str, mesh: Mesh) -> tuple[Variant, Variant]:
    """Return the variants for SGD and for AdamW: the plain one and another, in turn."""
    index = list(MODELS).index(name) + MESHES.index(mesh)
    plain, other = (few_microbatches(v, mesh) for v in (PLAIN, VARIANTS[index % len(VARIANTS)]))
    if name == "skip_mlp":  # its last microbatch is one sample short, so it needs two
        other = replace(other, micro=max(2, other.micro))
    return (plain, other) if index // len(VARIANTS) % 2 else (other, plain)


def few_microbatches(variant: Variant, mesh: Mesh) -> Variant:
    """Limit a variant to two microbatches of the 16 samples per pipeline rank: more only repeat the same work."""
    return replace(variant, micro=max(variant.micro, 16 // mesh.dp // (2 * mesh.pp)))


CASES = pairwise(
    [  # some models on every mesh, the others on every second
        (name, mesh, optimizer, variant)
        for i, name in enumerate(MODELS)
        for k, mesh in enumerate(MESHES)
        if name in OFTEN or (i + k) % 2
        for optimizer, variant in zip(("sgd", "adamw"), variants(name, mesh), strict=True)
    ],
    lambda case: (*case[:3], *astuple(case[3])),
)


@pytest.mark.parametrize(
    ("name", "mesh", "optimizer", "variant"), CASES, ids=[f"{name}-{mesh}-{by}" for name, mesh, by, _ in CASES]
)
def test_a_plan_trains_like_one_process(name: str, mesh: Mesh, optimizer: str, variant: Variant) -> None:
    assert not check(name, mesh, variant, optimizer)


@pytest.mark.parametrize(("name", "optimizer"), [("gpt2", "sgd"), ("llama", "adamw"), ("nanogpt", "adamw")])
def test_a_plan_trains_like_one_process_for_longer(name: str, optimizer: str) -> None:
    assert not check(name, Mesh(2, 2, 2), Variant(micro=4, bulk=True, clip_norm=0.7), optimizer, steps=5)


@pytest.mark.parametrize("name", FEW_MESHES)
def test_mixtures_and_encoder_decoders(name: str) -> None:
    mesh, variant = Mesh(2, 2, 2), Variant(bulk=True, recompute="full")
    assert not check(name, mesh, variant, "adamw")
    plan = planned(name, mesh, variant)
    whole = {n for n, p in plan.splits.parameters.items() if p in ("B", "Bp") and not n.endswith("norm.weight")}
    assert not {n for n in whole if not n.endswith("gate.weight") and not (plan.mesh.ep > 1 and "experts" in n)}


@pytest.mark.parametrize("name", ONCE)
def test_models_with_a_feature_of_their_own(name: str) -> None:
    """Sizes of mpt such as min(16, s), which do not occur at the large sizes at which ops are otherwise examined."""
    assert not check(name, Mesh(2, 2, 2), Variant(bulk=True, recompute="selective"), "sgd")


def test_every_way_of_communicating_occurs() -> None:
    """Plans for these tiny models use the same collectives and vocabulary-parallel ops as those for large ones."""
    missing = {"all_gather", "all_gather_whole", "all_reduce", "reduce_scatter", "all_to_all", "slice", "pad"}
    missing |= {"vocab_embedding", "vocab_cross_entropy"}
    for name, mesh in product(("gpt2", "nanogpt", "bert"), [mesh for mesh in MESHES if mesh.tp > 1]):
        for variant in variants(name, mesh) if missing else ():
            files = parallel(name, planned(name, mesh, variant), "sgd").program.files
            code = "\n".join(text for file, text in files.items() if file.endswith(".py"))
            missing -= {a or b for a, b in re.findall(r"\btp\.(\w+)\(|\bops\.(vocab_\w+)\(", code)}
    assert not missing


@pytest.mark.parametrize(
    ("name", "splits"),
    [
        ("nanogpt", {"tokens.weight": "S0"}),
        ("nanogpt", {"tokens.weight": "S1"}),
        ("oddities", {"table.weight": "S0"}),
        ("gpt2", {"transformer.wte.weight": "S0"}),
        ("llama", {"model.embed_tokens.weight": "S0", "lm_head.weight": "S1"}),
        ("bert", {"*.word_embeddings.weight": "S0"}),
    ],
)
def test_parameters_placed_by_hand(name: str, splits: dict[str, str]) -> None:
    variant = Variant(bulk=True, splits=tuple(splits.items()))
    plan = planned(name, Mesh(2, 2, 2), variant)
    placed = {n: p for n, p in plan.splits.parameters.items() if any(n.endswith(k.strip("*.")) for k in splits)}
    assert set(placed.values()) == set(splits.values())
    assert not check(name, Mesh(2, 2, 2), variant, "sgd")


def test_unused_and_frozen_parameters_do_not_change() -> None:
    made = parallel("oddities", planned("oddities", Mesh(2, 2, 2), PLAIN), "adamw")
    found = train_in_lockstep(made, batches("oddities"))
    before = case("oddities").model.state_dict()
    assert not {n for n in found.gradients if n.startswith(("frozen", "unused"))}
    for name in ("unused", "frozen.weight", "frozen.bias", "layers.2.scale"):
        assert torch.equal(found.state[name], before[name]), name
    assert all(not torch.equal(found.state[n], before[n]) for n in found.gradients)
    assert "unused" in "".join(planned("oddities", Mesh(2, 2, 2), PLAIN).notes)


def test_the_plan_s_own_text_is_enough() -> None:
    """A plan that was written and read back trains to the same bits."""
    plan = planned("nanogpt", Mesh(2, 2, 2), PLAIN)
    again = type(plan).from_json(plan.to_json())
    runs = [train_in_lockstep(parallel("nanogpt", p, "sgd"), batches("nanogpt")) for p in (plan, again)]
    assert runs[0].losses == runs[1].losses
    assert max(differences(runs[0].state, runs[1].state).values()) == 0


def test_differences_are_seen_however_small_the_tensor() -> None:
    one, other = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0 + 1e-8])
    zero = torch.tensor([1e-17])
    found = differences(
        {"a": other.double(), "zero": -zero, "extra": one}, {"a": one.double(), "zero": zero, "lost": one}
    )
    assert found["extra"] == found["lost"] == float("inf")
    assert found["zero"] < 1e-17
    assert differences({"a": torch.tensor([float("nan")])}, {"a": torch.ones(1)}) == {"a": float("inf")}
    one = torch.ones(1, dtype=torch.float64)
    assert differences({"a": one + 1e-9}, {"a": one})["a"] == pytest.approx(1e-9, rel=1e-6)


def test_complaints_name_what_is_wrong() -> None:
    good = alone("odd_mlp", "sgd")
    name = next(iter(good.gradients))
    bad = Trained(
        (good.losses[0] + 1e-8, *good.losses[1:]),
        good.norms,
        {n: x for n, x in good.gradients.items() if n != name},
        good.state,
        ("layers.0.weight",),
    )
    assert not complaints("odd_mlp", good, good)
    text = " | ".join(complaints("odd_mlp", bad, good))
    assert "loss of step 0" in text and f"gradient {name}: off by inf" in text and "copies of layers.0.weight" in text
