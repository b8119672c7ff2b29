"""Kernels that permute rows of experts in published runs, by framework and version."""

from __future__ import annotations

import pytest

from benchmarks.published.fix import fix_of
from benchmarks.published.shapes import shape_of
from tests.benchmarks.sample_runs import tiny

SIZES = {"n_experts": 8, "moe_top_k": 2, "moe_ffn_hidden_size": 32, "gated_mlp": True}


@pytest.mark.parametrize(
    ("stated", "permutation"),
    [
        ({"framework": "Megatron-LM f1f03922"}, "twice"),
        ({"framework": "Megatron-Core v0.9 dev", "moe_dispatcher": "alltoall"}, "weighted"),
        ({"framework": "Megatron-LM/Megatron-Core", "moe_dispatcher": "alltoall"}, "added"),
        ({"framework": "Megatron-LM/Megatron-Core", "moe_dispatcher": "hybridep"}, "fused"),
        ({"framework": "Megatron-LM 0.14 dev", "notes": "grouped GEMM, permute fusion."}, "fused"),
        ({"framework": "Megatron-Bridge/Megatron-Core", "notes": "permute fusion off"}, "added"),
        ({"framework": "Megatron-Bridge/Megatron-Core"}, "fused"),
        ({"framework": "Pai-Megatron-Patch 2b201af (Megatron-Core)"}, "fused"),
        ({"framework": "NeMo/Megatron-Core", "model_name": "Qwen3_30B_a3B"}, "fused"),
        ({"framework": "NeMo/Megatron-Core", "model_name": "Grok-1 314B"}, "weighted"),
        ({"framework": "MegaScale-MoE"}, "fused"),
        ({"framework": "torchtitan (FSDP2 + EP)"}, None),
    ],
)
def test_permutation_of_a_run(stated: dict, permutation: str | None) -> None:
    row = tiny(arch="moe", **SIZES).model_copy(update=stated)
    assert fix_of(row, shape_of(row)).get("permutation") == permutation
    dense = tiny().model_copy(update=stated)
    assert "permutation" not in fix_of(dense, shape_of(dense))
