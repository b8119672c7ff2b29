"""Discovery of the factors of an op without a rule by running it: a factor that is not proved is not split.

The op runs on small random tensors with its own literal arguments, at small distinct sizes (at its real sizes if the
arguments rule out small ones). Every assignment of one factor to dims of equal size is a candidate. A candidate becomes
a factor of the rule if values and gradients agree when it is split in two and as finely as possible, for two sets of
sizes and two draws. Incoming gradients are large and small too, because an op may clip them by their norm. The same
runs decide whether the backward pass is linear in the gradient, so that each rank may have a partial value of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, product
from math import prod
from types import FunctionType
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from autoptd.layout.placements import BP
from autoptd.passes.opcall import OpCall, Size, Sizes, TensorInfo
from autoptd.passes.rules.factors import Op, Rule, expand
from autoptd.passes.rules.prove import Example, as_list, differentiate, frozen, prove

LARGEST = 1 << 20  # elements of the largest operand that is tried
LARGEST_ONCE = 1 << 24  # the same where a few runs are enough
CANDIDATES = 256  # per size; those with the factor in most tensors come first
SIZES = ((4, 6, 8, 10, 12, 14), (8, 4, 14, 6, 10, 12))
MAGNITUDES = (1.0, 1e5, 1e-5)  # of incoming gradients
FINEST = 256  # most parts that a dim is split into
FAILURES = (RuntimeError, ValueError, LookupError, TypeError, AssertionError, AttributeError, ArithmeticError)


@dataclass(frozen=True)
class Discovery:
    """Result of trying an op: a notation, or None and the reason why it is replicated."""

    op: str
    text: str | None
    reason: str = ""
    tried: bool = True  # False if it did not run, or two runs differed
    linear: bool = True  # False if its backward pass was found not to be linear in the gradient

    @property
    def rule(self) -> Rule | None:
        """The rule of the notation; None for an op that is replicated without restrictions on gradients."""
        if self.text is None and self.linear:
            return None
        return Rule(self.text or _no_factors, linear_backward=self.linear)

    def __str__(self) -> str:
        return f"{self.op}: {self.text or 'replicated, ' + self.reason}"


def discover(call: OpCall) -> Discovery:
    """Return the factors of this call that proved splittable. Results are cached per target, arguments and shapes."""
    return _discover(call.target, frozen(call.args), frozen(tuple(call.kwargs.items())), call.outputs)


@cache
def _discover(target: Callable[..., Any], args: Any, kwargs: Any, outputs: tuple[TensorInfo, ...]) -> Discovery:
    call = OpCall(target, args, dict(kwargs), outputs)
    name = target.__qualname__ if isinstance(target, FunctionType) else str(target)
    if reason := _unsuitable(call):
        return Discovery(name, None, reason, tried=False)
    examples = [e for numbers in SIZES for seed in (0, 1) if (e := _example(call, numbers, seed)) is not None]
    if len(examples) < 4:
        return Discovery(name, None, f"it does not run on small random tensors{_error(call)}", tried=False)
    if not all(_repeats(e) for e in examples[:2]):
        return Discovery(name, None, "it changes its inputs or is random", tried=False)
    examples += [e for size in (1e3, 1e-3) if (e := _example(call, SIZES[0], 2, size)) is not None]
    linear = _is_linear(examples)
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
        return Discovery(name, None, "no split of it computes the same", linear=linear)
    return Discovery(name, _text(call, dims), linear=linear)


def _no_factors(call: OpCall) -> str:
    return _text(call, [["."] * t.ndim for t in call.operands + call.outputs])


def _is_linear(examples: Sequence[Example]) -> bool:
    """Return whether the backward pass, run on partial gradients, gives gradients that add up to the whole."""
    for example in examples:
        call = example.call()
        partial = [s for s in expand(Op(call, None), 2, Sizes()) if BP in s.needs]
        if any(prove(example, None, s, 2, magnitude=m) for s in partial for m in MAGNITUDES):
            return False
    return True


def keeps_apart(call: OpCall, dims: Mapping[int, int], given: Sequence[int | None], every: bool) -> bool | None:
    """Return whether, on small random tensors, each sample's result is independent of other samples; None if untried.

    `dims`: operand -> its sample dim; `given`: the sample dim of each output, None for an output without one. `every`:
    whether all operands with samples are in `dims`; then a result may not depend on the place of a sample either.
    """
    if _unsuitable(call):
        return None
    rarely = _decides_rarely(call)
    changes: tuple[Callable[[Tensor], Tensor], ...] = (_other, *([torch.zeros_like, torch.ones_like] if rarely else []))
    few_samples = SIZES[0], (3, *SIZES[1][1:])
    for seed, change, numbers in product(range(12 if rarely else 1), changes, few_samples):
        for changed, kept in (slice(1), slice(1, None)), (slice(1, None), slice(1)):
            example = _example(call, numbers, seed, largest=LARGEST_ONCE)
            if example is None:
                return None
            before = _results(example)
            with torch.no_grad():
                for i, dim in dims.items():
                    some = example.operands[i].movedim(dim, 0)[changed]
                    some.copy_(change(some))
                after = _results(example)
                for i, dim in dims.items():
                    example.operands[i].copy_(example.operands[i].flip(dim))
                turned = _results(example) if every else ()
            for x, y, at in zip(before, after, given, strict=True):
                others = (x, y) if at is None else (t.movedim(at, 0)[kept] for t in (x, y))
                if not torch.equal(*others):
                    return False
            for x, y, at in zip(after, turned, given, strict=False):
                if at is not None and not torch.allclose(x.flip(at), y, rtol=1e-4, atol=1e-6):
                    return False
    return True


def _other(x: Tensor) -> Tensor:
    """Return values other than those of a tensor."""
    return x.cos() * 3 if x.is_floating_point() else x == 0


def _results(example: Example) -> list[Tensor]:
    found = as_list(example.target(*example.args, **example.kwargs))
    return [y.detach().nan_to_num().clone() for y in found]


def _decides_rarely(call: OpCall) -> bool:
    """Return whether an op gives only choices or numbers of elements, which most random operands leave as they are.

    An example is `isin(x, y)`: its results for x change with hardly any row of y, be it of floats or of zeros and ones.
    """
    return not any(t.dtype.is_floating_point or t.dtype.is_complex for t in call.outputs)


def adds_up(call: OpCall, dims: Mapping[int, int]) -> bool:
    """Return whether, on small random tensors, an op's result for all rows is the sum of its results for each row.

    `dims`: operand -> its row dim. Only values are compared: gradients of a sum are those of its partial values.
    """
    if _unsuitable(call):
        return False
    for numbers in SIZES:
        for seed in range(4):
            example = _example(call, numbers, seed)
            rows = {example.operands[i].shape[dim] for i, dim in dims.items()} if example is not None else set()
            if example is None or len(rows) != 1:
                return False
            with torch.no_grad():
                whole = as_list(example.target(*example.args, **example.kwargs))
                try:
                    each = [_of_rows(example, dims, row) for row in range(rows.pop())]
                except FAILURES:  # such as of the second row, taken out of one
                    return False
            for i, x in enumerate(whole):
                total = sum((parts[i].double() for parts in each), torch.zeros(()))
                near = 1e-9 * float(x.detach().double().abs().max()) if x.numel() else 0.0
                if total.shape != x.shape or not torch.allclose(total, x.double(), rtol=1e-9, atol=near):
                    return False
    return True


def _of_rows(example: Example, dims: Mapping[int, int], row: int) -> list[Tensor]:
    """Return the op's outputs for one row of each operand in `dims`."""
    taken = iter(range(len(example.operands)))

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor):
            i = next(taken)
            return value.narrow(dims[i], row, 1) if i in dims else value
        return type(value)(map(cut, value)) if isinstance(value, (tuple, list)) else value

    args = [cut(a) for a in example.args]
    return as_list(example.target(*args, **{k: cut(v) for k, v in example.kwargs.items()}))


