"""A GPU in name: tensors in host memory that say they are on `cuda:0`, and the rules that a GPU's tensors obey.

Values are computed by torch's CPU kernels, so data decides what it decides on a GPU: rows of experts, masks, overflow.
Autograd takes the tensors for those of torch's device type "lazy", which needs neither a stream nor a queue of its own.
To torch the mode is its FakeTensorMode, which keeps it from looking for CUDA.

In a step, an error follows on

    a tensor of the host in an op of the device          except numbers (0-dim) in elementwise ops
    what makes the host wait for the device              `.item()`, `.tolist()`, `.cpu()`, `nonzero`, boolean indices, …
    a copy to the device from pageable memory            or one that the host waits for
    host memory read before a copy to it has ended       or written before one from it has
    memory read, written or freed on a stream            without a wait for another stream's work on it

unless the place in the library is an allowed one; what happens there is counted. Private parts of torch are those of
2.13.0.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import autoptd
from tests.runtime.fake_device.streams import DeviceFault, Streams, bytes_of

aten = torch.ops.aten
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
_ALIAS = torch.device("lazy", 0)  # what C++ takes the tensors' device for
_ON_DEVICE = (CUDA.type, _ALIAS.type)
_LIBRARY = str(Path(autoptd.__file__).parent) + "/"
Place = tuple[str, str]  # file and function: of the library, of a torch optimizer, or of an emitted program


class WrongDevice(DeviceFault):
    """An op or a collective got a tensor of another device."""


class HostWaits(DeviceFault):
    """The host waits for the device where it need not."""


class BlockingCopy(DeviceFault):
    """A copy to the device that the host takes part in: from pageable memory, or not `non_blocking`."""


class MemoryRace(DeviceFault):
    """Host memory is read or written while the device still writes or reads it."""


_thread = threading.local()  # `kernel`: whether a kernel of the CPU runs; `quiet`: whether ops are not the rank's own


def _device_in_cpp() -> torch.device:
    return CPU if getattr(_thread, "kernel", False) else _ALIAS


class CudaTensor(Tensor):
    """A tensor in host memory that says it is on a GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CPU if getattr(_thread, "kernel", False) else CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def to(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        """Return self if it is on the GPU in the wanted type already: C++ would copy it, between its two names."""
        copies = kwargs.get("copy", False)
        device, dtype, *_ = torch._C._nn._parse_to(*args, **{k: v for k, v in kwargs.items() if k != "copy"})
        if (device is None or device.type in _ON_DEVICE) and dtype in (None, self.dtype) and not copies:
            return self
        return super().to(*args, **kwargs)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return repr(self.cpu())

    def __format__(self, spec: str) -> str:
        return format(self.cpu(), spec)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op where no mode is active, outside of steps."""
        if func is torch.ops.prim.device.default:
            return _device_in_cpp()
        return _run(func, args, kwargs or {}, (kwargs or {}).get("device") != CPU)


@contextmanager
def quietly() -> Iterator[None]:
    """Run ops on values beside the device's own work: they stay on the host and are not checked."""
    before, _thread.quiet = getattr(_thread, "quiet", False), True
    try:
        yield
    finally:
        _thread.quiet = before


def labelled(x: Any) -> Any:
    """Return a view of a tensor of the host that says it is on the GPU; of a tuple or list, views of its tensors."""
    if isinstance(x, (tuple, list)):
        return type(x)(map(labelled, x))
    if not isinstance(x, Tensor) or isinstance(x, CudaTensor):
        return x
    return torch.Tensor._make_subclass(CudaTensor, x, dispatch_device=True)


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], on_device: bool) -> Any:
    """Run an op by the CPU's kernel; label its new tensors if they are on the device."""
    before, _thread.kernel = getattr(_thread, "kernel", False), True
    try:
        with torch._C._DisableTorchDispatch():
            out = func(*args, **kwargs)
    finally:
        _thread.kernel = before
    return labelled(out) if on_device else out


