"""`recompute` and `keep`: bitwise equal gradients; what is saved, what is recomputed, and where recomputation stops."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autoptd.errors import RuntimeFault
from autoptd.ops.recompute import keep, recompute

Fn = Callable[[Tensor, Tensor], Tensor]


def leaves() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(6, 6, generator=generator).requires_grad_() for _ in range(2))  # type: ignore[return-value]


def gradients(run: Fn) -> list[Tensor]:
    x, w = leaves()
    run(x, w).square().sum().backward()
    assert x.grad is not None and w.grad is not None
    return [x.grad, w.grad]


class Block:
    """A norm, two products of which the first may be saved, a gated unit; counts how often each runs."""

    def __init__(self, kept: bool = False) -> None:
        self.kept = kept
        self.calls = {"first": 0, "second": 0, "end": 0}

    def product(self, name: str, x: Tensor, w: Tensor) -> Tensor:
        self.calls[name] += 1
        return F.linear(x, w)

    def __call__(self, x: Tensor, w: Tensor) -> Tensor:
        h = F.layer_norm(x, (6,))
        h = keep(self.product, "first", h, w) if self.kept else self.product("first", h, w)
        h = self.product("second", torch.tanh(h) * h, w)
        self.calls["end"] += 1
        return x + h


@pytest.mark.parametrize("kept", [False, True])
def test_gradients_are_the_same_bits(kept: bool) -> None:
    expected = gradients(Block())
    block = Block(kept)
    found = gradients(lambda x, w: recompute(block, x, w))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    # the second product saves its operands before it computes: recomputation ends there
    assert block.calls == {"first": 1 if kept else 2, "second": 2, "end": 1}


def test_several_results_are_kept_and_views_of_operands_found() -> None:
    calls = []

    def splits_backward(x: Tensor) -> tuple[Tensor, ...]:
        calls.append(1)
        parts = x.t().unflatten(0, (2, 3))
        return parts[0] * parts[1], parts.sum(0).exp()

    def block(x: Tensor, w: Tensor, inner: Callable[..., tuple[Tensor, ...]]) -> Tensor:
        a, b = inner(splits_backward, torch.sin(x @ w))
        return a * b

    expected = gradients(lambda x, w: block(x, w, lambda fn, x: fn(x)))
    calls.clear()
    found = gradients(lambda x, w: recompute(lambda x, w: block(x, w, keep), x, w))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)) and len(calls) == 1


def test_nothing_else_stays_alive() -> None:
    made: dict[str, weakref.ref[Tensor]] = {}

    def note(name: str, x: Tensor) -> Tensor:
        made[name] = weakref.ref(x)
        return x

    def block(x: Tensor, w: Tensor) -> Tensor:
        a = note("recomputed", torch.tanh(x))
        b = note("kept", keep(F.linear, a, w))
        return note("recomputed too", torch.tanh(b)) * b

    x, w = leaves()
    out = recompute(block, x, w)
    gc.collect()
    assert [name for name, ref in made.items() if ref() is not None] == []  # tensors; storages of kept ones live on
    out.sum().backward()


def test_a_graph_may_be_run_through_twice() -> None:
    x, w = leaves()
    block = Block()
    out = recompute(block, x, w).sum()
    first = torch.autograd.grad(out, (x, w), retain_graph=True)
    again = torch.autograd.grad(out, (x, w))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert block.calls["first"] == 3


def test_one_within_another() -> None:
    expected = gradients(lambda x, w: Block()(Block()(x, w), w))
    found = gradients(lambda x, w: recompute(lambda x, w: recompute(Block(True), Block(True)(x, w), w), x, w))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_without_gradient_nothing_is_noted() -> None:
    x, w = leaves()
    with torch.no_grad():
        assert torch.equal(recompute(Block(True), x, w), Block()(x, w))
    assert torch.equal(keep(F.linear, x, w), F.linear(x, w))


def test_an_error_in_the_first_run_is_the_caller_s() -> None:
    def broken(x: Tensor) -> Tensor:
        keep(F.relu, x)
        raise ValueError("no")

    x, _ = leaves()
    with pytest.raises(ValueError, match="no"):
        recompute(broken, x)
    assert gradients(lambda x, w: recompute(Block(True), x, w))[0].shape == x.shape


@pytest.mark.parametrize(
    ("again", "said"),
    [
        (lambda x, w: torch.tanh(x), "saves 1 tensors in its second run, and 3 in its first"),
        (lambda x, w: torch.tanh(x[:2] @ w), r"saves as tensor 1 torch.float32 \[2, 6\] in its second run, and"),
        (lambda x, w: torch.tanh(x.double() @ w.double()), r"saves as tensor 0 torch.float64 \[6, 6\] in its second"),
    ],
    ids=["less", "fewer rows", "another type"],
)
def test_a_function_that_does_something_else_the_second_time_is_an_error(again: Fn, said: str) -> None:
    runs: list[int] = []

    def fickle(x: Tensor, w: Tensor) -> Tensor:
        runs.append(1)
        return torch.tanh(x @ w) if len(runs) == 1 else again(x, w)

    x, w = leaves()
    with pytest.raises(RuntimeFault, match=f"is not deterministic: it {said}"):
        recompute(fickle, x, w).sum().backward()


def test_kept_results_are_plain_tuples_in_both_runs() -> None:
    """`torch.topk` returns a tuple of another type, for which torch.compile would make a second graph, ops of aten that
    give several tensors a list."""
    kinds: list[type] = []

    def largest(x: Tensor) -> Tensor:
        found, parts = keep(torch.topk, x, 2), keep(torch.ops.aten.chunk.default, x, 2)
        kinds.extend(map(type, (found, parts)))
        return found[0].square().sum() + (parts[0] * parts[1]).sum()

    x, _ = leaves()
    recompute(largest, x).backward()
    assert kinds == [tuple] * 4