def takes_its_types(call: OpCall) -> bool:
    """Return whether the op runs on small tensors of its operands' dtypes, forward and backward; True if it cannot be
    tried at all."""
    if _unsuitable(call) or (example := _example(call, SIZES[0], 0)) is None:
        return True
    kinds = iter(call.operands)

    def typed(x: Tensor) -> Tensor:
        kind = next(kinds)
        return x.detach().to(kind.dtype).requires_grad_(kind.requires_grad)

    args, kwargs = tree_map_only(Tensor, typed, (example.args, dict(example.kwargs)))
    try:
        made = [x for x in tree_leaves(example.target(*args, **kwargs)) if isinstance(x, Tensor) and x.requires_grad]
        if made:
            torch.autograd.backward([x.float().sum() for x in made])
    except FAILURES:
        return False
    return True


def _unsuitable(call: OpCall) -> str:
    if not isinstance(call.target, torch._ops.OpOverload):
        return "" if call.operands else "it has no operands"
    if call.target._schema.is_mutable:
        return "it changes its operands"
    if torch.Tag.nondeterministic_seeded in call.target.tags:
        return "it may draw random numbers"
    return "" if call.operands else "it has no operands"


def _candidates(call: OpCall, size: Size) -> Iterator[tuple[int | None, ...]]:
    """Return every assignment of one factor of this size to a dim or none of each tensor, most dims first."""
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
        length = next(t.shape[d] for t, d in zip(small.operands, where, strict=False) if d is not None)
        for ranks in dict.fromkeys((2, _finest(length))):
            try:
                splits = [s for s in expand(Op(small, rule), ranks, Sizes()) if s.ranks == ranks]
            except AssertionError:  # dims of one size in the call, but not in the example
                return False
            if not splits or any(prove(example, rule, s, ranks, magnitude=m) for s in splits for m in MAGNITUDES):
                return False
    return True


