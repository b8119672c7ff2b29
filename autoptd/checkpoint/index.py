"""`index.json`: the file and bytes of every tensor of a checkpoint, as JSON; torch's own index is a pickle.

    {"format": 1, "byteorder": "little", "files": ["__0_0.distcp", "__1_0.distcp"],
     "tensors": {"model.head.weight": {"dtype": "float32", "shape": [64, 16], "chunks": [
        [0, 704, 2048, [0, 0], [32, 16]],          file, first byte, bytes, offsets, sizes
        [1, 704, 2048, [32, 0], [32, 16]]]}}}

A chunk is a box of its tensor, whose elements are at those bytes, in order. The chunks of a tensor hold each element
exactly once, and no two chunks share a byte of a file, so an index never claims more than its files hold. All of it is
checked before any tensor is allocated.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from autoptd.checkpoint.files import LOAD_OLDER, is_plain, read_json
from autoptd.checkpoint.folder import INDEX
from autoptd.checkpoint.torch_files import DTYPES, is_shape, name_of
from autoptd.cost_models.complaints import brief
from autoptd.errors import CheckpointError
from autoptd.layout.regions import Ints

FORMAT = 1
LONGEST = 1 << 26  # bytes of the file
_SPARE = 1 << 20  # bytes allowed beyond the size of the shards, in which each chunk takes more bytes than its row here
_COMPARED = 10**7  # pairs of chunks of one tensor that are compared at most


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and the bytes of a file with its elements or, if `archived`, an archive of `torch.save`."""

    file: str
    at: int
    bytes: int
    offsets: Ints
    sizes: Ints
    archived: bool = False


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint; `shape` is that of the whole tensor."""

    dtype: torch.dtype
    shape: Ints
    chunks: tuple[Chunk, ...]


Index = Mapping[str, SavedTensor]


def to_json(index: Index) -> str:
    """Return the file's text. Raises CheckpointError if it would be longer than `read_index` accepts."""
    files = sorted({chunk.file for saved in index.values() for chunk in saved.chunks})
    number = {name: n for n, name in enumerate(files)}
    tensors = {
        key: {
            "dtype": name_of(saved.dtype),
            "shape": saved.shape,
            "chunks": [[number[c.file], c.at, c.bytes, c.offsets, c.sizes] for c in saved.chunks],
        }
        for key, saved in sorted(index.items())
    }
    data = {"format": FORMAT, "byteorder": sys.byteorder, "files": files, "tensors": tensors}
    text = json.dumps(data, separators=(",", ":"))
    if len(text) > LONGEST:
        what = f"the index of {len(index)} tensors would have {len(text)} bytes, more than the limit of {LONGEST}"
        raise CheckpointError(what, fix="save under a plan with fewer shards per tensor")
    return text


def merged(parts: Iterable[Index]) -> Index:
    """Merge the indices of several ranks, each of which wrote some of the chunks."""
    found: dict[str, SavedTensor] = {}
    for part in parts:
        for key, saved in part.items():
            before = found[key].chunks if key in found else ()
            found[key] = SavedTensor(saved.dtype, saved.shape, before + saved.chunks)
    return found


def read_index(folder: Path, sizes: Mapping[str, int]) -> Index:
    """Read and check `index.json`. `sizes`: bytes of the files that the manifest lists. Raises CheckpointError."""
    path = folder / INDEX
    shards = sum(size for name, size in sizes.items() if name != INDEX)
    try:
        index = _parsed(read_json(path, min(LONGEST, _SPARE + shards)))
        check(index, sizes)
    except (ValueError, RecursionError, MemoryError) as error:
        raise unreadable(path, error) from error
    return index


def unreadable(path: Path, error: BaseException) -> CheckpointError:
    reason = brief(ascii(str(error) or type(error).__name__)[1:-1])
    return CheckpointError(f"the checkpoint has no readable index: {reason}", where=str(path), fix=LOAD_OLDER)


def _parsed(data: Any) -> Index:
    """Convert the JSON data. Raises ValueError at the first wrong field."""
    fields = _fields(data, ("format", "byteorder", "files", "tensors"), "the index")
    if fields["format"] != FORMAT:
        raise ValueError(f"has format {fields['format']!r:.20}; this autoptd reads format {FORMAT}")
    if fields["byteorder"] != sys.byteorder:
        raise ValueError(f"was written on a machine whose byte order is not {sys.byteorder}")
    files = fields["files"]
    if not (isinstance(files, list) and all(map(is_plain, files)) and len(set(files)) == len(files)):
        raise ValueError("files: not a list of distinct names of files in the folder")
    if not isinstance(fields["tensors"], dict):
        raise ValueError("tensors: not an object")
    return {key: _saved(key, found, files) for key, found in fields["tensors"].items()}


