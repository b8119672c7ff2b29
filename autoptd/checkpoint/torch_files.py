"""Reader of `torch.save` files that executes no code from them.

Such a file is a zip archive whose records are stored uncompressed:

    archive/data.pkl      a pickle of the value; each tensor is a call with a storage, sizes and strides
    archive/data/0 …      the bytes of the storages
    archive/byteorder     little or big
"""

from __future__ import annotations

import io
import math
import struct
import sys
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from autoptd.checkpoint.pickles import LONGEST, Maker, Name, checked_key, read_pickle
from autoptd.layout.regions import Ints

DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool"),
        *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
}
DIMS, LARGEST = 32, 2**60  # dims and elements of a tensor, at most
_LOCAL = struct.Struct("<4s22xHH")  # a record's local header: signature, lengths of its name and of its extra field
_STORAGES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Bool": "bool",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}
# Errors of a damaged archive besides ValueError and OSError: a truncated local header (struct.error), a missing record
# (LookupError), a feature that zipfile lacks (NotImplementedError, a RuntimeError) or a storage that torch cannot
# allocate (RuntimeError). Nothing wider: a bug here must not look like damage.
_UNREADABLE = (zipfile.BadZipFile, struct.error, LookupError, RuntimeError)


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a type in `DTYPES`: `float32`."""
    return str(dtype).removeprefix("torch.")


def _is_count(n: Any) -> bool:
    return type(n) is int and 0 <= n < LARGEST


def is_shape(value: Any) -> bool:
    """Return whether a value is a valid shape, within `DIMS` and `LARGEST`."""
    if not isinstance(value, (tuple, list)) or len(value) > DIMS:
        return False
    return all(map(_is_count, value)) and math.prod(n or 1 for n in value) < LARGEST


class _View:
    """A file-like view of bytes [start, start + length) of a file. A read never asks for more than is left."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if not 0 <= base + offset <= self._length:
            raise OSError("a position outside the archive")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True

    def read(self, count: int | None = None) -> bytes:
        left = self._length - self._at
        self._file.seek(self._start + self._at)
        found = self._file.read(left if count is None or count < 0 else min(count, left))
        self._at += len(found)
        return found


@dataclass(frozen=True)
class _Storage:
    """A storage in a file: type of its elements (None: bytes), first byte, and number of bytes."""

    dtype: torch.dtype | None
    at: int
    bytes: int


@dataclass(frozen=True)
class Located:
    """A tensor in a file: a strided view of a storage."""

    storage: _Storage
    dtype: torch.dtype
    offset: int  # of its first element in the storage
    sizes: Ints
    strides: Ints

    def read(self, file: BinaryIO) -> Tensor:
        """Read the whole storage and return the tensor. Raises ValueError or OSError."""
        return self.of(as_type(read_bytes(file, self.storage.at, self.storage.bytes), self.dtype))

    def of(self, elements: Tensor) -> Tensor:
        return elements.as_strided(self.sizes, self.strides, self.offset)


