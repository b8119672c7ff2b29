"""A request to stop that all ranks agree on: a signal that any of them was sent, or a time limit."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from autoptd.errors import RuntimeFault

SIGNALS = ("SIGTERM", "SIGUSR1")  # of launchers and schedulers: torchrun, Kubernetes; SLURM's --signal=USR1@120
_FIRST = 128  # exit code of a process that a signal ends, less the number of the signal


class StopRequest:
    """A request to stop training, answered equally on all ranks. `Parallel.stop_request` makes it.

    The first signal of a kind only asks to stop; a second one does what it did before. `exit_code`: for `sys.exit` once
    everything is saved: 0 after a time limit, and that of a process that the signal ended otherwise, so that a launcher
    does not take a part of the work for all of it.
    """

    exit_code: int

    def __init__(self, agree: Callable[[int], int], signals: Iterable[str], after_s: float | None) -> None:
        """`agree`: returns the largest of all ranks' numbers. Raises RuntimeFault outside the main thread."""
        self._agree, self._signal, self.exit_code = agree, 0, 0
        self._until_s = None if after_s is None else time.monotonic() + after_s
        self._before: dict[int, Any] = {}
        for name in signals:
            number = getattr(signal, name, None)
            if not isinstance(number, signal.Signals):
                raise RuntimeFault(f"{name!r} is no signal", where="signals", fix='give names such as "SIGTERM"')
            try:
                self._before[number] = signal.signal(number, self._note)
            except (OSError, ValueError) as error:  # SIGKILL; a thread other than the main one
                raise RuntimeFault(
                    f"{name} cannot be handled: {error}",
                    where="signals",
                    fix="ask in the main thread, and leave out SIGKILL and SIGSTOP",
                ) from error

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        signal.signal(number, self._before.pop(number, None) or signal.SIG_DFL)

    def asked(self) -> bool:
        """Return whether any rank was asked to stop, or the time of any is over. Collective."""
        late = self._until_s is not None and time.monotonic() >= self._until_s
        found = self._agree(2 * self._signal or int(late))
        self.exit_code = _FIRST + found // 2 if found > 1 else 0
        return found > 0
