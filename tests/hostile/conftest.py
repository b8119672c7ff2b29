"""A tiny model as a configuration file, and a plan of it, made once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.bounded import run

CONFIG = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 2,
    "n_embd": 16,
    "n_head": 2,
    "n_positions": 16,
    "vocab_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


@pytest.fixture(scope="session")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(scope="session")
def plan_file(config_file: Path) -> Path:
    path = config_file.with_name("plan.json")
    ended = run("plan", config_file, "--world", "4", "--batch", "16", "--fix", "tp=2,pp=2,micro=2", "-o", path)
    assert ended.code == 0, ended
    return path


@pytest.fixture
def spoilt(plan_file: Path, tmp_path: Path) -> Callable[[Callable[[Any], Any]], Path]:
    """Return a writer of the plan with a change: a function that edits its data or returns other text."""

    def write(change: Callable[[Any], Any]) -> Path:
        data = json.loads(plan_file.read_text())
        text = change(data)
        path = tmp_path / "spoilt.json"
        path.write_text(text if isinstance(text, str) else json.dumps(data))
        return path

    return write
