"""Memory figures that the runtime benchmark derives from a profiler's events."""

from __future__ import annotations

import pytest

from benchmarks.runtime.by_turns import most_alive


@pytest.mark.parametrize(
    ("events", "most"),
    [
        ([(1, 10), (2, 5), (1, -10), (3, 7)], 15),
        ([(1, 10), (1, 10), (2, 5)], 15),  # the first was released by an unwatched thread
        ([(1, -10), (2, 5)], 5),  # allocated before the profile
        ([], 0),
    ],
)
def test_the_fullest_moment(events: list[tuple[int, int]], most: int) -> None:
    assert most_alive({"Addr": address, "Bytes": size} for address, size in events) == most
