"""Loops over samples while a model is traced, and inputs whose values the program is made for.

A loop over pictures (`for x, size in zip(features, sizes.tolist())`) makes a trace that is valid for as many as the
example has. Such a trace is made with a number of samples that no other size has, and the loop's beginning and end are
recorded:

    x.unbind(), x.split([n, n, …])    piece i of the samples' dim, which stays a size of any batch
    torch.cat(pieces)                 `join(pieces, count)`, of the pieces of any number of samples

`write_joined` then writes the loop as one pass over all samples, if all of its turns compute the same. What a loop
makes of constants alone is written as `blocks` are.

The numbers that it reads, sizes of pictures, come from small inputs of integers that are equal for all samples of the
example. The program is made for these values (`used`), and every batch is checked for them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from autoptd.layout.sample_rows import PLAIN, SHARED, SampleRows
from autoptd.passes.data_checks import without_data_checks
from autoptd.passes.known.shared_arrays import unchanged_arrays
from autoptd.passes.loops.block_attention import attend_apart, block_of
from autoptd.passes.loops.blocks import blocks_of, literal
from autoptd.passes.loops.empty_masks import RowTurns, TurnsOnRows
from autoptd.passes.loops.join import JOIN, turns_counted
from autoptd.passes.loops.row_writes import RowWrites, sample_index
from autoptd.passes.loops.sizes_read import counted_by_hint
from autoptd.passes.loops.turn_numbers import Counted, Turn
from autoptd.passes.traced_reads import Recipe, TracedReads, eager

_SPLITS = ("split", "split_with_sizes")
_CATS = ("cat", "concat", "concatenate")
_SIZED = ("__getitem__", "__setitem__", "reshape", "view", "expand", "repeat", "unflatten", "narrow")
_BY_DATA = (  # functions of constants whose result has a size that depends on their values
    *("repeat_interleave", "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"),
    *("_unique_impl", "_return_output", "_return_inverse", "_return_counts"),
)


@dataclass(frozen=True)
class KnownInputs:
    """The samples of the example, and the row that all of them have, of each input whose values may be read."""

    samples: int
    rows: Mapping[str, Tensor]
    used: set[str] = field(default_factory=set)  # those that were read


def equal_rows(inputs: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """Return the row that all samples of an input have, of those that hold integers and are given with values."""
    found = {}
    for name in names:
        x = inputs[name]
        if x.ndim and x.shape[0] > 1 and not (x.is_floating_point() or x.is_complex() or x.is_meta):
            row = x[0].detach().cpu().clone()
            if bool((x.cpu() == row).all()):
                found[name] = row
    return found


@contextmanager
def reading(
    known: KnownInputs | None,
    rows: Mapping[str, SampleRows],
    left_out: set[str],
    turns: RowTurns,
    apart: Mapping[str, Tensor],
    given: Mapping[str, Tensor],
) -> Iterator[None]:
    """Wrap a traced pass over inputs `given`, `apart` with their samples in dim 0. known: set if loops over samples are
    recorded. left_out: gets the places of checks of data. turns: which turns that rows decide on are left out."""
    with without_data_checks(left_out), TurnsOnRows(turns), unchanged_arrays():
        if known is None:
            with TracedReads(left_out):
                yield
        else:
            loops = SampleLoops(known, apart, given, rows, left_out)
            with loops, counted_by_hint(loops):
                yield


class SampleLoops(TracedReads):
    """Mode that reads the values of known inputs, and records where loops over samples begin and end."""

    def __init__(
        self,
        known: KnownInputs,
        inputs: Mapping[str, Tensor],
        given: Mapping[str, Tensor],
        rows: Mapping[str, SampleRows],
        left_out: set[str],
    ) -> None:
        """inputs: the trace's, with a row for each sample; given: the same as forward takes them, by `rows`."""
        super().__init__(left_out)
        self.known = known
        self.makers = WeakIdKeyDictionary()  # tensor -> number of its computation: equal in the turns of a loop
        self.numbers: dict[Any, int] = {}
        self.writes: list[RowWrites] = []  # held back until their tensor is read
        self.settled = WeakIdKeyDictionary()  # constant of known inputs -> the same written as a constant
        self.counted = [x for name, x in inputs.items() if rows.get(name, PLAIN) != SHARED]
        for name, row in known.rows.items():
            self.recipes[given[name]] = self._read(name, row, rows.get(name, PLAIN))

    def _read(self, name: str, row: Tensor, rows: SampleRows) -> Recipe:
        def value() -> Tensor:
            self.known.used.add(name)
            return rows.joined(row.expand(self.known.samples, *row.shape)).clone()

        return Recipe(value, of_inputs=True)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(Turn, int, (tuple(args), kwargs or {}))
        name = getattr(func, "__name__", "")
        if self.writes and not torch.compiler.is_dynamo_compiling():
            self._write(_tensors((args, kwargs)), name)
        if not torch.compiler.is_dynamo_compiling() and args:
            if name in _SIZED and isinstance(args[0], Tensor):
                args = (args[0], *(self._numbers_in(x) for x in args[1:]))
            if name == "__getitem__" and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
                args = self._rows_of(*args)
            if name in ("__getitem__", "__setitem__") and (row := self._row(name, *args)) is not None:
                return row[0]
            if name == "__len__" and isinstance(args[0], Tensor) and args[0].ndim and self.of_samples(args[0].shape[0]):
                return _hint(args[0].shape[0])  # `list` asks for it
            if func is turns_counted and (count := self._turns(args[0])) is not None:  # type: ignore[arg-type]
                return count
            if name == "__iter__" or name == "unbind" or name in _SPLITS:
                made = self._apart(name, *args, **kwargs)
            elif name == "scaled_dot_product_attention":
                made = self._attention(*args, **kwargs)
            elif name in (*_CATS, "stack"):
                made = self._joined(name == "stack", *args, **kwargs)
            else:
                made = self._of_constants(func, name, args, kwargs)
            if made is not None:
                return made
        made, given = None, _tensors((args, kwargs))
        known = all(x in self.recipes for x in given)
        if known:
            made = super().__torch_function__(func, types, args, kwargs)
        if not known or (_is_float(made) and not any(map(_is_float, given))):
            args, kwargs = pytree.tree_map(self._settled, (tuple(args), kwargs))
            made = super().__torch_function__(func, types, args, kwargs)
        self._number(made, func, args, kwargs)
        return made

    def _number(self, made: Any, func: Any, *given: Any) -> None:
        """Give the tensors that a call made the numbers of their computation."""
        new = [x for x in _tensors(made) if x not in self.makers and (x.ndim or not self._is_read(x))]
        if new:
            leaves, spec = pytree.tree_flatten(given)
            text = tuple(self._maker(x) if isinstance(x, Tensor) else str(x) for x in leaves)
            for i, x in enumerate(new):
                self.makers[x] = self.numbers.setdefault((func, text, str(spec), i), len(self.numbers))

    def _maker(self, x: Tensor) -> int:
        if x not in self.makers:
            key = (str(self.computed(self.recipes[x])), x.dtype) if not x.ndim and self._is_read(x) else object()
            self.makers[x] = self.numbers.setdefault(key, len(self.numbers))
        found: int = self.makers[x]
        return found

    def _is_read(self, x: Tensor) -> bool:
        return x in self.recipes and self.recipes[x].of_inputs

    def of_samples(self, size: Any) -> bool:
        """Return whether a size depends on the number of samples."""
        if not isinstance(size, SymInt):
            return False
        counts: list[Any] = [x.shape[0] for x in self.counted]
        samples = {s for n in counts if isinstance(n, SymInt) for s in n.node.expr.free_symbols}
        return size.node.hint is not None and not samples.isdisjoint(size.node.expr.free_symbols)

    def size(self, symbol: SymInt) -> int:
        """Return a size that a number depends on: one of samples stays a symbol, as a second trace has another."""
        return _hint(symbol) if self.of_samples(symbol) else super().size(symbol)

    # ---- the beginning of a loop ----

    def _apart(self, name: str, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the pieces of a tensor along the dim of its samples, None if it is another dim."""
        rest, one = list(args), name not in _SPLITS
        by = 1 if one else kwargs.get("split_size_or_sections", kwargs.get("split_size"))
        by = rest.pop(0) if by is None else by
        dim = kwargs.get("dim", rest[0] if rest else 0)
        if not isinstance(x, Tensor) or not x.ndim or not self.of_samples(x.shape[dim]):
            return None
        length, by = _hint(x.shape[dim]), self._numbers_in(by)
        lengths = [int(n) for n in by] if isinstance(by, (list, tuple)) else [int(by)] * (length // int(by))
        if sum(lengths) != length or len(lengths) % self.known.samples:
            return None
        each = len(lengths) // self.known.samples
        starts = accumulate(lengths, initial=0)
        parts = [x.narrow(dim, start, n) for start, n in zip(starts, lengths, strict=False)]
        found = tuple(part.squeeze(dim) for part in parts) if one else tuple(parts)
        for turn, part in enumerate(found):
            self.makers[part] = self.numbers.setdefault(("part", self._maker(x), dim, turn % each), len(self.numbers))
            if x in self.recipes:
                whole = self.recipe(torch.unbind if one else torch.split, (x, dim) if one else (x, lengths, dim), {})
                self.recipes[part] = Recipe(operator.getitem, (whole, turn), of_inputs=whole.of_inputs)
        return iter(found) if name == "__iter__" else found

    def _numbers_in(self, x: Any) -> Any:
        """Return sizes or an index with the numbers that known tensors of one element hold."""
        if isinstance(x, slice):
            return slice(*map(self._numbers_in, (x.start, x.stop, x.step)))
        if isinstance(x, (tuple, list)):
            return type(x)(map(self._numbers_in, x)) if type(x) in (tuple, list) else x
        one = isinstance(x, Tensor) and not x.ndim and x in self.recipes and not _is_float(x) and x.dtype != torch.bool
        return int(self.computed(self.recipes[x])) if one else x

    def _rows_of(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Any]:
        """Return a tensor and the numbers of the rows that a known mask picks of it; the mask itself if it is not."""
        if mask not in self.recipes or x in self.recipes or mask.ndim > x.ndim:
            return x, mask
        value = self.computed(self.recipes[mask])
        with eager():
            rows, whole = value.flatten().nonzero().flatten(), bool(value.all())
        flat = x.flatten(0, mask.ndim - 1) if mask.ndim > 1 else x
        return flat, (slice(None) if whole else self._constant(rows))

    def _row(self, name: str, x: Tensor, index: Any, value: Any = None) -> tuple[Any] | None:
        """Read or write one sample's row; None if that is not what the call does, or x is known."""
        at = sample_index(index, [self.of_samples(size) for size in x.shape], name == "__getitem__")
        known = x in self.recipes and (name == "__getitem__" or not isinstance(value, Tensor) or value in self.recipes)
        if at is None or known:
            return None
        dim, i, opened = at
        if name == "__setitem__":
            self.forget(x)
            if not any(pending.target is x for pending in self.writes):
                self.writes.append(RowWrites(x))
            pending = next(pending for pending in self.writes if pending.target is x)
            pending.writes.append((index if isinstance(index, tuple) else (index,), opened, dim, i, value))
            return (None,)
        made = x[index]
        each = _hint(x.shape[dim]) // self.known.samples
        self.makers[made] = self.numbers.setdefault(("row", self._maker(x), str(opened), i % each), len(self.numbers))
        return (made,)

    def _write(self, given: Sequence[Tensor], name: str) -> None:
        """Do the writes that were held back, to tensors that are read."""
        memory = {x.untyped_storage()._cdata for x in given}
        for pending in [x for x in self.writes if x.target.untyped_storage()._cdata in memory]:
            if name != "__setitem__" or given[0] is not pending.target or (len(given) > 1 and given[1] is given[0]):
                self.writes.remove(pending)
                pending.done(self._rows_joined)

    def _rows_joined(self, values: list[Tensor], shape: Sequence[Any]) -> Tensor | None:
        """Return the values of all samples' rows in one tensor, each expanded to a shape; None if they differ."""
        if any(x.shape != shape for x in values):
            values = [self.__torch_function__(Tensor.expand, (), (x, shape)) for x in values]
        found: Tensor | None = self._joined(True, values)
        return found

    # ---- the end of a loop ----

    def _joined(self, stacked: bool, given: Any = None, dim: int = 0, **kwargs: Any) -> Any:
        """Return the pieces of all samples in one tensor, None if these are no pieces of samples."""
        given = kwargs.get("tensors", given)
        pieces = list(given or ())
        if not pieces or len(pieces) % self.known.samples or not all(isinstance(x, Tensor) for x in pieces):
            return None
        each = len(pieces) // self.known.samples
        if all(x in self.recipes for x in pieces) and not any(map(self.of_samples, _sizes(pieces))):
            values = [self.computed(self.recipes[x]) for x in pieces]
            with eager():
                join = torch.stack if stacked else torch.cat
                blocks = [join(values[i : i + each], dim) for i in range(0, len(values), each)]
            return self._blocks(blocks, dim % blocks[0].ndim)
        if isinstance(given, Counted) and len({id(x) for x in pieces}) == 1:
            x = pieces[0].unsqueeze(dim) if stacked else pieces[0]
            return x.repeat([self._count(each) if i == dim % x.ndim else 1 for i in range(x.ndim)])
        if (count := self._turns(pieces)) is None:
            return None
        dim = dim % (pieces[0].ndim + stacked)
        if stacked:
            pieces = [x.unsqueeze(dim) for x in pieces]
        return JOIN(pieces, count, dim)

    def _turns(self, pieces: Sequence[Tensor]) -> Any:
        """Return how many pieces there are, as a size of any batch; None if they are no pieces of samples."""
        each, rest = divmod(len(pieces), self.known.samples)
        makers = [self._maker(x) for x in pieces]
        alike = not rest and each > 0 and len({id(x) for x in pieces}) > 1 and makers[each:] == makers[:-each]
        return self._count(each) if alike else None

    def _count(self, each: int) -> Any:
        """Return how many pieces there are, with so many for each sample, as a size of any batch."""
        return each * self.counted[0].shape[0]

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, *args: Any, **options: Any) -> Any:
        """Return attention over all samples at once that a known mask keeps apart; None for any other."""
        known = isinstance(attn_mask, Tensor) and attn_mask in self.recipes and not args and q.ndim == 4
        if not known or not all(x.shape[0] == 1 and self.of_samples(x.shape[2]) for x in (q, k, v)):
            return None
        value = self.computed(self.recipes[attn_mask])
        with eager():
            block = block_of(value, self.known.samples)
        return None if block is None else attend_apart(q, k, v, block, self._count(1), **options)

    # ---- constants ----

    def _of_constants(self, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return a constant whose size torch would not know, or would take for that of every batch; else None."""
        given = _tensors((args, kwargs))
        if not all(x in self.recipes for x in given):
            return None
        masked = name == "__getitem__" and any(x.dtype == torch.bool for x in _tensors(args[1]))
        chosen = name == "where" and len(args) == 1 and not kwargs
        listed = func in (torch.tensor, torch.as_tensor) and isinstance(args[0], (list, tuple))
        ranged = func is torch.arange and any(isinstance(x, Tensor) for x in args)
        counted = name in _BY_DATA and (name != "repeat_interleave" or len(given) > 1 or len(args) == 1)
        if not (masked or chosen or listed or ranged or counted):
            return None
        values = self.computed(self.recipe(func, args, kwargs))
        made = [self._constant(x) for x in (values if isinstance(values, tuple) else [values])]
        return tuple(made) if isinstance(values, tuple) else made[0]

    def _constant(self, value: Any) -> Any:
        """Return a known value as ops of the trace: with a block for each sample if it has one, else as it is."""
        if not isinstance(value, Tensor):
            return value
        with eager():
            cut = value.ndim and value.shape[0] and value.shape[0] % self.known.samples == 0
            blocks = list(value.chunk(self.known.samples)) if cut else []
        made = self._blocks(blocks, 0) if blocks else None
        return made if made is not None else self._noted(lambda: literal(value), value)

    def _settled(self, x: Any) -> Any:
        """Return integers computed from known inputs alone as the constant that they are; all else as given.

        Numbers with a fraction are computed from such constants in the program, in its precision.
        """
        if not isinstance(x, Tensor) or _is_float(x) or x not in self.recipes or not self.recipes[x].of_inputs:
            return x
        of_samples = [dim for dim, size in enumerate(x.shape) if self.of_samples(size)]
        if len(of_samples) > 1 or any(isinstance(n, SymInt) for d, n in enumerate(x.shape) if d not in of_samples):
            return x
        if x not in self.settled:
            value, made = self.computed(self.recipes[x]), None
            if not of_samples:
                made = self._noted(lambda: literal(value), value)
            else:
                with eager():
                    even = value.shape[of_samples[0]] % self.known.samples == 0
                    blocks = value.chunk(self.known.samples, of_samples[0]) if even else ()
                made = self._blocks(blocks, of_samples[0]) if blocks else None
            self.settled[x] = x if made is None else made
        return self.settled[x]

    def _blocks(self, blocks: Sequence[Tensor], dim: int) -> Tensor | None:
        """Return blocks of samples one after another; None if they are not the same but for a step."""
        with eager():
            found, value = blocks_of(blocks, dim), torch.cat(list(blocks), dim)
        return None if found is None else self._noted(lambda: found.write(self._count(1)), value)

    def _noted(self, make: Callable[[], Tensor], value: Tensor) -> Tensor:
        made = make()
        self.recipes[made], self.settled[made] = Recipe(value.clone, of_inputs=True), made
        return made


def _hint(size: Any) -> int:
    """Return the size that a dim has in the example."""
    return int(size.node.hint) if isinstance(size, SymInt) else int(size)


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]


def _sizes(tensors: Sequence[Tensor]) -> list[Any]:
    return [size for x in tensors for size in x.shape]
