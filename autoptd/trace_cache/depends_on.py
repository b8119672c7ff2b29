"""Everything besides the model's configuration that a trace depends on, so that an old one is never taken for new.

    surroundings   Python, the machine, environment variables, the names that can be imported: part of an entry's name
    files          the file of every module that was loaded: path, size, times of the last change; part of its contents

A package that is installed, removed or upgraded changes the names on `sys.path`; a library may trace another way
because of it (transformers looks for fused kernels). An edited file has other times.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

# Prefixes of environment variables that torch, transformers, numpy, sympy, Python or their libraries read. Others, such
# as those of a terminal, would make every session trace anew.
_READ = (
    *("ACCELERATE", "AOT", "ATEN", "AUTOPTD", "BLAS", "CUDA", "CUDNN", "DISABLE", "DNNL", "ENABLE", "FAKE", "FLASH"),
    *("FSDP", "FX_", "GOMP", "HF_", "HIP", "HSA", "HUGGING", "INDUCTOR", "KERNELS", "KMP", "LD_", "MKL", "MPMATH"),
    *("NCCL", "NPY", "NUMPY", "NVIDIA", "OMP", "ONEDNN", "PT2", "PT_", "PYTHON", "PYTORCH", "ROC", "SAFETENSORS"),
    *("SM_", "SYMPY", "TENSORIFY", "TOKENIZERS", "TORCH", "TRANSFORMERS", "TRITON", "TRUST", "USE_", "XLA", "XPU"),
)
_NOT_READ = ("AUTOPTD_CACHE",)  # where entries are
_DEVICES = ("nvidia*", "kfd", "dri/*", "accel*")  # in /dev: accelerators, without starting their libraries
_IMPORTABLE = ("", ".py", ".pyc", ".so", ".pyd", ".pth", ".dist-info", ".egg-info", ".egg-link", ".zip", ".egg")
_SETTLED_NS = 60 * 10**9  # a file that changed so shortly before the process began may have been loaded before

Stamp = tuple[str, int, int, int]  # path, bytes, times of the last change of contents and of the entry, both in ns


def surroundings() -> dict[str, Any]:
    """Return Python, machine, variables and importable names. Raises OSError for a folder that cannot be read."""
    return {
        "python": [sys.version, sys.implementation.cache_tag, sys.prefix, sys.flags.optimize],
        "machine": [
            *os.uname()[::2],
            _processor(),
            sorted(str(path) for name in _DEVICES for path in Path("/dev").glob(name)),
        ],
        "variables": sorted(item for item in os.environ.items() if _is_read(item[0])),
        "names": [[folder, _names(folder)] for folder in sys.path],
    }


def _is_read(variable: str) -> bool:
    return variable.upper().startswith(_READ) and variable not in _NOT_READ


def _processor() -> str:
    """Return the features of the processor, which choose the kernels that compute constants; "" where unknown."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            return next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        return ""


def _names(folder: str) -> list[str]:
    """Return what can be imported from a folder of `sys.path`; of a file, or of what is not there, nothing."""
    try:
        names = [path.name for path in Path(folder).iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = (name for name in names if PurePath(name).suffix in _IMPORTABLE)
    return sorted(name for name in found if name != "__pycache__" and not name.startswith("."))


def loaded_files(modules: Mapping[str, Any]) -> list[Stamp]:
    """Return the stamps of the files of loaded modules (`sys.modules`), sorted. Raises OSError."""
    paths = {getattr(module, "__file__", None) for module in list(modules.values())}
    return [_stamp(path) for path in sorted(p for p in paths if isinstance(p, str) and PurePath(p).is_absolute())]


def _stamp(path: str) -> Stamp:
    try:
        found = os.stat(path)  # noqa: PTH116  of thousands of files
    except (FileNotFoundError, NotADirectoryError):  # modules that other modules make name files that never were
        return path, -1, 0, 0
    return path, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def are_unchanged(stamps: Iterable[Stamp]) -> bool:
    """Return whether all files are still those of their stamps."""
    try:
        return all(_stamp(path) == (path, *numbers) for path, *numbers in stamps)
    except OSError:
        return False


_IMPORTED_NS = time.time_ns()


def process_began_ns() -> int:
    """Return when this process began, in ns since 1970: from Linux, else when it imported this module."""
    try:
        text = Path("/proc/self/stat").read_text("utf-8", errors="replace")
        ticks = int(text.rpartition(")")[2].split()[19])  # since boot
        since_boot_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 10**9 // os.sysconf("SC_CLK_TCK")
        return min(_IMPORTED_NS, time.time_ns() - since_boot_ns)
    except (OSError, ValueError, IndexError, AttributeError):
        return _IMPORTED_NS


def are_settled(stamps: Iterable[Stamp], began_ns: int) -> bool:
    """Return whether all files were last changed long enough before a process began to be what it loaded."""
    return all(max(changed, entered) < began_ns - _SETTLED_NS for _, _, changed, entered in stamps)
