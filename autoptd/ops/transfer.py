"""Numbers of the host on a device, without a wait for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def on_device(numbers: Tensor | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor on a device. Does not wait for a GPU, as a copy of unpinned memory does."""
    found = torch.as_tensor(numbers, dtype=dtype)
    if device.type == "cuda" and found.device.type == "cpu":
        return found.pin_memory().to(device, non_blocking=True)
    return found.to(device)
