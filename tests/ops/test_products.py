"""Products beside communication of tp: values and all gradients of the conversions and products that they stand for."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from autoptd.layout.mesh import Mesh
from autoptd.ops.axis import products, ring
from autoptd.ops.axis.slices import own_slice
from autoptd.ops.group import Group, Handle
from autoptd.ops.tp_axis import Axis
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import LockstepGroup, run_lockstep
from autoptd.runtime.split_backward import backward_inputs

WIDTH = 6
SPLITS = [(1, 1), (1, 2), (0, 1), (-2, 1)]  # dim, groups
Products = Callable[[Axis, list[Tensor], tuple[int, int]], tuple[Tensor, ...]]


def apart(tp: Axis, given: list[Tensor], split: tuple[int, int]) -> tuple[Tensor, ...]:
    """The conversions and products one after another."""
    x, y, first, second, third, bias, own = given
    gathered = tp.all_gather(x, *split)
    both = F.linear(gathered, first, bias), F.linear(gathered, second.t())
    return (*both, tp.reduce_scatter(F.linear(y, third, own), *split))


def around(
    tp: Axis, given: list[Tensor], split: tuple[int, int], again: bool = False, ring: bool = True
) -> tuple[Tensor, ...]:
    x, y, first, second, third, bias, own = given
    how = {"dim": split[0], "groups": split[1]}
    both = tp.gather_linears(x, [first, second.t()], [bias, None], **how, again=again, ring=ring)
    return (*both, tp.linear_scatter(y, third, own, **how))


FORMS = {
    "ring": around,
    "ring, again": partial(around, again=True),
    "gathered": partial(around, ring=False),
    "gathered, again": partial(around, again=True, ring=False),
}


def whole(tp: Axis, given: list[Tensor], split: tuple[int, int]) -> tuple[Tensor, ...]:
    """The products of a tensor that is whole already."""
    x, _, first, second, _, bias, _ = given
    x = tp.all_gather_whole(x, *split)
    return (*tp.sum_gradient_linears(x, [first, second.t()], [bias, None]), tp.sum_gradient_linear(x, first))


def whole_apart(tp: Axis, given: list[Tensor], split: tuple[int, int]) -> tuple[Tensor, ...]:
    x, _, first, second, _, bias, _ = given
    x = tp.all_gather_whole(x, *split)
    summed = tp.sum_gradient(x)
    return F.linear(summed, first, bias), F.linear(summed, second.t()), F.linear(tp.sum_gradient(x), first)


def operands(rank: int, size: int, split: tuple[int, int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return x, y, three weights, a bias and a partial one, of a rank."""
    generator = torch.Generator().manual_seed(rank)
    sizes = [(4, 12, WIDTH), (4, 24, 5), (3, WIDTH), (WIDTH, 2), (7, 5), (3,), (7,)]
    made = [torch.randn(shape, generator=generator, dtype=dtype) for shape in sizes]
    made[0] = own_slice(torch.randn(4, 24, WIDTH, generator=generator, dtype=dtype), *split, size, rank)
    return [x.contiguous().requires_grad_() for x in made]


def results(
    function: Products, size: int, split: tuple[int, int], dtype: torch.dtype = torch.float64
) -> list[list[Tensor]]:
    """Return the values and gradients of each rank."""

    def body(c: Communicators) -> list[Tensor]:
        given = operands(c.tp.rank, size, split, dtype)
        found = function(Axis(c.tp), given, split)
        generator = torch.Generator().manual_seed(10 + c.tp.rank)
        grads = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in found]
        torch.autograd.backward(found, grads)
        return [x.detach() for x in found] + [x.grad for x in given if x.grad is not None]

    return run_lockstep(Mesh(tp=size), body)


