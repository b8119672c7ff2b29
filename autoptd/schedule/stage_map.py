"""The placement of the model's stages on pipeline ranks, and the channels between them.

A rank holds v chunks of the model, and a stage is one chunk of one rank. The kind of schedule decides which:

    loop    stage c p + r is chunk c of rank r; the last rank sends to the first      Narayanan et al. 2021, section 2.2
    v       stages go down the ranks, then up, then down …: stages r and 2 p - 1 - r  Qi et al. 2023, section 6
            are chunks 0 and 1 of rank r; at a turn both stages are on one rank

    loop, 3 ranks of 2 chunks:  0 3 | 1 4 | 2 5         v:  0 5 | 1 4 | 2 3

Stage k is followed by edge k modulo the stages of one round (p of a loop, 2 p of a V), so that every edge joins one
pair of ranks. An edge has two channels, one for activations and one for gradients. An edge within one rank has none,
since nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

from autoptd.schedule.actions import Action

Shape: TypeAlias = Literal["loop", "v"]
Channel: TypeAlias = tuple[int, str]  # (edge, "forward" | "backward")
T = TypeVar("T")


@dataclass(frozen=True)
class StageMap:
    """The placement of `ranks × virtual` stages, `virtual` chunks on each pipeline rank."""

    ranks: int
    virtual: int = 1
    shape: Shape = "loop"

    @property
    def stages(self) -> int:
        return self.ranks * self.virtual

    def stage(self, rank: int, chunk: int = 0) -> int:
        """Return the stage of the model that is a chunk of a rank."""
        turned = self.shape == "v" and chunk % 2
        return chunk * self.ranks + (self.ranks - 1 - rank if turned else rank)

    def place(self, stage: int) -> tuple[int, int]:
        """Return (rank, chunk) of a stage."""
        chunk, along = divmod(stage, self.ranks)
        return (self.ranks - 1 - along if self.shape == "v" and chunk % 2 else along), chunk

    def holder(self, stage: int) -> int:
        """Return the rank of a stage."""
        return self.place(stage)[0]

    def holders(self, stages: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks that hold any of these stages, ascending."""
        return tuple(sorted({self.holder(stage) for stage in stages}))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, by chunk."""
        return tuple(self.stage(rank, chunk) for chunk in range(self.virtual))

    def of(self, items: Sequence[T], rank: int) -> tuple[T, ...]:
        """Return a rank's items, by chunk, from one item per stage of the model (or of its first stages)."""
        return tuple(items[stage] for stage in self.stages_of(rank) if stage < len(items))

    def hop(self, rank: int, chunk: int, step: int) -> tuple[int, int] | None:
        """Return (rank, chunk) of the next stage (`step` 1) or the previous one (-1); None at the model's ends."""
        stage = self.stage(rank, chunk) + step
        return self.place(stage) if 0 <= stage < self.stages else None

    def edge(self, stage: int) -> int:
        """Return the number of the edge after a stage."""
        return stage % (self.ranks if self.shape == "loop" else 2 * self.ranks)

    def edges(self) -> dict[int, tuple[int, int]]:
        """Return, for every edge between two ranks in order, the ranks before and after it."""
        found = {self.edge(k): (self.holder(k), self.holder(k + 1)) for k in range(self.stages - 1)}
        return {edge: ends for edge, ends in sorted(found.items()) if ends[0] != ends[1]}

    def rounds(self) -> list[dict[int, tuple[int, int]]]:
        """Return the edges grouped by concurrent use: every rank, and so its node, sends over one edge of a group.

        A loop has one group; a V has one for the way down and one for the way up.
        """
        sets: dict[int, dict[int, tuple[int, int]]] = {}
        for edge, ends in self.edges().items():
            sets.setdefault(edge // self.ranks, {})[edge] = ends
        return list(sets.values())


def step_of(kind: str) -> int:
    """Return 1 if a send or receive is between its stage and the next one, -1 if it is with the previous one."""
    return 1 if kind in ("SF", "RB") else -1


def peer_of(rank: int, action: Action, route: StageMap) -> tuple[int, Action] | None:
    """Return the peer of a send or receive and its action; None at the model's ends and within one rank."""
    there = route.hop(rank, action.chunk, step_of(action.kind))
    if there is None or there[0] == rank:
        return None
    kind = ("R" if action.kind[0] == "S" else "S") + action.kind[1]
    return there[0], Action(kind, action.microbatch, there[1])


def channel_of(rank: int, action: Action, route: StageMap) -> Channel:
    """Return the channel of a send or receive: one per edge and direction."""
    if action.kind not in ("SF", "SB", "RF", "RB"):
        raise ValueError(f"{action} uses no channel")
    stage = route.stage(rank, action.chunk)
    behind = stage if step_of(action.kind) == 1 else stage - 1
    return route.edge(behind), "forward" if action.kind in ("SF", "RF") else "backward"
