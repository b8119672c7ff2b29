"""No step of any kind of plan mixes devices, waits for the GPU where it need not, or copies to it from pageable memory.

Each way of training occurs with a model in turn in `make test`, and with many more in `make rest`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from autoptd.layout.mesh import Mesh
from autoptd.testing.parity import train_in_lockstep
from tests.parity.updating_models import UPDATING
from tests.runtime.fake_device.allowed import too_often
from tests.runtime.fake_device.plans import Ask, given, made
from tests.runtime.fake_device.run import Ran, steps

WAYS: Mapping[str, tuple[Mesh, Mapping[str, Any]]] = {
    "zero 0": (Mesh(2), {"zero": 0}),
    "zero 1": (Mesh(2), {"zero": 1}),
    "zero 2": (Mesh(2), {"zero": 2}),
    "zero 3": (Mesh(2), {"zero": 3}),
    "shards": (Mesh(4), {"zero": 2, "shards": 2}),
    "shards, zero 3": (Mesh(4), {"zero": 3, "shards": 2}),
    "tp": (Mesh(1, 2), {}),
    "tp, whole sequences": (Mesh(2, 2), {"sequence_parallel": False, "zero": 3}),
    "gpipe": (Mesh(1, 1, 2), {"schedule": "gpipe"}),
    "gathered later": (Mesh(2, 1, 2), {"overlap": ["dp", "p2p"]}),
    "interleaved, slices": (
        Mesh(1, 2, 2),
        {"schedule": "interleaved", "virtual": 2, "sends": "slices", "sequence_parallel": False},
    ),
    "zero-bubble": (Mesh(2, 1, 2), {"schedule": "zero-bubble", "zero": 2}),
    "zero-bubble-v": (Mesh(1, 1, 2), {"schedule": "zero-bubble-v", "virtual": 2}),
    "zero-bubble-v, zero 3": (Mesh(2, 1, 2), {"schedule": "zero-bubble-v", "virtual": 2, "zero": 3}),
    "recomputed": (Mesh(2), {"recompute": "full", "zero": 3}),
    "attention recomputed": (Mesh(1, 2, 2), {"recompute": "selective"}),
    "cheap ops recomputed": (Mesh(2), {"recompute": "ops"}),
    "activations on the host": (Mesh(2, 1, 2), {"recompute": "offload"}),
    "activations on the host, zero 3": (Mesh(2), {"recompute": "offload", "zero": 3}),
    "state on the host": (Mesh(2, 1, 2), {"offload": 1.0}),
    "half the state on the host": (Mesh(2), {"offload": 0.5, "zero": 2}),
    "both on the host": (Mesh(2, 1, 2), {"offload": 1.0, "recompute": "offload", "schedule": "zero-bubble"}),
    "gathered again": (Mesh(1, 2), {"gathers": "again"}),
    "narrow gradients": (Mesh(2), {"gradients": "compute", "zero": 2}),
    "products around the ring": (Mesh(2, 2), {"overlap": ["p2p", "tp"], "zero": 3}),
    "products around the ring, gathered again": (
        Mesh(1, 2, 2),
        {"overlap": ["p2p", "tp"], "gathers": "again", "schedule": "zero-bubble"},
    ),
    "loss in place": (Mesh(2, 2), {"loss": "in_place"}),
    "ring": (Mesh(cp=2), {}),
    "ring, recomputed": (Mesh(2, cp=2), {"zero": 3, "recompute": "full"}),
    "ulysses": (Mesh(cp=2), {"context": "ulysses"}),
    "experts": (Mesh(2, ep=2), {}),
    "experts, tp": (Mesh(2, 2, ep=2), {"zero": 2}),
    "experts, zero-bubble": (Mesh(2, 1, 2, ep=2), {"schedule": "zero-bubble", "zero": 3}),
    "experts, ring": (Mesh(cp=2, ep=2), {"recompute": "full"}),
}
# A type for each: a trace of its own in each type would take longer than the steps.
FEW = {"llama": "bf16", "gpt2_dropout": "fp16", "mixtral": "bf16", "t5": "fp32", "normed_residual": "bf16"}
MIXTURES = ("mixtral", "gpt_oss", "grouped", "capacity", "einsum")
CUT_TOKENS = ("llama", "nanogpt", "mixtral", "wide_heads")
OFTEN = ("llama", "nanogpt", "t5", "mixtral")  # by every way that fits; the others by some
MODELS = (
    *OFTEN, "gpt2_dropout", "bert", "vit", "oddities", "gpt_oss", "grouped", "capacity", "einsum", "modules", "mpt",
    "updating_balanced", "updating_averages", "updating_bias", "normed_residual", "normed_tokens", "noisy",
    "written_dropout", "skip_mlp", "wide_heads", "two_views",
)  # fmt: skip
ALWAYS_DROP = ("noisy", "written_dropout")  # in eval mode too, which no evaluation step does
NOT_EVALUATED = (*ALWAYS_DROP, *UPDATING)  # the latter would update buffers in eval mode


def fits(model: str, way: str) -> bool:
    mesh, fix = WAYS[way]
    if mesh.ep > 1 and model not in MIXTURES:
        return False
    if mesh.cp > 1 and model not in CUT_TOKENS:
        return False
    return not (model in ("two_views", "wide_heads") and fix.get("virtual", 1) > 1)  # too few layers


def asked(model: str, way: str, precision: str, turn: int) -> Ask:
    """Return the case; optimizer, clipping and, for batch norms, the number of microbatches are its own."""
    mesh, fix = WAYS[way]
    if (way == "narrow gradients" and precision in ("fp32", "fp64")) or (model, precision) == ("t5", "fp16"):
        precision = "bf16"  # T5 in fp16 is refused: whether it clamps depends on the whole batch
    if model.startswith("normed"):
        fix = {**fix, "micro": 16 // mesh.dp}
    return Ask(model, mesh, precision, ("adamw", "sgd")[turn % 2], (None, 0.5)[turn // 2 % 2], fix)


def checked(ask: Ask) -> Ran:
    ran = steps(made(ask), given(ask, 2), evaluates=ask.model not in NOT_EVALUATED)
    assert all(map(math.isfinite, ran.losses)) and ran.ops > 100 * ask.mesh.world
    for rank, met in enumerate(ran.waits):
        assert not [text for step in met for text in too_often(step)], f"rank {rank}"
    return ran


def _in_turn() -> list[Ask]:
    found, models = [], list(FEW)
    for turn, way in enumerate(WAYS):
        fitting = [name for name in models if fits(name, way)]
        model = fitting[0]
        models.remove(model)
        models.append(model)
        found.append(asked(model, way, FEW[model], turn))
    return found


IN_TURN = _in_turn()
MANY = [
    asked(model, way, ("fp32", "bf16", "fp16")[(i + k) % 3], i + k)
    for i, model in enumerate(MODELS)
    for k, way in enumerate(WAYS)
    if fits(model, way) and (model in OFTEN or (i + k) % 5 == 0)
]


@pytest.mark.parametrize("ask", IN_TURN, ids=str)
def test_each_way_of_training(ask: Ask) -> None:
    checked(ask)


@pytest.mark.parametrize("ask", MANY, ids=str)
def test_models_by_many_ways(ask: Ask) -> None:
    checked(ask)


@pytest.mark.parametrize("optimizer", ["lion", "muon", "adafactor"])
def test_other_optimizers(optimizer: str) -> None:
    checked(Ask("llama", Mesh(2, 1, 2), "bf16", optimizer, 0.5, {"zero": 2}))


@pytest.mark.parametrize(
    "ask",
    [
        Ask("mixtral", Mesh(2, 2, ep=2), "fp64", fix={"zero": 3}),
        Ask("t5", Mesh(2, 1, 2), "fp64", "sgd", 0.5, {"recompute": "offload", "offload": 1.0}),
        Ask("two_views", Mesh(2, 1, 2), "fp64", fix={"schedule": "zero-bubble"}),
    ],
    ids=str,
)
def test_the_numbers_are_those_of_ranks_on_the_host(ask: Ask) -> None:
    """The steps that are proved are those that parity tests compare with the plain model."""
    parallel = made(ask)
    found = steps(parallel, given(ask, 2)).losses
    assert found == pytest.approx(train_in_lockstep(parallel, given(ask, 2)).losses, rel=1e-12)
