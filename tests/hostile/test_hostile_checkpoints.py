"""Checkpoints made by an attacker: whatever they contain, no code runs, no outside file is touched, nothing hangs.

Digests never help here: all of them are recomputed. Every case must be refused by checking and by loading, with one
error that names the place; inspecting and exporting may succeed if they do not need the damaged part.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import resource
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint

from autoptd.checkpoint import contents, dcp, folder, index, torch_files
from autoptd.checkpoint.huggingface import export
from autoptd.checkpoint.pickles import read_pickle
from autoptd.checkpoint.torch_index import METADATA
from autoptd.cli.main import main
from autoptd.errors import AutoptdError, CheckpointError
from autoptd.passes.gc_pause import without_collector
from tests.hostile.checkpoints import (
    SHARD,
    a_pickle,
    aged,
    archive,
    call,
    digested,
    metadata_of,
    running,
    same,
    sealed,
    state,
    with_index,
    with_progress,
    write_metadata,
)

Harm = Callable[[Path, Path], Any]
LONG_S, LARGE = 3.0, 1 << 30  # processor seconds for a refusal, and bytes of additional memory


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("good") / "checkpoints"
    running().save(root)
    return root


@pytest.fixture
def where(good: Path, tmp_path: Path) -> Path:
    """Copy of the checkpoint."""
    shutil.copytree(good, tmp_path / "in" / "checkpoints")
    return folder.find(tmp_path / "in" / "checkpoints")


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """File outside of the folder; memory is limited while the test runs."""
    path = tmp_path / "outside"
    path.write_bytes(b"secret" * 1000)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + LARGE, limits[1]))
    yield path
    resource.setrlimit(resource.RLIMIT_AS, limits)


def refused(do: Callable[[], Any], kind: type[AutoptdError] = CheckpointError) -> bool:
    """Return whether `do` ends quickly in one autoptd error with a place; other errors are raised."""
    start = time.process_time()
    try:
        with without_collector():  # the garbage collector would traverse what other tests left
            do()
    except kind as error:
        text, took_s = str(error), time.process_time() - start
        assert error.where and len(text) < 2500 and all(c.isprintable() or c == "\n" for c in text), text
        assert took_s < LONG_S, f"{took_s:.1f} s: {text}"
        return True
    return False


def damaged(where: Path) -> None:
    found = contents.examine(where)
    if found.damage:
        raise CheckpointError(found.damage[0], where=str(where))


def hold(where: Path, outside: Path) -> None:
    """Assert that every reader refuses in time, no payload runs, and nothing outside is touched."""
    tree = sorted(path.relative_to(where.parents[2]) for path in where.parents[2].rglob("*"))
    before = state(running())
    assert refused(lambda: damaged(where)), "checking it finds nothing"
    assert refused(lambda: running().load(where)), "it is loaded"
    refused(lambda: export(where, outside.with_name("exported"), None), AutoptdError)
    refused(lambda: contents.read_whole(where))
    shutil.rmtree(outside.with_name("exported"), ignore_errors=True)
    assert sorted(path.relative_to(where.parents[2]) for path in where.parents[2].rglob("*")) == tree, "a mark"
    assert outside.read_bytes() == b"secret" * 1000
    assert same(state(running()), before), "a refused checkpoint changed the model"


def test_an_unchanged_checkpoint_is_fine_in_both_forms(where: Path, tmp_path: Path) -> None:
    """Otherwise the refusals below would prove nothing."""
    for form in ("new", "old"):
        if form == "old":
            aged(where)
        found = contents.examine(where)
        assert not found.damage and not found.not_finite and bool(found.unverified) == (form == "old")
        before = state(running())
        if form == "old":
            with pytest.warns(UserWarning, match="Not verified: the manifest itself"):
                running().load(where)
        else:
            running().load(where)
        assert same(state(running()), before)
        assert export(where, tmp_path / form, None)["tensors"] == 5
    assert main(["checkpoint", "check", str(where)]) == 0


def test_a_shard_that_reads_back_damaged_is_one_error(where: Path) -> None:
    """Raised as CheckpointError, which all ranks raise together; another error would leave them waiting."""
    shard = where / "__0_0.distcp"
    whole = shard.read_bytes()
    for damaged_bytes in (whole[: len(whole) // 2], b"", whole.replace(b"data/0", b"data?0"), bytes(len(whole))):
        shard.write_bytes(damaged_bytes)
        with pytest.raises(CheckpointError, match="reads back damaged"):
            dcp.written_by(0, where, metadata_of(where))


# --- commands -----------------------------------------------------------------------------------------------------

MARK = "MARK"
CALLS: list[tuple[Any, ...]] = [
    ("os", "system", "touch MARK"),
    ("posix", "system", "touch MARK"),
    ("subprocess", "Popen", ["touch", MARK]),
    ("subprocess", "check_output", ["touch", MARK]),
    ("builtins", "exec", "open('MARK', 'w')"),
    ("builtins", "eval", "open('MARK', 'w')"),
    ("__builtin__", "eval", "open('MARK', 'w')"),
    ("builtins", "open", MARK, "w"),
    ("io", "open", MARK, "w"),
    ("pathlib", "Path", MARK),
    ("pathlib", "os.system", "touch MARK"),
    ("pathlib", "attrgetter", "system"),
    ("operator", "attrgetter", "system"),
    ("operator", "methodcaller", "touch"),
    ("pathlib", "PosixPath.touch", MARK),
    ("pathlib", "Path.cwd"),
    ("shutil", "copy", "OUTSIDE", MARK),
    ("shutil", "rmtree", "OUTSIDE"),
    ("os", "truncate", "OUTSIDE", 0),
    ("torch.serialization", "_open_file", "OUTSIDE", "wb"),
    ("torch.serialization", "PyTorchFileWriter", "OUTSIDE"),
    ("torch.serialization", "_open_zipfile_writer_file", "OUTSIDE"),
    ("torch.serialization", "load", "OUTSIDE"),
    ("torch.serialization", "save", 1, MARK),
    ("torch", "load", "OUTSIDE"),
    ("torch", "save", 1, MARK),
    ("torch", "hub.load", "OUTSIDE"),
    ("torch.storage", "_load_from_bytes", b"\x80\x04cos\nsystem\n\x8c\x0atouch MARK\x85R."),
    ("torch._C", "PyTorchFileWriter", "OUTSIDE"),
    ("torch.distributed.checkpoint.filesystem", "FileSystemWriter", MARK),
    ("torch.distributed.checkpoint.filesystem", "FileSystem"),
    ("torch.distributed.checkpoint.filesystem", "os.system", "touch MARK"),
    ("torch.distributed.checkpoint.filesystem", "pickle.loads", b"cos\nsystem\n(S'touch MARK'\ntR."),
    ("torch.distributed.checkpoint.metadata", "os"),
    ("torch.distributed.checkpoint.metadata", "Enum", MARK, "a b"),
    ("torch.distributed.checkpoint.metadata", "dataclass", 1),
    ("torch._utils", "_rebuild_wrapper_subclass", 1),
    ("torch._utils", "_rebuild_device_tensor_from_numpy", 1),
    ("builtins", "getattr", "a", "__class__"),
    ("builtins", "__import__", "antigravity"),
    ("builtins", "bytearray", 10**12),
    ("builtins", "range", 10**12),
    ("builtins", "bytes", 10**12),
    ("functools", "partial", 1),
    ("importlib", "import_module", "this"),
    ("runpy", "run_path", "OUTSIDE"),
    ("marshal", "loads", b"x"),
    ("types", "CodeType", 0),
    ("ctypes", "CDLL", "OUTSIDE"),
    ("socket", "create_connection", ["127.0.0.1", 9]),
    ("copyreg", "_reconstructor", 1),
    ("collections", "OrderedDict.fromkeys", [1]),
    ("numpy", "fromfile", "OUTSIDE"),
    ("code", "interact"),
]
WAYS = ("GLOBAL", "STACK_GLOBAL", "NEWOBJ", "NEWOBJ_EX", "INST", "OBJ", "BUILD", "EXT")


def command(name: tuple[Any, ...], outside: Path, how: str = "GLOBAL") -> bytes:
    """Return a pickle that runs this command."""
    there = str(outside.with_name("mark"))

    def placed(given: Any) -> Any:
        if isinstance(given, list):
            return [placed(each) for each in given]
        if isinstance(given, str):
            return given.replace(MARK, there).replace("OUTSIDE", str(outside))
        return given.replace(MARK.encode(), there.encode()) if isinstance(given, bytes) else given

    module, attribute, *arguments = name
    return a_pickle(call(module, attribute, *map(placed, arguments), how=how))


def into_index(where: Path, raw: bytes) -> None:
    aged(where)
    write_metadata(where, raw)


def into_progress(where: Path, raw: bytes) -> None:
    (where / folder.PROGRESS).write_bytes(digested(archive(raw, {"data/0": bytes(512)})))
    sealed(where)


def into_shard(where: Path, raw: bytes) -> None:
    """Put a payload into a shard of the older form, whose index gives only the places of torch's archives."""
    aged(where)
    metadata = metadata_of(where)
    place = next(iter(metadata.storage_data.values()))
    data, entry = (where / SHARD).read_bytes(), archive(raw, {"data/0": bytes(512)})
    (where / SHARD).write_bytes(data + entry)
    place.offset, place.length = len(data), len(entry)
    write_metadata(where, pickle.dumps(metadata))


