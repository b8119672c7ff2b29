"""One plan for all ranks of a launcher: rank 0 plans; the others read its plan, or its error, from the store.

The store counts each rank's calls of `parallelize`, so that the same call on all ranks shares one plan.
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
_FIRST_S, _LONGEST_S = 0.02, 1.0  # between two polls of the store


def shared_plan(make: Callable[[], Plan], progress: Progress) -> Plan:
    """Call `make` on rank 0 of a started process group; return its plan on all ranks.

    If rank 0 raises, all ranks raise: the same AutoptdError, or a RuntimeFault that names the error of rank 0.
    """
    store, rank = default_store(), dist.get_rank()
    key = f"{_KEYS}{store.add(f'{_KEYS}calls of rank {rank}', 1)}"
    if rank == 0:
        return _publish(make, store, key)
    with progress.stage("wait for the plan of rank 0"):
        return _plan_from(_wait_for(store, key))


def _publish(make: Callable[[], Plan], store: dist.Store, key: str) -> Plan:
    try:
        plan = make()
    except BaseException as error:
        store.set(key, json.dumps(_failure(error)))
        raise
    store.set(key, json.dumps({"plan": plan.to_json()}))
    return plan


def _failure(error: BaseException) -> dict[str, str]:
    if isinstance(error, AutoptdError):
        return {"error": type(error).__name__, "what": error.what, "where": error.where, "fix": error.fix}
    what = f"rank 0 could not plan: {type(error).__name__}: {error}"
    return {"error": RuntimeFault.__name__, "what": what, "where": "rank 0, planning", "fix": ""}


def _wait_for(store: dist.Store, key: str) -> str:
    pause_s = _FIRST_S
    try:
        while not store.check([key]):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)
        return store.get(key).decode()
    except RuntimeError as error:  # raised by torch's stores
        raise RuntimeFault(f"the plan of rank 0 could not be read: {error}", where="waiting for the plan") from error


def _plan_from(text: str) -> Plan:
    answer = json.loads(text)
    if "plan" in answer:
        return Plan.from_json(answer["plan"], "the plan of rank 0")
    kind: type[AutoptdError] = getattr(errors, answer["error"], RuntimeFault)
    raise kind(answer["what"], where=answer["where"], fix=answer["fix"])
