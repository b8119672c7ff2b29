"""A part of the launcher's store that no earlier attempt has written to.

torchrun may keep one store through all its restarts, as seen in torch 2.13, and then a rank finds the addresses of
processes that are dead, and cannot connect. Its count of restarts is each node's own, so it tells attempts apart on one
node only. So rank 0 makes a new name, and gives it to whoever is there now:

    rank r   hello/r = a word of its own                 reply/<word> ?            ack/<name>/r
    rank 0                                 hello/r ?     reply/<word> = name       ack/<name>/r ?

A word of an earlier attempt is answered too, and nobody reads the answer.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from autoptd.errors import RuntimeFault

_KEYS, _POLL_S = "autoptd/attempt/", 0.02


def of_this_attempt(store: dist.Store, rank: int, world: int, timeout: timedelta) -> dist.Store:
    """A collective over all ranks of the store. Raises RuntimeFault that names the ranks which did not come in time."""
    own = uuid.uuid4().hex
    if rank == 0:
        _give(store, own, world, timeout)
        return dist.PrefixStore(own, store)
    store.set(f"{_KEYS}hello/{rank}", own)
    name = store.get(f"{_KEYS}reply/{own}").decode()
    store.set(f"{_KEYS}ack/{name}/{rank}", "1")
    return dist.PrefixStore(name, store)


def _give(store: dist.Store, name: str, world: int, timeout: timedelta) -> None:
    missing, until = set(range(1, world)), time.monotonic() + timeout.total_seconds()
    while missing:
        for rank in sorted(missing):
            if store.check([f"{_KEYS}hello/{rank}"]):
                store.set(f"{_KEYS}reply/{store.get(f'{_KEYS}hello/{rank}').decode()}", name)
            if store.check([f"{_KEYS}ack/{name}/{rank}"]):
                missing.remove(rank)
        if missing and time.monotonic() > until:
            raise RuntimeFault(
                f"{len(missing)} ranks did not come in {timeout}: {', '.join(map(str, sorted(missing)[:8]))}",
                where="rank 0, connecting",
                fix="see what they wrote before",
            )
        time.sleep(_POLL_S)
