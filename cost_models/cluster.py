"""Clusters: a kind of device, and levels of links from the innermost (NVLink in a node) outwards.

    level 0   groups of 8 neighbouring ranks      every GPU has bytes_per_s to its neighbours in the group
    level 1   all ranks                           every GPU has bytes_per_s (its share of the NICs) out of its group

Ranks are numbered so that `levels[0].ranks` neighbours share a node. Every rate is a datasheet peak together with the
fraction of it that was measured to be sustained; models use the product. Clusters are TOML files that people write, so
each field is validated and each error names the path of its field.
"""

from __future__ import annotations

import math
import re
import sys
from functools import lru_cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from autoptd.cost_models.complaints import brief, describe_mistakes, one_line, read_text
from autoptd.cost_models.wiring import MOST_WIRED, check_wiring
from autoptd.errors import ClusterError, nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Rate = Annotated[float, Field(ge=1, le=1e24, allow_inf_nan=False)]  # larger ones would overflow in predictions
Seconds = Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)]  # of one launch, hop or message
Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(one_line)]  # quoted in other files
Fraction = Annotated[float, Field(ge=1e-6, le=1, allow_inf_nan=False)]
Ranks = Annotated[int, Field(gt=0, lt=2**31)]
Processors = Annotated[int, Field(ge=0, lt=2**20)]
Overhead = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
_UNIT = Field(max_length=MOST_WIRED)
_MOST_BYTES = 256 * 1024  # of a cluster file; the shipped ones have 4 KiB
_PART = r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')\s*"""
_LONG_KEY = re.compile(rf"(?<![\w\-]){_PART}(?:\.\s*{_PART}){{30}}")  # tomllib's time is quadratic in a key's parts
_NCCL_PROTOCOLS: Final = ("LL", "LL128", "Simple")


class _ClusterPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Peaks(_ClusterPart):
    """Dense matmul peak of one device in flop/s, by the precision of its operands."""

    fp64: Rate
    fp32: Rate
    bf16: Rate
    fp16: Rate
    fp8: Rate | None = None  # None: the device has no such rate

    def of(self, dtype: str) -> float:
        """Return the peak for a precision. Raises ValueError naming the known ones."""
        if dtype not in type(self).model_fields:
            raise ValueError(f"no matmul peak for precision {dtype!r}; {nearest(dtype, type(self).model_fields)}")
        if getattr(self, dtype) is None:
            raise ValueError(f"the device has no matmul peak for precision {dtype!r}")
        return float(getattr(self, dtype))


class Sustained(_ClusterPart):
    """The fraction of a peak that real programs reach, and the source of its measurement."""

    fraction: Fraction = 1.0
    source: str = ""


class AttentionRates(_ClusterPart):
    """Fractions of the matmul peak that one implementation of fused attention sustains, and its tiles' start."""

    forward: Fraction
    backward: Fraction
    head_overhead: Overhead | None = None  # None: the device's
    start: Overhead = 0.0  # of a tile of the forward pass, in keys
    backward_start: Overhead = 0.0  # of a tile of the backward pass, in queries
    rows: Annotated[Processors, Field(gt=0)] = 128  # queries of a tile of the forward pass
    source: str = ""


class HostMemory(_ClusterPart):
    """The memory of a node's host, and rates of one device's share of it: of copies there and back while all devices of
    the host copy, and of the optimizer step there, which reads and writes the host's memory."""

    memory_bytes: Annotated[int, Field(gt=0, lt=2**63)] | None = None  # of a node; None: unknown, and not checked
    memory_source: str = ""
    to_bytes_per_s: Rate = 5.8e9
    from_bytes_per_s: Rate = 5.4e9
    step_bytes_per_s: Rate = 16e9
    source: str = (
        "copies: 8 A100 on PCIe, all at once (github.com/Dazz993/Mist, tuned_configs); step: 10e9 parameters in 2.2 s "
        "on two Xeon 8168 (Ren et al. 2021, ZeRO-Offload, table of CPU-Adam; quoted from memory), for 8 devices"
    )


