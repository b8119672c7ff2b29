"""The examples run as their texts say, on several processes."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.forked_ranks import run_script

EXAMPLES = Path(__file__).parents[1] / "examples"


def torchrun(processes: int, script: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [*command, str(EXAMPLES / script), *arguments], capture_output=True, text=True, env=env, check=False
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout


def lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.mark.ranks
def test_finetuning_goes_on_under_another_plan(tmp_path: Path) -> None:
    """Four processes do again what two did after the last checkpoint but one."""
    said = torchrun(2, "finetune.py", str(tmp_path))
    assert re.findall(r"step +(\d+)  loss", said) == ["4", "8", "12"]
    first = lines(tmp_path / "log.jsonl")
    assert first[0]["loss"] > first[2]["loss"] and first[0]["accuracy"] < first[2]["accuracy"]
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "weights").state_dict()
    shutil.rmtree(tmp_path / "weights")
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000012")
    torchrun(4, "finetune.py", str(tmp_path))
    again = lines(tmp_path / "log.jsonl")
    assert [line["step"] for line in again] == [4, 8, 12, 12]
    for name in ("loss", "accuracy", "grad_norm"):
        assert again[3][name] == pytest.approx(again[2][name], rel=1e-4)
    for name, x in AutoModelForCausalLM.from_pretrained(tmp_path / "weights").state_dict().items():
        torch.testing.assert_close(x, weights[name], rtol=1e-3, atol=1e-4)


def test_texts_of_a_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def load(name: str, split: str) -> dict[str, list[str]]:
        asked.append((name, split))
        return {"text": ["one", "two"]}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    assert runpy.run_path(str(EXAMPLES / "finetune.py"))["texts"]("org/texts") == ["one", "two"]
    assert asked == [("org/texts", "train")]


@pytest.mark.ranks
def test_uneven_batches_are_those_of_one_process() -> None:
    (code, alone), (other, four) = (run_script(ranks, EXAMPLES / "uneven_batches.py") for ranks in (1, 4))
    assert (code, other) == (0, 0), alone + four
    assert re.fullmatch(r"after 45 steps \d+ of 23 are right: 0\.\d{4}\n", alone)
    right = int(alone.split()[3])
    assert alone.endswith(f"{right / 23:.4f}\n") and four == alone
