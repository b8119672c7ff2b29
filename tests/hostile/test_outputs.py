"""Output files are written where they should be and nowhere else; files of other users are not read back."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from autoptd import boundary, outputs
from autoptd.cli.main import main
from autoptd.codegen.emit import Program
from autoptd.errors import PlanFileError
from autoptd.outputs import make_folder, private_folder, read_own, write_whole
from tests.sample_plan import sample_plan

VICTIM = "what was there before"
FILES = {"__init__.py": "# of a program\n", "stage_0.py": "# Written by autoptd from a plan\n", "plan.json": "{}\n"}
PROGRAM = Program(FILES, (("stage_0.py", "Stage0"),))


def command(*arguments: str) -> Callable[[Path], None]:
    """Run a command with the file as its last argument; raise PlanFileError if it reports that it cannot write it."""

    def run(path: Path) -> None:
        plan = path.parent / "source.json"
        plan.write_text(sample_plan().to_json())
        if main([arguments[0], str(plan), *arguments[1:], str(path)]) == 2:
            raise PlanFileError("told on standard error")

    return run


WRITERS: dict[str, Callable[[Path], None]] = {
    "a file": lambda path: write_whole(path, "new"),
    "a plan": lambda path: sample_plan().save(path),
    "an export": command("export", "--to", "json", "-o"),
    "arguments": command("export", "--to", "megatron", "-o"),
    "a trace": command("simulate", "--trace"),
}


def to_a_file(path: Path) -> None:
    path.symlink_to(path.parent / "victim")


def to_nothing(path: Path) -> None:
    path.symlink_to(path.parent / "made by following")


def to_a_folder(path: Path) -> None:
    (path.parent / "folder").mkdir()
    path.symlink_to(path.parent / "folder")


def to_a_device(path: Path) -> None:
    path.symlink_to(os.devnull)


def to_itself(path: Path) -> None:
    path.symlink_to(path)


OBSTACLES = {f.__name__: f for f in (to_a_file, to_nothing, to_a_folder, to_a_device, to_itself)}
OBSTACLES |= {"a pipe": lambda path: os.mkfifo(path), "a folder": lambda path: path.mkdir()}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def listing(folder: Path) -> dict[str, int]:
    return {path.name: path.lstat().st_mode for path in folder.rglob("*")}


@pytest.mark.parametrize("obstacle", OBSTACLES.values(), ids=OBSTACLES)
@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_nothing_is_written_through_it(
    writer: Callable[[Path], None], obstacle: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path, victim = tmp_path / "out.json", tmp_path / "victim"
    victim.write_text(VICTIM)
    (tmp_path / "source.json").write_text("")
    obstacle(path)
    before = listing(tmp_path)
    with pytest.raises(PlanFileError):
        writer(path)
    assert victim.read_text() == VICTIM
    assert listing(tmp_path) == before
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert said.count("autoptd:") <= 1


@pytest.mark.parametrize("obstacle", OBSTACLES.values(), ids=OBSTACLES)
def test_a_program_is_written_whole_or_not_at_all(obstacle: Callable[[Path], None], tmp_path: Path):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "victim").write_text(VICTIM)
    obstacle(folder / "stage_0.py")
    before = listing(folder)
    with pytest.raises(PlanFileError, match=r"stage_0\.py"):
        PROGRAM.write(folder)
    assert listing(folder) == before
    assert (folder / "victim").read_text() == VICTIM


@pytest.mark.parametrize("old", [".out.json.PID.part", "out.json.part", "out.json.tmp", "out.json~"])
def test_no_name_beside_it_can_be_foreseen(old: str, tmp_path: Path):
    old = old.replace("PID", str(os.getpid()))
    (tmp_path / "victim").write_text(VICTIM)
    (tmp_path / old).symlink_to(tmp_path / "victim")
    write_whole(tmp_path / "out.json", "new")
    assert (tmp_path / "victim").read_text() == VICTIM
    assert names_in(tmp_path) == sorted([old, "out.json", "victim"])


def test_a_second_name_of_the_file_keeps_what_it_had(tmp_path: Path):
    (tmp_path / "victim").write_text(VICTIM)
    os.link(tmp_path / "victim", tmp_path / "out.json")
    write_whole(tmp_path / "out.json", "new")
    assert (tmp_path / "victim").read_text() == VICTIM
    assert (tmp_path / "out.json").read_text() == "new"


def test_permissions_stay(tmp_path: Path):
    path = tmp_path / "out.json"
    umask = os.umask(0o027)
    try:
        write_whole(path, "new")
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o4600)
        write_whole(path, "newer")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(umask)


@pytest.mark.parametrize("failing", ["open", "fdopen", "fchmod"])
def test_what_was_there_stays_where_writing_fails(failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "out.json"
    path.write_text(VICTIM)

    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outputs.os, failing, full)
    with pytest.raises(PlanFileError, match="No space left on device"):
        write_whole(path, "new")
    monkeypatch.undo()
    assert path.read_text() == VICTIM
    assert names_in(tmp_path) == ["out.json"]


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "half \udc80", "no/such/folder"])
def test_a_name_that_no_file_can_have_is_one_error(name: str, tmp_path: Path):
    try:
        write_whole(tmp_path / name, "new")
    except PlanFileError as error:
        assert error.where
    else:
        assert name == "half \udc80"
        assert names_in(tmp_path) == [name]


def test_text_that_is_none_is_one_error(tmp_path: Path):
    with pytest.raises(PlanFileError, match="cannot write"):
        write_whole(tmp_path / "out.json", "\udc80")
    assert names_in(tmp_path) == []


# --- folders ------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_a_link_of_one_s_own_is_one(tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    PROGRAM.write(tmp_path / "link")
    assert (tmp_path / "real" / "stage_0.py").read_text() == FILES["stage_0.py"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a link to another user")
@pytest.mark.parametrize("below", ["", "out"])
def test_a_folder_that_another_user_planted_is_refused(below: str, tmp_path: Path):
    shared, real = tmp_path / "shared", tmp_path / "real"
    shared.mkdir()
    (real / "out").mkdir(parents=True)
    (shared / "link").symlink_to(real)
    os.lchown(shared / "link", 12345, 12345)
    (real / "stage_7.py").write_text(FILES["stage_0.py"])
    for mode, refused in ((0o755, False), (0o1777, True)):
        shared.chmod(mode)
        for write in (PROGRAM.write, lambda folder: sample_plan().save(folder / "plan.json")):
            if refused:
                with pytest.raises(PlanFileError, match="a link that another user has put there"):
                    write(shared / "link" / below)
            else:
                write(shared / "link" / below)


@pytest.mark.parametrize("path", ["file", "file/below", "loop"])
def test_a_folder_that_cannot_be_is_one_error(path: str, tmp_path: Path):
    (tmp_path / "file").write_text(VICTIM)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(PlanFileError, match="cannot make the folder"):
        make_folder(tmp_path / path)


def test_only_stages_of_an_earlier_program_are_removed(tmp_path: Path):
    mark = FILES["stage_0.py"]
    (tmp_path / "elsewhere").write_text(mark)
    (tmp_path / "stage_1.py").write_text(mark)
    (tmp_path / "stage_2.py").write_text("# mine\n")
    (tmp_path / "stage_3.py").write_bytes(b"\xff\xfe")
    (tmp_path / "stage_4.py").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "stage_5.py").symlink_to(tmp_path / "nowhere")
    (tmp_path / "stage_6.py").mkdir()
    os.mkfifo(tmp_path / "stage_7.py")
    PROGRAM.write(tmp_path)
    assert names_in(tmp_path) == sorted([*FILES, "elsewhere", *(f"stage_{i}.py" for i in range(2, 8))])
    assert (tmp_path / "elsewhere").read_text() == mark


def test_the_temporary_folder_is_private():
    folder = private_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.parent == Path(tempfile.gettempdir())
    assert not folder.is_symlink()


# --- what is read back --------------------------------------------------------------------------------------------


def another_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.getuid()
    monkeypatch.setattr(outputs.os, "getuid", lambda: user + 1)


def writable_by_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.chmod(0o666)


def linked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def a_pipe(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.unlink()
    os.mkfifo(path)


def gone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.unlink()


CHANGES = {f.__name__: f for f in (another_user, writable_by_all, linked, a_pipe, gone)}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_file_that_others_could_change_is_not_read(
    change: Callable[[Path, pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "x"
    write_whole(path, "text")
    assert read_own(path) == b"text"
    change(path, monkeypatch)
    with pytest.raises(OSError):
        read_own(path)


def test_the_launcher_s_record_is_not_written_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    path.symlink_to(tmp_path / "made by following")
    boundary._record("text")
    assert names_in(tmp_path) == ["error.json"]
    path.unlink()
    boundary._record("text")
    assert json.loads(path.read_text())["message"]["message"] == "text"


def test_read_own_reads_what_was_written(tmp_path: Path):
    write_whole(tmp_path / "x", "text")
    assert read_own(tmp_path / "x") == b"text"
    with pytest.raises(OSError, match=r"alone|directory"):
        read_own(tmp_path)
