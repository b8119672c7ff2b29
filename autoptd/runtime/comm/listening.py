"""Interfaces that a process listens on. By default torch's store accepts unauthenticated connections on all of them.

processes that autoptd starts on this machine    loopback, for the store, gloo and NCCL
rank 0, started by a launcher                    the interface with the address MASTER_ADDR
torchrun                                         the launcher holds the store
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from autoptd.runtime.comm.process_group import store_host

LOOPBACK = "127.0.0.1"
_NETWORKS = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@contextmanager
def on_loopback() -> Iterator[None]:
    """Make process groups listen on loopback, in this process and in child processes started within the block.

    Environment variables by which the user names another network are left unchanged.
    """
    name = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    unset = [variable for variable in _NETWORKS if name is not None and variable not in os.environ]
    os.environ.update(dict.fromkeys(unset, str(name)))
    try:
        yield
    finally:
        for variable in unset:
            del os.environ[variable]


def host_store(host: str, port: int, world: int, timeout: timedelta, *, shared: bool = False) -> dist.TCPStore:
    """Create a store in this process that listens on the address of `host` only; port 0: any free port.

    `shared`: other users of the same port in this process get the same store. Raises OSError.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    server = socket.create_server(address[:2], family=family, backlog=2048)
    return dist.TCPStore(
        host,
        server.getsockname()[1],
        world,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=shared,
        master_listen_fd=server.detach(),
    )


@contextmanager
def on_named_interface(timeout: timedelta) -> Iterator[None]:
    """Make the store of rank 0 listen on MASTER_ADDR only, while torch starts a process group from the environment.

    It listens on all interfaces, torch's default, if the address does not belong to this machine or is a name that
    means loopback here and another address elsewhere. Other errors in the address are reported by torch.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    held = None
    is_host = store_host() == 0 and os.environ.get("RANK") == "0"
    if is_host and port.isdecimal() and 0 < int(port) < 2**16 and is_one_address(host):
        with suppress(OSError):
            held = host_store(host, int(port), int(os.environ["WORLD_SIZE"]), timeout, shared=True)
    yield
    del held  # the process group now owns it


def is_one_address(host: str) -> bool:
    """Return whether a name means the same interface on every machine of the job."""
    try:
        ipaddress.ip_address(host)
        return True
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return host == "localhost" or not ipaddress.ip_address(str(found[0][4][0])).is_loopback
