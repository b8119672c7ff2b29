"""One tile of attention by torch's fused kernels, with the log of each query's sum of exponentials.

The tiles of a row of scores are combined by those sums, and each tile's gradients follow from the sum and the result of
the whole row (Dao et al. 2022, FlashAttention, section 3.1 and appendix B.4). Scores are never stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten
_WIDEST, _GRAIN = 256, 8  # largest width of a head that CUDA's flash kernel accepts, and what must divide it
_OLDEST = (8, 0)  # compute capability that the kernel requires
HALF_TYPES = (torch.bfloat16, torch.float16)


def is_fused(device: str, dtype: torch.dtype, width: int, value_width: int, masked: bool, dropped: bool) -> bool:
    """Return whether a kernel of torch that also returns its sums can compute such a tile on a kind of device."""
    if masked or dropped or width != value_width:
        return False
    return device == "cpu" or (device == "cuda" and dtype in HALF_TYPES and width <= _WIDEST and width % _GRAIN == 0)


def takes(q: Tensor, v: Tensor, masked: bool, dropped: bool) -> bool:
    """Return whether such a kernel can run on q [..., heads, n, d], v [..., kv heads, m, dv]; meta counts as a GPU."""
    device = q.device.type.replace("meta", "cuda")
    if q.is_cuda and torch.cuda.get_device_capability(q.device) < _OLDEST:
        return False
    return q.ndim == 4 and is_fused(device, q.dtype, q.shape[-1], v.shape[-1], masked, dropped)


def forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """q [b, heads, n, d], k and v [b, kv heads, m, d] -> (result as q, sums [b, heads, n] in float32 at least)."""
    if q.device.type == "cpu":
        out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
    else:
        out, sums, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)
    return out, sums


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tile's contributions to the gradients of q, k and v. `out` and `sums` are those of the whole rows."""
    if q.device.type == "cpu":
        at_cpu = aten._scaled_dot_product_flash_attention_for_cpu_backward
        to_q, to_k, to_v = at_cpu(grad, q, k, v, out, sums, 0.0, is_causal, scale=scale)
    else:
        unused = (
            torch.empty(2, dtype=torch.uint64, device=q.device),
            torch.empty(0, dtype=torch.uint64, device=q.device),
        )
        lengths = q.shape[-2], k.shape[-2]
        to_q, to_k, to_v = aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, sums, None, None, *lengths, 0.0, is_causal, *unused, scale=scale
        )
    return to_q, to_k, to_v
