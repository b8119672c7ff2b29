"""The kernel chosen for an attention, and what of it is launched, moved and held."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.op_time import op_s
from autoptd.ops import library as ops
from autoptd.ops.context_attention import _RingQueries, _tile
from autoptd.passes.analysis.attention import AttentionForm, form_of, passes_of
from autoptd.passes.analysis.storages import StorageWatch
from autoptd.passes.analysis.workspace import workspace
from autoptd.passes.opcall import Chunked, OpCall, TensorInfo
from autoptd.search.sharding.attention_cost import Shape, _tiles, attention_works
from autoptd.search.sharding.kind_cost import KindWork, floor_s, work_s

DEVICE = Cluster.load("dgx-h100").device
PLAIN = AttentionForm(torch.bfloat16, 64, 64, causal=True)
DROPPED = replace(PLAIN, dropped=True)
SHAPE = Shape(heads=12, queries=2048, keys=2048, width=128)


@pytest.mark.parametrize(
    ("form", "way"),
    [
        (PLAIN, "fused"),
        (replace(PLAIN, ring=True), "fused"),
        (replace(PLAIN, shared=True, dtype=torch.float16), "fused"),
        (replace(PLAIN, mask=torch.bool), "efficient"),
        (replace(PLAIN, dtype=torch.float32), "efficient"),
        (replace(PLAIN, value_width=32), "efficient"),
        (replace(PLAIN, width=512, value_width=512), "efficient"),
        (DROPPED, "written"),
        (replace(DROPPED, mask=torch.bfloat16, ring=True), "written"),
        (replace(PLAIN, mask=torch.bool, ring=True), "efficient"),
        (replace(PLAIN, mask=torch.bfloat16, ring=True), "written"),
        (replace(PLAIN, dtype=torch.float32, ring=True), "efficient"),
        (replace(PLAIN, dtype=torch.float64, ring=True), "written"),
        (replace(PLAIN, width=192, value_width=128, ring=True), "fused"),
    ],
)
def test_the_kernel_of_a_gpu(form: AttentionForm, way: str) -> None:
    assert form.kernel("cuda") == way
    assert bool(form.why("cuda")) == (way != "fused")


@pytest.mark.parametrize("mask", [None, torch.bool])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_has_fused_kernels_for_all_but_dropout(mask: torch.dtype | None, dtype: torch.dtype) -> None:
    form = replace(PLAIN, mask=mask, dtype=dtype)
    assert form.kernel("cpu") == "fused"
    assert replace(form, dropped=True).kernel("cpu") == "written"


def call_of(dropout: float, heads: int = 4, length: int = 256) -> OpCall:
    q = TensorInfo((1, heads, length, 64), torch.bfloat16)
    mask = TensorInfo((1, 1, length, length), torch.bool, False)
    return OpCall(ops.attention, (q, q, q, mask, dropout, True), outputs=(q,))


def test_a_call_says_its_form() -> None:
    assert form_of(call_of(0.1), ring=True) == replace(DROPPED, mask=torch.bool, ring=True)
    assert form_of(call_of(0.0)) == replace(PLAIN, mask=torch.bool)


class _Tokens:
    def __init__(self, size: int, rank: int, zigzag: bool) -> None:
        self.size, self.rank, self.zigzag = size, rank, zigzag

    def chunks(self, rank: int) -> tuple[int, ...]:
        return (rank, 2 * self.size - 1 - rank) if self.zigzag else (rank,)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("cp", [2, 3, 8])
def test_tiles_are_those_of_the_runtime(cp: int, causal: bool) -> None:
    form, shape = replace(PLAIN, causal=causal, ring=True), Shape(2, 16, 16 * cp, 4, cp)
    count, rows, share = _tiles(form, shape)
    q, shown = torch.empty(1, 2, 16, 4), []
    for rank in range(cp):
        tokens: Any = _Tokens(cp, rank, causal)
        tiles = [tile for owner in range(cp) if (tile := _tile(tokens, owner, 16, causal))]
        assert len(tiles) == count
        shown.append(sum(tile.query.stop - tile.query.start for tile in tiles))
        written = _RingQueries(q, q, tokens, None, causal, 1.0)
        pieces = [tile for owner in range(cp) for tile in written.tiles(owner)]
        covered = sum((t.query.stop - t.query.start) * (t.key.stop - t.key.start) for t in pieces)
        assert covered == share * shape.queries * shape.keys
    assert rows == round(sum(shown) / cp / count)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "form", [DROPPED, replace(DROPPED, causal=False, mask=torch.bool), replace(DROPPED, ring=True)]
)
def test_written_out_it_is_priced_by_what_goes_through_memory(form: AttentionForm, backward: bool) -> None:
    """GPT-3 on tp 8: a layer's 50 million scores are processed in three pieces."""
    shape = replace(SHAPE, cp=2, keys=4096) if form.ring else SHAPE
    works = list(attention_works(form, shape, 0, "bf16", DEVICE, "flash", backward))
    fused = list(attention_works(PLAIN, SHAPE, 0, "bf16", DEVICE, "flash", backward))
    assert [w.kind for w in works] == ["matmul"] * (5 if backward else 2) + ["memory"]
    assert all(w.attends for w in (*works, *fused))
    one, scores = passes_of(form)[backward], 12 * 2048 * shape.keys * (5 / 8 if form.ring else 1)
    assert works[-1].nbytes == pytest.approx(one.nbytes * scores)
    assert works[-1].launches == one.launches * (4 if form.ring else 3)
    assert sum(w.flops for w in works) == pytest.approx((5 if backward else 2) * 2 * scores * 128)
    assert {w.dtype for w in works[:-1]} == {"fp32" if form.ring else "bf16"}
    assert sum(op_s(DEVICE, w) for w in works) > 5 * sum(op_s(DEVICE, w) for w in fused)


