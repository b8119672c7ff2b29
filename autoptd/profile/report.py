"""The report of `autoptd profile`: measured and predicted speed per family of cases, and the errors of the fit."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.op_time import op_s
from autoptd.profile.fit import HOST_RATES, beyond_cache
from autoptd.profile.links import exchange_s
from autoptd.profile.record import Case, Measurement, ProfileRecord


@dataclass(frozen=True)
class ReportRow:
    """A family's best measured speed, the cluster's prediction for that point, and relative errors of all points."""

    name: str
    points: int
    measured: str
    predicted: str
    median_error: float
    worst_error: float

    def to_data(self) -> dict[str, object]:
        return {**vars(self)}


def rows(record: ProfileRecord, cluster: Cluster) -> list[ReportRow]:
    """Return one row per family, in the order of measurement."""
    families: dict[str, list[Measurement]] = {}
    beyond = beyond_cache(record.of("memory"), record.cache_bytes)
    for point in record.points:
        if point.case.family != "dispatch" or cluster.device.dispatch_s:
            cached = point.case.family == "memory" and point not in beyond
            families.setdefault(_name(point.case) + (", in caches: not fitted" if cached else ""), []).append(point)
    return [_row(name, points, cluster) for name, points in families.items()]


def predicted_s(cluster: Cluster, case: Case) -> float:
    """Return the predicted seconds of a case."""
    match case.family:
        case "launch":
            return cluster.device.launch_s
        case "dispatch":
            return cluster.device.dispatch_s
        case "collective" | "p2p":
            return exchange_s(cluster, case)
        case "host":
            return case.nbytes / float(getattr(cluster.device.host, HOST_RATES[case.op]))
        case _:
            return op_s(cluster.device, case.work)


def table(found: Iterable[ReportRow]) -> str:
    """Return the rows as text in aligned columns."""
    heads = ("", "points", "best measured", "predicted", "median error", "worst")
    cells = [
        (row.name, str(row.points), row.measured, row.predicted, f"{row.median_error:.1%}", f"{row.worst_error:.0%}")
        for row in found
    ]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    lines = []
    for words in (heads, *cells):
        padded = (f"{word:>{width}}" for word, width in zip(words[1:], widths[1:], strict=True))
        lines.append("  ".join((f"{words[0]:{widths[0]}}", *padded)).rstrip())
    return "\n".join(lines)


def skipped_text(record: ProfileRecord) -> str:
    """Return the number of skipped cases by reason, and all errors, since they are about the machine."""
    if not record.skipped:
        return ""
    slow = [skipped for skipped in record.skipped if skipped.why.startswith(("would take", "no time"))]
    failed = [f"  {skipped.case}: {skipped.why}" for skipped in record.skipped if skipped not in slow]
    lines = [f"{len(slow)} larger cases skipped: they would have taken too long"] if slow else []
    lines += [f"{len(failed)} cases skipped because of an error:", *failed] if failed else []
    return "\n".join(lines)


def _row(name: str, points: list[Measurement], cluster: Cluster) -> ReportRow:
    errors = [abs(predicted_s(cluster, point.case) / point.seconds - 1) for point in points]
    best = max(points, key=lambda point: _amount(point.case) / point.seconds)
    measured = _speed(best.case, best.seconds)
    predicted = _speed(best.case, predicted_s(cluster, best.case))
    return ReportRow(name, len(points), measured, predicted, statistics.median(errors), max(errors))


def _name(case: Case) -> str:
    match case.family:
        case "matmul":
            return f"matmul {case.dtype}" + (", batched" if case.batch > 1 else "")
        case "attention":
            return f"attention {case.dtype}, heads of {case.k}, {'backward' if case.backward else 'forward'}"
        case "collective" | "p2p":
            apart = f", {case.stride} apart" if case.stride > 1 else ""
            return f"{case.op} of {case.ranks} ranks{apart}"
        case "memory":
            return f"{case.op} {case.dtype}"
        case "host":
            return {"to_host": "copy to the host", "from_host": "copy from the host", "step": "AdamW on the host"}[
                case.op
            ]
        case _:
            return {"launch": "launch of an op", "dispatch": "launch in a training step, host"}[case.family]


def _amount(case: Case) -> float:
    return case.flops or case.nbytes or 1.0


def _speed(case: Case, seconds: float) -> str:
    rate = _amount(case) / max(seconds, 1e-15)
    if case.flops:
        return f"{rate / 1e12:.1f} Tflop/s" if rate >= 1e12 else f"{rate / 1e9:.1f} Gflop/s"
    return f"{rate / 1e9:.1f} GB/s" if case.nbytes else f"{seconds * 1e6:.2f} us"
