"""Entries written and read by torch.distributed.checkpoint, whose files other programs can read too.

Its planners say which box of which tensor a rank writes or wants; the resharding between the boxes of two plans is its
own. Only this file knows its interfaces (seen in torch 2.13).
"""

from __future__ import annotations

import io
import math
import pickle
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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

from autoptd.checkpoint.entries import Entry
from autoptd.checkpoint.regions import Ints, Region
from autoptd.cost_models.complaints import brief
from autoptd.errors import CheckpointError

# what reading a damaged pickle may raise (its documentation names some, "and others")
UNREADABLE = (
    *(pickle.UnpicklingError, EOFError, ImportError, AttributeError, LookupError, TypeError, ValueError),
    *(ArithmeticError, RuntimeError, AssertionError, MemoryError),
)
_OTHERS = (("torch", "Size"), ("torch.serialization", "_get_layout"))
_OF_INDEX = {
    *("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"),
    *("pathlib", *(module for module, _ in _OTHERS)),
}
INDEX = ".metadata"  # the file that says where everything lies; without it there is no checkpoint


class _Writer(SavePlanner):
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


class _Reader(LoadPlanner):
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
                raise CheckpointError(f"the checkpoint does not hold all of {key}", fix="use another one")
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
        place = read_item.dest_index
        assert place.index is not None
        _, target = self._targets[place.fqn][place.index]
        for dim, (first, count) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, first, count)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


def write(folder: Path, entries: Sequence[Entry], group: dist.ProcessGroup | None) -> None:
    """A collective over `group`; alone without. Raises CheckpointError on every rank where one of them fails."""
    writer, planner = dcp.FileSystemWriter(folder), _Writer(entries)
    with _telling(folder, "cannot be written"):
        dcp.save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)


def read(folder: Path, entries: Sequence[Entry], group: dist.ProcessGroup | None) -> None:
    """Fill the entries' elements. A collective over `group`; alone without. Raises CheckpointError on every rank."""
    reader, planner = dcp.FileSystemReader(folder), _Reader(entries)
    with _telling(folder, "cannot be read"):
        dcp.load({}, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)


@contextmanager
def _telling(folder: Path, what: str) -> Iterator[None]:
    """Its failures as ours, of the first rank; its warning to whoever is alone is not passed on."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        told = f"the checkpoint {what}: {type(cause).__name__}: {cause}"
        raise CheckpointError(told, where=f"{folder}, rank {rank}") from error


class _Index(pickle.Unpickler):
    """The index is a pickle: of the few classes that make one, so that no other code runs."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if "." not in name and module in _OF_INDEX else None
        own = isinstance(found, type) and (found.__module__ == module or module == "pathlib")
        if own or isinstance(found, torch.dtype) or (module, name) in _OTHERS:
            return found
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into an index")


def shapes(folder: Path) -> Mapping[str, tuple[Ints, torch.dtype]]:
    """Every tensor of a checkpoint: its whole shape and its type. Raises CheckpointError."""
    try:
        with (folder / INDEX).open("rb") as file:
            metadata = _Index(file).load()
        found = metadata.state_dict_metadata.items()
        tensors = [(key, x.size, x.properties.dtype) for key, x in found if isinstance(x, TensorStorageMetadata)]
        return {str(key): (tuple(map(int, size)), dtype) for key, size, dtype in tensors}
    except (OSError, *UNREADABLE) as error:
        said = brief(ascii(str(error))[1:-1])
        fix = "load an older checkpoint: one of the other step-… folders"
        raise CheckpointError(
            f"the checkpoint has no readable index: {said}", where=str(folder / INDEX), fix=fix
        ) from error


def read_whole(folder: Path, keys: Iterable[str]) -> dict[str, Tensor]:
    """Whole tensors, in this process alone. Raises CheckpointError."""
    known = shapes(folder)
    found = {key: torch.empty(known[key][0], dtype=known[key][1]) for key in keys}
    entries = [
        Entry(key, tuple(x.shape), x.view(-1), (Region((0,) * x.dim(), tuple(x.shape), 0, tuple(x.shape)),), False)
        for key, x in found.items()
    ]
    read(folder, entries, None)
    return found
