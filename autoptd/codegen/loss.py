"""Source of the functions of a whole batch: `loss_counts` of a microbatch, `loss_of` sums, and `update_buffers` of a
stage, which computes the new values of its buffers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import sympy
import torch
from torch import fx

from autoptd.codegen.block import attribute
from autoptd.codegen.body import Body
from autoptd.codegen.expressions import value_text
from autoptd.codegen.names import GLOBALS, Names
from autoptd.codegen.quoting import checked_name, literal
from autoptd.errors import TraceError
from autoptd.layout.placements import B
from autoptd.layout.sample_rows import SHARED
from autoptd.passes.fold import Folded
from autoptd.passes.graph import ancestors, info, output_of
from autoptd.passes.held_tensors import updated_buffers
from autoptd.passes.losses.loss_form import SIZE, count_index, is_count, partial_slices, row_slices
from autoptd.passes.losses.update_form import SUM
from autoptd.passes.sharding.sharding import Sharding
from autoptd.passes.trace.traced import BATCH, Traced

FUNCTIONS = ("loss_counts", "loss_of")
_ARGUMENTS = ("self", "counts")  # arguments of forward that are not inputs


def count_text(node: fx.Node) -> str:
    """Return the text of a count of the batch."""
    return f"counts[{count_index(node)}]"


def state_text(traced: Traced, node: fx.Node) -> str:
    """Return the text of a buffer or constant of a stage, or of an input that all samples share."""
    if node.name in traced.inputs:
        return _shared_text(traced.inputs[node.name])
    return attribute(traced.buffers.get(node.name) or node.name, "get_buffer")


def _shared_text(name: str) -> str:
    return f"self.shared_inputs[{literal(name)}]"


def size_source(traced: Traced, symbol: sympy.Symbol, have: Mapping[str, fx.Node]) -> tuple[str, int]:
    """Return an (input, dim) with the size, preferably of an input that is already read."""
    for name, node in have.items():
        if symbol in info(node).shape:
            return name, info(node).shape.index(symbol)
    return traced.sizes[symbol]


def input_node(traced: Traced, name: str) -> fx.Node:
    return next(n for n in traced.graph.graph.nodes if n.op == "placeholder" and traced.inputs.get(n.name) == name)


def names_of(folded: Folded, *besides: str) -> Names:
    """Return names with those of the model's inputs reserved. Raises TraceError for inputs that cannot be arguments."""
    traced = folded.traced
    for text in traced.inputs.values():
        if text in _ARGUMENTS or text in GLOBALS:
            raise TraceError(f"an input of the model is called {text!r}", fix="rename that argument of forward")
        checked_name(text, "an input of the model")
    return Names((*traced.inputs.values(), *besides), map(str, traced.sizes))


