"""Results of each collective, computed from the tensors of all ranks where one process holds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autoptd.ops.group import Reduction

Combine = Callable[[Sequence[Any]], None]  # all ranks' tensors (or tuples of them), written in place


def sum_of(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for x in tensors[1:]:
        total += x
    return total


def max_of(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).amax(0)


def all_reduce(op: Reduction) -> Combine:
    def combine(xs: Sequence[Tensor]) -> None:
        result = sum_of(xs) if op == "sum" else max_of(xs)
        for x in xs:
            x.copy_(result)

    return combine


def all_gather(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    parts = torch.cat([x for _, x in pairs])
    for out, _ in pairs:
        out.copy_(parts)


def reduce_scatter(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    total = sum_of([x for _, x in pairs]).view(len(pairs), -1)
    for (out, _), row in zip(pairs, total, strict=True):
        out.copy_(row)


def all_to_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for i, (out, _) in enumerate(pairs):
        for j, (_, x) in enumerate(pairs):
            out[j].copy_(x[i])


def exchange(members: Sequence[tuple[Tensor, Tensor, Sequence[int]]]) -> None:
    parts = [x.split(list(send)) for _, x, send in members]
    for i, (out, _, _) in enumerate(members):
        torch.cat([part[i] for part in parts], out=out)


def shift(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for (out, _), (_, x) in zip(pairs, (pairs[-1], *pairs[:-1]), strict=True):
        out.copy_(x)


def broadcast(source: int) -> Combine:
    def combine(xs: Sequence[Tensor]) -> None:
        for i, x in enumerate(xs):
            if i != source:
                x.copy_(xs[source])

    return combine