def check(size: int, split: tuple[int, int], function: Products = around, dtype: torch.dtype = torch.float64) -> None:
    found, expected = results(function, size, split, dtype), results(apart, size, split, dtype)
    assert all(len(mine) == 10 for mine in expected)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_products_beside_communication_are_those_apart(size: int, split: tuple[int, int], form: str) -> None:
    check(size, split, FORMS[form])


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_complex_products_are_conjugates(form: str) -> None:
    check(2, (1, 1), FORMS[form], torch.complex128)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_products_of_a_whole_tensor_are_those_apart(size: int, dtype: torch.dtype) -> None:
    found, expected = results(whole, size, (1, 1), dtype), results(whole_apart, size, (1, 1), dtype)
    assert all(len(mine) == 7 for mine in expected)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)


def test_products_of_a_vector() -> None:
    """A tensor of one dim, such as a parameter that layers make others of, is one row."""

    def body(c: Communicators) -> None:
        tp = Axis(c.tp)
        _, _, first, _, _, bias, _ = operands(c.tp.rank, 2, (1, 1))
        given = [torch.arange(WIDTH, dtype=torch.float64, requires_grad=True), first, bias]
        found = torch.autograd.grad(tp.sum_gradient_linear(*given).square().sum(), given)
        apart = F.linear(tp.sum_gradient(given[0]), first, bias)
        torch.testing.assert_close(found, torch.autograd.grad(apart.square().sum(), given), rtol=0, atol=1e-13)

    run_lockstep(Mesh(tp=2), body)


