"""Proof by execution: run an op under a strategy, rank by rank, and compare with the whole op.

Inputs are distributed in the placements that the strategy needs (a `PartialSum` as random partial values, since relu
looks linear on 0.3 x + 0.7 x), each rank runs the op on its part, and the results are joined in the placements that the
strategy gives. Gradients are checked likewise in the conjugate placements: a random gradient of the outputs is
distributed, each rank runs its backward pass, and the gradients of the inputs are joined. Replicated tensors are
compared on every rank.

`discover` uses the same proof to find the factors of an op that has no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from autoptd.layout.placements import Broadcast, OwnRows, PartialSum, Placement, Split
from autoptd.passes.opcall import OpCall, TensorInfo
from autoptd.passes.rules.factors import Op, Rule, Strategy, local_args

# Runs one rank, given its number and the op: returns outputs and gradients.
RankRun: TypeAlias = "Callable[[int, Callable[..., Any]], tuple[list[Tensor], list[Tensor | None]]]"
# Runs every rank; an op's own distributed implementation needs ranks that communicate (see `Ranks` in the tests).
OnRanks: TypeAlias = "Callable[[int, Strategy, Callable[..., Any], RankRun], list[Any]]"

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class Example:
    """A call with real tensors; gradients are taken of those that require one."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def operands(self) -> list[Tensor]:
        return list(_tensors((self.args, tuple(self.kwargs.values()))))

    def call(self) -> OpCall:
        """Return the call in the form that rules read; runs the op to get the shapes of its outputs."""
        outputs = as_list(self.target(*self.args, **self.kwargs))
        kwargs = {k: _map(_info, v) for k, v in self.kwargs.items()}
        return OpCall(self.target, _map(_info, self.args), kwargs, tuple(map(_info, outputs)))


@dataclass(frozen=True)
class Counterexample:
    """A difference between a strategy and the whole op: which tensor, and by how much (infinite if shapes differ)."""

    strategy: str
    what: str  # "output 0", "gradient of operand 1", or the op's own error
    error: float = float("inf")  # absolute

    def __str__(self) -> str:
        return f"{self.strategy}: {self.what} is off by {self.error:.3g}"


def prove(
    example: Example,
    rule: Rule | None,
    strategy: Strategy,
    ranks: int,
    *,
    seed: int = 0,
    magnitude: float = 1.0,
    on_ranks: OnRanks | None = None,
) -> Counterexample | None:
    """Return a counterexample unless values and gradients agree with the whole op's; `magnitude`: of incoming ones."""
    call = example.call()
    rng = torch.Generator().manual_seed(seed)
    upstream = _incoming(call.outputs, rng, magnitude)
    values, gradients = _differentiate(example.target, example.args, example.kwargs, upstream)
    for i, (value, placement) in enumerate(zip(values, strategy.gives, strict=True)):
        if not _divides(value, placement, ranks):
            return Counterexample(str(strategy), f"output {i}, of {tuple(value.shape)} in {ranks} parts,")
    held = [_lay_out(x, p, ranks, rng) for x, p in zip(example.operands, strategy.needs, strict=True)]
    pulled = [_lay_out(g, _conjugate(p), ranks, rng) for g, p in zip(upstream, strategy.gives, strict=True)]

    def one_rank(rank: int, target: Callable[..., Any]) -> tuple[list[Tensor], list[Tensor | None]]:
        args, kwargs = local_args(Op(call, rule), strategy, ranks)
        mine = iter(
            [h[rank].detach().requires_grad_(x.requires_grad) for h, x in zip(held, example.operands, strict=True)]
        )
        args, kwargs = _map(lambda _: next(mine), args), {k: _map(lambda _: next(mine), v) for k, v in kwargs.items()}
        return _differentiate(target, args, kwargs, [p[rank] for p in pulled])

    try:
        results = (on_ranks or in_turn)(ranks, strategy, example.target, one_rank)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        return Counterexample(str(strategy), f"{type(error).__name__} on a rank ({error})")
    dtypes = [t.dtype for t in call.operands + call.outputs if t.dtype.is_floating_point]
    tolerance = max((TOLERANCE.get(d, 1e-4) for d in dtypes), default=0.0)
    for i, (value, placement) in enumerate(zip(values, strategy.gives, strict=True)):
        wrong = _compare([r[0][i] for r in results], value, placement, ranks, tolerance)
        if wrong is not None:
            return Counterexample(str(strategy), f"output {i}", wrong)
    for i, (gradient, placement) in enumerate(zip(gradients, strategy.needs, strict=True)):
        if example.operands[i].requires_grad:
            whole = torch.zeros_like(example.operands[i]) if gradient is None else gradient
            parts = [torch.zeros_like(held[i][r]) if x[1][i] is None else x[1][i] for r, x in enumerate(results)]
            wrong = _compare(parts, whole, _conjugate(placement), ranks, tolerance)
            if wrong is not None:
                return Counterexample(str(strategy), f"gradient of operand {i}", wrong)
    return None


