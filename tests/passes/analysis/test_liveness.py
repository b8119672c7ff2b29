"""Memory peaks of a block, by hand and against a run that counts the bytes alive after every op."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import fx, nn

from autoptd.ops import library as ops
from autoptd.passes.analysis.activations import nbytes, saved_activations
from autoptd.passes.analysis.liveness import Peak, Walk, stage_peak, walk
from autoptd.passes.analysis.storages import StorageWatch
from autoptd.passes.analysis.workspace import workspace
from autoptd.passes.fold import Folded, Segment, fold
from autoptd.passes.normalise.normalise import normalise
from autoptd.passes.opcall import OpCall, Size, TensorInfo
from autoptd.passes.sharding.sharding import KindSharding
from autoptd.passes.trace.trace import trace
from autoptd.passes.trace.traced import BATCH as b
from autoptd.passes.trace.traced import SEQUENCE as s
from tests.passes.gpt_layer import A, H, V, block, solved, traced

aten = torch.ops.aten
TOKENS, LENGTH = 2 * 256, 256


def number(n: Size) -> int:
    return n if isinstance(n, int) else int(n.subs({b: 2, s: LENGTH}))


@cache
def layer(fused: bool, tp: int = 1) -> tuple[Folded, dict[str, KindSharding]]:
    folded = traced(fused, p=0.0)
    return folded, dict(solved(folded, tp)[1].sharding.kinds)


def walked(segments: Sequence[Segment], kinds: dict[str, KindSharding], policy: str = "none") -> tuple[Walk, Peak]:
    found = walk(segments, kinds, policy)
    return found, found.peak(number, 1)


def test_mlp_by_hand() -> None:
    folded, kinds = layer(True)
    _, peak = walked([block(folded)[1]], kinds)
    sbh = TOKENS * H
    statistics = 2 * 4 * TOKENS
    assert peak.kept == 2 * sbh + statistics + 2 * sbh + 8 * sbh + 8 * sbh
    # at the addition: everything saved, the projection's result and the sum
    assert peak.forward == peak.kept + 2 * sbh + 2 * sbh
    # at the second projection: everything saved, the gradient of the sum, that of 4 h, and the weight's
    assert peak.backward == peak.kept + 2 * sbh + 8 * sbh + 2 * 4 * H * H + 2 * H


def test_logits_are_the_peak_of_the_head() -> None:
    folded, kinds = layer(True)
    found, peak = walked([folded.segments[-1]], kinds)
    where, text = found.fullest(number, 1)
    assert where == "backward of cross_entropy"
    logits = TOKENS * V
    # saved in float32: log-probabilities; temporary: their gradient, the logits' gradient in float32 and in bf16
    assert peak.backward == pytest.approx(4 * logits + 4 * logits + 4 * logits + 2 * logits, rel=0.12)
    assert peak.backward == text.subs({b: 2, s: LENGTH})


class Head(nn.Module):
    """Few features, many classes: only the logits matter."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.table, self.head, self.wide = nn.Embedding(96, 16), nn.Linear(16, 96, bias=False), wide

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.table(ids))
        return F.cross_entropy((logits.float() if self.wide else logits).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("wide", [False, True])
def test_a_loss_in_place_makes_no_float32_gradient(wide: bool) -> None:
    with torch.device("meta"):
        model = Head(wide)
    batch = {n: torch.empty(2, 40, dtype=torch.long, device="meta") for n in ("ids", "labels")}
    folded = fold(normalise(trace(model, batch, precision="bf16")))
    kinds = dict(solved(folded, 1)[1].sharding.kinds)
    eager, in_place = (walk(folded.segments, kinds, in_place_loss=written) for written in (False, True))
    logits, features, scalar = TOKENS * 96, 2 * TOKENS * 16, 4 if wide else 2
    kept = features + 4 * logits  # log-probabilities in float32
    assert eager.peak(number, 1).kept == in_place.peak(number, 1).kept == kept
    at = {
        e: dict(w.backward.moments())["backward of cross_entropy"]
        for e, w in (("eager", eager), ("in place", in_place))
    }
    found = {name: sum(s.nbytes(number, 1) for s in alive) for name, alive in at.items()}
    # eager: gradients of log-probabilities and of the logits, both float32, and the output in the logits' own dtype
    leaves = 0 if wide else 2 * logits
    assert found["eager"] == kept + scalar + 2 * 4 * logits + leaves == eager.peak(number, 1).backward
    # in place: the saved tensor becomes the gradient
    assert found["in place"] == kept + scalar + leaves
    # the peak then is the gradient in bf16 beside the one in float32
    assert in_place.peak(number, 1).backward == kept + 2 * logits + (0 if wide else scalar)


@pytest.mark.parametrize("policy", ["none", "selective", "ops", "full"])
def test_what_is_kept_is_what_activations_say(policy: str) -> None:
    folded, kinds = layer(False)
    _, peak = walked(block(folded), kinds, policy)
    assert peak.kept == nbytes(saved_activations(block(folded), kinds, policy), number, 1)
    _, whole = walked(block(folded), kinds)
    assert peak.kept <= whole.kept and peak.temporary >= whole.temporary
    assert max(peak.forward, peak.backward) <= max(whole.forward, whole.backward) + whole.kept
    if policy != "selective":  # everything is recomputed before the block's backward pass begins
        assert peak.backward >= whole.backward


@pytest.mark.parametrize(("which", "copies"), [([0], 2 * TOKENS * H), ([1], 0), ([0, 1], 0)])
def test_a_run_is_as_full(which: list[int], copies: int) -> None:
    """Run forward and backward of the segments op by op on meta tensors, counting the storages alive after each."""
    folded, kinds = layer(False)
    segments = [block(folded)[i] for i in which]
    _, peak = walked(segments, kinds)
    forward, backward = run(segments)  # attention's matmuls copy their transposed operands there
    assert peak.forward == forward - 2 * copies
    assert peak.backward == backward


def run(segments: Sequence[Segment]) -> tuple[int, int]:
    """Return the peak bytes of the forward and of the backward pass, less parameters and prelude."""
    env: dict[fx.Node, torch.Tensor] = {}
    received: list[torch.Tensor] = []
    for segment in segments:
        for node in (*segment.parameters, *segment.prelude, *segment.receives):
            inside = {n for other in segments for n in other.nodes}
            if node not in env and node not in inside:
                info = node.meta["info"]
                env[node] = torch.empty([number(n) for n in info.shape], dtype=info.dtype, device="meta")
                env[node].requires_grad_(info.requires_grad)
                if node in segment.receives:
                    received.append(env[node])
    own = sum(x.nbytes for x in received)
    outside = {x.untyped_storage()._cdata for x in env.values()}  # views of them take no memory
    keep = list(env.values())

    def put(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [put(v) for v in value]
        return env[value] if isinstance(value, fx.Node) else number(value) if isinstance(value, sympy.Expr) else value

    order = [n for segment in segments for n in segment.nodes]
    last = {o: i for i, n in enumerate(order) for o in n.all_input_nodes}
    with StorageWatch() as forward:
        for i, node in enumerate(order):
            env[node] = node.target(*put(node.args), **{k: put(v) for k, v in node.kwargs.items()})  # type: ignore[operator]
            for read in node.all_input_nodes:
                if last[read] == i and read in order:
                    del env[read]
    result = env[order[-1]]
    incoming = torch.empty_like(result)
    for leaf in [x for x in env.values() if x.is_leaf and x.requires_grad]:
        if all(leaf is not x for x in received):
            leaf.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    env.clear()
    with StorageWatch(forward) as backward:
        result.backward(incoming)
    assert keep
    first = size(forward.fullest(outside))
    outside |= {x.untyped_storage()._cdata for x in (result, incoming)}  # alive only because this function holds them
    return own + first, own + size(backward.fullest(outside)) + incoming.nbytes


def size(storages: Sequence[tuple[torch.Size, torch.dtype]]) -> int:
    return sum(shape.numel() * dtype.itemsize for shape, dtype in storages)


def test_a_stage_turns_at_its_last_block() -> None:
    parts = [Peak(10, 14, 17), Peak(10, 12, 30), Peak(2, 3, 4)]
    assert stage_peak(parts, 1) == 10 + 30
    assert stage_peak(parts, 4) == 3 * 22 + 40
    assert stage_peak([], 2) == 0


def test_cross_entropy_needs_copies_of_its_logits() -> None:
    logits = TensorInfo((b, s, 64), torch.bfloat16, True)
    labels = TensorInfo((b, s), torch.int64, False)
    found = workspace(OpCall(ops.cross_entropy, (logits, labels), {}, (TensorInfo((), torch.float32, True),)))
    wide = [t for t in found.forward if t.shape == (b * s, 64) or t.shape == (b, s, 64)]
    assert [t.dtype for t in wide] == [torch.float32]  # the copy; the log-probabilities are saved
    assert sum(t.dtype is torch.float32 and t.shape in ((b * s, 64), (b, s, 64)) for t in found.backward) == 2


def test_a_product_needs_nothing_of_its_own() -> None:
    x, w = TensorInfo((b, s, 64), torch.bfloat16, True), TensorInfo((128, 64), torch.bfloat16, True)
    found = workspace(OpCall(aten.linear.default, (x, w), {}, (TensorInfo((b, s, 128), torch.bfloat16, True),)))
    assert found.forward == found.backward == ()


def test_attention_accumulates_its_query_gradient() -> None:
    q = TensorInfo((b, A, s, 52), torch.bfloat16, True)
    call = OpCall(aten.scaled_dot_product_attention.default, (q, q, q), {}, (q,))
    shapes = [(t.shape, t.dtype) for t in workspace(call).backward]
    assert shapes == [((b, A, s, 52), torch.float32), ((b, A, s), torch.float32)]
