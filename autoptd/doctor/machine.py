"""Checks of all ranks' facts: versions, devices, shared memory, limits, threads, environment variables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from autoptd.cost_models.cluster import Cluster
from autoptd.doctor.facts import Finding, MachineFacts

GIB = 2**30
_LEAST_SHARED = 1 * GIB  # containers have 64 MiB by default; data loaders and NCCL pass tensors through it
_LEAST_FILES = 1024, 4096  # fewer fail, fewer are warned of: sockets between ranks, checkpoint files, data loaders
_BUSY = 0.05  # fraction of a device's memory
_SLOWING = {  # settings for debugging that slow a run down
    "CUDA_LAUNCH_BLOCKING": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_DEBUG": "TRACE",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
}
_OVERRIDING = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS", "NCCL_NTHREADS")
_PER_RANK = ("CUDA_VISIBLE_DEVICES",)  # may differ between ranks


def check_machine(ranks: Sequence[MachineFacts], cluster: Cluster | None) -> Iterator[Finding]:
    """Yield the findings of all checks that need only the facts, which are given by rank."""
    yield _versions(ranks)
    yield from _devices(ranks, cluster)
    yield _shared_memory(ranks)
    yield _open_files(ranks)
    yield _threads(ranks)
    yield from _environment(ranks)


def _versions(ranks: Sequence[MachineFacts]) -> Finding:
    differing = [
        f"{name} {_by_value(ranks, lambda facts, name=name: facts.versions[name])}"  # type: ignore[misc]
        for name in ranks[0].versions
        if len({facts.versions[name] for facts in ranks}) > 1
    ]
    if differing:
        return Finding("FAIL", "versions", "; ".join(differing), "install the same versions on all machines")
    same = f", the same on {len(ranks)} ranks" if len(ranks) > 1 else ""
    return Finding("ok", "versions", ", ".join(f"{name} {value}" for name, value in ranks[0].versions.items()) + same)


def _devices(ranks: Sequence[MachineFacts], cluster: Cluster | None) -> Iterator[Finding]:
    hosts = {facts.host: facts for facts in ranks}
    if not any(facts.gpus for facts in ranks):
        expected = cluster is not None and bool(cluster.device.reported_names)
        fix = f"the cluster has {cluster.device.name}: check with nvidia-smi" if expected and cluster else ""
        yield Finding("FAIL" if expected else "ok", "devices", "no GPU: ranks run on CPUs, over gloo", fix)
        return
    short = [f"{host}: {len(x.gpus)} GPUs for {x.local_ranks} ranks" for host, x in hosts.items() if _too_few(x)]
    kinds = sorted({(len(x.gpus), gpu.name, gpu.memory_bytes) for x in hosts.values() for gpu in x.gpus})
    seen = "; ".join(f"{count} × {name}, {total / GIB:.1f} GiB" for count, name, total in kinds)
    if short:
        yield Finding("FAIL", "devices", "; ".join(short), "start one process per GPU: --nproc-per-node")
    elif len({(count, name) for count, name, _ in kinds}) > 1:
        yield Finding("FAIL", "devices", f"machines differ: {seen}", "give a cluster file that lists all (`others`)")
    else:
        yield Finding("ok", "devices", f"{seen}, on {len(hosts)} machine{'s' * (len(hosts) > 1)}")
    if cluster is not None:
        yield _like_cluster(kinds, cluster)
    busy = [
        f"{host} GPU {i}: {(gpu.memory_bytes - gpu.free_bytes) / GIB:.1f} GiB"
        for host, x in hosts.items()
        for i, gpu in enumerate(x.gpus)
        if gpu.memory_bytes - gpu.free_bytes > _BUSY * gpu.memory_bytes
    ]
    if busy:
        seen = f"in use by other processes: {'; '.join(busy[:8])}"
        yield Finding("warn", "device memory", seen, "end those processes")


def _too_few(facts: MachineFacts) -> bool:
    return facts.local_ranks > len(facts.gpus)


def _like_cluster(kinds: Sequence[tuple[int, str, int]], cluster: Cluster) -> Finding:
    known = {name: pool.device for pool in cluster.pools for name in (pool.device.name, *pool.device.reported_names)}
    wrong, fix = [], "give the cluster file of this machine: autoptd profile -o cluster.toml"
    for count, name, total in kinds:
        if name not in known:
            wrong.append(f"{name} is not in {cluster.name}, which has {', '.join(sorted(known))}")
        elif total < known[name].memory_bytes * 0.98:
            wrong.append(f"{name} has {total / GIB:.1f} GiB, not {known[name].memory_bytes / GIB:.1f}")
        elif cluster.gpus_per_node is not None and count < cluster.gpus_per_node:
            wrong.append(f"{count} GPUs per node, not {cluster.gpus_per_node}")
    if wrong:
        return Finding("FAIL", "cluster file", "; ".join(wrong), fix)
    return Finding("ok", "cluster file", f"{cluster.name} has these devices")


def _shared_memory(ranks: Sequence[MachineFacts]) -> Finding:
    least = min((x.shared_memory_bytes for x in ranks if x.shared_memory_bytes is not None), default=None)
    if least is None:
        return Finding("ok", "shared memory", "this system has no /dev/shm")
    seen = f"/dev/shm has {least / GIB:.2f} GiB"
    if least < _LEAST_SHARED:
        return Finding("warn", "shared memory", seen, "in a container: --shm-size=8g or --ipc=host")
    return Finding("ok", "shared memory", seen)


def _open_files(ranks: Sequence[MachineFacts]) -> Finding:
    least = min((x.open_files for x in ranks if x.open_files is not None), default=None)
    if least is None:
        return Finding("ok", "open files", "no limit")
    grade = "FAIL" if least < _LEAST_FILES[0] else "warn" if least < _LEAST_FILES[1] else "ok"
    fix = "" if grade == "ok" else "ulimit -n 65536"
    return Finding(grade, "open files", f"at most {least} per process", fix)  # type: ignore[arg-type]


def _threads(ranks: Sequence[MachineFacts]) -> Finding:
    for x in ranks:
        text = x.environment.get("OMP_NUM_THREADS", "")
        if text and not text.isdigit():
            return Finding("FAIL", "threads", f"OMP_NUM_THREADS is {text!r}", "give a number")
        each = int(text) if text else x.cpus
        if x.local_ranks > 1 and each * x.local_ranks > x.cpus:
            seen = f"{x.local_ranks} ranks of {each} threads on {x.cpus} cores ({x.host})"
            fix = f"OMP_NUM_THREADS={max(1, x.cpus // x.local_ranks)}"
            # a rank cannot have less than one thread
            return Finding("ok" if each == 1 else "warn", "threads", seen, "" if each == 1 else fix)
    threads = ranks[0].environment.get("OMP_NUM_THREADS", "not set")
    return Finding("ok", "threads", f"OMP_NUM_THREADS {threads}, {ranks[0].cpus} cores")


def _environment(ranks: Sequence[MachineFacts]) -> Iterator[Finding]:
    names = sorted({name for x in ranks for name in x.environment if name not in _PER_RANK})
    differing = [name for name in names if len({x.environment.get(name) for x in ranks}) > 1]
    if differing:
        seen = "; ".join(
            f"{name} {_by_value(ranks, lambda x, name=name: x.environment.get(name, 'not set'))}"  # type: ignore[misc]
            for name in differing
        )
        yield Finding("FAIL", "environment", seen, "set it to the same value on all ranks")
    slow = [f"{name}={value}" for name, value in _SLOWING.items() if _is_set(ranks, name, value)]
    if slow:
        yield Finding("warn", "environment", f"{', '.join(slow)} slows a run down", "unset it")
    override = [name for name in _OVERRIDING if any(name in x.environment for x in ranks)]
    if override:
        seen = f"{', '.join(override)} overrides NCCL's own choice, which the plan's predictions assume"
        yield Finding("warn", "environment", seen, "unset it")
    if not (differing or slow or override):
        yield Finding("ok", "environment", ", ".join(names) or "no variable that changes a run is set")


def _is_set(ranks: Sequence[MachineFacts], name: str, value: str) -> bool:
    return any(x.environment.get(name, "").upper() == value for x in ranks)


def _by_value(ranks: Sequence[MachineFacts], of: Callable[[MachineFacts], str]) -> str:
    """Return the ranks of each value, the first few of them: `2.9.0 on ranks 0, 1, 2.8.0 on rank 2`."""
    found: dict[str, list[int]] = {}
    for rank, facts in enumerate(ranks):
        found.setdefault(of(facts), []).append(rank)
    return ", ".join(f"{value} on {_ranks(numbers)}" for value, numbers in found.items())


def _ranks(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:6])) + (" …" if len(numbers) > 6 else "")
    return f"rank{'s' * (len(numbers) > 1)} {shown}"