PLACES = {"index": into_index, "progress": into_progress, "shard": into_shard}


EVERYWHERE = [(call, place) for n, call in enumerate(CALLS) for place in PLACES if place == "index" or n % 5 == 0]


@pytest.mark.parametrize(("name", "place"), EVERYWHERE, ids=lambda x: x if isinstance(x, str) else f"{x[0]}.{x[1]}")
def test_a_pickle_that_calls(name: tuple[Any, ...], place: str, where: Path, outside: Path) -> None:
    PLACES[place](where, command(name, outside))
    if place == "shard":
        assert refused(lambda: damaged(where))
        assert refused(lambda: contents.read_whole(where))
        assert not outside.with_name("mark").exists() and outside.read_bytes() == b"secret" * 1000
    else:
        hold(where, outside)


@pytest.mark.parametrize("place", ["index", "progress"])
@pytest.mark.parametrize("how", WAYS)
def test_every_way_that_a_pickle_can_call(how: str, place: str, where: Path, outside: Path) -> None:
    PLACES[place](where, command(("os", "system", "touch MARK"), outside, how))
    hold(where, outside)


def test_plain_torch_checkpoints_are_read_as_data_too(tmp_path: Path, outside: Path) -> None:
    """Checkpoints without a manifest are not verified, and no code runs."""
    tensors = {"a": torch.arange(12.0).view(4, 3).t(), "b": {"c": torch.tensor([True, False])}, "rate": 0.1}
    tensors["d"] = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    tensors["e"] = torch.arange(6)[2:4]
    torch.distributed.checkpoint.save(dict(tensors), checkpoint_id=tmp_path / "plain", no_dist=True)
    known = dcp.index_of(tmp_path / "plain")
    found = dcp.read_whole(tmp_path / "plain", known, known)
    assert sorted(found) == ["a", "b.c", "d", "e"]
    assert torch.equal(found["a"], tensors["a"]) and torch.equal(found["b.c"], torch.tensor([True, False]))
    assert torch.equal(found["d"], tensors["d"]) and found["e"].tolist() == [2, 3]
    (tmp_path / "plain" / METADATA).write_bytes(command(("os", "system", "touch MARK"), outside))
    assert refused(lambda: dcp.index_of(tmp_path / "plain"))
    assert not outside.with_name("mark").exists()


