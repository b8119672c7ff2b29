"""A torch function mode that runs the user's code in float64, with the dropout masks of the emitted program.

Every call of torch in the model's forward and backward passes goes through `Keyed`, which replaces

    a narrower float type, as an argument       by float64
    a narrower tensor that is not a parameter   by its float64 copy: inputs, constants, tables of a module
    torch.tensor(0.1)                           by its value rounded to float32, as the graph holds it; with
                                                dtype=x.dtype, rounded to the planned type
    x.dtype, torch.finfo(x.dtype)               by the planned type, and by that of the planned type
    the k-th dropout of a forward pass          by the mask of the node that was traced from its k-th random call
    the k-th other random op                    likewise, below autograd (`keyed_draws.py`)

What k is, `call_numbers.py` says. Dropout of rows that a mask selects takes those of the mask of all rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autoptd.ops import library as ops
from autoptd.ops.dropout import DropoutKey
from autoptd.passes.trace.traced import PRECISIONS
from autoptd.verification.call_numbers import CallNumbers, MoreDraws
from autoptd.verification.keyed_draws import Draw, DrawsOfProgram
from autoptd.verification.selected_rows import SelectedRows

WIDE = {  # type -> the one that it is verified in
    **dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float64),
    torch.complex64: torch.complex128,
}
_NARROW = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)
_DTYPE = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]
_LITERALS = (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)


@contextmanager
def float64_by_default() -> Iterator[None]:
    """Make float64 the default dtype, that of `torch.arange(8) / 8`, in the plain model and on every rank."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclass
