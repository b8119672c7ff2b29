"""One tile of attention by torch's fused kernels, with the log of each query's sum of exponentials.

The tiles of a row of scores are combined by those sums, and each tile's gradients follow from the sum and the result of
the whole row (Dao et al. 2022, FlashAttention, section 3.1 and appendix B.4). Scores are never stored.

    fused       the flash kernel: without a mask, in half precision, heads of one width up to 256; on a CPU, the CPU's
                kernel for any type and mask
    efficient   the memory-efficient kernel of CUDA: a mask, float32, wider heads

Heads are padded with zeros to a width that the kernel accepts, which changes no number. A mask is boolean: a number
that is added to the scores may be so low that it swallows the log of a sum.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
TileKernel = Literal["fused", "efficient", ""]
_WIDEST = 256  # largest width of a head that CUDA's flash kernel accepts
_GRAIN = 8  # must divide widths of heads and strides of masks on CUDA
_ROW_GRAIN = 32  # rows to which the memory-efficient kernel's backward pass wants the sums padded (kAlignLSE)
_OLDEST = (8, 0)  # compute capability that the kernels require in bf16
HALF_TYPES = (torch.bfloat16, torch.float16)


def tile_kernel(
    device: str, dtype: torch.dtype, width: int, value_width: int, mask: torch.dtype | None, dropped: bool
) -> TileKernel:
    """Return torch's kernel that computes such a tile, and its sums, on a kind of device; empty if there is none."""
    if dropped or mask not in (None, torch.bool):
        return ""
    if device == "cpu":
        return "fused"
    if device != "cuda" or dtype not in (*HALF_TYPES, torch.float32):
        return ""
    flash = dtype in HALF_TYPES and mask is None and max(width, value_width) <= _WIDEST
    return "fused" if flash else "efficient"


def takes(q: Tensor, v: Tensor, mask: Tensor | None, dropped: bool) -> bool:
    """Return whether such a kernel can run on q [..., heads, n, d], v [..., kv heads, m, dv]; meta counts as a GPU."""
    if q.is_cuda and torch.cuda.get_device_capability(q.device) < _OLDEST:
        return False
    return q.ndim == 4 and bool(_kernel(q, v, mask, dropped))


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """q [b, heads, n, d], k [b, kv heads, m, d], v [b, kv heads, m, dv] -> (result, sums [b, heads, n]).

    mask: boolean, broadcast to [b, heads, n, m]. Sums are logs, in float32 at least; -inf for rows that see nothing.
    """
    bias, width = _bias(mask, q, k), v.shape[-1]
    q, k, v = _padded(q, k, v)
    if q.device.type == "cpu":
        out, sums = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale
        )
    elif _kernel(q, v, mask) == "fused":
        out, sums, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)
    else:
        k, v = _expanded(k, q), _expanded(v, q)
        out, sums, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, is_causal, scale=scale)
        sums = sums[..., : q.shape[-2]]
    if mask is not None:  # kernels give rows that see nothing a sum of 1
        sums = sums.masked_fill(~mask.any(-1), -math.inf)
    return out[..., :width], sums


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    out: Tensor,
    sums: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tile's contributions to the gradients of q, k and v.

    `out` and `sums` are those of the whole rows; the sum of a row that sees nothing is inf.
    """
    bias, widths, heads = _bias(mask, q, k), [x.shape[-1] for x in (q, k, v)], k.shape[-3]
    q, k, v, grad, out = _padded(q, k, v, grad, out)
    if q.device.type == "cpu":
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, sums.contiguous(), 0.0, is_causal, attn_mask=bias, scale=scale
        )
    elif _kernel(q, v, mask) == "fused":
        unused = (
            torch.empty(2, dtype=torch.uint64, device=q.device),
            torch.empty(0, dtype=torch.uint64, device=q.device),
        )
        lengths = q.shape[-2], k.shape[-2]
        found = aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, sums.contiguous(), None, None, *lengths, 0.0, is_causal, *unused, scale=scale
        )
    else:
        sums = F.pad(sums, (0, -sums.shape[-1] % _ROW_GRAIN), value=math.inf)
        unused = (torch.empty((), dtype=torch.int64, device=q.device),) * 2
        found = aten._scaled_dot_product_efficient_attention_backward(
            grad, q, _expanded(k, q), _expanded(v, q), bias, out, sums, *unused, 0.0, [True, True, True, False],
            is_causal, scale=scale,
        )  # fmt: skip
        to_q, *others = found[:3]
        found = to_q, *(x.unflatten(-3, (heads, -1)).sum(-3, dtype=sums.dtype) for x in others)
    to_q, to_k, to_v = (x[..., :width] for x, width in zip(found, widths, strict=False))
    return to_q, to_k, to_v


def _kernel(q: Tensor, v: Tensor, mask: Tensor | None, dropped: bool = False) -> TileKernel:
    device = q.device.type.replace("meta", "cuda")
    return tile_kernel(device, q.dtype, q.shape[-1], v.shape[-1], None if mask is None else mask.dtype, dropped)


def _padded(*parts: Tensor) -> tuple[Tensor, ...]:
    """Pad the last dim of all with zeros to one width that the device's kernels accept."""
    grain = 1 if parts[0].device.type == "cpu" else _GRAIN
    width = -(-max(x.shape[-1] for x in parts) // grain) * grain
    return tuple(x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in parts)


def _bias(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return what a mask adds to the scores, 0 or -inf, [b, heads, n, m] with rows at aligned addresses."""
    if mask is None:
        return None
    columns = mask.shape[-1]
    bias = torch.zeros(*mask.shape[:-1], columns + -columns % _GRAIN, dtype=q.dtype, device=q.device)[..., :columns]
    return bias.masked_fill_(~mask, -math.inf).expand(*q.shape[:-1], k.shape[-2])


def _expanded(x: Tensor, q: Tensor) -> Tensor:
    """Repeat key heads for the query heads that share them, for a kernel that does not know of sharing."""
    return x if x.shape[-3] == q.shape[-3] else x.repeat_interleave(q.shape[-3] // x.shape[-3], -3)
