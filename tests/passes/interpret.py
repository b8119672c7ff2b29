"""Run a normalised graph on real tensors, to judge what the passes made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import Tensor, fx, nn

from autoptd.passes.graph import concrete, substitute
from autoptd.passes.losses.loss_form import (
    COUNT,
    PARTIAL,
    ROWS,
    SIZE,
    LossForm,
    loss_form,
    partial_slices,
    row_slices,
)
from autoptd.passes.normalise.normalise import normalise
from autoptd.passes.trace.trace import trace
from autoptd.passes.trace.traced import BATCH, Traced

Batch = Mapping[str, Tensor]


def normalised(model: nn.Module, batch: Batch, **options: object) -> Traced:
    return normalise(trace(model, batch, precision="fp64", **options), check_each=True)  # type: ignore[arg-type]


def names_of(traced: Traced) -> list[str]:
    """Return the short names of the graph's ops."""
    return [
        str(n.target._schema.name).split("::")[1] if isinstance(n.target, torch._ops.OpOverload) else n.target.__name__
        for n in traced.graph.graph.nodes
        if n.op == "call_function"
    ]


def run(traced: Traced, state: Mapping[str, Tensor], batch: Batch, counts: Sequence[Tensor] = ()) -> list[Tensor]:
    """Return [share of the loss or its partial values, count 0, count 1, …] of one microbatch; missing counts are 1."""
    sizes = {symbol: batch[name].shape[dim] for symbol, (name, dim) in traced.sizes.items()}
    return run_graph(traced.graph.graph, lambda name: _given(traced, name, state, batch, counts), sizes)


def run_graph(graph: fx.Graph, given: Callable[[str], Tensor], sizes: Mapping[sympy.Symbol, int]) -> list[Tensor]:
    """Return the outputs of a graph for these placeholders."""
    values: dict[object, object] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = given(node.name)
            continue
        args = concrete(substitute(node.args, values.__getitem__), sizes)
        if node.op == "output":
            return list(args)  # type: ignore[call-overload]
        kwargs = {k: concrete(substitute(v, values.__getitem__), sizes) for k, v in node.kwargs.items()}
        made = node.target(*args, **kwargs)
        _check(node.meta["info"], made, sizes)
        values[node] = made
    raise AssertionError("no output")


def _check(promised: object, made: object, sizes: Mapping[sympy.Symbol, int]) -> None:
    """Assert that a tensor has the shape and dtype that the graph promised."""
    if isinstance(promised, tuple):
        for p, m in zip(promised, made, strict=True):  # type: ignore[call-overload]
            _check(p, m, sizes)
        return
    assert concrete(tuple(promised.shape), sizes) == tuple(made.shape), (promised, made.shape)  # type: ignore
    if made.ndim:  # type: ignore[attr-defined]
        assert promised.dtype == made.dtype, (promised, made.dtype)  # type: ignore[attr-defined]


def _given(traced: Traced, name: str, state: Mapping[str, Tensor], batch: Batch, counts: Sequence[Tensor]) -> Tensor:
    if name.startswith(COUNT):
        return counts[int(name.rpartition("_")[2])]
    if name in traced.inputs:
        return batch[traced.inputs[name]]
    original = traced.parameters.get(name) or traced.buffers.get(name)
    return state[original] if original is not None else traced.constants[name]


@dataclass(frozen=True)
class Outcome:
    """A loss, and the gradient of every parameter that has one."""

    loss: Tensor
    gradients: dict[str, Tensor]


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def whole(model: nn.Module, batch: Batch) -> Outcome:
    """Run the model's own forward and backward on the whole batch in one process."""
    model.zero_grad()
    out = model(**batch)
    loss = out if isinstance(out, Tensor) else out["loss"] if isinstance(out, dict) else out.loss
    loss.backward()
    return Outcome(loss.detach(), _gradients(model))


