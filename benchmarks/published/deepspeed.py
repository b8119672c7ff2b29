"""Memory that Megatron-DeepSpeed takes beside its tensors in the table of `cost_models/memory.py`.

Read in the code of DeepSpeed 0.5.10 (fp16, ZeRO 1: runtime/zero/stage_1_and_2.py), 0.6.5 (bf16: runtime/engine.py,
runtime/bf16_optimizer.py) and of bigscience-workshop/Megatron-DeepSpeed:

    a flat copy     of a bucket of gradients while it is reduced (`allreduce_bucket`; neither a buffer of its own nor
                    a second one, since stage 1 switches contiguous_gradients and overlap_comm off), or, in fp16, of
                    the gradients of this rank's partition at the step (`flatten`, before they are cast to float32)
    communicators   DeepSpeed has groups of its own for tp, dp, pp, all stages of a replica and tied stages
                    (PipelineParallelGrid in runtime/pipe/topology.py; PipelineModule), while Megatron uses those of
                    mpu: tp in its layers, dp and pp to count samples (megatron/data/gpt_dataset.py)
"""

from __future__ import annotations

from autoptd.cost_models.memory import Memory, communicator_bytes
from benchmarks.published.rows import Row

# Elements of gradients that are reduced at once: reduce_bucket_size by default, and MEMORY_OPT_ALLREDUCE_SIZE
BUCKET = 500_000_000


def bucket_bytes(row: Row) -> int:
    """Return the bytes of a bucket of gradients: of 16 bits, or float32 ones of BF16_Optimizer."""
    return (4 if row.precision == "bf16" else 2) * BUCKET


def beside(row: Row, parameters: int) -> Memory:
    """Return the bytes that a rank with so many bytes of bf16 or fp16 parameters holds beside its predicted memory."""
    if "DeepSpeed" not in row.framework or row.sharding != "zero1":
        return Memory()
    flat = bucket_bytes(row) if row.precision == "bf16" else max(bucket_bytes(row), parameters // row.dp)
    groups = [row.tp, row.dp, row.pp, row.tp * row.pp, min(row.pp, 2)]
    return Memory(communication=flat + communicator_bytes(groups))
