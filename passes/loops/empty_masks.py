"""Branches on whether a mask selects anything, and loops over the experts that some row chose.

    for e in (mask.sum((-1, -2)) > 0).nonzero():         the turns of experts that no row chose are left out
        slot, row = torch.where(mask[e])
        if row.numel() == 0: continue                    likewise
        out.index_add_(0, row, expert(x[row]))

    if mask.any(): x[mask] = made                        the branch is a turn as well; so is `if not mask.all()`

    counts = torch.bincount(chosen.flatten(), minlength=n).tolist()
    if counts[e] == 0: continue                          as for `torch.where(chosen == e)`

The trace takes every turn. That is exact if a turn without rows changes nothing: two more traces leave out every second
turn, and must equal the full one without the writes of these turns' rows. Rows are known by the symbol of their number,
which torch.export makes for each `where` and `nonzero`. A mask of no choices is one that only zeros sum to zero in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import sympy
import torch
from networkx.utils import UnionFind
from torch import SymBool, Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from autoptd.errors import UnsupportedOp
from autoptd.passes.graph import OR_ZERO, source_line
from autoptd.passes.loops.arguments import asks_for_any, is_zero, moved, size_of
from autoptd.passes.loops.without_rows import rows_of, without_rows
from autoptd.passes.random.skipped_layers import equal_programs
from autoptd.passes.traced_reads import WRITES, eager

Key = tuple[int, ...]  # of a turn: the numbers of the loops and turns that it is in, and its own


@dataclass(frozen=True)
class RowTurns:
    """The turns of a trace that rows decide on. without: those left out, as for masks that select nothing.

    rows: turn -> symbols of the numbers of its rows, filled in while the model is traced.
    """

    without: frozenset[Key] = frozenset()
    rows: dict[Key, set[sympy.Symbol]] = field(default_factory=dict)

    def halves(self) -> Iterator[frozenset[Key]]:
        """Yield every second turn, and the others. Turns on the same rows are in one half."""
        same = UnionFind()
        for key, rows in self.rows.items():
            same.union(key, *rows)
        groups: dict[Any, list[Key]] = {}
        for key in self.rows:
            groups.setdefault(same[key], []).append(key)
        for half in (list(groups.values())[::2], list(groups.values())[1::2]):
            if half:
                yield frozenset(key for group in half for key in group)


# ---- what tensors are, while the model is traced ----


@dataclass(frozen=True)
class _Class:
    """One class among chosen ones."""

    numbers: Tensor
    entry: int

    def mask(self) -> Tensor:
        """Return where it is chosen."""
        return self.numbers == self.entry


@dataclass(frozen=True)
class _Count:
    """A tensor without numbers below zero, such as a mask; whether each entry of dim 0 has any other than zero."""

    mask: Tensor
    classes: tuple[int, int] | None = None  # dim, and how many of its entries may be other than zero
    total: bool = False  # sums over all dims but the first
    chosen: bool = False  # whether these are above zero
    of: _Class | None = None  # where that class is chosen


@dataclass(frozen=True)
class _Some:
    """A number that says whether a mask has anything, or whether it has all."""

    mask: Tensor
    every: bool
    of: _Class | None = None


@dataclass(frozen=True)
class _Index:
    """Numbers of classes, in the order of `numbers` or another."""

    below: int
    numbers: Tensor


@dataclass(frozen=True)
class _Chosen:
    """Numbers of rows that chose each class."""

    numbers: Tensor
    classes: int


@dataclass(frozen=True)
class _Hits:
    """The entries of dim 0 of a mask that has anything there, as `nonzero` gives them, after `form`."""

    mask: Tensor
    form: Tensor  # the same of all entries


@dataclass(frozen=True)
class _Hit:
    """The number of an entry whose turn it is."""

    entry: int
    mask: Tensor


@dataclass(frozen=True)
class _EntryOf:
    """An entry of dim 0 of a mask."""

    entry: int
    mask: Tensor


_SAME = {  # functions after which a mask is the same mask
    *("permute", "transpose", "t", "to", "long", "int", "bool", "squeeze", "unsqueeze", "view", "reshape", "flatten"),
    *("contiguous", "clone", "detach"),
}
_ZERO = {"eq", "__eq__"}
_COMPARED = {"gt", "greater", "ne", "not_equal", "__gt__", "__ne__"}
_OF_HITS = {"squeeze", "flatten", "view", "reshape", "__getitem__", "select"}


class TurnsOnRows(TorchFunctionMode):
    """The mode in which turns are taken as `turns` says."""

    def __init__(self, turns: RowTurns) -> None:
        super().__init__()
        self.turns = turns
        self.known = WeakIdKeyDictionary()  # tensor -> what it is
        self.sizes = set[sympy.Symbol]()  # numbers of rows
        self.inside: list[tuple[Key, _Hit]] = []
        self.asked: dict[sympy.Symbol, Key] = {}  # number of rows -> the turn that depends on it
        self.counted: dict[sympy.Symbol, _Class] = {}  # number of rows -> the class that they chose
        self.turn_of = WeakIdKeyDictionary()  # numbers of classes -> class -> the turn that depends on its rows
        self.count = [0]  # of turns and loops so far, for each loop that this is inside of
        self._patches = ExitStack()

    def __enter__(self) -> TurnsOnRows:
        self._patches.enter_context(patch.object(SymBool, "__bool__", self._truth_of(SymBool.__bool__)))
        self._patches.enter_context(patch.object(FakeTensor, "tolist", self._list_of(FakeTensor.tolist)))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if torch.compiler.is_dynamo_compiling() or not args or not isinstance(args[0], Tensor):
            return func(*args, **kwargs)
        first = self._what(args[0])
        if isinstance(first, _Some) and func == Tensor.__bool__:
            return self._answer(first)
        if isinstance(first, _Class) and name == "item":
            return self._number_of(first)
        if isinstance(first, _Hits) and name == "unbind":
            return self._each(first, as_numbers=False)
        if name == "unbind" and first is None and args[0].ndim and self._counts_rows(args[0].shape[0]):
            raise UnsupportedOp(
                "a loop depends on data, which is unknown at planning time",
                fix="take a turn for all, as in `for i in range(n)`: where a mask selects no rows, index_add and "
                "x[mask] = rows change nothing",
            )
        if name == "split" and any(isinstance(n, torch.SymInt) and n.node.expr in self.counted for n in _listed(args)):
            raise UnsupportedOp(
                "rows are split by how many chose each expert, numbers that depend on data",
                fix="multiply the sorted rows at once: torch._grouped_mm(rows, weights, offs=counts.cumsum(0).int()); "
                "or loop over experts: row, slot = torch.where(chosen == e), and out.index_add_(0, row, …)",
            )
        if name == "__getitem__" and isinstance(args[1], Tensor) and isinstance(hit := self.known.get(args[1]), _Hit):
            at = hit.entry if args[1].ndim == 0 else slice(hit.entry, hit.entry + 1)
            made = func(args[0], at)
            if hit.mask is args[0]:
                self.known[made] = _EntryOf(hit.entry, args[0])
            return made
        made = func(*args, **kwargs)
        if WRITES.fullmatch(name) and not args[0].is_floating_point():
            for x in [x for x, what in self.known.items() if not isinstance(what, _Hit)]:
                del self.known[x]  # maybe of the memory that was written to
        self._note(made, name, first, args, kwargs)
        return made

    def _counts_rows(self, size: Any) -> bool:
        return isinstance(size, torch.SymInt) and size.node.expr in self.sizes

    def _what(self, x: Tensor) -> object:
        """Return what a tensor is, if that is known."""
        return self.known.get(x, _Count(x) if x.dtype is torch.bool else None)

    def _note(self, made: Any, name: str, first: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Remember what a result is."""
        if name in ("nonzero", "argwhere") or (name == "where" and len(args) == 1):
            self._note_rows(made, first, args[0])
        if name == "topk" and (below := size_of(args[0], kwargs.get("dim", args[2] if len(args) > 2 else -1))):
            self.known[made[1]] = _Index(below, made[1])
        if not isinstance(made, Tensor) or made in self.known:
            return
        found: object = None
        if name in ("any", "all") and args[0].dtype is torch.bool and len(args) == 1 and not kwargs:
            found = _Some(args[0], name == "all")
        elif isinstance(first, _Hits) and name in _OF_HITS:
            with eager():
                form = getattr(first.form, name)(*args[1:], **kwargs)
            found = _Hits(first.mask, form)
        elif isinstance(first, (_Hit, _EntryOf)) and name in _SAME | {"__getitem__"}:
            found = first if isinstance(first, _Hit) or name != "__getitem__" else None
        elif isinstance(first, _Count) and not first.total:
            found = self._of_mask(name, first, made, args, kwargs)
        elif isinstance(first, _Count) and name in _COMPARED and is_zero(args):
            found = replace(first, chosen=True)
        elif isinstance(first, _Index) and name in _SAME:
            found = first
        elif isinstance(first, _Index) and name in ("eq", "__eq__") and isinstance(args[1], int):
            found = _Count(made, of=_Class(first.numbers, args[1]))
        elif isinstance(first, _Index) and name == "bincount" and not {"weights", "input"} & kwargs.keys():
            classes = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
            found = _Chosen(first.numbers, classes) if len(args) != 2 and classes >= first.below else None
        elif isinstance(first, _Chosen) and name in _SAME | {"cpu"}:
            found = first
        elif isinstance(first, _Chosen) and name in ("__getitem__", "select") and isinstance(args[-1], int):
            found = _Class(first.numbers, args[-1] % first.classes)
        elif isinstance(first, _Class) and name in _COMPARED | _ZERO and is_zero(args):
            mask = first.mask()
            found = _Some(~mask, True, first) if name in _ZERO else _Some(mask, False, first)
        if name == "argmax" and (below := size_of(args[0], kwargs.get("dim", args[1] if len(args) > 1 else None))):
            found = _Index(below, made)
        if name == "one_hot":
            found = _Count(made, (made.ndim - 1, first.below) if isinstance(first, _Index) else None)
        if found is not None:
            self.known[made] = found

    def _of_mask(self, name: str, mask: _Count, made: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
        if name in _SAME:
            return _Count(made, moved(mask.classes, name, args))
        if name in ("mul", "__mul__", "__and__") and len(args) == 2 and isinstance(args[1], Tensor):
            return _Count(made) if isinstance(self._what(args[1]), _Count) else None
        if name in ("__getitem__", "select") and args[1:-1] in ((), (0,)) and isinstance(args[-1], int):
            return _EntryOf(args[-1], args[0])
        if name not in ("sum", "any"):
            return None
        dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
        over = {d % args[0].ndim for d in ((dims,) if isinstance(dims, int) else dims or ())}
        if over == set(range(1, args[0].ndim)) and made.ndim == 1:
            return replace(mask, mask=args[0], total=True, chosen=name == "any")
        return None

    def _answer(self, some: _Some) -> bool:
        """Return what a branch on a mask takes: that it has some, or that it lacks some."""
        key, mask = self._next(), ~some.mask if some.every else some.mask
        if some.of is not None:
            self.turn_of.setdefault(some.of.numbers, {})[some.of.entry] = key
        size: Any = torch.nonzero(mask).shape[0]
        self.turns.rows.setdefault(key, set()).add(size.node.expr)
        return some.every == (key in self.turns.without)

    def _note_rows(self, made: Any, first: object, mask: Tensor) -> None:
        index = made[0] if isinstance(made, (tuple, list)) else made
        size = index.shape[0]
        if isinstance(size, torch.SymInt) and isinstance(symbol := size.node.expr, sympy.Symbol):
            self.sizes.add(symbol)
            of = first.of if isinstance(first, _Count) else None
            if of is not None and (turn := self.turn_of.get(of.numbers, {}).get(of.entry)) is not None:
                self.turns.rows[turn].add(symbol)
            for key, hit in self.inside:
                if isinstance(first, _EntryOf) and first.mask is hit.mask and first.entry == hit.entry:
                    self.turns.rows[key].add(symbol)
        if isinstance(first, _Count) and first.chosen and isinstance(mask.shape[0], int) and isinstance(made, Tensor):
            entries = first.classes[1] if first.classes and first.classes[0] == 0 else mask.shape[0]
            with eager():
                self.known[made] = _Hits(first.mask, torch.arange(entries)[:, None])

    def _each(self, hits: _Hits, as_numbers: bool) -> Iterator[Any]:
        """Yield what the hits of all entries are, each as a turn."""
        loop = self._next()
        with eager():
            numbers = hits.form.tolist()
        for entry, number in enumerate(numbers):
            key = (*loop, entry)
            self.turns.rows.setdefault(key, set())
            if key in self.turns.without:
                continue
            hit = _Hit(entry, hits.mask)
            self.inside.append((key, hit))
            self.count.append(0)
            if not as_numbers:
                number = torch.tensor(number)
                self.known[number] = hit
            try:
                yield number
            finally:
                self.inside.pop()
                self.count.pop()

    def _next(self) -> Key:
        """Return the key of the next turn or loop at this place."""
        self.count[-1] += 1
        return (*(self.inside[-1][0] if self.inside else ()), self.count[-1])

    def _list_of(self, plain: Callable[[FakeTensor], Any]) -> Callable[[FakeTensor], Any]:
        def numbers(x: FakeTensor) -> Any:
            known = self.known.get(x)
            if isinstance(known, _Chosen):
                return [self._number_of(_Class(known.numbers, e)) for e in range(known.classes)]
            return self._each(known, as_numbers=True) if isinstance(known, _Hits) else plain(x)

        return numbers

    def _number_of(self, which: _Class) -> Any:
        """Return the number of rows that chose a class."""
        size: Any = torch.nonzero(which.mask()).shape[0]
        self.sizes.add(size.node.expr)
        self.counted[size.node.expr] = which
        return size

    def _truth_of(self, plain: Callable[[SymBool], bool]) -> Callable[[SymBool], bool]:
        def truth(condition: SymBool) -> bool:
            expr = condition.node.expr
            size = next(iter(expr.free_symbols), None)
            if expr.free_symbols - self.sizes or size is None or not asks_for_any(expr, size):
                return plain(condition)
            key = self.asked.get(size) or self._next()
            self.asked[size] = key
            if which := self.counted.get(size):
                self.turn_of.setdefault(which.numbers, {})[which.entry] = key
            self.turns.rows.setdefault(key, set()).add(size)
            return bool(expr.subs(size, 0 if key in self.turns.without else 1))

        return truth


def _listed(args: Sequence[Any]) -> Sequence[Any]:
    """Return the second argument of an op if it is a list."""
    return args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()


# ---- the proof ----


def prove_turns(
    full: ExportedProgram, turns: RowTurns, trace: Callable[[RowTurns], ExportedProgram]
) -> Iterator[tuple[frozenset[Key], ExportedProgram]]:
    """Yield the turns that a trace leaves out, and the trace, which `trace` makes.

    Raises UnsupportedOp unless each turn changes nothing where it has no rows.
    """
    for without in turns.halves():
        sizes = {symbol for key in without for symbol in turns.rows[key]}
        other = RowTurns(without)
        traced = trace(other)
        part = without_rows(traced, {symbol for key in without for symbol in other.rows.get(key, ())})
        asked = {key for key in turns.rows if not any(key[: len(k)] == k != key for k in without)}
        zeros = set[str]()
        if other.rows.keys() != asked or not equal_programs(without_rows(full, sizes, zeros), part):
            raise UnsupportedOp(
                "a branch depends on whether a mask selects any rows, and more than the writes of these rows does",
                where=next((source_line(n) for n in full.graph.nodes if rows_of(n) & sizes), ""),
                fix="compute the same without the branch: no rows add nothing, by index_add or x[mask] = rows",
            )
        for node in full.graph.nodes:
            if node.name in zeros:
                node.meta[OR_ZERO] = True
        yield without, traced
