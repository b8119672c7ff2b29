"""Read an exported program: classify its placeholders and name its symbolic sizes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind, InputSpec

from autoptd.errors import TraceError
from autoptd.layout.sample_rows import PLAIN, SHARED, Rows
from autoptd.passes.graph import output_of, source_line
from autoptd.passes.loops.sizes_read import Branches
from autoptd.passes.trace.loss import Objective
from autoptd.passes.trace.specialize_sizes import conditions_of, fixed_at
from autoptd.passes.trace.traced import BATCH, SEQUENCE, Traced


def collect(
    program: torch.export.ExportedProgram,
    rows: Rows,
    names: Mapping[str, str],
    frozen: set[str],
    batch: int,
    objective: Objective,
    branches: Branches,
    loops: bool,
) -> Traced:
    graph = program.graph_module
    of_loss = dict(objective.loss.named_buffers(prefix="loss")) if isinstance(objective.loss, nn.Module) else {}
    parameters: dict[str, str] = {}
    buffers: dict[str, str] = {}
    inputs: dict[str, str] = {}
    constants: dict[str, Tensor] = {}
    user = iter(rows)
    for spec in program.graph_signature.input_specs:
        arg = spec.arg.name
        if spec.kind == InputKind.PARAMETER:
            assert spec.target is not None
            parameters[arg] = names[spec.target.removeprefix("model.")]
        elif spec.kind == InputKind.BUFFER and spec.target in of_loss:
            constants[arg] = of_loss[spec.target].detach().cpu()
        elif spec.kind == InputKind.BUFFER:
            assert spec.target is not None
            buffers[arg] = names.get(name := spec.target.removeprefix("model."), name)
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            assert spec.target is not None
            constants[arg] = program.constants[spec.target]
        elif spec.kind == InputKind.USER_INPUT:
            inputs[arg] = next(user)
        else:
            raise TraceError(f"the model closes over a {spec.kind.name.lower()}", fix="pass tensors as inputs")
    counted = {arg for arg, name in inputs.items() if rows[name] != SHARED}
    symbol, sizes, example = _name_symbols(graph, inputs, counted, batch)
    return Traced(
        graph=graph,
        parameters=parameters,
        buffers=buffers,
        inputs=inputs,
        constants=constants,
        symbol=symbol,
        sizes=sizes,
        example=example,
        conditions=conditions_of(graph, symbol, branches, loops),
        aliases={n: c for n, c in names.items() if n != c},
        frozen=frozenset(names[n] for n in frozen),
        objective=objective,
        rows={name: row for name, row in rows.items() if row != PLAIN},
    )


def _name_symbols(
    graph: fx.GraphModule, inputs: Mapping[str, str], counted: Collection[str], batch: int
) -> tuple[dict[sympy.Symbol, sympy.Expr], dict[sympy.Symbol, tuple[str, int]], dict[sympy.Symbol, int]]:
    """Name torch's symbols b (dim 0 of inputs with samples), s (the first other size) and s2, s3 … (one for each more).

    torch.export gives equal sizes of different inputs different symbols unless the model forces them to agree.
    """
    symbol: dict[sympy.Symbol, sympy.Expr] = {}
    sizes: dict[sympy.Symbol, tuple[str, int]] = {}
    example: dict[sympy.Symbol, int] = {}
    by_size: dict[int, sympy.Symbol] = {}
    baked, tied = list[str](), list[str]()
    for node in graph.graph.nodes:
        if node.op != "placeholder" or node.name not in inputs:
            continue
        for dim, size in enumerate(node.meta["val"].shape):
            # use the hint: comparing the symbolic size itself would specialise it
            hint = int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)
            counts_samples = dim == 0 and node.name in counted
            expr = sympy.sympify(size.node.expr if isinstance(size, torch.SymInt) else size)
            if expr.is_Integer and counts_samples and batch > 1:
                baked.append(inputs[node.name])
            if not isinstance(expr, sympy.Symbol):
                tied += [inputs[node.name]] * (counts_samples and not expr.is_Integer)
                continue
            if counts_samples:
                ours = BATCH
            else:
                fresh = SEQUENCE if not by_size else sympy.Symbol(f"s{len(by_size) + 1}", integer=True, positive=True)
                ours = by_size.setdefault(hint, fresh)
            tied += [inputs[node.name]] * (expr in symbol and (symbol[expr] == BATCH) != counts_samples)
            symbol[expr] = ours
            sizes.setdefault(ours, (inputs[node.name], dim))
            example.setdefault(ours, hint)
    if baked:
        raise TraceError(
            f"the model bakes the batch size {batch} of input {baked[0]!r} into its graph",
            where=_baked_at(graph, max(2, batch)) or f"input {baked[0]!r}, in code of torch that forward calls",
            fix="write shapes with x.size(0) or -1 instead of numbers; remove branches on the batch size and loops "
            f"over samples; if all samples share {baked[0]!r}, give autoptd.shared(…) as its example",
        )
    if tied:
        raise TraceError(
            f"the model ties a size of input {tied[0]!r} to that of another input: one of them counts samples, as it "
            "seems, and the other does not",
            where=f"input {tied[0]!r}",
            fix="give inputs a row of dim 0 for each sample, and autoptd.shared(…) as the example of a table for all",
        )
    return symbol, sizes, example


def _baked_at(graph: fx.GraphModule, batch: int) -> str:
    """Return the user's line that turned the size of a batch into a number, or of a vmap; "" if it is one of torch."""
    if found := fixed_at(graph, 0, batch):
        return found
    mapped = (n for n in graph.graph.nodes if "vmap" in getattr(n.target, "__name__", ""))  # over the samples, mostly
    return next(filter(None, map(source_line, mapped)), "")


def changed_state(program: torch.export.ExportedProgram, inputs: list[str]) -> dict[str, str]:
    """Return the parameters and inputs that a decomposed program changes: placeholder -> the user's name."""
    signature = program.graph_signature
    changed = {*signature.parameters_to_mutate.values(), *signature.user_inputs_to_mutate.values()}
    held = {arg: name.removeprefix("model.") for arg, name in signature.inputs_to_parameters.items() if name in changed}
    given = zip(map(str, signature.user_inputs), inputs, strict=True)
    return held | {arg: name for arg, name in given if arg in changed}


def merge_buffers(program: torch.export.ExportedProgram, names: Mapping[str, str]) -> None:
    """Make one placeholder of the buffers with one of `names`: torch decomposes no write to one of several."""
    placeholders = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    first: dict[str, InputSpec] = {}
    for spec in list(program.graph_signature.input_specs):
        of, _, path = str(spec.target).partition(".")
        if spec.kind is not InputKind.BUFFER or of != "model":
            continue
        if (kept := first.setdefault(names[path], spec)) is not spec:
            node = placeholders[spec.arg.name]
            node.replace_all_uses_with(placeholders[kept.arg.name])
            program.graph.erase_node(node)
            program.graph_signature.input_specs.remove(spec)
            program.state_dict.pop(str(spec.target), None)


def name_new_buffers(program: torch.export.ExportedProgram) -> None:
    """Make the new buffers of a decomposed program, its first results, keyword results, as for other programs."""
    signature = program.graph_signature
    output: Any = output_of(program.graph)
    placeholders = {name: arg for arg, name in signature.inputs_to_buffers.items()}
    *new, loss = output.args[0]
    values = {node.name: node for node in new}
    output.args = ((loss,),)
    output.kwargs = {placeholders[name]: values[made] for made, name in signature.buffers_to_mutate.items()}
