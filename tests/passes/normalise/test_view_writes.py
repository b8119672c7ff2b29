"""Writes through slices get a functional form without torch's second trace; readers see what they would in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.errors import UnsupportedOp
from autoptd.passes.normalise.functionalize import functional_form
from tests.passes import interpret
from tests.passes.interpret import assert_same, assert_unchanged, in_microbatches, names_of, normalised
from tests.passes.normalise import test_normalise
from tests.passes.normalise.test_normalise import WIDTH, batch, model_of

aten = torch.ops.aten
Body = Callable[[nn.Module, Tensor], Tensor]
HALF = WIDTH // 2


def filled(self: nn.Module, h: Tensor) -> Tensor:
    """Multi-head latent attention's way to fill its keys."""
    y = h.new_empty(*h.shape[:-1], WIDTH + 2)
    y[..., :WIDTH].copy_(self.second(h))
    y[..., WIDTH:].copy_(h[..., :1].expand(-1, -1, 2))
    return y.transpose(1, 2)


def stale_views(self: nn.Module, h: Tensor) -> Tensor:
    """Views taken before a write and read after it, of other parts and of the same."""
    y = self.second(h)
    left, column, inner = y[..., :HALF], y[..., 1], y[:, 1:][..., 1:3]
    before = column * 1
    y[..., 1:] *= 2
    left += 1
    return y + before[..., None] + column[..., None] + inner.sum((1, 2), keepdim=True)


def nested(self: nn.Module, h: Tensor) -> Tensor:
    y = h * 1
    y[:, 1:][..., 2:6][:, 0] = self.second(h)[:, 0, :4]
    y[:, 1:, ::3] -= 0.5
    y[:, -1].mul_(3)[:, 2:].add_(1)
    return y


def of_itself(self: nn.Module, h: Tensor) -> Tensor:
    y = self.second(h)
    y[..., 0] = y[..., 1] + y[..., 0]
    y[..., 1:3] += y[..., 4:6]
    y.add_(y[..., :1] * 1)
    return y


def returned(self: nn.Module, h: Tensor) -> Tensor:
    """The result of a write is the view itself: a later write to the tensor changes it."""
    y = self.second(h)
    part = y[..., :2].mul_(2)
    y.add_(1)
    return torch.cat([part, y], -1)


def of_waves(self: nn.Module, h: Tensor) -> Tensor:
    """Some frequencies of a Fourier transform, as neural operators filter them; one by its number."""
    waves = torch.fft.rfft(self.second(h))
    y = torch.zeros_like(waves)
    y[..., :2] = waves[..., :2] * 2
    y[:, :, -1] = waves[:, :, 1]
    return torch.fft.irfft(y, n=WIDTH)


def two_tensors(self: nn.Module, h: Tensor) -> Tensor:
    y, z = self.second(h), h * 2
    y[..., 0] = z[..., 0]
    z[..., 1] = y[..., 0]
    y[..., 1] = z[..., 1] + 1
    z += y
    return y + z


def other_types(self: nn.Module, h: Tensor) -> Tensor:
    y = h.sin().float() * 1
    y[..., :HALF] += self.second(h)[..., :HALF]
    y[..., HALF:] = h[..., :HALF]
    return y.double()


def in_turn(self: nn.Module, h: Tensor) -> Tensor:
    y = torch.zeros_like(h)
    for i in range(4):
        y[..., i::4] = self.second(h if i == 0 else y * 1)[..., i::4]
    return y


def turned(self: nn.Module, h: Tensor) -> Tensor:
    """Gemma 3n's streams: written through a permutation, then copied, or not, by contiguous and type_as."""
    y = self.second(h)
    streams = y.permute(2, 0, 1)
    streams += h.permute(2, 0, 1)
    y.transpose(0, 1)[1:] *= 2
    kept, copied = y.contiguous().type_as(h), streams.contiguous().type_as(h)
    kept[:, 0] += 1
    copied[1:] += 3
    return y + kept + copied.permute(1, 2, 0)


BODIES = [filled, stale_views, nested, of_itself, returned, of_waves, two_tensors, other_types, in_turn, turned]


@pytest.mark.parametrize("body", BODIES)
def test_slices_need_no_second_trace(body: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.export.ExportedProgram, "run_decompositions")
    ops = names_of(assert_unchanged(model_of(body), batch()))
    assert not [op for op in ops if op.endswith("_")] and {"slice_scatter", "select_scatter"} & set(ops)


def transposed(self: nn.Module, h: Tensor) -> Tensor:
    y = self.second(h)
    y.transpose(1, 2)[:, 0] = 1.0
    y[..., 1] = 2.0
    return y


def reshaped(self: nn.Module, h: Tensor) -> Tensor:
    y = self.second(h)
    flat = y.view(-1)
    y[..., 1:5] *= 2
    return flat * 2


def whole(self: nn.Module, h: Tensor) -> Tensor:
    y = self.second(h)
    same = y[:]
    y += h
    same[:] *= 2
    return y


def cast(self: nn.Module, h: Tensor) -> Tensor:
    """A cast makes a new tensor: what it was made of stays."""
    table = self.table.float()
    table[:, 0] = 1.0
    y = h.float()
    y[..., 1] = 2.0
    return y.double() + table + h + self.table