class Device(_ClusterPart):
    """One accelerator (or one CPU process). Sizes in bytes, rates per second, times in seconds."""

    name: Name
    source: str = ""
    reported_names: Annotated[tuple[str, ...], Field(max_length=64)] = ()  # results of torch.cuda.get_device_name
    memory_bytes: Annotated[int, Field(gt=0, lt=2**63)]
    context_bytes: Annotated[int, Field(ge=0, lt=2**63)] = 0  # driver and loaded kernels, before the first tensor
    memory_bytes_per_s: Rate
    launch_s: Seconds = 0.0  # added to every kernel
    dispatch_s: Seconds = 0.0  # of the host per op that it launches: a lower bound of the step's time
    multiprocessors: Annotated[Processors, Field(gt=0)] | None = None  # None: matmuls of all shapes run at one rate
    collective_multiprocessors: Processors = 0  # taken by collectives from kernels that run at the same time
    k_overhead: Overhead = 0.0  # of a tile of a matmul, in steps along k
    head_overhead: Overhead = 0.0  # of attention, in elements of a head
    matmul_flops_per_s: Peaks
    matmul_sustained: Sustained = Sustained()
    fp8_sustained: Sustained | None = None  # of products in fp8; None: the fraction of the others
    attention_sustained: Sustained = Sustained()  # forward
    attention_backward_sustained: Sustained | None = None  # None: as forward
    attention: Annotated[dict[Name, AttentionRates], Field(max_length=64)] = {}  # implementations by name
    memory_sustained: Sustained = Sustained()
    rows_sustained: Sustained | None = None  # by kernels that need whole rows (softmax, norms); None: as by others
    additions_per_s: Rate | None = None  # of elements that are added up by index; None: as fast as they are read
    host: HostMemory = HostMemory()

    @model_validator(mode="after")
    def _has_usable_memory(self) -> Device:
        if self.context_bytes >= self.memory_bytes:
            raise ValueError(f"context_bytes {self.context_bytes} must be less than memory_bytes {self.memory_bytes}")
        return self

    @property
    def kind(self) -> str:
        """The torch device type: "cpu" for a process on a CPU, which has no multiprocessors, else "cuda"."""
        return "cuda" if self.multiprocessors else "cpu"

    @property
    def collective_share(self) -> float:
        """The fraction of the device that collectives take while they overlap with kernels."""
        return self.collective_multiprocessors / self.multiprocessors if self.multiprocessors else 0.0

    def matmul_fraction(self, dtype: str) -> float:
        """Return the fraction of the matmul peak that products of a precision sustain."""
        found = self.fp8_sustained if dtype == "fp8" else None
        return (found or self.matmul_sustained).fraction

    @property
    def usable_bytes(self) -> int:
        """Memory available to tensors and the allocator."""
        return self.memory_bytes - self.context_bytes


class InSwitch(_ClusterPart):
    """Reduction in a level's switch (NVLink SHARP): sustained fraction of `bytes_per_s`, and latency of a pass."""

    fraction: Fraction
    latency_s: Seconds
    source: str = ""


class Link(_ClusterPart):
    """One level of links, joining groups of `ranks` neighbouring ranks; None on the last level if it is unbounded.

    `bytes_per_s` is per GPU in one direction: its own share if several GPUs share a NIC. `port_bytes_per_s` is the rate
    of one GPU while its neighbours are idle, such as that of a whole NIC; by default its share.
    `latency_s` is that of one hop of a collective or one message, in NCCL's simple protocol.
    `protocols` are the NCCL protocols that the link supports; "plain" means rings without any, such as gloo's.
    `in_switch`: reduction in the level's switch. `wiring`: the links between GPUs of a unit without a switch.
    """

    name: Name
    source: str = ""
    ranks: Ranks | None = None
    bytes_per_s: Rate
    port_bytes_per_s: Rate | None = None
    latency_s: Seconds
    sustained: Sustained = Sustained()
    protocols: Annotated[tuple[Literal["LL", "LL128", "Simple", "plain"], ...], Field(min_length=1)] = _NCCL_PROTOCOLS
    in_switch: InSwitch | None = None
    wiring: Annotated[tuple[Annotated[tuple[int, ...], _UNIT], ...], _UNIT] | None = None

    @model_validator(mode="after")
    def _is_possible(self) -> Link:
        if self.port_bytes_per_s is not None and self.port_bytes_per_s < self.bytes_per_s:
            raise ValueError(f"port_bytes_per_s {self.port_bytes_per_s} is less than bytes_per_s {self.bytes_per_s}")
        if self.wiring is not None:
            check_wiring(self.wiring, self.ranks)
        return self

    @property
    def sustained_bytes_per_s(self) -> float:
        return self.bytes_per_s * self.sustained.fraction

    def lane_bytes_per_s(self, sharers: int, active: int) -> float:
        """Return the sustained rate of one of `active` sending ranks, of the `sharers` that share a unit's links."""
        alone = max(self.bytes_per_s, self.port_bytes_per_s or 0.0)
        return min(self.bytes_per_s * sharers / active, alone) * self.sustained.fraction


