"""Safe access to files of a checkpoint from an untrusted source: regular files, in its folder, of bounded size.

A link may lead out of the folder, and opening a FIFO would block until there is a writer. Both are refused.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from autoptd.errors import CheckpointError

LOAD_OLDER = "load an older checkpoint: one of the other step-… folders"
_PLAIN = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9_.-]{1,200}")


def is_plain(name: object) -> bool:
    """Return whether this is the plain name of a file in a folder: no separator, no `..`, no control character."""
    return isinstance(name, str) and _PLAIN.fullmatch(name) is not None


def is_regular(path: Path) -> bool:
    """Return whether a path is a regular file, not a link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder, not a link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except (OSError, ValueError):
        return False


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading. Raises CheckpointError, without blocking, for a link, a FIFO or a device."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        kind = f"{path.name} is a link" if path.is_symlink() else f"{path.name} cannot be opened: {_reason(error)}"
        raise CheckpointError(kind, where=str(path), fix=LOAD_OLDER) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path.name} is not a regular file", where=str(path), fix=LOAD_OLDER)
    with os.fdopen(descriptor, "rb") as file:
        yield file


def read_small(path: Path, limit: int) -> bytes:
    """Return all bytes of a file. Raises CheckpointError, before reading, if there are more than `limit`."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise CheckpointError(
                f"{path.name} has {size} bytes, more than the limit of {limit}", where=str(path), fix=LOAD_OLDER
            )
        try:
            return file.read(limit)
        except OSError as error:
            raise CheckpointError(f"{path.name} cannot be read: {_reason(error)}", where=str(path)) from error


def read_json(path: Path, limit: int) -> Any:
    """Return the value of a JSON file. Raises CheckpointError as `read_small` does, and ValueError for invalid JSON.

    Garbage collection is off meanwhile: it would traverse a million new lists and take several times as long.
    """
    text = read_small(path, limit).decode("utf-8")
    collects = gc.isenabled()
    gc.disable()
    try:
        return json.loads(text)
    except (RecursionError, MemoryError) as error:
        raise ValueError(f"nested too deeply, or too large: {error}") from error
    finally:
        if collects:
            gc.enable()


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    found = hashlib.sha256()
    with opened(path) as file:
        while block := file.read(1 << 22):
            found.update(block)
    return found.hexdigest()


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
