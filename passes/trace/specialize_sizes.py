"""Input sizes that are traced as numbers: those of pictures, and those that the model's branches fix to one value.

A picture or a video, floating-point with four dims or more, has the size of the example in every batch. Models compute
with heights and widths in ways that no symbol survives (`height % 0.5`, windows, padding to multiples), and each symbol
that does survive makes the trace slower.

A branch fixes a size as `if patches == self.positions.shape[1]` does in a ViT.

torch.export leaves such a size symbolic if it cannot solve the equation, here (h // 4) (w // 4) = 196. The graph is
valid only for that value, so the size must be static.

All other branches on sizes are conditions of the graph (`conditions_of`), which hold for some sizes.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autoptd.errors import InputsError
from autoptd.layout.sample_rows import SHARED, Rows
from autoptd.layout.size_conditions import SizeCondition
from autoptd.passes.graph import op_name
from autoptd.passes.loops.sizes_read import Branches, line_text
from autoptd.passes.normalise.size_functions import in_sympy
from autoptd.passes.trace.trace_errors import PADDED, is_foreign
from autoptd.passes.trace.traced import BATCH

InputDim = tuple[str, int]  # an input and one of its dims


def picture_dims(specs: Mapping[str, tuple[Any, torch.dtype]]) -> frozenset[InputDim]:
    """Return the dims of pictures and videos, other than the batch, and height and width of labels for their pixels."""
    pictures = {name: shape for name, (shape, dtype) in specs.items() if dtype.is_floating_point and len(shape) >= 4}
    sizes = {tuple(shape[-2:]) for shape in pictures.values()}
    maps = {n: len(shape) for n, (shape, _) in specs.items() if len(shape) > 2 and tuple(shape[-2:]) in sizes}
    every = [(name, dim) for name, shape in pictures.items() for dim in range(1, len(shape))]
    return frozenset(every + [(name, ndim - back) for name, ndim in maps.items() for back in (1, 2)])


def table_dims(specs: Mapping[str, tuple[Any, torch.dtype]], rows: Rows) -> frozenset[InputDim]:
    """Return the dims of inputs that all samples share, but those that may count the tokens of a sample."""
    lengths = {size for name, (shape, _) in specs.items() if rows[name] != SHARED for size in shape[1:]}
    shared = [(name, shape) for name, (shape, _) in specs.items() if rows[name] == SHARED]
    return frozenset((name, dim) for name, shape in shared for dim, size in enumerate(shape) if size not in lengths)


def bound_dims(
    program: torch.export.ExportedProgram, names: Collection[str], given: Collection[InputDim]
) -> frozenset[InputDim]:
    """Return the input dims, other than the batch, whose size is fixed to a number by an equality guard of the graph.

    A dim also counts as fixed if another input has the same size there, constant or fixed: both count the same tokens.
    given: dims that are numbers in another trace, which says that the others are none.
    """
    every = dict(_sizes(program, names))
    dims = {at: size for at, size in every.items() if isinstance(size, torch.SymInt)}
    if not dims:
        return frozenset()
    env = next(iter(dims.values())).node.shape_env
    samples = {s for (_, dim), size in dims.items() if dim == 0 for s in size.node.expr.free_symbols}
    bound = set[sympy.Symbol]()
    for guard in env.guards:
        equation = env.replace(guard.expr)
        if isinstance(equation, sympy.Eq) and not _bounds(equation):
            bound |= _tied(equation.lhs - equation.rhs, samples)
    bound |= _shared_out(program, samples) | _index_sizes(program)
    found = {at for at, size in dims.items() if not bound.isdisjoint(size.node.expr.free_symbols)}
    constant = {at for at, size in every.items() if isinstance(size, int)}.difference(given)
    numbers = {(at[1], _example(every[at])) for at in found | constant if at[1] > 0}
    return frozenset(found | {at for at, size in dims.items() if (at[1], _example(size)) in numbers})


def fixed_at(graph: fx.GraphModule, dim: int, size: int | None = None) -> str:
    """Return the user's line that made a number, `size` if given, of this dim of an input; "" if there is none.

    `guards` and `var_to_sources` of torch's ShapeEnv are private (seen in 2.13.0).
    """
    values = (n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder")
    env = next(x for x in values if isinstance(x, Tensor)).fake_mode.shape_env  # type: ignore[attr-defined]
    symbols = {s for s, found in env.var_to_sources.items() if str(found[0].name).endswith(f".size()[{dim}]")}
    for guard in env.guards:
        equation = guard.expr
        if not isinstance(equation, sympy.Eq) or _bounds(equation) or size not in (None, *equation.args):
            continue
        fixes = equation.free_symbols <= symbols and _symbols_of(equation.lhs - equation.rhs)
        if fixes and (line := _line_of(guard)):
            return line
    return ""


def conditions_of(
    graph: fx.GraphModule, symbols: Mapping[sympy.Symbol, sympy.Expr], branches: Branches, loops: bool
) -> tuple[SizeCondition, ...]:
    """Return the branches and the guards of an exported graph that do not hold for all sizes.

    symbols: of torch -> of a traced graph. loops: whether loops over samples were recorded, which are proved for any
    number: guards on it are left out, most of which the turns of such loops make.
    """
    values = (n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder")
    sizes: Iterator[Any] = (n for x in values if isinstance(x, Tensor) for n in x.shape if isinstance(n, torch.SymInt))
    env: ShapeEnv | None = next((n.node.shape_env for n in sizes), None)
    if env is None:
        return ()
    found: dict[sympy.Basic, SizeCondition] = {}
    taken = [(relation, where, True) for relation, where in branches.items()]
    for relation, where, is_branch in (*taken, *((guard.expr, _line_of(guard), False) for guard in env.guards)):
        relation = env.replace(relation)
        if relation.free_symbols and relation.free_symbols <= symbols.keys():
            relation = in_sympy(relation.xreplace(symbols))
            condition = SizeCondition(relation, where or "code of a library that forward calls")
            tried = (1, *_TRIED) if is_branch else _TRIED  # torch computes the same for sizes of 1, where it branches
            if not _always(condition, tried) and (is_branch or not loops or BATCH not in relation.free_symbols):
                found.setdefault(relation, condition)
    return tuple(found.values())


_TRIED = (2, 3, 5, 8, 64, 1000, 4096, 10**6)  # sizes for which a relation must hold to hold for all


def _always(condition: SizeCondition, tried: Sequence[int]) -> bool:
    given = sorted(condition.names)
    every = itertools.product(tried, repeat=min(len(given), 2))
    return all(condition.holds(dict(zip(given, (*sizes, *tried), strict=False))) for sizes in every)


def _line_of(guard: Any) -> str:
    """Return the user's line that a guard is due to; "" if it is one of a library."""
    frame = guard.sloc.framework_loc
    if not isinstance(frame, traceback.FrameSummary) or is_foreign(frame.filename):
        return ""
    return line_text(frame)


