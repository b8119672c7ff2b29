"""Entries written and read through torch.distributed.checkpoint (DCP), whose files other programs can read too.

Our planners tell DCP which box of which tensor a rank writes or needs; DCP itself reshards between the boxes of two
plans. It never reads an index or a tensor: our storage reader gives it the verified index, and copies the bytes of
tensors here. Only this file uses DCP's interfaces (seen in torch 2.13).
"""

from __future__ import annotations

import io
import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader, WriteResult
from torch.futures import Future

from autoptd.checkpoint import files
from autoptd.checkpoint.entries import Entry
from autoptd.checkpoint.index import Chunk, Index, SavedTensor
from autoptd.checkpoint.torch_files import as_type, locate, read_bytes, storage_of
from autoptd.checkpoint.torch_index import read_torch_index
from autoptd.errors import CheckpointError
from autoptd.layout.regions import Ints, Region


class _CheckpointWriter(SavePlanner):
    def __init__(self, entries: Sequence[Entry]) -> None:
        self._found: dict[tuple[str, Ints], Tensor] = {}
        self._items = []
        for entry in entries:
            for region in entry.regions:
                offsets, properties = torch.Size(region.offsets), TensorProperties(dtype=entry.flat.dtype)
                chunk = ChunkStorageMetadata(offsets, torch.Size(region.sizes))
                data = TensorWriteData(chunk, properties, torch.Size(entry.whole))
                self._items.append(WriteItem(MetadataIndex(entry.key, offsets), WriteItemType.SHARD, tensor_data=data))
                self._found[entry.key, region.offsets] = region.of(entry.flat)

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        return SavePlan(self._items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        index = write_item.index
        assert index.offset is not None
        return self._found[index.fqn, tuple(index.offset)].contiguous()


class _CheckpointReader(LoadPlanner):
    def __init__(self, entries: Sequence[Entry]) -> None:
        self._targets: dict[str, list[tuple[Region, Tensor]]] = defaultdict(list)
        self._items: list[ReadItem] = []
        for entry in entries:
            self._targets[entry.key] += [(region, region.of(entry.flat)) for region in entry.regions]

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        for key, targets in self._targets.items():
            saved = metadata.state_dict_metadata[key]
            chunks = [ChunkStorageMetadata(torch.Size(r.offsets), torch.Size(r.sizes)) for r, _ in targets]
            assert isinstance(saved, TensorStorageMetadata), key
            items = create_read_items_for_chunk_list(key, saved, chunks)
            if sum(math.prod(item.lengths) for item in items) != sum(target.numel() for _, target in targets):
                raise CheckpointError(f"elements of {key} are missing", fix="use another checkpoint")
            self._items += items

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(self._items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError(read_item)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        dest = read_item.dest_index
        assert dest.index is not None
        _, target = self._targets[dest.fqn][dest.index]
        for dim, (first, count) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, first, count)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


class _IndexedStorage(StorageReader):
    """DCP's storage for loading: our index, and the bytes that it locates."""

    def __init__(self, folder: Path, index: Index) -> None:
        self._folder, self._index = folder, index
        self._chunks = {(key, c.offsets): c for key, saved in index.items() for c in saved.chunks}

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return Metadata({key: _described(saved) for key, saved in self._index.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[Chunk, ReadItem]]] = defaultdict(list)
        for item in plan.items:
            source = item.storage_index
            assert source.offset is not None
            chunk = self._chunks[source.fqn, tuple(source.offset)]
            by_file[chunk.file].append((chunk, item))
        for name, found in by_file.items():
            with files.opened(self._folder / name) as file:
                for chunk, item in found:
                    key = item.storage_index.fqn
                    try:
                        box = _box(file, chunk, self._index[key], tuple(item.storage_offsets), tuple(item.lengths))
                    except ValueError as error:
                        raise CheckpointError(f"{name} is damaged at {key}: {error}", fix=files.LOAD_OLDER) from error
                    planner.resolve_tensor(item).detach().copy_(box)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _described(saved: SavedTensor) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in saved.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=saved.dtype), torch.Size(saved.shape), chunks)


def _box(file: BinaryIO, chunk: Chunk, saved: SavedTensor, first: Ints, lengths: Ints) -> Tensor:
    """Read the elements [first, first + lengths) of a chunk. Raises ValueError if its bytes do not hold them."""
    if chunk.archived:
        found = locate(file, chunk.at, chunk.bytes)
        if (found.dtype, found.sizes) != (saved.dtype, chunk.sizes):
            held = f"{found.dtype} of shape {list(found.sizes)}, the index {saved.dtype} of {list(chunk.sizes)}"
            raise ValueError(f"it holds {held}")
        return _narrowed(found.read(file), first, lengths)
    if not lengths:
        return as_type(read_bytes(file, chunk.at, chunk.bytes), saved.dtype).view(())
    row = chunk.bytes // max(1, chunk.sizes[0])  # bytes: only the rows that are asked for are read
    raw = read_bytes(file, chunk.at + first[0] * row, lengths[0] * row)
    box = as_type(raw, saved.dtype).view(lengths[0], *chunk.sizes[1:])
    return _narrowed(box, (0, *first[1:]), lengths)


