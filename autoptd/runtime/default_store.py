"""The store that torch's process group was made with. A private function of torch, as seen in 2.13."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.distributed import distributed_c10d


def default_store() -> dist.Store:
    """A connection to it of its own, so that a thread may use it while another waits in it."""
    found: dist.Store = distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    return found


def store_host() -> int | None:
    """The rank whose process holds the store; None where the launcher does, as torchrun."""
    return None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0
