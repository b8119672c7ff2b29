"""Tests that plant faults in the search leave none of their results in what it keeps, and find none of others there."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator

import pytest


def _forget() -> None:
    for name, module in list(sys.modules.items()):
        for kept in vars(module).values() if name.startswith(("autoptd.search", "autoptd.schedule")) else ():
            if isinstance(kept, functools._lru_cache_wrapper):
                kept.cache_clear()


@pytest.fixture
def monkeypatch(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    _forget()
    yield monkeypatch
    monkeypatch.undo()
    _forget()
