"""A GPU in name: tensors in host memory that say they are on `cuda:0`, and the rules that a GPU's tensors obey.

Values are computed by torch's CPU kernels, so data decides what it decides on a GPU: rows of experts, masks, overflow.
Autograd takes the tensors for those of torch's device type "lazy", which has neither streams nor kernels in the way.

While `strict`, an error follows on

    a tensor of the host in an op of the device          except numbers (0-dim) in elementwise ops
    what makes the host wait for the device              `.item()`, `.tolist()`, `.cpu()`, `nonzero`, boolean indices, …
    a copy to the device from pageable memory            or one that the host waits for
    host memory read before a copy to it has ended       or written before one from it has

unless the place in the library is `Allowed`. Whatever happens at an allowed place is counted, by rank.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import autoptd

aten = torch.ops.aten
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
_ALIAS = torch.device("lazy", 0)  # what C++ takes the tensors' device for
_LIBRARY = Path(autoptd.__file__).parent
Place = tuple[str, str]  # file and function: of the library, of torch's optimizers, or of an emitted program


class DeviceFault(AssertionError):
    """What a GPU would refuse, or wait for."""


class WrongDevice(DeviceFault):
    """An op or a collective got a tensor of another device."""


class HostWaits(DeviceFault):
    """The host waits for the device where it need not."""


class BlockingCopy(DeviceFault):
    """A copy to the device that the host takes part in: from pageable memory, or not `non_blocking`."""


class MemoryRace(DeviceFault):
    """Host memory is read or written while the device still writes or reads it."""


_state = threading.local()  # `running`: whether a kernel of the CPU runs in this thread


class CudaTensor(Tensor):
    """A tensor in host memory that says it is on a GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CPU if getattr(_state, "running", False) else CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def to(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        """Return self if it is of the wanted type on the GPU already: C++ would copy it, between its two names."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **{k: v for k, v in kwargs.items() if k != "copy"})
        here = device is None or device.type in (CUDA.type, _ALIAS.type)
        if here and dtype in (None, self.dtype) and not kwargs.get("copy", False) and len(args) < 4:
            return self
        return super().to(*args, **kwargs)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return CPU if getattr(_state, "running", False) else _ALIAS
        return _run(func, args, kwargs or {}, True)


def labelled(x: Tensor) -> Tensor:
    """Return a view of a tensor of the host that says it is on the GPU."""
    return x if isinstance(x, CudaTensor) else torch.Tensor._make_subclass(CudaTensor, x, dispatch_device=True)


def on_host(x: Tensor) -> Tensor:
    """Return a view of a tensor of the GPU without its label. No wait is noticed."""
    with torch._C._DisableTorchDispatch(), _kernel():
        return x.detach().as_subclass(Tensor).clone() if isinstance(x, CudaTensor) else x


@contextmanager
def _kernel() -> Iterator[None]:
    before, _state.running = getattr(_state, "running", False), True
    try:
        yield
    finally:
        _state.running = before


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], on_device: bool) -> Any:
    """Run an op by the CPU's kernel; label its new tensors if they are on the device."""
    with torch._C._DisableTorchDispatch(), _kernel():
        out = func(*args, **kwargs)
    return tree_map_only(Tensor, labelled, out) if on_device else out


# ---- rules ----

# read sizes or values of the result on the host, unless an argument gives them
_WAITS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.nonzero_numpy.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
    aten._linalg_check_errors.default,
    aten._ctc_loss.Tensor,
    aten.argwhere.default,
}
_COPIES = {aten._to_copy.default, aten.copy_.default}
_STATELESS = {aten._pin_memory.default, aten.is_pinned.default}
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
# the CPU's kernels in place of those that only a GPU has
_FLASH, _FLASH_BACKWARD = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_backward.default,
)


