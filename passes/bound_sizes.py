"""Sizes that a model's own branches tie to one value: `if patches == self.positions.shape[1]` of a cut picture.

torch.export leaves such a size a symbol where it cannot solve the equation, here (h // 4) (w // 4) = 196. A graph with
it holds for that value alone, and its ops do not run at any other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import sympy
import torch

InputDim = tuple[str, int]  # an input and one of its dims


def bound_dims(program: torch.export.ExportedProgram, names: Collection[str]) -> frozenset[InputDim]:
    """The dims of inputs whose size an equation among the graph's guards ties to a number, without the samples'."""
    dims = dict(_sizes(program, names))
    if not dims:
        return frozenset()
    env = next(iter(dims.values())).node.shape_env
    samples = {s for (_, dim), size in dims.items() if dim == 0 for s in size.node.expr.free_symbols}
    bound = set[sympy.Symbol]()
    for guard in env.guards:
        equation = env.replace(guard.expr)
        if isinstance(equation, sympy.Eq) and equation.rhs.is_number and not _bounds(equation.lhs):
            symbols = equation.free_symbols
            bound |= symbols if symbols.isdisjoint(samples) else set()
    return frozenset(at for at, size in dims.items() if not bound.isdisjoint(size.node.expr.free_symbols))


def _bounds(expression: sympy.Expr) -> bool:
    """Whether an equation with it leaves a range or multiples of a size: `s % 8 == 0`, `min(s, 64) == s`."""
    return any(type(f).__name__ in ("Mod", "PythonMod", "Min", "Max") for f in sympy.preorder_traversal(expression))


def _sizes(program: torch.export.ExportedProgram, names: Collection[str]) -> Iterator[tuple[InputDim, torch.SymInt]]:
    """The symbolic sizes of the model's inputs."""
    given = dict(zip(program.graph_signature.user_inputs, names, strict=True))
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in given:
            for dim, size in enumerate(node.meta["val"].shape):
                if isinstance(size, torch.SymInt):
                    yield (given[node.name], dim), size
