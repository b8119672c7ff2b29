"""Every pass of normalise: the graph still computes what the model does, in the form that later passes assume."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autoptd.errors import UnsupportedOp
from autoptd.passes.graph import info, is_getitem
from autoptd.passes.losses.statistics_form import batch_statistics
from autoptd.passes.normalise import normalise as passes
from autoptd.passes.normalise.normalise import FINISH, LOSS, PREPARE, normalise
from autoptd.passes.trace.trace import trace
from autoptd.passes.trace.traced import BATCH, SEQUENCE, Traced
from tests.passes.interpret import assert_unchanged, names_of, normalised

SAMPLES, LENGTH, WIDTH = 6, 5, 8


class Body(nn.Module):
    """`body(self, h [b, s, 8])` between a linear layer and a mean of squares."""

    def __init__(self, body: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.linspace(-1, 1, LENGTH * WIDTH).view(LENGTH, WIDTH))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.first(x)).square().mean()


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(SAMPLES, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)}


def model_of(body: Callable[[nn.Module, Tensor], Tensor]) -> Body:
    torch.manual_seed(0)
    return Body(body).double()


def no_grad(self: nn.Module, h: Tensor) -> Tensor:
    with torch.no_grad():
        scale = h.square().mean(-1, keepdim=True).sqrt() + 1
    return self.second(h / scale)


def same_within_no_grad(self: nn.Module, h: Tensor) -> Tensor:
    """A tensor that an op returns unchanged has its gradient, whoever reads it later."""
    with torch.no_grad():
        scale = h.to(h.dtype).square() + h.contiguous().type_as(h)
        same = h.to(torch.float64)
        copy = h.to(torch.float64, copy=True)
    return h * scale + self.second(same) + self.second(copy)


def no_grad_with_grad_inside(self: nn.Module, h: Tensor) -> Tensor:
    with torch.no_grad():
        a = h.exp()
        with torch.enable_grad():
            a = a * self.second.weight.sum()
        b = a.detach() + h
    return h * b


def autocast_off(self: nn.Module, h: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        freqs = h.double() * 2
    return self.second(freqs)


def no_grad_within_autocast_off(self: nn.Module, h: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        a, filled = h.sin(), torch.zeros_like(h)
        with torch.no_grad():
            b = self.second(a).exp()
            filled[:, 0] = self.second(h)[:, 0]
            with torch.autocast("cpu", enabled=False), torch.enable_grad():
                c = self.second(h).cos()
        a = a * b
    return self.second(a) * filled + c


def relu_(self: nn.Module, h: Tensor) -> Tensor:
    return self.second(h).relu_()


def add_(self: nn.Module, h: Tensor) -> Tensor:
    y = self.second(h)
    y.add_(h, alpha=2).mul_(0.5)
    y += 1
    return y + h


def augmented_on_a_slice(self: nn.Module, h: Tensor) -> Tensor:
    y = self.second(h)
    y[..., :2] += 1
    return y


def masked_fill_(self: nn.Module, h: Tensor) -> Tensor:
    y = self.second(h)
    y.masked_fill_(self.table > 0.5, 0.25)
    return y.sin()


def slice_assignment(self: nn.Module, h: Tensor) -> Tensor:
    y = self.second(h)
    y[:, 0] = 0.5
    y[:, :, 1] = h[:, :, 2]
    return y * h


def write_through_view(self: nn.Module, h: Tensor) -> Tensor:
    y = self.second(h)
    flat = y.view(-1)
    flat.mul_(2)
    return y + h


def order_of_writes(self: nn.Module, h: Tensor) -> Tensor:
    y = self.second(h)
    before = y.exp()
    y.add_(1)
    after = y.exp()
    y.mul_(3)
    return before + after * y


def keeps_dtype_in_place(self: nn.Module, h: Tensor) -> Tensor:
    y = h.float() * 1
    y.add_(h)
    y[..., 0].copy_(h[..., 1])
    return self.second(y.double())


def copied(self: nn.Module, h: Tensor) -> Tensor:
    y = torch.zeros_like(h)
    y.copy_(self.second(h))
    return y


def no_ops(self: nn.Module, h: Tensor) -> Tensor:
    h = h.to(h.dtype).contiguous().clone()[:, :, :][..., 0:].double().view(h.shape).reshape(h.shape)
    h = torch.cat([torch.empty(0, dtype=h.dtype), F.dropout(h, 0.0, True)[0, 0, :0], (h + 0).mul(1).view(-1)])
    return self.second(h.view(-1, LENGTH, WIDTH).expand(-1, -1, -1))


def put_by_mask(self: nn.Module, h: Tensor) -> Tensor:
    h = h.clone()
    h[h.detach().sum(-1) > 0] = self.table[0]
    return self.second(h)


def flattened_linear(self: nn.Module, h: Tensor) -> Tensor:
    flat = torch.addmm(self.second.bias, h.view(-1, WIDTH), self.second.weight)
    return flat.view(*h.shape[:-1], WIDTH)


def plain_mm(self: nn.Module, h: Tensor) -> Tensor:
    return torch.mm(h.flatten(0, 1), self.second.weight).unflatten(0, h.shape[:2])


def equal_split(self: nn.Module, h: Tensor) -> Tensor:
    a, b = h.split(WIDTH // 2, dim=-1)
    c, d = self.second(h).split([4, 4], dim=2)
    return a * d + b * c


def unequal_split(self: nn.Module, h: Tensor) -> Tensor:
    a, b = h.split([3, 5], dim=-1)
    return torch.cat((b, a), -1) * h


def views(self: nn.Module, h: Tensor) -> Tensor:
    y = h.flatten(0, 1).unflatten(1, (2, 4)).view(h.shape[0], h.shape[1], 2, 2, 2).view(*h.shape[:2], -1)
    return torch.broadcast_to(self.second(y).view_as(h).expand_as(h)[:, :1], h.shape)


def repeated(self: nn.Module, h: Tensor) -> Tensor:
    total = h
    for _ in range(3):
        positions = torch.arange(h.shape[1], dtype=torch.float64)
        total = total + positions.cos()[None, :, None] * self.second(h)
    return total


def tiled(self: nn.Module, h: Tensor) -> Tensor:
    positions = torch.tile(torch.arange(h.shape[1], dtype=h.dtype), [h.shape[0], 1])
    return h * positions.unsqueeze(-1) + torch.tile(self.second(h)[:, :1], (h.shape[1], 1))


def loss_of_each_label(self: nn.Module, h: Tensor) -> Tensor:
    """torch's second trace, for the tensor of a size, takes the loss for a mean."""
    z = self.second(h).flatten(0, 1)
    loss = F.cross_entropy(z, z.detach().argmax(-1), reduction="none")
    return loss.view(h.shape[:2]) / torch.tensor(h.shape[1]).clamp(min=2)


