"""Runs for the tests of `benchmarks.published`."""

from __future__ import annotations

from pathlib import Path

from benchmarks.published.rows import Row, read_rows

SAMPLE = Path(__file__).parents[2] / "benchmarks" / "published" / "sample.jsonl"
TINY = {
    "n_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "n_heads": 4,
    "n_kv_heads": 4,
    "head_dim": 8,
    "vocab_size": 250,
    "seq_len_tokens": 16,
}
OF_ROW = {row.id: row for row in read_rows(SAMPLE)}


def tiny(**changes: object) -> Row:
    """A run of a tiny model on 8 GPUs; its measured figures are made up."""
    given = {
        **TINY,
        "id": "toy:0",
        "group": "toy",
        "arch": "gpt",
        "framework": "Megatron-LM 2022",
        "precision": "bf16",
        "gpu_type": "A100-SXM4-80GB",
        "n_gpus": 8,
        "dp": 4,
        "tp": 2,
        "micro_batch_size_seqs": 1,
        "global_batch_size_seqs": 8,
        "complete_for_time": True,
        "iteration_time_s": 0.5,
    }
    return Row(**{**given, **changes})
