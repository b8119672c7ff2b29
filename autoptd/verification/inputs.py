"""Batches to verify with: ids within every table that they index, labels of which each sample counts another number."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx

from autoptd.compile import TracedModel
from autoptd.passes.graph import ancestors, info, op_name
from autoptd.passes.trace import BATCH
from autoptd.verification.smaller import inputs_of

aten = torch.ops.aten


def make_batches(source: TracedModel, sizes: dict[str, int], samples: int, steps: int) -> list[dict[str, Tensor]]:
    """Global batches of `samples` each, the same on every run. `sizes`: of the plan's symbols."""
    values = {s: sizes.get(str(s), n) for s, n in source.sizes.items()} | {BATCH: samples}
    bounds, ignored = dict(_bounds(source)), dict(_ignored(source))
    generator = torch.Generator().manual_seed(2)
    first: dict[str, Tensor] = {}
    for name, shape, dtype in inputs_of(source, values):
        if dtype.is_floating_point:
            first[name] = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        elif dtype == torch.bool or name not in bounds:
            first[name] = torch.ones(shape, dtype=dtype)
        else:
            first[name] = torch.randint(0, bounds[name], shape, generator=generator, dtype=dtype)
        if name in ignored and len(shape) > 1:
            _ignore_some(first[name], ignored[name])
    return [{name: x.roll(step, 0) for name, x in first.items()} for step in range(steps)]


def _ignore_some(labels: Tensor, value: int) -> None:
    """Of sample i the first labels, another number of each; never all of a batch."""
    for i, row in enumerate(labels):
        row[: (i * 5) % (3 * row.shape[0] // 4 + 1)] = value


def _bounds(source: TracedModel) -> Iterator[tuple[str, int]]:
    """Input -> one more than the largest number it may hold: the smallest table or number of classes."""
    traced = source.folded.traced
    found: dict[str, int] = {}
    for node in traced.graph.graph.nodes:
        for index, bound in _indexed(node):
            for reached in ancestors([index]):
                if reached.op == "placeholder" and (name := traced.inputs.get(reached.name)):
                    found[name] = min(found.get(name, bound), bound)
    yield from found.items()


def _indexed(node: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    """Operands of a node that are indices, and how many there are."""
    if node.op != "call_function":
        return
    if node.target is aten.embedding.default:
        yield node.args[1], int(info(node.args[0]).shape[0])  # type: ignore[misc, arg-type]
    elif op_name(node).split(".")[0].endswith(("cross_entropy", "cross_entropy_loss", "nll_loss", "nll_loss_nd")):
        yield node.args[1], int(info(node.args[0]).shape[-1])  # type: ignore[misc, arg-type]


def _ignored(source: TracedModel) -> Iterator[tuple[str, int]]:
    """Inputs of which the loss counts some, and the label that it leaves out."""
    traced = source.folded.traced
    for count in source.folded.counts:
        if op_name(count).split(".")[0].endswith("valid_count"):
            for reached in ancestors([count]):
                if reached.op == "placeholder" and (name := traced.inputs.get(reached.name)):
                    yield name, int(count.args[1])  # type: ignore[arg-type]
