"""Which kernel does an attention on a device, and what of it goes through memory.

    fused       torch's flash kernel (Dao 2023, FlashAttention-2): half precision, no mask; on a CPU the CPU's, of any
                kind. Cut over the ranks of a ring, tile by tile
    efficient   torch's memory-efficient kernel: a mask, float32, wide heads, values narrower than keys
    written     written out by the runtime in stretches of scores: dropout in attention, which drops by element alone
                (`ops/attention.py`); tiles of a ring with a mask, dropout or full precision
                (`ops/context_attention.py`)

Kernels and bytes of what is written out are counted once, as the runtime's own functions run on meta tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from autoptd.ops import library as ops
from autoptd.passes.analysis.storages import StorageWatch
from autoptd.passes.opcall import OpCall, TensorInfo

Way = Literal["fused", "efficient", "written"]
_ROWS, _HEADS, _WIDTH = 512, 8, 64  # of the attention that is counted; all its scores are one stretch
_SCORES = _HEADS * _ROWS * _ROWS
_PRODUCTS = (
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default,
)
_UNLAUNCHED = ("empty", "empty_like", "new_empty")


@dataclass(frozen=True)
class AttentionForm:
    """What the kernel depends on. `ring`: tokens are cut, and keys go round."""

    dtype: torch.dtype
    width: int
    value_width: int
    mask: torch.dtype | None = None
    dropped: bool = False
    causal: bool = False
    shared: bool = False  # several query heads read one key head
    ring: bool = False

    def way(self, device: str) -> Way:
        """`device`: "cuda" or "cpu"."""
        tile = ops.is_fused(device, self.dtype, self.width, self.value_width, self.mask is not None, self.dropped)
        if self.dropped or (self.ring and not tile):
            return "written"
        return "fused" if tile or device == "cpu" else "efficient"

    def why(self, device: str) -> str:
        """Why it is not the flash kernel, and the way out; empty where it is."""
        way = self.way(device)
        if way == "fused":
            return ""
        if self.dropped:
            return "no fused kernel drops the same elements under every plan; without dropout in attention one does it"
        if self.mask is not None:
            return "it takes a mask; the flash kernel takes is_causal=True alone"
        if self.dtype not in (torch.bfloat16, torch.float16):
            return f"the flash kernel takes bf16 and fp16, not {str(self.dtype).removeprefix('torch.')}"
        return f"the flash kernel takes no heads of {self.width} with values of {self.value_width}"


def form_of(call: OpCall, ring: bool = False) -> AttentionForm:
    """The form of a call of attention."""
    query, key, value = call.operands[:3]
    mask = call.arg(3, "attn_mask", call.kwargs.get("mask"))
    width, value_width = query.shape[-1], value.shape[-1]
    return AttentionForm(
        dtype=query.dtype,
        width=width if isinstance(width, int) else 0,
        value_width=value_width if isinstance(value_width, int) else 0,
        mask=mask.dtype if isinstance(mask, TensorInfo) else None,
        dropped=bool(call.arg(4, "dropout_p", 0.0)),
        causal=bool(call.arg(5, "is_causal", False)),
        shared=len(query.shape) > 2 and query.shape[-3] != key.shape[-3],
        ring=ring,
    )


@dataclass(frozen=True)
class Pass:
    """What one pass over a stretch of scores, or over a tile, launches and moves besides its products.

    `nbytes`, `temporary`: per score, of all that is as large; of fused tiles, per element of the tile's result.
    """

    launches: int
    products: int
    nbytes: float
    temporary: float  # at the fullest moment, results of products among them


@cache
def passes_of(form: AttentionForm) -> tuple[Pass, Pass]:
    """(forward, backward) of attention that is written out, or goes round a ring."""
    q = _meta(_HEADS, form.dtype)
    k, v = (_meta(_HEADS // 2 if form.shared else _HEADS, form.dtype) for _ in range(2))
    mask = None if form.mask is None else torch.empty(1, 1, _ROWS, _ROWS, dtype=form.mask, device="meta")
    stretches = 2 if form.ring else 1  # a tile with each rank's keys
    unit = _SCORES if form.way("cuda") == "written" else q.numel()
    with _Tally(unit) as forward:
        out = _run(form, q, k, v, mask)
    with _Tally(unit) as backward:
        gradients = torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    assert len(gradients) == 3
    return forward.found(stretches), backward.found(stretches)


def _meta(heads: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(1, heads, _ROWS, _WIDTH, dtype=dtype, device="meta", requires_grad=True)


def _run(form: AttentionForm, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    options: Any = {"rng": ops.DropoutKey(), "enable_gqa": form.shared}
    p = 0.1 if form.dropped else 0.0
    if form.ring:
        lone: Any = _LoneRing()
        return ops.ring_attention(q, k, v, lone, mask, p, form.causal, **options)
    return ops.attention(q, k, v, mask, p, form.causal, **options)


class _Tally(StorageWatch):
    """Counts what ops launch, and what those move that touch as many elements as a unit has."""

    def __init__(self, unit: int) -> None:
        super().__init__()
        self.unit = unit
        self.launches = self.products = self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        read, written = ([x for x in tree_leaves(t) if isinstance(x, Tensor)] for t in ((args, kwargs), result))
        stores = {x.untyped_storage()._cdata for x in read}
        new = func._schema.is_mutable or not all(x.untyped_storage()._cdata in stores for x in written)
        if not new or func.overloadpacket.__name__ in _UNLAUNCHED:
            return result
        self.launches += 1
        if func in _PRODUCTS:
            self.products += 1
        elif any(x.numel() >= self.unit for x in (*read, *written)):
            self.nbytes += sum(min(x.numel() * x.itemsize, x.untyped_storage().nbytes()) for x in (*read, *written))
        return result

    def found(self, stretches: int) -> Pass:
        """Of one stretch of as many."""
        alive = sum(
            shape.numel() * dtype.itemsize for shape, dtype in self.fullest(set()) if shape.numel() >= self.unit
        )
        launches = (self.launches - self.products) // stretches
        return Pass(launches, self.products // stretches, self.nbytes / self.unit / stretches, alive / self.unit)


class _LoneRing:
    """Stands for the cp axis of two ranks where nobody sends: a tile with own keys, and one with the other's."""

    size, rank, dim = 2, 0, -1

    def chunks(self, rank: int) -> tuple[int, ...]:
        return (0,)

    def part_of(self, rank: int, dim: int) -> _LoneRing:
        return self

    def whole(self, index: Tensor, length: int) -> Tensor:
        return index

    @property
    def group(self) -> _LoneRing:
        return self

    def shift_later(self, out: Tensor, x: Tensor) -> _LoneRing:
        return self

    def wait(self) -> None:
        pass
