"""Activations in host memory: what a block saves for backward leaves the device after forward, and comes back for it.

    offload(fn, *args)      as fn(*args), whose saved tensors are copied to the host when autograd saves them, and back
                            when backward first reads them

Every storage is copied once, however many ops save views of it; one that is written in place, once for each of these
views, as its parts may have versions of their own (torch's cells of GRU and LSTM write to such parts). On the device
stay parameters and buffers of `fn`, and arguments that are leaves of autograd's graph: parameters, masks, and what a
pipeline stage received, which the executor holds for its gradient.

Copies are on the stream of the kernels, so that they are of the values at the moment of saving, and later writes cannot
change them. Backward thus reads what forward read, bit by bit. Hooks for saved tensors take the place of autograd's
check of versions; for what stays on the device it is made here. (As torch.autograd.graph.save_on_cpu, which copies each
saved view by itself, and parameters too.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

T = TypeVar("T")


def offload(fn: Callable[..., T], *args: Any) -> T:
    """Return `fn(*args)`, saving its tensors in host memory, which is pinned if they are on a GPU."""
    if not torch.is_grad_enabled():
        return fn(*args)
    own = (*fn.parameters(), *fn.buffers()) if isinstance(fn, nn.Module) else ()
    call = _OffloadedCall((*own, *(x for x in args if isinstance(x, Tensor) and x.is_leaf)))
    try:
        with torch.autograd.graph.saved_tensors_hooks(call.pack, call.unpack):
            return fn(*args)
    finally:
        call.end()


@dataclass
class _OnDevice:
    """A saved tensor that stays on the device, and its version when it was saved."""

    tensor: Tensor
    version: int


@dataclass
class _OnHost:
    """A saved view of a storage in host memory."""

    copy: _HostCopy
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    read: bool = False


class _HostCopy:
    """The bytes of a storage in host memory; on the device again from the first to the last read of its views."""

    def __init__(self, storage: torch.UntypedStorage, device: torch.device) -> None:
        self.origin = StorageWeakRef(storage)  # while it exists, no other storage has the same address
        self.device, self.host = device, _to_host(_bytes_of(storage, device))
        self.back: torch.UntypedStorage | None = None
        self.unread = 0  # views that backward has not read

    def view(self, x: Tensor) -> _OnHost:
        self.unread += 1
        return _OnHost(self, x.dtype, x.shape, x.stride(), int(x.storage_offset()))

    def read(self, view: _OnHost) -> Tensor:
        """Return a view on the device. Views that one backward pass reads share their storage, as they did before."""
        storage = self.back or _to_device(self.host, self.device).untyped_storage()
        self.unread -= not view.read
        view.read, self.back = True, storage if self.unread else None
        with torch.no_grad():
            made = torch.empty(0, dtype=view.dtype, device=self.device)
            return made.set_(storage, view.offset, view.size, view.stride)  # type: ignore[call-overload, no-any-return]


class _OffloadedCall:
    """The hooks of one call. `stay`: tensors whose storages stay on the device."""

    def __init__(self, stay: Iterable[Tensor]) -> None:
        self.stay = {x.untyped_storage()._cdata for x in stay if x.layout == torch.strided}
        self.copies: dict[tuple[object, ...], _HostCopy] = {}  # by storage and version, until the call ends

    def pack(self, x: Tensor) -> _OnDevice | _OnHost:
        if type(x) is not Tensor or x.layout != torch.strided or x.is_conj() or x.is_neg():
            return _OnDevice(x.detach(), x._version)
        storage = x.untyped_storage()
        if storage._cdata in self.stay:
            return _OnDevice(x.detach(), x._version)
        part = (x.storage_offset(), x.shape, x.stride()) if x._version else ()
        key = storage._cdata, x._version, *part
        if key not in self.copies:
            self.copies[key] = _HostCopy(storage, x.device)
        return self.copies[key].view(x)

    @staticmethod
    def unpack(packed: _OnDevice | _OnHost) -> Tensor:
        if isinstance(packed, _OnHost):
            return packed.copy.read(packed)
        if packed.tensor._version != packed.version:
            raise RuntimeError(
                f"a tensor of shape {list(packed.tensor.shape)} that backward reads was modified in place after it was "
                f"saved: it is at version {packed.tensor._version} instead of {packed.version}"
            )
        return packed.tensor

    def end(self) -> None:
        self.copies.clear()


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    with torch.no_grad():
        made = torch.empty(0, dtype=torch.uint8, device=device)
        return made.set_(storage, 0, (storage.nbytes(),), (1,))  # type: ignore[call-overload, no-any-return]


def _to_host(x: Tensor) -> Tensor:
    """Copy bytes to the host without waiting. The allocator reuses pinned memory once its copies have ended."""
    return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda).copy_(x, non_blocking=True)


def _to_device(x: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(x, device=device).copy_(x, non_blocking=True)
