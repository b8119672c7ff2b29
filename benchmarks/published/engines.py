"""Memory that other systems' engines take beside what a plan predicts, as their code shows.

Megatron-DeepSpeed (DeepSpeed 0.5.10 for fp16 with ZeRO 1: runtime/zero/stage_1_and_2.py; 0.6.5 for bf16:
runtime/engine.py, runtime/bf16_optimizer.py; bigscience-workshop/Megatron-DeepSpeed):

    a flat copy     of a bucket of gradients while it is reduced (`allreduce_bucket`; neither a buffer of its own nor
                    a second one, since stage 1 switches contiguous_gradients and overlap_comm off), or, in fp16, of
                    the gradients of this rank's partition at the step (`flatten`, before they are cast to float32)
    communicators   DeepSpeed has groups of its own for tp, dp, pp, all stages of a replica and tied stages
                    (PipelineParallelGrid in runtime/pipe/topology.py; PipelineModule), while Megatron uses those of
                    mpu: tp in its layers, dp and pp to count samples (megatron/data/gpt_dataset.py)

nanotron (e24d2483, parallel/tensor_parallel/functional.py): the largest logit is not subtracted in place, so that
float32 logits are beside the probabilities at the end of a forward pass. `loss` "in_place" counts their gradient in
the compute type beside these.
"""

from __future__ import annotations

from autoptd.cost_models.memory import Memory, communicator_bytes
from benchmarks.published.rows import Row

# Elements of gradients that are reduced at once: reduce_bucket_size by default, and MEMORY_OPT_ALLREDUCE_SIZE
_BUCKET = 500_000_000


def deepspeed_bucket_bytes(row: Row) -> int:
    """Return the bytes of DeepSpeed's bucket of gradients: of 16 bits, or float32 ones of BF16_Optimizer."""
    return (4 if row.precision == "bf16" else 2) * _BUCKET


def beside(row: Row, parameters: int) -> Memory:
    """Return the bytes that a rank with so many bytes of bf16 or fp16 parameters holds beside its predicted memory."""
    if "DeepSpeed" in row.framework and row.sharding == "zero1":
        bucket = deepspeed_bucket_bytes(row)
        flat = bucket if row.precision == "bf16" else max(bucket, parameters // row.dp)
        groups = [row.tp, row.dp, row.pp, row.tp * row.pp, min(row.pp, 2)]
        return Memory(communication=flat + communicator_bytes(groups))
    if "nanotron" in row.framework and row.pp == 1:  # with a pipeline, its figures are of a stage without logits
        row.need("micro_batch_size_seqs", "seq_len_tokens", "vocab_size")
        assert row.micro_batch_size_seqs and row.seq_len_tokens and row.vocab_size
        logits = row.micro_batch_size_seqs * row.seq_len_tokens // row.cp * row.vocab_size // row.tp
        return Memory(temporary=(4 - 2) * logits)
    return Memory()
