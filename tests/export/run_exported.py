"""Run exported programs on 4 gloo ranks: one train step in float64, with gathered gradients.

`python -m tests.export.run_exported FOLDER PORT`: FOLDER holds programs `*.py`; rank r writes `r.pt` there, program
-> its results. This process imports torch once and forks the ranks.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.pipelining
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from tests.export.export_plans import VOCAB, Llama

LAYERS, WORLD = 4, 4


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(layers: int, tied: bool) -> Llama:
    torch.manual_seed(7)
    return Llama(layers, tied).double()


def batch(samples: int, seq: int = 8) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, VOCAB, (samples, seq + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def alone(layers: int, tied: bool, samples: int) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of the whole batch in this process."""
    model = build(layers, tied)
    x, y = batch(samples)
    loss = loss_fn(model(x), y)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def run(path: Path) -> tuple[float | None, dict[str, Tensor], list[str]]:
    """Return (loss on the last stage, whole gradients of this rank's stages, names split on this rank)."""
    program: Any = load(path)
    tied = bool(program.TIED)
    parallel = program.parallelize(build(LAYERS, tied), loss_fn, "cpu")
    sizes = program.MESH
    dp = parallel.mesh["dp_replicate"].get_local_rank() * sizes["dp_shard"] + parallel.mesh["dp_shard"].get_local_rank()
    share = program.MICROBATCHES * program.MICRO_BATCH
    x, y = batch(share * sizes["dp_replicate"] * sizes["dp_shard"])
    rows = slice(dp * share, (dp + 1) * share)
    loss = program.train_step(parallel, x[rows], y[rows])
    grads, split = {}, []
    for part in parallel.parts:
        for name, parameter in part.named_parameters():
            grad = parameter.grad
            assert grad is not None, name
            if isinstance(parameter, DTensor) and parameter.to_local().numel() < parameter.numel():
                split.append(name)
            grads[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return None if loss is None else float(loss), grads, split


def _rank(rank: int, folder: Path, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    dist.init_process_group("gloo")
    torch.save({path.stem: run(path) for path in sorted(folder.glob("*.py"))}, folder / f"{rank}.pt")
    dist.destroy_process_group()


def main(folder: Path, port: int) -> None:
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(rank, folder, port)) for rank in range(WORLD)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(any(rank.exitcode for rank in ranks))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
