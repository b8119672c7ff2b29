"""`python -m benchmarks.collectives [FILE.json]`: predicted against measured collectives, curve by curve.

The file holds a list of curves, or an object with the list under `collective_measurements`: `name`, `collective`,
`ranks`, `gpu`, and `points` of `bytes` with `time_us`, `busbw_GBps` or `algbw_GBps` as nccl-tests defines them; left
out, it is the one in benchmarks/data. A curve belongs to a cluster by its GPU and what its name says of the network.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from autoptd.cost_models import nccl, wiring
from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.collectives import algorithm, candidate_algorithms, p2p_s

DATA = Path(__file__).parent / "data"
LARGE_BYTES = 1e6  # below, the start of the kernel is most of what is measured
UNSTATED_BYTES = 2**30  # where a source gives a rate and no size
BAR = 0.12

# GPU, then the network that the name or the note speaks of; "" is what is taken where it says nothing.
CLUSTERS = {
    "V100": {"": "dgx-1-v100"},
    "A100": {"": "dgx-a100-80gb", "efa": "p4d", "omni-path": "jean-zay-a100"},
    "H100": {"": "dgx-h100", "efa": "p5"},
    "H200": {"": "dgx-h200", "efa": "p5en"},
    "B200": {"": "dgx-b200", "efa": "p6-b200"},
    "B300": {"": "dgx-b300"},
    "GB200": {"": "gb200-nvl72"},
    "GB300": {"": "gb300-nvl72"},
}
NETWORKS = {"efa": r"\bEFA|\bp[4-6](d|de|e|en|-b\d+)?\b", "omni-path": r"omni-?path"}
PER_NODE = re.compile(r"(\d+) ?x ?(\d+) ?Gb", re.IGNORECASE)


@dataclass(frozen=True)
class Point:
    """One measurement: bytes of the whole tensor, and the shortest and the longest time that the source allows."""

    nbytes: int
    least_s: float
    most_s: float

    def error(self, predicted_s: float) -> float:
        """Predicted time against the nearer end, 0 between them."""
        nearest_s = min(max(predicted_s, self.least_s), self.most_s)
        return predicted_s / nearest_s - 1


@dataclass(frozen=True)
class Curve:
    """Measurements of one collective on one cluster; `forced`: the algorithm that the measurement was held to."""

    name: str
    collective: str
    forced: str
    ranks: int
    cluster: Cluster
    points: tuple[Point, ...]

    def predicted_s(self, nbytes: int) -> float:
        if self.collective == "p2p":
            return p2p_s(nbytes, self.cluster, 1)
        (found,) = candidate_algorithms(self.collective, self.cluster, self.ranks, 1)
        held = [way for way in found if way.name.partition(" ")[0] == self.forced]
        return min(way.seconds(nbytes) for way in held or found)

    def errors(self) -> list[float]:
        """Signed errors of the time, of points above LARGE_BYTES."""
        return [p.error(self.predicted_s(p.nbytes)) for p in self.points if p.nbytes > LARGE_BYTES]

    def chosen(self) -> str:
        """The algorithm at 1 MB, 64 MB and 1 GB."""
        if self.collective == "p2p":
            return "copy"
        names = [algorithm(self.collective, n * 2**20, self.cluster, self.ranks) for n in (1, 64, 1024)]
        return names[0] if len(set(names)) == 1 else ", ".join(names)


def bus_factor(collective: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth: NVIDIA/nccl-tests, doc/PERFORMANCE.md."""
    passes = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}.get(collective)
    return 1.0 if passes is None else passes * (ranks - 1) / ranks


def cluster_of(row: dict[str, Any]) -> Cluster:
    """The cluster that a curve was measured on. Raises ValueError for a GPU that no cluster here has."""
    gpu, said = row.get("gpu"), f"{row['name']} {row.get('note') or ''}"
    if gpu is None:  # not stated: A100 nodes with 4 HDR ports, the commonest with the 100 GB/s that these reach
        return Cluster.of("A100-SXM4-80GB", 8, 300e9, 12.5e9)
    known = next((CLUSTERS[name] for name in sorted(CLUSTERS, key=len, reverse=True) if gpu.startswith(name)), None)
    if known is None:
        raise ValueError(f"{row['name']!r}: no cluster has GPU {gpu!r}; known: {', '.join(CLUSTERS)}")
    network = next((name for name, words in NETWORKS.items() if re.search(words, said, re.IGNORECASE)), "")
    name = known.get(network, known[""])
    shipped = name in Cluster.names()
    return _with_ports(Cluster.load(name if shipped else DATA / f"{name}.toml"), said)


def _with_ports(cluster: Cluster, said: str) -> Cluster:
    """The cluster with the ports that a text names ("8x400Gb"), where they are others than its own."""
    inner, outer = cluster.levels
    if not (found := PER_NODE.search(said)) or inner.ranks is None:
        return cluster
    share = int(found[1]) * int(found[2]) * 1e9 / 8 / inner.ranks
    if share == outer.bytes_per_s:
        return cluster
    changed = outer.model_copy(update={"bytes_per_s": share, "port_bytes_per_s": None})
    return cluster.model_copy(update={"name": f"{cluster.name}, {found[0]}", "levels": (inner, changed)})


