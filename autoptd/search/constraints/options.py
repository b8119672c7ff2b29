"""Read and check the constraints of a user before any search: `fix={"tp": 8, "recompute": "none", "splits": {…}}`.

Choices that no program runs are given as `assume={"kernels": "fused"}` instead (`assumed.py`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from autoptd.cost_models.memory import GRADIENTS, HEADROOM
from autoptd.errors import PlanError, nearest
from autoptd.layout.execution import ExecutionOptions
from autoptd.layout.placements import parse_placement
from autoptd.passes.analysis.fusion import KERNELS
from autoptd.passes.sharding.megatron_splits import MEGATRON
from autoptd.schedule import SCHEDULES, row_of
from autoptd.search.constraints.assumed import ASSUMABLE, MEANT, only_predicted

CONTEXTS = ("ring", "ulysses")  # attention over cp ranks
# searched, beside meshes
DIMENSIONS = ("cp", "offload", "recompute", "shards", "virtual", "zero", "zero-bubble", "zero-bubble-v")
_COUNTS = ("bucket_bytes", "cp", "dp", "ep", "etp", "max_tp", "micro", "pp", "shards", "tp", "virtual")
_SEARCHED = ("dp", "micro", "pp", "recompute", "tp", "zero")
ALLOWED: dict[str, tuple[int | str, ...]] = {
    "attention": ("torch", "flash", "triton", "cudnn"),
    "context": CONTEXTS,
    "cut_solver": ("dynamic", "ilp"),
    "dispatch": ("rows", "slices", "merged"),
    "dropout": ("exact", "fast"),
    "fp8": ("mxfp8", "tensor", "block"),
    "gathers": ("kept", "again"),
    "gradients": GRADIENTS,
    "kernels": KERNELS,
    "loss": ("auto", "kept", "in_place", "chunked"),
    "memory": ("check", "ignore"),
    "permutation": ("fused", "added", "weighted", "twice"),
    "recompute": ("auto", "none", "selective", "ops", "full", "offload"),
    "routing": ("balanced", "natural"),
    "schedule": tuple(SCHEDULES),
    "sends": ("whole", "slices"),
    "stages": ("balanced", "even", "layers"),
    "zero": (0, 1, 2, 3),
}
STREAMS = ("dp", "ep", "p2p", "tp")
CHOSEN = ("context", "cp", "dp", "ep", "etp", "micro", "pp", "recompute", "schedule", "shards", "tp", "zero")
_CHUNKS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)  # numbers of chunks per pipeline rank that are tried
NAMED = ("cuts", "splits", "whole")  # constraints that name modules or parameters
KNOWN = (
    *sorted({*_COUNTS, *ALLOWED} - {"attention", "fp8", "permutation"}),
    "headroom",
    "offload",
    "overlap",
    "sequence_parallel",
    *NAMED,
)


@dataclass(frozen=True)
class SearchOptions(ExecutionOptions):
    """The options of an execution, and those of its search. The search chooses `recompute` and `sums` in a plan.

    loss           of `ExecutionOptions`; "chunked": policy "logits" for all heads; "auto": that policy where it pays,
                   else in place if tp cuts the vocabulary (our own kernel), else kept
    cp             ranks that share the tokens of a sample
    ep             ranks that hold different experts and send each other rows
    etp            tp ranks that share each expert: 1 or all of tp (0)
    virtual        chunks of the model per pipeline rank (interleaved schedule; 2 in zero-bubble-v)
    stages         "balanced" by time, "even" numbers of blocks, or whole "layers", balanced by time
    memory         "check": refuse plans that do not fit; "ignore": predict them too
    headroom       share of a device's memory that the prediction leaves free, by default for its error
    policies       that blocks may choose from, of recomputation: "selective", "ops", "full", "logits"; or "offload" to
                   the host
    starts         first segment of every stage but the first, if cut by hand; empty: the cut is searched
    uncut          segments that no stage may begin with
    cut_solver     of the cut into stages: "dynamic" programming, or the integer program ("ilp"); both find the optimum
    """

    loss: Literal["auto", "kept", "in_place", "chunked"] = "auto"  # type: ignore[assignment]
    cp: int = 1
    ep: int = 1
    etp: int = 0
    virtual: int = 1
    schedule: str = "1f1b"
    stages: str = "balanced"
    memory: str = "check"
    headroom: float = HEADROOM
    policies: tuple[str, ...] = ("selective", "ops", "full", "logits", "offload")
    starts: tuple[int, ...] = ()
    uncut: frozenset[int] = frozenset()
    cut_solver: str = "dynamic"


@dataclass(frozen=True)
class Constraints:
    """The constraints of a task.

    `mesh`: the `fix` argument of `meshes.candidates`; `splits`: parameter-name pattern -> placement, or MEGATRON for
    that of Megatron-LM; `cuts`: modules that each begin a stage; `whole`: patterns of modules that neither tp nor a
    stage boundary cuts.
    `search/constraints/named.py` resolves the names in a graph. `among`: the values of what the search chooses, where
    they are limited. `system`, `ways`: the system whose plans are searched, and its ways to run, each to be searched by
    itself (`search/constraints/systems.py`).
    """

    mesh: Mapping[str, int | str] = field(default_factory=dict)
    splits: Mapping[str, str] = field(default_factory=dict)
    cuts: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    max_tp: int | None = None  # the largest tp that is considered
    sequence_parallel: bool = True  # whether tp may split the sequence
    method: SearchOptions = SearchOptions()
    searched: frozenset[str] = frozenset(DIMENSIONS)
    tokens: int = 1024  # of a sample that a searched cp leaves each rank, at least
    fixed: frozenset[str] = frozenset()  # every name in `fix` or `assume`
    among: Mapping[str, Collection[Any]] = field(default_factory=dict)
    system: str = ""
    ways: tuple[Constraints, ...] = ()
    given: frozenset[str] | None = None  # names that the user fixed, if others are those of a system

    def allows(self, name: str, value: object) -> bool:
        """Return whether the search may choose a value."""
        return name not in self.among or value in self.among[name]

    def on(self, device: str) -> Constraints:
        """Return these constraints for a type of device, "cuda" or "cpu": on a GPU, kernels are compiled by default."""
        if device == "cpu" and self.method.dropout == "fast":
            raise PlanError(
                "torch has no fused kernel for a CPU that drops scores",
                where="fix['dropout']",
                fix="leave it out: masks keyed by element are quicker there than torch's unfused attention",
            )
        splits_backward = row_of(self.method.schedule).splits_backward
        if device != "cuda" or "kernels" in self.fixed or splits_backward:
            return self
        return replace(self, method=replace(self.method, kernels="compiled"))

    @property
    def asked(self) -> frozenset[str]:
        """The names that the user fixed."""
        return self.fixed if self.given is None else self.given

    def searching(self, *dimensions: str) -> Constraints:
        """Return these constraints with only these of the `DIMENSIONS` searched, with every cp: to measure them."""
        policies = self.method.policies if "recompute" in dimensions else ("full",)
        method = replace(self.method, policies=policies)
        return replace(self, method=method, searched=frozenset(dimensions), tokens=1)


def read_constraints(fix: Mapping[str, Any] | None, assume: Mapping[str, Any] | None = None) -> Constraints:
    """Read the keywords of `plan`. Raises PlanError for an unknown name, an impossible value or the wrong keyword."""
    fix, given = _mapping("fix", fix, "{'tp': 8}"), _mapping("assume", assume, "{'kernels': 'fused'}")
    _check_keywords(fix, given)
    fix |= given
    sequence = fix.get("sequence_parallel", True)
    if not isinstance(sequence, bool):
        raise PlanError(f"sequence_parallel is {sequence!r}", where="fix['sequence_parallel']", fix="True or False")
    for name in _COUNTS:
        if name in fix:
            require_count(fix[name], name, f"fix[{name!r}]", least=0 if name == "shards" else 1)
    for name, allowed in ALLOWED.items():
        if name in fix and not any(fix[name] == a and type(fix[name]) is type(a) for a in allowed):
            keyword = "assume" if name in given else "fix"
            known = ", ".join(repr(a) for a in allowed if keyword == "assume" or not only_predicted(name, a))
            raise PlanError(
                f"{name} {fix[name]!r} is not possible", where=f"{keyword}[{name!r}]", fix=f"possible: {known}"
            )
    method = _read_method(fix, "assume['overlap']" if "overlap" in given else "fix['overlap']")
    _check_pairs(fix)
    if method.rings:
        _check_rings(fix)
    return Constraints(
        {n: fix[n] for n in _SEARCHED if n in fix},
        _read_splits(fix.get("splits", {})),
        _read_names(fix, "cuts", "the modules that begin a stage: ['model.layers.8', 'model.layers.20']"),
        _read_names(fix, "whole", "patterns of modules: ['*.router', 'vision']"),
        fix.get("max_tp"),
        sequence,
        method,
        fixed=frozenset(fix),
    )


def schedules_and_chunks(constraints: Constraints, of_sums: bool = False) -> tuple[list[str], list[int]]:
    """Return the schedules and the numbers of chunks per pipeline rank to try: fixed ones, or all.

    `of_sums`: the loss is a function of sums over the batch; GPipe, which has them before its first backward pass, is
    then tried too.
    """
    method, free = constraints.method, constraints.searched - constraints.fixed
    if "schedule" in constraints.fixed or method.virtual > 1:
        schedules = [method.schedule]
    else:
        more = {"interleaved": "virtual" in free, "zero-bubble": "zero-bubble" in free}
        # zero-bubble-v has its own number of chunks
        more["zero-bubble-v"] = "zero-bubble-v" in free and "virtual" not in constraints.fixed
        more["gpipe"] = of_sums and method.schedule != "gpipe"
        if method.kernels == "compiled":  # cannot split backward passes into B and W
            more = {name: tried and not row_of(name).splits_backward for name, tried in more.items()}
        schedules = [method.schedule, *(name for name, tried in more.items() if tried)]
    schedules = [name for name in schedules if constraints.allows("schedule", name)]
    searched = "interleaved" in schedules and "virtual" not in constraints.fixed
    return schedules, list(_CHUNKS) if searched else [method.virtual]


def _mapping(keyword: str, choices: object, example: str) -> dict[str, Any]:
    if choices is not None and not isinstance(choices, Mapping):
        what = f"{keyword} is {_shown(choices)}, not a mapping"
        raise PlanError(what, where=keyword, fix=f"give for example {keyword}={example}")
    return dict(choices or {})


def _check_keywords(fix: Mapping[str, Any], assume: Mapping[str, Any]) -> None:
    """Raise PlanError for a name or value that its keyword does not take."""
    for name, value in fix.items():
        if only_predicted(name, value):
            _read_streams(value if name == "overlap" else (), "fix['overlap']")
            raise PlanError(
                f"{name} {_shown(value)} can only be predicted, since no generated program does it",
                where=f"fix[{name!r}]",
                fix=f"give assume={{{name!r}: {_shown(value)}}} to autoptd.plan, or leave it out",
            )
        if name not in KNOWN and name not in ASSUMABLE:
            raise PlanError(f"{name!r} cannot be fixed", where=f"fix[{name!r}]", fix=nearest(str(name), KNOWN, MEANT))
    for name in assume:
        if name not in ASSUMABLE:
            how = (
                f"give it in fix; assume takes {', '.join(ASSUMABLE)}"
                if name in KNOWN
                else nearest(str(name), ASSUMABLE)
            )
            raise PlanError(f"{name!r} cannot be assumed", where=f"assume[{name!r}]", fix=how)
        if name in fix:
            raise PlanError(f"{name!r} is fixed and assumed", where=f"assume[{name!r}]", fix="leave one out")


def _read_streams(streams: object, where: str) -> tuple[str, ...]:
    if not isinstance(streams, (list, tuple)) or not all(s in STREAMS for s in streams):
        known = ", ".join(map(repr, STREAMS))
        raise PlanError(f"overlap is {_shown(streams)}", where=where, fix=f"give some of ({known})")
    return tuple(sorted(set(streams)))


def _read_method(fix: Mapping[str, Any], overlap_at: str) -> SearchOptions:
    given = {f.name: fix[f.name] for f in fields(SearchOptions) if f.name in fix and f.name not in _SEARCHED}
    if "headroom" in given:
        share = given["headroom"]
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < 1:
            raise PlanError(
                f"headroom is {_shown(share)}",
                where="fix['headroom']",
                fix="give the share of a device's memory to leave free, from 0 to below 1: 0.1 is a tenth",
            )
    if "offload" in given:
        shares = given["offload"] if isinstance(given["offload"], (list, tuple)) else [given["offload"]]
        if not shares or not all(type(share) in (int, float) and 0 <= share <= 1 for share in shares):
            raise PlanError(
                f"offload is {_shown(given['offload'])}",
                where="fix['offload']",
                fix="give the share of the optimizer state to keep in host memory, from 0 to 1: 0.5 is half; or a list "
                "of shares, one for each pipeline rank",
            )
        given["offload"] = tuple(map(float, shares)) if any(shares) else ()
    if "overlap" in given:
        given["overlap"] = _read_streams(given["overlap"], overlap_at)
    if given.get("virtual", 1) > 1:
        given.setdefault("schedule", "interleaved")
    chunks = row_of(given.get("schedule", SearchOptions.schedule)).chunks
    if chunks is not None:
        given.setdefault("virtual", chunks)
    method = SearchOptions(**given)
    if method.rings:
        method = replace(method, policies=tuple(p for p in method.policies if p != "ops"))
    searched = chunks is None and "virtual" not in fix
    if (method.virtual == 1 if chunks is None else method.virtual != chunks) and not searched:
        raise PlanError(
            f"schedule {method.schedule!r} with virtual {method.virtual}",
            where="fix['schedule']",
            fix="give several chunks per rank (virtual > 1) to the schedule 'interleaved'; 'zero-bubble-v' has 2, "
            "all others have 1",
        )
    return method


def _check_rings(fix: Mapping[str, Any]) -> None:
    """Raise PlanError for what leaves nothing to take apart around the ring of tp."""
    if fix.get("sequence_parallel") is False:
        raise PlanError(
            "without sequence parallelism tp has sums, which nothing overlaps: a program takes apart gathers before "
            "products, and sums of products that are scattered",
            where="fix['overlap']",
            fix="leave tp out of overlap, or sequence_parallel out",
        )
    if fix.get("recompute") == "ops":
        raise PlanError(
            "recompute 'ops' keeps some products of a gathered tensor and not others, but overlap of tp makes them "
            "together",
            where="fix['recompute']",
            fix="leave tp out of overlap, or choose another policy: 'none', 'selective' or 'full'",
        )


def _check_pairs(fix: Mapping[str, Any]) -> None:
    """Raise PlanError for a pair of constraints that contradict each other for any model."""
    if fix.get("tp", 1) > fix.get("max_tp", math.inf):
        raise PlanError(
            f"tp {fix['tp']} is more than max_tp {fix['max_tp']}", where="fix['max_tp']", fix="leave one of them out"
        )
    if fix.get("offload") and fix.get("zero") == 3:
        raise PlanError(
            "parameters that ZeRO 3 shards are gathered in every pass, so they stay on the device",
            where="fix['offload']",
            fix="fix zero to 0, 1 or 2, or leave offload out",
        )
    if fix.get("stages") == "even" and fix.get("cuts"):
        raise PlanError("stages cannot be even and cut by hand", where="fix['cuts']", fix="leave cuts or stages out")
    schedule = fix.get("schedule", SearchOptions.schedule)
    if fix.get("kernels") == "compiled" and row_of(schedule).splits_backward:
        raise PlanError(
            f"the {schedule} schedule splits backward passes into B and W, which compiled kernels cannot do",
            where="fix['schedule']",
            fix="fix another schedule, or leave out kernels",
        )


def _read_names(fix: Mapping[str, Any], what: str, give: str) -> tuple[str, ...]:
    """Return the names that `fix[what]` gives as a list or as a single string; `give`: what the error asks for."""
    value = fix.get(what, ())
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) and name for name in names):
        raise PlanError(f"{what} is {_shown(value)}", where=f"fix[{what!r}]", fix=f"give {give}")
    return tuple(names)


def require_count(
    value: object, what: str, where: str = "", of: str = "", most: int | None = None, least: int = 1
) -> None:
    """Raise PlanError unless `value` is a whole number from `least` to `most`; `of`: what it counts, for the error."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        counted = f": {of}" if of else ""
        raise PlanError(
            f"{what} is {_shown(value)}", where=where or what, fix=f"give a whole number of at least {least}{counted}"
        )
    if most is not None and value > most:
        raise PlanError(f"{what} is {_shown(value)}", where=where or what, fix=f"give at most {most:,}: {of}")


def _read_splits(splits: object) -> dict[str, str]:
    """Return parameter-name pattern -> placement. Raises PlanError for text that is no placement."""
    if splits == MEGATRON:
        return {"*": MEGATRON}
    if not isinstance(splits, Mapping) or not all(isinstance(pattern, str) for pattern in splits):
        raise PlanError(
            f"splits is {_shown(splits)}", where="fix['splits']", fix="give {'*.q_proj.weight': 'S0'}, or 'megatron'"
        )
    for pattern, text in splits.items():
        try:
            if text == MEGATRON:
                continue
            parse_placement(text if isinstance(text, str) else _shown(text))
        except ValueError as error:
            what, _, how = str(error).partition("; ")
            raise PlanError(what, where=f"fix['splits'][{pattern!r}]", fix=how) from error
    return dict(splits)


def _shown(value: object) -> str:
    """Return the repr of a value for an error, or its type if that is long."""
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"of type {type(value).__name__}"
