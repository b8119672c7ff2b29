"""Roofline times by hand, and monotonicity: doing more is never quicker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoptd.cost_models.cluster import AttentionRates, Cluster, Device, Peaks, Sustained
from autoptd.cost_models.op_time import KINDS, OpWork, attention_s, matmul_s, memory_s, op_s
from autoptd.profile.record import ProfileRecord

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


def product(m: int, n: int, k: int, batch: int = 1, dtype: str = "bf16") -> OpWork:
    """Return the work of a matmul whose operands and result have 2 bytes an element."""
    return OpWork("matmul", 2.0 * batch * m * n * k, 2.0 * batch * (m * k + k * n + m * n), dtype, m, n, k, batch)


def test_by_hand():
    # 2 * 1000**3 flops at 200 Tflop/s; 6 MB at 1.6 TB/s take 3.75 us
    assert matmul_s(DEVICE, OpWork("matmul", 2e9, 6e6, "bf16")) == pytest.approx(10e-6)
    assert matmul_s(DEVICE, OpWork("matmul", 2e9, 6e6, "fp16")) == pytest.approx(20e-6)
    thin = OpWork("matmul", 2e8, 6e6, "bf16")
    assert matmul_s(DEVICE, thin) == pytest.approx(3.75e-6), "a thin matmul is bound by memory"
    assert attention_s(DEVICE, OpWork("attention", 2e9, 6e6, "bf16")) == pytest.approx(20e-6)
    assert memory_s(DEVICE, 1.6e9) == pytest.approx(1e-3)


# 100 multiprocessors of 2 Tflop/s each at the sustained rate, 32 steps of k before a tile runs
TILED = DEVICE.model_copy(update={"multiprocessors": 100, "k_overhead": 32.0})


def test_additions_by_hand():
    """65,536 rows of 4,096 in 2.304 ms are 117e9 a second, the rate of Hopper; bytes count if they take longer."""
    assert pytest.approx(Cluster.load("dgx-h100").device.additions_per_s, rel=0.01) == 65_536 * 4_096 / 2.304e-3
    assert pytest.approx(Cluster.load("dgx-b200").device.additions_per_s, rel=0.01) == 196_608 * 2_048 / 1.848e-3
    device = DEVICE.model_copy(update={"additions_per_s": 100e9})
    work = OpWork("memory", 0.0, 1.6e9, "bf16", added=0.4e9)
    assert op_s(device, work) == pytest.approx(4e-3 + 1e-6)
    assert op_s(device, replace(work, added=0.05e9)) == pytest.approx(1e-3 + 1e-6)
    assert op_s(device, replace(work, kind="rows")) == pytest.approx(4e-3 + 1e-6), "part of a kernel with a sum"
    rest = replace(work, nbytes=0.0, counted=1.6e9, launches=0)
    assert op_s(device, rest) == pytest.approx(3e-3) and op_s(device, replace(rest, added=1e6)) == 0.0
    assert op_s(DEVICE, work) == pytest.approx(1e-3 + 1e-6), "no rate is known"


def test_tiles_and_waves_by_hand():
    # 25 x 4 tiles of 256 x 128: one wave; 2 * 256 * 128 * (4096 + 32) flops of a tile at 2 Tflop/s
    wave_s = 2 * 256 * 128 * 4128 / 2e12
    assert matmul_s(TILED, product(25 * 256, 4 * 128, 4096)) == pytest.approx(wave_s)
    assert matmul_s(TILED, product(50 * 256, 4 * 128, 4096)) == pytest.approx(2 * wave_s)
    # 51 x 4 of them would be three waves; 408 of 128 x 128 are five of half the size, at 0.93 of the rate
    assert matmul_s(TILED, product(51 * 256, 4 * 128, 4096)) == pytest.approx(5 / 2 / 0.93 * wave_s)


def test_a_row_more_than_a_wave_takes_another_tile():
    full, more = (matmul_s(TILED, product(m, 4 * 128, 4096)) for m in (25 * 256, 25 * 256 + 1))
    assert 1.2 * full < more <= 2 * full


def test_few_tiles_with_a_long_k_are_cut_along_k():
    # one tile of 64 x 64 at 0.65, cut in 16: 2 * 64 * 64 * (65536 / 16 + 32) / 0.65
    # at 2 Tflop/s, and 16 parts in fp32, written and read
    split_s = 2 * 64 * 64 * (65536 / 16 + 32) / 0.65 / 2e12 + 8 * 64 * 64 * 16 / 1.6e12
    whole_s = 2 * 64 * 64 * (65536 + 32) / 0.65 / 2e12
    found = matmul_s(TILED, product(64, 64, 65536))
    assert found <= split_s * (1 + 1e-9) and found < whole_s / 5


SIDES = st.integers(1, 20_000)


@settings(deadline=None)
@given(SIDES, SIDES, SIDES, st.integers(1, 64), st.sampled_from("mn"), st.integers(1, 4000))
def test_a_larger_product_is_never_quicker_nor_below_the_roofline(
    m: int, n: int, k: int, batch: int, grown: str, by: int
):
    small = product(m, n, k, batch)
    large = product(m + by * (grown == "m"), n + by * (grown == "n"), k, batch)
    assert matmul_s(TILED, small) <= matmul_s(TILED, large) * (1 + 1e-9)
    assert matmul_s(TILED, small) >= max(small.flops / 200e12, small.nbytes / 1.6e12) * (1 - 1e-9)


@settings(deadline=None)
@given(SIDES, SIDES, st.integers(4096, 50_000), st.integers(1, 4000))  # all splits are available to both
def test_a_longer_k_is_never_quicker(m: int, n: int, k: int, by: int):
    assert matmul_s(TILED, product(m, n, k)) <= matmul_s(TILED, product(m, n, k + by)) * (1 + 1e-9)


def test_causal_attention_skips_blocks():
    # 4 x 4 blocks of 128, 10 of them on or below the diagonal
    square = OpWork("attention", 16e9, 0, "bf16", 512, 512, 64)
    assert attention_s(DEVICE, replace(square, causal=True)) == pytest.approx(attention_s(DEVICE, square) * 10 / 16)


def attention(heads: int, queries: int, keys: int = 0, **changes: Any) -> OpWork:
    """Return the work of a pass with heads of 64, 2.5 times as much in the backward pass."""
    keys = keys or queries
    flops = 4.0 * heads * queries * keys * 64 * (2.5 if changes.get("backward") else 1)
    return OpWork("attention", flops, 0, "bf16", queries, keys, 64, heads, **changes)


# 100 multiprocessors of 1 Tflop/s each in attention
def test_few_tiles_of_attention_leave_multiprocessors_idle():
    step_s = 4 * 128 * 64 / 1e12  # of a tile of 128 queries over one key
    # 4 heads × 8 blocks of 128 queries: 32 tiles in one wave, which 100 would take as well
    assert attention_s(TILED, attention(4, 1024)) == pytest.approx(1024 * step_s)
    assert attention_s(TILED, attention(12, 1024)) == pytest.approx(1024 * step_s)
    assert attention_s(TILED, attention(13, 1024)) == pytest.approx(2 * 1024 * step_s), "104 tiles are two waves"
    # a block of one query takes as long as a full one
    assert attention_s(TILED, attention(12, 1, 1024)) == pytest.approx(1024 * step_s)
    # the backward pass has a tile for each block of 128 keys: 12 × 1 over 1024 queries, or 12 × 8 over 128
    assert attention_s(TILED, attention(12, 1024, 128, backward=True)) == pytest.approx(2.5 * 1024 * step_s)
    assert attention_s(TILED, attention(12, 128, 1024, backward=True)) == pytest.approx(2.5 * 128 * step_s)


def test_the_longest_tile_under_a_causal_mask():
    step_s = 4 * 128 * 64 / 1e12
    # 4 heads × 8 blocks, over 128, 256, … 1024 keys: all at once, and the last takes longest
    assert attention_s(TILED, attention(4, 1024, causal=True)) == pytest.approx(1024 * step_s)
    # 50 × 8 tiles over 576 keys on average
    assert attention_s(TILED, attention(50, 1024, causal=True)) == pytest.approx(4 * 576 * step_s)


def test_starts_and_rows_of_tiles():
    rates = AttentionRates(forward=0.25, backward=0.125, head_overhead=64, start=100, backward_start=200, rows=256)
    device = TILED.model_copy(update={"attention": {"ours": rates}})
    step_s = 4 * 128 * 64 / 1e12 * (1 + 64 / 64)
    # 25 heads × 4 blocks of 256 queries; backward, 25 × 8 blocks of 128 keys at half the rate
    forward, backward = (attention(25, 1024, backward=b, implementation="ours") for b in (False, True))
    assert attention_s(device, forward) == pytest.approx((1024 + 100) * 2 * step_s)
    assert attention_s(device, backward) == pytest.approx(2 * (1024 + 200) * 2.5 * 2 * step_s)
    # a causal mask skips blocks of 256 keys: over 640 on average
    assert attention_s(device, replace(forward, batch=100, flops=4 * forward.flops, causal=True)) == pytest.approx(
        4 * (640 + 100) * 2 * step_s
    )
    # four kernels of a ring, each 12 heads × 4 blocks of 128 queries over 512 keys: a wave each
    ring = attention(12, 1024, rows=512, launches=4)
    assert attention_s(TILED, ring) == pytest.approx(4 * 512 * step_s / 2)


@given(st.integers(1, 300), st.integers(1, 5000), st.integers(1, 300), st.booleans(), st.booleans())
def test_more_heads_are_never_quicker_nor_below_their_flops(
    heads: int, tokens: int, more: int, causal: bool, backward: bool
):
    one = attention(heads, tokens, causal=causal, backward=backward)
    all_busy = DEVICE.model_copy(update={"multiprocessors": None})
    assert attention_s(TILED, one) >= attention_s(all_busy, one) * (1 - 1e-9)
    assert attention_s(TILED, one) <= attention_s(
        TILED, attention(heads + more, tokens, causal=causal, backward=backward)
    ) * (1 + 1e-9)


def test_attention_on_an_h200():
    """8 to 512 heads of 512 to 16,384 tokens, measured by `autoptd profile`: within 10 % of each."""
    device = Cluster.load("dgx-h200").device
    record = ProfileRecord.load(Path(__file__).parents[2] / "benchmarks" / "data" / "gpu" / "points.json")
    points = record.of("attention")
    ratios = [op_s(device, replace(p.case.work, implementation="torch")) / p.seconds for p in points]
    assert len(ratios) == 24 and min(ratios) > 0.9 and max(ratios) < 1.1


@pytest.mark.parametrize("heads, measured_s", [(4, 110e-6), (8, 119e-6), (16, 204e-6), (32, 386e-6), (128, 1476e-6)])
def test_backward_attention_of_few_heads_on_a_b200(heads: int, measured_s: float):
    """Heads of 128, 4,096 tokens: github.com/MooreThreads/SimuMax, configs/system/b200_bf16_ceperm.json."""
    device = Cluster.load("dgx-b200").device
    flops = 10.0 * heads * 4096**2 * 128
    work = OpWork("attention", flops, 0, "bf16", 4096, 4096, 128, heads, True, True, implementation="cudnn")
    assert attention_s(device, work) == pytest.approx(measured_s, rel=0.12)


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
    busy = matmul_s(device, OpWork("matmul", flops, nbytes, "bf16", m, n, k))
    peak = device.matmul_flops_per_s.bf16 * device.matmul_sustained.fraction
    assert flops / peak * (1 - 1e-9) <= busy <= 1.1 * flops / peak and memory_s(device, nbytes) < busy / 2


@given(
    st.sampled_from(KINDS),
    st.sampled_from(sorted(Peaks.model_fields.keys() - {"fp8"})),  # which an A100 lacks
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


def test_rows_of_an_odd_length_take_slow_kernels_in_16_bits() -> None:
    """The head of GPT-2 took 30.8 ms on an H200 (docs/gpu.md); all its three products are of odd rows."""
    device = Cluster.load("dgx-h200").device
    head = replace(product(16384, 50257, 768), odd=True)
    assert 3 * matmul_s(device, head) == pytest.approx(30.8e-3, rel=0.1)
    assert matmul_s(device, head) > 4 * matmul_s(device, replace(head, odd=False))
    wide = replace(head, dtype="fp32")
    assert matmul_s(device, wide) == matmul_s(device, replace(wide, odd=False))
