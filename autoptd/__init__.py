"""autoptd compiles a plain PyTorch model into a distributed training program.

plan = autoptd.plan(model, world=64, cluster="dgx-h100", batch=512, seq=2048)
par = autoptd.parallelize(model, world=64)      # under torchrun: this rank, ready to train
loss = par.train_step(batch)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from autoptd.passes.gc_pause import without_collector

if TYPE_CHECKING:
    from autoptd.api import Parallel, parallelize, plan, trace
    from autoptd.compile.traced import TracedModel
    from autoptd.cost_models.cluster import Cluster
    from autoptd.errors import AutoptdError
    from autoptd.plans.model import Plan

    __version__: str

__all__ = ["AutoptdError", "Cluster", "Parallel", "Plan", "TracedModel", "parallelize", "plan", "shared", "trace"]

_MODULES = {
    "AutoptdError": "autoptd.errors",
    "Cluster": "autoptd.cost_models.cluster",
    "Parallel": "autoptd.api",
    "Plan": "autoptd.plans.model",
    "TracedModel": "autoptd.compile.traced",
    "parallelize": "autoptd.api",
    "plan": "autoptd.api",
    "shared": "autoptd.layout.sample_rows",
    "trace": "autoptd.api",
}


def __dir__() -> list[str]:
    """Return the public names alone: submodules are found by their paths."""
    return [*__all__, "__version__"]


def __getattr__(name: str) -> object:
    """Import on first use: `autoptd --help` needs no torch."""
    if name == "__version__":
        from importlib.metadata import version

        return version("autoptd")
    if name not in _MODULES:
        raise AttributeError(f"module 'autoptd' has no attribute {name!r}")
    with without_collector():
        value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value
