"""The plan's graph run op by op on whole tensors: the reference for every line of a program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from autoptd.compile.layout import named_values
from autoptd.compile.traced import TracedModel
from autoptd.layout.layout import Layout
from autoptd.ops import library as ops
from autoptd.ops.dropout import DropoutKey
from autoptd.passes.graph import ancestors, concrete, info, op_name, output_of, substitute
from autoptd.passes.losses.loss_form import COUNT, partial_slices, row_slices
from autoptd.passes.trace.traced import BATCH
from autoptd.runtime.batch import cut_batch, sample_count
from autoptd.verification.keyed import Draw, as_float64
from autoptd.verification.plain import draw_of

aten = torch.ops.aten
Values = dict[fx.Node, Tensor]


@dataclass(frozen=True)
class BatchTotals:
    """Quantities of the whole batch that each microbatch needs.

    counts: the denominators of means. gradient: if the loss is a function of sums, its derivative at these sums.
    rest: the loss minus its linear part at the sums, so that the microbatches' losses add up to the loss.
    """

    counts: tuple[Tensor, ...]
    gradient: Tensor | None = None
    rest: float = 0.0

    def of_samples(self, source: TracedModel, first: int, samples: int) -> Tensor | None:
        """Return the derivative at what a microbatch gives: the sums, then the rows of its samples."""
        form = source.folded.loss_form
        if self.gradient is None or not form.rows:
            return self.gradient
        sums, rows = self.gradient.split((form.width, len(self.gradient) - form.width))
        return torch.cat((sums, rows[first * form.row_width : (first + samples) * form.row_width]))


def batch_totals(source: TracedModel, batch: Mapping[str, Tensor], draws: Mapping[fx.Node, Draw]) -> BatchTotals:
    """Compute the counts of a whole batch, round by round where one depends on others, then the sums of the loss."""
    folded, buffers = source.folded, dict(_buffers(source))
    counts = [torch.ones(concrete(tuple(info(n).shape), {}), dtype=torch.float64) for n in folded.counts]
    for _ in range(1 + max(folded.loss_form.rounds, default=-1)):
        values = _run(source, buffers, batch, counts, ancestors(folded.counts), ())
        counts = [values[n].double() for n in folded.counts]
    if folded.loss_form.outer is None:
        return BatchTotals(tuple(counts))
    state = {**buffers, **{n: p.detach() for n, p in source.model.named_parameters()}}
    sums = _run(source, state, batch, counts, None, draws, DropoutKey(0))[folded.loss].detach().requires_grad_()
    loss = _outer(source, sums, counts, batch)
    (gradient,) = torch.autograd.grad(loss, sums)
    return BatchTotals(tuple(counts), gradient, float(loss.detach() - (gradient * sums.detach()).sum()))


def _outer(source: TracedModel, sums: Tensor, counts: Sequence[Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    """Return the loss as a function of the sums of a batch, and of the rows of its samples."""
    form, sizes = source.folded.loss_form, _sizes(source, batch)
    assert form.outer is not None
    samples = sizes[BATCH]
    state, rows = dict(_buffers(source)), sums[form.width :].view(samples, -1)
    values: dict[fx.Node, Any] = {}
    for node, (start, stop, shape, _) in zip(form.partial_sums, partial_slices(form.partial_sums), strict=True):
        values[node] = sums[start:stop].view(shape)
    for node, (start, stop, shape, dtype) in zip(form.rows, row_slices(form.rows), strict=True):
        values[node] = as_float64(rows[:, start:stop].reshape(samples, *shape).to(dtype))
    values = {n: x if info(n).requires_grad else x.detach() for n, x in values.items()}
    for node in form.outer.nodes:
        if node.op == "placeholder" and node not in values:
            values[node] = _given(source, node.name, state, batch, counts)
        elif node.op == "call_function":
            args = as_float64(concrete(substitute(node.args, values.__getitem__), sizes))
            kwargs = {k: as_float64(concrete(substitute(v, values.__getitem__), sizes)) for k, v in node.kwargs.items()}
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    (loss,) = output_of(form.outer).args
    made: Tensor = values[loss]  # type: ignore[index]
    return made


@dataclass(frozen=True)
class GraphRun:
    """The values and gradients of every node, and the gradient of each parameter, by original name."""

    loss: float
    values: Values
    gradients: dict[fx.Node, Tensor | None]
    parameters: dict[str, Tensor]


def run_whole(
    source: TracedModel,
    batch: Mapping[str, Tensor],
    totals: BatchTotals,
    draws: Mapping[fx.Node, Draw],
    first: int,
    part: float = 1.0,
) -> GraphRun:
    """Run a microbatch, or the whole batch, forward and backward. `first`: its first sample; `part`: its share."""
    model = source.model
    parameters = {n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in model.named_parameters()}
    rng = DropoutKey(0)
    rng.sample = first
    values = _run(source, {**dict(_buffers(source)), **parameters}, batch, totals.counts, None, draws, rng)
    loss = values[source.folded.loss]
    kept = [n for n, x in values.items() if isinstance(x, Tensor) and x.requires_grad and x.grad_fn is not None]
    trained = {n: p for n, p in parameters.items() if p.requires_grad}
    wanted = [*(values[n] for n in kept), *trained.values()]
    given = totals.of_samples(source, first, sample_count(dict(batch)))
    found = torch.autograd.grad(loss, wanted, given, allow_unused=True, retain_graph=True)
    own = zip(trained.items(), found[len(kept) :], strict=True)
    linear = loss.detach() if given is None else (given * loss.detach()).sum()
    return GraphRun(
        float(linear) + totals.rest * part,
        values,
        dict(zip(kept, found, strict=False)),
        {n: torch.zeros_like(p) if grad is None else grad for (n, p), grad in own},
    )


def microbatches(layout: Layout, batch: Mapping[str, Tensor]) -> Iterator[tuple[int, int, int, Mapping[str, Tensor]]]:
    """Yield (dp rank, number, index of its first sample in the batch, tensors) of every microbatch of a step."""
    first = 0
    for dp in range(layout.mesh.dp):
        parts, shared = layout.mesh.dp, layout.shared
        share = {name: x if name in shared else x.tensor_split(parts)[dp] for name, x in batch.items()}
        cut = cut_batch(share, layout.inputs, layout.micro, layout.microbatches, torch.device("cpu"), shared)
        for number, micro in enumerate(cut):
            yield dp, number, first, micro
            first += sample_count(micro)


def drawn_nodes(source: TracedModel, draws: Sequence[Draw]) -> dict[fx.Node, Draw]:
    """Return each dropout node -> its draw."""
    by_key = {draw.key: draw for draw in draws}
    return {
        node: by_key[f"{segment.index}.{i}"]
        for segment in source.folded.segments
        for i, node in enumerate(segment.nodes)
        if f"{segment.index}.{i}" in by_key
    }


def _buffers(source: TracedModel) -> list[tuple[str, Tensor]]:
    held = dict(source.model.named_buffers(remove_duplicate=False))
    return [*((n, x.detach()) for n, x in held.items()), *as_float64(named_values(source)).items()]


def _run(
    source: TracedModel,
    state: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    counts: Sequence[Tensor],
    only: set[fx.Node] | None,
    draws: Any,
    rng: DropoutKey | None = None,
) -> Values:
    traced = source.folded.traced
    sizes = _sizes(source, batch)
    values: Values = {}
    for node in traced.graph.graph.nodes:
        if node.op == "output" or (only is not None and node not in only):
            continue
        if node.op == "placeholder":
            if (given := _given(source, node.name, state, batch, counts)) is not None:
                values[node] = given
            continue
        args = as_float64(concrete(substitute(node.args, values.__getitem__), sizes))
        kwargs = as_float64({k: concrete(substitute(v, values.__getitem__), sizes) for k, v in node.kwargs.items()})
        made = _op(node, args, kwargs, draws, rng)
        values[node] = made.view_as(made) if isinstance(made, Tensor) and any(made is x for x in args) else made
    return values


def _op(node: fx.Node, args: Any, kwargs: dict[str, Any], draws: Any, rng: DropoutKey | None) -> Any:
    drops = draw_of(node)
    if node.target in ops.DRAWS:  # without a key, numbers are their mean
        draw = draws.get(node)
        keyed = {} if draw is None else {"key": draw.key, "rng": rng, "samples": draw.samples}
        return node.target(*args, **kwargs, **keyed)  # type: ignore[operator]
    if drops and node not in draws:  # dropout is disabled
        if node.target is aten.dropout.default:
            return args[0]
        return node.target(*args[:4], 0.0, *args[5:], **kwargs)  # type: ignore[operator]
    if drops:
        draw = draws[node]
        if node.target is aten.dropout.default:
            return ops.dropout(args[0], args[1], key=draw.key, rng=rng, samples=draw.samples)
        causal = bool(args[5]) if len(args) > 5 else False
        given = dict(zip(("q", "k", "v", "mask", "dropout_p"), args, strict=False))
        return ops.attention(**given, is_causal=causal, key=draw.key, rng=rng, samples=draw.samples, **kwargs)
    made = node.target(*args, **kwargs)  # type: ignore[operator]
    return torch.zeros_like(made) if "empty" in op_name(node) else made  # as in instrumented programs


def _sizes(source: TracedModel, batch: Mapping[str, Tensor]) -> dict[sympy.Symbol, int]:
    return {symbol: batch[name].shape[dim] for symbol, (name, dim) in source.folded.traced.sizes.items()}


def _given(
    source: TracedModel, name: str, state: Mapping[str, Tensor], batch: Mapping[str, Tensor], counts: Sequence[Tensor]
) -> Tensor | None:
    traced = source.folded.traced
    if name.startswith(COUNT):
        index = int(name.rpartition("_")[2])
        return counts[index] if counts else None
    if name in traced.inputs:
        return batch[traced.inputs[name]]
    original = traced.parameters.get(name) or traced.buffers.get(name)
    if original is not None:
        return state.get(original)
    return state.get(name, as_float64(traced.constants.get(name)))
