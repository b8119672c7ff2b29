"""Train a plain module on every process that torchrun starts:

    torchrun --nproc-per-node 4 examples/train.py

The model knows nothing of devices: `parallelize` gives each process its part of it.
"""

from __future__ import annotations

import os

import torch

import autoptd
from autoptd.models.nanogpt import NanoGPT, Sizes

SIZES = Sizes(vocab=256, max_seq=64, width=64, layers=4, heads=4)
BATCH, STEPS = 16, 20


def main() -> None:
    with torch.device("meta"):
        model = NanoGPT(SIZES)
    world = int(os.environ["WORLD_SIZE"])
    parallel = autoptd.parallelize(model, world=world, cluster="local", batch=BATCH, seq=64, precision="fp32")
    share = BATCH // parallel.dp_size
    for step in range(STEPS):
        tokens = torch.randint(0, 64, (BATCH, 65), generator=torch.Generator().manual_seed(step))
        mine = tokens[parallel.dp_rank * share : (parallel.dp_rank + 1) * share]
        loss = parallel.train_step({"idx": mine[:, :-1], "targets": mine[:, 1:]})
        if os.environ["RANK"] == "0":
            print(f"step {step:3}  loss {float(loss):.4f}")


if __name__ == "__main__":
    main()
