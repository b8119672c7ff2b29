"""Placements of a tensor on a mesh axis, and the conversions between them.

A placement says what each rank of an axis holds of a tensor and, by conjugation, of its gradient:

    text     value on each rank                            gradient on each rank
    B        the whole tensor                              the whole gradient
    Bp       the whole tensor                              a partial gradient (its sum is the gradient)
    S1       the rank's slice of dim 1                     the same slice of the gradient
    S1/3     a slice of each of 3 equal groups of dim 1    the same slices of the gradient
    P        a partial value (the sum over ranks is the value)   the whole gradient
    O        rows of the rank's own tokens, in its own order     the same rows of the gradient

Splitting a factor that an operand lacks makes the operand `Bp`: every rank needs all of it and computes a partial
gradient. `S1/3` is the slice of an inner factor: of a fused query-key-value weight, each rank holds its heads of all 3.

`O` is for what no slice describes: tokens of several samples merged into one dim, rows sorted by expert, and counts of
such rows. Nothing converts it; the ops that put rows back in order end it (`passes/sharding/token_rows.py`). What
depends on no input, such as the numbers of rows, is computed anew for a rank's own.

Every communication of an emitted program is one row of `CONVERSIONS`. The backward column is the conjugate: it turns
the gradient of the target placement into that of the source. (Xu et al. 2021, GSPMD; Shoeybi et al. 2019, f and g;
Korthikanti et al. 2022, the sequence-parallel pair.)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, TypeAlias

_KNOWN: dict[tuple[type, tuple[Any, ...]], Any] = {}  # (class, fields) -> the only instance


class _Interned(type):
    """The type of classes whose equal instances are one object: a search compares millions of placements."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        return _KNOWN.setdefault((cls, made._fields), made)


class _Placed(metaclass=_Interned):
    """Compared and hashed as an object: a set of placements has another order in every process."""

    _fields: tuple[Any, ...]

    def __post_init__(self) -> None:
        vars(self)["_fields"] = tuple(vars(self).values())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._fields


@dataclass(frozen=True, eq=False)
class Broadcast(_Placed):
    """Every rank holds the whole tensor; its gradient is whole (`B`) or a partial value (`Bp`)."""

    partial_grad: bool = False

    def __str__(self) -> str:
        return "Bp" if self.partial_grad else "B"


@dataclass(frozen=True, eq=False)
class Split(_Placed):
    """Each rank holds an equal slice of `dim`; with `groups` > 1, an equal slice of each group."""

    dim: int
    groups: int = 1

    def __str__(self) -> str:
        return f"S{self.dim}" if self.groups == 1 else f"S{self.dim}/{self.groups}"


@dataclass(frozen=True, eq=False)
class PartialSum(_Placed):
    """Each rank holds a partial value of the tensor; its gradient is whole on every rank."""

    def __str__(self) -> str:
        return "P"


@dataclass(frozen=True, eq=False)
class OwnRows(_Placed):
    """Each rank holds what its own tokens give; other ranks hold other rows, or counts of them."""

    def __str__(self) -> str:
        return "O"


Placement: TypeAlias = Broadcast | Split | PartialSum | OwnRows

B = Broadcast()
BP = Broadcast(partial_grad=True)
P = PartialSum()
O = OwnRows()  # noqa: E741


def parse_placement(text: str) -> Placement:
    """Parse the output of `str(placement)`. Raises ValueError naming the text."""
    if text == "B":
        return B
    if text == "Bp":
        return BP
    if text == "P":
        return P
    if text == "O":
        return O
    if match := re.fullmatch(r"S(\d+)(?:/([1-9]\d*))?", text):
        return Split(int(match[1]), int(match[2] or 1))
    raise ValueError(f"{text!r} is not a placement; write B, Bp, P, O, S<dim> or S<dim>/<groups>, for example S0")


@dataclass(frozen=True)
class Conversion:
    """The method of an emitted program's axis that converts one placement to another, and the collectives it issues."""

    function: str  # method of autoptd.ops.tp_axis.Axis; "" for the identity
    forward: str | None  # "all_reduce", "all_gather", "reduce_scatter", "all_to_all", or None
    backward: str | None


# (from, to); S stands for any Split, (S, S) for two different ones.
CONVERSIONS: dict[tuple[str, str], Conversion] = {
    ("B", "B"): Conversion("", None, None),
    ("B", "Bp"): Conversion("sum_gradient", None, "all_reduce"),
    ("B", "P"): Conversion("first_rank", None, None),
    ("B", "S"): Conversion("slice", None, "all_gather"),
    ("Bp", "B"): Conversion("first_gradient", None, None),
    ("Bp", "Bp"): Conversion("", None, None),
    ("Bp", "P"): Conversion("first_rank_and_gradient", None, None),
    ("Bp", "S"): Conversion("slice_partial", None, None),
    ("P", "B"): Conversion("all_reduce", "all_reduce", None),
    ("P", "Bp"): Conversion("all_reduce_both", "all_reduce", "all_reduce"),
    ("P", "P"): Conversion("", None, None),
    ("P", "S"): Conversion("reduce_scatter", "reduce_scatter", "all_gather"),
    ("S", "B"): Conversion("all_gather_whole", "all_gather", None),
    ("S", "Bp"): Conversion("all_gather", "all_gather", "reduce_scatter"),
    ("S", "P"): Conversion("pad", None, None),
    ("S", "S"): Conversion("all_to_all", "all_to_all", "all_to_all"),
}
_NOTHING = Conversion("", None, None)


def kind(placement: Placement) -> str:
    """Return the placement's row and column name in `CONVERSIONS`: for parameters, what is done with gradients."""
    return "S" if isinstance(placement, Split) else str(placement)


def conversion(source: Placement, target: Placement) -> Conversion:
    """Return the conversion from `source` to `target`."""
    if source == target or target == O:
        return _NOTHING
    return CONVERSIONS[kind(source), kind(target)]
