"""Safe reading and writing of files: atomic, never through a symbolic link, never those of another user; and the
process's own streams.

    write_whole      writes to an unpredictable name in the same folder, then renames
    make_folder      makes a folder that files are written into
    private_folder   makes a temporary folder for this user alone, until the process ends
    read_own         reads a file that only this user could have written
    to_stderr        prints a message to standard error, if that can be written
    exit_now         ends the process, whether or not standard output can be written

A link in place of a file is always refused. A folder may be a link, since people make these on purpose, unless another
user has put the link into a world-writable folder such as /tmp (the case that Linux's `protected_symlinks` covers).
"""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import stat
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NoReturn

from autoptd.errors import PlanFileError
from autoptd.text import printable

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_ELSEWHERE = "choose a file in an existing folder that you may write to"


def write_whole(path: Path, content: str | bytes, mode: int | None = None) -> None:
    """Write a file atomically. Raises PlanFileError, and then leaves nothing behind.

    The permissions are `mode`; without it, those of the file that is replaced, or they follow the user's umask.
    """
    refuse_unwritable(path)
    part = path.with_name(f".autoptd-{secrets.token_hex(8)}.part")
    try:
        data = content.encode() if isinstance(content, str) else content
        descriptor = os.open(part, _NEW, 0o666 if mode is None else mode)
        with os.fdopen(descriptor, "wb") as file:
            if mode is None and _kind(path):
                os.fchmod(descriptor, stat.S_IMODE(path.lstat().st_mode) & 0o777)
            file.write(data)
        part.replace(path)
    except (OSError, ValueError) as error:
        raise PlanFileError(f"cannot write {path}: {getattr(error, 'strerror', error)}", where=str(path)) from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def refuse_unwritable(path: Path) -> None:
    """Raise PlanFileError if `path` cannot be written now. Writes nothing."""
    what = _obstacle(path)
    if what:
        raise PlanFileError(f"cannot write {path}: {what}", where=str(path), fix=_ELSEWHERE)


def _obstacle(path: Path) -> str:
    kind = _kind(path)
    if stat.S_ISDIR(kind):
        return "it is a folder"
    if stat.S_ISLNK(kind):
        return "it is a link, which is not followed"
    if kind and not stat.S_ISREG(kind):
        return "it is not a regular file"
    if not path.parent.is_dir():
        return f"the folder {path.parent} does not exist"
    if link := _planted_link(path.parent):
        return f"{link} is a link that another user has put there"
    return "" if os.access(path.parent, os.W_OK | os.X_OK) else f"no permission in {path.parent}"


def _kind(path: Path) -> int:
    """Return the file type at `path`, without following a link; 0 if there is none."""
    try:
        return stat.S_IFMT(path.lstat().st_mode)
    except (OSError, ValueError):
        return 0


def _planted_link(folder: Path) -> Path | None:
    """Return the first link in a folder's path that another user has put into a world-writable folder."""
    for place in (folder.absolute(), *folder.absolute().parents):
        if stat.S_ISLNK(_kind(place)):
            mine, above = place.lstat(), place.parent.stat()
            if above.st_mode & stat.S_IWOTH and mine.st_uid not in (os.getuid(), above.st_uid):
                return place
    return None


def make_folder(path: Path) -> Path:
    """Return `path` after making it, with its parents, if needed. Raises PlanFileError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        what, where = getattr(error, "strerror", error), getattr(error, "filename", None) or path
        raise PlanFileError(f"cannot make the folder {path}: {what}", where=str(where), fix=_ELSEWHERE) from error
    if link := _planted_link(path):
        what = f"cannot write into {path}: {link} is a link that another user has put there"
        raise PlanFileError(what, where=str(path), fix=_ELSEWHERE)
    return path


@cache
def private_folder() -> Path:
    """Return a temporary folder that only this user may enter; it is removed when the process ends."""
    folder = tempfile.mkdtemp(prefix="autoptd-")  # with mode 0700
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def read_own(path: Path) -> bytes:
    """Read a file that this user wrote. Raises OSError if another user owns it or may write to it, or it is a link or
    not a regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not _is_own(os.fstat(descriptor)):
            raise PermissionError(f"{path} is not a regular file that only this user may write")
        return file.read()


def _is_own(found: os.stat_result) -> bool:
    """Return whether this is a regular file of this user that no other user may write to."""
    mine = found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISREG(found.st_mode) and mine


def to_stderr(text: str) -> None:
    """Print a message to standard error, unless that is closed, a pipe without a reader, or a file on a full disk."""
    with suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(f"autoptd: {printable(text)}\n")
        sys.stderr.flush()


def exit_now(status: int) -> NoReturn:
    """End the process without handlers at exit; what standard output holds is written before, if it can be."""
    with suppress(AttributeError, OSError, ValueError):
        sys.stdout.flush()
    os._exit(status)
