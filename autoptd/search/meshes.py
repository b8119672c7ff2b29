"""Enumerate the meshes of a world and the ways to run each.

A mesh is dp * cp * tp * pp = world, with `micro` samples per microbatch and data-parallel rank; a step has
m = ⌈batch / (dp * micro)⌉ microbatches. Where dp does not divide the batch, some ranks have a sample less, and where
micro does not divide a rank's samples, its last microbatch has fewer.

`candidates` lists all meshes that the limits and the user's `fix` allow, each with every ZeRO stage, schedule and
number of chunks, in (cp, tp, pp, dp, micro, zero, recompute, schedule) order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import NamedTuple

from autoptd.errors import PlanError, nearest
from autoptd.schedule import StageMap, route_of, row_of

AUTO, WITH_HOST = "auto", "auto or offload"  # values of `Candidate.recompute` that leave the policy to each block
OFFLOAD = "offload"  # the policy of a block that keeps in host memory what it saves for backward
FIXABLE = ("dp", "micro", "pp", "recompute", "tp", "zero")


@dataclass(frozen=True)
class Copies:
    """The number of ranks that hold the same parameters, of those that share one copy of their sharded state, and the
    distance from each to the next."""

    ranks: int
    shards: int
    stride: int


class Candidate(NamedTuple):
    """One mesh with its microbatch size and memory options."""

    dp: int
    tp: int
    pp: int
    micro: int  # samples per microbatch and data-parallel rank
    microbatches: int  # per step
    zero: int
    recompute: str
    cp: int = 1
    schedule: str = "1f1b"
    virtual: int = 1  # chunks per pipeline rank
    shards: int = 0  # data-parallel ranks that ZeRO shards state over; 0: all of them
    memory_saving: bool = False  # splits weigh each byte saved for backward by the time of recomputing it
    pools: tuple[int, ...] = ()  # device type of each pipeline rank, an index into the cluster's; empty: the first
    ep: int = 1  # ranks that hold different experts
    etp: int = 0  # tp ranks that share each expert: 1, or 0 for all
    offload: float = 0.0  # share of the optimizer state in host memory

    @property
    def world(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    @property
    def copies(self) -> tuple[Copies, ...]:
        """The copies of parameters, then, if experts are on ranks of their own, those of experts."""
        ranks = self.dp * self.cp
        experts = ranks * self.tp // (self.ep * self.sharers)
        own = (Copies(experts, experts if self.zero else 1, self.ep * self.sharers),) if self.ep > 1 else ()
        return Copies(ranks, self.sharing, self.tp), *own

    @property
    def sharers(self) -> int:
        """Number of ranks that share each expert."""
        return self.etp or self.tp

    @property
    def route(self) -> StageMap:
        """Map of stages to pipeline ranks."""
        return route_of(self.schedule, self.pp, self.virtual)

    @property
    def sharing(self) -> int:
        """Number of ranks that one copy of the sharded state is spread over."""
        ranks = self.dp * self.cp
        return min(self.shards or ranks, ranks) if self.zero else 1

    @property
    def is_plain(self) -> bool:
        """True if every option but the mesh is at its default."""
        options = self.cp, self.schedule, self.virtual, self.shards, self.memory_saving
        return self.zero <= 1 and options == (1, "1f1b", 1, 0, False)

    @property
    def plain_memory(self) -> Candidate:
        """This candidate with fast splits and activations on the device: no variant, unless of the optimizer state."""
        return self._replace(memory_saving=False, recompute=AUTO if self.recompute == WITH_HOST else self.recompute)

    @property
    def choices(self) -> tuple[object, ...]:
        """Its mesh, experts' ranks, schedule, sharded state, offload, splits, recomputation and devices, without its
        microbatch: other choices have another best one."""
        mesh = self.dp, self.tp, self.pp, self.cp
        run, state = (self.schedule, self.virtual), (self.zero, self.shards)
        return mesh, (self.ep, self.etp), run, state, self.offload, self.memory_saving, self.recompute, self.pools

    @property
    def family(self) -> tuple[object, ...]:
        """All but its schedule and, if it takes no time in the passes, the sharding of its state."""
        splits = self.tp, self.cp, self.ep, self.etp, self.micro, self.memory_saving, self.recompute
        return *splits, self.pp, self.pools, (self.zero, self.shards) if self.zero > 1 else ()

    @property
    def sharded_state(self) -> tuple[float, ...]:
        """The numbers that the bytes of its state depend on, and the messages that shard it."""
        return self.dp * self.cp, self.tp, self.pp, self.zero, self.shards, self.ep, self.etp, self.offload

    def __str__(self) -> str:
        text = f"dp{self.dp} tp{self.tp} pp{self.pp} micro{self.micro} zero{self.zero} recompute={self.recompute}"
        extra = {"cp": 1, "ep": 1, "etp": 0, "virtual": 1, "shards": 0, "offload": 0.0}
        text += "".join(
            f" {name}{getattr(self, name)}" for name, usual in extra.items() if getattr(self, name) != usual
        )
        text += " memory-saving" if self.memory_saving else ""
        text += f" pools{','.join(map(str, self.pools))}" if self.pools else ""
        return text if self.schedule in ("1f1b", "interleaved") else f"{text} {self.schedule}"


@dataclass(frozen=True)
class MeshLimits:
    """Limits set by the devices and the model. `batch`: samples per step; `segments`: number of segments of the model;
    `max_micro`: largest microbatch to consider (a fixed one may be larger), per context-parallel rank."""

    world: int
    batch: int
    segments: int
    tp_sizes: tuple[int, ...]
    zeros: tuple[int, ...] = (0, 1)
    recomputes: tuple[str, ...] = ("none", "full", "auto")
    max_micro: int | None = None
    cps: tuple[int, ...] = (1,)
    eps: tuple[int, ...] = (1,)
    etps: tuple[int, ...] = (0,)  # 0: all of tp
    tokens: int = 1  # of a sample
    schedules: tuple[str, ...] = ("1f1b",)
    virtuals: tuple[int, ...] = (1,)
    shards: tuple[int, ...] = (0,)
    offload: float = 0.0
    pool_ranks: tuple[int, ...] = ()  # devices of each type, if there are several types
    chunks: int | None = None  # most chunks of the model that are searched; None: as many as segments
    one_microbatch: bool = False  # per step: samples need others of their batch
    uneven: bool = True  # whether ranks and microbatches may differ by a sample


def candidates(limits: MeshLimits, fix: Mapping[str, int | str] | None = None) -> tuple[Candidate, ...]:
    """Return every candidate within `limits` that has the values in `fix` (any of `FIXABLE`).

    With one data-parallel rank ZeRO changes nothing, so only the first of `limits.zeros` is listed.
    Raises `PlanError` with the value that does not divide or is not possible, and the nearest possible ones.
    """
    choices = dict(fix or {})
    _check_alone(limits, choices)
    found = tuple(c for cp in limits.cps if limits.world % cp == 0 for c in _with_cp(limits, choices, cp))
    if not found:
        alone = replace(limits, world=limits.world // limits.cps[0])
        _check_together(alone, choices)
        raise _nothing_left(alone, choices)
    return found


def _with_cp(limits: MeshLimits, choices: Mapping[str, int | str], cp: int) -> Iterator[Candidate]:
    most = None if limits.max_micro is None else limits.max_micro * cp
    alone = replace(limits, world=limits.world // cp, max_micro=most, cps=(cp,))
    if len(limits.cps) == 1:
        _check_together(alone, choices)
    for mesh in _meshes(alone, choices):
        for option in _options(alone, choices, *mesh):
            yield from _ways(alone, option._replace(cp=cp), strict="micro" not in choices or len(limits.schedules) > 1)


def _ways(limits: MeshLimits, c: Candidate, strict: bool) -> Iterator[Candidate]:
    """Yield `c` with every schedule, number of chunks and sharding group that its mesh allows.

    Without a pipeline all schedules but GPipe coincide, and only the first of them is listed. `strict`: drop microbatch
    counts that a schedule refuses; False if the user fixed both, so that the schedule's error is raised."""
    ranks, fixed = c.dp * c.cp, len(limits.shards) == 1  # of several, 0 stands for all ranks
    groups = [n for n in limits.shards if not n or (c.zero and ranks % n == 0 and (fixed or n < ranks))]
    alone = c.pp == 1 and len(limits.schedules) > 1
    for schedule in [s for s in limits.schedules if not alone or s in (limits.schedules[0], "gpipe")]:
        row = row_of(schedule)
        for virtual in (row.chunks,) if row.chunks else [v for v in limits.virtuals if v > 1]:
            searched = not row.chunks and len(limits.virtuals) > 1
            most = min(limits.segments, limits.chunks or limits.segments) if searched else limits.segments
            if virtual > 1 and c.pp * virtual > most:
                continue
            if row.groups and ((strict and c.microbatches % c.pp) or (c.pp == 1 and len(limits.virtuals) > 1)):
                continue
            run = c._replace(schedule=schedule, virtual=virtual)
            for shards in groups:
                for ep, etp in _experts(limits, c, shards):
                    for pools in _placed(limits, c):
                        yield run._replace(ep=ep, etp=etp, pools=pools, shards=shards)


