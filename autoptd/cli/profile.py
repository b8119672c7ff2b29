"""`autoptd profile`: measure (or read) points, fit a cluster to them, write both, and report the errors of the fit."""

from __future__ import annotations

import os
from pathlib import Path

from autoptd.cost_models.cluster import Cluster
from autoptd.errors import ClusterError
from autoptd.outputs import refuse_unwritable, write_whole
from autoptd.profile.fit import fit, shipped_with
from autoptd.profile.record import ProfileRecord
from autoptd.profile.report import ReportRow, rows, skipped_text, table
from autoptd.profile.toml import cluster_toml


def profile(
    out: Path,
    *,
    points: Path | None = None,
    source: Path | None = None,
    limit_s: float = 120.0,
    processes: int | None = None,
    show: bool = True,
) -> tuple[Cluster, ProfileRecord, list[ReportRow]] | None:
    """Measure, or read the points of `source`; write the cluster to `out` and the points to `points`.

    show: a progress bar, if standard error is a terminal. Returns None on all ranks of torchrun but 0.
    Raises PlanFileError, before anything is measured, if a file cannot be written; ClusterError for a bad `source` and
    for points to which no cluster can be fitted; RuntimeFault if a process fails.
    """
    for path in filter(None, (out, points)):
        refuse_unwritable(path)
    if source is not None:
        record = ProfileRecord.load(source)
    else:
        from autoptd.profile.measure import measure

        _check_processes(processes)
        record = measure(limit_s, processes, show=show)
        if os.environ.get("RANK", "0") != "0":
            return None
    if points is not None:  # before the fit, which may fail
        write_whole(points, record.to_json())
    cluster = fit(record)
    found = rows(record, cluster)
    write_whole(out, cluster_toml(cluster, _remarks(record, found)))
    return cluster, record, found


def text(cluster: Cluster, record: ProfileRecord, found: list[ReportRow], out: Path, points: Path | None) -> str:
    """Return the final report."""
    head = f"{record.device}, torch {record.torch}, {record.date}: {record.world} rank(s), {len(record.points)} points"
    parts = [head, table(found), skipped_text(record), cluster.describe()]
    unknown = [f"{link.name}: {link.source}" for link in cluster.levels if link.source.startswith("not measured")]
    if unknown:
        parts.append("\n".join(unknown))
    kept = f"; the points are in {points}" if points else ""
    parts.append(f"saved to {out}{kept}\nuse it: autoptd plan MODEL --world N --cluster {out}")
    return "\n\n".join(part for part in parts if part) + "\n"


def _remarks(record: ProfileRecord, found: list[ReportRow]) -> tuple[str, ...]:
    known = shipped_with(record.device)
    return (
        f"autoptd profile: {record.origin}, {record.backend}, {record.world} rank(s), {len(record.points)} points.",
        f"Peaks and levels that were not measured are those of {known.name}."
        if known
        else "Peaks are the best rates measured.",
        "Median errors of the models with these constants: "
        + "; ".join(f"{row.name} {row.median_error:.0%}" for row in found),
    )


def _check_processes(processes: int | None) -> None:
    world = os.environ.get("WORLD_SIZE")
    if processes is not None and world is not None and "RANK" in os.environ and processes != int(world):
        raise ClusterError(f"--processes {processes}, but torchrun started {world}", fix="leave out --processes")
    import torch

    gpus = torch.cuda.device_count()
    if gpus and processes is not None and processes > gpus and world is None:
        raise ClusterError(f"--processes {processes}, but there are {gpus} GPUs", fix=f"use up to {gpus}")
