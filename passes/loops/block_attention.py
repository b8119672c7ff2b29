"""Attention over the pictures of all samples at once, in which a mask keeps them apart.

    [1, h, b n, d] with a mask [b n, b n] of b equal blocks      attention of each sample: [b, h, n, d], [n, n]

The mask is a constant of known sizes. Outside the blocks it is False, or the lowest number or less, whose share of the
softmax is 0.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoptd.passes.loops.blocks import literal
from autoptd.passes.traced_reads import eager


def block_of(mask: Tensor, samples: int) -> Tensor | None:
    """Return the mask of one sample from that of all, [rows, columns] at the end; None if it keeps none apart."""
    rows, columns = mask.shape[-2:]
    if rows % samples or columns % samples or mask.numel() != rows * columns:
        return None
    cut = mask.reshape(samples, rows // samples, samples, columns // samples)
    own = torch.stack([cut[i, :, i] for i in range(samples)])
    others = torch.stack([cut[i, :, j] for i in range(samples) for j in range(samples) if i != j])
    hidden = ~others if mask.dtype == torch.bool else others <= torch.finfo(mask.dtype).min
    seen = own if mask.dtype == torch.bool else own > torch.finfo(mask.dtype).min
    apart = bool(hidden.all()) and bool((own == own[0]).all()) and bool(seen.any(-1).all())
    return own[0] if apart else None


def attend_apart(q: Tensor, k: Tensor, v: Tensor, block: Tensor, count: Any, **options: Any) -> Tensor:
    """Return the attention [1, h, b n, d] of `count` samples, each by itself."""
    with eager():
        whole = bool(block.all()) if block.dtype == torch.bool else not bool(block.any())

    def apart(x: Tensor) -> Tensor:
        return x.squeeze(0).unflatten(1, (count, -1)).transpose(0, 1)

    mask = None if whole else literal(block)
    found = F.scaled_dot_product_attention(apart(q), apart(k), apart(v), attn_mask=mask, **options)
    return found.transpose(0, 1).flatten(1, 2).unsqueeze(0)
