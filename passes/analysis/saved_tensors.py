"""What autograd keeps of an op for its backward pass, found by running the op on meta tensors under its own hooks.

Three ops are told apart from what meta tensors show, because the kernels of an accelerator keep less:

    attention   the flash kernel: query, key, value, mask, result, and the log of the sum of exponentials of each
                query in float32; never the scores (Dao et al. 2022, FlashAttention)
    dropout     a boolean mask
    rms_norm    operand, weight, and the reciprocal root mean square of each row in float32 (aten._fused_rms_norm, which
                torch runs on CUDA); on a CPU it is written out and keeps two more tensors in float32
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement
from typing import Any, TypeVar

import sympy
import torch
from torch import Tensor

from autoptd.ops import library as ops
from autoptd.passes.custom_grad.ops import is_own
from autoptd.passes.opcall import OpCall, Size, TensorInfo
from autoptd.passes.rules.prove import as_list, frozen
from autoptd.passes.trace.fake import fake_cpu

aten = torch.ops.aten
T = TypeVar("T")
ATTENTION = frozenset({aten.scaled_dot_product_attention.default, ops.attention})
DROPOUT = frozenset({aten.dropout.default, ops.dropout})
RMS_NORM = frozenset({aten.rms_norm.default})

# Values for symbols on meta tensors: distinct, unlikely as a model's sizes, and divisible by all small numbers.
SYMBOL_VALUES = (55440, 50400, 45360, 75600, 83160, 98280)
SMALL_VALUES = ((44, 28, 52, 36, 20, 12), (10, 6, 14, 12, 4, 8))  # where a model limits a size: tokens by a table


@dataclass(frozen=True)
class SavedForBackward:
    """Positions of the operands and outputs that are kept, and other tensors that are."""

    operands: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    extra: tuple[TensorInfo, ...] = ()


def saved_tensors(call: OpCall) -> SavedForBackward:
    """What autograd keeps if the op runs in full. Shapes of `extra` are in the call's symbols where they match.

    Raises RuntimeError from the op itself if it does not run on meta tensors of these shapes.
    """
    if not any(t.requires_grad for t in call.operands):
        return SavedForBackward()
    if call.target in ATTENTION:
        return _attention(call)
    if call.target in DROPOUT:
        shape = call.operands[0].shape
        return SavedForBackward(extra=(TensorInfo(shape, torch.bool, False),)) if _drops(call) else SavedForBackward()
    if call.target in RMS_NORM:
        return _rms_norm(call)
    return _observe(call.target, frozen(call.args), frozen(tuple(call.kwargs.items())), call.outputs)


def is_off(call: OpCall) -> bool:
    """Whether a call is a dropout that drops nothing and hands its operand through."""
    return call.target in DROPOUT and not _drops(call)


def _drops(call: OpCall) -> bool:
    trained = call.target is ops.dropout or bool(call.arg(2, "train", True))
    return call.arg(1, "p", 0.5) != 0 and trained


def _attention(call: OpCall) -> SavedForBackward:
    rows = TensorInfo(call.outputs[0].shape[:-1], torch.float32, False)
    return SavedForBackward(tuple(range(len(call.operands))), (0,), (rows,))


def _rms_norm(call: OpCall) -> SavedForBackward:
    source, normalised = call.operands[0], len(call.arg(1, "normalized_shape"))
    rows = (*source.shape[: source.ndim - normalised], *(1,) * normalised)
    return SavedForBackward(tuple(range(len(call.operands))), (), (TensorInfo(rows, torch.float32, False),))


def at_sizes_that_work(look: Callable[[Sequence[int]], T]) -> T:
    """What a look at an op on meta tensors finds, its symbols large or, where it does not run like that, small.

    Raises what the op raises at large sizes where it runs at none.
    """
    errors = []
    for numbers in (SYMBOL_VALUES, *SMALL_VALUES):
        try:
            return look(numbers)
        except RuntimeError as error:
            errors.append(error)
    raise errors[0]


@cache
def _observe(target: Callable[..., Any], args: Any, kwargs: Any, outputs: tuple[TensorInfo, ...]) -> SavedForBackward:
    call = OpCall(target, args, dict(kwargs), outputs)
    return at_sizes_that_work(lambda numbers: _saved_of(call, numbers))


def _saved_of(call: OpCall, numbers: Sequence[int]) -> SavedForBackward:
    with surroundings(call):
        return _saved_within(call, numbers)


def _saved_within(call: OpCall, numbers: Sequence[int]) -> SavedForBackward:
    run, operands, values = meta_call(call, numbers)
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), torch.enable_grad():
        results = as_list(run())
    before, after = [_storage(x) for x in operands], [_storage(y) for y in results]
    stores = {_storage(x): x for x in kept}
    known = name_sizes(call, values)
    return SavedForBackward(
        tuple(i for i, s in enumerate(before) if s in stores),
        tuple(i for i, s in enumerate(after) if s in stores and s not in before),
        tuple(_symbolic(x, known) for s, x in stores.items() if s not in before and s not in after and x.numel() > 1),
    )


def surroundings(call: OpCall) -> AbstractContextManager[object]:
    """Around a call of `meta_call` and its backward pass: what the user wrote makes tensors of its own on the CPU."""
    return fake_cpu() if is_own(call.target) else nullcontext()


def meta_call(
    call: OpCall, numbers: Sequence[int] = SYMBOL_VALUES
) -> tuple[Callable[[], Any], list[Tensor], dict[sympy.Symbol, int]]:
    """The call on meta tensors, its tensor operands, and which of the numbers stand for its symbols.

    To be made, and run, within the `surroundings` of the call.
    """
    symbols = sorted(set(_symbols((call.args, tuple(call.kwargs.values()), call.outputs))), key=str)
    assert len(symbols) <= len(numbers), f"{call.target} has more symbols than there are values: {symbols}"
    values = dict(zip(symbols, numbers, strict=False))
    operands: list[Tensor] = []
    device = torch.device("cpu" if is_own(call.target) else "meta")
    concrete = [_concrete(a, values, operands, device) for a in call.args]
    named = {k: _concrete(v, values, operands, device) for k, v in call.kwargs.items()}
    named |= {"device": device} if "device" in named else {}
    return (lambda: call.target(*concrete, **named)), operands, values


def _concrete(value: Any, values: Mapping[sympy.Symbol, int], operands: list[Tensor], device: torch.device) -> Any:
    """Arguments with meta tensors for shapes (collected in `operands`) and numbers for symbols."""
    match value:
        case TensorInfo(shape, dtype, requires_grad):
            differentiable = requires_grad and (dtype.is_floating_point or dtype.is_complex)
            sizes = [_number(n, values) for n in shape]
            operands.append(torch.empty(sizes, dtype=dtype, device=device).requires_grad_(differentiable))
            return operands[-1]
        case tuple():
            return [_concrete(v, values, operands, device) for v in value]
        case sympy.Expr():
            return _number(value, values)
        case torch.device():
            return device
    return value


def _symbols(value: Any) -> Iterator[sympy.Symbol]:
    """Every symbol in shapes and arguments."""
    match value:
        case TensorInfo():
            yield from _symbols(value.shape)
        case tuple() | list():
            for item in value:
                yield from _symbols(item)
        case sympy.Expr():
            yield from value.free_symbols


def _number(size: Size, values: Mapping[sympy.Symbol, int]) -> int:
    return size if isinstance(size, int) else int(size.subs(values))


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def name_sizes(call: OpCall, values: Mapping[sympy.Symbol, int]) -> dict[int, Size]:
    """What a number stands for: a symbolic size of the call, or a product of its sizes."""
    sizes: Sequence[Size] = list(dict.fromkeys(n for t in call.operands + call.outputs for n in t.shape if n != 1))
    products = [a * b for a, b in combinations_with_replacement(sizes, 2)]
    return {_number(n, values): n for n in reversed([*sizes, *products]) if not isinstance(n, int)}


def _symbolic(x: Tensor, known: Mapping[int, Size]) -> TensorInfo:
    return TensorInfo(tuple(size_named(n, known) for n in x.shape), x.dtype, False)


def size_named(number: int, known: Mapping[int, Size]) -> Size:
    """A number as what it stands for: a size that is known, or a multiple of the largest that divides it."""
    if number in known:
        return known[number]
    largest = max((n for n in known if number % n == 0), default=0)
    return number // largest * known[largest] if largest else number