def read(path: Path) -> list[Curve]:
    """The curves of a file; where points hold the rate of a forced algorithm too, these are a curve of their own."""
    data = json.loads(path.read_text("utf-8"))
    return [
        curve for row in (data["collective_measurements"] if isinstance(data, dict) else data) for curve in _curves(row)
    ]


def _curves(row: dict[str, Any]) -> Iterator[Curve]:
    words = row["collective"].lower().replace("-", "_").split()
    collective, forced = words[0], words[1] if len(words) > 1 else ""
    ranks, cluster = row["ranks"], cluster_of(row)
    for suffix, name in {"": forced, "_ring": "ring", "_nvlstree": "nvls_tree"}.items():
        points = tuple(point for data in row["points"] for point in _points(data, collective, ranks, suffix))
        if points:
            title = row["name"] + (f" [{name}]" if suffix else "")
            yield Curve(title, collective, name, ranks, cluster, points)


def _points(data: dict[str, Any], collective: str, ranks: int, suffix: str) -> Iterator[Point]:
    nbytes = data.get("bytes", UNSTATED_BYTES)
    factor = bus_factor(collective, ranks)
    rates: list[tuple[float, float]] = []  # bytes/s of the whole tensor, least and most
    if bus := data.get(f"busbw{suffix}_GBps"):
        rates.append((bus * 1e9 / factor,) * 2)
    elif suffix:
        return
    elif "time_us" in data:
        yield Point(nbytes, data["time_us"] * 1e-6, data["time_us"] * 1e-6)
    elif alg := data.get("algbw_GBps"):
        rates.append((alg * 1e9,) * 2)
    elif span := data.get("algbw_Gbps_range"):
        rates.append((span[0] * 1e9 / 8, span[1] * 1e9 / 8))
    else:
        copies = {"unidirectional_GBps": 1, "duplex_GBps": 2}
        rates += [(data[key] * 1e9 / ways_at_once,) * 2 for key, ways_at_once in copies.items() if key in data]
    yield from (Point(nbytes, nbytes / most, nbytes / least) for least, most in rates)


def _constants(clusters: list[Cluster]) -> Iterator[str]:
    yield "links: GB/s per GPU (alone), sustained, hop; in the switch: sustained, pass"
    seen = set()
    for level in (level for cluster in clusters for level in cluster.levels):
        if (level.name, level.bytes_per_s) in seen:
            continue
        seen.add((level.name, level.bytes_per_s))
        switch = level.in_switch
        alone = (level.port_bytes_per_s or level.bytes_per_s) / 1e9
        text = f"  {level.name:28} {level.bytes_per_s / 1e9:6.4g} ({alone:.4g})"
        text += f" {level.sustained.fraction:.3f} {level.latency_s * 1e6:5.1f} us"
        yield text + (f"; {switch.fraction:.3f} {switch.latency_s * 1e6:5.1f} us" if switch else "")
    yield "protocols: start, bandwidth, hop inside and between, against Simple"
    for p in nccl.PROTOCOLS:
        yield f"  {p.name:8} {p.base_s * 1e6:5.1f} us {p.bandwidth:.2f} {p.hop_inside:.2f} {p.hop_between:.2f}"
    yield f"  a ring's odd step {nccl.ODD_STEP}, a chunk {nccl.CHUNK_HOPS} hops or {nccl.SWITCH_CHUNK_PASSES} passes"
    yield f"  tree {nccl.TREE_BANDWIDTH}, pat {nccl.PAT_BANDWIDTH} of a ring; through a GPU {wiring.RELAYED_FRACTION}"


def main(arguments: list[str]) -> int:
    """Prints the table; 1 where a curve is above the bar."""
    curves = read(Path(arguments[0]) if arguments else DATA / "collectives.json")
    print(f"{'curve':58} {'cluster':16} points  median    mean   algorithm at 1 MB, 64 MB, 1 GB")
    above, medians = [], []
    for curve in curves:
        errors = curve.errors()
        if not errors:
            print(f"{curve.name[:58]:58} {curve.cluster.name[:16]:16} {0:6}  skipped: no point above 1 MB")
            continue
        medians.append(median(map(abs, errors)))
        line = f"{curve.name[:58]:58} {curve.cluster.name[:16]:16} {len(errors):6}"
        print(f"{line} {medians[-1]:7.1%} {fmean(errors):+7.1%}   {curve.chosen()}")
        above += [curve.name] if medians[-1] > BAR else []
    middle, largest = median(medians), max(medians)
    print(
        f"\n{len(medians)} curves: median of medians {middle:.1%}, largest {largest:.1%}, above {BAR:.0%}: {len(above)}"
    )
    print("\n".join(["", *_constants([curve.cluster for curve in curves])]))
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
