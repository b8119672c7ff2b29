"""Expert regions of graphs, whatever their ops are called, and parts that only look like one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoptd.cost_models.cluster import Cluster
from autoptd.passes.fold import Folded, fold
from autoptd.passes.normalise.normalise import normalise
from autoptd.passes.opcall import Sizes
from autoptd.passes.sharding.expert_parallel_graph import dispatched
from autoptd.passes.sharding.expert_regions import expert_parameters, expert_regions, experts_of
from autoptd.passes.sharding.expert_rows import ExpertRegion, RowDims
from autoptd.passes.trace.trace import trace
from autoptd.passes.trace.traced import BATCH
from autoptd.search.sharding.tensors import Tensors

E, H, W, S, T = 4, 8, 6, 2, 3  # experts, hidden, width, samples, tokens
Mix = Callable[["Layer", Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """x [s, t, h] and scores [s, t, e] to [s, t, h], by any function of the parameters."""

    def __init__(self, mix: Mix, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.mix, self.gate = mix, nn.Linear(H, E)
        for name, shape in {"up": (E, H, W), "down": (E, W, H), **shapes}.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.mix(self, x, self.gate(x).softmax(-1))).square().mean()


def folded(mix: Mix, **shapes: tuple[int, ...]) -> Folded:
    return fold(normalise(trace(Layer(mix, **shapes), {"x": torch.randn(S, T, H)}, precision="fp32")))


def region(found: Folded) -> ExpertRegion:
    (one,) = [region for segment in found.segments for region in expert_regions(segment)]
    return one


def up(m: Layer, x: Tensor, _: Tensor) -> Tensor:
    return F.silu(torch.einsum("sth,ehw->estw", x, m.up))


def down(m: Layer, y: Tensor) -> Tensor:
    return torch.einsum("estw,ewh->esth", y, m.down)


def weighted(y: Tensor, scores: Tensor) -> Tensor:
    return torch.einsum("esth,ste->sth", y, scores)


def plain(m: Layer, x: Tensor, scores: Tensor) -> Tensor:
    return weighted(down(m, up(m, x, scores)), scores)


def in_batches(m: Layer, x: Tensor, scores: Tensor) -> Tensor:
    """Copy the rows for each expert, and weight the results inside the region."""
    rows = x.reshape(1, -1, H).expand(E, -1, -1)
    y = torch.bmm(F.silu(torch.bmm(rows, m.up)), m.down)
    return (y * scores.flatten(0, 1).t().unsqueeze(-1)).sum(0).view_as(x)


def dropped_out(m: Layer, x: Tensor, scores: Tensor) -> Tensor:
    return weighted(down(m, F.dropout(up(m, x, scores), 0.1)), scores)


def transposed(m: Layer, x: Tensor, scores: Tensor) -> Tensor:
    """Weights of which a view with another order of dims is used, with a shared norm and a bias of each expert."""
    y = torch.einsum("sth,hew->stew", F.layer_norm(x, (H,)), m.up.permute(1, 0, 2)) + m.bias
    y = torch.einsum("stew,ewh->steh", y.tanh() * m.gain, m.down.transpose(1, 2).contiguous().transpose(1, 2))
    return (y * scores.unsqueeze(-1)).sum(2)


def test_dims_of_rows_and_experts() -> None:
    found = region(folded(plain))
    assert found.count == E and found.ends is None
    assert {n.name: str(d) for n, d in found.weights.items()} == {"p_model_up": "0", "p_model_down": "0"}
    assert list(found.reads.values()) == [RowDims(0, None, copied=True)]  # x, which all experts read
    assert {*found.rows.values()} == {RowDims(rows=1, experts=0)}


def test_copies_for_each_expert_are_known() -> None:
    found = region(folded(in_batches))
    assert [*found.reads.values()] == [RowDims(1, 0, copied=True), RowDims(1, 0)]  # rows; scores
    assert {*found.rows.values()} == {RowDims(1, 0)}


def test_experts_may_be_any_dim() -> None:
    found = region(folded(transposed, bias=(E, W), gain=(W,)))
    assert {*found.rows.values()} == {RowDims(rows=0, experts=2)}
    assert {n.name for n in found.weights if n.op == "placeholder"} == {"p_model_up", "p_model_down", "p_model_bias"}


def test_dropout_is_outside() -> None:
    found = region(folded(dropped_out))
    assert not [n for n in found.ops if "dropout" in n.name]
    assert len(found.reads) == 2 and len(found.weights) == 2


def one_layer(m: Layer, x: Tensor, scores: Tensor) -> Tensor:
    return torch.einsum("estw,ste->stw", up(m, x, scores), scores) @ m.down[0]


def heads(m: Layer, x: Tensor, scores: Tensor) -> Tensor:
    """Attention with a projection for each head, which is no mixture."""
    q, k, v = (torch.einsum("sth,ehw->setw", x, w) for w in (m.up, 2 * m.up, 3 * m.up))
    return torch.einsum("setw,ewh->sth", F.scaled_dot_product_attention(q, k, v), m.down)


def read_elsewhere(m: Layer, x: Tensor, scores: Tensor) -> Tensor:
    return plain(m, x, scores) + m.down.mean()


def experts_second(m: Layer, x: Tensor, scores: Tensor) -> Tensor:
    y = torch.einsum("sth,hew->estw", x, m.up).relu()
    return weighted(torch.einsum("estw,weh->esth", y, m.down), scores)


def experts_mixed(m: Layer, x: Tensor, scores: Tensor) -> Tensor:
    """Experts read each other's results."""
    return weighted(down(m, up(m, x, scores).cumsum(0)), scores)


def rows_mixed(m: Layer, x: Tensor, scores: Tensor) -> Tensor:
    """Weights of all experts, but no dim of x or of what is computed from it counts samples alone and experts."""
    return x @ (m.up @ m.down).sum(0)


@pytest.mark.parametrize(
    ("mix", "shapes"),
    [
        (one_layer, {}),
        (heads, {}),
        (read_elsewhere, {}),
        (experts_second, {"up": (H, E, W), "down": (W, E, H)}),
        (experts_mixed, {}),
        (rows_mixed, {}),
    ],
)
def test_what_is_no_region(mix: Mix, shapes: dict[str, tuple[int, ...]]) -> None:
    found = folded(mix, **shapes)
    assert not expert_parameters(found) and experts_of(found) == 1


@pytest.mark.parametrize(
    ("mix", "wanted"),
    [
        (plain, [((S, T, H), True), ((E, S, T, H), False)]),
        (in_batches, [((1, S * T, H), True), ((E, S * T, 1), False), ((E, S * T, H), False)]),
    ],
)
def test_what_is_sent(mix: Mix, wanted: list[tuple[tuple[int, ...], bool]]) -> None:
    """One copy of what all experts read, as a whole to each rank; of other tensors a part to each."""
    found = folded(mix)
    values = {**dict.fromkeys(found.traced.sizes, T), BATCH: S}
    sharding = Tensors(found, Cluster.load("dgx-h100"), 1, values, microbatches=1).solve().sharding
    (segment,) = [s for s in found.segments if expert_regions(s)]
    sent = dispatched(segment, sharding.kinds[segment.kind])
    sizes = Sizes(values, BATCH)
    assert [(tuple(map(sizes, x.shape)), whole) for x, _, whole in sent] == wanted
