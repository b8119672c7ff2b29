"""What a process was doing when it was killed: it writes each action to a file that outlives it, for its node to read.

The file lies in the folder for temporary files, under a name that nobody can foresee and that heartbeats tell, and is
mapped into memory: a line costs a copy and no system call. It begins with the line's length, which is 0 while the line
is written.
"""

from __future__ import annotations

import mmap
import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path

from autoptd.outputs import is_own, read_own
from autoptd.runtime.place import Seen

_SIZE, _SEPARATOR = 1024, "\x1f"
_NAME = re.compile(r"autoptd-(\d+)-\w+\.doing")  # with the process's number


class Recorder:
    """Of this process; `record` is called by its main thread alone."""

    def __init__(self) -> None:
        _remove_those_of_the_dead()
        descriptor, name = tempfile.mkstemp(prefix=f"autoptd-{os.getpid()}-", suffix=".doing")
        self.path = Path(name)
        with os.fdopen(descriptor, "wb+") as file:
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
        self.path.unlink(missing_ok=True)


def _remove_those_of_the_dead() -> None:
    for path in Path(tempfile.gettempdir()).glob("autoptd-*.doing"):
        match = _NAME.fullmatch(path.name)
        if match and not Path(f"/proc/{match[1]}").exists():
            with suppress(OSError):
                if is_own(path.lstat()):
                    path.unlink()


def last_words(path: str) -> Seen | None:
    """What the process that writes there was doing last; None where nothing whole is known of it."""
    try:
        data = read_own(Path(path))
        words = data[2 : 2 + int.from_bytes(data[:2], "little")].decode(errors="replace").split(_SEPARATOR)
        action, stage, microbatch, module, doing, talk, peers = words
        stages, microbatches = (int(n) if n else None for n in (stage, microbatch))
        return Seen(action, stages, microbatches, module, doing, talk, tuple(map(int, peers.split())))
    except (OSError, ValueError):
        return None