def test_the_host_hands_out_one_op_whose_kernels_follow() -> None:
    """The host's time for an op of a model, with its modules and autograd, is not spent for each kernel."""
    works = tuple(attention_works(DROPPED, SHAPE, 0, "bf16", DEVICE, "flash"))
    assert work_s(DEVICE, works) == pytest.approx(sum(op_s(DEVICE, w) for w in works))
    assert DEVICE.dispatch_s * sum(w.launches for w in works) > work_s(DEVICE, works)


@pytest.mark.parametrize("form", [PLAIN, DROPPED, replace(PLAIN, mask=torch.bool)])
@pytest.mark.parametrize("ranks", [2, 3, 4, 12])
def test_heads_that_are_cut_are_no_quicker_than_the_bound(form: AttentionForm, ranks: int) -> None:
    def both(heads: int) -> KindWork:
        shape = replace(SHAPE, heads=heads)
        first, second = (tuple(attention_works(form, shape, heads, "bf16", DEVICE, "", turn)) for turn in (False, True))
        return KindWork(first, second)

    cut = both(12 // ranks)
    assert floor_s(both(12), DEVICE, ranks) <= work_s(DEVICE, cut.forward) + work_s(DEVICE, cut.backward)


def test_a_mask_costs_the_rate_of_the_memory_efficient_kernel() -> None:
    def seconds(form: AttentionForm, wish: str) -> float:
        return sum(op_s(DEVICE, w) for w in attention_works(form, SHAPE, 0, "bf16", DEVICE, wish))

    masked = replace(PLAIN, mask=torch.bool)
    assert seconds(masked, "flash") == seconds(PLAIN, "triton") > seconds(PLAIN, "flash")


def test_tiles_of_a_ring_are_put_together_at_a_price() -> None:
    ring = replace(PLAIN, ring=True)
    shape = replace(SHAPE, keys=4 * 2048, cp=4)
    kernel, beside = attention_works(ring, shape, 0, "bf16", DEVICE, "")
    assert (kernel.launches, kernel.n) == (4, 8192)
    assert beside.nbytes == pytest.approx(4 * 12 * (2048 * 13 / 16) * 128 * passes_of(ring)[0].nbytes)


@pytest.mark.parametrize(("heads", "length"), [(4, 256), (8, 192)])
def test_a_piece_takes_the_predicted_memory(heads: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with real tensors: all tensors as large as the scores that are alive at the peak."""
    monkeypatch.setattr("autoptd.ops.dropout._ELEMENTS_AT_ONCE", {})  # as on a GPU
    call = call_of(0.1, heads, length)
    q = torch.randn(1, heads, length, 64, dtype=torch.bfloat16, requires_grad=True)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool)
    with StorageWatch() as forward:
        out = ops.attention(q, q, q, mask, 0.1, True, rng=ops.DropoutKey())
    with StorageWatch() as backward:
        torch.autograd.grad(out, q, torch.ones_like(out))
    for said, seen in zip((workspace(call).forward, workspace(call).backward), (forward, backward), strict=True):
        (stretch,) = said
        assert isinstance(stretch, Chunked) and stretch.max_elements == stretch.shape[0] * ops.SCORES
        measured = sum(s.numel() * d.itemsize for s, d in seen.fullest(set()) if s.numel() >= heads * length**2)
        assert heads * length**2 * stretch.shape[0] == pytest.approx(measured, rel=0.1)