def _fields(data: Any, names: tuple[str, ...], what: str) -> dict[str, Any]:
    if not isinstance(data, dict) or data.keys() != set(names):
        raise ValueError(f"{what}: not an object with {', '.join(names)}")
    return data


def _saved(key: str, data: Any, files: Sequence[str]) -> SavedTensor:
    if not key.isprintable() or len(key) > 1000:
        raise ValueError(f"{key!r:.60}: not a name of a tensor")
    fields = _fields(data, ("dtype", "shape", "chunks"), key)
    dtype, shape, rows = fields["dtype"], fields["shape"], fields["chunks"]
    if not (isinstance(dtype, str) and dtype in DTYPES):
        raise ValueError(f"{key}: unknown type {dtype!r:.30}")
    if not (is_shape(shape) and isinstance(rows, list)):
        raise ValueError(f"{key}: no valid shape, or no chunks")
    return SavedTensor(DTYPES[dtype], tuple(shape), tuple(_chunk(key, row, files) for row in rows))


def _chunk(key: str, row: Any, files: Sequence[str]) -> Chunk:
    if isinstance(row, list) and len(row) == 5:
        file, at, count, offsets, sizes = row
        numbers = type(file) is int and type(at) is int and type(count) is int and at >= 0 and count >= 0
        if numbers and 0 <= file < len(files) and is_shape(offsets) and is_shape(sizes):
            return Chunk(files[file], at, count, tuple(offsets), tuple(sizes))
    raise ValueError(f"{key}: has a chunk that is not [file, first byte, bytes, offsets, sizes]")


def check(index: Index, sizes: Mapping[str, int]) -> None:
    """Raise ValueError unless every element is in the files exactly once. `sizes`: bytes of each usable file."""
    used: dict[str, list[tuple[int, int, str]]] = {}
    for key, saved in index.items():
        for chunk in saved.chunks:
            _check_chunk(key, saved, chunk, sizes)
            if chunk.bytes:
                used.setdefault(chunk.file, []).append((chunk.at, chunk.at + chunk.bytes, key))
        _check_cover(key, saved)
    for file, spans in used.items():
        spans.sort()
        for (_, end, one), (start, _, other) in pairwise(spans):
            if start < end:
                raise ValueError(f"{one} and {other} share bytes of {file}")


def _check_chunk(key: str, saved: SavedTensor, chunk: Chunk, sizes: Mapping[str, int]) -> None:
    if chunk.file not in sizes or not is_plain(chunk.file):
        raise ValueError(f"{key}: is in {chunk.file!r:.60}, which the manifest does not list")
    if not len(chunk.offsets) == len(chunk.sizes) == len(saved.shape):
        raise ValueError(f"{key}: has a chunk of {len(chunk.sizes)} dims, but itself {len(saved.shape)}")
    if any(o + n > whole for o, n, whole in zip(chunk.offsets, chunk.sizes, saved.shape, strict=True)):
        raise ValueError(f"{key}: has a chunk outside its shape {list(saved.shape)}")
    needed = math.prod(chunk.sizes) * saved.dtype.itemsize
    if chunk.bytes != needed if not chunk.archived else chunk.bytes < needed:
        raise ValueError(f"{key}: has a chunk of {chunk.bytes} bytes that needs {needed}")
    if chunk.at + chunk.bytes > sizes[chunk.file]:
        end = chunk.at + chunk.bytes
        raise ValueError(f"{key}: reaches to byte {end} of {chunk.file}, which has {sizes[chunk.file]}")


def _check_cover(key: str, saved: SavedTensor) -> None:
    """Raise ValueError unless the chunks make up the tensor: as many elements in total, and no two chunks overlap."""
    boxes = [c for c in saved.chunks if math.prod(c.sizes)]
    if sum(math.prod(c.sizes) for c in boxes) != math.prod(saved.shape):
        raise ValueError(f"{key}: its chunks miss some elements, or hold some twice")
    if not saved.shape or len(boxes) < 2:
        return
    dims = range(len(saved.shape))
    sweep = max(dims, key=lambda d: len({c.offsets[d] for c in boxes}))
    boxes.sort(key=lambda c: c.offsets[sweep])
    active: list[Chunk] = []
    compared = 0
    for box in boxes:
        active = [c for c in active if c.offsets[sweep] + c.sizes[sweep] > box.offsets[sweep]]
        compared += len(active)
        if compared > _COMPARED:
            raise ValueError(f"{key}: has too many chunks to compare for overlaps")
        if any(_overlap(c, box) for c in active):
            raise ValueError(f"{key}: has chunks that overlap")
        active.append(box)


def _overlap(a: Chunk, b: Chunk) -> bool:
    pairs = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    return all(o < p + m and p < o + n for o, n, p, m in pairs)
