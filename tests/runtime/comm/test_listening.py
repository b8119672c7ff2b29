"""Stores of this process are reachable at the requested address, and at no other one of this machine."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from autoptd.layout.mesh import Mesh
from autoptd.runtime.comm.listening import host_store, is_one_address, on_loopback, on_named_interface
from autoptd.runtime.comm.processes import connect_processes

TIMEOUT = timedelta(seconds=20)
OTHER = "127.0.0.2"  # also of this machine: a listener on all interfaces answers there


def answers(host: str, port: int) -> bool:
    with socket.socket() as asking:
        asking.settimeout(2)
        return asking.connect_ex((host, port)) == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_store_listens_on_its_address_alone() -> None:
    store = host_store("127.0.0.1", 0, 1, TIMEOUT)
    assert answers("127.0.0.1", store.port) and not answers(OTHER, store.port)
    everywhere = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)  # torch's own store
    assert answers(OTHER, everywhere.port)


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_rank_0_of_another_launcher_listens_at_its_address(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    told = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    connect_processes(Mesh(), torch.device("cpu"))
    dist.distributed_c10d._get_default_store().set("a", "b")  # type: ignore[attr-defined]
    assert answers("127.0.0.1", port) and not answers(OTHER, port)


@pytest.mark.parametrize(("rank", "port"), [("1", "29511"), ("0", "none"), ("0", "99999"), ("0", "0")])
def test_other_ranks_and_torch_s_own_errors_are_left_alone(
    rank: str, port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with on_named_interface(TIMEOUT):
        assert not answers("127.0.0.1", 29511)


def test_names_that_are_another_address_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_one_address("127.0.0.1") and is_one_address("::1") and is_one_address("localhost")
    found = {"node-0": "127.0.1.1", "node-1": "10.0.0.7"}  # as Debian writes a machine's own name to /etc/hosts

    def look_up(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if host not in found:
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found[host], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert [is_one_address(name) for name in ("node-0", "node-1", "nowhere")] == [False, True, False]


def test_a_network_that_a_person_named_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    with on_loopback():
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7" and os.environ["NCCL_SOCKET_IFNAME"].startswith("lo")
    assert "NCCL_SOCKET_IFNAME" not in os.environ
