"""The graph that a plan was made for, run op by op on whole tensors: what every line of a program is held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autoptd.compile import TracedModel, named_values
from autoptd.passes.graph import ancestors, concrete, substitute
from autoptd.passes.reduce_loss import COUNT
from autoptd.runtime import ops
from autoptd.runtime.randomness import DropoutKey
from autoptd.verification.plain import Draw, as_float64, draw_of

aten = torch.ops.aten
Values = dict[fx.Node, Tensor]


def counts_of(source: TracedModel, batch: Mapping[str, Tensor]) -> list[Tensor]:
    """What the loss is divided by, over a whole batch; 1 where nothing counts."""
    folded = source.folded
    values = _run(source, dict(_buffers(source)), batch, [], ancestors(folded.counts), ())
    return [torch.where(values[n].double() == 0, 1.0, values[n].double()) for n in folded.counts]


def run_whole(
    source: TracedModel,
    batch: Mapping[str, Tensor],
    counts: Sequence[Tensor],
    draws: Mapping[fx.Node, Draw],
    first: int,
) -> tuple[Values, dict[fx.Node, Tensor | None]]:
    """Values and gradients of every node for one microbatch, of which the first sample is the batch's `first`."""
    model = source.model
    parameters = {n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in model.named_parameters()}
    rng = DropoutKey(0)
    rng.sample = first
    values = _run(source, {**dict(_buffers(source)), **parameters}, batch, counts, None, draws, rng)
    loss = values[source.folded.loss]
    kept = [n for n, x in values.items() if isinstance(x, Tensor) and x.requires_grad and x.grad_fn is not None]
    found = torch.autograd.grad(loss, [values[n] for n in kept], allow_unused=True, retain_graph=True)
    return values, dict(zip(kept, found, strict=True))


def _buffers(source: TracedModel) -> list[tuple[str, Tensor]]:
    held = dict(source.model.named_buffers(remove_duplicate=False))
    return [*((n, x.detach()) for n, x in held.items()), *named_values(source).items()]


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
    sizes = {symbol: batch[name].shape[dim] for symbol, (name, dim) in traced.sizes.items()}
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
    if drops and node not in draws:  # nothing is dropped on either side
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
    return node.target(*args, **kwargs)  # type: ignore[operator]


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
    return state.get(name, traced.constants.get(name))
