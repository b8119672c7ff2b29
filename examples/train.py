"""Train a plain module on all processes that torchrun starts:

    torchrun --nproc-per-node 4 examples/train.py
    torchrun --nproc-per-node 4 --max-restarts 3 examples/train.py checkpoints

The model contains no code for devices: `parallelize` gives each process its part of it. With a folder, the script saves
checkpoints there, also when it is asked to end, and resumes from the newest one when torchrun or the user restarts it,
on as many processes as there are then.
"""

from __future__ import annotations

import os
import sys

import torch
from torch.utils.data import DataLoader

import autoptd
from autoptd.models.nanogpt import GPTSizes, NanoGPT

SIZES = GPTSizes(vocab=256, max_seq=64, width=64, layers=4, heads=4)
BATCH, STEPS, SAVE_EVERY = 16, 20, 4


def main(folder: str = "") -> None:
    with torch.device("meta"):
        model = NanoGPT(SIZES)
    world = int(os.environ["WORLD_SIZE"])
    parallel = autoptd.parallelize(model, world=world, cluster="local", batch=BATCH, seq=64, precision="fp32")
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(parallel.optimizer, STEPS)
    stop = parallel.stop_request()
    if folder:
        parallel.resume(folder, others={"rates": rates})
    tokens = torch.randint(0, 64, (BATCH * STEPS, 65), generator=torch.Generator().manual_seed(0))
    sampler = parallel.sampler(len(tokens))
    sampler.start_at(parallel.step)
    for mine in DataLoader(tokens, batch_sampler=sampler) if parallel.step < STEPS else ():  # this rank's share
        parallel.train_step({"idx": mine[:, :-1], "targets": mine[:, 1:]})
        rates.step()
        asked = stop.asked()
        if folder and (asked or parallel.step % SAVE_EVERY == 0):
            parallel.save(folder, others={"rates": rates}, keep=3, wait=asked)
        if asked:
            sys.exit(stop.exit_code)
        if os.environ["RANK"] == "0":
            print(parallel.report())
    parallel.finish_saving()


if __name__ == "__main__":
    main(*sys.argv[1:])
