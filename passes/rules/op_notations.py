"""Notations that depend on the call: on the number of dims, on an argument, or on the refinement of two shapes.

Each function returns the notation of a call (see `factor_notation`) or, given an argument's position, such a function.
A dim is named `d0`, `d1`, … by its position in the first operand unless it has a better name. Dims over which an op
normalises or reduces stay whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch

from autoptd.passes.opcall import OpCall, TensorInfo
from autoptd.passes.rules.views import same

Notation: TypeAlias = "Callable[[OpCall], str]"


def names(ndim: int) -> list[str]:
    return [f"d{i}" for i in range(ndim)]


def arrow(operands: Iterable[Sequence[str]], outputs: Iterable[Sequence[str]]) -> str:
    return f"{', '.join(map(' '.join, operands))} -> {', '.join(map(' '.join, outputs))}"


def fit(tensor: TensorInfo, dims: Sequence[str]) -> list[str]:
    """Return the names of a tensor's dims when it is broadcast to `dims`, aligned from the right; size 1 is `1`."""
    wanted = dims[len(dims) - tensor.ndim :]
    return ["1" if size == 1 else name for size, name in zip(tensor.shape, wanted, strict=True)]


def chosen(dims: Any, ndim: int) -> set[int]:
    """Return positions from the left of the dims that an op's argument names (one, several, or none for all)."""
    if dims is None or dims == []:
        return set(range(ndim))
    return {d % max(ndim, 1) for d in ([dims] if isinstance(dims, int) else dims)}


def elementwise(call: OpCall) -> str:
    return arrow([["..."]] * len(call.operands), [["..."]] * len(call.outputs))


def whole(call: OpCall) -> str:
    """Return a notation in which nothing can be split."""
    return arrow([["."] * t.ndim for t in call.operands], [["."] * t.ndim for t in call.outputs])


def first_only(call: OpCall) -> str:
    """Return a notation elementwise in the first operand; the others, of any shape, only give a dtype."""
    rest = [["."] * t.ndim for t in call.operands[1:]]
    return arrow([["..."], *rest], [["..."]])


def unsplittable(index: int = 1, name: str = "dim", default: Any = -1) -> Notation:
    """Return a notation that keeps every dim; those named by an argument stay whole (their size may change)."""

    def notation(call: OpCall) -> str:
        return _except(call, chosen(call.arg(index, name, default), call.operands[0].ndim))

    return notation


def _except(call: OpCall, fixed: set[int]) -> str:
    dims = ["." if i in fixed else d for i, d in enumerate(names(call.operands[0].ndim))]
    return arrow([dims] * len(call.operands), [dims] * len(call.outputs))


def reduce(index: int = 1, keep: int = 2, default: Any = None, summed: bool = False) -> Notation:
    """Return a notation without the dims that an argument names (or with size 1); they stay whole unless `summed`."""

    def notation(call: OpCall) -> str:
        ndim = call.operands[0].ndim
        gone = chosen(call.arg(index, "dim", default), ndim)
        dims = names(ndim)
        operand = ["." if i in gone and not summed else d for i, d in enumerate(dims)]
        kept = [d for i, d in enumerate(dims) if i not in gone]
        output = ["1" if i in gone else d for i, d in enumerate(dims)] if call.arg(keep, "keepdim", False) else kept
        return arrow([operand], [output] * len(call.outputs))

    return notation


def loss(reduction: int) -> Notation:
    """Return the notation of an elementwise loss, its mean (1, whole) or its sum (2), by its `reduction` argument."""

    def notation(call: OpCall) -> str:
        match call.arg(reduction, "reduction", 1):
            case 0:
                return elementwise(call)
            case 2:
                return arrow([["..."]] * len(call.operands), [[]])
        return whole(call)

    return notation


def row_loss(reduction: int, weight: int | None = None) -> Notation:
    """Return the notation of a loss per row [n, c], its mean (whole) or sum; `weight`: position of the operand [c]."""

    def notation(call: OpCall) -> str:
        how = call.arg(reduction, "reduction", 1)
        if how not in (0, 2) or call.operands[0].ndim < 2:
            return whole(call)
        rows = [["."] if i == weight else ["n", *["."] * (t.ndim - 1)] for i, t in enumerate(call.operands)]
        return arrow(rows, [["n"] if how == 0 else []])

    return notation


