"""Torch's functions of sizes in sympy's: the same numbers, also as source, and padded lengths that simplify."""

from __future__ import annotations

import pytest
import sympy
from torch.utils._sympy import functions as torchs

from autoptd.codegen.expressions import size_text
from autoptd.passes.normalise.size_functions import in_sympy, unknown_function
from autoptd.passes.opcall import Sizes
from autoptd.passes.trace.traced import SEQUENCE

S = SEQUENCE


def padding(mod: type) -> sympy.Expr:
    """(8 - s % 8) % 8"""
    return mod(8 - mod(S, 8), 8)


@pytest.mark.parametrize("mod", [torchs.Mod, torchs.PythonMod])
def test_a_length_padded_to_chunks_is_a_number_of_chunks(mod: type) -> None:
    chunks = sympy.ceiling(S / 8)
    padded = S + padding(mod)
    assert in_sympy(padded) == 8 * chunks
    assert in_sympy(torchs.FloorDiv(padded, 8)) == chunks
    assert in_sympy(torchs.FloorDiv(S + 7, 8)) == in_sympy(-torchs.FloorDiv(-S, 8)) == chunks
    assert in_sympy(torchs.FloorDiv(padded, torchs.FloorDiv(padded, 8))) == 8


@pytest.mark.parametrize(
    ("theirs", "number"),
    [
        (torchs.Mod(S, 8), lambda s: s % 8),
        (S + padding(torchs.Mod), lambda s: s + (8 - s % 8) % 8),
        (padding(torchs.PythonMod), lambda s: (8 - s % 8) % 8),
        (torchs.FloorDiv(S + 3, 2) - 1, lambda s: (s + 3) // 2 - 1),
        (torchs.Max(S, 8) + torchs.Min(S, 9), lambda s: max(s, 8) + min(s, 9)),
        (torchs.CeilToInt(torchs.IntTrueDiv(S, 3)), lambda s: -(-s // 3)),
        (torchs.FloorToInt(torchs.IntTrueDiv(S, 3) * 2), lambda s: s * 2 // 3),
        (torchs.ModularIndexing(S, 2, 3), lambda s: s // 2 % 3),
    ],
)
def test_sizes_have_the_same_value_and_source(theirs: sympy.Expr, number: object) -> None:
    ours = in_sympy(theirs)
    assert not unknown_function(ours)
    for s in (7, 8, 13, 16):
        assert Sizes({S: s})(ours) == number(s)  # type: ignore[operator]
        assert eval(size_text(ours), {"s": s}) == number(s)  # type: ignore[operator]


def test_a_quotient_of_quotients() -> None:
    """Products of pairs of tokens, row by row and column by column, divide a length squared by the length."""
    once = torchs.FloorDiv(S**2, S)
    assert in_sympy(torchs.FloorDiv(once**2, once)) == S


def test_other_functions_are_named() -> None:
    assert unknown_function(in_sympy(torchs.RoundToInt(S * 1.0))) == "RoundToInt"
