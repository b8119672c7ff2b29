"""Torch's functions of sizes, written in sympy's: floors and ceilings, which simplify, print and evaluate.

A remainder is x - n floor(x / n). So a length that is padded to a multiple of n, `s + (n - s % n) % n` in many scans,
becomes n ceiling(s / n), and the number of its chunks ceiling(s / n), of n tokens each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import sympy


def in_sympy(expr: sympy.Expr) -> sympy.Expr:
    """Rewrite torch's functions of sizes, of positive integers, in sympy's.

    A size as a floating-point number has a factor 1.0, which tells the quotient s / 2 of numbers from that of sizes.
    """
    return expr.replace(
        lambda e: _is_torch(e) and type(e).__name__ in FUNCTIONS,
        lambda e: FUNCTIONS[type(e).__name__](*e.args),
        simultaneous=False,  # which puts back what an inner one stood for
    )


def unknown_function(expr: sympy.Expr) -> str:
    """Return the name of a function of torch's that is left in a size; empty if there is none."""
    return next((type(e).__name__ for e in sympy.preorder_traversal(expr) if _is_torch(e)), "")


def _is_torch(expr: sympy.Basic) -> bool:
    return type(expr).__module__.startswith("torch.")


def _divide(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    exact = sympy.simplify(a / b)
    return exact if exact.is_integer else _floor(a, b)


def _remainder(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    return sympy.expand(a - b * _floor(a, b))


def _floor(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    """Return the floor of a / b, as a ceiling where the source says so: (s + 7) // 8 or -(-s // 8)."""
    if b.is_Integer and b > 1 and a.as_coeff_Add()[0] % b == b - 1:
        return sympy.ceiling(sympy.expand((a + 1 - b) / b))
    return sympy.floor(sympy.expand(a / b)).replace(sympy.floor, _upright)


def _upright(x: sympy.Expr) -> sympy.Expr:
    return -sympy.ceiling(-x) if x.could_extract_minus_sign() else sympy.floor(x)


def _rational(a: sympy.Expr) -> sympy.Expr:
    """Write the floating-point numbers of a size as fractions."""
    return sympy.nsimplify(a, rational=True)


FUNCTIONS: Mapping[str, Callable[..., sympy.Expr]] = {
    "Identity": lambda a: a,
    "Max": sympy.Max,
    "Min": sympy.Min,
    "CleanDiv": _divide,
    "FloorDiv": _divide,
    "Mod": _remainder,
    "PythonMod": _remainder,
    "ModularIndexing": lambda a, b, n: _remainder(_divide(a, b), n),
    "PowByNatural": sympy.Pow,
    "IntTrueDiv": lambda a, b: sympy.Float(1) * a / b,
    "FloatTrueDiv": lambda a, b: sympy.Float(1) * a / b,
    "ToFloat": lambda a: sympy.Float(1) * a,
    "CeilToInt": lambda a: sympy.ceiling(_rational(a)),
    "FloorToInt": lambda a: sympy.floor(_rational(a)),
    "TruncToInt": lambda a: sympy.floor(_rational(a)),  # sizes are not negative
}
