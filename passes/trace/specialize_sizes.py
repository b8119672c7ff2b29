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
    """The dims of inputs whose size an equation among the graph's guards ties to a number, without the samples'.

    So does a model that has written a number for the tokens of one input: another one's, as many, are that number.
    """
    every = dict(_sizes(program, names))
    dims = {at: size for at, size in every.items() if isinstance(size, torch.SymInt)}
    if not dims:
        return frozenset()
    numbers = {(dim, size) for (_, dim), size in every.items() if isinstance(size, int) and dim > 0}
    alike = {at for at, size in dims.items() if (at[1], int(size.node.hint)) in numbers}
    env = next(iter(dims.values())).node.shape_env
    samples = {s for (_, dim), size in dims.items() if dim == 0 for s in size.node.expr.free_symbols}
    bound = set[sympy.Symbol]()
    for guard in env.guards:
        equation = env.replace(guard.expr)
        if isinstance(equation, sympy.Eq) and not _bounds(equation):
            bound |= _tied(equation.lhs - equation.rhs, samples)
    bound |= _shared_out(program, samples)
    return frozenset(alike | {at for at, size in dims.items() if not bound.isdisjoint(size.node.expr.free_symbols)})


def _tied(difference: sympy.Expr, samples: Collection[sympy.Symbol]) -> set[sympy.Symbol]:
    """Symbols that a difference which is zero for any number of samples ties to a number: s of `b s - 4 b`."""
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
    """Symbols of sizes like b s // 196, of `view(-1, 196, …)`: samples stay apart where s is that number alone."""
    found = set[sympy.Symbol]()
    for node in program.graph.nodes:
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, torch.Tensor) else ():
            if isinstance(size, torch.SymInt):
                for part in size.node.expr.atoms(sympy.Function):
                    symbols = set(part.free_symbols)
                    if type(part).__name__ == "FloorDiv" and not symbols.isdisjoint(samples):
                        found |= symbols.difference(samples)
    return found


def _symbols_of(difference: sympy.Expr) -> set[sympy.Symbol]:
    """Those of a difference of which one part is a number."""
    constant, _ = sympy.expand(difference).as_coeff_Add()
    return set(difference.free_symbols) if constant != 0 else set()


def _bounds(expression: sympy.Expr) -> bool:
    """Whether an equation with it leaves a range or multiples of a size: `s % 8 == 0`, `min(s, 64) == s`."""
    return any(type(f).__name__ in ("Mod", "PythonMod", "Min", "Max") for f in sympy.preorder_traversal(expression))


def _sizes(
    program: torch.export.ExportedProgram, names: Collection[str]
) -> Iterator[tuple[InputDim, int | torch.SymInt]]:
    """The sizes of the model's inputs."""
    given = dict(zip(program.graph_signature.user_inputs, names, strict=True))
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in given:
            for dim, size in enumerate(node.meta["val"].shape):
                fixed = isinstance(size, torch.SymInt) and size.node.expr.is_number
                yield (given[node.name], dim), int(size) if fixed else size
