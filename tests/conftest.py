"""What holds for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Plans are searched by the tests, and by the processes that they start, never found where an earlier run kept them.
os.environ["AUTOPTD_CACHE"] = "off"

# How quick a machine is, or how busy, is no property of the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """A world of one may start a process group in this very process: the next test must not find it."""
    yield
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
