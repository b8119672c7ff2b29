"""Plans with the tensor parallelism of Megatron-LM train like one process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoptd.layout.mesh import Mesh
from tests.parity.parity_check import Variant, check, planned

SPLITS = Variant(splits=(("*", "megatron"),))
WAYS = [
    ("llama", Mesh(dp=2, tp=2, pp=2), SPLITS, "adamw"),
    ("llama", Mesh(tp=2), replace(SPLITS, sequence_parallel=False), "sgd"),
    ("gpt2", Mesh(tp=2), SPLITS, "adamw"),
    ("gpt2", Mesh(tp=2, pp=2), replace(SPLITS, schedule="interleaved", virtual=2), "sgd"),
    ("bert", Mesh(tp=2, pp=2), SPLITS, "sgd"),
    ("t5", Mesh(tp=2), SPLITS, "adamw"),
    ("mixtral", Mesh(dp=2, tp=2, ep=2), SPLITS, "adamw"),
    ("deepseek", Mesh(dp=2, tp=2), SPLITS, "sgd"),
]


@pytest.mark.parametrize(
    ("name", "mesh", "variant", "optimizer"), WAYS, ids=[f"{n}-{m}-{i}" for i, (n, m, *_) in enumerate(WAYS)]
)
def test_models_train_like_one_process(name: str, mesh: Mesh, variant: Variant, optimizer: str):
    assert not check(name, mesh, variant, optimizer)


def test_the_placements_are_megatron_s():
    placed = planned("gpt2", Mesh(tp=2), SPLITS).splits.parameters
    assert placed["transformer.h.0.attn.c_attn.weight"] == "S1/3"
    assert placed["transformer.h.0.attn.c_proj.weight"] == "S0"
