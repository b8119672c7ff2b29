"""`torchrun … run_killed.py SCRIPT ACTION STEP FOLDER`: run a script; at the first attempt rank 1 dies in a step."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from typing import Any

from autoptd.runtime.faults.rank_status import RankStatus


def plant(action: str, step: int) -> None:
    enter, seen = RankStatus.enter, [0]

    def enter_and_die(place: RankStatus, name: str, *rest: Any) -> None:
        enter(place, name, *rest)
        seen[0] += name == action
        if seen[0] == step:
            print("rank 1 is killed", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    RankStatus.enter = enter_and_die  # type: ignore[method-assign]


if __name__ == "__main__":
    script, action, step, folder = sys.argv[1:]
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        plant(action, int(step))
    runpy.run_path(script)["main"](folder)
