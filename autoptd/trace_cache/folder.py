"""Files of kept traces: in a folder of this user alone, written whole, a bounded number, the least recently used first
to go.

    autoptd trace 1 ⏎   sha256 of the rest   zlib of: length of the stamps, stamps as JSON, trace as pickle

Reading a pickle runs code that it names. A file is read only if it belongs to this user and no other may write to it
or to its folder; and nothing is unpickled before its digest and all stamps are right.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from autoptd.errors import AutoptdError
from autoptd.outputs import make_folder, read_own, write_whole
from autoptd.trace_cache.depends_on import Stamp

VARIABLE = "AUTOPTD_CACHE"
OFF = "off"
_MAGIC = b"autoptd trace 1\n"
_SUFFIX = ".trace"
_DIGEST, _LENGTH = 32, 8  # bytes
_ENTRIES, _BYTES = 64, 256 * 2**20  # most that a folder holds
_LARGEST = 32 * 2**20  # bytes of an entry
_LEFT_S = 3600.0  # age of what a killed process left behind, when it is removed


def default_folder() -> Path | None:
    """Return the folder of kept traces; None if they are switched off or this system tells no owners of files."""
    chosen = os.environ.get(VARIABLE, "")
    if chosen.lower() == OFF or not hasattr(os, "getuid"):
        return None
    if chosen:
        return Path(chosen).absolute()
    try:
        given = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return (given if given.is_absolute() else Path.home() / ".cache") / "autoptd"
    except RuntimeError:  # there is no home
        return None


@dataclass(frozen=True)
class TraceFolder:
    """The kept traces in one folder. Nothing here raises for what is in it, or for a folder that cannot be used."""

    path: Path

    def read(self, name: str) -> tuple[list[Stamp], bytes] | None:
        """Return the stamps and the trace of an entry; None if there is none that can be trusted."""
        file = self.path / f"{name}{_SUFFIX}"
        try:
            if not _is_private(self.path):
                return None
            data = read_own(file)
            start = len(_MAGIC) + _DIGEST
            body = data[start:]
            if data[:start] != _MAGIC + hashlib.sha256(body).digest():
                return None
            text = zlib.decompress(body)
            length = int.from_bytes(text[:_LENGTH], "big")
            stamps = [tuple(row) for row in json.loads(text[_LENGTH : _LENGTH + length])]
            with suppress(OSError):
                os.utime(file)  # used now
            return stamps, text[_LENGTH + length :]
        except (OSError, ValueError, TypeError, zlib.error):
            return None

    def write(self, name: str, stamps: Sequence[Stamp], trace: bytes) -> bool:
        """Add an entry, and drop the least recently used ones beyond the limits; return whether it was written."""
        head = json.dumps(stamps).encode()
        body = zlib.compress(len(head).to_bytes(_LENGTH, "big") + head + trace, 1)
        if len(body) > _LARGEST:
            return False
        try:
            if not self.path.exists():
                make_folder(self.path.parent)
                self.path.mkdir(mode=0o700, exist_ok=True)
            make_folder(self.path)  # refuses a link of another user's
            if not _is_private(self.path):
                return False
            write_whole(self.path / f"{name}{_SUFFIX}", _MAGIC + hashlib.sha256(body).digest() + body, mode=0o600)
            self._drop()
        except (OSError, ValueError, AutoptdError):
            return False
        return True

    def _drop(self) -> None:
        """Remove the least recently used entries beyond the limits, and what killed processes left behind."""
        entries, left = [], time.time() - _LEFT_S
        for file in self.path.iterdir():
            with suppress(OSError):  # another process may have removed it
                found = file.lstat()
                if file.suffix == ".part" and file.name.startswith(".autoptd-") and found.st_mtime < left:
                    file.unlink()
                elif file.suffix == _SUFFIX:
                    entries.append((found.st_mtime_ns, found.st_size, file))
        total = 0
        for number, (_, size, file) in enumerate(sorted(entries, reverse=True), 1):
            total += size
            if number > _ENTRIES or total > _BYTES:
                with suppress(OSError):
                    file.unlink()


def _is_private(folder: Path) -> bool:
    """Return whether a folder is this user's and no other may write to it."""
    found = folder.stat()
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