class Keyed(TorchFunctionMode):
    """The mode described in the module docstring.

    draws: by the number of their call in a forward pass; None disables dropout. calls: the modules of all calls, also
    of those whose numbers nothing reads.
    """

    draws: Mapping[int, Draw] | None
    calls: Sequence[str]
    rng: DropoutKey
    precision: str
    wide: bool = True  # whether the model's code itself uses float64; if not, `dtype=x.dtype` means the planned type
    _before: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        super().__init__()
        rows = {call for call, draw in (self.draws or {}).items() if draw.rows}
        self._numbers = CallNumbers(self.calls, rows)
        self._rows = SelectedRows() if rows else None
        self._below = DrawsOfProgram(self._next, lambda draw: self._numbers.leave_out(draw.call, draw.layer), self.rng)

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[Keyed]:
        """Run a model within."""
        with self:
            self._numbers.start(model)
            try:
                yield self
            finally:
                self._numbers.stop()

    def check(self) -> None:
        """Raise MoreDraws if the model drew less often than its graph in a forward pass."""
        if self.draws is not None:
            self._numbers.check()

    def __enter__(self) -> Keyed:
        """Also patch functions that torch's own Python code calls by name, which bypasses a mode."""
        self._before = F.dropout, F.scaled_dot_product_attention, torch.finfo, torch.get_rng_state()
        F.dropout, F.scaled_dot_product_attention, torch.finfo = self._dropout, self._attention, self._finfo  # type: ignore[assignment,misc]
        torch.default_generator.manual_seed(0)
        self._below.__enter__()
        super().__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        self._below.__exit__(kind, error, trace)
        F.dropout, F.scaled_dot_product_attention, torch.finfo, state = self._before  # type: ignore[assignment,misc]
        torch.set_rng_state(state)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = self._called(func, args, kwargs)
        if self._rows is not None:
            self._rows.note(func, args, kwargs or {}, made)
        return made

    def _called(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
        dropout, attention = self._before[:2]
        if func == _DTYPE:
            asks = sys._getframe(2).f_globals.get("__name__", "")  # torch itself compares types, as in checkpointing
            return func(*args) if asks.startswith("torch.") else self._planned(func(*args))
        if func in _LITERALS:
            return self._literal(func, args, dict(kwargs or {}))
        args, options = as_float64(tuple(args)), as_float64(dict(kwargs or {}))
        func = torch.Tensor.double if func in _NARROW else func
        if func is torch._grouped_mm:  # its kernel does not support float64
            return _each_group(args[0], args[1], options["offs"])
        if func is dropout:
            return self._dropout(*args, **options)
        if func in (torch.dropout, torch.dropout_):
            given = dict(zip(("input", "p", "train"), args, strict=False)) | options
            return self._dropout(given["input"], given["p"], given["train"], func is torch.dropout_)
        if func is attention:
            return self._attention(*args, **options)
        return func(*args, **options)

    def _literal(self, func: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Return a tensor made from a literal, rounded as the tracer rounds it."""
        made = func(*args, **options)
        named = options.get("dtype")
        own = PRECISIONS[self.precision] if func is torch.Tensor.new_tensor or named is not None else torch.float32
        data = (*args, *options.values())[func is torch.Tensor.new_tensor]
        unnamed = named is None or (named is torch.float64 and not self.wide)
        rounded = isinstance(data, (float, list, tuple)) and unnamed and made.is_floating_point()
        return as_float64(made.to(own) if rounded else made)

    def _planned(self, dtype: torch.dtype) -> torch.dtype:
        """Return the planned type for float64: code may branch on it, as in `1e-5 if x.dtype == torch.float32`."""
        return PRECISIONS[self.precision] if dtype == torch.float64 and not self.wide else dtype

    def _finfo(self, dtype: torch.dtype | None = None) -> torch.finfo:
        return self._before[2](PRECISIONS[self.precision] if dtype in (None, torch.float64) else dtype)

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not (training and p) or self.draws is None:
            return input
        draw = self._next()
        if draw is None:
            return input
        if draw.rows:
            made = input * self._mask_of_rows(input, p, draw)
        else:
            made = ops.dropout(input, p, key=draw.key, rng=self.rng, samples=draw.samples)
        return input.copy_(made) if inplace else made

    def _mask_of_rows(self, input: Tensor, p: float, draw: Draw) -> Tensor:
        """Return what the program multiplies these rows of all by."""
        mask = None if self._rows is None else self._rows.mask(input)
        if mask is None:
            raise MoreDraws("it is not known which rows these are")
        every = input.new_ones(mask.numel(), *input.shape[1:])
        return ops.dropout(every, p, key=draw.key, rng=self.rng, samples=draw.samples)[mask.flatten()]

    def _attention(self, *args: Any, **options: Any) -> Tensor:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        named = as_float64(dict(zip(names, args, strict=False)) | options)
        draw = self._next() if named.get("dropout_p") else None
        if draw is None:
            made: Tensor = self._before[1](**named | {"dropout_p": 0.0})
            return made
        return ops.attention(
            named["query"],
            named["key"],
            named["value"],
            named.get("attn_mask"),
            named["dropout_p"],
            named.get("is_causal", False),
            named.get("scale"),
            key=draw.key,
            rng=self.rng,
            samples=draw.samples,
            enable_gqa=named.get("enable_gqa", False),
        )

    def _next(self) -> Draw | None:
        """Return the draw of this call; None if its numbers are read by nothing, or dropout is disabled."""
        if self.draws is None:
            return None
        return self.draws.get(self._numbers.take())


def _each_group(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Return [r, n] for x [r, k], weight [e, k, n] and offs [e], the end of each group's rows; other rows are zero."""
    ends = offs.tolist()
    parts = [x[a:b] @ w for a, b, w in zip([0, *ends], ends, weight, strict=False)]
    return torch.cat([*parts, x.new_zeros(x.shape[0] - ends[-1], weight.shape[2])])


def as_float64(value: Any) -> Any:
    """Return arguments with float64 in place of narrower float types and of tensors of such types."""
    if isinstance(value, torch.dtype) and value in WIDE:
        return WIDE[value]
    if isinstance(value, Tensor):
        return value.to(WIDE[value.dtype]) if value.dtype in WIDE and not isinstance(value, nn.Parameter) else value
    if type(value) in (tuple, list):
        return type(value)(map(as_float64, value))
    return {k: as_float64(v) for k, v in value.items()} if isinstance(value, dict) else value
