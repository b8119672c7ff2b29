"""A launcher's environment that is incomplete, or says something else than what runs: an error with a way out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.comm.test_listening import free_port

ROOT = Path(__file__).parents[3]
CONNECT = """
from autoptd.errors import RuntimeFault
from autoptd.layout.mesh import Mesh
from autoptd.runtime.comm.processes import connect_processes
try:
    connect_processes(Mesh(2, 1, 1), timeout_s=2)
except RuntimeFault as fault:
    print(fault)
"""


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"MASTER_ADDR": None}, "MASTER_ADDR expected, but not set"),
        ({"MASTER_PORT": "none"}, "cannot start from the environment: invalid literal"),
        ({"RANK": None}, "RANK expected, but not set"),
        ({}, "1/2 clients joined"),
    ],
    ids=["no address", "no port", "no rank", "alone"],
)
def test_it_is_named_with_a_way_out(changed: dict[str, str | None], said: str) -> None:
    whole = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **changed}
    env = {key: value for key, value in {**os.environ, "PYTHONPATH": str(ROOT), **whole}.items() if value is not None}
    found = subprocess.run([sys.executable, "-c", CONNECT], env=env, capture_output=True, text=True, timeout=120)
    assert said in found.stdout, found.stderr
    assert "torchrun" in found.stdout
