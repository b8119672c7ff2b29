"""What a process was doing when it was killed: it writes each action to a file that outlives it, for its node to read.

The file lies in the folder for temporary files and is mapped into memory: a line costs a copy and no system call. It
begins with the line's length, which is 0 while the line is written.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from autoptd.runtime.place import Seen

_SIZE, _SEPARATOR = 1024, "\x1f"


def path_of(pid: int) -> Path:
    """Where a process of this user and node writes."""
    return Path(tempfile.gettempdir()) / f"autoptd-{os.getuid()}-{pid}.doing"


class Recorder:
    """Of this process; `record` is called by its main thread alone."""

    def __init__(self) -> None:
        _remove_those_of_the_dead()
        self._path = path_of(os.getpid())
        with self._path.open("wb+") as file:
            file.truncate(_SIZE)
            self._map = mmap.mmap(file.fileno(), _SIZE)

    def record(self, seen: Seen) -> None:
        """Overwrite what stands there."""
        numbers = ("" if n is None else str(n) for n in (seen.stage, seen.microbatch))
        peers = " ".join(map(str, seen.peers[:64]))
        line = _SEPARATOR.join((seen.action, *numbers, seen.module, seen.doing, seen.talk, peers)).encode()[: _SIZE - 4]
        self._map[:2] = b"\0\0"
        self._map[2 : 2 + len(line)] = line
        self._map[:2] = len(line).to_bytes(2, "little")

    def remove(self) -> None:
        self._map.close()
        self._path.unlink(missing_ok=True)


def _remove_those_of_the_dead() -> None:
    for path in path_of(0).parent.glob(f"autoptd-{os.getuid()}-*.doing"):
        pid = path.stem.rpartition("-")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            with suppress(OSError):
                path.unlink()


def last_words(pid: int) -> Seen | None:
    """What a process of this node was doing last; None where nothing whole is known of it."""
    try:
        data = path_of(pid).read_bytes()
    except OSError:
        return None
    words = data[2 : 2 + int.from_bytes(data[:2], "little")].decode(errors="replace").split(_SEPARATOR)
    if len(words) != 7:
        return None
    action, stage, microbatch, module, doing, talk, peers = words
    return Seen(
        action,
        int(stage) if stage else None,
        int(microbatch) if microbatch else None,
        module,
        doing,
        talk,
        tuple(map(int, peers.split())),
    )
