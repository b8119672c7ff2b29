"""Train and evaluate on a number of samples that no number of processes divides; each sample counts once.

    torchrun --nproc-per-node 4 examples/uneven_batches.py

A batch of 10 over 4 data-parallel ranks is shared as 3 + 3 + 2 + 2. The 23 samples that are evaluated are 8 + 8 + 7.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autoptd


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 3))
    x = torch.randn(120, 8)
    train, held_out = TensorDataset(x[:97], x[:97, :3].argmax(1)), TensorDataset(x[97:], x[97:, :3].argmax(1))
    par = autoptd.parallelize(
        model,
        inputs={"input": x[:2]},
        loss=nn.CrossEntropyLoss(),
        targets=train[:2][1],
        batch=10,
        precision="fp32",
        cluster="local",
        optimizer_options={"lr": 1e-2},
    )
    for _ in range(5):
        for inputs, targets in DataLoader(train, batch_sampler=par.sampler(len(train))):
            par.train_step({"input": inputs, "targets": targets})
    rest = [{"input": a, "targets": b} for a, b in DataLoader(held_out, batch_sampler=par.eval_sampler(23, 8))]
    found = par.evaluate(rest, {"accuracy": lambda out, batch: out.argmax(-1) == batch["targets"]})
    values = par.predict(rest, {"class": lambda out, batch: out.argmax(-1)})["class"]
    if par.rank == 0:
        right = int((values == held_out[:][1]).sum())
        print(f"after {par.step} steps {right} of {len(values)} are right: {float(found['accuracy']):.4f}")


if __name__ == "__main__":
    main()
