"""Under a launcher rank 0 plans; the other ranks read its plan, or why there is none, from the process group's store.

Each `parallelize` of a rank has a number, counted in the store, so that the same call of all ranks shares one plan.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch.distributed as dist

from autoptd import errors
from autoptd.errors import AutoptdError, RuntimeFault
from autoptd.plans.model import Plan
from autoptd.progress import Progress
from autoptd.runtime.comm.process_group import default_store

_KEYS = "autoptd/plan/"
_FIRST_S, _LONGEST_S = 0.02, 1.0  # between two looks into the store


def shared_plan(make: Callable[[], Plan], progress: Progress) -> Plan:
    """Call `make` on rank 0 of a started process group; the plan on all ranks.

    Where rank 0 raises, all ranks do: the same AutoptdError, or RuntimeFault that names what rank 0 raised.
    """
    store, rank = default_store(), dist.get_rank()
    key = f"{_KEYS}{store.add(f'{_KEYS}calls of rank {rank}', 1)}"
    if rank == 0:
        return _made(make, store, key)
    with progress.stage("wait for the plan of rank 0"):
        return _read(_awaited(store, key))


def _made(make: Callable[[], Plan], store: dist.Store, key: str) -> Plan:
    try:
        plan = make()
    except BaseException as error:
        store.set(key, json.dumps(_told(error)))
        raise
    store.set(key, json.dumps({"plan": plan.to_json()}))
    return plan


def _told(error: BaseException) -> dict[str, str]:
    if isinstance(error, AutoptdError):
        return {"error": type(error).__name__, "what": error.what, "where": error.where, "fix": error.fix}
    what = f"rank 0 could not plan: {type(error).__name__}: {error}"
    return {"error": RuntimeFault.__name__, "what": what, "where": "rank 0, planning", "fix": ""}


def _awaited(store: dist.Store, key: str) -> str:
    pause_s = _FIRST_S
    try:
        while not store.check([key]):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)
        return store.get(key).decode()
    except RuntimeError as error:  # torch's errors of stores
        raise RuntimeFault(f"the plan of rank 0 did not come: {error}", where="waiting for the plan") from error


def _read(text: str) -> Plan:
    told = json.loads(text)
    if "plan" in told:
        return Plan.from_json(told["plan"], "the plan of rank 0")
    kind: type[AutoptdError] = getattr(errors, told["error"], RuntimeFault)
    raise kind(told["what"], where=told["where"], fix=told["fix"])
