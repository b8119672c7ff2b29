"""Process groups that only their members make, so that what a rank does at its start does not grow with the world.

torch's `new_group` is called by every rank of the world for every group. With `use_local_synchronization` only members
call it, but its name for the group, under which they find each other in the store, then contains the number of groups
that the process has made so far. Pipeline ranks make different numbers, so their names would differ. Here purpose and
ranks name a group, and the number of times that it was made.

No cycle of waiting ranks is possible if each rank makes its groups in one order of purposes, of which each has at most
one group with this rank: of the groups that are not complete, all members of the first have come to it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_LAZY = "TORCH_GLOO_LAZY_INIT"
_made: Counter[str] = Counter()


def group_name(purpose: str, ranks: Sequence[int], made: Counter[str]) -> str:
    """Return a name that no other group of the job has, and count it in `made`: the groups of this rank so far."""
    members = f"{ranks[0]} to {ranks[-1]} by {ranks.step}" if isinstance(ranks, range) else ",".join(map(str, ranks))
    name = f"{purpose} of {members}"
    made[name] += 1
    return f"{name}, {made[name]}"


def group_of_members(
    purpose: str, ranks: Sequence[int], backend: str | None = None, *, lazy: bool = False
) -> dist.ProcessGroup:
    """Make the process group of these global ranks, of which this one is one. A collective of its members alone.

    All members give equal arguments, and make groups of equal purpose and ranks equally often. `backend`: default, that
    of the world. `lazy`: over gloo two members connect at their first message; otherwise each connects to all others.
    """
    members, rank = list(ranks), dist.get_rank()
    assert rank in members and members == sorted(set(members)) and members[-1] < dist.get_world_size(), (rank, members)
    world = c10d._get_default_group()  # type: ignore[attr-defined]
    of_world, store = c10d._world.pg_map[world]
    used = dist.Backend(backend or of_world)
    with _unbound(world), lazy_gloo(lazy):
        made, _ = c10d._new_process_group_helper(  # type: ignore[attr-defined]
            len(members),
            members.index(rank),
            members,
            used,
            store,
            f"autoptd/{group_name(purpose, ranks, _made)}",  # type: ignore[arg-type]  # torch's NewType of str
            timeout=c10d._get_default_timeout(used),
            group_desc=purpose,
        )
    c10d._world.pg_group_ranks[made] = {member: i for i, member in enumerate(members)}
    group: dist.ProcessGroup = made
    return group


@contextmanager
def _unbound(world: dist.ProcessGroup) -> Iterator[None]:
    """Hide the device of a world that was started with `device_id`: torch would split the world's NCCL communicator,
    in which all of its ranks must take part."""
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device


@contextmanager
def lazy_gloo(wanted: bool) -> Iterator[None]:
    """Let two ranks of a group connect at their first message, over gloo, not each with all others.

    gloo reads a variable of the environment; torch has no argument for it.
    """
    before = os.environ.get(_LAZY)
    if wanted:
        os.environ[_LAZY] = "1"
    try:
        yield
    finally:
        if wanted:
            os.environ.pop(_LAZY)
            os.environ |= {} if before is None else {_LAZY: before}