# --- bombs --------------------------------------------------------------------------------------------------------


def tuples_of_tuples() -> bytes:
    """Return a pickle whose dict key takes 2⁶⁰ steps to hash."""
    return b"}" + b")\x86".replace(b")", b"))") + b"q\x00h\x00\x86" * 60 + b"Ns"


TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n((\x8c\x07storagectorch\nFloatStorage\n\x8c\x010\x8c\x03cpu"
BOMBS: dict[str, bytes] = {
    "a key of tuples of tuples": a_pickle(tuples_of_tuples()),
    "a text of many bytes": a_pickle(b"\x8d" + (2**40).to_bytes(8, "little")),
    "bytes of many bytes": a_pickle(b"\x8e" + (2**40).to_bytes(8, "little")),
    "a long integer": a_pickle(b"\x8b" + (2**31 - 1).to_bytes(4, "little")),
    "a place far out in the memo": a_pickle(b"Nr\xff\xff\xff\xff"),
    "many levels": a_pickle(b"]" * 30_000 + b"a" * 29_999),
    "one text encoded again and again": a_pickle(
        b"(c_codecs\nencode\nq\x00X"
        + (10**6).to_bytes(4, "little")
        + b"a" * 10**6
        + b"X\x06\x00\x00\x00latin1\x86q\x01"
        + b"h\x00h\x01R" * 10**4
        + b"t"
    ),
    "one list made a set again and again": a_pickle(
        b"(c__builtin__\nset\nq\x00](" + b"K\x01" * 10**5 + b"e\x85q\x01" + b"h\x00h\x01R" * 10**4 + b"t"
    ),
    "nothing": b"",
    "no end": b"\x80\x04N",
    "more than was put down": a_pickle(b"\x87\x87"),
    "a list that holds itself": a_pickle(b"]q\x00h\x00a"),
    "decimals": a_pickle(b"I" + b"9" * 10**5 + b"\n"),
    "a tensor of a large storage": a_pickle(TENSOR + b"\x8a\x05\x00\x00\x00\x00\x10tQK\x00K\x01\x85K\x01\x85\x89}tR"),
    "a small storage, a large tensor": a_pickle(
        TENSOR + b"K\x80tQK\x00\x8a\x05\x00\x00\x00\x00\x10\x85K\x00\x85\x89}tR"
    ),
    "beyond its storage": a_pickle(TENSOR + b"K\x80tQK\x7fK\x02\x85K\x01\x85\x89}tR"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", BOMBS)
def test_a_pickle_that_grows(name: str, place: str, where: Path, outside: Path) -> None:
    PLACES[place](where, BOMBS[name])
    hold(where, outside)


@pytest.mark.parametrize("name", [name for name in BOMBS if "again and again" in name])
def test_repeated_copies_of_one_argument_end_early(name: str) -> None:
    """Refused early, not when memory runs out."""
    with pytest.raises(ValueError, match="builds far more data than it holds"):
        read_pickle(BOMBS[name], torch_files._VALUES)


ARCHIVES: dict[str, Callable[[], bytes]] = {
    "compressed": lambda: archive(b"N" * 10**8, how=zipfile.ZIP_DEFLATED),
    "no pickle": lambda: archive(a_pickle(b"N")).replace(b"data.pkl", b"data.pk!"),
    "an order of bytes": lambda: archive(a_pickle(b"}")).replace(b"little", b"bigger"),
    "no archive": lambda: b"PK\x03\x04" + bytes(100) + b"PK\x05\x06" + bytes(18),
    "records that claim more": lambda: archive(a_pickle(b"}")).replace(
        len(a_pickle(b"}")).to_bytes(4, "little") * 2, (2**31).to_bytes(4, "little") * 2
    ),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_that_is_none(name: str, where: Path, outside: Path) -> None:
    raw = ARCHIVES[name]()
    (where / folder.PROGRESS).write_bytes(digested(raw))
    sealed(where)
    hold(where, outside)


# --- files --------------------------------------------------------------------------------------------------------

NAMES = (folder.MANIFEST, folder.INDEX, folder.PROGRESS, folder.PLAN, METADATA, SHARD)


def fifo(path: Path, outside: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path, outside: Path) -> None:
    """Replace the file by a link to the very same bytes elsewhere."""
    away = outside.with_name(f"away{path.name}")
    shutil.move(path, away)
    path.symlink_to(away)


def relative_link(path: Path, outside: Path) -> None:
    shutil.copy(path, path.with_name("beside"))
    path.unlink()
    path.symlink_to("beside")


def device(path: Path, outside: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def a_folder(path: Path, outside: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("harm", [fifo, link, relative_link, device, a_folder])
@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_none(name: str, harm: Harm, where: Path, outside: Path) -> None:
    harm(where / name, outside)
    hold(where, outside)


@pytest.mark.parametrize("harm", [fifo, link, device, a_folder])
def test_a_pointer_that_is_no_file(harm: Harm, where: Path, outside: Path) -> None:
    harm(where.parent / folder.LATEST, outside)
    assert refused(lambda: running().load(where.parent)) and refused(lambda: folder.find(where.parent))


def test_a_pointer_that_is_endless_or_a_step_that_is_a_link(where: Path, outside: Path) -> None:
    with (where.parent / folder.LATEST).open("wb") as file:
        file.truncate(2**40)
    assert refused(lambda: running().load(where.parent))
    shutil.move(where, outside.with_name("moved"))
    where.symlink_to(outside.with_name("moved"))
    (where.parent / folder.LATEST).write_text(where.name)
    assert refused(lambda: running().load(where.parent)) and folder.checkpoints(where.parent) == []


KEY, MOMENT = "model.0.weight", "optimizer.0.weight.exp_avg"


def chunk(data: dict[str, Any], key: str = KEY) -> list[Any]:
    return data["tensors"][key]["chunks"][0]


def of_index(change: Callable[[dict[str, Any]], Any]) -> Harm:
    return lambda where, outside: with_index(where, change)


def to_file(name: str) -> Harm:
    """Make the index read the first tensor from `name`, and list it in the manifest."""

    def harm(where: Path, outside: Path) -> None:
        told = name.replace("OUTSIDE", str(outside))
        with_index(where, lambda data: data["files"].__setitem__(0, told))
        sealed(where, lambda data: data["files"].update({told: {"bytes": 6000, "sha256": "0" * 64}}))

    return harm


def swapped_rows(data: dict[str, Any]) -> None:
    row = chunk(data)
    row[1:3] = chunk(data, MOMENT)[1:3]


def overlapping(data: dict[str, Any]) -> None:
    """Make two boxes with as many elements as the whole tensor, the second overlapping the first."""
    file, at, size, _, (rows, columns) = chunk(data)
    half = [file, at, size // 2, [0, 0], [rows // 2, columns]]
    data["tensors"][KEY]["chunks"] = [half, [file, at + size // 2, size // 2, [1, 0], [rows // 2, columns]]]


def widened(data: dict[str, Any]) -> None:
    data["tensors"][KEY]["shape"] = [2**40, 2**15]
    chunk(data)[2:] = [2**57, [0, 0], [2**40, 2**15]]


def nested(where: Path, name: str, depth: int, key: str) -> None:
    data = json.loads((where / name).read_text())
    data[key] = "DEEP"
    (where / name).write_text(json.dumps(data).replace('"DEEP"', "[" * depth + "]" * depth))


INDEXES: dict[str, Harm] = {
    "an absolute path": to_file("OUTSIDE"),
    "a path upwards": to_file("../../../outside"),
    "two dots": to_file(".."),
    "one dot": to_file("."),
    "a path inwards": to_file("inner/file"),
    "a name with a zero": to_file("a\0b"),
    "a name in colour": to_file("\x1b[31mred"),
    "a file that the manifest omits": of_index(lambda data: data["files"].__setitem__(0, "beside")),
    "a file that is there, but omitted": lambda where, outside: (
        (where / "beside").write_bytes((where / SHARD).read_bytes()),
        with_index(where, lambda data: data["files"].__setitem__(0, "beside")),
    ),
    "an omitted index": lambda where, outside: sealed(where, lambda data: data["files"].pop(folder.INDEX)),
    "an omitted shard": lambda where, outside: sealed(where, lambda data: data["files"].pop(SHARD)),
    "omitted progress": lambda where, outside: sealed(where, lambda data: data["files"].pop(folder.PROGRESS)),
    "beyond the file": of_index(lambda data: chunk(data).__setitem__(1, 10**6)),
    "before the file": of_index(lambda data: chunk(data).__setitem__(1, -4)),
    "more bytes than elements": of_index(lambda data: chunk(data).__setitem__(2, 10**12)),
    "bytes of another tensor": of_index(swapped_rows),
    "another type of the same size": of_index(lambda data: data["tensors"][KEY].update(dtype="int32")),
    "a type of no tensor": of_index(lambda data: data["tensors"][KEY].update(dtype="object")),
    "a type that is no text": of_index(lambda data: data["tensors"][KEY].update(dtype=["float32"])),
    "a large shape": of_index(widened),
    "a shape beyond all": of_index(lambda data: data["tensors"][KEY].update(shape=[2**62, 2**62, 0])),
    "many dims": of_index(lambda data: data["tensors"][KEY].update(shape=[1] * 10**5)),
    "a negative dim": of_index(lambda data: data["tensors"][KEY].update(shape=[-16, -8])),
    "a dim that is true": of_index(lambda data: data["tensors"][KEY].update(shape=[True, 8])),
    "a dim that is none": of_index(lambda data: data["tensors"][KEY].update(shape=[16.0, 8])),
    "no chunks": of_index(lambda data: data["tensors"][KEY].update(chunks=[])),
    "a chunk twice": of_index(lambda data: data["tensors"][KEY]["chunks"].append(chunk(data))),
    "chunks on top of each other": of_index(overlapping),
    "a chunk outside of its tensor": of_index(lambda data: chunk(data).__setitem__(3, [1, 0])),
    "a chunk of other dims": of_index(lambda data: chunk(data).__setitem__(3, [0])),
    "a file of no number": of_index(lambda data: chunk(data).__setitem__(0, 99)),
    "a file before the first": of_index(lambda data: chunk(data).__setitem__(0, -1)),
    "a name with commands for terminals": of_index(
        lambda data: data["tensors"].update({"model.\x1b[2J": data["tensors"].pop(KEY)})
    ),
    "a name of half a character": of_index(
        lambda data: data["tensors"].update({"model.\ud800": data["tensors"].pop(KEY)})
    ),
    "another byte order": of_index(lambda data: data.update(byteorder="big")),
    "another format": of_index(lambda data: data.update(format=2)),
    "one more field": of_index(lambda data: data.update(code="import os")),
    "tensors in a list": of_index(lambda data: data.update(tensors=list(data["tensors"]))),
    "a moment of another shape": of_index(
        lambda data: data["tensors"].update(
            {"optimizer.0.weight.exp_avg": data["tensors"].pop("optimizer.0.bias.exp_avg")}
        )
    ),
    "a lost moment": of_index(lambda data: data["tensors"].pop(MOMENT)),
    "a lost count": of_index(lambda data: data["tensors"].pop("counts.0.weight.step")),
    "a deep index": lambda where, outside: (nested(where, folder.INDEX, 10**5, "files"), sealed(where)),
    "a deep, open index": lambda where, outside: (
        (where / folder.INDEX).write_text('{"a":' * 10**5),
        sealed(where),
    ),
    "a huge index": lambda where, outside: (
        (where / folder.INDEX).write_text(json.dumps({"tensors": [[]] * 10**6})),
        sealed(where),
    ),
    "a number without an end": lambda where, outside: (
        (where / folder.INDEX).write_text((where / folder.INDEX).read_text().replace(":1", ":" + "1" * 5000, 1)),
        sealed(where),
    ),
    "no text": lambda where, outside: ((where / folder.INDEX).write_bytes(b"\xff\xfe" * 50), sealed(where)),
}


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_that_claims(name: str, where: Path, outside: Path) -> None:
    if name in ("another type of the same size", "a moment of another shape", "a lost moment", "a lost count"):
        INDEXES[name](where, outside)  # consistent in itself, but not this model's
        assert refused(lambda: running().load(where))
        return
    INDEXES[name](where, outside)
    hold(where, outside)


def test_sizes_that_the_manifest_claims_too_are_refused_before_anything_is_allocated(
    where: Path, outside: Path
) -> None:
    """The manifest claims a quarter of a terabyte for each tensor, in a shard of a few kilobytes."""
    large = 2**38

    def claim(data: dict[str, Any]) -> None:
        for n, (key, tensor) in enumerate(sorted(data["tensors"].items())):
            if key.startswith("model."):
                tensor.update(shape=[large // 4], chunks=[[0, n * large, large, [0], [large // 4]]])

    with_index(where, claim)
    listed(bytes=10 * large)(where, outside)
    hold(where, outside)
    assert refused(lambda: contents.read_whole(where))
    os.truncate(where / SHARD, 10 * large)  # a sparse file can be arbitrarily long
    assert refused(lambda: contents.read_whole(where))


def test_an_index_is_refused_by_itself() -> None:
    """Refused before data is read: ranges beyond the end of a file, and overlapping bytes."""
    box = index.Chunk("a", 0, 16, (0,), (4,))
    tensor = index.SavedTensor(torch.float32, (4,), (box,))
    index.check({"x": tensor}, {"a": 16})
    for wrong, size in (({"x": tensor}, 15), ({"x": tensor, "y": tensor}, 64)):
        with pytest.raises(ValueError, match=r"reaches to byte 16 of a, which has 15|share bytes of a"):
            index.check(wrong, {"a": size})


def test_what_an_attacker_left_for_the_next_save(where: Path, outside: Path) -> None:
    """Links and FIFOs with the names that saving writes to."""
    root = where.parent
    (root / ".latest.part").symlink_to(outside)
    (root / ".trial-of-rank-0").symlink_to(outside)
    assert running().resume(root) == 1
    os.mkfifo(root / ".trial-of-rank-0")
    assert running().resume(root) == 1
    running().save(root)
    (root / ".step-00000009.part").symlink_to(outside.parent)
    assert refused(lambda: running().save(root))
    assert outside.read_bytes() == b"secret" * 1000 and not (root / folder.LATEST).is_symlink()


def manifest(**fields: Any) -> Harm:
    return lambda where, outside: sealed(where, lambda data: data.update(fields))


def listed(**fields: Any) -> Harm:
    return lambda where, outside: sealed(where, lambda data: data["files"][SHARD].update(fields))


def rewritten(where: Path, text: str) -> None:
    (where / folder.MANIFEST).write_text(text)


MANIFESTS: dict[str, Harm] = {
    "another digest of its own": lambda where, outside: rewritten(
        where, (where / folder.MANIFEST).read_text().replace('"AdamW"', '"AdamX"')
    ),
    "no digest of its own": lambda where, outside: rewritten(
        where, (where / folder.MANIFEST).read_text().replace('"sha256": "', '"sha255": "')
    ),
    "the older form of a newer one": manifest(format=1),
    "the older form, with an index": lambda where, outside: sealed(
        where, lambda data: (data.update(format=1), data.pop("sha256"), data.pop("buffers"))
    ),
    "a format to come": manifest(format=3),
    "a format that is true": manifest(format=True),
    "another step": manifest(step=7),
    "a step below zero": manifest(step=-1),
    "a step beyond all": manifest(step=2**63),
    "a file upwards": lambda where, outside: sealed(
        where, lambda data: data["files"].update({"../outside": {"bytes": 6000, "sha256": "0" * 64}})
    ),
    "a size that is none": listed(bytes=-1),
    "another size": listed(bytes=10**15),
    "a digest that is none": listed(sha256="0" * 63 + "\n"),
    "another digest": listed(sha256="0" * 64),
    "commands for terminals": manifest(model="\x1b]0;owned\x07"),
    "an optimizer in colour": manifest(optimizer="\x1b[31mAdamW"),
    "a deep configuration": lambda where, outside: nested(where, folder.MANIFEST, 500, "config"),
    "a deeper configuration": lambda where, outside: nested(where, folder.MANIFEST, 10**5, "config"),
    "thousands of mistakes": manifest(tensors={f"a{n}": [-1] for n in range(20_000)}),
    "one long mistake": manifest(tensors={"a": [-1] * 10**6}),
    "fields without an end": manifest(**{f"a{n}": n for n in range(20_000)}),
    "a large manifest": lambda where, outside: os.truncate(where / folder.MANIFEST, 2**40),
    "a list": lambda where, outside: rewritten(where, "[]"),
    "infinity": lambda where, outside: rewritten(where, '{"format": 2, "step": Infinity}'),
    "no text": lambda where, outside: (where / folder.MANIFEST).write_bytes(b"\xff\xfe\x00" * 50),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_claims(name: str, where: Path, outside: Path) -> None:
    MANIFESTS[name](where, outside)
    hold(where, outside)


def option(name: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda data: data["optimizer"]["groups"][0].update({name: value})


PROGRESS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {  # the change, and the message when it is loaded
    "another step": (lambda data: data.update(step=0), "is of step 0, the manifest of step 1"),
    "a rate that is none": (option("lr", math.nan), "has lr = nan"),
    "an infinite rate": (option("lr", math.inf), "has lr = inf"),
    "a rate in a tensor": (option("lr", torch.tensor(math.nan)), "has lr = tensor"),
    "a pair that is none": (option("betas", (0.9, math.inf)), "has betas = "),
    "a lost rate": (lambda data: data["optimizer"]["groups"][0].pop("lr"), "lacks lr"),
    "a lost pair": (lambda data: data["optimizer"]["groups"][0].pop("betas"), "lacks betas"),
    "a rate in words": (option("lr", "fast"), "has lr = 'fast'"),
    "a pair of one": (option("betas", (0.9,)), "has betas = "),
    "another optimizer": (lambda data: data["optimizer"].update({"class": "SGD\x1b"}), "trained by SGD"),
    "another number of groups": (lambda data: data["optimizer"].update(groups=[]), "has 0 parameter groups"),
    "groups that are none": (lambda data: data["optimizer"].update(groups=[3]), "optimizer.groups"),
    "a seed in words": (lambda data: data["random"].update(seed="x"), "random.seed"),
    "a seed beyond all": (lambda data: data["random"].update(seed=2**70), "random.seed"),
    "a scale that is none": (lambda data: data.update(loss_scale={"scale": math.nan}), "the loss scale has"),
    "a scale without its steps": (
        lambda data: data.update(loss_scale={"scale": 1.0}),
        "the loss scale has growth_factor",
    ),
    "a scale in words": (lambda data: data.update(loss_scale={"scale": "1"}), "the loss scale has scale = '1'"),
    "no others": (lambda data: data.pop("others"), "others"),
}


@pytest.mark.parametrize("name", PROGRESS)
def test_progress_that_claims(name: str, where: Path, outside: Path) -> None:
    change, said = PROGRESS[name]
    with_progress(where, change)
    before = state(running())
    with pytest.raises(CheckpointError) as caught:
        running().load(where)
    assert said in str(caught.value) and str(where) in str(caught.value)
    assert same(state(running()), before)


def test_progress_of_another_checkpoint_or_without_its_digest(where: Path, outside: Path) -> None:
    raw = (where / folder.PROGRESS).read_bytes()
    for spoilt in (
        raw[:-1] + bytes([raw[-1] ^ 1]),
        raw[:-66] + bytes(2),
        raw[:300] + bytes([raw[300] ^ 1]) + raw[301:],
    ):
        (where / folder.PROGRESS).write_bytes(spoilt)
        sealed(where)
        hold(where, outside)


# --- commands, and what is reported -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pickle", "fifo", "outside", "manifest"])
def test_the_commands_say_one_thing(name: str, where: Path, outside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "pickle":
        into_index(where, command(("pathlib", "attrgetter", "system"), outside))
    elif name == "fifo":
        fifo(where / folder.INDEX, outside)
    else:
        {"outside": INDEXES["an absolute path"], "manifest": MANIFESTS["thousands of mistakes"]}[name](where, outside)
    for words in (["inspect"], ["check"], ["export", "--out", str(outside.with_name("exported"))]):
        code = main(["checkpoint", words[0], str(where), *words[1:]])
        out, err = capsys.readouterr()
        assert code == 2 or (code == 1 and "is not a regular file" in out), (words, code, out)
        assert "none damaged" not in out and "Traceback" not in err and err.count("autoptd: ") == (code == 2)
    assert not outside.with_name("exported").exists() and not outside.with_name("mark").exists()


def test_what_is_not_finite_is_reported(good: Path, where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parameters and moments that are not finite are reported; a buffer may be infinite."""
    found = index.read_index(where, {path.name: path.stat().st_size for path in where.iterdir()})
    raw = bytearray((where / SHARD).read_bytes())
    names = (KEY, "optimizer.3.bias.exp_avg", "model.2.scale")
    for key in names:
        at = found[key].chunks[0].at
        raw[at : at + 4] = b"\x00\x00\x80\x7f"
    (where / SHARD).write_bytes(raw)
    sealed(where)
    assert main(["checkpoint", "check", str(where)]) == 0
    out = capsys.readouterr().out
    before = state(running())
    with pytest.warns(UserWarning, match="1 of 128 elements are not finite") as caught:
        running().load(where)
    told = str(caught[0].message)
    assert all((key in out) == (key in told) == (key != names[2]) for key in names)
    assert not same(state(running()), before)
    running().load(good)


def test_a_state_that_could_not_be_read_again_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    class Keeps:
        def state_dict(self) -> dict[str, Any]:
            return {"at": Path("/")}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError

    with pytest.raises(CheckpointError, match="cannot be saved in a checkpoint"):
        running().save(tmp_path, others={"keeps": Keeps()})
