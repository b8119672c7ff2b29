"""Replacement of functions that models of several libraries call, while a model is traced or run.

A function is known by its name and its parameters, since models carry copies of it. It is replaced in the Python
modules of the model's classes.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import nn


@contextmanager
def replaced_functions(model: nn.Module, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace the functions of these names and parameters that the model's classes call."""
    with ExitStack() as replaced:
        for module in {type(m).__module__ for m in model.modules()} & sys.modules.keys():
            names = vars(sys.modules[module])
            found = {name: made for name, made in functions.items() if _same_parameters(names.get(name), made)}
            replaced.enter_context(patch.dict(names, found))
        yield


def _same_parameters(given: Any, made: Callable[..., Any]) -> bool:
    return inspect.isfunction(given) and [*inspect.signature(given).parameters] == [*inspect.signature(made).parameters]
