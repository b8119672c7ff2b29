"""Time to trace and to plan state-space models and hybrids at their published sizes, and what tp splits of them.

Each model is traced and planned in a fresh process, from a module on meta, without importing torch and transformers
being counted. Seconds are those of the processor, so that other work on the machine changes them little. The share of
parameters that tp splits is that of a second plan, in which tp is fixed and experts are not split over ranks.

The configurations are those that were released, or that a paper's table lists. Fields that equal transformers' defaults
are left out. "recalled" marks those written from memory: the number of parameters, which a test compares with the
published one, is what they were checked against.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.planning import CLUSTER, EACH_S, LIMIT_S

WORLD, SPLIT_SHARE = 64, 0.9

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Hybrid:
    """A published model: its architecture and configuration, and its size in billions of parameters.

    tp: ranks for which the share of split parameters is measured, which divide its heads. wide: whether the module is
    given in float32; else in bfloat16, as released, where products of buffers and activations need one type.
    """

    name: str
    architecture: str
    model_type: str
    billions: float
    fields: Fields = field(default_factory=dict)
    seq: int = 4096
    tp: int = 8
    batch: int = 64
    wide: bool = True

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as a file of transformers' has it."""
        return {"model_type": self.model_type, "architectures": [self.architecture], **self.fields}


def pattern(text: str) -> list[str]:
    """Return the layers of a pattern such as `M-M*` of Nemotron-H."""
    names = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}
    return [names[c] for c in text]


def every(period: int, layers: int, one: str = "full_attention", other: str = "linear_attention") -> list[str]:
    """Return layers of which the last of each period is `one`."""
    return [one if i % period == period - 1 else other for i in range(layers)]


def at(places: Iterable[int], layers: int, one: str, other: str) -> list[str]:
    """Return layers that are `one` at these places."""
    return [one if i in set(places) else other for i in range(layers)]


NEMOTRON_8B = "M-M-M-M*" + "-M-M-M-M-M*" * 3 + "-M-M-M-M-M-"
# NVIDIA 2025, Nemotron-H (arXiv:2504.03624), table 1: 54 Mamba-2, 54 MLP and 10 attention layers; their order is
# that of the 8B model, continued
NEMOTRON_56B = "M-M-M-M*" + "-M-M-M-M-M*" * 9 + "-M-M-M-M-M-"
# recalled from the released configuration of 98 layers
NEMOTRON_47B = "M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-"

