"""`autoptd doctor`: the failure of every check is planted, and the report says what to do about it."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autoptd.cli.main as cli
from autoptd.cli import doctor
from autoptd.cost_models.cluster import Cluster
from autoptd.doctor import files, network
from autoptd.doctor.facts import Finding, Gpu, MachineFacts, gather
from autoptd.doctor.machine import check_machine
from autoptd.layout import rank_tree
from autoptd.layout.mesh import Mesh
from autoptd.profile.record import Case, Measurement
from autoptd.profile.world import Place
from autoptd.runtime.comm import members
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.members import group_of_members
from autoptd.testing.process_pool import ProcessPool
from tests.sample_plan import sample_plan

GIB = 2**30
H100 = Gpu("NVIDIA H100 80GB HBM3", 85_520_809_984, 85_000_000_000)
VERSIONS = {"Python": "3.11.7", "torch": "2.9.0", "CUDA": "12.8", "NCCL": "2.27.3", "autoptd": "0.1.0"}
NODE = MachineFacts("node0", VERSIONS, (H100,) * 8, 64 * GIB, 65536, 128, {"OMP_NUM_THREADS": "8"}, 8)
DGX = Cluster.load("dgx-h100")


def lines(ranks: list[MachineFacts], cluster: Cluster | None = DGX) -> str:
    return "\n".join(map(str, check_machine(ranks, cluster)))


def with_environment(facts: MachineFacts, **changes: str) -> MachineFacts:
    return replace(facts, environment={**facts.environment, **changes})


def test_a_healthy_cluster_has_nothing_to_say():
    findings = list(check_machine([NODE] * 8 + [replace(NODE, host="node1")] * 8, DGX))
    assert {finding.grade for finding in findings} == {"ok"}
    assert {finding.fix for finding in findings} == {""}
    assert str(findings[0]).startswith("ok   versions: Python 3.11.7, torch 2.9.0, CUDA 12.8, NCCL 2.27.3")
    assert str(findings[0]).endswith("the same on 16 ranks")
    assert "8 × NVIDIA H100 80GB HBM3, 79.6 GiB, on 2 machines" in lines([NODE, replace(NODE, host="node1")])


PLANTED: list[tuple[MachineFacts, str]] = [
    (replace(NODE, versions={**VERSIONS, "torch": "2.8.0"}), "FAIL versions: torch 2.9.0 on rank 0, 2.8.0 on rank 1 —"),
    (replace(NODE, versions={**VERSIONS, "NCCL": "2.19"}), "FAIL versions: NCCL 2.27.3 on rank 0, 2.19 on rank 1 —"),
    (replace(NODE, host="n1", gpus=(H100,) * 4), "FAIL devices: n1: 4 GPUs for 8 ranks — start one process per GPU"),
    (replace(NODE, host="n1", gpus=(replace(H100, name="NVIDIA L4"),) * 8), "FAIL devices: machines differ"),
    (replace(NODE, host="n1", gpus=(replace(H100, name="NVIDIA L4"),) * 8), "NVIDIA L4 is not in dgx-h100"),
    (replace(NODE, gpus=(H100,) * 2, local_ranks=2), "2 GPUs per node, not 8"),
    (replace(NODE, gpus=(replace(H100, memory_bytes=40 * GIB, free_bytes=40 * GIB),) * 8), "40.0 GiB, not 79.6"),
    (
        replace(NODE, gpus=(*(H100,) * 7, replace(H100, free_bytes=GIB))),
        "warn device memory: in use by other processes: node0 GPU 7",
    ),
    (replace(NODE, gpus=()), "FAIL devices"),
    (replace(NODE, shared_memory_bytes=64 * 2**20), "warn shared memory: /dev/shm has 0.06 GiB — in a container"),
    (replace(NODE, open_files=1024), "warn open files: at most 1024 per process — ulimit -n 65536"),
    (replace(NODE, open_files=256), "FAIL open files: at most 256 per process"),
    (replace(NODE, environment={}), "warn threads: 8 ranks of 128 threads on 128 cores (node0) — OMP_NUM_THREADS=16"),
    (with_environment(NODE, OMP_NUM_THREADS="many"), "FAIL threads: OMP_NUM_THREADS is 'many'"),
    (with_environment(NODE, NCCL_IB_DISABLE="1"), "FAIL environment: NCCL_IB_DISABLE not set on rank 0, 1 on rank 1"),
    (with_environment(NODE, NCCL_IB_DISABLE="1"), "warn environment: NCCL_IB_DISABLE=1 slows a run down"),
    (
        with_environment(NODE, NCCL_ALGO="Ring"),
        "warn environment: NCCL_ALGO overrides NCCL's own choice",
    ),
]


@pytest.mark.parametrize(("spoilt", "said"), PLANTED, ids=[said for _, said in PLANTED])
def test_faults_of_a_machine_are_reported(spoilt: MachineFacts, said: str):
    ranks = [NODE, spoilt] if spoilt.host != NODE.host or said.startswith("FAIL") else [spoilt]
    found = [line for line in lines(ranks).splitlines() if said in line]
    assert found, lines(ranks)
    assert " — " in found[0], "no way out"


def test_a_laptop_is_fine_unless_a_cluster_was_asked_for():
    laptop = replace(NODE, gpus=(), local_ranks=1)
    assert "ok   devices: no GPU" in lines([laptop], None)
    assert "ok   devices: no GPU" in lines([laptop], Cluster.load("local"))
    assert "FAIL devices: no GPU: ranks run on CPUs, over gloo — the cluster has H100" in lines([laptop])


def test_facts_are_those_of_this_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    facts = gather()
    assert facts.environment["NCCL_DEBUG"] == "INFO"
    assert facts.local_ranks == 3
    assert facts.cpus >= 1
    assert set(facts.versions) == set(VERSIONS)


# --- files and ports ----------------------------------------------------------------------------------------------


def folder_lines(folder: Path, plan: Any = None) -> str:
    return "\n".join(map(str, files.check_folder(folder, plan)))


def test_a_folder_for_checkpoints(tmp_path: Path):
    assert "ok   checkpoints" in folder_lines(tmp_path / "yet" / "to be made")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert f"FAIL checkpoints: {tmp_path / 'file'} is a file — give a folder" in folder_lines(
        tmp_path / "file" / "below"
    )


def failing(code: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("tempfile.TemporaryDirectory", errno.EROFS, "Read-only file system"),
        ("os.fsync", errno.EINVAL, "Invalid argument"),
        ("Path.replace", errno.EXDEV, "Invalid cross-device link"),
    ],
)
def test_a_file_system_that_cannot_do_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str, code: int, said: str
):
    monkeypatch.setattr(f"autoptd.doctor.files.{what}", failing(code))
    assert f"FAIL checkpoints: {tmp_path}: {said} — give a folder on a file system" in folder_lines(tmp_path)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_space_against_a_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    # ZeRO-1 of bf16, adamw: the two stages keep 2 GiB a rank, in 2 dp shares of 2 tp parts: main copy and two moments
    plan = sample_plan()
    assert files.checkpoint_bytes(plan) == 2 * 2 * (2 * 2 * GIB)
    for free, said in ((15, "FAIL"), (31, "warn"), (33, "ok  ")):
        usage = type("Usage", (), {"free": free * GIB})
        monkeypatch.setattr("autoptd.doctor.files.shutil.disk_usage", lambda _, usage=usage: usage)
        assert f"{said} free space: {free}.0 GiB" in folder_lines(tmp_path, plan)


def test_bytes_of_a_checkpoint_are_those_of_its_elements():
    # 1 GiB of parameters a stage and tp rank: in fp32 2^28 elements, of which 12 bytes are written (sgd: 4)
    memory = [{"parameters": GIB, "optimizer": 2 * GIB}] * 2
    fields = {"precision": "fp32", "zero": 0}
    data = sample_plan(**fields).predicted.model_copy(update={"memory": tuple(memory)})
    assert files.checkpoint_bytes(sample_plan(**fields, predicted=data)) == 2 * 2 * 2**28 * 12
    data = data.model_copy(update={"memory": ({"parameters": GIB}, {"parameters": GIB})})
    assert files.checkpoint_bytes(sample_plan(**fields, optimizer="sgd", predicted=data)) == 2 * 2 * 2**28 * 4


def test_a_port_that_is_taken():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(network.check_port(port)).startswith(f"FAIL port: cannot listen on {port}: Address already in use")
    assert network.check_port(port).grade == "ok"
    assert network.check_port(99999).grade == "FAIL"


# --- between ranks ------------------------------------------------------------------------------------------------


def judged(small_s: float, large_s: float) -> str:
    points = []
    for size, seconds in ((8192, small_s), (2**24, large_s)):
        case = Case(family="collective", op="all_reduce", dtype="fp32", bytes_moved=size, ranks=8)
        points.append(Measurement(case=case, seconds=seconds, repeats=10))
    return str(network.judged_link("tp 8", points, DGX))


def test_links_are_held_against_the_cluster():
    assert judged(2e-5, 1e-4).startswith("ok   links, tp 8: all-reduce of 8 KiB 20 us, of 16 MiB 294 GB/s")
    assert judged(2e-5, 4e-4).startswith("warn links")
    assert judged(2e-3, 1e-4).startswith("warn links")
    assert judged(2e-5, 4e-2).startswith("FAIL links")
    assert "autoptd profile" in judged(2e-5, 4e-2)


def test_clocks_are_compared():
    assert network.judged_clocks({1: 0.01, 2: -0.2}).seen == "at most 0.2 s apart (rank 2)"
    assert str(network.judged_clocks({1: 90.0})).startswith(
        "warn clocks: at most 90 s apart (rank 1) — run a time daemon"
    )


def checks_between(_: Communicators, folder: str, port: int) -> list[str]:
    """Run the checks as one rank of two; rank 1 has another folder, and a clock that is ten seconds behind."""
    group = group_of_members("doctor", range(2), "gloo", lazy=True)
    rank = dist.get_rank()
    own = Path(folder) / str(rank)
    own.mkdir(exist_ok=True)
    found = [network.check_shared(Path(folder), group), network.check_shared(own, group)]
    found += [network.check_reachable(port, group), network.check_clocks(group)]
    with pytest.MonkeyPatch.context() as patch:
        now = network.time.time
        if rank == 1:
            patch.setattr(network.time, "time", lambda: now() - 10)
            patch.setenv("MASTER_ADDR", "127.0.0.1.nowhere.invalid")
        found += [network.check_clocks(group), network.check_reachable(port, group)]
    both = [replace(NODE, host=f"node{i}", versions={**NODE.versions, "torch": str(i)}) for i in range(2)]
    assert network.check_machines(both[rank], None, group) == list(check_machine(both, None))
    return list(map(str, found))


def test_two_processes(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    with ProcessPool(2) as pool:
        first, second = pool.run(Mesh(dp=2), checks_between, str(tmp_path), port)
    assert first[:1] + first[2:3] == second[:1] + second[2:3]
    assert first[0].startswith("ok   shared folder")
    assert (
        first[1].startswith("FAIL shared folder")
        and "is not shared between rank 0 and rank 1 — give a folder" in first[1]
    )
    assert first[2].startswith("ok   port") and "all ranks can reach it" in first[2]
    assert first[3].startswith("ok   clocks")
    assert first[4].startswith("warn clocks: at most 10 s apart (rank 1)")
    assert first[5].startswith("FAIL port") and "cannot be reached by rank 1" in first[5]


def late_clocks(_: Communicators) -> str:
    """Compare the clocks of 6 ranks in a tree of 2 branches; those of ranks 1 and 4 are behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_tree, "_CHILDREN", 2)
        now, behind_s = network.time.time, {1: 50, 4: 90}.get(dist.get_rank(), 0)
        patch.setattr(network.time, "time", lambda: now() - behind_s)
        return network.check_clocks(group_of_members("clocks", range(6), "gloo", lazy=True)).seen


