"""Writer of a cluster as the TOML that `Cluster.load` reads, without fields that have their default value."""

from __future__ import annotations

import json
from typing import Any

from autoptd.cost_models.cluster import Cluster


def cluster_toml(cluster: Cluster, remarks: tuple[str, ...] = ()) -> str:
    """Return the file's text; `remarks` are the comment lines at its beginning."""
    lines = [f"# {' '.join(remark.split())}" for remark in remarks]
    _table(cluster.model_dump(mode="json", exclude_defaults=True), (), lines)
    return "\n".join(lines).strip() + "\n"


def _table(data: dict[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    """Append values first, then tables, then lists of tables, since keys after a header belong to its table."""
    for key, value in data.items():
        if not isinstance(value, dict) and not _is_tables(value) and value is not None:
            lines.append(f"{key} = {_value(value)}")
    for key, value in data.items():
        if isinstance(value, dict):
            lines += ["", f"[{'.'.join((*path, key))}]"]
            _table(value, (*path, key), lines)
    for key, value in data.items():
        for row in value if _is_tables(value) else ():
            lines += ["", f"[[{'.'.join((*path, key))}]]"]
            _table(row, (*path, key), lines)


def _is_tables(value: object) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(row, dict) for row in value)


def _value(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int():
            return f"{value:_}"
        case float():
            return f"{value:.6g}"
        case str():
            return json.dumps(value, ensure_ascii=False)  # TOML's basic strings have JSON's escapes
        case list() | tuple():
            return "[" + ", ".join(map(_value, value)) + "]"
        case _:
            raise TypeError(f"no TOML for {value!r}")
