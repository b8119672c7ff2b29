"""Entries of kept traces: when one is found, when it is not, and what may never be read."""

from __future__ import annotations

import hashlib
import os
import sys
import time
import types
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch

import autoptd
from autoptd.compile.traced import TracedModel
from autoptd.layout.size_conditions import SizeCondition
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.passes.trace.traced import BATCH
from autoptd.trace_cache import depends_on, folder
from autoptd.trace_cache.cached import TraceEntry
from autoptd.trace_cache.depends_on import are_settled, are_unchanged, loaded_files, process_began_ns, surroundings
from autoptd.trace_cache.folder import TraceFolder, default_folder

OF = ["configuration", "name", {"seq": 16}]
AGES = 10**10  # ns since 1970 of a file that changed long ago


@cache
def traced() -> TracedModel:
    with torch.device("meta"):
        model = NanoGPT(GPTSizes(vocab=64, max_seq=16, width=32, layers=2, heads=2))
    return autoptd.trace(model, seq=16)


@pytest.fixture(autouse=True)
def files_are_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a fresh checkout changed just now."""
    monkeypatch.setattr(depends_on, "_SETTLED_NS", -(10**18))


@pytest.fixture
def kept(tmp_path: Path) -> TraceFolder:
    """A folder with one trace, of `OF`."""
    found = TraceFolder(tmp_path / "cache")
    traced()  # imports torch._dynamo, which sets a variable, after a command has made its entry
    assert entry(found).keep(traced())
    assert find(found) is not None
    return found


def entry(kept: TraceFolder, of: Any = None) -> TraceEntry:
    return TraceEntry(kept, OF if of is None else of)


def find(kept: TraceFolder, of: Any = None) -> TracedModel | None:
    return entry(kept, of).find(lambda: torch.nn.Linear(1, 1), lambda samples: traced())


def only(kept: TraceFolder) -> Path:
    (file,) = kept.path.iterdir()
    return file


# --- what makes it invalid ----------------------------------------------------------------------------------------


def test_it_is_what_was_kept(kept: TraceFolder):
    found = find(kept)
    assert found is not None
    assert (found.graph_hash, found.name, found.notes) == (traced().graph_hash, traced().name, traced().notes)
    assert found.sizes == traced().sizes and found.precision == traced().precision
    assert found.for_batch(8) is found


def test_the_module_and_other_batches_are_made_when_needed(kept: TraceFolder):
    asked: list[object] = []
    found = entry(kept).find(
        lambda: asked.append("module") or torch.nn.Linear(1, 1),  # type: ignore[func-returns-value]
        lambda samples: asked.append(samples) or traced(),  # type: ignore[func-returns-value]
    )
    assert found is not None and asked == []
    assert isinstance(found.model, torch.nn.Linear) and asked == ["module"]
    found.folded.traced.conditions = (SizeCondition(sympy.Gt(BATCH, 8), "model.py:1"),)
    assert found.for_batch(9) is found
    assert found.for_batch(8) is traced() and asked == ["module", 8]


@pytest.mark.parametrize(
    "of", [["another", "name", {"seq": 16}], ["configuration", "x", {"seq": 16}], ["configuration", "name", {"seq": 8}]]
)
def test_another_configuration_has_its_own(kept: TraceFolder, of: Any):
    assert find(kept, of) is None


@pytest.mark.parametrize(
    ("variable", "traces_again"),
    [
        *[(name, True) for name in ("TORCH_LOGS", "PYTORCH_JIT", "TRANSFORMERS_X", "HF_HOME", "AUTOPTD_X", "USE_TF")],
        *[(name, True) for name in ("TORCHDYNAMO_DISABLE", "CUDA_VISIBLE_DEVICES", "ATEN_CPU_CAPABILITY")],
        *[(name, False) for name in ("WINDOWID", "SSH_CLIENT", "AUTOPTD_CACHE", "TERM")],
    ],
)
def test_variables(kept: TraceFolder, monkeypatch: pytest.MonkeyPatch, variable: str, traces_again: bool):
    monkeypatch.setenv(variable, "another value")
    assert (find(kept) is None) == traces_again


def test_another_python(kept: TraceFolder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "version", "3.99")
    assert find(kept) is None


@pytest.mark.parametrize("name", ["fused_kernels", "fused_kernels.py", "fused_kernels-2.0.dist-info"])
def test_a_package_that_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    """transformers traces other kernels once it finds them, though none of its files has changed."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    found = TraceFolder(tmp_path / "cache")
    assert entry(found).keep(traced()) and find(found) is not None
    (site / "plan.json").write_text("{}")
    (site / "__pycache__").mkdir()
    assert find(found) is not None
    (site / name).mkdir()
    assert find(found) is None