@pytest.mark.ranks
def test_clocks_are_compared_along_a_tree():
    with ProcessPool(6) as pool:
        assert set(pool.run(Mesh(dp=6), late_clocks)) == {"at most 90 s apart (rank 4)"}


def test_the_command_makes_few_connections(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """gloo connects each rank to all others, unless it is set to wait for a message."""
    asked: list[tuple[Any, ...]] = []

    def made(purpose: str, ranks: range, backend: str | None = None, *, lazy: bool = False) -> None:
        asked.append((len(ranks), backend, lazy))
        raise RuntimeError("enough")

    monkeypatch.setattr(members, "group_of_members", made)
    monkeypatch.setattr(dist, "get_world_size", lambda: 16_384)
    with pytest.raises(RuntimeError, match="enough"):
        list(doctor._together(Place(0, 16_384, 8, torch.device("cpu")), None, None, tmp_path, None))
    assert asked == [(16_384, "gloo", True)]


# --- the command --------------------------------------------------------------------------------------------------


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert cli.main(["doctor", "--checkpoint", str(tmp_path), "--port", "0"]) == 1
    text = capsys.readouterr().out
    assert text.count("\n") >= 8
    assert "FAIL port: 0 is not a port number — give one from 1024 to 65535: --port N\n" in text
    assert cli.main(["doctor", "--json", "--checkpoint", str(tmp_path), "--cluster", "dgx-h10"]) == 2
    assert "did you mean 'dgx-h100'" in json.loads(capsys.readouterr().out)["error"]["what"]


def test_the_findings_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    sample_plan().save(tmp_path / "plan.json")
    cli.main(["doctor", "--json", "--checkpoint", str(tmp_path), "--plan", str(tmp_path / "plan.json")])
    found = [Finding(**row) for row in json.loads(capsys.readouterr().out)]
    assert {"versions", "port", "checkpoints", "free space"} <= {finding.name for finding in found}


def test_a_group_that_cannot_start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "init_process_group", failing_group)
    assert cli.main(["doctor"]) == 1
    assert "FAIL process group: the connection to localhost:1 failed — check MASTER_ADDR" in capsys.readouterr().out


def failing_group(*_: Any, **__: Any) -> None:
    raise dist.DistNetworkError("the connection to localhost:1 failed\nsecond line")
