"""Source of one op as a Python expression: `F.linear(x, w, b)`, `x + y`, `x.reshape(b, s, 12, 64)`.

`PRINTERS` holds the ops with a usual spelling; every other op is called by its ATen name, which is always correct.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from sympy.printing.pycode import PythonCodePrinter

from autoptd.codegen.quoting import dotted_name, is_name, literal
from autoptd.errors import TraceError
from autoptd.ops import library as ops
from autoptd.passes.custom_grad.ops import OwnFunction, OwnHook
from autoptd.passes.sharding.context_parallel_graph import convert, ring, ulysses
from autoptd.passes.sharding.expert_parallel_graph import EXPERT_OPS

aten = torch.ops.aten
_NUMBERS = (int, float, complex)
_DIMS = "", ", dim={}", ", source={}, target={}"  # by their number, in a conversion of the cp axis
_ONLY = "pass only tensors, numbers, strings, and tuples or lists of them: emitted source can hold nothing else"


class SourceText(str):
    """Python source of a tensor. Its repr is itself, so that lists of them print as source."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class _Sizes(PythonCodePrinter):
    """Printer of symbolic sizes as Python, with `//` for exact quotients, and `/` for those of numbers."""

    def _print_Mul(self, expr: sympy.Mul) -> str:
        return self._quotient(expr, super()._print_Mul)

    def _print_Add(self, expr: sympy.Add) -> str:
        return self._quotient(expr, super()._print_Add)

    def _quotient(self, expr: sympy.Expr, plain: Callable[[sympy.Expr], str]) -> str:
        """Return an exact quotient as one, since no part of `(s + 1) // 2` need be a whole number."""
        numerator, denominator = sympy.together(expr).as_numer_denom()
        if denominator == 1 or expr.atoms(sympy.Float):
            return plain(expr)
        return self._floor(numerator, denominator)

    def _print_floor(self, expr: sympy.floor) -> str:
        return f"({self._floor(*sympy.together(expr.args[0]).as_numer_denom())})"

    def _print_ceiling(self, expr: sympy.ceiling) -> str:
        numerator, denominator = sympy.together(expr.args[0]).as_numer_denom()
        return f"(-({self._floor(-numerator, denominator)}))"

    def _floor(self, numerator: sympy.Expr, denominator: sympy.Expr) -> str:
        return f"{self._tight(numerator)} // {self._tight(denominator)}"

    def _tight(self, expr: sympy.Expr) -> str:
        return self._print(expr) if expr.is_Atom else f"({self._print(expr)})"


def size_text(size: Any) -> str:
    """Return a size as source: `s // 2`, `b * s`, `64`."""
    return _Sizes({"fully_qualified_modules": False}).doprint(size) if isinstance(size, sympy.Basic) else repr(size)


def value_text(value: Any) -> str:
    """Return an argument as source: a tensor (SourceText), size, number, dtype or list."""
    match value:
        case SourceText():
            return str(value)
        case sympy.Basic():
            return size_text(value)
        case torch.dtype() | torch.layout() | torch.memory_format():
            return str(value)
        case torch.device():
            return "device"
        case float() if math.isinf(value) or math.isnan(value):
            return f'float("{float(value)}")'
        case list():
            return "[" + ", ".join(map(value_text, value)) + "]"
        case tuple():
            return "(" + ", ".join(map(value_text, value)) + ("," if len(value) == 1 else "") + ")"
        case str():
            return literal(value)
        case None | bool():
            return repr(value)
        case int() | float() | complex():
            return next(kind for kind in _NUMBERS if isinstance(value, kind)).__repr__(value)
        case _:
            raise TraceError(f"an op is given {value!r:.80}, of type {type(value).__name__}", fix=_ONLY)


