"""Reader of the index that torch.distributed.checkpoint writes, a pickle, for checkpoints without an `index.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoptd.checkpoint.files import read_small
from autoptd.checkpoint.index import Chunk, Index, SavedTensor, check, unreadable
from autoptd.checkpoint.pickles import LONGEST, Maker, Name, RecordedCall, read_pickle, recorded
from autoptd.checkpoint.torch_files import DTYPES, is_shape

METADATA = ".metadata"
_TORCH_GLOBALS = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
}
_KNOWN: dict[Name, Any] = {
    **{(module, name): recorded(name) for module, names in _TORCH_GLOBALS.items() for name in names},
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
    ("torch", "Size"): Maker(lambda sizes: sizes),
    ("collections", "OrderedDict"): Maker(dict),
}


def read_torch_index(folder: Path, sizes: Mapping[str, int]) -> Index:
    """Read and check `.metadata`, as data. `sizes`: bytes of the files that it may name. Raises CheckpointError."""
    path = folder / METADATA
    data = read_small(path, LONGEST)
    try:
        metadata = _state(read_pickle(data, _KNOWN), "Metadata")
        index = _index(metadata)
        check(index, sizes)
    except (ValueError, LookupError, TypeError, RecursionError, MemoryError) as error:
        raise unreadable(path, error) from error
    return index


def _state(found: Any, name: str) -> dict[str, Any]:
    if not (isinstance(found, RecordedCall) and found.name == name and isinstance(found.state, dict)):
        raise ValueError(f"holds something other than a {name}")
    return found.state


def _index(metadata: dict[str, Any]) -> Index:
    """Return the index of all tensors. As in torch, a chunk is found by its tensor's name and offsets."""
    stored: dict[tuple[str, tuple[int, ...] | None], dict[str, Any]] = {}
    for where, info in metadata["storage_data"].items():
        named, offset = _state(where, "MetadataIndex"), _state(where, "MetadataIndex").get("offset")
        if not isinstance(named["fqn"], str) or not (offset is None or is_shape(offset)):
            raise ValueError("has stored bytes that belong to no tensor")
        stored[named["fqn"], None if offset is None else tuple(offset)] = _state(info, "_StorageInfo")
    index: dict[str, SavedTensor] = {}
    left = len(stored)
    for key, found in metadata["state_dict_metadata"].items():
        if isinstance(found, RecordedCall) and found.name == "BytesStorageMetadata":
            continue
        saved = _state(found, "TensorStorageMetadata")
        left -= len(saved["chunks"])
        if left < 0:
            raise ValueError("has chunks without stored bytes")
        index[key] = _saved(key, saved, stored)
    return index


def _saved(key: Any, state: dict[str, Any], stored: Mapping[Any, dict[str, Any]]) -> SavedTensor:
    properties = state["properties"]
    if not (isinstance(key, str) and key.isprintable() and is_shape(state["size"])):
        raise ValueError("has a tensor without a valid name or shape")
    if not (isinstance(properties, RecordedCall) and properties.name == "TensorProperties"):
        raise ValueError(f"{key:.60}: has no TensorProperties")
    dtype = properties.state[0]
    if dtype not in DTYPES.values():
        raise ValueError(f"{key:.60}: has an unknown type")
    chunks = []
    for each in state["chunks"]:
        box = _state(each, "ChunkStorageMetadata")
        offsets, sizes = box["offsets"], box["sizes"]
        if not (is_shape(offsets) and is_shape(sizes)):
            raise ValueError(f"{key:.60}: has a chunk without a valid shape")
        info = stored[key, tuple(offsets)] if (key, tuple(offsets)) in stored else stored[key, None]
        file, at, count = info["relative_path"], info["offset"], info["length"]
        if info.get("transform_descriptors"):
            raise ValueError(f"{key:.60}: was transformed (compressed, say) when it was written; load it with torch")
        if not (isinstance(file, str) and type(at) is int and type(count) is int and at >= 0 and count >= 0):
            raise ValueError(f"{key:.60}: has a chunk without file, first byte or length")
        chunks.append(Chunk(file, at, count, tuple(offsets), tuple(sizes), archived=True))
    return SavedTensor(dtype, tuple(state["size"]), tuple(chunks))
