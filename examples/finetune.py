"""Fine-tune a language model: data, steps, evaluation with metrics, a log, checkpoints, and the weights at the end.

    torchrun --nproc-per-node 4 --max-restarts 3 examples/finetune.py out

Started again, it goes on from the newest checkpoint in `out`. With a second argument, the id of a data set of the Hub
with a column `text`, it trains on the bytes of those texts (`pip install datasets`); otherwise on generated ones.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import autoptd
from autoptd.trackers import Console, JsonLines

LENGTH, STEPS, EVERY = 32, 12, 4
METRICS = {  # a value of each sample; the means of both give the share of the right tokens
    "right": lambda out, batch: (out.logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]).sum(-1),
    "tokens": lambda out, batch: (batch["labels"][:, 1:] >= 0).sum(-1),
}


def texts(data_set: str) -> list[str]:
    if not data_set:
        return [f"{a} plus {b} is {a + b}, and {b} plus {a} is too" for a in range(12) for b in range(12)]
    from datasets import load_dataset

    return load_dataset(data_set, split="train")["text"]


def collate(rows: list[str]) -> dict[str, torch.Tensor]:
    ids = torch.stack([torch.tensor([*row.encode()[:LENGTH].ljust(LENGTH)]) for row in rows])
    return {"input_ids": ids, "labels": ids.masked_fill(ids == ord(" "), -100)}


def main(out: str, data_set: str = "") -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, **sizes))
    rows = texts(data_set)
    train, held_out = rows[: -len(rows) // 5], rows[-len(rows) // 5 :]
    par = autoptd.parallelize(model, inputs=collate(train[:2]), batch=16, precision="fp32", cluster="local")
    par.resume(f"{out}/checkpoints")
    sampler = par.sampler(len(train))
    sampler.start_at(par.step)
    with par.tracker(Console(), JsonLines(f"{out}/log.jsonl")) as tracker:
        while par.step < STEPS:
            for batch in DataLoader(train, batch_sampler=sampler, collate_fn=collate):
                par.train_step(batch)
                if par.step % EVERY == 0:
                    rest = DataLoader(held_out, batch_sampler=par.eval_sampler(len(held_out)), collate_fn=collate)
                    found = par.evaluate(rest, METRICS)
                    tracker.log(par.step, {**par.report().to_data(), "accuracy": found["right"] / found["tokens"]})
                    par.save(f"{out}/checkpoints", keep=2, wait=False)
                if par.step == STEPS:
                    break
    par.finish_saving()
    if not Path(out, "weights").exists():
        par.export_weights(f"{out}/weights")


if __name__ == "__main__":
    main(*sys.argv[1:])
