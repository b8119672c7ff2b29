"""Durations of the parts of a training step on each pipeline rank, and their overlap: the input of `simulate`.

`times_to_data` and `times_from_data` convert them to and from the form in plan files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from autoptd.errors import PlanError
from autoptd.schedule.actions import EARLY
from autoptd.schedule.stage_map import Shape, StageMap

_PARTS = ("weight_s", "recompute_s")  # of backward_s
_END = ("reduce_s", "step_s", "gather_s", "buckets")  # of a rank, for the end of a step


@dataclass(frozen=True)
class ChunkTimes:
    """Seconds of one microbatch on one chunk of a pipeline rank.

    `forward_s`, `backward_s` (with recomputation): without communication on the tp axis, which is in `*_tp_s`.
    `weight_s`: the part of `backward_s` for weight gradients, which zero-bubble may defer; 0 if unknown.
    `recompute_s`: the part of `backward_s` that repeats forward passes; left out of a plan file if 0.
    `send_*_s`: one message to the next or previous stage.
    """

    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    forward_tp_s: float = 0.0
    backward_tp_s: float = 0.0
    send_forward_s: float = 0.0
    send_backward_s: float = 0.0
    recompute_s: float = 0.0

    def __post_init__(self) -> None:
        for name in _PARTS:
            if getattr(self, name) > self.backward_s:
                raise ValueError(f"{name} is part of backward_s, but {getattr(self, name):g} > {self.backward_s:g}")


@dataclass(frozen=True, init=False)
class StageTimes:
    """Seconds of one pipeline rank: per microbatch of its chunks, and at the end of its step.

    `StageTimes(forward_s=1, backward_s=2)` is short for a rank with one chunk, `chunks=(ChunkTimes(…),)`.
    `buckets`: equal parts in which a chunk's gradients are reduced and its parameters gathered if that overlaps with
    compute; None: infinitely many, so that the first is ready at once and the last takes no time.
    """

    chunks: tuple[ChunkTimes, ...]
    reduce_s: float
    step_s: float
    gather_s: float
    buckets: int | None

    def __init__(
        self,
        chunks: tuple[ChunkTimes, ...] = (),
        reduce_s: float = 0.0,
        step_s: float = 0.0,
        gather_s: float = 0.0,
        buckets: int | None = None,
        **one_chunk: float,
    ) -> None:
        if bool(chunks) == bool(one_chunk):
            raise ValueError("give chunks=(ChunkTimes(…), …), or the times of a single chunk")
        values = {"reduce_s": reduce_s, "step_s": step_s, "gather_s": gather_s, "buckets": buckets}
        for name, value in {"chunks": chunks or (ChunkTimes(**one_chunk),), **values}.items():
            object.__setattr__(self, name, value)

    def shares(self) -> list[float]:
        """Return the fraction of the rank's parameters in each chunk, estimated by its backward_s without
        recomputation, which moves no parameters."""
        each_s = [chunk.backward_s - chunk.recompute_s for chunk in self.chunks]
        return [one_s / sum(each_s) if sum(each_s) else 1 / len(each_s) for one_s in each_s]


PRICED = frozenset({"ep", "tp"})  # communication whose overlap is in the times of passes already


@dataclass(frozen=True)
class Overlap:
    """Communication that overlaps with compute. `slowdown`: the share of the seconds in which dp communicates beside a
    pass by which the pass takes longer."""

    tp: bool = False
    dp: bool = False
    p2p: bool = True
    slowdown: float = 0.0

    @classmethod
    def of(cls, words: Collection[str], slowdown: float = 0.0) -> Overlap:
        """Return the overlap named by the words of a plan: those of "tp", "dp", "p2p" that overlap."""
        if strange := sorted(set(words) - {"tp", "dp", "p2p"}):
            raise ValueError(f"unknown stream {strange[0]!r}; known: dp, p2p, tp")
        return cls(tp="tp" in words, dp="dp" in words, p2p="p2p" in words, slowdown=slowdown)

    @property
    def early(self) -> tuple[str, ...]:
        """Return what starts early in the action lists (`schedule.step_lists`), where `simulate` reads it."""
        return EARLY if self.dp else ()


def times_to_data(times: Sequence[StageTimes], shape: Shape = "loop") -> tuple[dict[str, float], ...]:
    """Return the form in plan files: one table per stage in model order; `shape` maps stages to ranks.

    Each has the fields of `ChunkTimes`; those of chunk 0 have the rank's reduce_s, step_s, gather_s and buckets too.
    """
    chunks = len(times[0].chunks) if times else 0
    if any(len(rank.chunks) != chunks for rank in times):
        raise ValueError(f"ranks have different numbers of chunks: {[len(rank.chunks) for rank in times]}")
    places = map(StageMap(max(1, len(times)), chunks, shape).place, range(len(times) * chunks))
    ends = [{name: x for name in _END if (x := getattr(rank, name)) is not None} for rank in times]
    return tuple(_written(times[rank].chunks[chunk]) | (ends[rank] if chunk == 0 else {}) for rank, chunk in places)


def _written(chunk: ChunkTimes) -> dict[str, float]:
    data: dict[str, float] = asdict(chunk)
    if not chunk.recompute_s:
        del data["recompute_s"]
    return data


def times_from_data(data: Sequence[Mapping[str, float]], ranks: int, shape: Shape = "loop") -> tuple[StageTimes, ...]:
    """Read the form that `times_to_data` writes. Raises PlanError naming the entry and the field."""
    if not data or len(data) % ranks:
        raise PlanError(f"times of {len(data)} stages are not a whole number of chunks on {ranks} ranks", where="times")
    known = {field.name for field in fields(ChunkTimes)}
    for i, entry in enumerate(data):
        strange = sorted(set(entry) - known - (set(_END) if i < ranks else set()))
        missing = sorted({"forward_s", "backward_s"} - set(entry))
        if strange or missing:
            wrong = f"lacks {', '.join(missing)}" if missing else f"has unknown {', '.join(strange)}"
            raise PlanError(f"the times of stage {i} cannot be read", where=f"times[{i}]: {wrong}")
        for name in _PARTS:
            if entry.get(name, 0.0) > entry["backward_s"]:
                raise PlanError(f"{name} is part of backward_s and cannot be longer", where=f"times[{i}].{name}")
    route = StageMap(ranks, len(data) // ranks, shape)
    return tuple(
        StageTimes(
            tuple(ChunkTimes(**{k: v for k, v in entry.items() if k in known}) for entry in route.of(data, rank)),
            reduce_s=data[rank].get("reduce_s", 0.0),
            step_s=data[rank].get("step_s", 0.0),
            gather_s=data[rank].get("gather_s", 0.0),
            buckets=int(data[rank]["buckets"]) if "buckets" in data[rank] else None,
        )
        for rank in range(ranks)
    )