def class_loss(call: OpCall) -> str:
    """Return the notation of cross entropy of logits [n, c, …]: rows and sums are split over all but the classes."""
    logits, labels, *weight = call.operands
    if (reduction := call.arg(3, "reduction", 1)) == 1 or logits.ndim < 2:
        return whole(call)
    dims = [name if i != 1 else "." for i, name in enumerate(names(logits.ndim))]
    rows = [dims[0], *dims[2:]]
    given = dims if labels.ndim == logits.ndim else rows
    return arrow([dims, given, *[["."]] * len(weight)], [[] if reduction == 2 else rows])


def counted(call: OpCall) -> str:
    """Return the notation of valid_count: labels of any shape and, optionally, a weight per class."""
    return "... -> " if len(call.operands) == 1 else "..., . -> "


def permutation(order: Callable[[OpCall, int], Sequence[int]]) -> Notation:
    """Return the notation of a permutation; `order` gives each dim of the result's position in the operand."""

    def notation(call: OpCall) -> str:
        dims = names(call.operands[0].ndim)
        return arrow([dims], [[dims[i] for i in order(call, len(dims))]])

    return notation


def swap(call: OpCall, ndim: int) -> list[int]:
    """Return the order of transpose(dim0, dim1)."""
    order = list(range(ndim))
    if ndim:
        a, b = call.args[1] % ndim, call.args[2] % ndim
        order[a], order[b] = b, a
    return order


def move(call: OpCall, ndim: int) -> list[int]:
    """Return the order of movedim(source, destination)."""
    source, target = (list(a) if isinstance(a, (list, tuple)) else [a] for a in call.args[1:3])
    order: dict[int, int] = {t % ndim: s % ndim for s, t in zip(source, target, strict=True)}
    others = iter(i for i in range(ndim) if i not in order.values())
    return [order[i] if i in order else next(others) for i in range(ndim)]


def slice_(call: OpCall) -> str:
    """Return the notation of a slice, whose dim stays whole unless all of it is taken."""
    dim = call.arg(1, "dim", 0) % call.operands[0].ndim
    return _except(call, set() if same(call.outputs[0].shape[dim], call.operands[0].shape[dim]) else {dim})


def remove(call: OpCall) -> str:
    """Return the notation of select and unbind, which remove one dim; it stays whole."""
    dims = names(call.operands[0].ndim)
    dim = call.arg(1, "dim", 0) % len(dims)
    kept = dims[:dim] + dims[dim + 1 :]
    return arrow([[*dims[:dim], ".", *dims[dim + 1 :]]], [kept] * len(call.outputs))


def squeeze(call: OpCall) -> str:
    """Return the notation of squeeze; every dim named stays whole, since a split could bring its size down to 1."""
    operand = call.operands[0]
    dropped = chosen(call.arg(1, "dim"), operand.ndim)
    dims = ["." if i in dropped else d for i, d in enumerate(names(operand.ndim))]
    return arrow([dims], [[d for i, d in enumerate(dims) if i not in dropped or operand.shape[i] != 1]])


def parts(index: int = 2) -> Notation:
    """Return the notation of chunk and split: `(3 o) -> o, o, o` for equal parts, whole for unequal ones."""

    def notation(call: OpCall) -> str:
        dim = call.arg(index, "dim", 0) % call.operands[0].ndim
        long, short = _composed(call.outputs, dim)
        return arrow([long], [short] * len(call.outputs))

    return notation


def cat(call: OpCall) -> str:
    """Return the inverse of `parts`: `o, o -> (2 o)`."""
    long, short = _composed(call.operands, call.arg(1, "dim", 0) % call.outputs[0].ndim)
    return arrow([short] * len(call.operands), [long])


def _composed(pieces: Sequence[TensorInfo], dim: int) -> tuple[list[str], list[str]]:
    """Return the dims of the concatenation of pieces along `dim`, and of each piece."""
    dims = names(pieces[0].ndim)
    equal = all(same(p.shape[dim], pieces[0].shape[dim]) for p in pieces)
    long, short = list(dims), list(dims)
    long[dim], short[dim] = (f"({len(pieces)} {dims[dim]})", dims[dim]) if equal else (".", ".")
    return long, short


def splits_backward(call: OpCall) -> str:
    """Return the notation of glu, which combines two halves of a dim."""
    dims = names(call.operands[0].ndim)
    dim = call.arg(1, "dim", -1) % len(dims)
    return arrow([[*dims[:dim], f"(2 {dims[dim]})", *dims[dim + 1 :]]], [dims])