@pytest.mark.parametrize("body", [transposed, reshaped, whole, cast])
def test_other_views_stay_right(body: Body) -> None:
    assert_unchanged(model_of(body), batch())


@pytest.mark.parametrize("view", [lambda x: x[:, 0], lambda x: x[:1].transpose(0, 1), lambda x: x.view(-1)])
def test_parameters_written_through_a_view_are_refused(view: Callable[[Tensor], Tensor]) -> None:
    class Writing(test_normalise.Body):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                view(self.second.weight).mul_(2.0)
            return super().forward(x + self.table)

    with pytest.raises(UnsupportedOp, match=r"mul_.* writes to second\.weight") as error:
        normalised(Writing(lambda self, h: h).double(), batch())
    assert "test_view_writes.py" in str(error.value)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.mul_(2.0),
        lambda x: x[:, 0].mul_(2.0),
        lambda x: x.transpose(0, 1)[:2].mul_(2.0),
        lambda x: x.chunk(2, -1)[0].mul_(2.0),
        lambda x: x.data.clamp_(-0.5, 0.5),
        lambda x: x.masked_fill_(x > 0.3, 0.1),
        lambda x: x[..., 0].copy_(x[..., 1]),
    ],
)
def test_inputs_and_constants_are_read_as_written(write: Callable[[Tensor], object]) -> None:
    class Writing(test_normalise.Body):
        def forward(self, x: Tensor) -> Tensor:
            before, y = self.first(x.clone()), x * 1
            write(x)
            write(y)
            return (before * self.second(x) + y).square().mean()

    model = Writing(lambda self, h: h).double()
    traced, wanted = normalised(model, batch()), interpret.whole(model, batch())
    assert traced.written == {"x"}
    assert_same(in_microbatches(model, traced, batch(), (1, 3, 2)), wanted)


def made_by_out(self: nn.Module, h: Tensor) -> Tensor:
    """Results written to tensors passed as `out`: new ones, views, an operand, of another dtype."""
    y, weight = h.detach() * 2, self.second.weight
    z, narrow, sums = torch.empty_like(y), torch.empty_like(y, dtype=torch.float32), torch.empty(WIDTH, dtype=y.dtype)
    torch.clamp(y, -0.5, 0.5, out=y)
    torch.add(y[..., 1], 1, out=y[..., 0])
    torch.mul(y, y[:, :1], out=z)
    torch.mul(y, 1 / 3, out=narrow)
    torch.sum(weight.detach(), 0, out=sums)
    unit = torch.eye(*weight.shape, out=torch.empty_like(weight))
    return (h + y + z + narrow + sums) @ (weight - unit)


def test_results_are_written_to_out() -> None:
    assert_unchanged(model_of(made_by_out), batch())


def resized(self: nn.Module, h: Tensor) -> Tensor:
    return h + torch.mul(h.detach(), 2, out=torch.empty(0, dtype=h.dtype))


def test_an_out_that_is_resized_is_refused() -> None:
    with pytest.raises(UnsupportedOp, match="writes to the tensor passed as out=") as error:
        normalised(model_of(resized), batch())
    assert error.value.where and error.value.fix


def added_to_detached(self: nn.Module, h: Tensor) -> Tensor:
    y = (2 * h).detach()
    y += self.second(h)
    return y


def put_into_detached(self: nn.Module, h: Tensor) -> Tensor:
    y = (2 * h).detach()
    y[:, 0] = self.second(h)[:, 0]
    return y


def added_beside_a_transform(self: nn.Module, h: Tensor) -> Tensor:
    """A transform of torch.func is traced by torch's own second trace."""
    return added_to_detached(self, h) + torch.vmap(torch.sin)(h)


def data_of_constants(self: nn.Module, h: Tensor) -> Tensor:
    y = torch.ones(WIDTH, dtype=h.dtype)
    y.data.mul_(3.0)
    return y * h


@pytest.mark.fault("a write's gradient lost")
@pytest.mark.parametrize("body", [added_to_detached, put_into_detached, added_beside_a_transform, data_of_constants])
def test_what_is_written_to_a_detached_tensor_has_its_gradient(body: Body) -> None:
    assert_unchanged(model_of(body).double(), batch())


def original_read(self: nn.Module, h: Tensor) -> Tensor:
    x = 2 * h
    y = x.detach()
    y += self.second(h)
    return x + y


def data_clamped(self: nn.Module, h: Tensor) -> Tensor:
    x = 2 * h
    x.data.clamp_(-0.5, 0.5)
    return x


@pytest.mark.parametrize("body", [original_read, data_clamped])
def test_a_tensor_whose_detached_values_were_written_is_not_read(body: Body) -> None:
    with pytest.raises(UnsupportedOp, match="detached tensor whose original is read") as caught:
        normalised(model_of(body).double(), batch())
    assert caught.value.where and caught.value.fix


def clamped_without_grad(self: nn.Module, h: Tensor) -> Tensor:
    """The limit of torch's own `gaussian_nll_loss`."""
    y = self.second(h).clone()
    with torch.no_grad():
        y.clamp_(min=0.1)
    return y + h


