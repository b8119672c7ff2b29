"""own.py of an emitted program: imports of the user's functions with backward passes of their own.

    import layers

    Clip = layers.Clip

A function that cannot be imported by name (defined in a function, or in the script that is run) is set when the program
is imported in the process that made it; in any other process it is an error.
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
from autoptd.text import printable

NAME = "own.py"
_DOC = '"""Functions of yours with backward passes of their own that this program calls. Written by autoptd."""\n'
_LATE = '''

def __getattr__(name: str) -> object:
    """Raise ImportError for a function that this process has not set."""
    raise ImportError(f"{name!r} cannot be imported: define it at the top level of a module")
'''


@dataclass(frozen=True)
class OwnFile:
    """The source, empty if a program needs none, and the objects that the process sets, by name."""

    source: str = ""
    objects: Mapping[str, Any] = field(default_factory=dict)


def own_file(graph: fx.Graph) -> OwnFile:
    """Write the file for a graph, names in alphabetical order."""
    targets = [n.target for n in graph.nodes if isinstance(n.target, (OwnFunction, OwnHook))]
    found: dict[str, Any] = {t.name: t.function for t in sorted(targets, key=lambda t: t.name)}
    if not found:
        return OwnFile()
    homes = {name: found[name].__module__ for name in found if _importable(found[name])}
    lines = [f"import {home}" for home in sorted(set(homes.values()))]
    lines += [""] if homes else []
    lines += [f"{name} = {home}.{found[name].__qualname__}" for name, home in homes.items()]
    objects = {name: what for name, what in found.items() if name not in homes}
    lines += ["", "# set by the process that made this program"] if objects else []
    lines += [f"#   {name}: {printable(described(what), keep='')}" for name, what in objects.items()]
    return OwnFile(_DOC + "\n" + "\n".join(lines).strip() + "\n" + (_LATE if objects else ""), objects)


def _importable(what: Any) -> bool:
    """Return whether every process can import an object by its `__module__` and `__qualname__`."""
    home, name = getattr(what, "__module__", None), getattr(what, "__qualname__", "<")
    if home in (None, "__main__") or home not in sys.modules or not all(map(is_name, f"{home}.{name}".split("."))):
        return False
    try:
        return attrgetter(name)(sys.modules[home]) is what
    except AttributeError:
        return False