def half_sizes(self: nn.Module, h: Tensor) -> Tensor:
    keep = h.size(1) // 2 + 1
    return self.second(h[:, :keep]) * (h.shape[0] / h.shape[0])


@dataclass(frozen=True)
class Case:
    """A body; ops that must be gone, and ops that must be there."""

    body: Callable[[nn.Module, Tensor], Tensor]
    gone: str = ""
    there: str = ""


CASES = [
    Case(no_grad, "wrap_with_set_grad_enabled", "detach sqrt"),
    Case(no_grad_with_grad_inside, "wrap_with_set_grad_enabled"),
    Case(same_within_no_grad, "wrap_with_set_grad_enabled"),
    Case(autocast_off, "wrap_with_autocast to _to_copy"),
    Case(relu_, "relu_", "relu"),
    Case(add_, "add_ mul_", "add mul"),
    Case(augmented_on_a_slice, "add_ copy_"),
    Case(masked_fill_, "masked_fill_", "masked_fill"),
    Case(slice_assignment, "fill_ copy_"),
    Case(write_through_view, "mul_ view"),
    Case(order_of_writes, "add_ mul_"),
    Case(keeps_dtype_in_place, "add_ copy_"),
    Case(copied, "copy_"),
    Case(no_ops, "contiguous clone slice view cat dropout alias add to expand"),
    Case(put_by_mask, "index_put", "where"),
    Case(flattened_linear, "addmm view", "linear t"),
    Case(plain_mm, "mm flatten unflatten", "linear t"),
    Case(equal_split, "split split_with_sizes", "chunk"),
    Case(unequal_split, "chunk"),
    Case(views, "flatten unflatten view view_as expand_as broadcast_to"),
    Case(repeated, "", "arange"),
    Case(tiled, "tile", "repeat"),
    Case(loss_of_each_label),
    Case(half_sizes),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.body.__name__)