class Pool(_ClusterPart):
    """`ranks` devices of another type on the same links, in whole nodes."""

    device: Device
    ranks: Ranks


class Cluster(_ClusterPart):
    """A named device and its levels of links, innermost first.

    `others`: devices of other types in the same cluster; all other ranks of a world have `device`.
    """

    name: Name
    source: str = ""
    device: Device
    levels: Annotated[tuple[Link, ...], Field(min_length=1, max_length=16)]
    others: Annotated[tuple[Pool, ...], Field(max_length=16)] = ()

    def __hash__(self) -> int:  # a few fields only: clusters are keys of tens of thousands of look-ups
        first, last = self.levels[0], self.levels[-1]
        inner = (first.bytes_per_s, first.latency_s, first.sustained.fraction, first.in_switch)
        return hash((self.name, self.device.name, inner, last.bytes_per_s, last.latency_s, last.sustained.fraction))

    @model_validator(mode="after")
    def _levels_nest(self) -> Cluster:
        if any(level.wiring or level.in_switch for level in self.levels[1:]):
            raise ValueError("only the first of levels may have `wiring` or `in_switch`")
        sizes = [level.ranks for level in self.levels]
        if None in sizes[:-1]:
            raise ValueError("only the last of levels may leave out `ranks`")
        bounded = [size for size in sizes if size is not None]
        for inner, outer in pairwise(bounded):
            if outer <= inner or outer % inner:
                raise ValueError(f"levels must nest: {outer} ranks is not a larger multiple of {inner} ranks")
        return self

    @property
    def pools(self) -> tuple[Cluster, ...]:
        """One cluster per type of device, with all devices of that type."""
        return _pools(self)

    def pool_ranks(self, world: int) -> tuple[int, ...]:
        """Return the number of a world's devices of each type. Raises ClusterError if none is left for the first."""
        rest = world - sum(pool.ranks for pool in self.others)
        if self.others and rest < 1:
            raise ClusterError(
                f"a world of {world} is too small for {world - rest} devices of other types and one {self.device.name}",
                where="cluster: others",
                fix="name fewer ranks in `others`, or use a larger world",
            )
        return rest, *(pool.ranks for pool in self.others)

    @property
    def gpus_per_node(self) -> int | None:
        """Ranks of the innermost level; None if it is the only, unbounded one."""
        return self.levels[0].ranks

    @staticmethod
    def names() -> tuple[str, ...]:
        """Return the names of the shipped clusters, sorted."""
        return tuple(sorted(f.name.removesuffix(".toml") for f in _shipped().iterdir() if f.name.endswith(".toml")))

    @staticmethod
    def load(name_or_toml_path: str | Path) -> Cluster:
        """Read a shipped cluster by name, or a TOML file. Raises ClusterError naming the field or the nearest names."""
        text = str(name_or_toml_path)
        if text in Cluster.names():
            return Cluster._parse((_shipped() / f"{text}.toml").read_text("utf-8"), where=text)
        path = Path(text)
        if path.suffix != ".toml" and not path.is_file():
            raise ClusterError(
                f"there is no cluster named {text!r}; {nearest(text, Cluster.names())}",
                fix="use one of these names, or the path of a .toml file",
            )
        if not path.is_file():
            raise ClusterError(
                f"the cluster file {text!r} does not exist",
                where=str(path.absolute()),
                fix="use an existing path, or a shipped cluster: " + ", ".join(Cluster.names()),
            )
        fix = "save it as readable UTF-8 text"
        return Cluster._parse(read_text(path, "cluster file", ClusterError, fix, _MOST_BYTES), where=text)

    @staticmethod
    def of(
        device: str | Device, gpus_per_node: int, intra_node_bytes_per_s: float, inter_node_bytes_per_s: float
    ) -> Cluster:
        """Return a cluster of nodes with `gpus_per_node` devices; rates are link peaks per GPU, one direction.

        `device` is a `Device`, or the name of one in a shipped cluster. Latencies and sustained fractions are those of
        the shipped cluster with that device; for a custom `Device`, those of dgx-h100. Raises ClusterError.
        """
        if not isinstance(device, (str, Device)):
            raise ClusterError(f"{device!r} is not a device", where="Cluster.of", fix="use a device name or a Device")
        _check_sizes(gpus_per_node, intra_node_bytes_per_s, inter_node_bytes_per_s)
        pattern = _shipped_with(device) if isinstance(device, str) else Cluster.load("dgx-h100")
        intra, inter = pattern.levels
        chosen = pattern.device if isinstance(device, str) else device
        return Cluster(
            name=f"{gpus_per_node}x {chosen.name}",
            device=chosen,
            levels=(
                with_rate(intra, intra_node_bytes_per_s, ranks=gpus_per_node),
                with_rate(inter, inter_node_bytes_per_s),
            ),
        )

    def to_data(self) -> dict[str, Any]:
        """Return plain JSON data from which `Cluster.from_data` makes an equal cluster."""
        return self.model_dump(mode="json")

    @staticmethod
    def from_data(data: Any, where: str = "cluster") -> Cluster:
        """Return the cluster described by `to_data`. Raises ClusterError with the path of every wrong field."""
        try:
            return Cluster.model_validate(data)
        except ValidationError as error:
            raise ClusterError(
                f"the description of the cluster has {error.error_count()} error(s)",
                where=f"{where}\n" + describe_mistakes(error, Cluster),
                fix=f"correct these fields; docs/clusters.md explains them, and {Cluster.names()[0]} is an example",
            ) from None  # the message has all of pydantic's errors

    @staticmethod
    def _parse(text: str, where: str) -> Cluster:
        try:
            if found := _LONG_KEY.search(text):
                raise ValueError(f"a key of more than 30 parts at line {text.count(chr(10), 0, found.start()) + 1}")
            data = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError; so is an overlong number
            reason = brief(ascii(str(error))[1:-1])
            raise ClusterError(f"not a TOML file: {reason}", where=where, fix="correct the syntax there") from error
        return Cluster.from_data(data, where)

    def describe(self) -> str:
        """Return a summary of a few lines: device, peaks and levels with units."""
        device, peaks = self.device, self.device.matmul_flops_per_s
        lines = [
            f"{self.name}: {device.name}, {device.memory_bytes / 2**30:.1f} GiB at "
            f"{device.memory_bytes_per_s / 1e9:,.0f} GB/s",
            f"  matmul  bf16 {peaks.bf16 / 1e12:.4g} Tflop/s, fp32 {peaks.fp32 / 1e12:.4g} Tflop/s, "
            f"{device.matmul_sustained.fraction:.0%} sustained",
        ]
        for level in self.levels:
            size = f"{level.ranks} GPUs" if level.ranks else "any number of GPUs"
            lines.append(
                f"  link    {level.name}, {size}: {level.bytes_per_s / 1e9:,.4g} GB/s per GPU and direction, "
                f"{level.sustained.fraction:.0%} sustained, {level.latency_s * 1e6:.3g} us"
            )
        return "\n".join(lines)


