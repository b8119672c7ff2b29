"""`latest` names only complete checkpoints, wherever a writer dies."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoptd.checkpoint import folder
from autoptd.errors import CheckpointError


def write(root: Path, step: int, keep: int | None = None, text: str = "tensors") -> Path:
    part = folder.prepare(root, step)
    (part / "data").write_text(f"{text} of {step}")
    manifest: dict[str, Any] = {"tensors": {}, "aliases": {}, "optimizer": "AdamW"}
    return folder.commit(root, step, manifest, {"data": folder.digest(part / "data")}, keep)


def is_whole(path: Path) -> bool:
    files = folder.read_manifest(path)["files"]
    return not any(folder.damage(path, name, expected) for name, expected in files.items())


def test_the_latest_is_found_and_older_ones_go(tmp_path: Path) -> None:
    for step in (1, 2, 30):
        write(tmp_path, step, keep=2)
    assert [path.name for path in folder.checkpoints(tmp_path)] == ["step-00000002", "step-00000030"]
    assert folder.find(tmp_path).name == "step-00000030"
    assert folder.find(tmp_path / "step-00000002").name == "step-00000002"


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_as_many_are_kept_as_asked(tmp_path: Path, keep: int) -> None:
    for step in range(1, 5):
        write(tmp_path, step, keep=keep)
        assert len(folder.checkpoints(tmp_path)) == min(step, keep)


def test_a_run_that_went_back_writes_its_own(tmp_path: Path) -> None:
    write(tmp_path, 5, text="old")
    write(tmp_path, 9)
    write(tmp_path, 5, text="new")
    assert (folder.find(tmp_path) / "data").read_text() == "new of 5"
    write(tmp_path, 6, keep=2)
    assert [path.name for path in folder.checkpoints(tmp_path)] == ["step-00000005.1", "step-00000006"]


def test_checkpoints_that_were_copied_keep_their_order(tmp_path: Path) -> None:
    """A copy has files of its own times, here in the opposite order: the oldest goes, and the newest is tried first."""
    for step in (10, 20, 30):
        write(tmp_path, step)
    for age, step in enumerate((30, 20, 10)):
        os.utime(tmp_path / folder.name_of(step) / folder.MANIFEST, ns=(age, age))
    assert [path.name for path in folder.newest_first(tmp_path)] == [folder.name_of(n) for n in (30, 20, 10)]
    write(tmp_path, 40, keep=3)
    assert [path.name for path in folder.checkpoints(tmp_path)] == [folder.name_of(n) for n in (20, 30, 40)]


def test_checkpoints_are_in_order_though_the_clock_went_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 10)
    monkeypatch.setattr(folder.time, "time_ns", lambda: 1)
    write(tmp_path, 20)
    assert [path.name for path in folder.newest_first(tmp_path)] == [folder.name_of(20), folder.name_of(10)]


def test_a_folder_with_the_name_of_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / folder.name_of(3)).mkdir()  # such as one that somebody has emptied
    assert write(tmp_path, 3).name == "step-00000003.1"
    assert folder.find(tmp_path).name == "step-00000003.1" and (tmp_path / folder.name_of(3)).is_dir()


def test_killed_while_an_older_one_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rmtree_of_one_file(path: Path) -> None:
        (path / folder.MANIFEST).unlink()
        raise Died

    write(tmp_path, 1)
    with monkeypatch.context() as patch, pytest.raises(Died):
        patch.setattr(shutil, "rmtree", rmtree_of_one_file)
        write(tmp_path, 2, keep=1)
    assert folder.find(tmp_path).name == "step-00000002"
    write(tmp_path, 1)  # of a run that began anew
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001", "step-00000002"]


class Died(BaseException):
    """The process is killed here."""


def dying(at: int) -> tuple[Callable[[str, Callable[..., Any]], Callable[..., Any]], list[str]]:
    """Return a wrapper of file operations that lets `at` of them succeed and then dies, and the list of those seen."""
    seen: list[str] = []

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            if len(seen) == at:
                raise Died
            seen.append(name)
            return real(*args, **kwargs)

        return operation

    return wrap, seen


@pytest.mark.parametrize("again", [False, True])
def test_killed_before_any_file_operation_the_latest_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """`again`: an older checkpoint of the same step is already there."""
    operations = [(Path, "rename"), (Path, "replace"), (Path, "mkdir"), (os, "fsync"), (shutil, "rmtree")]
    at, done = 0, False
    while not done:
        root = tmp_path / str(at)
        write(root, 1)
        write(root, 2)
        wrap, seen = dying(at)
        with monkeypatch.context() as patch:
            for owner, name in operations:
                patch.setattr(owner, name, wrap(name, getattr(owner, name)))
            try:
                write(root, 2 if again else 3, keep=1, text="new")
                done = True
            except Died:
                pass
        found = folder.find(root)
        assert is_whole(found), (at, seen)
        at += 1
        assert is_whole(write(root, 4))  # the next writer is not blocked by leftovers
    assert at > 6


@pytest.mark.parametrize("harm", ["missing", "shorter", "flipped"])
def test_damage_names_the_file(tmp_path: Path, harm: str) -> None:
    path = write(tmp_path, 1)
    expected = folder.read_manifest(path)["files"]["data"]
    data = (path / "data").read_bytes()
    if harm == "missing":
        (path / "data").unlink()
    else:
        (path / "data").write_bytes(data[:-1] if harm == "shorter" else bytes([data[0] ^ 1]) + data[1:])
    assert folder.damage(path, "data", expected).startswith("data ")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 99}', '{"format": 1, "step": "x"}'])
def test_a_manifest_that_is_none(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, 1)
    (path / folder.MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match="checkpoint"):
        folder.read_manifest(path)


@pytest.mark.parametrize("text", ["step-00000007", "../other", "", "\x00"])
def test_latest_that_names_nothing(tmp_path: Path, text: str) -> None:
    write(tmp_path, 1)
    (tmp_path / folder.LATEST).write_text(text)
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        folder.find(tmp_path)


def test_nothing_here(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        folder.find(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        folder.prepare(tmp_path / "file" / "inside", 1)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Function that goes on as another process, by number."""
    seen: dict[int, dict[Path, Any]] = {}
    return lambda number: monkeypatch.setattr(folder, "_SEEN", seen.setdefault(number, {}))