MODELS = (
    # Gu and Dao 2023 (arXiv:2312.00752) and the released configuration
    Hybrid(
        "mamba-2.8b",
        "MambaForCausalLM",
        "mamba",
        2.77,
        {"hidden_size": 2560, "num_hidden_layers": 64, "vocab_size": 50280},
        2048,
    ),
    # Dao and Gu 2024 (arXiv:2405.21060); recalled: the vocabulary of 50,277 padded to a multiple of 16
    Hybrid(
        "mamba2-2.7b",
        "Mamba2ForCausalLM",
        "mamba2",
        2.70,
        {
            "hidden_size": 2560,
            "num_hidden_layers": 64,
            "vocab_size": 50288,
            "num_heads": 80,
            "n_groups": 1,
            "tie_word_embeddings": True,
        },
        2048,
    ),
    # Zuo et al. 2024 (arXiv:2410.05355), table 1; recalled: rank of the time step
    Hybrid(
        "falcon-mamba-7b",
        "FalconMambaForCausalLM",
        "falcon_mamba",
        7.27,
        {
            "hidden_size": 4096,
            "num_hidden_layers": 64,
            "vocab_size": 65024,
            "time_step_rank": 256,
            "tie_word_embeddings": False,
        },
    ),
    # Lieber et al. 2024 (arXiv:2403.19887): transformers' defaults are those of Jamba v0.1, the size of Jamba Mini
    Hybrid("jamba-mini", "JambaForCausalLM", "jamba", 51.6),
    # IBM, Princeton, CMU and UIUC 2024, Bamba-9B v1; recalled from the released configuration
    Hybrid(
        "bamba-9b",
        "BambaForCausalLM",
        "bamba",
        9.78,
        {
            "vocab_size": 128256,
            "attn_layer_indices": [9, 18, 27],
            "mamba_d_state": 128,
            "mamba_d_head": 64,
        },
    ),
    # Glorioso et al. 2024 (arXiv:2411.15242); recalled from the released configuration
    Hybrid(
        "zamba2-7b",
        "Zamba2ForCausalLM",
        "zamba2",
        7.36,
        {
            "hidden_size": 3584,
            "num_hidden_layers": 81,
            "layers_block_type": at(
                (6, 11, 17, 23, 29, 35, 41, 47, 53, 59, 65, 71, 77), 81, "hybrid", "linear_attention"
            ),
            "n_mamba_heads": 112,
            "mamba_ngroups": 2,
            "num_mem_blocks": 2,
            "use_mem_rope": True,
        },
    ),
    # arXiv:2504.03624, table 1, and the released configurations
    Hybrid(
        "nemotron-h-8b",
        "NemotronHForCausalLM",
        "nemotron_h",
        8.1,
        {"layers_block_type": pattern(NEMOTRON_8B)},
    ),
    *(
        Hybrid(
            f"nemotron-h-{size}",
            "NemotronHForCausalLM",
            "nemotron_h",
            billions,
            {
                "layers_block_type": pattern(layers),
                "hidden_size": 8192,
                "intermediate_size": width,
                "num_attention_heads": 64,
                "mamba_num_heads": 256,
                "ssm_state_size": 256,
            },
        )
        for size, billions, layers, width in (("47b", 46.8, NEMOTRON_47B, 30720), ("56b", 56.0, NEMOTRON_56B, 32768))
    ),
    # Zuo et al. 2025 (arXiv:2507.22448), table of models; recalled: widths of the MLP and the SSM
    Hybrid(
        "falcon-h1-34b",
        "FalconH1ForCausalLM",
        "falcon_h1",
        33.6,
        {
            "vocab_size": 261120,
            "hidden_size": 5120,
            "intermediate_size": 21504,
            "num_hidden_layers": 72,
            "num_attention_heads": 20,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "mamba_d_ssm": 4096,
            "mamba_n_heads": 32,
            "mamba_d_head": 128,
            "mamba_n_groups": 2,
            "max_position_embeddings": 262144,
        },
        tp=4,
    ),
    # IBM 2025, Granite 4.0 H Small; recalled from the released configuration
    Hybrid(
        "granite-4.0-h-small",
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        32.2,
        {
            "vocab_size": 100352,
            "intermediate_size": 768,
            "shared_intermediate_size": 1536,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "num_local_experts": 72,
            "num_experts_per_tok": 10,
            "layer_types": at((5, 15, 25, 35), 40, "full_attention", "linear_attention"),
            "mamba_d_state": 128,
            "position_embedding_type": "nope",
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
    ),
    # the released configuration
    Hybrid(
        "qwen3-next-80b-a3b",
        "Qwen3NextForCausalLM",
        "qwen3_next",
        79.7,
        {"intermediate_size": 5120, "layer_types": every(4, 48)},
    ),
    # recalled: heads of the linear layers (the others as in training scripts of others)
    Hybrid(
        "qwen3.5-27b",
        "Qwen3_5ForCausalLM",
        "qwen3_5_text",
        26.9,
        {
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "linear_num_value_heads": 48,
            "layer_types": every(4, 64),
        },
    ),
    # transformers' defaults, those of Qwen3.5-35B-A3B
    Hybrid("qwen3.5-35b-a3b", "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", 34.7, {"layer_types": every(4, 40)}),
    # Kimi Team 2025 (arXiv:2510.26692): transformers' defaults
    Hybrid("kimi-linear-48b-a3b", "KimiLinearForCausalLM", "kimi_linear", 49.1),
    # transformers' defaults, those of Olmo-Hybrid-7B: 30 heads
    Hybrid("olmo-hybrid-7b", "OlmoHybridForCausalLM", "olmo_hybrid", 7.4, {"layer_types": every(4, 32)}, tp=2),
    # Peng et al. 2023 (arXiv:2305.13048), table 2
    Hybrid("rwkv-4-14b", "RwkvForCausalLM", "rwkv", 14.2, {"hidden_size": 5120, "num_hidden_layers": 40}, 1024),
    # Botev et al. 2024 (arXiv:2404.07839); recalled from the released configuration
    Hybrid(
        "recurrentgemma-9b",
        "RecurrentGemmaForCausalLM",
        "recurrent_gemma",
        8.6,
        {
            "hidden_size": 4096,
            "intermediate_size": 24576,
            "num_hidden_layers": 38,
            "num_attention_heads": 16,
            "num_key_value_heads": 1,
            "lru_width": 4096,
        },
    ),
    # MiniMax 2025 (arXiv:2501.08313), section 2
    Hybrid(
        "minimax-text-01",
        "MiniMaxForCausalLM",
        "minimax",
        456.0,
        {
            "vocab_size": 200064,
            "hidden_size": 6144,
            "intermediate_size": 9216,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "head_dim": 128,
            "num_local_experts": 32,
            "layer_types": every(8, 80),
        },
        wide=False,
    ),
    # Liquid AI 2025, LFM2-1.2B; recalled from the released configuration
    Hybrid(
        "lfm2-1.2b",
        "Lfm2ForCausalLM",
        "lfm2",
        1.17,
        {
            "hidden_size": 2048,
            "intermediate_size": 12288,
            "num_hidden_layers": 16,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        },
    ),
)


@dataclass(frozen=True)
class Timed:
    """Seconds to trace and to plan, the chosen mesh, the share that tp splits, and the error if one ended it."""

    trace_s: float = 0.0
    plan_s: float = 0.0
    split: float = 0.0
    mesh: str = ""
    error: str = ""
    nodes: int = 0  # of the traced graph


def timed(model: Hybrid, world: int, cluster: str) -> Timed:
    """Trace and plan a model in this process."""
    import autoptd
    from autoptd.errors import AutoptdError
    from autoptd.models.inputs import example_inputs
    from benchmarks.coverage.check import split_share

    module = build(model)
    found: dict[str, Any] = {}
    try:
        began = time.process_time()
        source = autoptd.trace(module, inputs=example_inputs(module, 2, model.seq))
        found |= {"trace_s": time.process_time() - began}
        began = time.process_time()
        try:
            found["mesh"] = str(autoptd.plan(source, world=world, cluster=cluster, batch=model.batch).mesh)
        finally:
            found["plan_s"] = time.process_time() - began
        fixed = autoptd.plan(source, world=world, cluster=cluster, batch=model.batch, fix={"tp": model.tp, "ep": 1})
        found["split"] = split_share(fixed, module)
    except AutoptdError as error:
        found["error"] = " | ".join(filter(None, (error.what, error.where.replace("\n", " "), error.fix)))
    return Timed(**found)


def build(model: Hybrid) -> Any:
    """Return a model's module on meta."""
    import torch

    from autoptd.models.load import from_config

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{model.name}.json"
        file.write_text(json.dumps(model.config), "utf-8")
        module = from_config(file)
    return module if model.wide else module.to(torch.bfloat16)


def measure(model: Hybrid, world: int = WORLD, cluster: str = CLUSTER, limit_s: float = LIMIT_S) -> Timed:
    """Trace and plan a model in a process of its own, stopped after `limit_s`."""
    command = [sys.executable, "-m", "benchmarks.hybrids", "--one", model.name, "--world", str(world)]
    try:
        done = subprocess.run(
            [*command, "--cluster", cluster], capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return Timed(error=f"stopped after {limit_s:.0f} s")
    if done.returncode:
        return Timed(error=f"crashed: {done.stderr.strip().splitlines()[-1:]}")
    return Timed(**json.loads(done.stdout.splitlines()[-1]))


def heading() -> str:
    return f"{'model':22} {'trace s':>8} {'plan s':>8} {'tp share':>9}   plan"


def line(model: Hybrid, found: Timed) -> str:
    """`mamba-2.8b  21.3  4.2  98.1 %   dp8 tp8`; `!` marks figures outside their bars."""
    over = "!" if found.plan_s > EACH_S or found.split < SPLIT_SHARE else " "
    share = f"{100 * found.split:7.1f} %"
    return (
        f"{model.name:22} {found.trace_s:8.1f} {found.plan_s:8.1f} {share} {over} {found.mesh} {found.error}".rstrip()
    )


def main(argv: Sequence[str] | None = None) -> None:
    names = [m.name for m in MODELS]
    parser = argparse.ArgumentParser("python -m benchmarks.hybrids", description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=names, choices=names, metavar="NAME", help="models (all)")
    parser.add_argument("--world", type=int, default=WORLD, metavar="N", help="number of devices (%(default)s)")
    parser.add_argument("--cluster", default=CLUSTER, help="a shipped name or a TOML file (%(default)s)")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="seconds until a model is stopped")
    parser.add_argument("--one", choices=names, help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    by_name = {m.name: m for m in MODELS}
    if chosen.one:
        print(json.dumps(vars(timed(by_name[chosen.one], chosen.world, chosen.cluster))))
        return
    print(heading(), flush=True)
    for name in chosen.models:
        print(line(by_name[name], measure(by_name[name], chosen.world, chosen.cluster, chosen.limit)), flush=True)


if __name__ == "__main__":
    main()
