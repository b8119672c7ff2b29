"""Tracing: any form of inputs and outputs, the user's model unchanged, and refusals that name the place."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoptd.errors import AutoptdError, InputsError, TraceError, UnsupportedOp
from autoptd.passes.graph import info
from autoptd.passes.trace.trace import trace
from autoptd.passes.trace.traced import BATCH, SEQUENCE, Traced, canonical_names
from tests.passes.interpret import assert_unchanged, names_of, normalised

VOCABULARY, WIDTH = 11, 4


class Tiny(nn.Module):
    """Tied embedding and head, dropout, a buffer of each kind, a frozen and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.inner.bias.requires_grad_(False)
        self.spare = nn.Parameter(torch.ones(2))
        self.register_buffer("kept", torch.ones(WIDTH))
        self.register_buffer("passing", torch.full((WIDTH,), 2.0), persistent=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.inner(self.embed(input_ids)) * self.kept + self.passing
        logits = self.head(h)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"logits": logits, "cache": h, "loss": loss}


def ids(samples: int = 6, length: int = 5) -> Tensor:
    return torch.randint(0, VOCABULARY, (samples, length), generator=torch.Generator().manual_seed(3))


def test_labels_may_be_the_input_ids_object() -> None:
    torch.manual_seed(0)
    same = ids()
    traced = assert_unchanged(Tiny().double(), {"input_ids": same, "labels": same})
    assert sorted(traced.inputs.values()) == ["input_ids", "labels"]


def test_everything_but_the_loss_is_dropped() -> None:
    traced = normalised(Tiny().double(), {"input_ids": ids(), "labels": ids()})
    output = next(n for n in traced.graph.graph.nodes if n.op == "output")
    assert [info(n).shape for n in output.args] == [(), ()]


def test_names_of_parameters_and_buffers() -> None:
    traced = trace(Tiny(), {"input_ids": ids(), "labels": ids()})
    assert set(traced.parameters.values()) == {"embed.weight", "inner.weight", "inner.bias", "spare"}
    assert traced.aliases == {"head.weight": "embed.weight"}
    assert traced.frozen == {"inner.bias"}
    assert set(traced.buffers.values()) == {"kept", "passing"}
    assert traced.transient == {"passing"}
    assert canonical_names(Tiny())["head.weight"] == "embed.weight"


def test_sizes_are_named() -> None:
    traced = trace(Tiny(), {"input_ids": ids(), "labels": ids()})
    assert traced.sizes == {BATCH: ("input_ids", 0), SEQUENCE: ("input_ids", 1)}
    assert traced.example == {BATCH: 6, SEQUENCE: 5}


def test_one_sample_is_not_baked_in() -> None:
    traced = trace(Tiny(), {"input_ids": ids(1), "labels": ids(1)})
    assert BATCH in traced.sizes


def snapshot(model: nn.Module) -> dict[str, object]:
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    state: dict[str, object] = {n: (id(x), x.dtype, x.device, x._version, x.requires_grad) for n, x in tensors.items()}
    state |= {f"{n} grad": None if p.grad is None else (id(p.grad), p.grad.sum()) for n, p in model.named_parameters()}
    return state | {f"{n} mode": m.training for n, m in model.named_modules()} | {"names": list(vars(model))}


def test_the_model_is_left_alone() -> None:
    torch.manual_seed(0)
    model = Tiny().eval()
    model.inner.train()
    model(ids(), ids())["loss"].backward()
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    before, random = snapshot(model), torch.get_rng_state()
    normalised(model, {"input_ids": ids(), "labels": ids()})
    assert snapshot(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    for name, p in model.named_parameters():
        assert torch.equal(p, values[name])


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32), ("fp64", torch.float64)],
)
def test_precision_is_that_of_the_parameters(device: str, precision: str, dtype: torch.dtype) -> None:
    with torch.device(device):
        model = Tiny()
    traced = trace(model, {"input_ids": ids(), "labels": ids()}, precision=precision)
    nodes = {n.name: n.meta["val"] for n in traced.graph.graph.nodes if n.op != "output"}
    assert {nodes[p].dtype for p in traced.parameters} == {dtype}
    assert nodes["linear"].dtype == dtype
    assert {type(x).__name__ for x in nodes.values() if isinstance(x, Tensor)} == {"FakeTensor"}


