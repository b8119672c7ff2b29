"""Differences between the traced graph and the model, for programs whose every line agrees with the graph.

eager model, whole batch      the reference
graph, whole batch            a difference means that the tracer or a pass changed the model, or lost a custom backward
                              pass; the outputs of modules, and their gradients, show where
graph, each microbatch        if their sum is not the whole, a sample depends on others of its batch, or the loss is
                              not a sum over samples; the first such op is reported
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from autoptd.compile.traced import TracedModel
from autoptd.layout.layout import Layout
from autoptd.ops.dropout import DropoutKey
from autoptd.passes.batch.batch_dims import SamplePlace, counts_samples, sample_place
from autoptd.passes.graph import info, module_path, op_name, source_line
from autoptd.testing.parity import difference
from autoptd.verification.copies import copied
from autoptd.verification.locate.whole import GraphRun, batch_totals, drawn_nodes, microbatches, run_whole
from autoptd.verification.plain import PlainStep, keyed, one_pass
from autoptd.verification.trial import Trial

_TOLERANCE = 1e-8
Place = tuple[str, str]


@dataclass
class Output:
    """An output of a module of the eager model. `given` may be written to in place later; `value` is a copy."""

    path: str
    value: Tensor
    given: Tensor

    @property
    def gradient(self) -> Tensor | None:
        """The gradient after all hooks; None before the backward pass."""
        return self.given.grad if self.given.requires_grad else None


def first_graph_mismatch(trial: Trial, layout: Layout) -> Place | None:
    """Return (where, what) of the first difference in step 1; None if graph and model agree."""
    source, batch, expected = trial.subject.source, trial.first, trial.expected[0]
    drawn = drawn_nodes(source, trial.draws)
    totals = batch_totals(source, batch, drawn)
    whole = run_whole(source, batch, totals, drawn, 0)
    if wrong := _wrong(whole.loss, whole.parameters, expected):
        return _not_the_model(trial, whole, wrong)
    if source.folded.statistics.count:  # a microbatch alone has other statistics
        return None
    firsts, parts = list[int](), list[GraphRun]()
    cut = list(microbatches(layout, batch))
    for _, _, first, micro in cut:
        firsts.append(first)
        parts.append(run_whole(source, micro, totals, drawn, first, 1 / len(cut)))
    total = {n: torch.stack([part.parameters[n] for part in parts]).sum(0) for n in whole.parameters}
    if wrong := _wrong(sum(part.loss for part in parts), total, expected):
        found = next(_batch_dependent(source, whole, parts, firsts), None) or next(
            _non_additive(source, whole, parts), None
        )
        return found or (
            next(iter(wrong)),
            f"off by {_most(wrong)}: microbatches of the graph do not add up to the batch",
        )
    return None


def _wrong(loss: float, gradients: dict[str, Tensor], expected: PlainStep) -> dict[str, float]:
    """Return the relative difference of each wrong gradient, by parameter name, and of the loss, as `loss`."""
    whole = sum(x.norm().item() ** 2 for x in expected.gradients.values()) ** 0.5
    found = {"loss": abs(loss - expected.loss) / (abs(expected.loss) or 1.0)}
    for name, gradient in gradients.items():
        wanted = expected.gradients.get(name, torch.zeros_like(gradient))
        found[name] = difference(gradient, wanted, wanted.norm().item(), whole)
    return {name: off for name, off in found.items() if not off <= _TOLERANCE}


def _most(wrong: dict[str, float]) -> str:
    return f"{max(wrong.values()):.1e}"


# ---- the graph on the whole batch is not the model ----


def _not_the_model(trial: Trial, whole: GraphRun, wrong: dict[str, float]) -> Place:
    outputs = list(_outputs(trial))
    found = _value_mismatch(outputs, whole) if "loss" in wrong else _gradient_mismatch(outputs, whole)
    if found is not None:
        return found
    name = list(wrong)[-1]
    what = "its gradient" if name != "loss" else "the loss"
    return name, f"{what} in the traced graph is off by {wrong[name]:.1e}: the graph is not the model"


def _outputs(trial: Trial) -> Iterator[Output]:
    """Yield the outputs of all modules that return a tensor, in the order of the calls, on the first batch."""
    source = trial.subject.source
    copies = copied(source.model, source.objective.loss)
    model = copies.model
    objective = replace(source.objective, loss=copies.loss)
    found: list[Output] = []
    for path, module in model.named_modules():
        module.register_forward_hook(_output_hook(found, path))
    draws = trial.draws if trial.drops else None
    with copies.standing_in():
        one_pass(model, trial.batches[0], objective, keyed(source, draws, DropoutKey(0)))
    yield from found


def _output_hook(found: list[Output], path: str) -> Callable[[nn.Module, Any, Any], None]:
    def note(module: nn.Module, args: Any, result: Any) -> None:
        if isinstance(result, Tensor) and result.is_floating_point():
            found.append(Output(path or "the model", result.detach().clone(), result))
            if result.requires_grad:
                result.retain_grad()

    return note


def _nodes_equal_to(output: Output, values: dict[fx.Node, Tensor]) -> list[fx.Node]:
    """Return the nodes whose value equals a module's output."""
    x = output.value
    return [n for n, y in values.items() if isinstance(y, Tensor) and y.shape == x.shape and _close(y.detach(), x)]


