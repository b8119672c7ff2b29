"""Functions of torch that read sizes as numbers, or from tensors, which a trace lacks: written as ops on sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import SymInt, Tensor


def cov(input: Tensor, *, correction: int = 1) -> Tensor:
    """Return the covariances of the rows of `input` [variables, observations], as `torch.cov` does without weights."""
    rows = input if input.ndim >= 2 else input.reshape(1, -1)
    centred = rows - rows.mean(1, keepdim=True)
    return (centred @ centred.mH / (rows.size(1) - correction)).squeeze()


def corrcoef(input: Tensor) -> Tensor:
    """Return the correlations of the rows of `input` [variables, observations], between -1 and 1."""
    found = cov(input)
    if not found.ndim:
        return found / found
    scale = found.diagonal().real.sqrt()
    found = found / scale.unsqueeze(1) / scale
    return found if found.is_complex() else found.clamp(-1, 1)


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


def fill_diagonal_(x: Tensor, fill_value: float, wrap: bool = False) -> Tensor:
    """Write a number to the diagonal of a matrix; `wrap` changes matrices with more rows than columns only."""
    diagonal = torch.eye(x.size(0), x.size(1), dtype=torch.bool, device=x.device)
    return x.masked_fill_(diagonal, fill_value)


def diag(input: Tensor, diagonal: int = 0) -> Tensor:
    """Return the elements of a matrix `diagonal` places to the right of its diagonal, or below it if negative."""
    return (input[:, diagonal:] if diagonal >= 0 else input[-diagonal:]).diagonal()


def diagonal(input: Tensor, offset: int = 0) -> Tensor:
    """Return what `diag` does, which `torch.diagonal` calls by another name."""
    return diag(input, offset)


def take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """Return the elements of `input` at `indices` along `dim`, all other dims broadcast; without `dim`, of all."""
    if dim is None:
        return input.flatten().gather(0, indices.flatten())
    dim %= input.ndim
    sizes = [*torch.broadcast_shapes(*([*x.shape[:dim], *x.shape[dim + 1 :]] for x in (input, indices)))]
    own, others = ([*sizes[:dim], x.size(dim), *sizes[dim:]] for x in (input, indices))
    return input.expand(own).gather(dim, indices.expand(others))


def is_known(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call is one of these functions, with arguments that it takes here."""
    if func is Tensor.fill_diagonal_:
        return bool(args[0].ndim == 2) and not (kwargs.get("wrap") or True in args[2:])
    if func in _DIAGONALS:
        sized = any(isinstance(x, SymInt) for x in (*args[1:], *kwargs.values()))
        return sized and bool(args[0].ndim == 2) and len(args) + len(kwargs) == 2
    if func in (torch.take_along_dim, Tensor.take_along_dim) and (len(args) > 2 or kwargs.get("dim") is not None):
        return bool(args[0].ndim == (args[1] if len(args) > 1 else kwargs["indices"]).ndim)
    return func in OF_SIZES and not {"fweights", "aweights"} & kwargs.keys()


_DIAGONALS: Mapping[Callable[..., Any], Callable[..., Tensor]] = {
    **dict.fromkeys((torch.diag, Tensor.diag), diag),
    **dict.fromkeys((torch.diagonal, Tensor.diagonal), diagonal),
}


OF_SIZES: Mapping[Callable[..., Any], Callable[..., Tensor]] = {
    torch.cov: cov,
    Tensor.cov: cov,
    torch.corrcoef: corrcoef,
    Tensor.corrcoef: corrcoef,
    F.affine_grid: affine_grid,
    torch.affine_grid_generator: affine_grid,
    Tensor.fill_diagonal_: fill_diagonal_,
    torch.take_along_dim: take_along_dim,
    Tensor.take_along_dim: take_along_dim,
    **_DIAGONALS,
}