class _Archive:
    """The records of an archive by name. The caller closes the file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._records = file, dict[str, tuple[int, int]]()
        view = _View(file, start, length)
        with zipfile.ZipFile(cast(BinaryIO, view)) as archive:
            found = archive.infolist()
        if sum(each.file_size for each in found) > length:
            raise ValueError("the archive's records claim more bytes than it has")
        for each in found:
            if each.compress_type != zipfile.ZIP_STORED or each.flag_bits & 1 or each.compress_size != each.file_size:
                raise ValueError("a record is compressed or encrypted")
            view.seek(each.header_offset)
            mark, name, extra = _LOCAL.unpack(view.read(_LOCAL.size))
            at = each.header_offset + _LOCAL.size + name + extra
            key = each.filename.partition("/")[2]
            if mark != b"PK\x03\x04" or at + each.file_size > length or key in self._records:
                raise ValueError("the archive's directory does not match its records")
            self._records[key] = (start + at, each.file_size)
        order = self.read("byteorder", 16).decode("ascii") if "byteorder" in self._records else "little"
        if order != sys.byteorder:
            raise ValueError(f"the archive was written with {order[:10]!r} byte order")

    def read(self, name: str, limit: int) -> bytes:
        at, size = self._records[name]
        if size > limit:
            raise ValueError(f"the archive's record {name} has {size} bytes, more than the limit of {limit}")
        self._file.seek(at)
        return self._file.read(size)

    def only_storage(self) -> tuple[int, int]:
        """Return first byte and number of bytes of the one storage."""
        (found,) = (place for name, place in self._records.items() if name.startswith("data/"))
        return found

    def storage(self, identifier: Any) -> _Storage:
        """Return the storage of a persistent id `("storage", kind, key, device, elements)`."""
        word, kind, key, _, count = identifier
        at, size = self._records[f"data/{key}"] if isinstance(key, str) else (0, -1)
        known = word == "storage" and isinstance(kind, _StorageClass) and _is_count(count)
        if not known or count * (kind.dtype or torch.uint8).itemsize != size:
            raise ValueError("a storage claims more or fewer bytes than its record has")
        return _Storage(kind.dtype, at, size)


@dataclass(frozen=True)
class _StorageClass:
    dtype: torch.dtype | None


def _located(storage: Any, offset: Any, sizes: Any, strides: Any, dtype: torch.dtype | None) -> Located:
    dtype = dtype or (storage.dtype if isinstance(storage, _Storage) else None)
    if not (isinstance(storage, _Storage) and isinstance(dtype, torch.dtype) and is_shape(sizes)):
        raise ValueError("a tensor has no valid storage, type or shape")
    if not (isinstance(strides, tuple) and len(strides) == len(sizes) and all(map(_is_count, (offset, *strides)))):
        raise ValueError("a tensor has no valid offset or strides")
    elements, held = math.prod(sizes), storage.bytes // dtype.itemsize
    reach = sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True)) + 1 if elements else 0
    if offset + reach > held or elements > held:
        raise ValueError(f"a tensor claims {elements} elements of a storage with {held}")
    return Located(storage, dtype, offset, tuple(sizes), strides)


def _tensors(rebuilt: Callable[[Located], Any]) -> dict[Name, Any]:
    """Return the globals that pickled tensors need. `rebuilt` makes the value of a tensor."""
    of_type = {("torch", f"{name}Storage"): _StorageClass(DTYPES[kind]) for name, kind in _STORAGES.items()}
    return {
        **of_type,
        **{("torch", name): dtype for name, dtype in DTYPES.items()},
        ("torch.storage", "UntypedStorage"): _StorageClass(None),
        ("torch._utils", "_rebuild_tensor_v2"): Maker(lambda s, o, n, m, *_: rebuilt(_located(s, o, n, m, None))),
        ("torch._utils", "_rebuild_tensor_v3"): Maker(lambda s, o, n, m, g, h, t, *_: rebuilt(_located(s, o, n, m, t))),
        ("torch._utils", "_rebuild_parameter"): Maker(lambda data, *_: data),
        ("collections", "OrderedDict"): Maker(lambda: OrderedDict()),
    }


def _encoded(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise ValueError("bytes are not encoded as latin1")
    return text.encode("latin1")


def _bytearray(raw: bytes = b"") -> bytearray:
    if not isinstance(raw, bytes):
        raise ValueError("a bytearray is not made of bytes")
    return bytearray(raw)


def _device(kind: str, index: int | None = None) -> torch.device:
    if kind not in ("cpu", "cuda", "meta", "mps", "xpu") or not (index is None or type(index) is int):
        raise ValueError("an unknown device")
    return torch.device(kind) if index is None else torch.device(kind, index)


def _size(sizes: Any) -> torch.Size:
    if not is_shape(sizes):
        raise ValueError("a torch.Size is not a valid shape")
    return torch.Size(sizes)


def _set(items: list[Any]) -> set[Any]:
    return {checked_key(each) for each in items}


_VALUES: dict[Name, Any] = {
    ("torch", "Size"): Maker(_size),
    ("torch", "device"): Maker(_device),
    ("_codecs", "encode"): Maker(_encoded),
    ("collections", "Counter"): Maker(lambda counts: Counter({checked_key(k): n for k, n in counts.items()})),
    **{(module, "set"): Maker(_set) for module in ("builtins", "__builtin__")},
    **{(module, "bytearray"): Maker(_bytearray) for module in ("builtins", "__builtin__")},
    **{(module, "complex"): Maker(lambda real, imag: complex(real, imag)) for module in ("builtins", "__builtin__")},
}


def locate(file: BinaryIO, start: int, length: int) -> Located:
    """Locate the one tensor that `torch.save` wrote to bytes [start, start + length) of a file.

    Raises ValueError or OSError.
    """
    found = _read(file, start, length, _tensors(lambda tensor: tensor))
    if not isinstance(found, Located):
        raise ValueError(f"it holds a {type(found).__name__} instead of a tensor")
    return found


def storage_of(file: BinaryIO, start: int, length: int) -> tuple[int, int]:
    """Return first byte in the file and number of bytes of the one storage in an archive that this process wrote.

    Raises ValueError for a damaged file; OSError.
    """
    with _damage_as_value_error():
        return _Archive(file, start, length).only_storage()


def load(file: BinaryIO, length: int) -> Any:
    """Return the value that `torch.save` wrote to a file: plain values, containers and tensors (on the CPU).

    Raises ValueError for other types and for a damaged file; OSError.
    """
    storages: dict[tuple[int, torch.dtype], Tensor] = {}

    def rebuilt(tensor: Located) -> Tensor:
        """Read each storage once, so that tensors that shared one share it again."""
        place = (tensor.storage.at, tensor.dtype)
        if place not in storages:
            storages[place] = as_type(read_bytes(file, tensor.storage.at, tensor.storage.bytes), tensor.dtype)
        return tensor.of(storages[place])

    return _read(file, 0, length, {**_tensors(rebuilt), **_VALUES})


def check_readable(file: BinaryIO, length: int) -> None:
    """Raise ValueError if `load` would; reads no tensors."""
    _read(file, 0, length, {**_tensors(lambda tensor: tensor), **_VALUES})


def _read(file: BinaryIO, start: int, length: int, known: dict[Name, Any]) -> Any:
    with _damage_as_value_error():
        archive = _Archive(file, start, length)
        return read_pickle(archive.read("data.pkl", LONGEST), known, archive.storage)


@contextmanager
def _damage_as_value_error() -> Iterator[None]:
    try:
        yield
    except _UNREADABLE as error:
        raise ValueError(f"not a file of torch.save: {type(error).__name__}: {error}") from error


def read_bytes(file: BinaryIO, at: int, count: int) -> Tensor:
    """Read `count` bytes from position `at`, as uint8 [count]. Raises ValueError if the file has fewer."""
    raw = torch.empty(count, dtype=torch.uint8)
    file.seek(at)
    view = memoryview(cast(Any, raw.numpy()))
    done = 0
    while done < count:
        step = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not step:
            raise ValueError(f"the file ends {count - done} bytes early")
        done += step
    return raw


def as_type(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Reinterpret uint8 [bytes] as elements [n] of a type. Raises ValueError for booleans that are not 0 or 1."""
    if dtype == torch.bool and bool((raw > 1).any()):
        raise ValueError("a boolean is neither 0 nor 1")
    return raw[: len(raw) // dtype.itemsize * dtype.itemsize].view(dtype)
