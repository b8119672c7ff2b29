"""Tensors that autograd saves for an op's backward pass, found by running it on meta tensors with saved-tensor hooks.

For three ops this table is used instead, because the kernels of an accelerator save less than meta tensors show:

    attention   the flash kernel: query, key, value, mask, result, and the log of the sum of exponentials of each
                query in float32; never the scores (Dao et al. 2022, FlashAttention). torch's kernels add a mask to the
                scores, so that each call makes a copy of a boolean one in the query's type, and saves that instead;
                a stage may convert the mask for all its attentions (`passes/sharding/shared_masks.py`)
    dropout     a boolean mask
    rms_norm    operand, weight, and the reciprocal root mean square of each row in float32 (aten._fused_rms_norm, which
                torch runs on CUDA); on a CPU it is decomposed and saves two more tensors in float32
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
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

# Values for symbols on meta tensors: distinct, unlikely as a model's sizes, and divisible by small numbers; those of
# tokens also by chunks of up to 512, since a scan may be traced for a whole number of chunks.
SYMBOL_VALUES = (55440, 53760, 46080, 76800, 84480, 99840)
SMALL_VALUES = ((44, 28, 52, 36, 20, 12), (10, 6, 14, 12, 4, 8))  # for models that limit a size: a table of positions


@dataclass(frozen=True)
class SavedForBackward:
    """Positions of the operands and outputs that are saved, and all other saved tensors.

    `converted`: operands of which a copy in another type is saved, placed as they are.
    """

    operands: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    extra: tuple[TensorInfo, ...] = ()
    converted: tuple[tuple[int, torch.dtype], ...] = ()


def saved_tensors(call: OpCall) -> SavedForBackward:
    """Return the tensors that autograd saves if the op runs in full; shapes of `extra` use the call's symbols.

    Raises the op's own RuntimeError if it does not run on meta tensors of these shapes.
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
    found = _observe(call.target, frozen(call.args), frozen(tuple(call.kwargs.items())), call.outputs)
    if call.target is aten.ctc_loss.Tensor:  # the lengths become numbers, except on meta tensors
        return replace(found, operands=tuple(i for i in found.operands if i < 2))
    return found


def is_off(call: OpCall) -> bool:
    """Return whether a call is a dropout that drops nothing and returns its operand."""
    return call.target in DROPOUT and not _drops(call)


def _drops(call: OpCall) -> bool:
    trained = call.target is ops.dropout or bool(call.arg(2, "train", True))
    return call.arg(1, "p", 0.5) != 0 and trained


def _attention(call: OpCall) -> SavedForBackward:
    rows = TensorInfo(call.outputs[0].shape[:-1], torch.float32, False)
    converted = () if call.arg(4, "dropout_p", 0.0) else boolean_masks(call)  # ops of the runtime read the mask itself
    kept = tuple(i for i in range(len(call.operands)) if i not in converted)
    return SavedForBackward(kept, (0,), (rows,), tuple((i, call.operands[0].dtype) for i in converted))


def boolean_masks(call: OpCall) -> tuple[int, ...]:
    """Return the position of an attention's boolean mask among its operands, if it has one."""
    return tuple(i for i, operand in enumerate(call.operands) if operand.dtype is torch.bool)


def _rms_norm(call: OpCall) -> SavedForBackward:
    source, normalised = call.operands[0], len(call.arg(1, "normalized_shape"))
    rows = (*source.shape[: source.ndim - normalised], *(1,) * normalised)
    return SavedForBackward(tuple(range(len(call.operands))), (), (TensorInfo(rows, torch.float32, False),))


def try_sizes(observe: Callable[[Sequence[int]], T]) -> T:
    """Return what `observe` finds at large values of the symbols or, if the op fails at those, at small ones.

    Raises the error at large values if it fails at all sizes.
    """
    errors = []
    for numbers in (SYMBOL_VALUES, *SMALL_VALUES):
        try:
            return observe(numbers)
        except RuntimeError as error:
            errors.append(error)
    raise errors[0]


@cache
def _observe(target: Callable[..., Any], args: Any, kwargs: Any, outputs: tuple[TensorInfo, ...]) -> SavedForBackward:
    call = OpCall(target, args, dict(kwargs), outputs)
    return try_sizes(lambda numbers: _saved_of(call, numbers))


def _saved_of(call: OpCall, numbers: Sequence[int]) -> SavedForBackward:
    with meta_context(call):
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


def meta_context(call: OpCall) -> AbstractContextManager[object]:
    """Return the context for a `meta_call` and its backward pass: user-defined functions make fake CPU tensors."""
    return fake_cpu() if is_own(call.target) else nullcontext()


def meta_call(
    call: OpCall, numbers: Sequence[int] = SYMBOL_VALUES
) -> tuple[Callable[[], Any], list[Tensor], dict[sympy.Symbol, int]]:
    """Return the call on meta tensors as a function, its tensor operands, and the values of its symbols.

    Must be called, and the result run, within `meta_context(call)`.
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
    """Return an argument with meta tensors for shapes (appended to `operands`) and numbers for symbols."""
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
    """Yield every symbol in shapes and arguments."""
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
    """Return number -> the symbolic size of the call, or the product of two of its sizes, that has this value."""
    sizes: Sequence[Size] = list(dict.fromkeys(n for t in call.operands + call.outputs for n in t.shape if n != 1))
    products = [a * b for a, b in combinations_with_replacement(sizes, 2)]
    return {_number(n, values): n for n in reversed([*sizes, *products]) if not isinstance(n, int)}


def _symbolic(x: Tensor, known: Mapping[int, Size]) -> TensorInfo:
    return TensorInfo(tuple(size_named(n, known) for n in x.shape), x.dtype, False)


def size_named(number: int, known: Mapping[int, Size]) -> Size:
    """Return a number as a known size, or as a multiple of the largest known one that divides it, else unchanged."""
    if number in known:
        return known[number]
    largest = max((n for n in known if number % n == 0), default=0)
    return number // largest * known[largest] if largest else number