@pytest.mark.parametrize(
    ("form", "order"),
    [
        ("whole", ["all_reduce", "product", "product", "wait"]),
        ("gathered", ["reduce_scatter", "product", "product", "wait"]),
        ("gathered, again", ["all_gather", "reduce_scatter", "wait", "product", "product", "wait"]),
    ],
)
def test_sums_travel_beside_the_products_of_weights(
    form: str, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_thread: dict[int, list[str]] = {}  # what each rank did in its backward pass

    def note(what: str) -> None:
        of_thread.setdefault(threading.get_ident(), []).append(what)

    class Noted:
        def __init__(self, handle: Handle) -> None:
            self.wait = lambda: (note("wait"), handle.wait())[1]

    def starting(name: str) -> Callable[..., Noted]:
        start = getattr(LockstepGroup, f"{name}_later")
        return lambda *given: (note(name), Noted(start(*given)))[1]

    for name in ("all_reduce", "reduce_scatter", "all_gather"):
        monkeypatch.setattr(LockstepGroup, f"{name}_later", starting(name))
    monkeypatch.setattr(products, "_to_weight", lambda *given: (note("product"), TO_WEIGHT(*given))[1])

    def body(c: Communicators) -> list[str]:
        x, _, first, second, _, bias, _ = operands(c.tp.rank, 2, (1, 1))
        tp, weights = Axis(c.tp), [first, second.t()]
        if form == "whole":
            made = tp.sum_gradient_linears(x, weights, [bias, None])
        else:
            made = tp.gather_linears(x, weights, [bias, None], dim=1, again=form.endswith("again"))
        of_thread.pop(threading.get_ident(), None)
        torch.autograd.backward(made, [torch.ones_like(y) for y in made])
        return of_thread[threading.get_ident()]

    assert run_lockstep(Mesh(tp=2), body) == [order] * 2


def test_frozen_operands_take_no_gradient() -> None:
    def body(c: Communicators) -> None:
        tp = Axis(c.tp)
        x, y, first, _, third, bias, own = operands(c.tp.rank, 2, (1, 1))
        for frozen in (first, third):
            frozen.requires_grad_(False)
        out = tp.gather_linear(x, first, bias, dim=1)
        saved = [t for t in out.grad_fn.saved_tensors if t is not None]  # type: ignore[union-attr]
        assert [t.data_ptr() for t in saved] == [first.data_ptr()]  # nothing gathered is kept
        tp.linear_scatter(y.detach(), third, own, dim=1).sum().backward()
        out.sum().backward()
        assert first.grad is third.grad is y.grad is None
        assert all(t.grad is not None for t in (x, bias, own))
        with torch.no_grad():
            assert not tp.gather_linear(x, first, bias, dim=1).requires_grad

    run_lockstep(Mesh(tp=2), body)


def test_what_is_kept_of_the_gathered_tensor() -> None:
    def body(c: Communicators) -> None:
        tp = Axis(c.tp)
        x, _, first, *_ = operands(c.tp.rank, 2, (1, 1))
        for again, by_ring in itertools.product((False, True), repeat=2):
            out = tp.gather_linear(x, first, dim=1, again=again, ring=by_ring)
            kept = out.grad_fn.saved_tensors[0]  # type: ignore[union-attr]
            assert kept.numel() == (1 if again else 2) * x.numel()
        (kept, *_) = tp.sum_gradient_linear(x, first).grad_fn.saved_tensors  # type: ignore[union-attr]
        assert kept.data_ptr() == x.data_ptr()

    run_lockstep(Mesh(tp=2), body)


@pytest.mark.parametrize("form", [*FORMS, "whole"])
def test_a_split_backward_pass_leaves_weights_for_later(form: str) -> None:
    def body(c: Communicators) -> None:
        tp = Axis(c.tp)
        x, y, first, second, third, bias, own = operands(c.tp.rank, 2, (1, 1))
        received = x.detach().requires_grad_()
        parameters = (first, second, third, bias, own)
        grads = []
        for split in (False, True):
            if form == "whole":
                made = tp.sum_gradient_linears(received * 1, [first, second.t()], [bias, None])
                out = tp.sum_gradient_linear(tp.all_reduce(torch.cat(made, -1)), third, own)
            else:
                a, b, _ = FORMS[form](tp, [received * 1, y, first, second, third, bias, own], (1, 1))
                out = tp.linear_scatter(torch.cat([a, b], -1), third, own, dim=1)
            if split:
                later = backward_inputs([(get_gradient_edge(out), torch.ones_like(out))], [received])
                assert received.grad is not None and all(p.grad is None for p in parameters)
                later()
            else:
                out.sum().backward()
            grads.append([p.grad for p in (received, *parameters)])
            for p in (received, *parameters):
                p.grad = None
        for whole, in_parts in zip(*grads, strict=True):
            torch.testing.assert_close(in_parts, whole, rtol=0, atol=1e-13)

    run_lockstep(Mesh(tp=2), body)


def test_sums_are_in_the_order_of_the_ring() -> None:
    """1e16 swallows a 1 that is added to it: the sum of each rank's rows tells the order."""

    def body(c: Communicators) -> list[float]:
        rank = c.tp.rank
        values = torch.tensor([1e16, 1.0, -1e16, 1.0], dtype=torch.float64)
        return ring.summed_around(c.tp, lambda _: values[rank : rank + 1].clone()).tolist()

    found = [x for (x,) in run_lockstep(Mesh(tp=4), body)]
    values = [1e16, 1.0, -1e16, 1.0]
    expected = []
    for rank in range(4):
        total = values[(rank + 1) % 4]
        for step in range(2, 5):
            total += values[(rank + step) % 4]
        expected.append(total)
    assert found == expected and len(set(found)) > 1


def _previous_chunk(group: Group, part: Callable[[int], Tensor]) -> Tensor:
    return SUMMED(group, lambda rank: part((rank - 1) % group.size))


def _misses_the_last(grad: Tensor, x: Tensor) -> Tensor:
    return grad[:, :-1].flatten(0, -2).t() @ x[:, :-1].flatten(0, -2)


def _too_few(grad: Tensor) -> Tensor:
    return grad.flatten(0, -2)[:-1].sum(0)


SUMMED, TO_WEIGHT = ring.summed_around, products._to_weight


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        pytest.param("summed_around", _previous_chunk, marks=pytest.mark.fault("a chunk off by one")),
        pytest.param("_to_weight", _misses_the_last, marks=pytest.mark.fault("the last chunk missed")),
        pytest.param("_to_bias", _too_few, marks=pytest.mark.fault("the last chunk missed")),
    ],
)
def test_a_planted_fault_is_seen(name: str, planted: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, name, planted)
    with pytest.raises(AssertionError):
        check(2, (1, 1))
