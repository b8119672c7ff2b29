"""Roofline by hand, and that nothing gets quicker by doing more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoptd.cost_models.cluster import Cluster, Device, Peaks, Sustained
from autoptd.cost_models.op_time import KINDS, OpWork, attention_s, matmul_s, memory_s, op_s

DEVICE = Device(
    name="round",
    memory_bytes=2**36,
    memory_bytes_per_s=2e12,
    launch_s=1e-6,
    matmul_flops_per_s=Peaks(fp64=10e12, fp32=20e12, bf16=400e12, fp16=200e12),
    matmul_sustained=Sustained(fraction=0.5),
    attention_sustained=Sustained(fraction=0.25),
    memory_sustained=Sustained(fraction=0.8),
)


def test_by_hand():
    # 2 * 1000**3 flops at 200 Tflop/s; 6 MB at 1.6 TB/s take 3.75 us
    assert matmul_s(DEVICE, 2e9, 6e6, "bf16") == pytest.approx(10e-6)
    assert matmul_s(DEVICE, 2e9, 6e6, "fp16") == pytest.approx(20e-6)
    assert matmul_s(DEVICE, 2e8, 6e6, "bf16") == pytest.approx(3.75e-6), "a thin matmul is bound by memory"
    assert attention_s(DEVICE, 2e9, 6e6, "bf16") == pytest.approx(20e-6)
    assert memory_s(DEVICE, 1.6e9) == pytest.approx(1e-3)


def test_launch_is_added_once():
    assert op_s(DEVICE, OpWork("matmul", 2e9, 6e6, "bf16")) == pytest.approx(11e-6)
    assert op_s(DEVICE, OpWork("memory", 0, 1.6e6, "bf16")) == pytest.approx(2e-6)
    assert op_s(DEVICE, OpWork("memory", 0, 0, "bf16")) == 0, "a view launches nothing"


def test_elementwise_arithmetic_runs_in_fp32_or_fp64():
    assert op_s(DEVICE, OpWork("memory", 20e12, 8, "bf16")) == pytest.approx(1, rel=1e-5)
    assert op_s(DEVICE, OpWork("memory", 20e12, 8, "fp64")) == pytest.approx(2, rel=1e-5)


@pytest.mark.parametrize(
    "bad", [OpWork("conv", 1, 1, "bf16"), OpWork("matmul", 1, 1, "int8"), OpWork("memory", 0, -1, "bf16")]
)
def test_unknown_work_is_refused(bad: OpWork):
    with pytest.raises(ValueError):
        op_s(DEVICE, bad)


@pytest.mark.parametrize("name", Cluster.names())
def test_a_gpt3_layer_is_bound_by_compute(name: str):
    device = Cluster.load(name).device
    # 2048 tokens through 12288 -> 49152, in bf16
    m, k, n = 2048, 12288, 49152
    flops, nbytes = 2 * m * k * n, 2 * (m * k + k * n + m * n)
    busy = matmul_s(device, flops, nbytes, "bf16", m, n, k)
    peak = device.matmul_flops_per_s.bf16 * device.matmul_sustained.fraction
    assert busy == pytest.approx(flops / peak) and memory_s(device, nbytes) < busy / 2


@given(
    st.sampled_from(KINDS),
    st.sampled_from(sorted(Peaks.model_fields)),
    st.floats(0, 1e15),
    st.floats(0, 1e12),
    st.floats(1, 10),
)
def test_more_work_is_never_quicker(kind: str, dtype: str, flops: float, nbytes: float, more: float):
    base = op_s(DEVICE, OpWork(kind, flops, nbytes, dtype))
    assert op_s(DEVICE, OpWork(kind, flops * more, nbytes, dtype)) >= base
    assert op_s(DEVICE, OpWork(kind, flops, nbytes * more, dtype)) >= base
    faster = DEVICE.model_copy(update={"memory_bytes_per_s": DEVICE.memory_bytes_per_s * more})
    assert op_s(faster, OpWork(kind, flops, nbytes, dtype)) <= base