def test_value_and_gradient_stay(case: Case) -> None:
    traced = assert_unchanged(model_of(case.body), batch())
    ops = names_of(traced)
    assert not set(case.gone.split()) & set(ops), ops
    assert set(case.there.split()) <= set(ops), ops


@pytest.mark.fault("no_grad within autocast")
def test_no_grad_within_disabled_autocast() -> None:
    assert_unchanged(model_of(no_grad_within_autocast_off), batch())


def test_passes_are_named_and_described() -> None:
    steps = [*PREPARE, *LOSS, *FINISH]
    assert len({step.__name__ for step in steps}) >= len(steps) - 2
    assert all(step.__doc__ for step in steps)


def test_the_graph_is_checked_after_each_pass_in_tests_and_else_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def swap_reader_and_source(graph: fx.Graph, traced: Traced) -> None:
        reader = next(n for n in graph.nodes if n.op == "call_function")
        reader.append(next(iter(graph.nodes)))

    def note(graph: fx.Graph, traced: Traced) -> None:
        ran.append(graph)

    monkeypatch.setattr(passes, "FINISH", [*FINISH, swap_reader_and_source, note])
    traced = trace(model_of(relu_), batch(), precision="fp64")
    with pytest.raises(RuntimeError, match="used before it has been defined"):
        normalise(traced, check_each=True)
    assert not ran
    traced = trace(model_of(relu_), batch(), precision="fp64")
    with pytest.raises(RuntimeError, match="used before it has been defined"):
        normalise(traced)
    assert ran


def test_repeated_work_without_gradient_is_done_once() -> None:
    ops = names_of(normalised(model_of(repeated), batch()))
    assert (ops.count("arange"), ops.count("cos"), ops.count("linear")) == (1, 1, 4)


def test_nothing_is_left_that_does_not_reach_the_loss() -> None:
    def body(self: nn.Module, h: Tensor) -> Tensor:
        F.dropout(self.second(h).softmax(-1), 0.5)
        torch._assert(h.shape[-1] == WIDTH, "width")
        return h

    traced = normalised(model_of(body), batch())
    assert names_of(traced).count("linear") == 1 and "dropout" not in names_of(traced)
    assert not [n for n in names_of(traced) if "assert" in n]


def test_sizes_are_expressions_of_b_and_s() -> None:
    traced = normalised(model_of(views), batch())
    shapes = [info(n).shape for n in traced.graph.graph.nodes if n.op == "call_function" and not is_getitem(n)]
    assert (BATCH, SEQUENCE, WIDTH) in shapes and (BATCH * SEQUENCE, 2, 4) not in [s for s in shapes if SEQUENCE in s]
    assert all("SymInt" not in type(a).__name__ for n in traced.graph.graph.nodes for a in n.args)


def test_gradient_flows_from_trainable_parameters_only() -> None:
    model = model_of(no_grad)
    model.first.weight.requires_grad_(False)
    model.first.bias.requires_grad_(False)
    traced = normalised(model, batch())
    grads = {n.name: info(n).requires_grad for n in traced.graph.graph.nodes if n.op == "call_function"}
    assert not grads["linear"] and grads["linear_1"]
    assert traced.frozen == {"first.weight", "first.bias"}


