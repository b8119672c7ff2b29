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

from pydantic import Field, ValidationError, model_validator

from autoptd.cost_models.clusters.device import AttentionRates as AttentionRates
from autoptd.cost_models.clusters.device import ClusterPart, Device, Fraction, Name, Ranks, Rate, Seconds, Sustained
from autoptd.cost_models.clusters.device import HostMemory as HostMemory
from autoptd.cost_models.clusters.device import Peaks as Peaks
from autoptd.cost_models.complaints import brief, describe_mistakes, read_text
from autoptd.cost_models.wiring import MOST_WIRED, check_wiring
from autoptd.errors import ClusterError, nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_UNIT = Field(max_length=MOST_WIRED)
_MOST_BYTES = 256 * 1024  # of a cluster file; the shipped ones have 4 KiB
_PART = r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')\s*"""
_LONG_KEY = re.compile(rf"(?<![\w\-]){_PART}(?:\.\s*{_PART}){{30}}")  # tomllib's time is quadratic in a key's parts
_NCCL_PROTOCOLS: Final = ("LL", "LL128", "Simple")


class InSwitch(ClusterPart):
    """Reduction in a level's switch (NVLink SHARP): sustained fraction of `bytes_per_s`, and latency of a pass."""

    fraction: Fraction
    latency_s: Seconds
    source: str = ""


class Link(ClusterPart):
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


class Pool(ClusterPart):
    """`ranks` devices of another type on the same links, in whole nodes."""

    device: Device
    ranks: Ranks


class Cluster(ClusterPart):
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

    @model_validator(mode="after")
    def _states_prices_of_all_devices(self) -> Cluster:
        devices = [self.device, *(pool.device for pool in self.others)]
        for field in ("price_per_hour", "watts"):
            if len({getattr(device, field) is None for device in devices}) > 1:
                lacking = next(device.name for device in devices if getattr(device, field) is None)
                raise ValueError(f"{field} is stated for some devices, but not for {lacking}")
        if len(found := {device.currency for device in devices}) > 1:
            raise ValueError(f"devices have prices in several currencies: {', '.join(map(repr, sorted(found)))}")
        return self

    @property
    def unpriced(self) -> Cluster:
        """The cluster without prices and watts, which no plan depends on."""
        others = tuple(pool.model_copy(update={"device": pool.device.unpriced}) for pool in self.others)
        return self.model_copy(update={"device": self.device.unpriced, "others": others})

    @property
    def pools(self) -> tuple[Cluster, ...]:
        """One cluster per type of device, with all devices of that type."""
        return _pools(self)

    def check_world(self, world: int) -> None:
        """Raise ClusterError unless the cluster has `world` devices, and at least one of them of its first type."""
        size = self.levels[-1].ranks
        if size is not None and world > size:
            raise ClusterError(
                f"a world of {world} is larger than cluster {self.name!r}, which has {size} devices",
                where="cluster: levels",
                fix=f"use a world of at most {size}, or leave out `ranks` of the cluster's last level",
            )
        self.pool_ranks(world)

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
        price = [] if device.price_per_hour is None else [f"{device.price_per_hour:g} {device.currency}".strip()]
        stated = [f"{text} per device-hour" for text in price]
        stated += [] if device.watts is None else [f"{device.watts:g} W"]
        lines += [f"  costs   {', '.join(stated)}"] if stated else []
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
    known = {cluster.device.name for cluster in clusters}
    raise ClusterError(
        f"there is no device named {device!r}; {nearest(device, known)}",
        fix="use one of these, or your own Device",
    )