def _example(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def _tied(difference: sympy.Expr, samples: Collection[sympy.Symbol]) -> set[sympy.Symbol]:
    """Return the symbols fixed to a number by `difference` = 0 for every number of samples: s of `b s - 4 b`."""
    count = sympy.Dummy("b")
    found = set[sympy.Symbol]()
    try:
        parts = sympy.Poly(difference.subs(dict.fromkeys(samples, count)), count).coeffs()
    except sympy.PolynomialError:
        return set() if not difference.free_symbols.isdisjoint(samples) else _symbols_of(difference)
    for part in parts:
        found |= _symbols_of(part)
    return found


def _shared_out(program: torch.export.ExportedProgram, samples: Collection[sympy.Symbol]) -> set[sympy.Symbol]:
    """Return the s of sizes like b s // 196, from `view(-1, 196, …)`: samples stay separate only if s is 196."""
    sizes = set[sympy.Expr]()
    for node in program.graph.nodes:
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, torch.Tensor) else ():
            if isinstance(size, torch.SymInt):
                sizes.add(size.node.expr)
    found = set[sympy.Symbol]()
    for part in (part for size in sizes for part in size.atoms(sympy.Function)):
        symbols = set(part.free_symbols)
        if type(part).__name__ == "FloorDiv" and not symbols.isdisjoint(samples):
            found |= symbols.difference(samples)
    return found


def _index_sizes(program: torch.export.ExportedProgram) -> set[sympy.Symbol]:
    """Return the symbols of indices of writes that meet a number in another index: torch does not compare them."""
    found = set[sympy.Symbol]()
    for node in program.graph.nodes:
        if op_name(node).rstrip("_") == "index_put":
            shapes = [x.meta["val"].shape[::-1] for x in node.args[1] if isinstance(x, fx.Node)]
            for sizes in itertools.zip_longest(*shapes, fillvalue=1):
                if any(isinstance(n, int) and n != 1 for n in sizes):
                    found |= {s for n in sizes if isinstance(n, torch.SymInt) for s in n.node.expr.free_symbols}
    return found


def _symbols_of(difference: sympy.Expr) -> set[sympy.Symbol]:
    """Return the symbols of a difference that has a non-zero constant term, else none."""
    constant, _ = sympy.expand(difference).as_coeff_Add()
    return set(difference.free_symbols) if constant != 0 else set()


def _bounds(expression: sympy.Expr) -> bool:
    """Return whether an equation only restricts a size to a range or to multiples: `s % 8 == 0`, `min(s, 64) == s`."""
    return any(type(f).__name__ in ("Mod", "PythonMod", "Min", "Max") for f in sympy.preorder_traversal(expression))


def _sizes(
    program: torch.export.ExportedProgram, names: Collection[str]
) -> Iterator[tuple[InputDim, int | torch.SymInt]]:
    """Yield the size of every dim of the model's inputs."""
    given = dict(zip(program.graph_signature.user_inputs, names, strict=True))
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in given:
            for dim, size in enumerate(node.meta["val"].shape):
                fixed = isinstance(size, torch.SymInt) and size.node.expr.is_number
                yield (given[node.name], dim), int(size) if fixed else size


def check_inputs(inputs: Mapping[str, Tensor]) -> None:
    """Raise InputsError unless all inputs are plain tensors, and one has a dim."""
    if not inputs:
        raise InputsError("no example inputs", fix="pass inputs={'x': torch.empty(…)}: keyword tensors of forward")
    for name, x in inputs.items():
        if not isinstance(x, Tensor):
            raise InputsError(f"input {name!r} is {type(x).__name__}, not a tensor", fix="pass keyword tensors only")
        if x.is_nested:
            raise InputsError(
                f"input {name!r} is a nested tensor of samples of several lengths", where=name, fix=PADDED
            )
        if x.layout != torch.strided:
            what = f"input {name!r} has the layout {x.layout}, and the samples of a step are cut as dense rows"
            raise InputsError(what, where=name, fix=f"give {name}.to_dense()")
    if all(x.ndim == 0 for x in inputs.values()):
        raise InputsError("no input has a dim that counts samples", fix="give the inputs a leading batch dim")
