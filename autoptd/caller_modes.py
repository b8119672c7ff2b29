"""Modes of torch that the caller may be in, and that no call of ours follows: where gradients are off, inference mode,
and another default device. Planning does not follow the detection of anomalies either, which steps do.

    @torch.no_grad()                       around the training loop: a step would have no gradients
    torch.set_default_device("cuda")       tensors that the runtime makes for the host would be on the device
    torch.autograd.set_detect_anomaly()    planning differentiates on meta, where no gradient can be read
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


def usual_modes() -> AbstractContextManager[None]:
    """Return a context in which torch's modes are those of a new process."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_device"):  # not imported, or being imported
        return nullcontext()
    on = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    return nullcontext() if on and torch.get_default_device().type == "cpu" else _usual()


@contextmanager
def _usual() -> Iterator[None]:
    import torch

    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
        yield


@contextmanager
def without_anomalies() -> Iterator[None]:
    """Detect no anomalies of gradients; usable as a context manager and as a decorator."""
    import torch

    with torch.autograd.set_detect_anomaly(False):
        yield
