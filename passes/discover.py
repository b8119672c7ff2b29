"""Find the factors of an op that has no rule, by trying: nothing is guessed, what nothing proves is replicated.

The op is run on small random tensors with its own literal arguments, sizes replaced by small distinct ones (where the
arguments forbid that, the sizes as they are). Every way of naming dims of equal size as one factor is a candidate; one
that holds in value and gradient, for two sets of sizes and two draws, becomes a factor of the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, product
from math import prod
from typing import Any

import sympy
import torch
from torch import Tensor

from autoptd.passes.factors import Rule, expand
from autoptd.passes.opcall import OpCall, Size, Sizes, TensorInfo
from autoptd.passes.prove import Example, as_list, frozen, prove

LARGEST = 1 << 20  # elements of an operand that is worth trying
CANDIDATES = 256  # per size; the fullest ones come first
SIZES = ((4, 6, 8, 10, 12, 14), (8, 4, 14, 6, 10, 12))
FAILURES = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)


@dataclass(frozen=True)
class Discovery:
    """What was found out about an op: a notation, or None and the reason why it is replicated."""

    op: str
    text: str | None
    reason: str = ""

    @property
    def rule(self) -> Rule | None:
        """The rule that the notation stands for."""
        return None if self.text is None else Rule(self.text)

    def __str__(self) -> str:
        return f"{self.op}: {self.text or 'replicated, ' + self.reason}"


def discover(call: OpCall) -> Discovery:
    """The factors of this call that proved splittable. Results are kept per target, arguments and shapes."""
    return _discover(call.target, frozen(call.args), frozen(tuple(call.kwargs.items())), call.outputs)


@cache
def _discover(target: Callable[..., Any], args: Any, kwargs: Any, outputs: tuple[TensorInfo, ...]) -> Discovery:
    call = OpCall(target, args, dict(kwargs), outputs)
    name = str(target) if isinstance(target, torch._ops.OpOverload) else target.__qualname__
    if reason := _unsuitable(call):
        return Discovery(name, None, reason)
    examples = [e for numbers in SIZES for seed in (0, 1) if (e := _example(call, numbers, seed)) is not None]
    if len(examples) < 4:
        return Discovery(name, None, "it does not run on small random tensors")
    if not all(_repeats(e) for e in examples[:2]):
        return Discovery(name, None, "it changes its inputs or is random")
    dims: list[list[str]] = [["."] * t.ndim for t in call.operands + call.outputs]
    count = 0
    for size in dict.fromkeys(n for t in call.operands for n in t.shape if n != 1):
        for where in islice(_candidates(call, size), CANDIDATES):
            free = all(d is None or dims[i][d] == "." for i, d in enumerate(where))
            if free and _holds(call, where, examples):
                for i, d in enumerate(where):
                    if d is not None:
                        dims[i][d] = f"f{count}"
                count += 1
    if not count:
        return Discovery(name, None, "no split of it computes the same")
    return Discovery(name, _text(call, dims))


def keeps_apart(call: OpCall, dims: Mapping[int, int], given: Sequence[int | None]) -> bool | None:
    """Whether, on small random tensors, no result for one sample changes with another; None where it cannot be tried.

    `dims`: operand -> its dim of samples; `given`: that of each output, None for an output that has none.
    """
    if _unsuitable(call):
        return None
    for numbers in SIZES:
        for changed, kept in ((slice(1), slice(1, None)), (slice(1, None), slice(1))):
            example = _example(call, numbers, 0)
            if example is None:
                return None
            before = [y.detach().clone() for y in as_list(example.target(*example.args, **example.kwargs))]
            with torch.no_grad():
                for i, dim in dims.items():
                    some = example.operands[i].movedim(dim, 0)[changed]
                    some.copy_(some.cos() * 3 if some.is_floating_point() else some == 0)
                after = as_list(example.target(*example.args, **example.kwargs))
            for x, y, at in zip(before, after, given, strict=True):
                others = (x, y) if at is None else (t.movedim(at, 0)[kept] for t in (x, y))
                if not torch.equal(*(t.nan_to_num() for t in others)):
                    return False
    return True


def _unsuitable(call: OpCall) -> str:
    if not isinstance(call.target, torch._ops.OpOverload):
        return "" if call.operands else "it has no operands"
    if call.target._schema.is_mutable:
        return "it changes its operands"
    if torch.Tag.nondeterministic_seeded in call.target.tags:
        return "it is random"
    return "" if call.operands else "it has no operands"


def _candidates(call: OpCall, size: Size) -> Iterator[tuple[int | None, ...]]:
    """Every way of placing one factor of this size: a dim or none in each tensor, fullest first."""
    tensors = call.operands + call.outputs
    options = [[*(d for d, n in enumerate(t.shape) if n == size), None] for t in tensors]
    combinations = (c for c in product(*options) if any(d is not None for d in c[: len(call.operands)]))
    return iter(sorted(combinations, key=lambda c: c.count(None)))


def _holds(call: OpCall, where: Sequence[int | None], examples: Sequence[Example]) -> bool:
    dims = [["."] * t.ndim for t in call.operands + call.outputs]
    for i, d in enumerate(where):
        if d is not None:
            dims[i][d] = "f"
    rule = Rule(_text(call, dims))
    for example in examples:
        small = example.call()
        try:
            splits = [s for s in expand(rule, small, 2, Sizes()) if s.ranks == 2]
        except AssertionError:  # dims of one size in the call, but not in the example
            return False
        if not splits or any(prove(example, rule, s, 2) for s in splits):
            return False
    return True


def _text(call: OpCall, dims: Sequence[Sequence[str]]) -> str:
    terms = [" ".join(d) for d in dims]
    return f"{', '.join(terms[: len(call.operands)])} -> {', '.join(terms[len(call.operands) :])}"


def _example(call: OpCall, numbers: Sequence[int], seed: int) -> Example | None:
    """Small random tensors for a call that runs: small sizes if the literal arguments allow, else the real ones."""
    distinct = list(dict.fromkeys(n for t in call.operands for n in t.shape if n != 1))
    symbols = sorted({s for n in distinct for s in getattr(n, "free_symbols", ())}, key=str)
    real = dict(zip(symbols, numbers, strict=False))
    for sizes in (dict(zip(distinct, numbers, strict=False)), {n: _value(n, real) for n in distinct}):
        example = _draw(call, sizes, real, seed) if len(sizes) == len(distinct) else None
        if example is not None and _runs(example, call):
            return example
    return None


def _value(size: Size, values: Mapping[sympy.Symbol, int]) -> int:
    return size if isinstance(size, int) else int(size.subs(values))


def _draw(call: OpCall, sizes: Mapping[Size, int], values: Mapping[Any, int], seed: int) -> Example | None:
    rng = torch.Generator().manual_seed(seed)

    def draw(value: Any) -> Any:
        match value:
            case TensorInfo(shape, dtype, requires_grad):
                concrete = [1 if n == 1 else sizes[n] for n in shape]
                if dtype.is_floating_point:
                    return torch.randn(concrete, generator=rng, dtype=torch.float64).requires_grad_(requires_grad)
                return torch.randint(0, 2, concrete, generator=rng).to(dtype)
            case tuple():
                return [draw(v) for v in value]
            case sympy.Expr():
                return sizes.get(value, value.subs(values))
        return value

    if any(prod(1 if n == 1 else sizes[n] for n in t.shape) > LARGEST for t in call.operands):
        return None
    kwargs = {k: draw(v) for k, v in call.kwargs.items()}
    return Example(call.target, tuple(draw(a) for a in call.args), kwargs)


def _runs(example: Example, call: OpCall) -> bool:
    """Whether the op takes this, and gives as many results, of as many dims, mostly finite."""
    try:
        outputs = as_list(example.target(*example.args, **example.kwargs))
    except FAILURES:
        return False
    shaped = len(outputs) == len(call.outputs) and all(
        isinstance(y, Tensor) and y.ndim == t.ndim for y, t in zip(outputs, call.outputs, strict=True)
    )
    return shaped and all(float(y.isfinite().double().mean()) > 0.25 for y in outputs if y.numel())


def _repeats(example: Example) -> bool:
    """Whether running it twice gives the same and leaves the inputs alone."""
    before = [x.detach().clone() for x in example.operands]
    first, second = (as_list(example.target(*example.args, **example.kwargs)) for _ in range(2))
    same = all(
        torch.equal(a.detach().nan_to_num(), b.detach().nan_to_num()) for a, b in zip(first, second, strict=True)
    )
    return same and all(torch.equal(a, b.detach()) for a, b in zip(before, example.operands, strict=True))