class LossFunctions:
    """`loss_counts` of stages that take counts, and `loss_of` of the last one if its loss is a function of sums."""

    def __init__(self, folded: Folded, sharding: Sharding) -> None:
        self.folded, self.traced, self.form = folded, folded.traced, folded.loss_form
        self.sharding = sharding
        self.inputs: list[str] = []
        self.found = {"loss_counts": self._counts()} if folded.counts else {}
        if self.form.outer is not None:
            self.found["loss_of"] = self._outer(self.form.outer)

    def sources(self, last: bool) -> dict[str, str]:
        return {name: text for name, text in self.found.items() if last or name != "loss_of"}

    def attributes(self, last: bool) -> list[str]:
        lines = [] if last else ["    reads_counts = True"]
        if self.folded.counts:
            lines.append(f"    count_inputs = {value_text(tuple(self.inputs))}")
            if not self._plain_counts():
                lines += ["    counted = (", *(f"        {text}," for text in self._counted()), "    )"]
            own = self.found["loss_counts"].startswith("def loss_counts(self")
            lines.append(f"    loss_counts = {'loss_counts' if own else 'staticmethod(loss_counts)'}")
        if last and self.form.outer is not None:
            lines += [f"    partial_sums = {self.form.width}"] if self.form.width else []
            lines += [f"    row_width = {self.form.row_width}"] if self.form.rows else []
            lines += ["    loss_of = loss_of"]
        return lines

    def _plain_counts(self) -> bool:
        """Return whether all counts are single numbers, summed in one round."""
        return (
            not any(self.form.rounds)
            and set(self.form.combines) <= {"sum"}
            and not any(map(self._shape, self.folded.counts))
        )

    def _shape(self, count: fx.Node) -> tuple[int, ...]:
        return tuple(map(int, info(count).shape))

    def _counted(self) -> Iterable[str]:
        for node, combine, number in zip(self.folded.counts, self.form.combines, self.form.rounds, strict=True):
            rest = f", {number}" if number else ""
            yield f"Count({literal(combine)}, {value_text(self._shape(node))}{rest})"

    def _counts(self) -> str:
        traced, body = self.traced, Body(self.sharding, names_of(self.folded))
        wanted = ancestors(self.folded.counts)
        nodes = [n for n in traced.graph.graph.nodes if n in wanted]
        renames: list[str] = []
        by_name: dict[str, fx.Node] = {}

        def bind(node: fx.Node) -> None:
            name = traced.inputs[node.name]
            variable, lines = body.names.argument(name)
            by_name[name] = node
            body.bind(node, B, variable)
            renames.extend(lines)

        held = False
        for node in nodes:
            if node.op != "placeholder":
                continue
            if node.name in traced.inputs:
                bind(node)
            elif is_count(node):
                body.bind(node, B, count_text(node))
            else:
                held = True
                body.bind(node, B, state_text(traced, node))
        body.prelude([n for n in nodes if n.op == "call_function"])
        sizes = []
        for symbol in sorted(body.sizes, key=str):
            source, dim = size_source(traced, symbol, by_name)
            if source not in by_name:
                bind(input_node(traced, source))
            sizes.append(f"{symbol} = {body.held[by_name[source], B]}.size({dim})")
        self.inputs = list(by_name)
        first = [f"device = {body.held[next(iter(by_name.values())), B]}.device"] if body.uses_device else []
        arguments = ["self: Stage"] * held + [f"{name}: Tensor" for name in by_name]
        arguments += ["counts: tuple[Tensor, ...]"] * any(self.form.rounds)
        results = [body.held[n, B] for n in self.folded.counts]
        lines = [f"def loss_counts({', '.join(arguments)}) -> tuple[Tensor, ...]:"]
        lines.append('    """Return this microbatch\'s contribution to each count of the whole batch."""')
        lines += [f"    {line}" for line in [*renames, *sizes, *first, *body.lines]]
        lines.append(f"    return ({', '.join(results)}{',' if len(results) == 1 else ''})")
        return "\n".join(lines) + "\n"

    def _outer(self, graph: fx.Graph) -> str:
        form, body = self.form, Body(self.sharding, names_of(self.folded, "sums", "rows"))
        given = dict(zip(form.partial_sums, (part_text(*x) for x in partial_slices(form.partial_sums)), strict=True))
        given |= zip(form.rows, (rows_text(*x) for x in row_slices(form.rows)), strict=True)
        given = {n: text if info(n).requires_grad else f"{text}.detach()" for n, text in given.items()}
        for node in graph.nodes:
            if node.op == "placeholder":
                known = count_text(node) if is_count(node) else ""
                body.bind(node, B, given.get(node) or known or state_text(self.traced, node))
        body.prelude([n for n in graph.nodes if n.op == "call_function"])
        (loss,) = output_of(graph).args
        lines = ["def loss_of(self: Stage, sums: Tensor, counts: tuple[Tensor, ...]) -> Tensor:"]
        what = "sums over all samples of the whole batch" + ", and from their rows" * bool(form.rows)
        lines.append(f'    """Return the loss from {what}."""')
        lines += ["    device = sums.device"] if body.uses_device else []
        if form.rows:
            lines.append(f"    rows = sums[{form.width}:].view(-1, {form.row_width})")
        lines += [
            f"    {symbol} = {outer_size_text(self.traced, graph, symbol)}" for symbol in sorted(body.sizes, key=str)
        ]
        lines += [f"    {line}" for line in body.lines]
        assert isinstance(loss, fx.Node)
        lines.append(f"    return {body.held[loss, B]}")
        return "\n".join(lines) + "\n"