def test_a_meta_model_has_no_values_of_buffers() -> None:
    with torch.device("meta"):
        model = Tiny()
    assert trace(model, {"input_ids": ids(), "labels": ids()}).constants == {}


class Closes(nn.Module):
    """A closed-over tensor, neither parameter nor buffer, is stored with its value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = torch.arange(WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.scale).square().mean()


def test_closed_over_tensors_keep_their_value() -> None:
    torch.manual_seed(0)
    traced = assert_unchanged(Closes().double(), {"x": torch.randn(6, 5, WIDTH, dtype=torch.float64)})
    (value,) = traced.constants.values()
    assert value.tolist() == [0, 1, 2, 3]


# ---- refusals ----


class Router(nn.Module):
    def __init__(self, route: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.route = route

    def forward(self, x: Tensor) -> Tensor:
        mask = self.gate(x) > 0
        idx = mask.nonzero() if self.route is nonzero else self.route(mask)
        return idx.sum() * self.gate(x).mean()


class Decoder(nn.Module):
    def __init__(self, route: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.router = Router(route)

    def forward(self, x: Tensor) -> Tensor:
        return self.router(x)


class Model(nn.Module):
    def __init__(self, route: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.decoder = Decoder(route)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x)


def nonzero(mask: Tensor) -> Tensor:
    raise AssertionError


def branch_on_item(mask: Tensor) -> Tensor:
    if mask.sum().item() > 3:
        return mask
    return ~mask


def branch_on_tensor(mask: Tensor) -> Tensor:
    return mask if mask.any() else ~mask


def slice_by_item(mask: Tensor) -> Tensor:
    return mask[: mask.sum().item()]


def indices_in_a_list(mask: Tensor) -> Tensor:
    return mask[tuple(mask.long().argmax(-1)), :]


def line_of(text: str) -> int:
    lines, first = inspect.getsourcelines(Router)
    return first + next(i for i, line in enumerate(lines) if text in line)


def refusal(model: nn.Module, **inputs: Tensor) -> AutoptdError:
    with pytest.raises(UnsupportedOp) as error:
        normalised(model, inputs)
    return error.value


def test_nonzero_is_refused_with_module_path_and_line() -> None:
    text = str(refusal(Model(nonzero), x=torch.ones(6, WIDTH)))
    line = line_of("idx = mask.nonzero()")
    assert f"where  decoder.router (test_trace.py:{line})  idx = mask.nonzero()" in text
    assert "aten.nonzero.default has a size that depends on data" in text


def bincount(x: Tensor) -> Tensor:
    return x * torch.bincount(x.argmax(-1), minlength=4).sum()


def test_a_count_of_values_has_a_way_out() -> None:
    text = str(refusal(Model(bincount), x=torch.ones(6, WIDTH)))
    assert "aten.bincount.default has a size that depends on data" in text and "F.one_hot(x, n).sum(0)" in text


class Weighted(nn.Module):
    """A loss whose classes weigh as much as there are few of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layer(x), y, weight=1 / (1 + torch.bincount(y, minlength=WIDTH)))


def test_weights_of_counted_values_have_a_way_out() -> None:
    text = str(refusal(Weighted(), x=torch.randn(6, WIDTH), y=torch.arange(6) % WIDTH))
    assert "F.one_hot(labels, n).sum(0)" in text


def test_a_tensor_made_under_inference_mode_has_a_way_out() -> None:
    with torch.inference_mode():
        made = torch.ones(WIDTH)
    text = str(refusal(Model(lambda x: x * made), x=torch.ones(6, WIDTH)))
    assert "torch.inference_mode(), which cannot be traced" in text and "torch.no_grad()" in text


