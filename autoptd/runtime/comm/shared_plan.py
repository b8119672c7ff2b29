"""One plan for all ranks of a launcher: rank 0 plans; the others read its plan, or its error, from the store.

`on_all_ranks` encloses what each rank does by itself: an error of one reaches all, so that none waits for it. The
store counts each rank's calls, so that the same call on all ranks shares one plan.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import torch.distributed as dist

from autoptd import errors
from autoptd.errors import AutoptdError, PlanError, RuntimeFault
from autoptd.plans.model import Plan
from autoptd.progress import Progress
from autoptd.runtime.comm.handshake import SHOWN, text_of
from autoptd.runtime.comm.process_group import default_store
from autoptd.runtime.comm.processes import start_processes
from autoptd.runtime.faults.heartbeat import Process

_KEYS = "autoptd/plan/"
_FIRST_S, _LONGEST_S = 0.02, 1.0  # between two polls of the store
_WAIT_S = 1800.0  # for other ranks, whose work is the same


def shared_plan(make: Callable[[], Plan], graph_hash: str, asked: Mapping[str, object], progress: Progress) -> Plan:
    """Call `make` on rank 0 of the launcher's processes; return its plan on all ranks.

    `graph_hash`: of this rank's model. `asked`: arguments of this rank that decide the plan, by name. If rank 0 raises,
    all ranks raise: the same AutoptdError, or a RuntimeFault that names the error of rank 0. Raises PlanError on a rank
    whose model or arguments are others than those of rank 0, RuntimeFault on all others.
    """
    store, rank = _met_store(), dist.get_rank()
    with _asking("other ranks"):
        key = f"{_KEYS}{store.add(f'{_KEYS}calls of rank {rank}', 1)}"
    mine: Mapping[str, str] = {name: text_of(value) for name, value in asked.items()}
    if rank == 0:
        plan, first = _publish(make, store, key, mine), mine
    else:
        with progress.stage("wait for the plan of rank 0"):
            plan, first = _plan_from(_wait_for(store, key, "the plan of rank 0"))
    with on_all_ranks():
        for name in (name for name, text in mine.items() if text != first[name]):
            raise PlanError(
                f"rank {rank} was given another {name} than rank 0, whose plan all ranks take",
                where=f"rank 0: {first[name][:SHOWN]}\nrank {rank}: {mine[name][:SHOWN]}",
                fix=f"give all ranks the same {name}",
            )
        if plan.graph_hash != graph_hash:
            raise PlanError(
                f"rank {rank} has another model than rank 0: traced, {graph_hash} instead of {plan.graph_hash}",
                where=f"rank {rank}",
                fix="build the same model on all ranks, from the same example inputs and with the same torch: layers, "
                "frozen parameters, dropout rates, sizes",
            )
    return plan


@contextmanager
def on_all_ranks() -> Iterator[None]:
    """Enclose what each rank of the launcher's processes does by itself, before any waits for another.

    If it raises on one, the others raise a RuntimeFault that names that one and its error. Returns once all are done.
    """
    store, rank = _met_store(), dist.get_rank()
    with _asking("other ranks"):
        key = f"{_KEYS}part {store.add(f'{_KEYS}parts of rank {rank}', 1)}"
    try:
        yield
    except BaseException as error:
        with suppress(RuntimeError):  # the store is gone: the error itself says more
            store.set(key, json.dumps(_failure_before_start(rank, error)))
        raise
    with _asking("other ranks"):
        if store.add(f"{key}/done", 1) == dist.get_world_size():
            store.set(key, json.dumps({}))
    if failure := json.loads(_wait_for(store, key, "other ranks", _WAIT_S)):
        raise _error_from(failure)


def _publish(make: Callable[[], Plan], store: dist.Store, key: str, asked: Mapping[str, str]) -> Plan:
    try:
        plan = make()
    except BaseException as error:
        store.set(key, json.dumps(_failure_of_planning(error)))
        raise
    store.set(key, json.dumps({"plan": plan.to_json(), "asked": asked}))
    return plan


def _failure_of_planning(error: BaseException) -> dict[str, str]:
    if isinstance(error, AutoptdError):
        return {"error": type(error).__name__, "what": error.what, "where": error.where, "fix": error.fix}
    what = f"rank 0 could not plan: {type(error).__name__}: {error}"
    return {"error": RuntimeFault.__name__, "what": what, "where": "rank 0, planning", "fix": ""}


def _failure_before_start(rank: int, error: BaseException) -> dict[str, str]:
    what, fix = (error.what, error.fix) if isinstance(error, AutoptdError) else (f"{type(error).__name__}: {error}", "")
    what = what if what.startswith(f"rank {rank} ") else f"rank {rank} cannot start: {what}"
    return {"error": RuntimeFault.__name__, "what": what, "where": f"rank {rank}", "fix": fix}


def _wait_for(store: dist.Store, key: str, whom: str, limit_s: float = math.inf) -> str:
    """Return the text of a key once it is there. Raises RuntimeFault after `limit_s`, or if the store is gone.

    Where the process of the next rank is gone, this one answers for it, with that failure.
    """
    end_s, pause_s = time.monotonic() + limit_s, _FIRST_S
    with _asking(whom):
        while not (is_there := store.check([key])) and time.monotonic() < end_s:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)
            if pause_s == _LONGEST_S and (gone := _gone(store)) is not None:
                store.compare_set(key, "", json.dumps(gone))
        if is_there:
            return store.get(key).decode()
    where, fix = _waiting(whom), "look at what the others do: their logs, or `py-spy dump --pid …`"
    raise RuntimeFault(f"some ranks were not ready to start in {limit_s / 60:.0f} minutes", where=where, fix=fix)


def _waiting(whom: str) -> str:
    return f"rank {dist.get_rank()}, waiting for {whom}"


@contextmanager
def _asking(whom: str) -> Iterator[None]:
    """Raise a RuntimeFault for the error of a store that is gone."""
    try:
        yield
    except AutoptdError:
        raise
    except RuntimeError as error:  # raised by torch's stores
        what = f"the store of the process group cannot be read: {error}"
        fix = "see the output of the other ranks: the one with the store has ended, or was killed"
        raise RuntimeFault(what, where=_waiting(whom), fix=fix) from error


def _met_store() -> dist.Store:
    """Return the store of the launcher's processes, in which this one has said which process it is."""
    start_processes()
    store = default_store()
    with _asking("other ranks"):
        store.set(f"{_KEYS}process/{dist.get_rank()}", json.dumps(vars(Process.mine())))
    return store


def _gone(store: dist.Store) -> dict[str, str] | None:
    """Return the failure of the next rank if its process, on this node, is gone: no watchdog has started yet."""
    rank = (dist.get_rank() + 1) % dist.get_world_size()
    key = f"{_KEYS}process/{rank}"
    if not store.check([key]) or Process(**json.loads(store.get(key))).state() != "gone":
        return None
    what = f"rank {rank} was killed, or crashed: its process is gone"
    return {"error": RuntimeFault.__name__, "what": what, "where": f"rank {rank}, before its first step", "fix": ""}


def _plan_from(text: str) -> tuple[Plan, Mapping[str, str]]:
    """Return the plan of rank 0 and its arguments as text. Raises the error of rank 0 if it has none."""
    answer = json.loads(text)
    if "plan" in answer:
        return Plan.from_json(answer["plan"], "the plan of rank 0"), answer["asked"]
    raise _error_from(answer)


def _error_from(failure: dict[str, str]) -> AutoptdError:
    kind: type[AutoptdError] = getattr(errors, failure["error"], RuntimeFault)
    return kind(failure["what"], where=failure["where"], fix=failure["fix"])
