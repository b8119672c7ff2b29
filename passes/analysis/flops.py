"""Forward work of an op: floating point operations and bytes moved, as expressions in the size symbols.

Products count two operations per step of their loop nest (grouped products: only the expert that a row is sent to).
Convolutions and attention count as in torch.utils.flop_counter. Recurrent layers multiply each step by every matrix. An
op without a rule (`rules/table.py`), such as `tensordot` or a transposed convolution, counts the products that torch
runs for it, on meta tensors. All other ops are memory-bound and count none.
Attention counts the whole square even under a causal mask, as reports of model FLOPs do; `causal` says that half of it
is skipped. Views, and copies that a kernel avoids by writing the requested layout (`contiguous`), cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, log2, prod
from typing import Any, Literal, TypeGuard

import torch
from sympy import Integer
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count, sdpa_flop_count

from autoptd.ops import library as ops
from autoptd.passes.analysis.saved_tensors import ATTENTION, meta_call, meta_context, try_sizes
from autoptd.passes.custom_grad.ops import OwnFunction, OwnHook, is_own
from autoptd.passes.graph import nbytes
from autoptd.passes.opcall import OpCall, Size, TensorInfo
from autoptd.passes.rules.factor_notation import bind
from autoptd.passes.rules.prove import frozen
from autoptd.passes.rules.table import RULES

aten = torch.ops.aten
PRODUCTS = frozenset(
    {
        aten.addmm.default,
        aten.baddbmm.default,
        aten.bmm.default,
        aten.einsum.default,
        aten.linear.default,
        aten.matmul.default,
        aten.mm.default,
        aten.mv.default,
    }
)
BIASED = frozenset({aten.addmm.default, aten.baddbmm.default})  # their first operand is added to the product
GROUPED = frozenset({ops.grouped_mm})  # each row is multiplied by one matrix of several
SUBSTITUTIONS = frozenset({aten.linalg_solve_triangular.default})
RECURRENT = frozenset({aten.gru.input, aten.lstm.input, aten.rnn_relu.input, aten.rnn_tanh.input})
CONVOLUTIONS = frozenset({aten.conv1d.default, aten.conv2d.default, aten.conv3d.default})
LOOKUPS = frozenset({aten.embedding.default, aten.gather.default, aten.index.Tensor, aten.index_select.default})
CASTS = frozenset({aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other, aten.type_as.default})


@dataclass(frozen=True)
class Work:
    """Forward work of one op at global shapes."""

    kind: Literal["matmul", "attention", "memory", "view"]
    flops: Size = 0
    bytes_in: Size = 0
    bytes_out: Size = 0
    causal: bool = False


def work(call: OpCall) -> Work:
    """Return kind, operations and bytes of a call."""
    if is_view(call):
        return Work("view")
    count = flops(call)
    bytes_out = sum((nbytes(t) for t in call.outputs), 0)
    if call.target in LOOKUPS:  # reads only the rows of the table that it returns
        return Work("memory", 0, bytes_out + sum(nbytes(t) for t in call.operands[1:]), bytes_out)
    bytes_in = sum((nbytes(t) for t in call.operands), 0)
    if call.target in ATTENTION:
        return Work("attention", count, bytes_in, bytes_out, bool(call.arg(5, "is_causal", False)))
    return Work("matmul" if count != 0 else "memory", count, bytes_in, bytes_out)


def flops(call: OpCall) -> Size:
    """Return the floating point operations of the forward pass; 0 for memory-bound ops."""
    if call.target in PRODUCTS and len(call.operands) > 1:  # einsum of one tensor only moves or sums
        return 2 * prod(bind(RULES[call.target].text(call), call).sizes.values())
    if call.target in GROUPED:
        rows, weight = call.operands[:2]
        return 2 * prod(rows.shape) * weight.shape[2]
    if call.target in SUBSTITUTIONS:  # half of the steps of a product
        system, given = call.operands
        return prod(given.shape) * system.shape[-1]
    if call.target in CONVOLUTIONS:
        (source, weight), result = call.operands[:2], call.outputs[0]
        alone = [1] * (weight.ndim - source.ndim)  # a sample without a dim for the batch
        return conv_flop_count([*alone, *source.shape], list(weight.shape), [*alone, *result.shape])
    if call.target is ops.sample_conv:
        return 2 * prod(call.outputs[0].shape) * prod(call.operands[1].shape[2:])
    if call.target in ATTENTION:
        query, key, value = (_four(t.shape) for t in call.operands[:3])
        heads = query[:-2]  # grouped key-value heads are read by several query heads
        return sdpa_flop_count(query, heads + key[-2:], heads + value[-2:])
    if call.target in RECURRENT:  # input, states, weights
        matrices = (t.shape for t in call.operands[len(call.outputs) :] if t.ndim == 2)
        return 2 * prod(call.operands[0].shape[:-1]) * sum(map(prod, matrices))
    if call.target not in RULES and call.operands and (is_own(call.target) or _is_of_torch(call.target)):
        return _counted(call.target, frozen(call.args), frozen(tuple(call.kwargs.items())), call.outputs)
    return 0


@cache
def _counted(target: Any, args: Any, kwargs: Any, outputs: tuple[TensorInfo, ...]) -> Size:
    """Return the FLOPs of the products within an op, as a monomial in the symbols: the largest power of each counts."""
    call = OpCall(target, args, dict(kwargs), outputs)
    return try_sizes(lambda numbers: _monomial(call, numbers))


def _monomial(call: OpCall, numbers: Sequence[int]) -> Size:
    once, result = _count(call, numbers), Integer(1)
    for i, symbol in enumerate(meta_call(call, numbers)[2] if once else ()):
        twice = _count(call, [n * (1 + (i == j)) for j, n in enumerate(numbers)])
        result *= (symbol / numbers[i]) ** ceil(log2(twice / once))
    return once if result == 1 else once * result


def _count(call: OpCall, numbers: Sequence[int]) -> int:
    with meta_context(call), FlopCounterMode(display=False) as counter:
        meta_call(call, numbers)[0]()
    return int(counter.get_total_flops())


def gradient_products(call: OpCall) -> tuple[bool, bool]:
    """Return whether the backward pass multiplies for the gradient of the first factor, and of the second: each takes
    as many operations as the forward pass."""
    operands = call.operands
    if not any(t.requires_grad for t in operands):
        return False, False
    if call.target in BIASED:
        operands = operands[1:]
    if call.target in RECURRENT:  # the state's gradient goes back through all steps
        return True, any(t.requires_grad for t in operands[len(call.outputs) :])
    if call.target not in RULES:
        factors = sum(t.requires_grad for t in operands if t.ndim > 1)
        return factors > 1, factors > 0
    return operands[0].requires_grad, any(t.requires_grad for t in operands[1:2])


def _four(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    return (1,) * (4 - len(shape)) + shape


def _is_of_torch(target: Any) -> TypeGuard[torch._ops.OpOverload]:
    return isinstance(target, torch._ops.OpOverload)


def is_view(call: OpCall) -> bool:
    """Return whether the results alias an operand: by the op's schema, or as a cast to the same dtype."""
    if isinstance(call.target, (OwnFunction, OwnHook)):
        return call.target.view
    if not _is_of_torch(call.target):
        return False
    if call.target in CASTS:
        return call.outputs[0].dtype == call.operands[0].dtype
    returns = call.target._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
