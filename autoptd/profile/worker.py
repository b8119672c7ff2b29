"""`python -m autoptd.profile.worker SECONDS RANK WORLD PORT`: another rank; `world.joined` starts it."""

from __future__ import annotations

import sys

from autoptd.profile.measure import measure
from autoptd.profile.world import Seat

if __name__ == "__main__":
    seconds, rank, world, port = sys.argv[1:]
    measure(float(seconds), seat=Seat(int(rank), int(world), int(port)))