def _narrowed(box: Tensor, first: Ints, lengths: Ints) -> Tensor:
    for dim, (start, count) in enumerate(zip(first, lengths, strict=True)):
        box = box.narrow(dim, start, count)
    return box


def write(folder: Path, entries: Sequence[Entry], rank: int) -> Metadata:
    """Write a rank's entries; return torch's index of them. Raises CheckpointError and OSError.

    No collective: `dcp.save` would exchange the index of all ranks with each.
    """
    writer, planner = dcp.FileSystemWriter(folder), _CheckpointWriter(entries)
    writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=False)  # names its files by rank
    try:
        (plan,), metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
        written = writer.write_data(plan, planner).wait()
    except RuntimeError as error:  # torch's serialisation raises one after a full disk, say, with that as its context
        found = error.__context__ if isinstance(error.__context__, OSError) else error
        raise CheckpointError(f"{type(found).__name__}: {found}") from error
    metadata.storage_data = {each.index: each.storage_data for each in written}
    return metadata


def write_index(folder: Path, by_rank: Iterable[Metadata]) -> None:
    """Write the file by which torch reads what all ranks have written."""
    writer, tensors, places = dcp.FileSystemWriter(folder), dict[str, TensorStorageMetadata](), []
    writer.set_up_storage_writer(True)
    for metadata in by_rank:
        for key, saved in metadata.state_dict_metadata.items():
            assert isinstance(saved, TensorStorageMetadata), key
            before = tensors[key].chunks if key in tensors else []
            tensors[key] = replace(saved, chunks=[*before, *saved.chunks])
        places += [WriteResult(index, place.length, place) for index, place in metadata.storage_data.items()]
    writer.finish(Metadata(dict(tensors)), [places])


def written_by(rank: int, folder: Path, metadata: Metadata) -> Index:
    """Return our index of the chunks that a rank has just written. Raises CheckpointError."""
    index: dict[str, SavedTensor] = {}
    tensors = metadata.state_dict_metadata
    boxes = {(key, tuple(c.offsets)): c for key, each in tensors.items() for c in getattr(each, "chunks", ())}
    by_file: dict[str, list[tuple[MetadataIndex, Any]]] = defaultdict(list)
    for position, info in metadata.storage_data.items():
        if info.relative_path.startswith(f"__{rank}_"):
            by_file[info.relative_path].append((position, info))
    for name, found in by_file.items():
        with files.opened(folder / name) as file:
            for position, info in found:
                key, offsets = position.fqn, tuple(position.offset or ())
                saved = tensors[key]
                sizes, dtype = tuple(boxes[key, offsets].sizes), saved.properties.dtype  # type: ignore[union-attr]
                try:
                    at, count = storage_of(file, info.offset, info.length)
                except ValueError as error:
                    raise CheckpointError(f"what was written of {key} to {name} reads back damaged: {error}") from error
                assert count == math.prod(sizes) * dtype.itemsize, f"the storage of {key} is not its elements alone"
                before = index[key].chunks if key in index else ()
                whole = tuple(saved.size)  # type: ignore[union-attr]
                index[key] = SavedTensor(dtype, whole, (*before, Chunk(name, at, count, offsets, sizes)))
    return index


def read(folder: Path, index: Index, entries: Sequence[Entry], group: dist.ProcessGroup | None) -> None:
    """Fill the entries. A collective over `group`, or this process alone. Raises CheckpointError on all ranks."""
    needed = {key: index[key] for key in {entry.key for entry in entries}}
    reader, planner = _IndexedStorage(folder, needed), _CheckpointReader(entries)
    with _as_checkpoint_error(folder):
        dcp.load({}, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)


@contextmanager
def _as_checkpoint_error(folder: Path) -> Iterator[None]:
    """Raise DCP's failure on the lowest rank as a CheckpointError; suppress its warning about a single process."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        reason = cause.what if isinstance(cause, CheckpointError) else f"{type(cause).__name__}: {cause}"
        raise CheckpointError(
            f"the checkpoint cannot be read: {reason}", where=f"{folder}, rank {rank}", fix=getattr(cause, "fix", "")
        ) from error


def index_of(folder: Path) -> Index:
    """Return the index of a checkpoint that DCP wrote without autoptd. Verifies nothing. Raises CheckpointError."""
    names = [path for path in folder.iterdir() if files.is_plain(path.name) and files.is_regular(path)]
    return read_torch_index(folder, {path.name: path.stat().st_size for path in names})


def read_whole(folder: Path, index: Index, keys: Iterable[str]) -> dict[str, Tensor]:
    """Return whole tensors, read in this process alone. Raises CheckpointError."""
    found = {}
    for key in keys:
        try:
            found[key] = torch.empty(index[key].shape, dtype=index[key].dtype)
        except (RuntimeError, MemoryError) as error:
            what = f"{key} of shape {list(index[key].shape)} does not fit into memory"
            raise CheckpointError(what, where=str(folder)) from error
    entries = [
        Entry(key, tuple(x.shape), x.view(-1), (Region((0,) * x.dim(), tuple(x.shape), 0, tuple(x.shape)),), False)
        for key, x in found.items()
    ]
    read(folder, index, entries, None)
    return found
