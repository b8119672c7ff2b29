"""Published runs, read from a file of JSON lines.

Names carry units. An absent key means unknown; unknown keys are ignored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from autoptd.errors import AutoptdError

# Keys that a source states elsewhere, by group and model. Figure 1 of Korthikanti et al. 2022 shows the configurations
# of its table 3 (its caption), where these two models have 3 chunks per rank, which hold 1 + (p - 1) / 3 p times the
# activations (section 4.2.3; both quoted from memory): with this factor the formula gives the figure's bars exactly.
_STATED_ELSEWHERE: dict[tuple[str, str], dict[str, Any]] = {
    ("korthikanti_fig1_memory", "GPT 175B"): {"vpp_chunks_per_stage": 3},
    ("korthikanti_fig1_memory", "GPT 530B"): {"vpp_chunks_per_stage": 3},
}


class BadRuns(AutoptdError, ValueError):
    """A file of runs that cannot be read."""


class Unsupported(Exception):
    """A run that cannot be predicted; the message is the reason shown in the report."""


class Row(BaseModel):
    """One run. Rates: GB = 10^9 bytes, Gb = 10^9 bits, per GPU and direction."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    id: str
    group: str
    status: str = "ok"  # or "oom…", or another reason not to use it
    complete_for_time: bool = False
    complete_for_memory: bool = False
    notes: str = ""

    # the model
    model_name: str = ""
    arch: str | None = None
    n_layers: int | None = None
    hidden_size: int | None = None
    ffn_hidden_size: int | None = None
    n_heads: int | None = None
    n_kv_heads: int | None = None
    head_dim: int | None = None
    vocab_size: int | None = None
    tied_embeddings: bool | None = None
    seq_len_tokens: int | None = None
    n_params_billion: float | None = None
    precision: str | None = None
    attention_impl: str = Field("", validation_alias=AliasChoices("attention_impl", "attention_kernel"))
    framework: str = ""
    torch_compile: bool | None = None
    gated_mlp: bool | None = None
    # its attention, if it is multi-head latent attention
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    # its mixtures of experts
    n_experts: int | None = None
    moe_top_k: int | None = None
    moe_ffn_hidden_size: int | None = None
    n_shared_experts: int = 0
    moe_shared_ffn_hidden_size: int | None = None
    n_dense_layers: int = 0
    moe_layer_pattern: str = ""
    mtp_num_layers: int = 0
    moe_routing: str = ""
    moe_capacity_factor: float | None = None
    moe_dispatcher: str = ""

    # devices and links
    gpu_type: str | None = None
    gpu_memory_gb: float | None = None
    gpus_per_node: int | None = None
    intra_node_bw_GBps_per_gpu_per_direction: float | None = None
    inter_node_bw_Gbps_per_gpu: float | None = None
    inter_node_link: str = ""
    n_gpus: int | None = None

    # the plan
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    ep_comm_overlap: bool | None = None
    fp8_recipe: str = ""
    cuda_graph: str = ""
    cp_kind: str = ""
    pp_layout: str = ""
    vpp_chunks_per_stage: int = 1
    config_source_kind: str = ""
    micro_batch_size_seqs: int | None = None
    global_batch_size_seqs: int | None = None
    sharding: str = "none"
    fsdp_shard_size: int | None = None
    recompute: str = "none"
    recompute_detail: str = ""
    layers_per_stage: tuple[int, ...] = ()
    full_recompute_layers_per_stage: tuple[int, ...] = ()
    offload_ratios_per_stage: tuple[dict[str, float], ...] = ()  # share in host memory: of weights, grads, …
    sequence_parallel: bool = False
    dp_comm_overlap: bool | None = None
    tp_comm_overlap: bool | None = None

    # measured figures
    iteration_time_s: float | None = None
    peak_memory_gb: float | None = None
    peak_memory_unit: str = ""
    peak_memory_kind: str = ""
    is_memory_estimate_analytic: bool = False

    @field_validator("*", mode="before")
    @classmethod
    def _absent(cls, value: Any, info: ValidationInfo) -> Any:
        """Read null as an absent key."""
        return cls.model_fields[str(info.field_name)].default if value is None else value

    def need(self, *names: str) -> None:
        """Raise Unsupported, naming the keys that the row does not state."""
        if missing := [name for name in names if getattr(self, name) is None]:
            raise Unsupported(f"does not state {', '.join(missing)}")

    @property
    def measured_time_s(self) -> float | None:
        """Step seconds; None if the row is not fit to check a time."""
        return self.iteration_time_s if self.complete_for_time and self.status == "ok" else None

    @property
    def measured_bytes(self) -> float | None:
        """Peak memory of a rank in bytes; None if the row is not fit to check memory."""
        if not self.complete_for_memory or self.status != "ok" or self.peak_memory_gb is None:
            return None
        return self.peak_memory_gb * unit_bytes(self.peak_memory_unit)

    @property
    def ran_out_of_memory(self) -> bool:
        return self.status.lower().startswith("oom")

    @property
    def ran(self) -> bool:
        """True if the plan was run and fit; an analytic memory figure does not show that."""
        return self.status == "ok" and not self.is_memory_estimate_analytic

    @property
    def is_megatron(self) -> bool:
        """True for Megatron and frameworks built on it: padded vocabulary, fused kernels, flat gradient buffers."""
        return any(word in self.framework.lower() for word in ("megatron", "nemo"))

    @property
    def is_megatron_core(self) -> bool:
        """True for Megatron-Core and frameworks built on it, from 2023 on."""
        return any(word in self.framework.lower() for word in ("megatron-core", "nemo"))


def unit_bytes(unit: str) -> int:
    """Return the bytes in the unit of a memory figure: 10^9 for a plain GB, else 2^30.

    PyTorch, nanotron and nvidia-smi count MiB, which logs divide by 1024 (nanotron) or users read as GB (nvidia-smi).
    """
    binary = any(word in unit for word in ("GiB", "MiB", "nvidia-smi"))
    return 2**30 if binary else 10**9


def read_rows(path: Path) -> list[Row]:
    """Read the runs of a file in order, skipping empty lines. Raises BadRuns with the number of a bad line."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise BadRuns(f"cannot read {path}: {error.strerror}", where=str(path), fix="give a JSON lines file") from error
    except UnicodeDecodeError as error:
        raise BadRuns(f"{path} is not UTF-8 text", where=str(path), fix="give a JSON lines file") from error
    rows = [_row(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    seen: set[str] = set()
    for row in rows:
        if row.id in seen:
            raise BadRuns(f"two runs have the id {row.id!r}", where=str(path), fix="give each run a unique id")
        seen.add(row.id)
    return rows


def _row(line: str, where: str) -> Row:
    try:
        row = Row.model_validate_json(line)
        return row.model_copy(update=_STATED_ELSEWHERE.get((row.group, row.model_name), {}))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        what = f"{field}: {first['msg']}" if field else first["msg"]
        raise BadRuns(
            f"not a run: {what}", where=where, fix="give one JSON object per line; see benchmarks/README.md"
        ) from error