class BufferFunctions:
    """The sums for buffers that a stage returns, `own`, and the new values of the buffers that it holds."""

    def __init__(self, folded: Folded, sharding: Sharding, first: int, last: int) -> None:
        self.folded, self.sharding, self.updates = folded, sharding, folded.updates
        made = {n for s in folded.segments[first : last + 1] for n in s.nodes}
        self.slices = partial_slices(self.updates.sums)
        self.own = [n for n in folded.sums if n in made]
        self.buffers = updated_buffers(folded, first, last)

    def attributes(self) -> list[str]:
        places = tuple(where[:2] for n, where in zip(self.folded.sums, self.slices, strict=True) if n in self.own)
        return [f"    summed = {value_text(places)}"] if places else []

    def method(self) -> list[str]:
        """Return the lines of `update_buffers`."""
        if not self.buffers:
            return []
        traced, updates = self.folded.traced, self.updates
        body = Body(self.sharding, names_of(self.folded, "sums"))
        wanted = ancestors(updates.values[name] for name in self.buffers)
        nodes = [n for n in updates.graph.nodes if n in wanted]
        for node in (n for n in nodes if n.op == "placeholder"):
            body.bind(node, B, self._given(node))
        body.prelude([n for n in nodes if n.op == "call_function"])
        new = [f"{literal(traced.buffers[name])}: {body.held[updates.values[name], B]}," for name in self.buffers]
        lines = ["def update_buffers(self, sums: Tensor, counts: tuple[Tensor, ...]) -> dict[str, Tensor]:"]
        lines.append('    """Return the new values of buffers, from sums over all samples of the whole batch."""')
        lines += ["    device = sums.device"] if body.uses_device else []
        lines += [
            f"    {symbol} = {outer_size_text(traced, updates.graph, symbol)}" for symbol in sorted(body.sizes, key=str)
        ]
        lines += [f"    {line}" for line in body.lines]
        lines += ["    return {", *(f"        {text}" for text in new), "    }"]
        return ["", *(f"    {line}".rstrip() for line in lines)]

    def _given(self, node: fx.Node) -> str:
        if node.name.startswith(SUM):
            return part_text(*self.slices[int(node.name.rpartition("_")[2])])
        return count_text(node) if is_count(node) else state_text(self.folded.traced, node)


def outer_size_text(traced: Traced, graph: fx.Graph, symbol: sympy.Symbol) -> str:
    """Return the text of a size in a function of the whole batch: its samples, a count, or a dim of what they share."""
    if symbol == BATCH:
        return "rows.size(0)"
    if (count := next((n for n in graph.nodes if n.meta.get(SIZE) == symbol), None)) is not None:
        return f"int({count_text(count)})"
    shared = [input_node(traced, name) for name, rows in traced.rows.items() if rows == SHARED]
    node = next(node for node in shared if symbol in info(node).shape)
    return f"{_shared_text(traced.inputs[node.name])}.size({info(node).shape.index(symbol)})"


def rows_text(start: int, stop: int, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Return the text of one tensor's rows of all samples."""
    text = f"rows[:, {start}]" if not shape else f"rows[:, {start}:{stop}]"
    text += f".unflatten(1, {value_text(shape)})" if len(shape) > 1 else ""
    return text if dtype == torch.float64 else f"{text}.to({dtype})"


def part_text(start: int, stop: int, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Return the text of one partial sum from the vector of all."""
    text = f"sums[{start}]" if not shape else f"sums[{start}:{stop}]"
    text += f".view{value_text(shape)}" if len(shape) > 1 else ""
    return text if dtype == torch.float64 else f"{text}.to({dtype})"
