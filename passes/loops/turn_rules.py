"""One op of a loop's turn, written for all turns at once: operands that differ have the turns in a dim 0 of their own.

linear x, weight         [n, …, k], weight          ops that take any leading dims stay as they are
transpose x, 0, 1        transpose x, 1, 2          dims count from the turns' on
conv2d x [1, c, h, w]    conv2d x [n, c, h, w]      the turns are merged with a dim of samples
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoptd.passes.graph import info, infos, is_float, numel, op_call, op_name, operands, plain, substitute, write_op
from autoptd.passes.opcall import Size, TensorInfo
from autoptd.passes.rules import op_notations as notations
from autoptd.passes.rules.table import RULES

aten = torch.ops.aten
_FREE = (
    *("linear", "layer_norm", "rms_norm", "embedding", "pad", "constant_pad_nd", "mT", "mH", "tril", "triu"),
    "one_hot",
)
_SAME = ("to", "_to_copy", "type_as", "clone", "contiguous", "detach", "alias", "dropout", "where", "broadcast_tensors")
_VIEWS = ("reshape", "view", "_unsafe_view", "flatten", "unflatten", "squeeze", "view_as", "reshape_as")
_DIMS: Mapping[str, tuple[int, ...]] = {  # op -> its arguments that are dims
    **dict.fromkeys(("select", "slice", "narrow", "softmax", "log_softmax", "cumsum", "glu"), (1,)),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "flip", "permute", "all", "any"), (1,)),
    **dict.fromkeys(("chunk", "split", "split_with_sizes", "roll"), (2,)),
    **dict.fromkeys(("unbind", "cat", "stack"), (1,)),
    **dict.fromkeys(("sort", "argsort", "logsumexp"), (1,)),
    "slice_scatter": (2,),
    "transpose": (1, 2),
    "unsqueeze": (1,),
}
_DEFAULT = {
    **dict.fromkeys(("slice", "slice_scatter", "chunk", "split", "split_with_sizes", "unbind", "cat", "stack"), 0),
    **dict.fromkeys(("sort", "argsort", "glu"), -1),
}
_MERGED = ("conv1d", "conv2d", "conv3d", "scaled_dot_product_attention", "avg_pool2d", "max_pool2d", "im2col")
_PICTURES = ("upsample", "_upsample", "_adaptive_avg_pool", "adaptive_avg_pool")


@dataclass(frozen=True)
class Turns:
    """A tensor of all turns: with the turns in dim 0, or the same in each of them."""

    node: fx.Node
    differs: bool


class UnlikeTurnsError(Exception):
    """A loop whose turns cannot be written as one pass: the op at which they differ, and why."""

    def __init__(self, node: fx.Node, why: str) -> None:
        super().__init__(why)
        self.node, self.why = node, why


class UnwrittenTurnsError(UnlikeTurnsError):
    """A loop whose turns are alike up to an op that cannot be written for all of them at once."""


@dataclass(frozen=True)
class TurnRules:
    """Writer of the ops of a loop with `count` turns, into a graph at its insert point."""

    graph: fx.Graph
    count: Size

    def write(self, node: fx.Node, given: Mapping[fx.Node, Turns]) -> Turns:
        """Return an op of the first turn for all turns. Raises UnwrittenTurnsError for an op that has no rule here."""
        name = op_name(node)
        if not any(given[x].differs for x in operands(node)) or name.startswith(("new_", "zeros", "ones", "full")):
            return Turns(node, False)
        if name in RULES_OF:
            made = RULES_OF[name](self, node, given)
        elif name in _VIEWS:
            made = self.reshape(given[node.args[0]].node, self.shape(node))  # type: ignore[index]
        elif name in _SAME or (node.target in RULES and RULES[node.target].notation is notations.elementwise):  # type: ignore[index]
            made = self._aligned(node, given)
        elif name in _FREE:
            made = self._free(node, given)
        elif name in _DIMS:
            made = self._moved(node, given, _DIMS[name])
        elif name in _MERGED or name.startswith(_PICTURES):
            made = self._merged(node, given)
        else:
            raise UnwrittenTurnsError(node, f"{name} is not written for several turns at once")
        return Turns(made, True)

    def shape(self, node: fx.Node) -> tuple[Size, ...]:
        return (self.count, *info(node).shape)

    def spread(self, x: Turns) -> fx.Node:
        """Return a tensor with the turns in dim 0, also if it is the same in each."""
        if x.differs:
            return x.node
        shape = self.shape(x.node)
        return write_op(self.graph, x.node, aten.expand.default, (x.node, list(shape)), shape)

    def reshape(self, x: fx.Node, shape: Sequence[Size]) -> fx.Node:
        return write_op(self.graph, x, aten.reshape.default, (x, list(map(plain, shape))), tuple(shape))

    def permute(self, x: fx.Node, dims: Sequence[int]) -> fx.Node:
        shape = info(x).shape
        return write_op(self.graph, x, aten.permute.default, (x, list(dims)), tuple(shape[d] for d in dims))

    def wide(self, x: fx.Node, ndim: int) -> fx.Node:
        """Return a tensor of the turns with dims of size 1 after the first, so that it has `ndim` besides."""
        shape = info(x).shape
        more = ndim + 1 - len(shape)
        return self.reshape(x, (shape[0], *[1] * more, *shape[1:])) if more > 0 else x

    def again(self, node: fx.Node, args: Any, kwargs: Mapping[str, Any] | None = None) -> fx.Node:
        """Return an op of the first turn with other arguments, whose results have the turns in dim 0."""
        made = self.graph.call_function(node.target, tuple(args), dict(node.kwargs if kwargs is None else kwargs))  # type: ignore[arg-type]
        made.meta = {key: value for key, value in node.meta.items() if key in ("nn_module_stack", "stack_trace")}
        each = tuple(TensorInfo((self.count, *t.shape), t.dtype, t.requires_grad) for t in infos(node))
        made.meta["info"] = each[0] if isinstance(node.meta["info"], TensorInfo) else each
        return made

    def _aligned(
        self,
        node: fx.Node,
        given: Mapping[fx.Node, Turns],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> fx.Node:
        """Write an op whose operands are broadcast; `args` and `kwargs` are those of the turn unless given."""
        ndim = max(info(x).ndim for x in operands(node))
        args, kwargs = node.args if args is None else args, node.kwargs if kwargs is None else kwargs

        def wide(x: fx.Node) -> fx.Node:
            return self.wide(given[x].node, ndim) if given[x].differs else given[x].node

        return self.again(node, substitute(tuple(args), wide), {k: substitute(v, wide) for k, v in kwargs.items()})

    def _free(self, node: fx.Node, given: Mapping[fx.Node, Turns]) -> fx.Node:
        turning = 1 if op_name(node) == "embedding" else 0
        if any(given[x].differs for i, x in enumerate(operands(node)) if i != turning):
            raise UnwrittenTurnsError(node, "its weights differ from turn to turn")
        return self.again(node, substitute(node.args, lambda x: given[x].node))

    def _moved(self, node: fx.Node, given: Mapping[fx.Node, Turns], at: Sequence[int]) -> fx.Node:
        name, listed = op_name(node), op_name(node) in ("cat", "stack", "slice_scatter")
        ndim = info(operands(node)[0]).ndim + (name in ("unsqueeze", "stack"))
        args = list(substitute(node.args, lambda x: self.spread(given[x]) if listed else given[x].node))
        while len(args) <= max(at):
            if name not in _DEFAULT:
                raise UnwrittenTurnsError(node, f"{name} of a whole turn is not written for several at once")
            args.append(_DEFAULT[name])
        for i in at:
            dims = args[i]
            args[i] = [d % ndim + 1 for d in dims] if isinstance(dims, (list, tuple)) else dims % ndim + 1
        if name == "permute":
            args[1] = [0, *args[1]]
        if (name in ("sum", "mean", "amax", "amin", "all", "any") and not args[1]) or (set(node.kwargs) - {"dtype"}):
            raise UnwrittenTurnsError(node, f"{name} of a whole turn is not written for several at once")
        return self.again(node, args)

    def _merged(self, node: fx.Node, given: Mapping[fx.Node, Turns]) -> fx.Node:
        """Return an op that treats the rows of dim 0 apart, with those of all turns in it."""
        first, rest = operands(node)[0], operands(node)[1:]
        rows = info(first).shape[0]
        attention = op_name(node) == "scaled_dot_product_attention"
        if not attention and (any(given[x].differs for x in rest) or info(first).ndim < _ROWS.get(op_name(node), 3)):
            raise UnwrittenTurnsError(node, "its operands differ from turn to turn")

        def merge(x: fx.Node) -> fx.Node:
            if x is not first and (not attention or (not given[x].differs and info(x).shape[0] == 1 != rows)):
                return given[x].node
            if info(x).ndim != info(first).ndim or info(x).shape[0] != rows:
                raise UnwrittenTurnsError(node, "its operands differ in their dims")
            return self.reshape(self.spread(given[x]), (self.count * rows, *info(x).shape[1:]))

        args = substitute(node.args, merge)
        kwargs = {key: substitute(value, merge) for key, value in node.kwargs.items()}
        shape = info(node).shape
        made = self.again(node, args, kwargs)
        made.meta["info"] = TensorInfo(
            (plain(self.count * rows), *shape[1:]), info(node).dtype, info(node).requires_grad
        )
        return self.reshape(made, self.shape(node))

    def _expanded(self, node: fx.Node, given: Mapping[fx.Node, Turns]) -> fx.Node:
        shape = self.shape(node)
        x = self.wide(given[node.args[0]].node, info(node).ndim)  # type: ignore[index]
        return write_op(self.graph, x, aten.expand.default, (x, list(shape)), shape)

    def _product(self, node: fx.Node, given: Mapping[fx.Node, Turns]) -> fx.Node:
        if min(info(x).ndim for x in operands(node)) < 2:
            raise UnwrittenTurnsError(node, "a product with a vector is not written for several turns at once")
        return self._aligned(node, given)

    def _transposed(self, node: fx.Node, given: Mapping[fx.Node, Turns]) -> fx.Node:
        x = given[node.args[0]].node  # type: ignore[index]
        return self.permute(x, [0, *range(info(x).ndim - 1, 0, -1)])

    def _einsum(self, node: fx.Node, given: Mapping[fx.Node, Turns]) -> fx.Node:
        """Give the turns a letter of their own."""
        equation, terms = str(node.args[0]).replace(" ", ""), list[fx.Node](node.args[1])  # type: ignore[arg-type]
        left, arrow, right = equation.partition("->")
        turn = next(letter for letter in string.ascii_letters if letter not in equation)
        if not arrow or "." in equation:
            raise UnwrittenTurnsError(node, f"the einsum {equation!r} is not written for several turns at once")
        parts = [turn * given[x].differs + part for x, part in zip(terms, left.split(","), strict=True)]
        return self.again(node, (f"{','.join(parts)}->{turn}{right}", [given[x].node for x in terms], *node.args[2:]))

    def _of_whole(self, node: fx.Node, given: Mapping[fx.Node, Turns]) -> fx.Node:
        """Reduce each turn to one number; or along a dim, if the op has one."""
        x = operands(node)[0]
        if node.target not in _WHOLE or info(node).ndim or len(operands(node)) > 1:
            return self._moved(node, given, _DIMS[op_name(node)])
        dtype = info(node).dtype
        wide = self.wide(given[x].node, info(x).ndim)
        dims = list(range(1, info(x).ndim + 1))
        if not dims:
            return wide
        return write_op(self.graph, node, _WHOLE[node.target], (wide, dims), (self.count,), dtype, dict(node.kwargs))

    def _elementwise_loss(self, node: fx.Node, given: Mapping[fx.Node, Turns]) -> fx.Node:
        """Reduce the elements of a loss to one number for each turn."""
        call = op_call(node)
        at = next(i for i, a in enumerate(node.target._schema.arguments) if a.name == "reduction")  # type: ignore[union-attr]
        reduction = call.arg(at, "reduction", _MEAN)
        args = [*node.args[:at], *[None] * (at - len(node.args)), _NONE, *node.args[at + 1 :]]
        if None in args[len(node.args) : at] or reduction not in (_NONE, _MEAN, _SUM):
            raise UnwrittenTurnsError(
                node, f"{op_name(node)} with these options is not written for several turns at once"
            )
        shape = _broadcast(*(info(x).shape for x in operands(node)))
        made = self._aligned(node, given, args, {k: v for k, v in node.kwargs.items() if k != "reduction"})
        made.meta["info"] = TensorInfo((self.count, *shape), info(node).dtype, info(node).requires_grad)
        return made if reduction == _NONE else self._reduced(node, made, reduction == _MEAN)

    def _reduced(self, node: fx.Node, x: fx.Node, mean: bool) -> fx.Node:
        dims = list(range(1, info(x).ndim))
        target = aten.mean.dim if mean else aten.sum.dim_IntList
        return write_op(self.graph, node, target, (x, dims), (self.count,), info(x).dtype) if dims else x

    def _labelled(self, node: fx.Node, given: Mapping[fx.Node, Turns]) -> fx.Node:
        """Reduce the losses of all labels of a turn to one number: a mean is over those that are not ignored."""
        call = op_call(node)
        logits, labels, *weight = operands(node)
        reduction, ignored = call.arg(3, "reduction", _MEAN), call.arg(4, "ignore_index", -100)
        if weight or is_float(info(labels).dtype) or reduction not in (_MEAN, _SUM):
            raise UnwrittenTurnsError(
                node, f"{op_name(node)} with these options is not written for several turns at once"
            )
        x, y = self.spread(given[logits]), self.spread(given[labels])
        if info(logits).ndim > 1:
            x = self.reshape(x, (self.count * info(logits).shape[0], *info(logits).shape[1:]))
            y = self.reshape(y, (self.count * info(labels).shape[0], *info(labels).shape[1:]))
        options = (None, _NONE, ignored, *node.args[5:])
        kwargs = {k: v for k, v in node.kwargs.items() if k == "label_smoothing"}
        each = write_op(self.graph, node, node.target, (x, y, *options), info(y).shape, info(node).dtype, kwargs)  # type: ignore[arg-type]
        total = self._reduced(node, self.reshape(each, (self.count, numel(info(labels).shape))), mean=False)
        if reduction == _SUM:
            return total
        flat = self.reshape(y, (self.count, numel(info(labels).shape)))
        shape = info(flat).shape
        valid = write_op(self.graph, node, aten.ne.Scalar, (flat, ignored), shape, torch.bool)
        count = write_op(self.graph, node, aten.sum.dim_IntList, (valid, [1]), (self.count,), torch.int64)
        return write_op(self.graph, node, aten.div.Tensor, (total, count), (self.count,), info(node).dtype)

    def _dotted(self, node: fx.Node, given: Mapping[fx.Node, Turns]) -> fx.Node:
        a, b = (self.spread(given[x]) for x in operands(node))
        product = write_op(self.graph, node, aten.mul.Tensor, (a, b), info(a).shape, info(node).dtype)
        return self._reduced(node, product, mean=False)

    def _indexed(self, node: fx.Node, given: Mapping[fx.Node, Turns]) -> fx.Node:
        source, *indices = operands(node)
        if [info(x).ndim for x in operands(node)] == [1, 1] and info(indices[0]).dtype is torch.int64:
            rows, places = self.spread(given[source]), self.spread(given[indices[0]])
            return write_op(self.graph, node, aten.gather.default, (rows, 1, places), self.shape(node))
        if given[source].differs and not any(given[x].differs for x in indices):
            slots: Any = node.args[1]
            return self.again(node, (given[source].node, [None, *slots]))
        if not given[source].differs and len(indices) == len(node.args[1]) == 1:  # type: ignore[arg-type]
            return self.again(node, (source, [given[indices[0]].node]))
        raise UnwrittenTurnsError(node, "its indices differ from turn to turn")


_ROWS = {
    "im2col": 4,
    "conv1d": 3,
    "conv2d": 4,
    "conv3d": 5,
    "avg_pool2d": 4,
    "max_pool2d": 4,
}  # op -> dims with one of samples
_NONE, _MEAN, _SUM = 0, 1, 2  # torch's codes of reductions
_WHOLE: Mapping[Any, Any] = {  # op that reduces all dims -> the same along some
    aten.sum.default: aten.sum.dim_IntList,
    aten.mean.default: aten.mean.dim,
    aten.max.default: aten.amax.default,
    aten.min.default: aten.amin.default,
}
_ELEMENTWISE_LOSSES = (
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div", "poisson_nll_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "hinge_embedding_loss", "margin_ranking_loss"),
)


def _broadcast(*shapes: tuple[Size, ...]) -> tuple[Size, ...]:
    ndim = max(map(len, shapes))
    wide = [(*[1] * (ndim - len(shape)), *shape) for shape in shapes]
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*wide, strict=True))


RULES_OF: Mapping[str, Callable[[TurnRules, fx.Node, Mapping[fx.Node, Turns]], fx.Node]] = {
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), TurnRules._expanded),
    **dict.fromkeys(("matmul", "bmm"), TurnRules._product),
    **dict.fromkeys(("t", "numpy_T"), TurnRules._transposed),
    **dict.fromkeys(("sum", "mean", "max", "min"), TurnRules._of_whole),
    **dict.fromkeys(_ELEMENTWISE_LOSSES, TurnRules._elementwise_loss),
    **dict.fromkeys(("cross_entropy_loss", "nll_loss_nd"), TurnRules._labelled),
    "dot": TurnRules._dotted,
    "index": TurnRules._indexed,
    "einsum": TurnRules._einsum,
}
