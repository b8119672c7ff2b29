"""Cases of the libraries beside transformers, and of plain modules. A library that is not installed has none."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

# module of benchmarks.coverage that lists CASES -> the library that it needs
MODULES = {
    "plain_sequences": "torch",
    "plain_pictures": "torch",
    "plain_others": "torch",
    "plain_losses": "torch",
    "plain_data": "torch",
    "adapters": "peft",
    "diffusers": "diffusers",
    "diffusers_pictures": "diffusers",
    "diffusers_more": "diffusers",
    "diffusers_control": "diffusers",
    "vision_zoo": "torchvision",
    "timm_zoo": "timm",
}


def library_cases() -> Iterator[Any]:
    """Yield the cases of every installed library, and say on standard error which ones are left out."""
    for name, library in MODULES.items():
        if importlib.util.find_spec(library) is None:
            print(f"no cases of {library}, which is not installed", file=sys.stderr)
        else:
            yield from importlib.import_module(f"benchmarks.coverage.{name}").CASES
