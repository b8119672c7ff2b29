"""Lines that join several ops, or an op and a conversion: a head in chunks of the vocabulary, with its product and its
loss; products beside communication of tp, with what is gathered for them or scattered after them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import fx

from autoptd.codegen.expressions import SourceText, call_text
from autoptd.codegen.lines import conversion_args, conversion_note
from autoptd.codegen.names import read_by
from autoptd.layout.placements import BP, P, Placement, Split
from autoptd.passes.analysis.heads import LOSSES, Head
from autoptd.passes.graph import info, op_call, operands
from autoptd.passes.rules.factors import Strategy
from autoptd.passes.sharding.tp_products import RingScatter, SharedOperand

_OPTIONS = (("ignore_index", -100), ("label_smoothing", 0.0))  # of a loss, behind logits and labels


class LineWriter(Protocol):
    """The parts of a `Body` that a line needs."""

    def read(self, node: fx.Node, given: Placement, needed: Placement) -> str: ...

    def op_text(self, node: fx.Node, strategy: Strategy, texts: list[SourceText]) -> str: ...


def line_reads(node: fx.Node, head: Head | None) -> Iterator[fx.Node]:
    """Yield the tensors that the line of an op reads; that of the loss of a `head` computes the head."""
    if head is None:
        yield from read_by(node)
        return
    yield from read_by(head.linear)
    yield from (o for o in read_by(node) if o not in head.inner)


def head_text(
    body: LineWriter, head: Head, strategies: Mapping[fx.Node, Strategy], given: Mapping[fx.Node, Placement]
) -> str:
    """Return the expression of a head and its loss, on local tensors."""
    product, loss = strategies[head.linear], strategies[head.loss]
    needs = [*zip(operands(head.linear), product.needs, strict=True), (operands(head.loss)[1], loss.needs[1])]
    x, weight, *bias, labels = (SourceText(body.read(o, given[o], p)) for o, p in needs)
    for node in head.slices:
        x = SourceText(body.op_text(node, strategies[node], [x]))
    call, function = op_call(head.loss), LOSSES[head.loss.target]
    options: dict[str, object] = {"tp": SourceText("tp")} if loss.implementation else {}
    for place, (name, default) in enumerate(_OPTIONS, start=2):
        if (value := call.arg(place, name, default)) != default:
            options[name] = value
    own = torch.promote_types(info(operands(head.linear)[0]).dtype, torch.float32)
    options |= {"dtype": head.computed_in} if head.computed_in != own else {}
    text = call_text(f"ops.{function.__name__}", (x, weight, labels, *bias), options)
    result = info(head.loss).dtype
    return text if result == head.computed_in else f"{text}.to({result})"


def products_text(
    body: LineWriter, shared: SharedOperand, strategies: Mapping[fx.Node, Strategy], given: Mapping[fx.Node, Placement]
) -> str:
    """Return the products of a tensor as one call, with its comment."""
    x = body.read(shared.tensor, given[shared.tensor], shared.source)
    columns = []
    for node in shared.products:
        reads = zip(operands(node)[1:], strategies[node].needs[1:], strict=True)
        weight, *bias = (SourceText(body.read(o, given[o], p)) for o, p in reads)
        columns.append((weight, bias[0] if bias else None))
    weights, biases = zip(*columns, strict=True)
    function = "gather_linear" if isinstance(shared.source, Split) else "sum_gradient_linear"
    if len(columns) == 1:
        texts = [weights[0], *(b for b in biases if b is not None)]
    else:
        function += "s"
        texts = [f"[{', '.join(weights)}]"]
        texts += [f"[{', '.join(map(str, biases))}]"] if any(biases) else []
    options = [f"{name}=True" for name in ("again", "ring") if getattr(shared, name)]
    args = [x, *texts, *conversion_args(shared.source, BP), *options]
    return f"tp.{function}({', '.join(args)})  # {conversion_note(shared.source, BP, True)}"


def scattered_text(product: str, scatter: RingScatter) -> str:
    """Return `F.linear(x, w)` and the conversion of its result as one call, with its comment."""
    given = product.removeprefix("F.linear(").removesuffix(")")
    args = ", ".join([given, *conversion_args(P, scatter.target)])
    note = conversion_note(P, scatter.target, info(scatter.product).requires_grad)
    return f"tp.linear_scatter({args})  # {note}"
