"""What holds for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Plans are searched by the tests, and by the processes that they start, never found where an earlier run kept them.
os.environ["AUTOPTD_CACHE"] = "off"

# How quick a machine is, or how busy, is no property of the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Which tests run in one process and share what they made there: see `shares`."""
    from xdist.scheduler import LoadScopeScheduling

    class ByTrace(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return shares(nodeid)

    return ByTrace(config, log)


def shares(nodeid: str) -> str:
    """A test's group: its file, or, of tests of parity in this process, its model, whose trace takes longer than they.

    Models come first in the names of tests: `tests/parity/test_parity.py::test_a_plan[gpt2-dp8 × tp1 × pp1]`.
    """
    file, _, test = nodeid.partition("::")
    if not file.startswith("tests/parity/") or "ranks" in file:
        return file
    return f"parity of {test.partition('[')[2].partition('-')[0].rstrip(']')}"


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """A world of one may start a process group in this very process: the next test must not find it."""
    yield
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def on_one_core(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ranks that are threads take turns, and lose time wherever they move to another core: each of the test runner's
    processes keeps to one. Ranks that are processes do not.
    """
    if request.node.get_closest_marker("ranks") is not None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    mine = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % len(cores)
    os.sched_setaffinity(0, {sorted(cores)[mine]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
