"""Where a process listens: torch's store takes any connection, from all interfaces, and believes what it is told.

processes that autoptd starts on this machine      loopback, the store as well as gloo and NCCL
rank 0, started by a launcher                       the interface that has the address MASTER_ADDR
torchrun                                            the store is the launcher's own
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
    """Process groups that start meanwhile, here and in processes that are started, listen on loopback.

    Variables by which a person names another network stay.
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
    """A store that this process holds, listening on the address of `host` alone; port 0: any that is free.

    shared: with what else in this process asks torch for a store at that port. Raises OSError.
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
    """While torch starts a process group from the environment: the store of rank 0 listens on MASTER_ADDR alone.

    On all interfaces, as torch does it, where the address is none of this machine's, or a name that is loopback here
    and another address elsewhere. Whatever else is wrong with it, torch tells.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    held = None
    is_host = store_host() == 0 and os.environ.get("RANK") == "0"
    if is_host and port.isdecimal() and 0 < int(port) < 2**16 and is_one_address(host):
        with suppress(OSError):
            held = host_store(host, int(port), int(os.environ["WORLD_SIZE"]), timeout, shared=True)
    yield
    del held  # the process group shares it now


def is_one_address(host: str) -> bool:
    """Whether a name means the same interface on every machine of the job."""
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