def in_turn(ranks: int, strategy: Strategy, target: Callable[..., Any], run: RankRun) -> list[Any]:
    """Run ranks that do not communicate, one after the other."""
    assert not strategy.implementation, f"{strategy} is distributed itself: run its ranks together"
    return [run(rank, target) for rank in range(ranks)]


def _incoming(outputs: Sequence[TensorInfo], rng: torch.Generator, magnitude: float) -> list[Tensor]:
    return [(torch.randn(t.shape, generator=rng, dtype=torch.float64) * magnitude).to(t.dtype) for t in outputs]


def differentiate(example: Example) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the outputs of a call, and the gradient of each operand for a random gradient of the outputs."""
    upstream = _incoming(example.call().outputs, torch.Generator().manual_seed(0), 1.0)
    return _differentiate(example.target, example.args, example.kwargs, upstream)


def _differentiate(
    target: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], upstream: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the outputs, and the gradient of each operand (None if it has none)."""
    outputs = as_list(target(*args, **kwargs))
    operands = list(_tensors((args, tuple(kwargs.values()))))
    roots = [i for i, y in enumerate(outputs) if y.requires_grad]
    leaves = [i for i, x in enumerate(operands) if x.requires_grad]
    gradients: list[Tensor | None] = [None] * len(operands)
    if roots and leaves:
        found = torch.autograd.grad(
            [outputs[i] for i in roots], [operands[i] for i in leaves], [upstream[i] for i in roots], allow_unused=True
        )
        for i, gradient in zip(leaves, found, strict=True):
            gradients[i] = gradient
    return [y.detach() for y in outputs], gradients


def _conjugate(placement: Placement) -> Placement:
    """Return the placement of the gradient as that of a value."""
    match placement:
        case Split():
            return placement
        case PartialSum():
            return Broadcast()
        case Broadcast(partial_grad):
            return PartialSum() if partial_grad else Broadcast()
        case OwnRows():
            raise AssertionError("no row of the table gives it")


def _divides(x: Tensor, placement: Placement, ranks: int) -> bool:
    return not isinstance(placement, Split) or x.shape[placement.dim] % (placement.groups * ranks) == 0


def _lay_out(x: Tensor, placement: Placement, ranks: int, rng: torch.Generator) -> list[Tensor]:
    """Return each rank's part of x."""
    x = x.detach()
    match placement:
        case Broadcast():
            return [x] * ranks
        case Split(dim, groups):
            blocks = x.unflatten(dim, (groups, ranks, x.shape[dim] // (groups * ranks)))
            return [blocks.select(dim + 1, rank).flatten(dim, dim + 1).contiguous() for rank in range(ranks)]
        case PartialSum():
            noise = [torch.randn(x.shape, generator=rng, dtype=torch.float64).to(x.dtype) for _ in range(ranks - 1)]
            return [*noise, x - sum(noise, torch.zeros_like(x))]
        case OwnRows():
            raise AssertionError("no row of the table needs it")


def _compare(
    parts: Sequence[Tensor], whole: Tensor, placement: Placement, ranks: int, tolerance: float
) -> float | None:
    """Return the largest difference between the joined parts and the whole, or None if they agree."""
    match placement:
        case Broadcast():
            joined = list(parts)
        case PartialSum():
            joined = [sum(parts[1:], parts[0])]
        case Split(dim, groups):
            if whole.shape[dim] % (groups * ranks) or any(p.shape[dim] * ranks != whole.shape[dim] for p in parts):
                return float("inf")
            width = whole.shape[dim] // (groups * ranks)
            blocks = torch.stack([p.unflatten(dim, (groups, width)) for p in parts], dim + 1)
            joined = [blocks.flatten(dim, dim + 2)]
    return max((e for j in joined if (e := _difference(j, whole, tolerance)) is not None), default=None)


def _difference(x: Tensor, y: Tensor, tolerance: float) -> float | None:
    if x.shape != y.shape or x.dtype != y.dtype:
        return float("inf")
    if not (x.is_floating_point() or x.is_complex()):
        return None if torch.equal(x, y) else float((x.double() - y.double()).abs().max())
    largest = float(y.detach().abs().nan_to_num(0.0, 0.0, 0.0).max()) if y.numel() else 0.0
    # relative to the largest element, since a product of many factors is tiny and its error must be tinier
    if torch.allclose(x, y, rtol=tolerance, atol=tolerance * (largest or 1.0), equal_nan=True):
        return None
    return float((x - y).abs().nan_to_num(float("inf")).max())


def as_list(value: Any) -> list[Tensor]:
    """Return an op's outputs, one or several, as a list."""
    return [value] if isinstance(value, Tensor) else list(value)


def frozen(value: Any) -> Any:
    """Return arguments with lists turned into tuples, which can be a key."""
    return tuple(map(frozen, value)) if isinstance(value, (tuple, list)) else value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """Return `value` with the function applied to every Tensor and TensorInfo in it; other values are unchanged."""
    if isinstance(value, (Tensor, TensorInfo)):
        return function(value)
    return type(value)([_map(function, v) for v in value]) if isinstance(value, (tuple, list)) else value


def _info(x: Tensor) -> TensorInfo:
    return TensorInfo(tuple(x.shape), x.dtype, x.requires_grad)
