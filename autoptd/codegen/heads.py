"""The line of a head that is computed in chunks of the vocabulary: its product, and its loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import fx

from autoptd.codegen.expressions import SourceText, call_text
from autoptd.codegen.names import read_by
from autoptd.layout.placements import Placement
from autoptd.passes.analysis.heads import LOSSES, Head
from autoptd.passes.graph import info, op_call, operands
from autoptd.passes.rules.factors import Strategy

_OPTIONS = (("ignore_index", -100), ("label_smoothing", 0.0))  # of a loss, behind logits and labels


class HeadWriter(Protocol):
    """The parts of a `Body` that a head needs."""

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
    body: HeadWriter, head: Head, strategies: Mapping[fx.Node, Strategy], given: Mapping[fx.Node, Placement]
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