def _experts(limits: MeshLimits, c: Candidate, shards: int) -> Iterator[tuple[int, int]]:
    """Yield every (ep, etp) that a mesh allows. All tp ranks share an expert (0), or none do, each with own tokens."""
    whole = [0 for n in limits.etps if n in (0, c.tp)][:1]
    own = [1 for n in limits.etps if n == 1 and c.tp > 1 and limits.tokens % (c.tp * c.cp) == 0][:1]
    for etp in whole + own:
        ranks = c.dp * c.cp * (c.tp if etp else 1)
        for ep in limits.eps:
            if ranks % ep == 0 and not (ep > 1 and shards) and (ep > 1 or etp == 0 or 0 not in limits.etps):
                yield ep, etp


def _placed(limits: MeshLimits, c: Candidate) -> Iterator[tuple[int, ...]]:
    """Yield the device type of each pipeline rank: ranks of one type are consecutive, the types in every order."""
    if len(limits.pool_ranks) < 2:
        yield ()
        return
    stage = c.dp * c.cp * c.tp
    if not any(ranks % stage for ranks in limits.pool_ranks):
        for order in permutations(range(len(limits.pool_ranks))):
            yield tuple(pool for pool in order for _ in range(limits.pool_ranks[pool] // stage))


def _meshes(limits: MeshLimits, choices: Mapping[str, int | str]) -> Iterator[tuple[int, int, int]]:
    """Yield every (dp, tp, pp)."""
    for tp in sorted(set(limits.tp_sizes)):
        if limits.world % tp or choices.get("tp", tp) != tp:
            continue
        for pp in divisors(limits.world // tp):
            dp = limits.world // tp // pp
            if pp <= limits.segments and choices.get("pp", pp) == pp and choices.get("dp", dp) == dp:
                yield dp, tp, pp


def _options(limits: MeshLimits, choices: Mapping[str, int | str], dp: int, tp: int, pp: int) -> Iterator[Candidate]:
    zeros = limits.zeros if dp * limits.cps[0] > 1 else limits.zeros[:1]
    for micro in _sizes(limits, choices, dp):
        microbatches = microbatches_of(limits, dp, micro)
        if microbatches is None:
            continue
        for zero in [int(choices["zero"])] if "zero" in choices else zeros:
            for recompute in [str(choices["recompute"])] if "recompute" in choices else limits.recomputes:
                yield Candidate(dp, tp, pp, micro, microbatches, zero, recompute, offload=limits.offload)


def _sizes(limits: MeshLimits, choices: Mapping[str, int | str], dp: int) -> list[int]:
    """Return the samples per microbatch to try: the divisors of a rank's samples, and the powers of two, each made as
    small as its number of microbatches allows."""
    share = -(-limits.batch // dp)  # of the ranks with most samples
    if limits.one_microbatch:
        return [share] if choices.get("micro", share) == share else []
    if "micro" in choices:
        return [int(choices["micro"])]
    found = set(divisors(share))
    if limits.uneven:
        counts = {-(-share // 2**k) for k in range(share.bit_length())}
        found |= {-(-share // count) for count in counts}
    return [micro for micro in sorted(found) if micro <= (limits.max_micro or micro)]


def microbatches_of(limits: MeshLimits, dp: int, micro: int) -> int | None:
    """Return the microbatches of each rank in a step; None unless all ranks have equally many."""
    least, most = limits.batch // dp, -(-limits.batch // dp)
    count = -(-most // micro)
    if not limits.uneven:
        return count if least == most and least % micro == 0 else None
    return count if least > (count - 1) * micro and micro <= most else None


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


# ---- constraints that cannot be met ----


def _check_alone(limits: MeshLimits, choices: Mapping[str, int | str]) -> None:
    for name in choices:
        if name not in FIXABLE:
            raise PlanError(f"{name!r} cannot be fixed", where=f"fix[{name!r}]", fix=nearest(name, FIXABLE))
    for name in ("dp", "tp", "pp", "micro"):
        value = choices.get(name, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise PlanError(f"{name} is {value!r}", where=f"fix[{name!r}]", fix="give a whole number of at least 1")
    allowed: dict[str, Sequence[int | str]] = {"zero": limits.zeros, "recompute": limits.recomputes}
    for name, values in allowed.items():
        if name in choices and (choices[name] not in values or isinstance(choices[name], bool)):
            what, fix = f"{name} {choices[name]!r} is not possible", f"possible: {', '.join(map(str, values))}"
            raise PlanError(what, where=f"fix[{name!r}]", fix=fix)


def _check_together(limits: MeshLimits, choices: Mapping[str, int | str]) -> None:
    fixed = {name: int(choices[name]) for name in ("dp", "tp", "pp") if name in choices}
    for name, value in fixed.items():
        if limits.world % value:
            sizes = [d for d in divisors(limits.world) if name != "tp" or d in limits.tp_sizes]
            raise PlanError(
                f"world {limits.world} is not divisible by {name} {value}",
                where=f"fix[{name!r}]",
                fix=f"use {name} {around(value, sizes)}",
            )
    tp = fixed.get("tp")
    if tp is not None and tp not in limits.tp_sizes:
        sizes = [d for d in limits.tp_sizes if limits.world % d == 0]
        raise PlanError(f"the model cannot be split by tp {tp}", where="fix['tp']", fix=f"use tp {around(tp, sizes)}")
    if fixed.get("pp", 1) > limits.segments:
        what = f"pp {fixed['pp']} is more than the {limits.segments} segments that the model can be cut into"
        raise PlanError(what, where="fix['pp']", fix=f"use pp <= {limits.segments}")
    product = math.prod(fixed.values())
    text = " x ".join(f"{name} {value}" for name, value in fixed.items())
    if len(fixed) == 3 and product != limits.world:
        raise PlanError(
            f"{text} is {product}, not the world of {limits.world}", where="fix", fix="leave one of them out"
        )
    if limits.world % product:
        raise PlanError(
            f"world {limits.world} is not divisible by {text} = {product}",
            where="fix",
            fix=f"use a world of {around(limits.world, _multiples(product, limits.world))}, or leave one of them out",
        )
    _check_batch(limits, choices)


def _check_batch(limits: MeshLimits, choices: Mapping[str, int | str]) -> None:
    fixed = {name: int(choices[name]) for name in ("dp", "micro") if name in choices}
    if {"tp", "pp"} <= choices.keys():
        fixed["dp"] = limits.world // (int(choices["tp"]) * int(choices["pp"]))
    product, dp = math.prod(fixed.values()), fixed.get("dp", 1)
    micro = fixed.get("micro", -(-limits.batch // dp))  # with all samples of a rank, if any number can be
    if limits.batch < dp or microbatches_of(limits, dp, micro) is None:
        text = " x ".join(f"{name} {fixed[name]}" for name in ("dp", "micro") if name in fixed)
        problem = "smaller than" if limits.batch < product else "not divisible by"
        raise PlanError(
            f"batch {limits.batch} is {problem} {text}" + (f" = {product}" if len(fixed) > 1 else ""),
            where="batch",
            fix=f"use a batch of {around(limits.batch, _multiples(product, limits.batch))}",
        )


def _multiples(step: int, near: int) -> list[int]:
    return [value for value in (near // step * step, near // step * step + step) if value]


def around(value: int, known: Sequence[int]) -> str:
    """Return the nearest known values below and above `value`, as text."""
    below, above = [k for k in known if k < value], [k for k in known if k > value]
    return " or ".join(str(k) for k in (*([max(below)] if below else []), *([min(above)] if above else [])))


def _nothing_left(limits: MeshLimits, choices: Mapping[str, int | str]) -> PlanError:
    """Return the error for constraints that are possible one by one but not together."""
    meshes = list(_meshes(limits, choices))
    asked = ", ".join(f"{name} {value}" for name, value in sorted(choices.items())) or "nothing fixed"
    if not meshes:
        return PlanError(
            f"no dp x tp x pp gives a world of {limits.world} with {asked}",
            where=f"tp may be {', '.join(map(str, sorted(limits.tp_sizes)))}; pp at most {limits.segments}",
            fix="fix fewer of them, or use another world",
        )
    if options := [option for mesh in meshes for option in _options(limits, choices, *mesh)]:
        return _no_way(limits, options, asked)
    micro = int(choices.get("micro", 1))
    steps = sorted({dp * micro for dp, _, _ in meshes})
    batches = sorted({b for step in steps for b in _multiples(step, limits.batch)})
    return PlanError(
        f"batch {limits.batch} is {'smaller than' if limits.batch < steps[0] else 'not divisible by'} "
        f"dp x micro of any mesh of world {limits.world} with {asked}",
        where=f"dp x micro may be {', '.join(map(str, steps))}, as far as this model can be split by tp and pp",
        fix=f"use a batch of {around(limits.batch, batches)}",
    )


def _no_way(limits: MeshLimits, options: Sequence[Candidate], asked: str) -> PlanError:
    """Return the error for meshes and microbatches that no schedule, experts or types of device allow."""
    names, any_cut = " or ".join(limits.schedules), replace(limits, segments=limits.world * 2**20, chunks=None)
    if stages := {way.pp * way.virtual for c in options for way in _ways(any_cut, c, strict=True)}:
        return PlanError(
            f"{names} cuts the model into {min(stages)} stages or more, but it can be cut into {limits.segments}",
            where="fix['schedule'], fix['virtual'], fix['pp']",
            fix="use a smaller pp or virtual, or the schedule '1f1b'",
        )
    if any(True for c in options for _ in _ways(any_cut, c, strict=False)):
        return PlanError(
            f"{names} takes microbatches in groups of pp, which no mesh with {asked} has",
            where="fix['schedule'], batch",
            fix="use a batch of dp x micro x a multiple of pp, or the schedule '1f1b'",
        )
    if any(True for c in options for _ in _ways(replace(any_cut, eps=(1,), etps=(0,)), c, strict=False)):
        asked = f"ep {limits.eps[0]}" + (f" with etp {limits.etps[0]}" if limits.etps[0] else "")
        what = f"{asked} fits no mesh: ep divides dp × cp, or dp × cp × tp with etp 1, which splits the tokens over tp"
        fix = "use a larger batch or a smaller ep, or fix fewer of tp, pp, cp, ep and etp"
        return PlanError(f"{what}; dp is at most the batch of {limits.batch}", where="fix['ep']", fix=fix)
    if any(True for c in options for _ in _ways(replace(any_cut, shards=(0,)), c, strict=False)):
        what = f"groups of {limits.shards[0]} shards fit no mesh with {asked} that shards state"
        return PlanError(what, where="fix['shards']", fix="use a divisor of dp × cp, with zero 1, 2 or 3")
    where, fix = f"{limits.pool_ranks} devices of each type", "fix fewer of dp, tp, pp and cp, or use another world"
    return PlanError(f"no mesh with {asked} has stages of one type of device each", where=where, fix=fix)
