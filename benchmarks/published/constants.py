"""Constants of the cost models that are fitted on published runs, and clusters with other values of them.

A constant belongs to a device family or to all devices, never to a run, group, model or number of GPUs. Its value is in
the TOML files of the clusters; this module maps it to fields of `Device`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autoptd.cost_models.cluster import AttentionRates, Cluster, Device, Sustained

BACKWARD = {"flash": 0.8, "cudnn": 0.8, "triton": 0.6}  # of the forward rate: Dao 2023, figures 4 to 7 (from memory)


@dataclass(frozen=True)
class Constant:
    """A fitted constant. `device`: prefix of the device names it applies to; the longest match of a kind wins.

    `prior`: value from the literature, before any fit. `most`: upper bound.
    """

    name: str
    kind: str
    device: str
    fitted_on: str
    prior: float
    most: float = float("inf")


# Priors, all quoted from memory: matmul, the best rates of Bekman's tables less a tenth; memory, nine tenths of the
# bandwidth, two thirds of that for kernels with reductions; attention, Dao 2023 and Shah et al. 2024; 64 steps along k
# to fill a tile's pipeline; 5 us between kernels; 20 us of host time for a PyTorch op with its backward.
CONSTANTS = (
    Constant("matmul rate, A100", "matmul", "A100", "all runs on A100", 0.78, 1),
    Constant("matmul rate, H100", "matmul", "H100", "all runs on H100 of 700 W", 0.72, 1),
    Constant("matmul rate, H100 of 500 W", "matmul", "H100-SXM5-96GB", "torchtitan", 0.51, 1),
    Constant("matmul rate, Blackwell", "matmul", "GB200", "dgxc_llmb on GB200", 0.66, 1),
    Constant("matmul rate, L4", "matmul", "L4", "Mist's runs at 1,050 of 2,040 MHz", 0.46, 1),
    Constant("fp8 rate, H100", "fp8", "H100", "assumed, before runs in fp8 were compared", 0.57, 1),
    Constant("fp8 rate, Blackwell", "fp8", "GB", "mixtures in fp8 on GB200 and GB300", 0.57, 1),
    Constant("memory rate, A100", "memory", "A100", "all runs on A100", 0.9, 1),
    Constant("memory rate, H100", "memory", "H100", "all runs on H100", 0.9, 1),
    Constant("memory rate, L4", "memory", "L4", "Mist's runs", 0.9, 1),
    Constant("memory rate of softmax and norms", "rows", "", "all runs", 0.6, 1),
    Constant("the same, A100 of 40 GB", "rows", "A100-SXM4-40GB", "vtrain_single", 0.6, 1),
    Constant("the same, L4", "rows", "L4", "Mist's runs", 0.6, 1),
    Constant("FlashAttention-2, H100", "flash", "H100", "nanotron, torchtitan, fms_fsdp", 0.38, 1),
    Constant("FlashAttention-2, L4", "flash", "L4", "Mist's runs", 0.38, 1),
    Constant("FlashAttention-1, A100", "triton", "A100", "mpt_llm_foundry", 0.4, 1),
    Constant("FlashAttention-1, H100", "triton", "H100", "mpt_llm_foundry", 0.25, 1),
    Constant("cuDNN attention, H100", "cudnn", "H100", "dgxc_llmb, megatron_release_golden", 0.6, 1),
    Constant("start of a tile, steps along k", "k_overhead", "", "all runs", 64),
    Constant("gap between kernels, s", "launch", "", "all runs", 5e-6),
    Constant("host time of a launch, s", "dispatch", "", "vtrain_single", 20e-6),
    Constant("the same, one host with an H200, s", "dispatch", "H200", "no run: measured, docs/gpu.md", 20e-6),
    Constant("multiprocessors taken by collectives", "collective", "", "mpt_llm_foundry, torchtitan", 24),
    Constant("the same, L4, without NVLink", "collective", "L4", "no run: assumed", 16),
)


def _sustained(name: str) -> tuple[Callable[[Device], float], Callable[[Device, float], dict[str, Any]]]:
    def read(device: Device) -> float:
        return float((getattr(device, name) or device.memory_sustained).fraction)

    return read, lambda device, value: {name: Sustained(fraction=value)}


def _implementation(name: str) -> tuple[Callable[[Device], float], Callable[[Device, float], dict[str, Any]]]:
    def write(device: Device, value: float) -> dict[str, Any]:
        rates = AttentionRates(forward=value, backward=BACKWARD[name] * value)
        return {"attention": {**device.attention, name: rates}}

    return lambda device: device.attention[name].forward, write


def _flash(device: Device, value: float) -> dict[str, Any]:
    backward = Sustained(fraction=BACKWARD["flash"] * value)
    return {"attention_sustained": Sustained(fraction=value), "attention_backward_sustained": backward}


def _plain(name: str) -> tuple[Callable[[Device], float], Callable[[Device, float], dict[str, Any]]]:
    return lambda device: float(getattr(device, name)), lambda device, value: {name: value}


# kind -> (read its value from a device, fields of the device for a value)
_KINDS: Mapping[str, tuple[Callable[[Device], float], Callable[[Device, float], dict[str, Any]]]] = {
    "matmul": _sustained("matmul_sustained"),
    "fp8": (
        lambda device: float((device.fp8_sustained or Sustained()).fraction),
        lambda device, value: {"fp8_sustained": Sustained(fraction=value)},
    ),
    "memory": _sustained("memory_sustained"),
    "rows": _sustained("rows_sustained"),
    "flash": (lambda device: device.attention_sustained.fraction, _flash),
    "triton": _implementation("triton"),
    "cudnn": _implementation("cudnn"),
    "k_overhead": _plain("k_overhead"),
    "launch": _plain("launch_s"),
    "dispatch": _plain("dispatch_s"),
    "collective": (
        lambda device: float(device.collective_multiprocessors),
        lambda device, value: {"collective_multiprocessors": round(value)},
    ),
}


def present() -> dict[str, float]:
    """Return the values in the shipped clusters."""
    devices = {c.device.name: c.device for c in map(Cluster.load, Cluster.names())}
    found = {}
    for constant in CONSTANTS:
        usual = "A100-SXM4-80GB" if constant.device == "A100" else constant.device or "A100-SXM4-80GB"
        device = next(d for name, d in sorted(devices.items()) if name.startswith(usual))
        found[constant.name] = _KINDS[constant.kind][0](device)
    return found


def with_values(cluster: Cluster, values: Mapping[str, float]) -> Cluster:
    """Return the cluster with these values of the constants."""
    device = cluster.device
    applies: dict[str, Constant] = {}
    for constant in sorted(CONSTANTS, key=lambda c: len(c.device)):
        if device.name.startswith(constant.device):
            applies[constant.kind] = constant
    for kind, constant in applies.items():
        device = device.model_copy(update=_KINDS[kind][1](device, values[constant.name]))
    return cluster.model_copy(update={"device": device})


def fitted() -> dict[str, str]:
    """Return constant name -> its value and the runs it was fitted on."""
    values = present()
    return {c.name: f"{values[c.name]:.3g}; {c.fitted_on}" for c in CONSTANTS}
