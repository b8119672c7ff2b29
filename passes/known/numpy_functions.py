"""Functions that libraries write in NumPy and call in forward, in torch: their numbers are keyed as all others are.

They replace the libraries' while a model is traced, and while it is run as the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def compute_mask_indices(
    shape: tuple[int, int],
    mask_prob: float,
    mask_length: int,
    attention_mask: Tensor | None = None,
    min_masks: int = 0,
) -> Tensor:
    """Draw spans of tokens to mask, bool [b, s]: SpecAugment (Park et al. 2019) as in wav2vec 2.0.

    A sample of n tokens has ⌊mask_prob · n / mask_length + u⌋ spans, but at least `min_masks` and no more than fit; u
    is a fraction that all samples share. Spans begin at different tokens. In a batch with spans, a sample that is too
    short for any has its last column masked. attention_mask: marks the tokens of each sample. Raises ValueError for a
    length that does not fit.
    """
    b, s = shape
    if not 1 <= mask_length <= s:
        raise ValueError(f"spans of {mask_length} do not fit into {s} tokens")
    lengths = torch.full((b,), s) if attention_mask is None else attention_mask.detach().sum(-1)
    shared = torch.rand(())

    def spans(tokens: Tensor) -> Tensor:
        count = (mask_prob * tokens / mask_length + shared).floor().clamp(min=min_masks, max=s // mask_length)
        return torch.minimum(count, (tokens - (mask_length - 1)).clamp(min=0))

    count, most, place = spans(lengths), spans(torch.full((), s)), torch.arange(s)
    drawn = torch.rand(b, s).masked_fill(place > (lengths - mask_length)[:, None], 2.0)
    first = drawn.argsort(-1).argsort(-1) < count[:, None]
    first = first | (((count == 0) & (most > 0))[:, None] & (place == s - 1))
    begun = first.long().cumsum(-1)
    ended = torch.nn.functional.pad(begun, (mask_length, 0))[:, :s]
    return begun > ended


NUMPY: dict[str, Callable[..., Any]] = {"_compute_mask_indices": compute_mask_indices}
