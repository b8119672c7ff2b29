"""The kept trace of a model that a configuration says completely, found by all that a trace depends on."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from autoptd.compile.traced import TracedModel
from autoptd.search.sharding.cache import ShardingCache
from autoptd.trace_cache.depends_on import (
    are_settled,
    are_unchanged,
    loaded_files,
    process_began_ns,
    surroundings,
)
from autoptd.trace_cache.equal import equal
from autoptd.trace_cache.folder import TraceFolder
from autoptd.trace_cache.to_bytes import from_bytes, to_bytes

_FIELDS = ("folded", "name", "graph_hash", "sizes", "precision", "notes")  # of `TracedModel`, on disk


class TraceEntry:
    """The place of one trace in a folder, which holds it or will.

    Made before the model is: imports of libraries set environment variables.
    """

    def __init__(self, folder: TraceFolder, of: object) -> None:
        """`of`: all that the trace depends on besides code and surroundings, as JSON has it. Raises OSError."""
        self._folder, self._began_ns, self._around = folder, process_began_ns(), surroundings()
        self._name = hashlib.sha256(json.dumps([of, self._around]).encode()).hexdigest()

    def find(self, module: Callable[[], nn.Module], again: Callable[[int], TracedModel]) -> TracedModel | None:
        """Return the trace if it is there and nothing has changed since. `module`, `again`: those of `TracedModel`."""
        found = self._folder.read(self._name)
        if found is None or not are_unchanged(found[0]) or not are_settled(found[0], self._began_ns):
            return None
        try:
            fields = from_bytes(found[1])
            return TracedModel(module=module, again=again, known=ShardingCache(fields["folded"]).read(), **fields)
        except Exception:  # noqa: BLE001  bytes may fail to be read in any way; the model is traced instead
            return None

    def keep(self, traced: TracedModel) -> bool:
        """Keep a trace that was just made, if an exact copy of it can be read back; return whether it was."""
        fields: dict[str, Any] = {name: getattr(traced, name) for name in _FIELDS}
        try:
            stamps = loaded_files(sys.modules)
            if not are_settled(stamps, self._began_ns) or surroundings()["names"] != self._around["names"]:
                return False
            data = to_bytes(fields)
            return equal(fields, from_bytes(data)) and self._folder.write(self._name, stamps, data)
        except Exception:  # noqa: BLE001  objects that have no copy raise any type; the next command traces again
            return False
