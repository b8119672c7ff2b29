"""Plan of a published run, in the keys of `fix` and `assume` of `autoptd.plan`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

from benchmarks.published.engines import deepspeed_bucket_bytes
from benchmarks.published.rows import Row, Unsupported
from benchmarks.published.shapes import Shape

Fix = dict[str, Any]

# The row's sharding -> ZeRO stage (Rajbhandari et al. 2020; Zhao et al. 2023, table of FSDP strategies).
_ZERO = {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp_shard_grad_op": 2, "fsdp_full_shard": 3, "hsdp": 3}
# Megatron-Core's --ddp-bucket-size by default, in elements, if reduction overlaps with backward (its arguments; quoted
# from memory); otherwise it reduces all gradients at once.
_MEGATRON_BUCKET, _MEGATRON_BUCKET_RANK = 40_000_000, 1_000_000
_ALL_AT_ONCE = 2**62
# Megatron-Core's --recompute-modules that cost little time (a norm, an activation, a small product): not counted
_LIGHT = {"layernorm", "mla_up_proj", "moe_act", "rmsnorm", "mla_up_projection", "swiglu"}
_RECOMPUTE = ("none", "selective", "full")
# Systems whose elementwise kernels are fused as a compiler fuses them, and whose products add to gradients in float32
_OWN_KERNELS = ("MegaScale-MoE", "HAI-LLM")
# With the fused kernels of Apex and FlashAttention, and Megatron's cross entropy: mist/modules/fused_softmax.py,
# fused_layer_norm.py and losses.py at d69e530
_FUSED_BY_HAND = "Mist"


def fix_of(row: Row, shape: Shape) -> Fix:
    """Return the choices of a run, including those that autoptd predicts but does not execute.

    Raises Unsupported if they contradict each other or no plan can express them.
    """
    _check(row)
    zero = _zero(row)
    fix: Fix = {
        "dp": row.dp,
        "tp": row.tp,
        "pp": row.pp,
        "cp": row.cp,
        "ep": row.ep,
        "virtual": row.vpp_chunks_per_stage,
        "micro": row.micro_batch_size_seqs,
        "zero": zero,
        "shards": 0,
        "recompute": _recompute(row),
        "sequence_parallel": row.sequence_parallel,
        "schedule": "interleaved" if row.vpp_chunks_per_stage > 1 else "1f1b",
        "overlap": _overlap(row, shape, zero),
        "kernels": _kernels(row),
        "gradients": _gradients(row, zero),
        "stages": _stages(row),
        "sends": _sends(row),
        "memory": "ignore",  # predict time and memory of a plan that does not fit, too
    }
    if cuts := _cuts(row, shape):
        fix["cuts"], fix["stages"] = cuts, "balanced"
    if row.sequence_parallel and row.is_megatron:
        fix["gathers"] = "again"  # Korthikanti et al. 2022, section 4.2.2; nanotron: docs/accuracy.md
    if "DeepSpeed" in row.framework and zero:
        fix["bucket_bytes"] = deepspeed_bucket_bytes(row)
    elif row.is_megatron:
        elements = max(_MEGATRON_BUCKET, _MEGATRON_BUCKET_RANK * row.dp * row.cp)
        width = 2 if fix["gradients"] == "compute" else 4
        fix["bucket_bytes"] = width * elements if "dp" in fix["overlap"] else _ALL_AT_ONCE
    if row.is_megatron or row.torch_compile or any(name in row.framework for name in ("Composer", "nanotron", "Mist")):
        # Megatron's vocab_parallel_cross_entropy, and nanotron's (tensor_parallel/functional.py); compiled loss and
        # backward; MPT's fused_crossentropy (from memory); Mist's losses.py
        fix["loss"] = "in_place"
    else:
        fix["loss"] = "kept"
    if shape.experts and row.tp > 1:
        fix["etp"] = row.etp or row.tp
    if row.ep > 1:
        fix["dispatch"] = _dispatch(row)
        fix["routing"] = _routing(row)
    if row.offload_ratios_per_stage:
        fix["offload"] = _offload(row)
    if "ulysses" in row.cp_kind.lower():
        fix["context"] = "ulysses"
    if shape.experts and (how := _permutation(row)):
        fix["permutation"] = how
    if row.precision == "fp8":
        fix["fp8"] = _recipe(row)
    fix["attention"] = _attention(row)
    if row.tp > 1:
        fix["splits"] = _splits(row, shape)
    if zero >= 2 and row.fsdp_shard_size not in (None, row.dp):
        fix["shards"] = row.fsdp_shard_size
    return fix


def _check(row: Row) -> None:
    row.need("n_gpus", "micro_batch_size_seqs", "global_batch_size_seqs", "n_layers")
    assert row.micro_batch_size_seqs and row.global_batch_size_seqs and row.n_layers
    ranks = row.dp * row.tp * row.pp * row.cp
    if ranks != row.n_gpus:
        raise Unsupported(f"dp {row.dp} × tp {row.tp} × pp {row.pp} × cp {row.cp} is {ranks}, not {row.n_gpus} GPUs")
    share = row.micro_batch_size_seqs * row.dp
    if row.global_batch_size_seqs % share:
        raise Unsupported(f"a batch of {row.global_batch_size_seqs} is not a multiple of dp × micro = {share}")
    chunks = row.pp * row.vpp_chunks_per_stage
    if chunks > row.n_layers + row.mtp_num_layers + 2:  # Megatron-Core may count embedding and loss as layers
        raise Unsupported(f"{row.n_layers} layers are too few for {chunks} chunks")
    if row.fsdp_shard_size and row.dp % row.fsdp_shard_size and row.fsdp_shard_size != row.n_gpus:
        raise Unsupported(f"shards of {row.fsdp_shard_size} do not divide dp {row.dp}")


def _zero(row: Row) -> int:
    """Return the ZeRO stage: 3 for `fsdp_full_shard(zero3)`; the word before the bracket decides."""
    word = row.sharding.split("(")[0].strip().lower()
    if word not in _ZERO:
        raise Unsupported(f"unknown sharding {row.sharding!r}")
    return _ZERO[word]


def _offload(row: Row) -> list[float]:
    """Return the share of the optimizer state in host memory, by stage. Raises Unsupported if other state is there."""
    for shares in row.offload_ratios_per_stage:
        if others := [name for name, share in shares.items() if share and name != "optimizer"]:
            raise Unsupported(f"{', '.join(others)} in host memory")
    return [shares["optimizer"] for shares in row.offload_ratios_per_stage]


def _recompute(row: Row) -> str:
    if row.full_recompute_layers_per_stage:  # `recomputing` of benchmarks/published/predict.py recomputes them
        return "none"
    if row.recompute == "unknown":
        return "none"
    if row.recompute not in _RECOMPUTE:
        raise Unsupported(f"unknown recompute {row.recompute!r}")
    if row.recompute == "selective":
        detail = row.recompute_detail.lower()
        if _LIGHT.intersection(words := set(re.findall(r"\w+", detail.replace(" ", "_").replace(",_", " ")))):
            return "full" if "moe" in words else "selective" if "core_attn" in words else "none"
        if "op-level" in detail:
            return "ops"
        if "fraction" in detail:
            raise Unsupported("recomputes an unpublished fraction of the blocks")
    return row.recompute


def _overlap(row: Row, shape: Shape, zero: int) -> tuple[str, ...]:
    """Return the communication that overlaps compute: FSDP always prefetches, interleaved Megatron-Core sends early."""
    found = []
    if _hides(row.dp_comm_overlap, row.is_megatron_core and bool(shape.experts)) or zero >= 2:
        found.append("dp")
    if row.vpp_chunks_per_stage > 1 and row.is_megatron_core:
        found.append("p2p")
    if row.ep_comm_overlap and row.ep > 1:
        found.append("ep")
    recipes = bool(shape.experts) and any(name in row.framework for name in ("NeMo", "Megatron-Bridge"))
    if _hides(row.tp_comm_overlap, recipes) and "nanotron" not in row.framework:  # nanotron hides one rank's shard only
        found.append("tp")
    return tuple(found)


def _hides(stated: bool | None, usual: bool) -> bool:
    """Return whether communication overlaps compute; `usual`: whether it does where a row does not say.

    The recipes of Megatron-Core overlap dp, those of NeMo and Megatron-Bridge tp too (userbuffers). (From memory.)
    """
    return usual if stated is None else stated


def _dispatch(row: Row) -> str:
    """Return how rows travel to experts; Megatron-Core gives each tp rank its part of them."""
    named = row.moe_dispatcher.lower() or (
        "deepep" if "Megatron-Bridge" in row.framework else ""
    )  # as its other recipes
    if any(word in named for word in ("hybridep", "deepep", "custom")):
        return "merged"
    return "slices" if row.is_megatron and row.tp > 1 else "rows"


def _permutation(row: Row) -> str:
    """Return the kernels that permute rows of experts (`search/permutation.py`); "" if the graph says.

    HybridEP, and the layers of MegaScale-MoE and DeepSeek, have fused ones. Megatron-Core adds rows up by index unless
    given --moe-permute-fusion, which exists since February 2025. Recipes of Megatron-Bridge and the ModelZoo give it,
    and XTuner's benchmark of Pai-Megatron-Patch (docs/en/benchmark/megatron_moe_benchmark.md); NeMo's of DeepSeek,
    Qwen3 and Llama 4 do (nemo/collections/llm, scripts/performance), of others not.
    """
    words, named = row.notes.lower(), row.moe_dispatcher.lower()
    if "permute fusion off" in words:
        return "added"
    if "permute fusion" in words or any(word in named for word in ("hybridep", "custom")):
        return "fused"
    if not row.is_megatron:
        return "fused" if _has_own_kernels(row) else ""
    if "NeMo" in row.framework:
        fused = any(name in row.model_name for name in ("DeepSeek", "Qwen3", "Llama4"))
        return "fused" if fused else "weighted"
    if any(name in row.framework for name in ("Megatron-Bridge", "Pai-Megatron")) or row.framework == "Megatron-Core":
        return "fused"
    if "f1f03922" in row.framework and not named:  # the default of its --moe-token-dispatcher-type is all-gather
        return "twice"
    return "weighted" if re.search(r"v0\.([0-9]|1[01])\b|f1f03922", row.framework) else "added"


def _routing(row: Row) -> str:
    """Return "natural" for a router that learns, "balanced" if a benchmark forces it or drops rows beyond a capacity.

    Where a row does not say, NVIDIA's recipes are benchmarks, which do either; other frameworks balance by losses only.
    """
    words = row.moe_routing.lower()
    if any(word in words for word in ("balanced", "drop", "capacity")) and "natural" not in words:
        return "balanced"
    return "natural" if "natural" in words or not row.is_megatron_core else "balanced"


def _recipe(row: Row) -> str:
    """Return the fp8 recipe: by the size of the parts that have a scale of their own."""
    words = row.fp8_recipe.lower()
    if "mxfp8" in words:
        return "mxfp8"
    return "block" if "128x128" in words or "block" in words else "tensor"


def _attention(row: Row) -> str:
    """Return the fused attention that a row names, by default FlashAttention-2.

    Where a row of Megatron does not say, it is that of Transformer Engine (the default of --transformer-impl), which
    takes cuDNN's on Hopper and later devices (NeMo's documentation, memory optimizations).
    """
    words = row.attention_impl.lower()
    if not words and row.is_megatron and "A100" not in (row.gpu_type or "A100"):
        return "cudnn"
    if "cudnn" in words or re.search(r"\bte\b|transformer.?engine", words):
        return "cudnn"
    if "torchtitan" in row.framework and (row.gpu_type or "").startswith(("B", "GB")):
        return "torch"  # cuDNN's there (github.com/pytorch/torchtitan pull request 1209)
    return "triton" if "triton" in words else "flash"


def _kernels(row: Row) -> str:
    """Return the kernels of elementwise ops: compiled, fused by hand (Megatron) or eager."""
    if row.torch_compile or _has_own_kernels(row):
        return "compiled"
    return "fused" if row.is_megatron or _FUSED_BY_HAND in row.framework else "eager"


def _has_own_kernels(row: Row) -> bool:
    return any(name in row.framework for name in _OWN_KERNELS)


def _gradients(row: Row, zero: int) -> str:
    """Return the type that accumulates and reduces gradients, the compute type or "main" (float32); "fused" if the
    products add to those in float32 and the row's other kernels do not say so already.

    DeepSeek-V3 keeps the gradients that it accumulates in float32 (DeepSeek-AI 2024, section 3.3.1), and the products
    of its library, DeepGEMM, are D = C + A B, those of weight gradients too (its README). MegaScale-MoE accumulates
    main gradients in float32 (Jin et al. 2025, section 5); that its products add to them is how Megatron-LM does it,
    on which MegaScale is built (Jiang et al. 2024). (The two papers are quoted from memory and from summaries.)

    A type quoted in the notes decides. Otherwise, Megatron accumulates bf16 gradients in float32 and fp16 ones in fp16;
    the matmuls of its 2022 release add to float32 gradients (--gradient-accumulation-fusion). FSDP reduces in float32
    unless its policy is the compute type throughout, as that of fms-fsdp is. (Both quoted from memory.) nanotron
    accumulates in float32 (ACCUMULATE_GRAD_IN_FP32 in scripts/scaling_benchmarks.py) and without ZeRO wraps the model
    in torch's DistributedDataParallel (`make_ddp` in trainer.py), whose reducer has buckets in the compute type beside.
    """
    if quoted := re.search(r"grads accumulated (fp32|fp16|bf16)", row.notes):
        float32 = "both" if "DeepSpeed" in row.framework else "main"  # BF16_Optimizer also has bf16 gradients
        return float32 if quoted.group(1) == "fp32" else "compute"
    if row.precision == "fp16":
        return "main" if row.framework == "Megatron-LM 2022" else "compute"
    if _has_own_kernels(row):
        return "fused"
    if "nanotron" in row.framework and zero == 0 and row.dp > 1:
        return "both"
    pure = "mixed_precision=PURE" in row.notes or (row.framework == "PyTorch FSDP1" and zero >= 2)
    return "compute" if pure else "main"


def _stages(row: Row) -> str:
    """Return how layers are cut into stages: evenly in Megatron (counting embedding and head if that divides)."""
    return "even" if row.is_megatron else "balanced"


def _cuts(row: Row, shape: Shape) -> list[str]:
    """Return the first block of each stage but the first, as the row or its framework says; [] for even stages."""
    chunks = row.pp * row.vpp_chunks_per_stage
    if chunks == 1:
        return []
    if "nanotron" in row.framework:
        return nanotron_cuts(shape, row.pp)
    if row.pp_layout:
        return layout_cuts(row.pp_layout, shape, chunks)
    if row.layers_per_stage:
        return counted_cuts(row.layers_per_stage, shape, chunks)
    alike = shape.experts is None or len(set(shape.experts.layers)) == 1
    whole = shape.layers % chunks == 0 or (shape.layers + 2) % chunks == 0  # embedding and loss count as a layer each
    return [] if (whole and alike and not shape.ahead) or not row.is_megatron else uneven_cuts(shape, chunks)


def chunk_counts(row: Row) -> list[int]:
    """Return the numbers of chunks per rank, above one, that a run may have had whose number was not published.

    Megatron-Core's guide (core/transformer/moe/README.md, v0.8 to v0.11) tells to take several wherever there is a
    pipeline: any divisor of a stage's layers, if microbatches are a multiple of the stages.
    """
    unknown = "vpp" in row.config_source_kind and "not published" in row.config_source_kind
    if not unknown or row.pp == 1 or not row.is_megatron_core or row.n_layers is None or row.n_layers % row.pp:
        return []
    assert row.global_batch_size_seqs and row.micro_batch_size_seqs
    microbatches, layers = row.global_batch_size_seqs // (row.dp * row.micro_batch_size_seqs), row.n_layers // row.pp
    return [n for n in range(2, layers + 1) if layers % n == 0] if microbatches % row.pp == 0 else []


def uneven_cuts(shape: Shape, chunks: int) -> list[str]:
    """Return the first blocks of chunks that are as equal as they can be, the shorter ones last; or with one layer
    fewer in the first and last one, if all others then have as many.

    Megatron's recipes place layers that do not divide so: the last chunk has the loss, and the layer that predicts a
    token more, besides.
    """
    if shape.layers % chunks and (shape.layers + 2) % chunks == 0 and not shape.ahead:
        return [f"blocks.{i * ((shape.layers + 2) // chunks) - 1}" for i in range(1, chunks)]
    each, longer = divmod(shape.layers + shape.ahead, chunks)
    starts = [i * each + min(i, longer) for i in range(1, chunks)]
    if each == 0 or starts[-1] >= shape.layers + (1 if shape.ahead else 0):
        raise Unsupported(f"{shape.layers} layers are too few for {chunks} chunks")
    return [f"blocks.{i}" if i < shape.layers else "norm" for i in starts]


def layout_cuts(layout: str, shape: Shape, chunks: int) -> list[str]:
    """Return the first block of each chunk but the first, by Megatron-Core's --pipeline-model-parallel-layout.

    `Et*4|(t*4|)*14tmL`: E embedding, t layer, m layer that predicts a token more, L loss; `|` ends a chunk, `*n`
    repeats a letter or a bracket.
    """
    text = re.sub(r"\(([^()]*)\)\*(\d+)", lambda found: found[1] * int(found[2]), layout)
    text = re.sub(r"(\w)\*(\d+)", lambda found: found[1] * int(found[2]), text)
    counts = [part.count("t") for part in text.split("|")]
    if len(counts) != chunks or sum(counts) != shape.layers:
        raise Unsupported(f"layout {layout} has {sum(counts)} layers in {len(counts)} chunks")
    return [_first(part, sum(counts[:i])) for i, part in enumerate(text.split("|")) if i]


def counted_cuts(layers: Sequence[int], shape: Shape, chunks: int) -> list[str]:
    """Return the first block of each chunk but the first, if each has so many layers."""
    if len(layers) != chunks or sum(layers) != shape.layers:
        raise Unsupported(f"{sum(layers)} layers in {len(layers)} stages, not {shape.layers} in {chunks}")
    return [f"blocks.{first}" for first in itertools.accumulate(layers[:-1])]


def _first(part: str, block: int) -> str:
    """Return the module that begins a chunk, whose first layer would be `block`."""
    return f"blocks.{block}" if "t" in part else "norm"


def nanotron_cuts(shape: Shape, pp: int) -> list[str]:
    """Return the first block of each stage but the first, by nanotron's rule.

    Stages take blocks in order until their cost exceeds their share of the total (`build_model` in `models/base.py`,
    `get_block_compute_costs` in `models/llama.py`). Multiplications per token: 4 h² + 3 f h a block, v h the head.
    """
    block = 4 * shape.heads * (shape.width // shape.heads) * shape.width + 3 * shape.ffn * shape.width
    whole, stage, starts = shape.layers * block + shape.vocab * shape.width, 0, []
    for i in range(1, shape.layers):
        if i * block > whole * (stage + 1) / pp:
            stage += 1
            starts.append(f"blocks.{i}")
    if stage != pp - 1:
        raise Unsupported(f"nanotron's rule cuts {shape.layers} blocks into {stage + 1} stages, not {pp}")
    return starts


def _sends(row: Row) -> str:
    """Return "slices" for scatter-gather P2P (Narayanan et al. 2021, section 4.1; DeepSpeed's pipeline has it too).

    Megatron-Core dropped it: with sequence parallelism the tensors are already split (quoted from memory).
    """
    return "slices" if row.is_megatron and not row.is_megatron_core else "whole"


def _splits(row: Row, shape: Shape) -> dict[str, str]:
    """Return Megatron's tensor-parallel splits (Shoeybi et al. 2019, section 3): columns, rows, and the vocabulary."""
    up = "S0/2" if shape.activation == "swiglu" and shape.joined else "S0"
    found: dict[str, str] = {}
    if shape.latent:  # MLASelfAttention of Megatron-Core: what is compressed is whole on every rank
        found |= {"*.q_up.weight": "S0", "*.kv_up.weight": "S0"}
    elif shape.joined:
        found |= {"*.qkv.weight": "S0"}
    else:
        found |= {"*.q.weight": "S0", "*.k.weight": "S0", "*.v.weight": "S0"}
    for perceptron in _perceptrons(shape):
        gate = {f"*.{perceptron}.gate.weight": "S0"} if shape.activation == "swiglu" and not shape.joined else {}
        found |= {**gate, f"*.{perceptron}.up.weight": up, f"*.{perceptron}.down.weight": "S1"}
    if shape.experts and row.etp != 1:
        found |= {"*.experts.up": "S2/2" if shape.activation == "swiglu" else "S2", "*.experts.down": "S1"}
    found |= {"*.attention.out.weight": "S1", "tokens.weight": "S0"}
    return found if shape.tied else {**found, "head.weight": "S0"}


def _perceptrons(shape: Shape) -> tuple[str, ...]:
    """Return the names of the perceptrons that every rank has a part of."""
    if shape.experts is None:
        return ("perceptron",)
    dense = ("perceptron",) if "d" in shape.experts.layers else ()
    return (*dense, "shared") if shape.experts.shared else dense
