"""A prefix of the launcher's store that no earlier attempt has written to.

torchrun may keep one store through all its restarts, as seen in torch 2.13; a rank then reads the addresses of dead
processes and cannot connect. torchrun's restart count is per node, so it identifies an attempt on one node only.
Therefore rank 0 generates a new prefix and assigns it to the ranks that are running now:

    rank r   set hello/r = random token                  wait for reply/<token>       set ack/<prefix>/r
    rank 0                            get hello/r        set reply/<token> = prefix   wait for ack/<prefix>/r

A token of an earlier attempt is answered too; no rank reads that answer.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from autoptd.errors import RuntimeFault

_KEYS, _POLL_S = "autoptd/attempt/", 0.02


def attempt_store(store: dist.Store, rank: int, world: int, timeout: timedelta) -> dist.Store:
    """Return the store under a prefix of this attempt. A collective. Raises RuntimeFault naming late ranks."""
    token = uuid.uuid4().hex
    if rank == 0:
        _assign_prefix(store, token, world, timeout)
        return dist.PrefixStore(token, store)
    store.set(f"{_KEYS}hello/{rank}", token)
    prefix = store.get(f"{_KEYS}reply/{token}").decode()
    store.set(f"{_KEYS}ack/{prefix}/{rank}", "1")
    return dist.PrefixStore(prefix, store)


def _assign_prefix(store: dist.Store, prefix: str, world: int, timeout: timedelta) -> None:
    missing, until = set(range(1, world)), time.monotonic() + timeout.total_seconds()
    while missing:
        for rank in sorted(missing):
            if store.check([f"{_KEYS}hello/{rank}"]):
                store.set(f"{_KEYS}reply/{store.get(f'{_KEYS}hello/{rank}').decode()}", prefix)
            if store.check([f"{_KEYS}ack/{prefix}/{rank}"]):
                missing.remove(rank)
        if missing and time.monotonic() > until:
            raise RuntimeFault(
                f"{len(missing)} ranks did not connect within {timeout}: {', '.join(map(str, sorted(missing)[:8]))}",
                where="rank 0, connecting",
                fix="see the output of these ranks",
            )
        time.sleep(_POLL_S)