@pytest.mark.parametrize("route", [branch_on_item, branch_on_tensor, slice_by_item, indices_in_a_list])
def test_data_dependence_is_refused_with_its_place(route: Callable[[Tensor], Tensor]) -> None:
    text = str(refusal(Model(route), x=torch.ones(6, WIDTH)))
    assert "where  decoder.router (test_trace.py:" in text
    says = "read from a tensor's data" if route in (slice_by_item, indices_in_a_list) else "depends on"
    assert says in text and "fix    " in text


class Baked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.view(6, WIDTH)).mean()


def test_a_baked_batch_size_is_refused() -> None:
    with pytest.raises(TraceError, match="bakes the batch size 6 of input 'x' into its graph"):
        trace(Baked(), {"x": torch.ones(6, WIDTH)})


class Groups(Baked):
    """Samples in groups of two, as answers to one question."""

    def forward(self, x: Tensor, rewards: Tensor) -> Tensor:
        groups = rewards.view(-1, 2)
        return (self.linear(x).mean(1) * (groups - groups.mean(1, keepdim=True)).view(-1)).mean()


def test_an_example_may_be_one_group_of_samples() -> None:
    assert trace(Groups(), {"x": torch.ones(2, WIDTH), "rewards": torch.ones(2)}).sizes


class Counted(Baked):
    def forward(self, x: Tensor) -> Tensor:
        steps = torch.tensor([0.5 * i for i in range(x.shape[0])])
        return (self.linear(x) + steps[:, None]).mean()


def test_the_line_that_makes_a_number_of_the_batch_size_is_named() -> None:
    with pytest.raises(TraceError) as raised:
        trace(Counted(), {"x": torch.ones(6, WIDTH)})
    assert "steps = torch.tensor([0.5 * i for i in range(x.shape[0])])" in raised.value.where


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.cat((x, x), -1)).mean()


def test_a_model_that_does_not_run_says_where() -> None:
    with pytest.raises(TraceError) as error:
        trace(Broken(), {"x": torch.ones(6, WIDTH)})
    assert "cannot be traced" in str(error.value) and "self.linear(torch.cat((x, x), -1))" in str(error.value)


@pytest.mark.parametrize("inputs", [{}, {"x": 3}, {"x": torch.ones(())}])
def test_unfit_inputs_are_refused(inputs: dict[str, Tensor]) -> None:
    with pytest.raises(InputsError):
        trace(Baked(), inputs)


def test_tracing_twice_gives_the_same_graph() -> None:
    def text(traced: Traced) -> str:
        return f"{traced.graph.graph}{names_of(traced)}"

    batch = {"input_ids": ids(), "labels": ids()}
    assert text(normalised(Tiny(), batch)) == text(normalised(Tiny(), batch))


class Picture(nn.Module):
    """Patches of 4 × 4 of tables [b, h, w], or of pictures [b, 1, h, w].

    With `fitted`, six patches have a position each, and any other number shares one position.
    """

    def __init__(self, fitted: bool) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, 4, stride=4)
        self.positions, self.others = nn.Parameter(torch.ones(1, 6, WIDTH)), nn.Parameter(torch.ones(1, 1, WIDTH))
        self.fitted = fitted

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patches(pixels[:, None] if pixels.ndim == 3 else pixels)
        x = x.flatten(2).transpose(1, 2)
        known = self.fitted and x.shape[1] == self.positions.shape[1]
        return (x + (self.positions if known else self.others)).square().mean()


@pytest.mark.parametrize(("fitted", "free"), [(True, set()), (False, {("pixels", 1), ("pixels", 2)})])
def test_sizes_that_a_branch_ties_to_a_number_are_that_number(fitted: bool, free: set[tuple[str, int]]) -> None:
    """(h // 4) (w // 4) = 6 for 8 × 12: a graph with symbolic h and w would run at no other sizes."""
    traced = trace(Picture(fitted), {"pixels": torch.empty(2, 8, 12)})
    assert {at for symbol, at in traced.sizes.items() if symbol != BATCH} == free