def test_a_package_that_is_installed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    begun = entry(TraceFolder(tmp_path / "cache"))
    (site / "fused_kernels").mkdir()
    assert not begun.keep(traced())


def touch(file: Path) -> None:
    os.utime(file, ns=(AGES, AGES + 1))


def rewrite(file: Path) -> None:
    """Change the contents, neither the size nor the time."""
    file.write_text("two")
    os.utime(file, ns=(AGES, AGES))


@pytest.mark.parametrize("change", [touch, rewrite, Path.unlink, lambda file: file.write_text("more")])
def test_a_loaded_file_that_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], Any]):
    file = tmp_path / "loaded.py"
    file.write_text("one")
    os.utime(file, ns=(AGES, AGES))
    module = types.ModuleType("loaded")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "loaded", module)
    found = TraceFolder(tmp_path / "cache")
    assert entry(found).keep(traced()) and find(found) is not None
    change(file)
    assert find(found) is None


def test_files_of_all_libraries_are_looked_at():
    paths = {path for path, *_ in loaded_files(sys.modules)}
    for name in ("autoptd.passes.fold", "torch", "sympy", "autoptd.trace_cache.cached", "torch._C"):
        assert sys.modules[name].__file__ in paths
    assert are_unchanged(loaded_files(sys.modules))


def test_what_changed_shortly_before_may_have_been_loaded_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: TraceFolder
):
    monkeypatch.setattr(depends_on, "_SETTLED_NS", 60 * 10**9)
    began = process_began_ns()
    minute = 60 * 10**9
    assert are_settled([("file", 1, began - 2 * minute, began - 2 * minute)], began)
    assert not are_settled([("file", 1, began - minute // 2, 0)], began)
    assert not are_settled([("file", 1, 0, began + minute)], began)  # put there with its old time
    monkeypatch.setattr(depends_on, "_SETTLED_NS", 10**18)
    assert find(kept) is None
    assert not entry(TraceFolder(tmp_path / "other")).keep(traced())
    assert not (tmp_path / "other").exists()


def test_the_process_began_before_now_and_after_the_machine():
    since_s = (time.time_ns() - process_began_ns()) / 1e9
    assert 0 <= since_s < 24 * 3600
    status = Path(f"/proc/{os.getpid()}").stat().st_ctime_ns if sys.platform == "linux" else process_began_ns()
    assert process_began_ns() <= status + 10**9


def test_surroundings_are_data():
    assert surroundings() == surroundings()


# --- what is never read -------------------------------------------------------------------------------------------


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-10])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-10] ^= 1
    file.write_bytes(data)