class Dropout(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(self.linear(x))
        y[:, 0] = 0  # functionalisation writes dropout as native_dropout
        return y.mean()


@pytest.mark.parametrize(("p", "count"), [(0.0, 0), (0.1, 1)])
def test_dropout_stays_dropout(p: float, count: int) -> None:
    ops = names_of(normalised(Dropout(p).double(), batch()))
    assert ops.count("dropout") == count and "native_dropout" not in ops


# ---- refusals and the places they name ----


class Norm(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(LENGTH, **options))
        self.head = nn.Linear(WIDTH, WIDTH)  # a norm right before the loss would be computed once per step

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x)).square().mean()


def test_batch_norm_is_two_sums_over_the_batch() -> None:
    traced = normalised(Norm().double(), batch())
    assert names_of(traced).count("sum_over_batch") == 2 and "batch_norm" not in names_of(traced)
    statistics = batch_statistics(traced.graph)
    assert (statistics.op, statistics.evaluation) == ("batch_norm", "running") and "encoder.1 (" in statistics.where
    assert batch_statistics(normalised(Norm(track_running_stats=False).double(), batch()).graph).evaluation == "batch"


def refused(body: Callable[[nn.Module, Tensor], Tensor]) -> str:
    with pytest.raises(UnsupportedOp) as error:
        normalised(model_of(body), batch())
    return str(error.value)


@pytest.mark.fault("one draw for ever")
@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (random.random, "Python's random module"),
        (lambda: random.choice([1, 2, 3]), "Python's random module"),
        (np.random.rand, "numpy.random"),
    ],
)
def test_numbers_drawn_outside_torch_are_refused(draw: Callable[[], float], name: str) -> None:
    """The trace holds one draw, and every step would reuse it."""
    assert f"draws random numbers with {name}" in refused(lambda self, h: h * float(draw()))
    normalised(model_of(lambda self, h: h * random.Random(3).random()), batch())  # the same on one process