def stack(call: OpCall) -> str:
    dims = names(call.operands[0].ndim)
    dim = call.arg(1, "dim", 0) % (len(dims) + 1)
    return arrow([dims] * len(call.operands), [[*dims[:dim], ".", *dims[dim:]]])


def repeat(call: OpCall) -> str:
    """Return the notation of repeat(counts): `d -> (3 d)`; new leading dims are whole."""
    operand, counts = call.operands[0], call.args[1]
    new, dims = len(counts) - operand.ndim, names(operand.ndim)
    source, target = list(dims), ["."] * new
    for i, count in enumerate(counts[new:]):
        fixed = not isinstance(count, int)
        source[i] = "." if fixed else dims[i]
        target.append("." if fixed else dims[i] if count == 1 else f"({count} {dims[i]})")
    return arrow([source], [target])


def repeat_interleave(call: OpCall) -> str:
    """Return the notation of repeat_interleave(count, dim): `d -> (d 3)`; copies of one element can be split."""
    dims, dim = names(call.operands[0].ndim), call.arg(2, "dim", None)
    if dim is None and len(dims) == 1:
        dim = 0
    if dim is None or not isinstance(call.args[1], int):
        return whole(call)
    dim %= len(dims)
    alone = call.operands[0].shape[dim] == 1
    once, copies = ("1", dims[dim]) if alone else (dims[dim], f"({dims[dim]} {call.args[1]})")
    before, after = dims[:dim], dims[dim + 1 :]
    return arrow([[*before, once, *after]], [[*before, copies, *after]])