def save(root: Path, step: int, keep: int | None = None) -> Path:
    leave = folder.of_other_runs(root)
    part = folder.prepare(root, step)
    (part / "data").write_text(f"tensors of {step}")
    manifest: dict[str, Any] = {"tensors": {}, "aliases": {}, "optimizer": "AdamW"}
    return folder.commit(root, step, manifest, {"data": folder.digest(part / "data")}, keep, leave)


def test_two_processes_do_not_replace_each_other_s_checkpoints(tmp_path: Path, processes: Callable[[int], None]):
    processes(0)
    for step in (5, 9):
        save(tmp_path, step, keep=1)
    processes(1)
    for step in (5, 6, 9, 10):
        save(tmp_path, step, keep=2)
    names = ["step-00000009", "step-00000009.1", "step-00000010"]
    assert [path.name for path in folder.checkpoints(tmp_path)] == names
    processes(0)
    with pytest.raises(
        CheckpointError, match=r"another process has saved step-00000010 into .* end this one and resume"
    ):
        save(tmp_path, 11, keep=1)
    folder.goes_on_from(tmp_path)
    save(tmp_path, 11, keep=1)
    assert [path.name for path in folder.checkpoints(tmp_path)] == ["step-00000011"]


def test_a_folder_whose_latest_somebody_removed_may_be_written(tmp_path: Path, processes: Callable[[int], None]):
    processes(0)
    save(tmp_path, 1)
    (tmp_path / folder.LATEST).unlink()
    save(tmp_path, 2)
    shutil.rmtree(tmp_path / "step-00000002")
    save(tmp_path, 3)
    assert folder.find(tmp_path).name == "step-00000003"


def test_what_another_process_removes_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It removes file by file: without another name, the rest would become a checkpoint."""
    write(tmp_path, 1)
    part = folder.prepare(tmp_path, 2)
    (part / "data").write_text("tensors")
    monkeypatch.setattr(shutil, "rmtree", lambda path: (path / "data").unlink())
    folder.prepare(tmp_path, 3)
    with pytest.raises(OSError):
        folder.commit(tmp_path, 2, {"tensors": {}, "aliases": {}, "optimizer": "AdamW"}, {}, keep=1)
    assert folder.find(tmp_path).name == "step-00000001" and is_whole(folder.find(tmp_path))