class Counting(nn.Module):
    """Numbers of its own: `passes` increases, `seen` is set once."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.layer, self.counts, self.passes, self.seen = nn.Linear(4, 4), counts, 0, 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.passes += self.counts
        self.seen = max(self.seen, 4)
        return ((self.layer(x) * 0.5**self.passes - y) ** 2).mean()


@pytest.mark.fault("one draw for ever")
def test_a_number_that_every_pass_changes_is_refused() -> None:
    inputs = {"x": torch.randn(4, 4), "y": torch.randn(4, 4)}
    normalised(Counting(False), inputs)
    with pytest.raises(UnsupportedOp, match="forward changes passes, a Python value, in every pass"):
        normalised(Counting(True), inputs)


def test_random_numbers_of_no_fixed_number_of_draws_are_refused() -> None:
    """A Poisson number takes as many fractions as it is large."""
    text = refused(lambda self, h: h + torch.poisson(h.exp()))
    assert (
        "aten.poisson.default draws random numbers" in text
        and "model (test_normalise.py:" in text
        and "self.body(self" in text
    )


def test_writing_to_a_parameter_is_refused() -> None:
    def body(self: nn.Module, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.second.weight.add_(1.0)
        return self.second(h)

    assert "aten.add_.Tensor writes to second.weight" in refused(body)


def copied_over(self: nn.Module, h: Tensor) -> Tensor:
    y = self.second(h).sin()
    y.copy_(h)
    return y


def assigned_as_a_whole(self: nn.Module, h: Tensor) -> Tensor:
    y = self.second(h).sin()
    y[:] = h
    return y


def joined_with_nothing(self: nn.Module, h: Tensor) -> Tensor:
    return torch.cat([h, self.second(h)[:, :0]], 1)


@pytest.mark.parametrize("body", [copied_over, assigned_as_a_whole, joined_with_nothing])
def test_parameters_that_only_dropped_values_read_are_refused(body: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """They have gradients of zeros in one process, and weight decay changes them."""
    model = model_of(body)
    model(**batch()).backward()
    assert model.second.weight.grad is not None and not model.second.weight.grad.any()
    assert "what is computed from second.bias, second.weight is overwritten as a whole, or empty" in refused(body)


def test_autocast_inside_is_refused() -> None:
    def body(self: nn.Module, h: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.second(h).double()

    assert "precision=" in refused(body)


def test_a_branch_on_data_as_an_operator_is_refused() -> None:
    def body(self: nn.Module, h: Tensor) -> Tensor:
        return torch.cond(h.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (h,))

    assert "torch.where" in refused(body)


def test_normalising_is_deterministic() -> None:
    texts = {str(normalise(trace(model_of(views), batch(), precision="fp64")).graph.graph) for _ in range(2)}
    assert len(texts) == 1


class Skipping(nn.Module):
    """Layers that are skipped at random (LayerDrop), or replaced by others."""

    def __init__(self, rate: float, others: bool = False) -> None:
        super().__init__()
        self.layers, self.rate = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), rate
        self.other = nn.Linear(WIDTH, WIDTH) if others else None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not (self.training and torch.rand([]) < self.rate):
                x = x + layer(x)
            elif self.other is not None:
                x = self.other(x)
        return x.square().mean()


def test_layers_skipped_at_random_are_selected() -> None:
    for rate, chosen in ((0.0, 0), (0.1, 3)):
        found = normalised(Skipping(rate).double(), batch())
        assert names_of(found).count("where") == names_of(found).count("dropout_mask") == chosen


class Comparing(Skipping):
    """Layers that are skipped by another way to compare, of one number in a list too."""

    def __init__(self, rate: float, skips: Callable[[float], Tensor]) -> None:
        super().__init__(rate)
        self.skips = skips

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.skips(self.rate):
                continue
            x = x + layer(x)
        return x.square().mean()


@pytest.mark.parametrize(
    ("skips", "kept"),
    [
        (lambda p: torch.rand(()) <= p, 3),
        (lambda p: not torch.rand(()) > p, 3),
        (lambda p: not torch.rand(1) > p, 0),
        (lambda p: torch.rand(()) >= p, 0),
        (lambda p: not torch.rand(()) <= p, 0),
    ],
)
def test_layers_are_skipped_at_their_rate(skips: Callable[[float], Tensor], kept: int) -> None:
    """A layer that is kept, not skipped, at a rate is refused: its mask would have the rate of the other."""
    model = Comparing(0.1, skips).double()
    if kept:
        assert names_of(normalised(model, batch())).count("dropout_mask") == kept
        return
    with pytest.raises(UnsupportedOp, match="a branch depends on a drawn number"):
        normalised(model, batch())


@pytest.mark.parametrize("skips", [lambda p: not torch.rand(1) > p, lambda p: torch.rand(()) < p])
def test_no_layer_is_skipped_at_a_rate_of_0(skips: Callable[[float], Tensor]) -> None:
    assert names_of(normalised(Comparing(0.0, skips).double(), batch())).count("linear") == 3


def test_a_drawn_branch_that_does_more_is_refused_with_a_way_out() -> None:
    with pytest.raises(UnsupportedOp, match="a branch depends on a drawn number") as error:
        normalised(Skipping(0.1, others=True).double(), batch())
    assert "(test_normalise.py:" in str(error.value) and "layerdrop" in error.value.fix


def test_what_distributions_check_is_not_traced() -> None:
    normalised(model_of(lambda self, h: torch.distributions.Normal(h, h.exp()).rsample()), batch())


def test_orders_of_samples_are_refused() -> None:
    assert "in the order of randperm" in refused(lambda self, h: h + h[torch.randperm(h.shape[0])])
