"""Conditions on sizes under which a program computes what the model does: its code takes branches on sizes.

    if x.size(0) > 4:           traced with 2 samples: b <= 4
    x.chunk(ceil(b / 4))        traced with 2 samples: ceiling(b / 4) = 1

A program runs microbatches, but its branches are those of one pass over the whole batch: b is the samples of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import sympy

from autoptd.errors import AutoptdError, InputsError

SAMPLES = "b"


@dataclass(frozen=True)
class SizeCondition:
    """A relation of sizes, and the user's line that it is due to."""

    relation: sympy.Basic
    where: str

    def __str__(self) -> str:
        if isinstance(self.relation, sympy.core.relational.Relational):
            shown = self.relation.canonical  # -s <= -8: s >= 8
            return f"{shown.lhs} {shown.rel_op} {shown.rhs}" if hasattr(shown, "rel_op") else str(shown)
        return str(self.relation)

    @property
    def names(self) -> set[str]:
        return {str(symbol) for symbol in self.relation.free_symbols}

    def or_for(self, samples: int) -> SizeCondition:
        """Return this condition on the samples of a step, or a step of so many."""
        (symbol,) = self.relation.free_symbols
        return replace(self, relation=sympy.Or(self.relation, sympy.Eq(symbol, samples)))

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Return whether it holds for these sizes; False where that cannot be worked out."""
        given = {symbol: sizes[str(symbol)] for symbol in self.relation.free_symbols if str(symbol) in sizes}
        try:
            return bool(self.relation.subs(given) == sympy.true)
        except (TypeError, ValueError):  # it divides by zero
            return False


Conditions = tuple[SizeCondition, ...]


@dataclass(frozen=True)
class EqualParts:
    """A size that tp cuts into equal parts, such as the tokens of a sample: `parts` must divide it."""

    size: sympy.Expr
    parts: int

    def refuse_remainder(self, sizes: Mapping[str, int], inputs: Mapping[str, str], cp: int) -> None:
        """Raise InputsError if the parts are unequal. sizes: those of one of `cp` ranks; inputs: where each one is."""
        value = self.size.subs({symbol: sizes[str(symbol)] for symbol in self.size.free_symbols})
        if value % self.parts:
            names = sorted(str(symbol) for symbol in self.size.free_symbols)
            here = "" if self.size.is_Symbol else f" ({self.size} of {', '.join(f'{n} = {sizes[n]}' for n in names)})"
            raise InputsError(
                f"{value} tokens{here}{' of a cp rank' * (cp > 1)} cannot be cut into {self.parts} equal parts for tp",
                where=", ".join(inputs[name] for name in names),
                fix=f"pad every sequence to a multiple of {self.parts * cp} there, with ignored labels; or plan with "
                "fix={'sequence_parallel': False}",
            )


def all_hold(conditions: Iterable[SizeCondition], samples: int) -> bool:
    """Return whether those on the samples of a step alone hold."""
    return all(c.holds({SAMPLES: samples}) for c in conditions if c.names == {SAMPLES})


def refuse_other_sizes(conditions: Iterable[SizeCondition], sizes: Mapping[str, int], kind: type[AutoptdError]) -> None:
    """Raise an error of a kind for sizes for which a condition does not hold."""
    for condition in conditions:
        if not condition.holds(sizes):
            given = ", ".join(f"{name} = {sizes[name]}" for name in sorted(condition.names & sizes.keys()))
            of = f" ({SAMPLES}: the samples of a step)" if SAMPLES in condition.names else ""
            raise kind(
                f"the model's code depends on sizes: it was traced where {condition}, but here {given}{of}",
                where=condition.where,
                fix="give two samples or more; or remove the branch on a size"
                if sizes.get(SAMPLES) == 1 and SAMPLES in condition.names
                else "trace it with example inputs of these sizes; or remove the branch on a size",
            )