class Device(TorchDispatchMode):
    """A dispatch mode in which `cuda` is a device. One for all ranks of a run, which take turns; entered by each.

    `allowed`: places where the host may wait or copy. `met`: how often it did, by rank and place.
    """

    _mode_key = torch._C._TorchDispatchModeKey.FAKE  # torch then does not try to initialise CUDA

    def __init__(self, allowed: Callable[[Place], bool] = lambda place: False) -> None:
        super().__init__()
        self.allowed = allowed
        self.strict: set[str] = set()  # names of the threads whose rank is in a step
        self.met: dict[str, Counter[tuple[str, Place]]] = {}
        self.ops: Counter[str] = Counter()  # of the device, in steps
        self.pinned: dict[int, StorageWeakRef] = {}
        self.coming: dict[int, StorageWeakRef] = {}  # host memory that the device writes
        self.leaving: dict[int, StorageWeakRef] = {}  # host memory that it reads

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __enter__(self) -> Device:
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…, device=…) then copies by an op; per thread
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(False)

    # ---- streams and memory ----

    def synchronise(self) -> None:
        """Wait for the device; an event of its own kind."""
        self._event("synchronise", HostWaits, "waits for the device")
        self._arrived()

    def _arrived(self) -> None:
        self.coming.clear()
        self.leaving.clear()

    def pin(self, x: Tensor) -> Tensor:
        """Take the memory of a tensor for pinned."""
        storage = x.untyped_storage()
        self.pinned = {key: ref for key, ref in self.pinned.items() if not ref.expired()}
        self.pinned[storage._cdata] = StorageWeakRef(storage)
        return x

    def is_pinned(self, x: Tensor) -> bool:
        return x.untyped_storage()._cdata in self.pinned

    # ---- ops ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.prim.device.default:
            return CPU if getattr(_state, "running", False) else _ALIAS
        if func is aten._pin_memory.default:
            return self.pin(_run(aten.clone.default, args[:1], {}, False))
        if func is aten.is_pinned.default:
            return self.is_pinned(args[0])
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        asked = kwargs.get("device")
        target = None if asked is None else torch.device(asked).type
        if asked is not None and target in (CUDA.type, _ALIAS.type):
            kwargs["device"] = CPU
        pins = kwargs.pop("pin_memory", None)
        of_device = any(isinstance(x, CudaTensor) for x in tensors)
        if func in _COPIES:
            return self._copy(func, args, kwargs, target)
        on_device = of_device if asked is None else target in (CUDA.type, _ALIAS.type)
        if of_device:
            self._check_devices(func, args, kwargs, tensors)
            if self._waits(func, args, kwargs):
                self._event(str(func), HostWaits, "makes the host wait for the device")
                self._arrived()
            if _state_of_step(self):
                self.ops[str(func)] += 1
        else:
            self._check_memory(func, args, kwargs, tensors)
        out = _run(*_for_cpu(func, args, kwargs), on_device)
        if pins and isinstance(out, Tensor):
            self.pin(out)
        return out

    def _copy(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], target: str | None) -> Any:
        """Run `_to_copy` or `copy_`, which may join two devices."""
        if func is aten.copy_.default:
            source, into = args[1], isinstance(args[0], CudaTensor)
            no_wait = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            out_pinned = self.is_pinned(args[0]) if not into else False
        else:
            source = args[0]
            into = isinstance(source, CudaTensor) if target is None else target in (CUDA.type, _ALIAS.type)
            no_wait = bool(kwargs.get("non_blocking", False))
            out_pinned = no_wait  # torch's own copy to the host
        leaves = isinstance(source, CudaTensor)
        joins = leaves != into
        if joins and into and not (no_wait and self.is_pinned(source)):
            how = "pageable memory" if not self.is_pinned(source) else "pinned memory, but not non_blocking"
            self._event("copy to the device", BlockingCopy, f"copies {_shape(source)} to the device from {how}")
        if joins and leaves and not (no_wait and out_pinned):
            self._event("copy to the host", HostWaits, f"waits for a copy of {_shape(source)} to the host")
        if not leaves and not into:
            self._check_memory(func, args, kwargs, [x for x in args[:2] if isinstance(x, Tensor)])
        out = _run(func, args, kwargs, into)
        if joins and leaves:
            if no_wait and out_pinned:
                self.pin(out)
                self.coming[out.untyped_storage()._cdata] = StorageWeakRef(out.untyped_storage())
            else:
                self._arrived()
        elif joins and no_wait:
            self.leaving[source.untyped_storage()._cdata] = StorageWeakRef(source.untyped_storage())
        return out

    def _check_devices(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]
    ) -> None:
        """Raise WrongDevice for a tensor of the host in an op of the device."""
        strangers = [x for x in tensors if not isinstance(x, CudaTensor)]
        numbers = torch.Tag.pointwise in func.tags or func in _INDEXED or "_foreach" in str(func)
        for x in strangers:
            if not (numbers and x.ndim == 0):
                raise WrongDevice(f"{func} gets {_shape(x)} of the host beside tensors of the device, {_where(_place())}")

    def _check_memory(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]
    ) -> None:
        """Raise MemoryRace for an op of the host on memory that the device uses."""
        if not (self.coming or self.leaving) or not func._schema.arguments:
            return
        for x in tensors:
            key = x.untyped_storage()._cdata
            if key in self.coming and not _views(func):
                raise MemoryRace(f"{func} reads {_shape(x)}, to which the device is still copying, {_where(_place())}")
            if key in self.leaving and x in _written(func, args, kwargs):
                raise MemoryRace(f"{func} writes {_shape(x)}, which the device is still reading, {_where(_place())}")

    def _waits(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether the host waits for an op of the device."""
        if func in _WAITS:
            return True
        if func in (aten.repeat_interleave.Tensor,):
            return kwargs.get("output_size") is None
        if func in _INDEXED:
            return any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        return False

    def _event(self, kind: str, fault: type[DeviceFault], what: str) -> None:
        if not _state_of_step(self):
            return
        place = _place()
        if not self.allowed(place):
            raise fault(f"{kind}: {place[1]} of {place[0]} {what}, {_where(place)}")
        self.met.setdefault(threading.current_thread().name, Counter())[kind, place] += 1


def _where(place: Place) -> str:
    return f"in {place[1]} of {place[0]}"


def _state_of_step(device: Device) -> bool:
    return threading.current_thread().name in device.strict


def _views(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    found = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [x for x in tree_leaves(given) if isinstance(x, Tensor)]
    return found


def _for_cpu(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Sequence[Any], dict[str, Any]]:
    return func, args, kwargs


def _shape(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _place() -> Place:
    """Return the innermost function of the library, of a torch optimizer or of an emitted program that runs."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        name = frame.f_globals.get("__name__", "")
        if name.startswith("torch.optim."):
            return name.replace(".", "/") + ".py", frame.f_code.co_name
        if name.startswith("autoptd_program_"):
            return "an emitted program", frame.f_code.co_name
        if path.startswith(str(_LIBRARY)):
            return Path(path).relative_to(_LIBRARY).as_posix(), frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]
    return "outside", ""
