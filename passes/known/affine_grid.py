"""`F.affine_grid` as a product of sizes: torch's op is given the number of samples as a number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def affine_grid(theta: Tensor, size: Sequence[int], align_corners: bool | None = None) -> Tensor:
    """Return where `theta` [n, 2, 3] takes each pixel of images of `size` [n, c, h, w]: [n, h, w, 2], x before y.

    With `theta` [n, 3, 4] and a `size` [n, c, d, h, w], it is [n, d, h, w, 3].
    """
    shape = tuple(size[2:])
    places = [_places(n, bool(align_corners), theta) for n in shape]
    axes = torch.meshgrid(*places, indexing="ij")[::-1]
    pixels = torch.stack((*axes, torch.ones_like(axes[0])), -1)
    return (pixels.flatten(0, -2) @ theta.transpose(1, 2)).unflatten(1, shape)


def _places(count: int, align_corners: bool, like: Tensor) -> Tensor:
    """Return the places of pixels between the borders -1 and 1 of an image: of their centres, or with both borders."""
    if count <= 1:
        return torch.zeros(1, dtype=like.dtype, device=like.device)
    found = torch.linspace(-1, 1, count, dtype=like.dtype, device=like.device)
    return found if align_corners else found * (count - 1) / count


AFFINE_GRIDS: Mapping[Callable[..., Any], Callable[..., Tensor]] = {
    F.affine_grid: affine_grid,
    torch.affine_grid_generator: affine_grid,
}