def pad(call: OpCall) -> str:
    """Return the notation of pad; padded dims stay whole."""
    amounts, ndim = call.args[1], call.operands[0].ndim
    return _except(call, {ndim - 1 - i // 2 for i, amount in enumerate(amounts) if amount != 0})


def drawn(call: OpCall) -> str:
    """Return the notation of a draw, every dim of which can be split; the tensor whose shape it has, if any, alike."""
    dims = names(call.outputs[0].ndim)
    return arrow([dims] * len(call.operands), [dims])


def one_hot(call: OpCall) -> str:
    return arrow([["..."]], [["...", "."]])


def index(call: OpCall) -> str:
    """Return the notation of x[i, :, j]: indexed dims are whole, replaced by the indices' broadcast dims."""
    tensor, *indices = call.operands
    if any(i.dtype in (torch.bool, torch.uint8) for i in indices):
        return whole(call)
    slots = [*call.args[1], *[None] * (tensor.ndim - len(call.args[1]))]
    at = [i for i, slot in enumerate(slots) if slot is not None]
    wide = [f"i{i}" for i in range(max(i.ndim for i in indices))]
    dims = ["." if i in at else d for i, d in enumerate(names(tensor.ndim))]
    adjacent = at == list(range(at[0], at[0] + len(at)))
    kept = [d for d in dims if d != "."]
    first = at[0] if adjacent else 0
    return arrow([dims, *(fit(i, wide) for i in indices)], [[*kept[:first], *wide, *kept[first:]]])


def gather(call: OpCall) -> str:
    """Return the notation of gather(x, dim, index): `dim` of x is whole; other dims can be split if index covers x."""
    tensor, indices = call.operands
    dim = call.arg(1, "dim") % max(tensor.ndim, 1)
    covered = [same(a, b) for a, b in zip(tensor.shape, indices.shape, strict=True)]
    dims = [d if ok or i == dim else "." for i, (d, ok) in enumerate(zip(names(tensor.ndim), covered, strict=True))]
    return arrow([["." if i == dim else d for i, d in enumerate(dims)], dims], [dims])


def index_select(call: OpCall) -> str:
    dims = names(call.operands[0].ndim)
    dim = call.arg(1, "dim") % len(dims)
    return arrow([[*dims[:dim], ".", *dims[dim + 1 :]], [dims[dim]]], [dims])


def index_add(call: OpCall) -> str:
    """Return the notation of index_add(x, dim, index, source): `dim` is whole, all other dims can be split."""
    ndim = call.operands[0].ndim
    dim = call.arg(1, "dim") % ndim
    dims = ["." if i == dim else d for i, d in enumerate(names(ndim))]
    return arrow([dims, ["."], dims], [dims])


def scatter(call: OpCall) -> str:
    """Return the notation of scatter(x, dim, index, source): other dims can be split if index and source cover x."""
    tensor, *others = call.operands
    dim = call.arg(1, "dim") % tensor.ndim
    dims = [
        d if i != dim and all(same(o.shape[i], tensor.shape[i]) for o in others) else "."
        for i, d in enumerate(names(tensor.ndim))
    ]
    return arrow([dims] * len(call.operands), [dims])


def scattered(removed: bool) -> Notation:
    """Return the notation of slice_scatter and select_scatter; `removed`: the source lacks the dim (select_scatter)."""

    def notation(call: OpCall) -> str:
        ndim = call.operands[0].ndim
        dim = call.arg(2, "dim", 0) % ndim
        dims = ["." if i == dim else d for i, d in enumerate(names(ndim))]
        return arrow([dims, [d for i, d in enumerate(dims) if i != dim] if removed else dims], [dims])

    return notation


def linear(call: OpCall) -> str:
    return "... k, o k, +o -> ... o" if len(call.operands) == 3 else "... k, o k -> ... o"


def matmul(call: OpCall) -> str:
    a, b = (t.ndim for t in call.operands)
    left = "k" if a == 1 else "... m k"
    right = "k" if b == 1 else "... k n"
    return f"{left}, {right} -> {'' if a == b == 1 else '...'} {'m' if a > 1 else ''} {'n' if b > 1 else ''}"


def triangular(call: OpCall) -> str:
    """Return the notation of X in A X = B, whose columns are apart, or of X in X A = B, whose rows are."""
    given = "... n ." if call.kwargs.get("left", True) is False else "... . n"
    return f"... . ., {given} -> {given}"


def addmm(call: OpCall) -> str:
    """Return the notation of bias + a @ b, with or without a batch dim."""
    batch = ["b"] * (call.outputs[0].ndim - 2)
    bias = fit(call.operands[0], [*batch, "m", "n"])
    return arrow([["+", *bias], [*batch, "m", "k"], [*batch, "k", "n"]], [[*batch, "m", "n"]])


def pool(space: int) -> Notation:
    """Return a notation that keeps every dim; the last `space` dims are whole."""

    def notation(call: OpCall) -> str:
        return _except(call, {call.operands[0].ndim - 1 - i for i in range(space)})

    return notation


def normalised(call: OpCall) -> str:
    """Return the notation of layer_norm and rms_norm: normalised dims are whole; statistics have size 1 there."""
    fixed = len(call.args[1])
    statistics = [["...", *["1"] * fixed]] * (len(call.outputs) - 1)
    weights = [["."] * fixed] * (len(call.operands) - 1)
    return arrow([["...", *["."] * fixed], *weights], [["...", *["."] * fixed], *statistics])


def weight_norm(call: OpCall) -> str:
    """Return the notation of weight_norm, which takes norms over all dims but one, or over all (dim -1).

    Its kernel does not check that both operands have the same part of that dim, and writes where it may not.
    """
    dim = call.arg(2, "dim", 0)
    kept = ["f" if i == dim else "." for i in range(call.operands[0].ndim)]
    return arrow([kept, kept if call.operands[1].ndim else []], [kept])


def channels(call: OpCall) -> str:
    """Return the notation of batch_norm, which has statistics per channel."""
    dims = [".", "c", *["."] * (call.operands[0].ndim - 2)]
    return arrow([dims, *[["c"]] * (len(call.operands) - 1)], [dims])


def samples(call: OpCall) -> str:
    """Return the notation of group_norm, which treats samples independently."""
    rest = ["."] * (call.operands[0].ndim - 1)
    return arrow([["n", *rest], *[["."]] * (len(call.operands) - 1)], [["n", *rest]])


def einsum(call: OpCall) -> str:
    """Return the equation of einsum as a notation, one letter per factor."""
    left, _, right = call.args[0].replace(" ", "").partition("->")
    if "->" not in call.args[0]:
        letters = left.replace(",", "").replace("...", "")
        right = ("..." if "..." in left else "") + "".join(sorted(c for c in letters if letters.count(c) == 1))
    terms = zip(map(_letters, left.split(",")), call.operands, strict=True)  # a letter of size 1 broadcasts
    return arrow([t if "..." in t else fit(tensor, t) for t, tensor in terms], [_letters(right)])


def _letters(term: str) -> list[str]:
    before, dots, after = term.partition("...")
    return [*before, *([dots] if dots else []), *after]