def call_text(function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the call `function(a, b, c=d)`."""
    parts = [value_text(a) for a in args]
    parts += [
        f"{k}={value_text(v)}" if is_name(k) else f"**{{{literal(k)}: {value_text(v)}}}" for k, v in kwargs.items()
    ]
    return f"{function}({', '.join(parts)})"


def expression(target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return an op as source; tensors in `args` and `kwargs` are `SourceText`."""
    kwargs = {
        k: v for k, v in kwargs.items() if not (k in ("pin_memory", "layout") and v in (None, False, torch.strided))
    }
    if isinstance(target, OwnFunction):
        return call_text(f"{target}.apply", args, kwargs)
    if isinstance(target, OwnHook):
        return call_text("ops.hooked", (*args, SourceText(str(target))), kwargs)
    printer = PRINTERS.get(target)
    text = printer(*args, **kwargs) if printer is not None else None
    return text if text is not None else _by_name(target, args, kwargs)


def _by_name(target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    if not isinstance(target, torch._ops.OpOverload):
        return call_text(f"ops.{target.__name__}", args, kwargs)
    name = target._schema.name.split("::")[1]
    takes_tensor = bool(args) and isinstance(args[0], SourceText)
    if name in _AS_METHOD and takes_tensor:
        return call_text(f"{_operand(args[0])}.{name}", args[1:], kwargs)
    if name in _AS_FUNCTION:
        return call_text(f"torch.{name}", args, kwargs)
    if name in _AS_OPERATOR:
        return f" {_AS_OPERATOR[name]} ".join(map(_operand, args))
    return call_text(dotted_name(f"torch.ops.{target.namespace}.{name}.{target._overloadname}", "an op"), args, kwargs)


# Ops named after Python's operators; as attributes these names are private to Python.
_AS_OPERATOR = {"__and__": "&", "__or__": "|", "__xor__": "^", "__lshift__": "<<", "__rshift__": ">>"}
# Ops whose arguments are those of the ATen schema.
_AS_METHOD = frozenset(
    [
        "transpose",
        "permute",
        "movedim",
        "unsqueeze",
        "squeeze",
        "select",
        "chunk",
        "unbind",
        "masked_fill",
        "type_as",
        "t",
        "flatten",
        "unflatten",
        "gather",
        "index_select",
        "new_ones",
        "new_zeros",
        "new_empty",
        "new_full",
        "detach",
        "contiguous",
        "clone",
        "narrow",
    ]
)
_AS_FUNCTION = frozenset(
    [
        "abs",
        "amax",
        "amin",
        "arange",
        "argmax",
        "bitwise_and",
        "bitwise_not",
        "bitwise_or",
        "bmm",
        "cat",
        "clamp",
        "cos",
        "cumsum",
        "div",
        "einsum",
        "erf",
        "exp",
        "eye",
        "full",
        "full_like",
        "isinf",
        "isnan",
        "log",
        "log_softmax",
        "logical_and",
        "logical_not",
        "logical_or",
        "matmul",
        "maximum",
        "mean",
        "minimum",
        "mm",
        "neg",
        "ones",
        "ones_like",
        "pow",
        "prod",
        "reciprocal",
        "repeat_interleave",
        "rsqrt",
        "sigmoid",
        "sign",
        "sin",
        "softmax",
        "sqrt",
        "square",
        "stack",
        "sum",
        "tanh",
        "topk",
        "tril",
        "triu",
        "var",
        "where",
        "zeros",
        "zeros_like",
    ]
)


def _operand(text: Any) -> str:
    """Return an operand, in parentheses if its operator binds loosely, and a size with any operator."""
    source = value_text(text)
    if isinstance(text, sympy.Basic) and not text.is_Atom:
        return source if source.startswith("(") and source.endswith(")") and source.count("(") == 1 else f"({source})"
    return f"({source})" if " " in source and not source.endswith(")") else source


def _infix(sign: str) -> Callable[..., str | None]:
    def printer(a: Any, b: Any, **kwargs: Any) -> str | None:
        if kwargs:
            return None
        return f"{_operand(a)} {sign} {_operand(b)}"

    return printer


def _function(name: str) -> Callable[..., str]:
    return lambda *args, **kwargs: call_text(name, args, kwargs)


def _linear(x: Any, weight: Any, bias: Any = None) -> str:
    return call_text("F.linear", (x, weight) if bias is None else (x, weight, bias), {})


def _embedding(weight: Any, indices: Any, padding_idx: int = -1, *rest: Any) -> str | None:
    if any(rest):
        return None
    return call_text("F.embedding", (indices, weight), {} if padding_idx < 0 else {"padding_idx": padding_idx})


def _attention(
    q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, **kwargs: Any
) -> str:
    options = {"attn_mask": attn_mask} if attn_mask is not None else {}
    options |= {"dropout_p": dropout_p} if dropout_p else {}
    options |= {"is_causal": True} if is_causal else {}
    options |= {k: v for k, v in kwargs.items() if v not in (None, False)}
    return call_text("F.scaled_dot_product_attention", (q, k, v), options)


def _over_tokens(name: str) -> Callable[..., str]:
    """Return a printer of attention over the cp axis, which follows the tensors."""

    def printer(
        q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, **kwargs: Any
    ) -> str:
        assert not dropout_p, "dropout in attention over cut tokens"
        given = {"mask": attn_mask, "is_causal": is_causal} | kwargs
        options = {k: v for k, v in given.items() if v is not None and v is not False}
        return call_text(f"ops.{name}", (q, k, v, SourceText("cp")), options)

    return printer


def _of_experts(name: str) -> Callable[..., str]:
    """Return a printer of a method of the ep axis."""
    return lambda *tensors, **dims: call_text(f"ep.{name}", tensors, dims)


def _slice(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> str:
    low = "" if start in (None, 0) else size_text(start)
    high = "" if end is None or (isinstance(end, int) and end >= 2**62) else size_text(end)
    piece = f"{low}:{high}" + (f":{step}" if step != 1 else "")
    return (
        f"{_operand(x)}[{', '.join([':'] * dim + [piece])}]"
        if dim >= 0
        else f"{_operand(x)}[..., {piece}{', :' * (-1 - dim)}]"
    )


def _reshape(x: Any, shape: Sequence[Any]) -> str:
    return f"{_operand(x)}.reshape({', '.join(map(size_text, shape)) or '()'})"


def _expand(x: Any, shape: Sequence[Any], **kwargs: Any) -> str:
    return f"{_operand(x)}.expand({', '.join(map(size_text, shape)) or '()'})"


def _to_dtype(x: Any, dtype: torch.dtype, *rest: Any, **kwargs: Any) -> str:
    return f"{_operand(x)}.to({dtype})"


def _to_device(x: Any, device: Any, dtype: torch.dtype, *rest: Any, **kwargs: Any) -> str:
    return f"{_operand(x)}.to({dtype})"


def _to_layout(x: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> str:
    return f"{_operand(x)}.to({dtype})" if dtype is not None else str(x)


def _layer_norm(x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *rest: Any) -> str:
    return call_text("F.layer_norm", (x, tuple(shape), weight, bias, eps), {})


def _rms_norm(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> str:
    options = {"weight": weight, "eps": eps}
    return call_text("F.rms_norm", (x, tuple(shape)), {k: v for k, v in options.items() if v is not None})


def _gelu(x: Any, approximate: str = "none") -> str:
    return call_text("F.gelu", (x,), {} if approximate == "none" else {"approximate": approximate})


def _index(x: Any, indices: Sequence[Any]) -> str:
    return f"{_operand(x)}[{', '.join(':' if i is None else value_text(i) for i in indices)}]"


def _softmax(name: str) -> Callable[..., str]:
    def printer(x: Any, dim: int, dtype: Any = None, **kwargs: Any) -> str:
        return call_text(name, (x,), {"dim": dim} | ({} if dtype is None else {"dtype": dtype}))

    return printer


def _cross_entropy(logits: Any, labels: Any, ignore_index: int = -100, **kwargs: Any) -> str:
    options = ({} if ignore_index == -100 else {"ignore_index": ignore_index}) | kwargs
    return call_text("ops.cross_entropy", (logits, labels), options)


def _pad(x: Any, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> str:
    options = ({} if mode == "constant" else {"mode": mode}) | ({} if value in (None, 0) else {"value": value})
    return call_text("F.pad", (x, tuple(pad)), options)


def _valid_count(labels: Any, ignore_index: int = -100, weight: Any = None) -> str:
    options = {} if weight is None else {"weight": weight}
    return call_text("ops.valid_count", (labels,) if ignore_index == -100 else (labels, ignore_index), options)


_COMPARISONS = {aten.eq: "==", aten.ge: ">=", aten.gt: ">", aten.le: "<=", aten.lt: "<", aten.ne: "!="}
PRINTERS: dict[Callable[..., Any], Callable[..., str | None]] = {
    aten._to_copy.default: _to_layout,
    aten.add.Tensor: _infix("+"),
    aten.conv1d.default: _function("F.conv1d"),
    aten.conv2d.default: _function("F.conv2d"),
    aten.conv3d.default: _function("F.conv3d"),
    aten.div.Tensor: _infix("/"),
    aten.embedding.default: _embedding,
    aten.expand.default: _expand,
    aten.gelu.default: _gelu,
    aten.index.Tensor: _index,
    aten.layer_norm.default: _layer_norm,
    aten.linear.default: _linear,
    aten.log_softmax.int: _softmax("F.log_softmax"),
    aten.mul.Scalar: _infix("*"),
    aten.mul.Tensor: _infix("*"),
    aten.neg.default: lambda x: f"-{_operand(x)}",
    aten.pad.default: _pad,
    aten.relu.default: _function("F.relu"),
    aten.reshape.default: _reshape,
    aten.rms_norm.default: _rms_norm,
    aten.scaled_dot_product_attention.default: _attention,
    aten.silu.default: _function("F.silu"),
    aten.slice.Tensor: _slice,
    aten.softmax.int: _softmax("F.softmax"),
    aten.sub.Tensor: _infix("-"),
    aten.to.device: _to_device,
    aten.to.dtype: _to_dtype,
    aten.to.dtype_layout: _to_layout,
    aten.view_as_complex.default: _function("ops.as_complex"),
    **{op: _infix(sign) for name, sign in _COMPARISONS.items() for op in (name.Scalar, name.Tensor)},
    **{method: _of_experts(name) for name, method in EXPERT_OPS.items()},
    convert: lambda x, method, *dims: f"cp.{method}({x}{_DIMS[len(dims)].format(*dims)})",
    ops.cross_entropy: _cross_entropy,
    ops.in_training: lambda x, running: f"dp.in_training({x}, {running})",
    ops.sum_over_batch: lambda x: f"dp.batch_sum({x})",
    ops.sum_over_dp: lambda x: f"dp.sum({x})",
    ops.valid_count: _valid_count,
    ring: _over_tokens("ring_attention"),
    ulysses: _over_tokens("ulysses_attention"),
}