def _finest(length: Size) -> int:
    """Return the largest number of equal parts, up to `FINEST`, that a dim is split into."""
    assert isinstance(length, int)
    return next((n for n in range(min(length, FINEST), 1, -1) if length % n == 0), 2)


def _text(call: OpCall, dims: Sequence[Sequence[str]]) -> str:
    terms = [" ".join(d) for d in dims]
    return f"{', '.join(terms[: len(call.operands)])} -> {', '.join(terms[len(call.operands) :])}"


def _example(
    call: OpCall, numbers: Sequence[int], seed: int, magnitude: float = 1.0, largest: int = LARGEST
) -> Example | None:
    """Return the call on random tensors at small sizes, else at its real ones; None if it runs at neither."""
    distinct = list(dict.fromkeys(n for t in call.operands for n in t.shape if n != 1))
    symbols = sorted({s for n in distinct for s in getattr(n, "free_symbols", ())}, key=str)
    real = dict(zip(symbols, numbers, strict=False))
    choices = (dict(zip(distinct, numbers, strict=False)), {n: _value(n, real) for n in distinct})
    for sizes, dtype in product(choices, (torch.float64, torch.float32)):  # some take no float64
        exist = len(sizes) == len(distinct) and all(n >= 0 for n in sizes.values())
        example = _draw(call, sizes, real, seed, magnitude, dtype, largest) if exist else None
        if example is not None and _runs(example, call):
            return example
    return None


def _value(size: Size, values: Mapping[sympy.Symbol, int]) -> int:
    return size if isinstance(size, int) else int(size.subs(values))


def _draw(
    call: OpCall,
    sizes: Mapping[Size, int],
    values: Mapping[Any, int],
    seed: int,
    magnitude: float = 1.0,
    wide: torch.dtype = torch.float64,
    largest: int = LARGEST,
) -> Example | None:
    rng = torch.Generator().manual_seed(1000 * sum(sizes.values()) + seed)  # other numbers for other sizes
    rarely = _decides_rarely(call)

    def draw(value: Any) -> Any:
        match value:
            case TensorInfo(shape, dtype, requires_grad):
                concrete = [1 if n == 1 else sizes[n] for n in shape]
                if dtype.is_floating_point:
                    drawn = torch.randn(concrete, generator=rng, dtype=wide) * magnitude
                    return (drawn.round() if rarely else drawn).requires_grad_(requires_grad)
                drawn = torch.randint(0, 2, concrete, generator=rng)
                if rarely:  # fewer ones, so that a part of a tensor may have none
                    drawn *= torch.rand(concrete, generator=rng) < 2.0 ** -(seed % 4)
                return drawn.to(dtype)
            case tuple():
                return [draw(v) for v in value]
            case sympy.Expr():
                return sizes.get(value, value.subs(values))
        return value

    if any(prod(1 if n == 1 else sizes[n] for n in t.shape) > largest for t in call.operands):
        return None
    kwargs = {k: draw(v) for k, v in call.kwargs.items()}
    return Example(call.target, tuple(draw(a) for a in call.args), kwargs)


def _runs(example: Example, call: OpCall) -> bool:
    """Return whether forward and backward run, with the call's number of outputs and dims, and mostly finite values."""
    try:
        outputs, _ = differentiate(example)
    except FAILURES:
        return False
    shaped = len(outputs) == len(call.outputs) and all(
        isinstance(y, Tensor) and y.ndim == t.ndim for y, t in zip(outputs, call.outputs, strict=True)
    )
    return shaped and all(float(y.isfinite().double().mean()) > 0.25 for y in outputs if y.numel())


def _error(call: OpCall) -> str:
    """Return the error of a call at its real sizes, in parentheses; empty if it runs."""
    distinct = list(dict.fromkeys(n for t in call.operands for n in t.shape if n != 1))
    symbols = sorted({s for n in distinct for s in getattr(n, "free_symbols", ())}, key=str)
    real = dict(zip(symbols, SIZES[0], strict=False))
    example = _draw(call, {n: _value(n, real) for n in distinct}, real, 0)
    try:
        if example is not None:
            differentiate(example)
    except FAILURES as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        return f" ({type(error).__name__}: {first[:200]})"
    return ""


def _repeats(example: Example) -> bool:
    """Return whether two runs, backward included, give equal results and leave the inputs unchanged."""
    before = [x.detach().clone() for x in example.operands]
    first, second = ([x for each in differentiate(example) for x in each] for _ in range(2))
    same = all(
        a is b if a is None or b is None else torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(first, second, strict=True)
    )
    return same and all(torch.equal(a, b.detach()) for a, b in zip(before, example.operands, strict=True))