def with_rate(level: Link, bytes_per_s: float, **changes: Any) -> Link:
    """Return the level at another rate per GPU, without `wiring`; a new rate removes `port_bytes_per_s`."""
    if bytes_per_s != level.bytes_per_s:
        changes |= {"bytes_per_s": float(bytes_per_s), "port_bytes_per_s": None}
    return level.model_copy(update={"wiring": None, **changes})


def _check_sizes(gpus_per_node: int, intra_bytes_per_s: float, inter_bytes_per_s: float) -> None:
    given = {
        "gpus_per_node": gpus_per_node,
        "intra_node_bytes_per_s": intra_bytes_per_s,
        "inter_node_bytes_per_s": inter_bytes_per_s,
    }
    bad = [f"{name} = {value!r}" for name, value in given.items() if not (math.isfinite(value) and value > 0)]
    if bad or gpus_per_node != int(gpus_per_node):
        raise ClusterError(
            "a cluster needs positive sizes and rates, got " + (", ".join(bad) or f"gpus_per_node = {gpus_per_node!r}"),
            where="Cluster.of",
            fix="use a whole number of GPUs per node, and bytes per second per GPU in one direction",
        )


@lru_cache(maxsize=64)
def _pools(cluster: Cluster) -> tuple[Cluster, ...]:
    alone = cluster.model_copy(update={"others": ()}) if cluster.others else cluster
    return alone, *(alone.model_copy(update={"device": pool.device}) for pool in cluster.others)


def _shipped() -> Any:
    return files("autoptd.cost_models.clusters")


def _shipped_with(device: str) -> Cluster:
    clusters = [c for c in map(Cluster.load, Cluster.names()) if c.device.reported_names]
    for cluster in clusters:
        if device in (cluster.device.name, cluster.name, *cluster.device.reported_names):
            return cluster
    known = [cluster.device.name for cluster in clusters]
    raise ClusterError(
        f"there is no device named {device!r}; {nearest(device, known)}",
        fix="use one of these, or your own Device",
    )
