"""Every row of the conversion table, executed: its value, and its gradient against that of the whole function."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch
from torch import Tensor

from autoptd.layout.mesh import Mesh
from autoptd.layout.placements import BP, CONVERSIONS, B, P, Placement, Split, conversion, kind
from autoptd.ops.axis.slices import own_slice
from autoptd.ops.tp_axis import Axis
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep

SPLITS = [Split(0), Split(1), Split(1, 3), Split(2, 2)]
PLACEMENTS: list[Placement] = [B, BP, P, *SPLITS]
PAIRS = [(a, b) for a, b in itertools.product(PLACEMENTS, PLACEMENTS) if conversion(a, b).function]
SHAPE = (4, 12, 8)
BESIDE_PRODUCTS = {
    "sum_gradient_linear",
    "sum_gradient_linears",
    "gather_linear",
    "gather_linears",
    "linear_scatter",
}  # test_products.py


def lay(x: Tensor, placement: Placement, size: int, seed: int) -> list[Tensor]:
    """Return each rank's tensor of a value with this placement; random partial values for PartialSum."""
    match placement:
        case Split(dim, groups):
            return [own_slice(x, dim, groups, size, r).contiguous() for r in range(size)]
        case _ if placement == P:
            noise = [
                torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(seed + r))
                for r in range(size - 1)
            ]
            return [*noise, x - sum(noise)]
        case _:
            return [x.clone() for _ in range(size)]


def conjugate(placement: Placement) -> Placement:
    """Return the placement of the gradient of a value."""
    return {B: B, BP: P, P: B}.get(placement, placement)


def join(parts: list[Tensor], placement: Placement) -> Tensor:
    """Return the whole value from the ranks' tensors; replicated ones must agree."""
    if placement == P:
        return torch.stack(parts).sum(0)
    if isinstance(placement, Split):
        dim, groups = placement.dim, placement.groups
        blocks = [part.unflatten(dim, (groups, -1)) for part in parts]
        return torch.cat([b.unsqueeze(dim + 1) for b in blocks], dim + 1).flatten(dim, dim + 2)
    for part in parts[1:]:
        assert torch.equal(part, parts[0])
    return parts[0]


def convert(axis: Axis, x: Tensor, source: Placement, target: Placement) -> Tensor:
    function = getattr(axis, conversion(source, target).function)
    if isinstance(source, Split) and isinstance(target, Split):
        return function(x, (source.dim, source.groups), (target.dim, target.groups))
    split = source if isinstance(source, Split) else target
    return function(x, split.dim, split.groups) if isinstance(split, Split) else function(x)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
def test_conversion_holds(source: Placement, target: Placement, size: int) -> None:
    x, grad = (torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    values, grads = lay(x, source, size, 10), lay(grad, conjugate(target), size, 20)

    def body(c: Communicators) -> tuple[Tensor, Tensor]:
        mine = values[c.tp.rank].requires_grad_()
        out = convert(Axis(c.tp), mine, source, target)
        out.backward(grads[c.tp.rank])
        assert mine.grad is not None
        assert torch.equal(mine.detach(), lay(x, source, size, 10)[c.tp.rank]), "the input was written to"
        return out.detach(), mine.grad

    results = run_lockstep(Mesh(tp=size), body)
    torch.testing.assert_close(join([r[0] for r in results], target), x, rtol=0, atol=1e-14)
    # conversion is the identity on the whole value, so its gradient is the identity on the whole gradient
    torch.testing.assert_close(join([r[1] for r in results], conjugate(source)), grad, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16])
def test_tensors_without_gradient(dtype: torch.dtype) -> None:
    x = torch.arange(24).view(4, 6).to(dtype)

    def body(c: Communicators) -> Tensor:
        axis = Axis(c.tp)
        return axis.all_gather_whole(axis.slice(x, -1, 3), -1, 3)

    for out in run_lockstep(Mesh(tp=2), body):
        assert torch.equal(out, x) and not out.requires_grad


def test_every_row_is_a_method_and_every_pair_is_tested() -> None:
    functions = {row.function for row in CONVERSIONS.values()} - {""}
    methods = {name for name, f in inspect.getmembers(Axis, inspect.isfunction) if not name.startswith("_")}
    assert methods - {"sum", "max", "part", "own_keys"} - BESIDE_PRODUCTS == functions
    assert {(kind(a), kind(b)) for a, b in PAIRS} == {key for key, row in CONVERSIONS.items() if row.function}


def test_a_slice_that_does_not_divide_is_named() -> None:
    with pytest.raises(AssertionError, match=r"dim 1 of \[2, 7\] does not divide by 1 × 2"):
        own_slice(torch.zeros(2, 7), 1, 1, 2, 0)


@pytest.mark.parametrize("wrong", ["_sum", "_first", "_gather"])
def test_planted_faults_are_caught(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion that omits its communication, or ignores the rank, breaks at least one row."""
    if wrong == "_gather":
        monkeypatch.setattr(
            Axis, wrong, lambda self, x, dim, groups: lambda t: torch.cat([t] * self.size, dim % x.ndim)
        )
    else:
        monkeypatch.setattr(Axis, wrong, lambda self, x: x.clone())
    caught = 0
    for source, target in PAIRS:
        try:
            test_conversion_holds(source, target, 2)
        except AssertionError:
            caught += 1
    assert caught
