"""Recording of the storages that ops allocate and of their lifetimes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageWatch(TorchDispatchMode):
    """Dispatch mode that records storages made by ops (and live ones of `before`), and those alive after each op."""

    def __init__(self, before: StorageWatch | None = None) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, torch.Size, torch.dtype]] = {}
        if before is not None:
            self.made |= {i: made for i, made in before.made.items() if not made[0].expired()}
        self.moments: list[frozenset[int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                ref = StorageWeakRef(x.untyped_storage())
                if ref.cdata not in self.made:
                    self.made[ref.cdata] = (ref, x.shape, x.dtype)
        self.moments.append(frozenset(i for i, (ref, _, _) in self.made.items() if not ref.expired()))
        return result

    def fullest(self, without: set[int]) -> list[tuple[torch.Size, torch.dtype]]:
        """Return the storages alive at the peak except those in `without` and scalars, the largest first."""

        def size(i: int) -> int:
            _, shape, dtype = self.made[i]
            return shape.numel() * dtype.itemsize

        own = [[i for i in moment if i not in without] for moment in self.moments]
        best = max(own, key=lambda moment: sum(map(size, moment)), default=[])
        return [self.made[i][1:] for i in sorted(best, key=lambda i: (-size(i), i)) if size(i) > 8]
