"""Facts about one rank's machine, as plain data; `machine` checks them."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

Grade = Literal["ok", "warn", "FAIL"]
PREFIXES = ("NCCL_", "TORCH_", "PYTORCH_", "CUDA_", "GLOO_", "OMP_", "MKL_", "AUTOPTD_")
_SHARED = Path("/dev/shm")


@dataclass(frozen=True)
class Finding:
    """A line of the report: `FAIL port: 29500 is taken — give another: --port N`."""

    grade: Grade
    name: str
    seen: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.grade:4} {self.name}: {self.seen}" + (f" — {self.fix}" if self.fix else "")


@dataclass(frozen=True)
class Gpu:
    """A device as torch reports it."""

    name: str
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class MachineFacts:
    """Facts about one rank's machine."""

    host: str
    versions: Mapping[str, str]  # Python, torch, CUDA, NCCL, autoptd; "none" for one that is missing
    gpus: tuple[Gpu, ...]
    shared_memory_bytes: int | None  # of /dev/shm; None if there is none
    open_files: int | None  # the limit of this process; None if there is none
    cpus: int
    environment: Mapping[str, str]  # variables with one of `PREFIXES`
    local_ranks: int = 1  # processes of the run on this machine


def gather() -> MachineFacts:
    """Return the facts that this process observes."""
    import torch

    from autoptd.answers.in_processes import cores

    gpus = []
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        gpus.append(Gpu(torch.cuda.get_device_name(i), total, free))
    return MachineFacts(
        host=platform.node(),
        versions={
            "Python": platform.python_version(),
            "torch": torch.__version__,
            "CUDA": torch.version.cuda or "none",
            "NCCL": _nccl(),
            "autoptd": version("autoptd"),
        },
        gpus=tuple(gpus),
        shared_memory_bytes=shutil.disk_usage(_SHARED).total if _SHARED.is_dir() else None,
        open_files=_open_files(),
        cpus=cores(),
        environment={name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)},
        local_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )


def _nccl() -> str:
    import torch

    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return "none"
    return ".".join(map(str, torch.cuda.nccl.version()))


def _open_files() -> int | None:
    try:
        import resource
    except ImportError:  # not on this system
        return None
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if soft == resource.RLIM_INFINITY else soft
