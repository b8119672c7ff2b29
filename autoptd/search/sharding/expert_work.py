"""The work of one rank whose experts are a part of the model's, given the work of a rank that has all of them.

A rank computes as many rows either way, if all ranks get equally many. Spread over ep ranks they are the rows of fewer
experts, more of them each: fewer weights are read, and tiles of products are fuller.
"""

from __future__ import annotations

from dataclasses import replace

from autoptd.cost_models.op_time import OpWork
from autoptd.search.sharding.kind_cost import KindWork, Works

_ITEMSIZE = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


def spread(work: KindWork, ep: int) -> KindWork:
    """Return the work with the experts spread over `ep` ranks."""
    if ep == 1 or not any(w.groups for w in work.forward):
        return work
    return replace(
        work,
        forward=_spread(work.forward, ep),
        backward=_spread(work.backward, ep),
        weights=_spread(work.weights, ep),
        recomputed={policy: _spread(works, ep) for policy, works in work.recomputed.items()},
    )


def _spread(works: Works, ep: int) -> Works:
    return tuple(_of_own(work, ep) if work.groups else work for work in works)


def _of_own(work: OpWork, ep: int) -> OpWork:
    """Return a grouped product with a rank's own experts only."""
    assert work.m and work.n and work.k
    own = max(1, work.batch // ep)
    rows = {"m": work.m * ep} if work.groups == "m" else {"k": work.k * ep}
    matrix = work.n * work.k if work.groups == "m" else work.m * work.n
    fewer = (work.batch - own) * matrix * _ITEMSIZE[work.dtype]
    return replace(work, batch=own, nbytes=max(0.0, work.nbytes - fewer), **rows)
