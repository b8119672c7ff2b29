"""Training that is started again goes on as if nothing had happened: under torchrun, and by hand."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.checkpoint import contents, folder
from autoptd.errors import CheckpointError
from autoptd.layout.mesh import Mesh
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.testing.process_pool import ProcessPool

ROOT = Path(__file__).parents[2]
FAULTED = Path(__file__).with_name("run_killed.py")


def uninterrupted(_: Communicators, script: str, folder: str) -> None:
    """A worker's part of what torchrun starts, in its process group."""
    runpy.run_path(script)["main"](folder)


@pytest.mark.ranks
@pytest.mark.parametrize(("action", "step"), [("B0", 9)])
def test_a_killed_rank_under_torchrun(action: str, step: int, tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "train.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "3", str(FAULTED), script, action, str(step), str(tmp_path / "killed")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    killed = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    with ProcessPool(2) as pool:
        pool.run(Mesh(2, 1, 1), uninterrupted, script, str(tmp_path / "whole"))
    told, wrong = killed.communicate()
    assert killed.returncode == 0, wrong[-3000:]
    assert "rank 1 is killed" in told
    first, second = (folder.find(tmp_path / name) for name in ("killed", "whole"))
    assert first.name == second.name == "step-00000020"
    expected, found = contents.read_whole(second), contents.read_whole(first)
    assert [name for name, x in expected.items() if not torch.equal(found[name], x)] == []


def batch(step: int) -> dict[str, Tensor]:
    return {"input": torch.randn(8, 4, generator=torch.Generator().manual_seed(step))}


def made() -> autoptd.Parallel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    asked = {"inputs": {"input": batch(0)["input"][:2]}, "loss": lambda out: out.square().mean(), "precision": "fp32"}
    return autoptd.parallelize(model, world=1, batch=8, **asked)  # type: ignore[arg-type]


def train(par: autoptd.Parallel, until: int, root: Path) -> list[float]:
    losses = []
    while par.step < until:
        losses.append(float(par.train_step(batch(par.step))))
        par.save(root)
    return losses


def test_damaged_checkpoints_are_left_out_by_name(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    whole = train(made(), 4, tmp_path / "whole")
    par = made()
    assert par.resume(root) == 0
    train(par, 3, root)
    path = root / "step-00000003" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    again = made()
    with pytest.warns(UserWarning, match=r"step-00000003: __0_0.distcp is damaged.*resuming from step 2"):
        assert again.resume(root) == 2
    assert train(again, 4, root) == whole[2:]
    assert made().resume(root) == 4
    for each in folder.checkpoints(root):
        (each / folder.PROGRESS).unlink()
    with pytest.raises(
        CheckpointError, match=r"(?s)all checkpoints are damaged.*step-00000004: progress.pt is missing"
    ):
        made().resume(root)


def test_a_lost_pointer_loses_nothing(tmp_path: Path) -> None:
    train(made(), 2, tmp_path)
    (tmp_path / folder.LATEST).unlink()
    assert made().resume(tmp_path) == 2
    (tmp_path / folder.LATEST).write_text("step-00000001")  # killed before it was replaced
    assert made().resume(tmp_path) == 1
    shutil.rmtree(tmp_path / "step-00000001")
    assert made().resume(tmp_path) == 2