def test_pictures_have_the_size_of_the_example() -> None:
    traced = trace(Picture(fitted=False), {"pixels": torch.empty(2, 1, 8, 12)})
    assert set(traced.sizes) == {BATCH}


class Segments(nn.Module):
    """A class for every pixel, after halving and doubling the picture."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 4, 2, stride=2), nn.ConvTranspose2d(4, 5, 2, stride=2)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.up(self.down(x)), labels)


def test_labels_of_pixels_have_the_size_of_the_picture() -> None:
    labels = torch.empty(2, 8, 12, dtype=torch.int64)
    assert set(trace(Segments(), {"x": torch.empty(2, 3, 8, 12), "labels": labels}).sizes) == {BATCH}


class Bounded(nn.Module):
    """Weights for up to eight tokens, in whole pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        pairs = x.shape[1] % 2 == 0 and min(x.shape[1], 8) == x.shape[1]
        return ((x if pairs else -x) * self.weights[: x.shape[1]]).square().mean()


def test_sizes_that_are_bounded_stay_free() -> None:
    assert SEQUENCE in trace(Bounded(), {"x": torch.empty(2, 6)}).sizes


class InBlocks(nn.Module):
    """A loop over blocks of 8 tokens; the labels' tokens are only known to be as many in all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, WIDTH)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        blocks = [x[:, 8 * i : min(8 * i + 8, x.shape[1])] for i in range((x.shape[1] + 7) // 8)]
        return F.cross_entropy(torch.cat(blocks, 1).flatten(0, 1), labels.flatten())


def test_a_size_that_a_loop_ties_is_that_of_every_input() -> None:
    both = {name: torch.ones(2, 16, dtype=torch.int64) for name in ("ids", "labels")}
    assert set(trace(InBlocks(), both).sizes) == {BATCH}


@pytest.mark.parametrize(
    "fails",
    [
        lambda: [][1],
        lambda: 1 // 0,
        lambda: Path("nowhere").read_text(),
        lambda: np.take([1], 9),
        lambda: next(iter(())),
    ],
)
def test_whatever_a_model_raises_is_one_error_with_its_line(fails: Callable[[], object]) -> None:
    class Failing(Tiny):
        def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            fails()
            return super().forward(input_ids, labels)

    with pytest.raises(TraceError, match="the model cannot be traced: ") as error:
        trace(Failing(), {"input_ids": ids(), "labels": ids()})
    assert "test_trace.py" in error.value.where


class Named(nn.Module):
    """An input that is called as an op of torch, and a parameter whose name ends as those of ops that write do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale_ = nn.Parameter(torch.ones(WIDTH))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, index_put: Tensor) -> Tensor:
        out, chosen = torch.zeros_like(index_put), index_put[:, 0] > 0
        for i, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == bool(i))
            out[rows] = expert(index_put[rows] * self.scale_)
        return out.square().mean()


def test_inputs_and_parameters_may_have_the_names_of_ops() -> None:
    assert_unchanged(Named().double(), {"index_put": torch.randn(6, WIDTH, dtype=torch.float64)})


@functools.cache
def numbered(samples: int) -> Tensor:
    return torch.arange(samples)[:, None] + 1.0


@pytest.mark.parametrize("kept", [True, False])
def test_a_function_that_keeps_its_results_is_given_no_number_of_samples(kept: bool) -> None:
    """Called without what it keeps, as the error advises, it is traced."""

    class Numbered(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            made = numbered(len(x)) if kept else numbered.__wrapped__(len(x))
            return (super().forward(x) * made).square().mean()

    batch = {"x": torch.ones(6, WIDTH)}
    if not kept:
        trace(Numbered(WIDTH, WIDTH), batch)
        return
    with pytest.raises(TraceError, match="number of samples is given to a function that keeps its results") as error:
        trace(Numbered(WIDTH, WIDTH), batch)
    assert "test_trace.py" in error.value.where and "__wrapped__" in error.value.fix
