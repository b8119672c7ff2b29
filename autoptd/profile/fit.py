"""Fit of a cluster to measured points: the constants with which the cost models come closest to them.

Peaks of a GPU that a shipped cluster has are the datasheet's; those of any other device are the best measured rates.
Sustained fractions, overheads and latencies minimise the error (`search`) of `op_time` and `collectives` themselves.
Constants without measurements are taken from a shipped cluster, and the file says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from autoptd.cost_models.cluster import AttentionRates, Cluster, Device, HostMemory, Peaks, Sustained
from autoptd.cost_models.op_time import op_s
from autoptd.errors import ClusterError
from autoptd.profile.links import fit_levels
from autoptd.profile.record import ITEMSIZE, Measurement, ProfileRecord
from autoptd.profile.search import best_of, best_rate, best_two, mean_error, rounded

# precision whose peak is used for one that was not measured: tensor cores run both half precisions at the same rate;
# for the others nothing better is known
_LIKE = {"bf16": "fp16", "fp16": "bf16", "fp64": "fp32", "fp32": "fp64"}
_K_OVERHEADS = (0.0, *(2.0**i for i in range(3, 12)))  # steps along k
_HEAD_OVERHEADS = (0.0, *(2.0**i for i in range(8)))  # elements of a head
_STARTS = (0.0, *(2.0**i for i in range(4, 11)))  # of a tile of attention, in keys or queries
HOST_RATES = {"to_host": "to_bytes_per_s", "from_host": "from_bytes_per_s", "step": "step_bytes_per_s"}
_BEYOND_CACHE = 2.0  # least bytes of a memory-bound op in units of the cache: smaller ops partly hit it


def fit(record: ProfileRecord) -> Cluster:
    """Return the cluster that fits a record best. Raises ClusterError if points of a required kind are missing."""
    known = shipped_with(record.device)
    device = _device(record, known)
    name = f"{record.node_ranks}x {device.name}" if record.node_ranks > 1 else device.name
    return Cluster(name=name, source=record.origin, device=device, levels=fit_levels(record, device, known))


def shipped_with(device: str) -> Cluster | None:
    """Return the shipped cluster whose device reports this name."""
    clusters = map(Cluster.load, Cluster.names())
    return next((cluster for cluster in clusters if device in cluster.device.reported_names), None)


def _device(record: ProfileRecord, known: Cluster | None) -> Device:
    launch_s = rounded(_needed(record.of("launch"), "launch")[0].seconds)
    dispatch_s = [point.seconds for point in record.of("dispatch")]
    first = Device(
        name=known.device.name if known else record.device,
        source=record.origin + (f"; peaks: {known.device.source}" if known else "; peaks are the best measured rates"),
        reported_names=(record.device,) if record.kind == "cuda" else (),
        memory_bytes=record.memory_bytes,
        context_bytes=record.context_bytes,
        memory_bytes_per_s=1.0,
        launch_s=launch_s,
        # on a CPU the host is the device: the times of ops include dispatch
        dispatch_s=rounded(dispatch_s[0]) if dispatch_s and record.kind == "cuda" else 0.0,
        multiprocessors=record.multiprocessors,
        matmul_flops_per_s=Peaks(fp64=1.0, fp32=1.0, bf16=1.0, fp16=1.0),
    )
    with_memory = _with_memory(first, record, known.device if known else None)
    with_matmul = _with_matmul(with_memory, record, known.device if known else None)
    return _with_attention(with_matmul, record).model_copy(update={"host": _host(record, known)})


def _host(record: ProfileRecord, known: Cluster | None) -> HostMemory:
    """Return the memory of a node, and the rates of the largest copies and updates; those of a shipped cluster where
    none were measured."""
    largest = {point.case.op: point for point in sorted(record.of("host"), key=lambda point: point.case.nbytes)}
    if record.kind != "cuda":
        return HostMemory()
    host = known.device.host if known else HostMemory()
    if record.host_bytes:
        held = {"memory_bytes": record.host_bytes, "memory_source": f"{record.origin}: of the system or its container"}
        host = host.model_copy(update=held)
    if not largest:
        return host
    rates = {HOST_RATES[op]: rounded(point.case.nbytes / point.seconds) for op, point in largest.items()}
    ranks = f"{record.node_ranks} ranks of a node at once" if record.node_ranks > 1 else "one rank"
    source = f"{record.origin}: pinned copies and AdamW on the host, {ranks}"
    if rest := HOST_RATES.keys() - largest.keys():
        source += f"; not measured: {', '.join(sorted(rest))}"
    return host.model_copy(update={**rates, "source": source})


def _with_memory(device: Device, record: ProfileRecord, known: Device | None) -> Device:
    points = beyond_cache(_needed(record.of("memory"), "memory"), record.cache_bytes)
    rates = [point.case.nbytes / point.seconds for point in points]

    def like(rate: float) -> Device:
        return device.model_copy(update={"memory_bytes_per_s": rate})

    sustained = best_rate(lambda rate: device_error(like(rate), points), min(rates) / 2, max(rates) * 2)
    peak = known.memory_bytes_per_s if known else rounded(max(*rates, sustained))
    return device.model_copy(
        update={
            "memory_bytes_per_s": peak,
            "memory_sustained": _sustained(sustained, peak, record, "{n} memory-bound ops beyond the caches", points),
        }
    )


def beyond_cache(points: Iterable[Measurement], cache_bytes: int | None) -> tuple[Measurement, ...]:
    """Return the points that move more than the cache holds; for an unknown size, a quarter of the most bytes moved."""
    points = tuple(points)
    most = max((point.case.nbytes for point in points), default=0)
    least = min(_BEYOND_CACHE * cache_bytes if cache_bytes else most / 4, most)
    return tuple(point for point in points if point.case.nbytes >= least)


def _with_matmul(device: Device, record: ProfileRecord, known: Device | None) -> Device:
    points = _needed(record.of("matmul"), "matmul")
    main = main_dtype(points)
    own = [point for point in points if point.case.dtype == main]
    best = max(point.case.flops / point.seconds for point in own)

    def like(rate: float, k_overhead: float, dtype: str = main) -> Device:
        peaks = device.matmul_flops_per_s.model_copy(update={dtype: rate})
        return device.model_copy(update={"matmul_flops_per_s": peaks, "k_overhead": k_overhead})

    if device.multiprocessors is None:  # the model has the same rate for all shapes
        overhead = 0.0
        rate = best_rate(lambda rate: device_error(like(rate, 0.0), own), best / 50, best * 3)
    else:
        rate, overhead = best_two(lambda *xy: device_error(like(*xy), own), best / 4, best * 3, _K_OVERHEADS)
    overhead = rounded(overhead)
    peak = known.matmul_flops_per_s.of(main) if known else rounded(max(best, rate))
    sustained = _sustained(rate, peak, record, f"{main} products of {{n}} shapes", own)
    peaks = {main: peak}
    for dtype in ITEMSIZE:
        others = [point for point in points if point.case.dtype == dtype]
        if known:
            peaks[dtype] = known.matmul_flops_per_s.of(dtype)
        elif dtype != main and others:
            most = max(point.case.flops / point.seconds for point in others)
            found = best_rate(lambda rate: device_error(like(rate, overhead, dtype), others), most / 50, most * 3)  # noqa: B023
            peaks[dtype] = rounded(found / sustained.fraction)
    for dtype in ITEMSIZE:
        peaks.setdefault(dtype, peaks.get(_LIKE[dtype], peaks[main]))
    fp8 = known.matmul_flops_per_s.fp8 if known else None  # not measured
    return device.model_copy(
        update={"matmul_flops_per_s": Peaks(**peaks, fp8=fp8), "matmul_sustained": sustained, "k_overhead": overhead}
    )


def _with_attention(device: Device, record: ProfileRecord) -> Device:
    points = record.of("attention")
    forward = [point for point in points if not point.case.backward]
    backward = [point for point in points if point.case.backward]
    if not forward:
        return device

    def like(fraction: float, overhead: float) -> Device:
        sustained = Sustained(fraction=fraction)
        return device.model_copy(update={"attention_sustained": sustained, "head_overhead": overhead})

    if len({point.case.k for point in forward}) > 1:
        fraction, overhead = best_two(lambda *xy: device_error(like(*xy), forward), 1e-3, 1.0, _HEAD_OVERHEADS)
    else:
        fraction, overhead = best_rate(lambda x: device_error(like(x, 0.0), forward), 1e-3, 1.0), 0.0
    device = device.model_copy(
        update={
            "attention_sustained": _sustained(
                fraction, 1.0, record, "causal attention of {n} shapes, forward", forward
            ),
            "head_overhead": rounded(overhead),
        }
    )
    if not backward:
        return device

    def back(fraction: float) -> Device:
        return device.model_copy(update={"attention_backward_sustained": Sustained(fraction=fraction)})

    fraction = best_rate(lambda x: device_error(back(x), backward), 1e-3, 1.0)
    sustained = _sustained(fraction, 1.0, record, "causal attention of {n} shapes, backward", backward)
    device = device.model_copy(update={"attention_backward_sustained": sustained})
    if device.multiprocessors is None or min(_lengths(forward), _lengths(backward)) < 2:
        return device
    return device.model_copy(update={"attention": {"torch": _rates(device, record, forward, backward)}})


def _lengths(points: Iterable[Measurement]) -> int:
    return len({point.case.m for point in points})


def _rates(
    device: Device, record: ProfileRecord, forward: Sequence[Measurement], backward: Sequence[Measurement]
) -> AttentionRates:
    """Return the rates of attention with the starts of its tiles, which only points of several lengths tell apart."""
    sizes = sorted({point.case.k for point in forward})
    overheads = _HEAD_OVERHEADS if len(sizes) > 1 else (0.0,)

    def like(fraction: float, overhead: float, start: float) -> Device:
        rates = AttentionRates.model_construct(
            forward=fraction, backward=fraction, head_overhead=overhead, start=start, backward_start=start
        )
        return device.model_copy(update={"attention": {"torch": rates}})

    def best(points: Sequence[Measurement], overheads: Sequence[float]) -> tuple[float, float, float]:
        """Return (fraction, overhead, start) of least error."""
        found: dict[float, tuple[float, float]] = {}

        def of_start(start: float) -> float:
            found[start] = best_two(lambda x, y: device_error(like(x, y, start), points), 1e-2, 1.0, overheads)
            return device_error(like(*found[start], start), points)

        start = best_of(of_start, _STARTS)
        return *found[start], start

    fraction, overhead, start = best(forward, overheads)
    overhead = rounded(overhead)
    back, _, backward_start = best(backward, (overhead,))
    return AttentionRates(
        forward=rounded(fraction),
        backward=rounded(back),
        head_overhead=overhead,
        start=rounded(start),
        backward_start=rounded(backward_start),
        source=f"{record.origin}: causal attention of {len(forward) + len(backward)} shapes",
    )


def main_dtype(points: Iterable[Measurement]) -> str:
    """Return the precision with most points, to which the constants shared by all precisions are fitted."""
    return statistics.mode(point.case.dtype for point in points)


def device_error(device: Device, points: Iterable[Measurement]) -> float:
    return mean_error((op_s(device, point.case.work), point.seconds) for point in points)


def _sustained(rate: float, peak: float, record: ProfileRecord, what: str, points: Iterable[Measurement]) -> Sustained:
    text = what.format(n=len(tuple(points)))
    return Sustained(fraction=min(1.0, rounded(rate / peak)), source=f"{record.origin}: {text}")


def _needed(points: tuple[Measurement, ...], family: str) -> tuple[Measurement, ...]:
    if not points:
        raise ClusterError(
            f"no case of the family {family!r} was measured", fix="measure again with a higher --time-limit"
        )
    return points