def in_microbatches(model: nn.Module, traced: Traced, batch: Batch, pieces: Sequence[int]) -> Outcome:
    """Run the normalised graph on pieces of the batch, `pieces` samples each, and add up the shares."""
    split = {n: x.split(list(pieces)) for n, x in batch.items()}
    micro = [{n: x[i] for n, x in split.items()} for i in range(len(pieces))]
    state, form = _state(model), loss_form(traced.graph)
    counts = _counts(traced, state, micro)
    model.zero_grad()
    shares = [run(traced, state, m, counts)[0] for m in micro]
    if form.outer is None:
        for share in shares:
            share.backward()
        return Outcome(torch.stack([s.detach().double() for s in shares]).sum(), _gradients(model))
    sums = torch.stack([s[: form.width].detach().double() for s in shares]).sum(0).requires_grad_()
    rows = torch.cat([s[form.width :].detach().double() for s in shares]).requires_grad_()
    loss = _outer(traced, form, sums, rows.view(sum(pieces), form.row_width), counts, state)
    weights, of_rows = torch.autograd.grad(loss, (sums, rows), materialize_grads=True)
    for share, of_own in zip(shares, of_rows.split([n * form.row_width for n in pieces]), strict=True):
        share.backward(torch.cat((weights, of_own)).to(share.dtype))
    return Outcome(loss.detach(), _gradients(model))


def _counts(traced: Traced, state: Mapping[str, Tensor], micro: Sequence[Batch]) -> list[Tensor]:
    """Return the global counts, computed round by round."""
    form = loss_form(traced.graph)
    shapes = [
        n.meta["info"].shape for n in traced.graph.graph.nodes if n.op == "placeholder" and n.name.startswith(COUNT)
    ]
    counts = [torch.ones(shape, dtype=torch.float64) for shape in shapes]
    for _ in range(1 + max(form.rounds, default=-1)):
        with torch.no_grad():
            found = [[c.double() for c in run(traced, state, m, counts)[1:]] for m in micro]
        made = [torch.stack(column) for column in zip(*found, strict=True)]
        whole = {"sum": lambda x: x.sum(0), "max": lambda x: x.amax(0), "min": lambda x: x.amin(0)}
        counts = [whole[how](column) for how, column in zip(form.combines, made, strict=True)]
    return counts


def _outer(
    traced: Traced, form: LossForm, sums: Tensor, rows: Tensor, counts: Sequence[Tensor], state: Mapping[str, Tensor]
) -> Tensor:
    assert form.outer is not None
    slices, of_rows = partial_slices(form.partial_sums), row_slices(form.rows)

    def given(name: str) -> Tensor:
        value = sliced(name)
        return value if name not in infos_of or infos_of[name].requires_grad else value.detach()

    def sliced(name: str) -> Tensor:
        if name.startswith(PARTIAL):
            start, stop, shape, dtype = slices[int(name.rpartition("_")[2])]
            return sums[start:stop].view(shape).to(dtype)
        if name.startswith(ROWS):
            start, stop, shape, dtype = of_rows[int(name.rpartition("_")[2])]
            return rows[:, start:stop].reshape(len(rows), *shape).to(dtype)
        return _given(traced, name, state, {}, counts)

    read = [n for n in form.outer.nodes if n.op == "placeholder"]
    infos_of = {n.name: n.meta["info"] for n in read if n.name.startswith((PARTIAL, ROWS))}
    sizes = {n.meta[SIZE]: int(given(n.name)) for n in read if SIZE in n.meta}
    (loss,) = run_graph(form.outer, given, {BATCH: len(rows), **sizes})
    return loss


def assert_same(a: Outcome, b: Outcome, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a.loss.double(), b.loss.double(), rtol=tolerance, atol=tolerance)
    assert a.gradients.keys() == b.gradients.keys()
    for name in a.gradients:
        torch.testing.assert_close(a.gradients[name], b.gradients[name], rtol=tolerance, atol=tolerance, msg=name)


def assert_unchanged(model: nn.Module, batch: Batch, pieces: Sequence[int] = (1, 3, 2)) -> Traced:
    """Trace and normalise; assert that the graph computes what the model does, for the whole batch and pieces."""
    traced = normalised(model, batch)
    wanted = whole(model, batch)
    assert_same(in_microbatches(model, traced, batch, [sum(pieces)]), wanted)
    assert_same(in_microbatches(model, traced, batch, pieces), wanted)
    return traced
