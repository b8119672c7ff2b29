"""Measurement of a machine: all ranks time their devices concurrently, as in training, then they time the network."""

from __future__ import annotations

import datetime
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from autoptd.errors import ClusterError
from autoptd.profile.budget import first_line, spend
from autoptd.profile.cases import host_series, network_series, op_series
from autoptd.profile.network import Network
from autoptd.profile.ops import time_op
from autoptd.profile.record import Case, Measurement, ProfileRecord, Skipped
from autoptd.profile.timing import Timer, timer
from autoptd.profile.world import Place, default_processes, joined, launch, launched

_OPS_SHARE = 0.6  # of the time, if there is a network to measure as well
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_MOST_CONTEXT = 4 * 2**30  # bytes; driver and kernels of one process took 0.7 GB on an H200
_MARGIN = 0.8  # of the limit is distributed: a case may take a little longer than its share

Advance = Callable[[Case, str, int], None]  # the finished case, its result, and the number of cases


def measure(limit_s: float, processes: int | None = None, show: bool = False) -> ProfileRecord:
    """Time ops and collectives of this machine within about `limit_s` seconds, but at least the smallest of each kind.

    processes: number on this machine; None for one per GPU, or two without a GPU. Under torchrun it is a collective of
    all ranks. show: a progress bar, if standard error is a terminal. Raises RuntimeFault if a process fails. All ranks
    return the same points.
    """
    processes = processes or default_processes()
    if launched() or processes == 1:
        return _measure_here(limit_s, show, time.time())
    return launch(processes, _measure_here, limit_s, show, time.time())


def _measure_here(limit_s: float, show: bool, began_s: float) -> ProfileRecord:
    threads = torch.get_num_threads()
    with _bar(show) as advance, joined() as place:
        torch.set_num_threads(1 if place.world > 1 or launched() else threads)  # in training a rank has one core
        try:
            return _measure(place, limit_s * _MARGIN - (time.time() - began_s), advance)
        finally:
            torch.set_num_threads(threads)


@contextmanager
def _bar(show: bool) -> Iterator[Advance]:
    """Show a progress bar on rank 0 if standard error is a terminal. Yields the function that advances it."""
    if not show or not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("start the processes", total=None)

        def advance(case: Case, result: str, total: int) -> None:
            progress.update(task, total=total, advance=1, description=f"{case}: {result}")

        yield advance


def _measure(place: Place, limit_s: float, advance: Advance) -> ProfileRecord:
    clock = timer(place.device)
    kind = place.device.type
    ops = list(op_series(kind))
    network = Network(place.device, clock) if place.world > 1 else None
    dtype = "bf16" if kind == "cuda" else "fp32"
    exchanges = list(network_series(place.world, place.node_ranks, dtype)) if network else []
    (exchanges if network else ops).extend(host_series(kind))
    total = sum(map(len, [*ops, *exchanges]))
    started = time.perf_counter()
    if network:  # ranks started at different times: the least time left counts
        limit_s = -network.agree(-limit_s)[0]

    def report(result: Measurement | Skipped) -> None:
        advance(result.case, f"{result.seconds:.3g} s" if isinstance(result, Measurement) else result.why, total)

    def elapsed_s() -> float:
        return time.perf_counter() - started

    found = spend(ops, limit_s * (_OPS_SHARE if network else 1), elapsed_s, partial(_time_op, place, clock), report)
    found = _median_of_ranks(found, network) if network else found
    context_bytes = _context_bytes(place.device)
    if network:
        found += spend(
            exchanges, limit_s, lambda: network.agree(elapsed_s())[0], partial(_time_exchange, network), report
        )
    return _record(place, context_bytes, found)


def _time_op(place: Place, clock: Timer, case: Case, share_s: float) -> Measurement | Skipped:
    try:
        seconds, repeats = time_op(case, place.device, clock, share_s)
    except (RuntimeError, MemoryError) as error:  # out of memory, or a type that the device does not support
        return Skipped(case=case, why=first_line(error))
    finally:
        if place.device.type == "cuda":
            torch.cuda.empty_cache()
    return Measurement(case=case, seconds=seconds, repeats=repeats)


def _time_exchange(network: Network, case: Case, share_s: float) -> Measurement | Skipped:
    return network.measure(case, share_s)


def _median_of_ranks(mine: list[Measurement | Skipped], network: Network) -> list[Measurement | Skipped]:
    """Return each case with the median of the ranks that timed it; skipped if none did. A collective."""
    seconds = network.medians([x.seconds if isinstance(x, Measurement) else None for x in mine])
    repeats = network.sums([x.repeats if isinstance(x, Measurement) else 0 for x in mine])
    return [
        own if median is None else Measurement(case=own.case, seconds=median, repeats=n)
        for own, median, n in zip(mine, seconds, repeats, strict=True)
    ]


def _record(place: Place, context_bytes: int, found: list[Measurement | Skipped]) -> ProfileRecord:
    cuda = torch.cuda.get_device_properties(place.device) if place.device.type == "cuda" else None
    return ProfileRecord(
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        kind="cuda" if cuda else "cpu",
        device=cuda.name if cuda else _cpu_name(),
        torch=torch.__version__,
        backend="nccl" if cuda else "gloo",
        memory_bytes=torch.cuda.mem_get_info(place.device)[1] if cuda else _host_bytes() // place.node_ranks,
        context_bytes=context_bytes,
        host_bytes=_host_bytes(),
        multiprocessors=cuda.multi_processor_count if cuda else None,
        cache_bytes=(getattr(cuda, "L2_cache_size", 0) or None) if cuda else None,
        world=place.world,
        node_ranks=place.node_ranks,
        points=tuple(result for result in found if isinstance(result, Measurement)),
        skipped=tuple(result for result in found if isinstance(result, Skipped)),
    )


def _context_bytes(device: torch.device) -> int:
    """Return a GPU's memory that is in use outside torch's allocator, once kernels have been loaded; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(device)
    return checked_context(max(0, total - free - torch.cuda.memory_reserved(device)))


def checked_context(outside: int) -> int:
    """Return the bytes of a GPU in use outside torch's allocator. Raises ClusterError if another process has some."""
    if outside > _MOST_CONTEXT:
        raise ClusterError(
            f"{outside / 2**30:.1f} GiB of this GPU are used by another process, which would slow what is measured",
            where="profile",
            fix="stop it, or measure on an idle GPU",
        )
    return outside


def _host_bytes() -> int:
    """Return the memory of this machine, or of this container if that has less (cgroup v2)."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = _CGROUP_LIMIT.read_text("ascii").strip()
    except OSError:
        return installed
    return min(installed, int(limit)) if limit.isdigit() else installed


def _cpu_name() -> str:
    """Return the processor's model name from /proc/cpuinfo or, without it, Python's name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine() or "CPU"
