"""A spoilt file for each number: the same for the same seed."""

from __future__ import annotations

import json
import random
import shutil
from functools import cache
from importlib.resources import files
from pathlib import Path

from autoptd.cost_models.cluster import Cluster
from tests.fuzz.bases import BASES, planned
from tests.fuzz.mutations import spoil_bytes, spoil_data, spoil_lines, spoil_path, written

CLUSTERS = Cluster.names()
_BYTES, _PATHS = 0.08, 0.01  # shares of the files whose bytes are spoilt, and of those that are none


def spoilt(folder: Path, seed: int, number: int) -> tuple[str, Path]:
    """(name of the base, path): two of three are plans, in turn of each."""
    rng = random.Random(f"{seed} {number}")
    kind = CLUSTERS[number // 3 % len(CLUSTERS)] if number % 3 == 2 else list(BASES)[number * 2 // 3 % len(BASES)]
    path = folder / ("cluster.toml" if kind in CLUSTERS else "plan.json")
    _remove(path)
    text = _text(kind)
    how = rng.random()
    if how < _BYTES:
        path.write_bytes(spoil_bytes(text.encode(), rng))
    elif kind in CLUSTERS:
        path.write_text(spoil_lines(text, rng), "utf-8")
    else:
        data = json.loads(text)
        spoil_data(data, rng)
        path.write_text(written(data), "utf-8", errors="surrogatepass")
    if how > 1 - _PATHS:
        spoil_path(path, rng)
    return kind, path


def _text(kind: str) -> str:
    return cluster_text(kind) if kind in CLUSTERS else planned(kind).to_json()


@cache
def cluster_text(name: str) -> str:
    return (files("autoptd.cost_models.clusters") / f"{name}.toml").read_text("utf-8")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
