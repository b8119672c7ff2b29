"""own.py of an emitted program: where the functions with backward passes of the user's own come from.

    import layers

    Clip = layers.Clip

What cannot be imported by its name (defined in a function, or in the script that is run) is handed over when the
program is imported in the process that made it, and is an error anywhere else.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from torch import fx

from autoptd.codegen.quoting import is_name
from autoptd.passes.custom_grad.ops import OwnFunction, OwnHook, described
from autoptd.printable import printable

NAME = "own.py"
_DOC = '"""Backward passes of your own that this program calls, by where they are defined. Written by autoptd."""\n'
_LATE = '''

def __getattr__(name: str) -> object:
    """Called for what this process has not handed over."""
    raise ImportError(f"{name!r} was defined where it cannot be imported from: put it into a module, at the top level")
'''


@dataclass(frozen=True)
class OwnFile:
    """The source, empty where a program needs none, and what is handed over: name -> object."""

    source: str = ""
    objects: Mapping[str, Any] = field(default_factory=dict)


def own_file(graph: fx.Graph) -> OwnFile:
    """The file for a graph, names in alphabetical order."""
    targets = [n.target for n in graph.nodes if isinstance(n.target, (OwnFunction, OwnHook))]
    found: dict[str, Any] = {t.name: t.function for t in sorted(targets, key=lambda t: t.name)}
    if not found:
        return OwnFile()
    homes = {name: found[name].__module__ for name in found if _importable(found[name])}
    lines = [f"import {home}" for home in sorted(set(homes.values()))]
    lines += [""] if homes else []
    lines += [f"{name} = {home}.{found[name].__qualname__}" for name, home in homes.items()]
    objects = {name: what for name, what in found.items() if name not in homes}
    lines += ["", "# handed over by the process that made this program"] if objects else []
    lines += [f"#   {name}: {printable(described(what), keep='')}" for name, what in objects.items()]
    return OwnFile(_DOC + "\n" + "\n".join(lines).strip() + "\n" + (_LATE if objects else ""), objects)


def _importable(what: Any) -> bool:
    """Whether the name that an object gives itself leads to it in every process."""
    home, name = getattr(what, "__module__", None), getattr(what, "__qualname__", "<")
    if home in (None, "__main__") or home not in sys.modules or not all(map(is_name, f"{home}.{name}".split("."))):
        return False
    try:
        return attrgetter(name)(sys.modules[home]) is what
    except AttributeError:
        return False
