"""What holds for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """A world of one may start a process group in this very process: the next test must not find it."""
    yield
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
