"""A prefix of the launcher's store that no earlier attempt has written to.

torchrun may keep one store through all its restarts, as seen in torch 2.13; a rank then reads the addresses of dead
processes and cannot connect. torchrun's restart count is per node, so it identifies an attempt on one node only.
Therefore rank 0 generates a new prefix, and it is assigned to the ranks that are running now along the tree of
`layout/rank_tree.py`:

    child r  set hello/r = random token                  wait for reply/<token>       set ack/<prefix>/r
    parent                            get hello/r        set reply/<token> = prefix   wait for ack/<prefix>/r

A token of an earlier attempt is answered too; no rank reads that answer.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from autoptd.errors import RuntimeFault
from autoptd.layout.rank_tree import children

_KEYS = "autoptd/attempt/"
_FIRST_S, _LONGEST_S = 0.02, 0.5  # between two polls of the store


def attempt_store(store: dist.Store, rank: int, world: int, timeout: timedelta) -> dist.Store:
    """Return the store under a prefix of this attempt. A collective. Raises RuntimeFault naming late ranks."""
    token = prefix = uuid.uuid4().hex
    if rank:
        store.set(f"{_KEYS}hello/{rank}", token)
        prefix = store.get(f"{_KEYS}reply/{token}").decode()
        store.set(f"{_KEYS}ack/{prefix}/{rank}", "1")
    _assign_prefix(store, prefix, rank, world, timeout)
    return dist.PrefixStore(prefix, store)


def _assign_prefix(store: dist.Store, prefix: str, parent: int, world: int, timeout: timedelta) -> None:
    missing, until, pause_s = set(children(parent, world)), time.monotonic() + timeout.total_seconds(), _FIRST_S
    while missing:
        for rank in sorted(missing):
            if store.check([f"{_KEYS}hello/{rank}"]):
                store.set(f"{_KEYS}reply/{store.get(f'{_KEYS}hello/{rank}').decode()}", prefix)
            if store.check([f"{_KEYS}ack/{prefix}/{rank}"]):
                missing.remove(rank)
        if not missing:
            return
        if time.monotonic() > until:
            raise RuntimeFault(
                f"{len(missing)} ranks did not connect within {timeout}: {', '.join(map(str, sorted(missing)[:8]))}",
                where=f"rank {parent}, connecting",
                fix="see the output of these ranks",
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_S)