def filled_in_nested_regions(self: nn.Module, h: Tensor) -> Tensor:
    y = self.second(h) * 2
    with torch.autocast("cpu", enabled=False), torch.no_grad():
        part = y[:, 0]
        with torch.set_grad_enabled(False):
            part.fill_(1.0)
    return y


def put_and_scaled(self: nn.Module, h: Tensor) -> Tensor:
    """The tensor has its gradient by a write."""
    y = torch.zeros_like(h)
    y[:, 0] = self.second(h)[:, 0]
    with torch.no_grad():
        y.mul_(2)
    return y + h


@pytest.mark.fault("written under no_grad")
@pytest.mark.parametrize("body", [clamped_without_grad, filled_in_nested_regions, put_and_scaled])
def test_a_write_under_no_grad_to_a_tensor_with_gradient_is_refused(body: Body) -> None:
    with pytest.raises(UnsupportedOp, match="writes under no_grad to a tensor that has a gradient") as caught:
        normalised(model_of(body).double(), batch())
    assert caught.value.where and "(new - x).detach()" in caught.value.fix


def written_without_gradient(self: nn.Module, h: Tensor) -> Tensor:
    y, chosen, centred = torch.zeros_like(h), self.second(h).argmax(-1, keepdim=True), h.detach().clone()
    with torch.no_grad():
        y[:, 0] = h[:, 0]
        chosen.clamp_(max=3)
        centred.sub_(h.mean(-1, keepdim=True))
        scale = self.second(h).exp()
        scale[:, 1] = 2.0
    with torch.no_grad():
        scale.mul_(0.5)
    y[:, 1] = self.second(h)[:, 1]
    return y * chosen + centred * scale * h


def test_a_write_under_no_grad_to_a_tensor_without_gradient_is_not() -> None:
    assert_unchanged(model_of(written_without_gradient).double(), batch())


def several(self: nn.Module, h: Tensor) -> Tensor:
    with torch.no_grad():
        values, places = torch.empty_like(h), torch.empty(h.shape, dtype=torch.long)
        torch.sort(self.second(h), out=(values, places))
    return h + values


def test_several_results_passed_as_out_are_refused() -> None:
    with pytest.raises(UnsupportedOp, match="passed as out=") as caught:
        normalised(model_of(several).double(), batch())
    assert caught.value.where and "returned tensor" in caught.value.fix


def of_given_memory(self: nn.Module, h: Tensor) -> Tensor:
    h = h.detach()
    torch.empty(0, dtype=h.dtype).set_(h).add_(1)
    return self.second(h)


def test_a_tensor_that_is_given_the_memory_of_another_is_refused() -> None:
    """A write to one is a write to both, which torch's schema does not say."""
    with pytest.raises(UnsupportedOp, match="share the memory of another") as caught:
        normalised(model_of(of_given_memory).double(), batch())
    assert caught.value.where and "y = x" in caught.value.fix


def turned_beside_a_row(self: nn.Module, h: Tensor) -> Tensor:
    weight = self.second.weight * 1
    row = weight[0]
    weight.t_()
    weight[0] = 0
    return h @ weight + row.sum()


def unsqueezed_beside_columns(self: nn.Module, h: Tensor) -> Tensor:
    h = h * 1
    columns = h[..., :2]
    h.unsqueeze_(1)
    columns.mul_(3)
    return self.second(h.squeeze(1))


@pytest.mark.parametrize("body", [turned_beside_a_row, unsqueezed_beside_columns])
def test_earlier_views_keep_their_shape(body: Body) -> None:
    """Keep views of a tensor that `t_` and `unsqueeze_` give another shape, which write no numbers."""
    assert_unchanged(model_of(body).double(), batch())


@pytest.mark.parametrize(
    ("written", "functional"),
    [
        (aten.__ior__.Tensor, aten.__or__.Tensor),
        (aten.floor_divide_.Tensor, aten.floor_divide.default),
        (aten.pow_.Scalar, aten.pow.Tensor_Scalar),
        (aten.polygamma_.default, None),
        (aten.add_.Tensor, aten.add.Tensor),
    ],
)
def test_a_functional_form_takes_the_same_arguments(written: Any, functional: Any) -> None:
    assert functional_form(written) is functional


class Counter(nn.Module):
    """Buffers written by operators whose ops torch names in other ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)
        self.register_buffer("seen", torch.zeros(WIDTH, dtype=torch.bool))
        self.register_buffer("count", torch.full((), 10))

    def forward(self, x: Tensor) -> Tensor:
        self.seen |= (x.detach() > 0).sum(0) > 1
        self.count //= 3
        return self.layer(x).square().mean()


def test_buffers_written_by_operators() -> None:
    x = torch.ones(4, WIDTH)
    par = autoptd.parallelize(Counter(), world=1, inputs={"x": x[:2]}, batch=4, precision="fp32", cluster="dgx-h100")
    par.train_step({"x": x})
    assert bool(par.state_dict()["seen"].all()) and int(par.state_dict()["count"]) == 3