def _close(found: Tensor, wanted: Tensor) -> bool:
    return float((found.double() - wanted.double()).norm()) <= _TOLERANCE * (float(wanted.double().norm()) or 1.0)


def _value_mismatch(outputs: Sequence[Output], whole: GraphRun) -> Place | None:
    for output in outputs:
        if not _nodes_equal_to(output, whole.values):
            return output.path, "no op of the traced graph has the values of its output"
    return None


def _gradient_mismatch(outputs: Sequence[Output], whole: GraphRun) -> Place | None:
    """Return the last module whose output has another gradient in the graph, and the ops that read this output."""
    for output in reversed(outputs):
        nodes = _nodes_equal_to(output, whole.values)
        if output.gradient is None or not nodes:
            continue
        got = [whole.gradients.get(n) for n in nodes]
        if not any(_close(torch.zeros_like(output.value) if g is None else g, output.gradient) for g in got):
            readers = dict.fromkeys(source_line(user) for n in nodes for user in n.users)
            return output.path, (
                "the gradient of its output in the traced graph differs from that of the model's own backward pass\n"
                + "\n".join(list(readers)[:3])
            )
    return None


# ---- microbatches of the graph do not add up ----


def _batch_dependent(
    source: TracedModel, whole: GraphRun, parts: Sequence[GraphRun], firsts: Sequence[int]
) -> Iterator[Place]:
    """Yield the ops whose result for a sample depends on the others of its batch."""
    for node in _varying(source, whole):
        value, place = whole.values[node], sample_place(node)
        if place is None or place != SamplePlace(place.dim):
            continue
        for part, first in zip(parts, firsts, strict=True):
            mine = part.values[node].detach()
            if not _close(mine, value.detach().narrow(place.dim, first, mine.shape[place.dim])):
                what = "its result for one sample depends on the others of its batch"
                yield _place(node), f"{what}: a microbatch has another value\n{source_line(node)}"
                break


def _non_additive(source: TracedModel, whole: GraphRun, parts: Sequence[GraphRun]) -> Iterator[Place]:
    """Yield the ops without a dim of samples whose values over microbatches do not add up to that of the batch."""
    for node in _varying(source, whole):
        value = whole.values[node]
        if counts_samples(info(node)) or not value.requires_grad:
            continue
        total = torch.stack([part.values[node].detach() for part in parts]).sum(0)
        if not _close(total, value.detach()):
            numbers = f": {value.item():.6g} for the batch, {total.item():.6g} added up" if not value.ndim else ""
            yield (
                _place(node),
                (
                    f"its values over the microbatches do not add up to that of the whole batch{numbers}; the loss is "
                    f"not averaged over what the program assumes\n{source_line(node)}"
                ),
            )


def _varying(source: TracedModel, ran: GraphRun) -> Iterator[fx.Node]:
    """Yield the ops that return a tensor which depends on the values of an input, not on its sizes alone."""
    inputs, found = source.folded.traced.inputs, set[fx.Node]()
    for node, value in ran.values.items():
        if node.name in inputs or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
            if node.op == "call_function" and isinstance(value, Tensor):
                yield node


def _place(node: fx.Node) -> str:
    path = module_path(node)
    return f"{path}: {op_name(node)}" if path else op_name(node)
