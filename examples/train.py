"""Train a plain module on every process that torchrun starts:

    torchrun --nproc-per-node 4 examples/train.py

The model knows nothing of devices: `parallelize` gives each process its part of it.
"""

from __future__ import annotations

import os

import torch
from torch.utils.data import DataLoader

import autoptd
from autoptd.models.nanogpt import NanoGPT, Sizes

SIZES = Sizes(vocab=256, max_seq=64, width=64, layers=4, heads=4)
BATCH, STEPS = 16, 20


def main() -> None:
    with torch.device("meta"):
        model = NanoGPT(SIZES)
    world = int(os.environ["WORLD_SIZE"])
    parallel = autoptd.parallelize(model, world=world, cluster="local", batch=BATCH, seq=64, precision="fp32")
    tokens = torch.randint(0, 64, (BATCH * STEPS, 65), generator=torch.Generator().manual_seed(0))
    for mine in DataLoader(tokens, batch_sampler=parallel.sampler(len(tokens))):  # this rank's share of each batch
        parallel.train_step({"idx": mine[:, :-1], "targets": mine[:, 1:]})
        if os.environ["RANK"] == "0":
            print(parallel.report())


if __name__ == "__main__":
    main()