def other_digest(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[20] ^= 1
    file.write_bytes(data)


def other_version(file: Path) -> None:
    file.write_bytes(b"autoptd trace 0\n" + file.read_bytes()[16:])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def no_trace(file: Path) -> None:
    """Whole, and with the right digest, but not what was kept."""
    body = zlib.compress((2).to_bytes(8, "big") + b"[]" + b"not a pickle")
    file.write_bytes(b"autoptd trace 1\n" + hashlib.sha256(body).digest() + body)


def make_writable(file: Path) -> None:
    file.chmod(0o666)


def make_writable_by_group(file: Path) -> None:
    file.chmod(0o620)


def make_folder_writable(file: Path) -> None:
    file.parent.chmod(0o777)


def make_link(file: Path) -> None:
    elsewhere = file.parent.parent / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


def make_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


SPOILT = [
    cut,
    flip,
    other_digest,
    other_version,
    empty,
    no_trace,
    make_writable,
    make_writable_by_group,
    make_folder_writable,
    make_link,
    make_pipe,
]


@pytest.mark.parametrize("spoil", SPOILT, ids=lambda spoil: spoil.__name__)
def test_a_file_that_cannot_be_trusted_is_ignored(kept: TraceFolder, spoil: Callable[[Path], None]):
    spoil(only(kept))
    assert find(kept) is None
    kept.path.chmod(0o700)
    if not only(kept).is_symlink() and not only(kept).is_fifo():
        assert entry(kept).keep(traced()) and find(kept) is not None  # the next trace takes its place


def test_nothing_is_unpickled_before_it_is_trusted(kept: TraceFolder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("autoptd.trace_cache.cached.from_bytes", lambda data: pytest.fail("it is unpickled"))
    for spoil in (other_digest, make_writable):
        spoil(only(kept))
        assert find(kept) is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")
def test_files_and_folders_of_another_user_are_ignored(kept: TraceFolder):
    os.chown(only(kept), 12345, 12345)
    assert find(kept) is None
    os.chown(only(kept), 0, 0)
    assert find(kept) is not None
    os.chown(kept.path, 12345, 12345)
    assert find(kept) is None
    assert not entry(kept).keep(traced())


# --- what is written ----------------------------------------------------------------------------------------------


def test_files_are_this_user_s_alone(kept: TraceFolder):
    assert only(kept).stat().st_mode & 0o777 == 0o600
    assert kept.path.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_used_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "inside", Path("/proc/nowhere")):
        assert not entry(TraceFolder(path)).keep(traced())
        assert find(TraceFolder(path)) is None

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("autoptd.outputs.os.open", full)
    assert not entry(TraceFolder(tmp_path / "full")).keep(traced())
    monkeypatch.undo()
    assert list((tmp_path / "full").iterdir()) == []


def test_the_least_recently_used_go_first(kept: TraceFolder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(folder, "_ENTRIES", 3)
    first = only(kept)
    for number, of in enumerate("abc"):
        for file in kept.path.iterdir():
            os.utime(file, ns=(AGES + number, file.stat().st_mtime_ns - 10**9))
        assert find(kept) is not None  # used now
        assert entry(kept, of).keep(traced())
    assert first.exists() and len(list(kept.path.iterdir())) == 3
    assert find(kept, "a") is None and find(kept, "b") is not None and find(kept, "c") is not None


def test_bytes_are_bounded_and_leftovers_removed(kept: TraceFolder, monkeypatch: pytest.MonkeyPatch):
    size = only(kept).stat().st_size
    left, mine, running = (kept.path / name for name in (".autoptd-1.part", "notes.txt", ".autoptd-2.part"))
    for file in (left, mine, running):
        file.write_text("x")
    for file in (left, mine):
        os.utime(file, (1, 1))
    monkeypatch.setattr(folder, "_BYTES", size * 3 // 2)
    assert entry(kept, "another").keep(traced())
    assert not left.exists() and mine.exists() and running.exists()
    assert [find(kept) is None, find(kept, "another") is None] == [True, False]
    monkeypatch.setattr(folder, "_LARGEST", size // 2)
    assert not entry(kept, "third").keep(traced())


def test_a_trace_that_has_no_exact_copy_is_not_kept(tmp_path: Path):
    folded = traced().folded
    node = next(iter(folded.traced.graph.graph.nodes))
    for strange in (object(), lambda: None, torch.nn.Linear(1, 1), slice(1)):
        node.meta["strange"] = strange
        try:
            assert not entry(TraceFolder(tmp_path / "cache")).keep(traced())
        finally:
            del node.meta["strange"]
    assert not (tmp_path / "cache").exists()


def test_where_the_folder_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("AUTOPTD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert default_folder() == tmp_path / ".cache" / "autoptd"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_folder() == tmp_path / ".cache" / "autoptd"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_folder() == tmp_path / "xdg" / "autoptd"
    monkeypatch.setenv("AUTOPTD_CACHE", str(tmp_path / "mine"))
    assert default_folder() == tmp_path / "mine"
    monkeypatch.setenv("AUTOPTD_CACHE", "Off")
    assert default_folder() is None
