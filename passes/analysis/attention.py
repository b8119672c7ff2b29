"""The kernel that runs an attention on a device, and its memory traffic.

    fused       torch's flash kernel (Dao 2023, FlashAttention-2): half precision, no mask; on a CPU, the CPU's fused
                kernel for any form. Ring attention runs it once for the keys of each rank, and pads narrow values
    efficient   torch's memory-efficient kernel: a mask, float32, wide heads, values narrower than keys. In a ring, a
                mask must be boolean (`ops/fused_attention.py`)
    written     unfused ops of the runtime, on chunks of the scores: dropout in attention, whose mask depends on the
                element alone (`ops/attention.py`); ring tiles with a mask that is added, or in float64
                (`ops/context_attention.py`)

Kernels and bytes of unfused attention are counted once, by running the runtime's own functions on meta tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from autoptd.ops import library as ops
from autoptd.passes.analysis.saved_tensors import ATTENTION
from autoptd.passes.analysis.storages import StorageWatch
from autoptd.passes.opcall import OpCall, TensorInfo

Kernel = Literal["fused", "efficient", "written"]
_ROWS, _HEADS, _WIDTH = 512, 8, 64  # of the attention that is counted; all its scores are one chunk
_SCORES = _HEADS * _ROWS * _ROWS
_PRODUCTS = (
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
)
_UNLAUNCHED = ("empty", "empty_like", "new_empty")


@dataclass(frozen=True)
class AttentionForm:
    """The properties of an attention that decide its kernel. `ring`: tokens are split over cp with ring attention."""

    dtype: torch.dtype
    width: int
    value_width: int
    mask: torch.dtype | None = None
    dropped: bool = False
    causal: bool = False
    shared: bool = False  # several query heads read one key head
    ring: bool = False

    def kernel(self, device: str) -> Kernel:
        """Return the kernel on a device, "cuda" or "cpu"."""
        tile = ops.tile_kernel(device, self.dtype, self.width, self.value_width, self.mask, self.dropped)
        if self.dropped or self.ring:
            return tile or "written"
        return "fused" if device == "cpu" or (tile == "fused" and self.width == self.value_width) else "efficient"

    def takes_groups(self) -> bool:
        """Return whether query heads can share keys that are not copied for each of them.

        torch's memory-efficient kernel cannot (2.13: `supports_gqa` in sdp_utils.cpp): all scores are written out
        instead, as they are in float64 anyway.
        """
        return self.dtype == torch.float64 or self.kernel("cuda") != "efficient"

    def why(self, device: str) -> str:
        """Return the reason why the flash kernel cannot run it, and the way out; empty if it can."""
        kernel = self.kernel(device)
        if kernel == "fused":
            return ""
        if self.dropped:
            ways = "remove dropout in attention" + ("" if self.ring or device == "cpu" else ', or fix dropout "fast",')
            return f"no fused kernel drops the same elements under every plan; {ways} to use one"
        if kernel == "written" and self.mask not in (None, torch.bool):
            return "its mask is added to the scores; in a ring, fused kernels support boolean ones only"
        if self.mask is not None:
            return "it has a mask; the flash kernel supports only is_causal=True"
        if self.dtype not in (torch.bfloat16, torch.float16):
            return f"the flash kernel supports bf16 and fp16, not {str(self.dtype).removeprefix('torch.')}"
        return f"the flash kernel does not support heads of {self.width} with values of {self.value_width}"


def form_of(call: OpCall, ring: bool = False) -> AttentionForm:
    """Return the form of a call of attention."""
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


def without_dropout(call: OpCall) -> OpCall:
    """Return a call of attention as if it dropped nothing, as the fused kernel that draws its own masks is priced."""
    if call.target not in ATTENTION or not call.arg(4, "dropout_p", 0.0):
        return call
    if len(call.args) > 4:
        return replace(call, args=(*call.args[:4], 0.0, *call.args[5:]))
    return replace(call, kwargs={**call.kwargs, "dropout_p": 0.0})


@dataclass(frozen=True)
class Pass:
    """Kernel launches and memory traffic of one pass over a chunk of scores, or over a ring tile.

    `nbytes` (moved by kernels other than products) and `temporary` count tensors as large as the scores, per score;
    for fused tiles, tensors as large as the tile's result, per element of it.
    """

    launches: int  # besides products
    products: int
    nbytes: float
    temporary: float  # at the peak, results of products included


@cache
def passes_of(form: AttentionForm) -> tuple[Pass, Pass]:
    """Return (forward, backward) of unfused or ring attention."""
    q = _meta(_HEADS, form.dtype)
    k, v = (_meta(_HEADS // 2 if form.shared else _HEADS, form.dtype) for _ in range(2))
    chunks = _SilentRing.size if form.ring else 1  # a tile with each rank's keys
    mask = None if form.mask is None else torch.empty(1, 1, _ROWS, chunks * _ROWS, dtype=form.mask, device="meta")
    unit = _SCORES if form.kernel("cuda") == "written" else q.numel()
    with _Tally(unit) as forward:
        out = _run(form, q, k, v, mask)
    with _Tally(unit) as backward:
        gradients = torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    assert len(gradients) == 3
    return forward.found(chunks), backward.found(chunks)


def _meta(heads: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(1, heads, _ROWS, _WIDTH, dtype=dtype, device="meta", requires_grad=True)


def _run(form: AttentionForm, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    options: Any = {"rng": ops.DropoutKey(), "enable_gqa": form.shared}
    p = 0.1 if form.dropped else 0.0
    if form.ring:
        ring: Any = _SilentRing()
        return ops.ring_attention(q, k, v, ring, mask, p, **options)  # of the keys of most ranks, no score is hidden
    return ops.attention(q, k, v, mask, p, form.causal, **options)


class _Tally(StorageWatch):
    """Counter of launches, and of the bytes that ops move in tensors of at least `unit` elements."""

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

    def found(self, chunks: int) -> Pass:
        """Return the average over `chunks` equal chunks."""
        alive = sum(
            shape.numel() * dtype.itemsize for shape, dtype in self.fullest(set()) if shape.numel() >= self.unit
        )
        launches = (self.launches - self.products) // chunks
        return Pass(launches, self.products // chunks, self.nbytes / self.unit / chunks, alive / self.unit)


class _SilentRing:
    """A stand-in for one of four ranks of a cp axis, which sends nothing."""

    size, rank, dim = 4, 0, -1

    def chunks(self, rank: int) -> tuple[int, ...]:
        return (rank,)

    def part_of(self, rank: int, dim: int) -> _SilentRing:
        return self

    def whole(self, index: Tensor, length: int) -> Tensor:
        return index

    @property
    def group(self) -> _SilentRing:
        return self

    def shift_later(self, out: Tensor, x: Tensor) -> _SilentRing:
        return self

    def wait(self) -> None:
        pass