def _flash(
    q: Tensor, k: Tensor, v: Tensor, p: float = 0.0, is_causal: bool = False, *, scale: float | None = None
) -> tuple[Any, ...]:
    """Compute the results of a GPU's kernel by the CPU's."""
    out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, p, is_causal, scale=scale)
    state = torch.empty(2, dtype=torch.uint64)
    return out, sums, None, None, q.shape[-2], k.shape[-2], state, state, torch.empty(0)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *rest: Any, scale: float | None = None
) -> Any:
    p, is_causal = rest[4:6]  # after both lists of sequence lengths and both longest sequences
    at_cpu = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return at_cpu(grad, q, k, v, out, sums, p, is_causal, scale=scale)


def _efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sums_too: bool,
    p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Compute the results of the kernel that takes a mask; it wants aligned sizes, and pads its sums with inf."""
    _check_aligned(q, k, v, bias)
    out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, p, is_causal, attn_mask=bias, scale=scale)
    padding = sums.new_full((*sums.shape[:-1], -sums.shape[-1] % _ROWS), torch.inf)
    state = torch.empty((), dtype=torch.int64)
    return out, torch.cat((sums, padding), -1), state, state


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *rest: Any, scale: float | None = None
) -> tuple[Any, ...]:
    out, sums, _, _, p, _, *causal = rest
    is_causal = bool(causal and causal[0])
    _check_aligned(q, k, v, bias, grad)
    assert sums.shape[-1] % _ROWS == 0 and sums.is_contiguous() and sums[..., q.shape[-2] :].isinf().all()
    at_cpu = aten._scaled_dot_product_flash_attention_for_cpu_backward
    own = sums[..., : q.shape[-2]].contiguous()
    return (*at_cpu(grad, q, k, v, out, own, p, is_causal, attn_mask=bias, scale=scale), None)


def _check_aligned(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *others: Tensor) -> None:
    """Fail where the memory-efficient kernel does (`check_supported` in torch's `kernel_backward.h`)."""
    assert q.shape[1] == k.shape[1] == v.shape[1], "it does not know of key heads that are shared"
    assert not any(x.shape[-1] % 8 for x in (q, k, v, *others)), "its heads have a multiple of 8 elements"
    if bias is not None:
        assert bias.dtype == q.dtype and bias.shape == (*q.shape[:-1], k.shape[-2])
        assert bias.stride(-1) == 1 and not any(n % 8 for n in bias.stride()[:-1]), "rows of its mask are aligned"


_ROWS = 32  # to a multiple of which the memory-efficient kernel pads the sums of rows
_ONLY_ON_GPUS: Mapping[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention.default: _flash,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
}

# the host reads sizes or values of the result, whatever the arguments
_WAITS = {
    aten._local_scalar_dense.default,
    aten.argwhere.default,
    aten.bincount.default,
    aten.equal.default,
    aten._linalg_check_errors.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
    aten._ctc_loss.Tensor,
}
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
_MASKS = (torch.bool, torch.uint8)
_MANY = 256  # references to storages, until those without one are dropped


class _Memory:
    """Parts of the host's memory, as ranges of bytes in storages. A reference keeps an address from being reused."""

    def __init__(self) -> None:
        self.parts: dict[int, tuple[StorageWeakRef, list[tuple[int, int]]]] = {}

    def add(self, x: Tensor, *, whole: bool = False) -> None:
        """Add the memory of a tensor, or of the whole storage that it is a view of."""
        if len(self.parts) % _MANY == _MANY - 1:
            self.parts = {key: part for key, part in self.parts.items() if not part[0].expired()}
        storage = x.untyped_storage()
        if storage._cdata not in self.parts:
            self.parts[storage._cdata] = StorageWeakRef(storage), []
        self.parts[storage._cdata][1].append((0, storage.nbytes()) if whole else bytes_of(x))

    def holds(self, x: Tensor) -> bool:
        """Return whether a tensor has a byte here."""
        if (part := self.parts.get(x.untyped_storage()._cdata)) is None:
            return False
        first, last = bytes_of(x)
        return any(first < stop and start < last for start, stop in part[1])


class Device(TorchDispatchMode):
    """A dispatch mode in which `cuda` is a device. One for all ranks of a run, which take turns; entered by each.

    Of the host's memory it knows what is pinned, to what the device is copying, and what it is still reading.

    `allowed(place, kind of step, fault)`: whether the host may wait, or copy, there.
    """

    _mode_key = torch._C._TorchDispatchModeKey.FAKE

    def __init__(self, allowed: Callable[[Place, str, type[DeviceFault]], bool]) -> None:
        super().__init__()
        self._allowed = allowed
        self._steps: dict[str, tuple[str, Counter[Place]]] = {}  # by thread: kind of the step, what happened in it
        self.ops = 0  # of the device, in steps
        self._pinned, self._coming, self._leaving = _Memory(), _Memory(), _Memory()  # of the host
        self._streams: dict[str, Streams] = {}  # by thread
        self.on_wait: Callable[[], object] = lambda: None  # called where the host waits

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __enter__(self) -> Device:
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…, device=…) then copies by an op; per thread
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(False)

    # ---- steps ----

    def begin(self, kind: str) -> None:
        """Begin a step of this thread's rank."""
        self._steps[threading.current_thread().name] = kind, Counter()

    def end(self) -> Counter[Place]:
        """End the step; return where the host waited or copied, and how often."""
        return self._steps.pop(threading.current_thread().name)[1]

    def in_step(self) -> bool:
        return threading.current_thread().name in self._steps

    def _event(self, fault: type[DeviceFault], what: str) -> None:
        if not self.in_step():
            return
        kind, met = self._steps[threading.current_thread().name]
        place = _place()
        if not self._allowed(place, kind, fault):
            raise fault(f"{place[1]} of {place[0]} {what}")
        met[place] += 1
        if fault is HostWaits:
            self.on_wait()

    # ---- streams and memory ----

    @property
    def streams(self) -> Streams:
        """The streams of this thread's rank."""
        return self._streams.setdefault(threading.current_thread().name, Streams())

    def stream_of(self, communicator: str) -> str:
        """Return the stream of a communicator's later ops."""
        return f"the stream of {communicator}"

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Check a storage that is about to be freed, or allocated again."""
        self.streams.check_freed(storage)

    def synchronise(self) -> None:
        self._event(HostWaits, "waits for the device")
        self._arrived()

    def _arrived(self) -> None:
        self._coming.parts.clear()
        self._leaving.parts.clear()

    def pin(self, x: Tensor) -> Tensor:
        """Take the memory of a tensor for pinned."""
        self._pinned.add(x, whole=True)
        return x

    def is_pinned(self, x: Tensor) -> bool:
        return self._pinned.holds(x)

    # ---- ops ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return _device_in_cpp()
        if getattr(_thread, "quiet", False):
            return _run(func, args, {k: x for k, x in (kwargs or {}).items() if k != "device"}, False)
        if func is aten._pin_memory.default:
            return self.pin(_run(aten.clone.default, args[:1], {}, False))
        if func is aten.is_pinned.default:
            return self.is_pinned(args[0])
        kwargs = dict(kwargs or {})
        asked = kwargs.get("device")
        to_device = None if asked is None else torch.device(asked).type in _ON_DEVICE
        if to_device:
            kwargs["device"] = CPU
        if func in (aten._to_copy.default, aten.copy_.default):
            return self._copy(func, args, kwargs, to_device)
        pins = kwargs.pop("pin_memory", None)
        tensors = list(_tensors((args, tuple(kwargs.values()))))
        here = any(isinstance(x, CudaTensor) for x in tensors)
        if here:
            self._check_device(func, args, kwargs, tensors)
        else:
            self._check_memory(func, args, kwargs, tensors)
        on_device = here if to_device is None else to_device
        out = _run(_ONLY_ON_GPUS.get(func, func), args, kwargs, on_device)
        if on_device:
            self._access(func, args, kwargs, out)
        return self.pin(out) if pins else out

    def _access(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Queue the op on the current stream: what it reads and writes. Raises StreamRace, or EarlyReuse."""
        streams = self.streams
        streams.check_freed()
        if _is_view(func) or "empty" in func.name():
            return
        written = {id(x) for x in _written(func, args, kwargs)}
        what = str(func)
        for x in _tensors((args, tuple(kwargs.values()))):
            if isinstance(x, CudaTensor):
                streams.access(x, id(x) in written, what)
        if not written:
            for x in _tensors(out):
                if isinstance(x, CudaTensor):
                    streams.access(x, True, what)

    def _check_device(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[Tensor]) -> None:
        """Raise WrongDevice for tensors of the host in an op of the device, HostWaits if the host waits for it."""
        self.ops += self.in_step()
        strangers = [x for x in given if not isinstance(x, CudaTensor)]
        if strangers:
            takes_numbers = torch.Tag.pointwise in func.tags or "_foreach" in func.name()
            for x in strangers:
                if x.ndim or not takes_numbers:
                    raise WrongDevice(f"{func} gets {_shown(x)} of the host beside tensors of the device, {_where()}")
        repeats = func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
        if func in _WAITS or repeats or (func in _INDEXED and any(x.dtype in _MASKS for x in _tensors(args[1]))):
            self._event(HostWaits, f"waits for the result of {func}")
            self._arrived()

    def _check_memory(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[Tensor]) -> None:
        """Raise MemoryRace for an op of the host on memory that the device uses."""
        if not (self._coming.parts or self._leaving.parts) or "empty" in func.name() or _is_view(func):
            return
        for x in given:
            if self._coming.holds(x):
                raise MemoryRace(f"{func} reads {_shown(x)}, to which the device is still copying, {_where()}")
            if self._leaving.holds(x) and any(x is y for y in _written(func, args, kwargs)):
                raise MemoryRace(f"{func} writes {_shown(x)}, which the device is still reading, {_where()}")

    def _copy(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], to_device: bool | None) -> Any:
        """Run `_to_copy` or `copy_`, which may join the two devices."""
        if func is aten.copy_.default:
            source, arrives = args[1], isinstance(args[0], CudaTensor)
            no_wait = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            pinned = arrives or self.is_pinned(args[0])
        else:
            source = args[0]
            arrives = isinstance(source, CudaTensor) if to_device is None else to_device
            no_wait = pinned = bool(kwargs.get("non_blocking", False))  # torch pins what it makes
        leaves = isinstance(source, CudaTensor)
        if arrives and not leaves and not (no_wait and self.is_pinned(source)):
            how = "from pinned memory, but waits for it" if self.is_pinned(source) else "from pageable memory"
            self._event(BlockingCopy, f"copies {_shown(source)} to the device {how}")
        if leaves and not arrives and not (no_wait and pinned):
            self._event(HostWaits, f"waits for a copy of {_shown(source)} to the host")
            self._arrived()
        if not leaves and not arrives:
            self._check_memory(func, args, kwargs, [x for x in args[:2] if isinstance(x, Tensor)])
        out = _run(func, args, kwargs, arrives)
        if arrives or leaves:
            self._access(func, args, {}, out)
        if leaves and not arrives and no_wait and pinned:
            self._coming.add(self.pin(out))
        elif arrives and not leaves and no_wait:
            self._leaving.add(source)
        return out


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for each in x:
            yield from _tensors(each)


@cache
def _is_view(func: Any) -> bool:
    """Return whether an op returns a view and neither reads nor writes its elements."""
    made = func._schema.returns
    return bool(made) and all(each.alias_info is not None and not each.alias_info.is_write for each in made)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    for i, name in _written_arguments(func):
        yield from _tensors(args[i] if i < len(args) else kwargs.get(name))


@cache
def _written_arguments(func: Any) -> list[tuple[int, str]]:
    arguments = enumerate(func._schema.arguments)
    return [(i, x.name) for i, x in arguments if x.alias_info is not None and x.alias_info.is_write]


def _shown(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _where() -> str:
    file, function = _place()
    return f"in {function} of {file}"


def _place() -> Place:
    """Return the innermost function of the library, of a torch optimizer or of an emitted program that runs."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
        if module.startswith("torch.optim."):
            return module, frame.f_code.co_name
        if module.startswith("autoptd_program_"):
            return "an emitted program", frame.f_code.co_name
        if path.startswith(_LIBRARY):
            return path.removeprefix(_LIBRARY), frame.f_code.co_name
        frame = frame.f_back
    return "a caller of the library", ""
