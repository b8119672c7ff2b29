"""The plans that another training system's arguments can express, as constraints: `as_="megatron"`.

A system is a list of ways to run. A way maps names of `fix` and `assume` to the values that the system's arguments can
express. Of the names that the search chooses it tries all of these values; of the others it takes the first. What the
user gives besides must be among the values, and narrows them further. Names that a way leaves out are free.

    Megatron-LM   arguments as in `export/megatron.py`: megatron/training/arguments.py of Megatron-Core 0.15
                  (`validate_args`: P2P overlaps compute in the interleaved schedule alone), recomputation:
                  megatron/core/transformer/transformer_config.py
    NeMo          its recipes run Megatron-Core, with userbuffers for tp (`MegatronCommOverlapCallback`; from memory)
    torchtitan    torchtitan/config/configs.py, distributed/fsdp.py (`get_fsdp_reshard_after_forward_policy`),
                  distributed/pipeline_parallel.py, distributed/activation_checkpoint.py, of August 2026
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from autoptd.errors import PlanError, nearest
from autoptd.passes.sharding.megatron_splits import MEGATRON
from autoptd.search.constraints.assumed import by_keyword
from autoptd.search.constraints.options import CHOSEN, Constraints, read_constraints

Way = Mapping[str, Collection[Any]]
SEVERAL = frozenset(range(2, 2**11 + 1))  # pipeline ranks

_MEGATRON: Way = {
    "splits": (MEGATRON,),
    "stages": ("layers", "even"),  # --pipeline-model-parallel-layout
    "kernels": ("fused",),
    "loss": ("in_place",),  # vocab_parallel_cross_entropy
    "gathers": ("again",),
    "gradients": ("main", "compute"),  # --grad-reduce-in-bf16
    "attention": ("cudnn", "flash"),  # --attention-backend; Transformer Engine prefers cuDNN's from Hopper on
    "dispatch": ("slices", "merged"),  # --moe-token-dispatcher-type alltoall, flex
    "zero": (0, 1),  # --use-distributed-optimizer
    "shards": (0,),
    "recompute": ("none", "selective", "full"),  # --recompute-granularity; full: uniform, of 1 layer each
}
_ONE_F_ONE_B: Way = {"schedule": ("1f1b",), "overlap": (("dp",), (), ("dp", "tp"), ("tp",))}
_INTERLEAVED: Way = {"schedule": ("interleaved",), "overlap": (("dp", "p2p"), ("p2p",), ("dp", "p2p", "tp"))}
_TORCHTITAN: Way = {
    "splits": (MEGATRON,),  # the same columns and rows, as ColwiseParallel and RowwiseParallel
    "sequence_parallel": (True,),
    "stages": ("layers", "even"),
    "kernels": ("compiled", "eager"),
    "loss": ("kept",),
    "gathers": ("kept",),
    "gradients": ("main",),  # mixed_precision_reduce is float32
    "attention": ("flash", "cudnn"),
    "overlap": (("dp",),),
    "context": ("ring",),
    "offload": (0.0,),
    "recompute": ("none", "ops", "full"),  # SelectiveAC saves every second product
}

SYSTEMS: Mapping[str, tuple[Way, ...]] = {
    "megatron": ({**_MEGATRON, **_ONE_F_ONE_B}, {**_MEGATRON, **_INTERLEAVED}),
    "nemo": (
        {**_MEGATRON, "schedule": ("1f1b",), "overlap": (("dp", "tp"),), "sequence_parallel": (True,)},
        {**_MEGATRON, "schedule": ("interleaved",), "overlap": (("dp", "p2p", "tp"),), "sequence_parallel": (True,)},
    ),
    "torchtitan": (
        # without stages: FSDP reshards parameters after forward or not, and reduces gradients of every microbatch
        {**_TORCHTITAN, "pp": (1,), "schedule": ("1f1b",), "zero": (3, 2, 0)},
        # with stages it keeps them for the step, and reduces gradients after the last microbatch, as ZeRO 1 does
        {**_TORCHTITAN, "pp": SEVERAL, "schedule": ("1f1b", "gpipe", "interleaved"), "zero": (1, 0)},
    ),
}
_SEARCHED = frozenset(
    {"cp", "recompute", "shards", "virtual", "zero"}
)  # of the dimensions; offload only if it is fixed


def read_system(
    name: str | None, fix: Mapping[str, Any] | None, assume: Mapping[str, Any] | None = None
) -> Constraints:
    """Read the keywords of `plan`: `fix`, `assume`, and `as_`, the system whose plans are searched.

    Raises PlanError for an unknown system, for a choice that it cannot express, and what `read_constraints` raises.
    """
    own = read_constraints(fix, assume)
    if name is None:
        return own
    if name not in SYSTEMS:
        raise PlanError(f"no system is called {name!r}", where="as_", fix=nearest(str(name), SYSTEMS))
    given = {**(fix or {}), **(assume or {})}
    ways = tuple(_constraints(name, way, own, given) for way in SYSTEMS[name] if not list(_conflicts(way, given)))
    if not ways:
        choice, values = next(_conflicts(SYSTEMS[name][0], given))
        possible = dict.fromkeys(repr(v) for way in SYSTEMS[name] for v in way.get(choice, values) if v not in SEVERAL)
        raise PlanError(
            f"{name} cannot express {choice} {given[choice]!r}",
            where=f"as_ {name!r}, fix[{choice!r}]",
            fix=f"possible: {', '.join(possible)}; or leave as_ out",
        )
    return replace(ways[0], ways=ways)


def _conflicts(way: Way, given: Mapping[str, Any]) -> Iterator[tuple[str, Collection[Any]]]:
    """Yield the names that are given with a value that a way does not have."""
    for name, values in way.items():
        if name in given and _plain(name, given[name]) not in values:
            yield name, values


def _plain(name: str, value: Any) -> Any:
    return tuple(sorted(set(value))) if name == "overlap" else value


def _constraints(system: str, way: Way, own: Constraints, given: Mapping[str, Any]) -> Constraints:
    free = {name: values for name, values in way.items() if name not in given}
    among = {name: values for name, values in free.items() if name in CHOSEN and len(values) > 1}
    fixed = {name: next(iter(values)) for name, values in free.items() if name not in among}
    read = read_constraints(*by_keyword({**fixed, **given}))
    return replace(read, system=system, among=among, searched=own.searched & _SEARCHED, given=own.fixed)
