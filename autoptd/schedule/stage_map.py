"""The way that a microbatch takes over the pipeline's ranks: who holds which stage of the model, and who talks to whom.

A rank holds v chunks of the model, and a stage of the model is one chunk of one rank. Which one is a matter of the
schedule's kind, and said here alone:

    loop    stage c p + r is chunk c of rank r: from the last rank on to the first    Narayanan et al. 2021, section 2.2
    vee     stages go down the ranks, up again, down …: stages r and 2 p - 1 - r are  Qi et al. 2023, section 6
            chunks 0 and 1 of rank r; where it turns, a rank hands on to itself

    loop, 3 ranks of 2 chunks:  0 3 | 1 4 | 2 5         vee:  0 5 | 1 4 | 2 3

Behind stage k lies its edge, k modulo the stages of one round (p of a loop, 2 p of a vee), so that every edge joins one
pair of ranks; an edge has two channels, of activations one way and of gradients the other. Where both ends are one rank
there is none: nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

from autoptd.schedule.actions import Action

Shape: TypeAlias = Literal["loop", "vee"]
Channel: TypeAlias = tuple[int, str]  # (edge, "forward" | "backward")
T = TypeVar("T")


@dataclass(frozen=True)
class StageMap:
    """`virtual` chunks on each of so many pipeline ranks."""

    ranks: int
    virtual: int = 1
    shape: Shape = "loop"

    @property
    def stages(self) -> int:
        """Of the model."""
        return self.ranks * self.virtual

    def stage(self, rank: int, chunk: int = 0) -> int:
        """Which stage of the model a chunk of a rank is."""
        turned = self.shape == "vee" and chunk % 2
        return chunk * self.ranks + (self.ranks - 1 - rank if turned else rank)

    def place(self, stage: int) -> tuple[int, int]:
        """(rank, chunk) of a stage."""
        chunk, along = divmod(stage, self.ranks)
        return (self.ranks - 1 - along if self.shape == "vee" and chunk % 2 else along), chunk

    def holder(self, stage: int) -> int:
        """The rank of a stage."""
        return self.place(stage)[0]

    def holders(self, stages: Iterable[int]) -> tuple[int, ...]:
        """Ranks that hold any of these stages, ascending."""
        return tuple(sorted({self.holder(stage) for stage in stages}))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, by chunk."""
        return tuple(self.stage(rank, chunk) for chunk in range(self.virtual))

    def of(self, items: Sequence[T], rank: int) -> tuple[T, ...]:
        """Of one item per stage of the model (or of its first stages), those of a rank, by chunk."""
        return tuple(items[stage] for stage in self.stages_of(rank) if stage < len(items))

    def hop(self, rank: int, chunk: int, step: int) -> tuple[int, int] | None:
        """(rank, chunk) of the next stage (`step` 1) or the one before (-1); None where the model ends."""
        stage = self.stage(rank, chunk) + step
        return self.place(stage) if 0 <= stage < self.stages else None

    def edge(self, stage: int) -> int:
        """The number of the edge behind a stage."""
        return stage % (self.ranks if self.shape == "loop" else 2 * self.ranks)

    def edges(self) -> dict[int, tuple[int, int]]:
        """Every edge in order: the ranks before and behind it."""
        found = {self.edge(k): (self.holder(k), self.holder(k + 1)) for k in range(self.stages - 1)}
        return {edge: ends for edge, ends in sorted(found.items()) if ends[0] != ends[1]}

    def rounds(self) -> list[dict[int, tuple[int, int]]]:
        """The edges in sets that are in use at the same time: each rank sends over one of a set, and so does its node.

        Those of a loop are one set; a vee's go down and up again.
        """
        sets: dict[int, dict[int, tuple[int, int]]] = {}
        for edge, ends in self.edges().items():
            sets.setdefault(edge // self.ranks, {})[edge] = ends
        return list(sets.values())


def step_of(kind: str) -> int:
    """Where the other end of a send or receive lies from its stage: behind it (1) or before it (-1)."""
    return 1 if kind in ("SF", "RB") else -1


def peer_of(rank: int, action: Action, route: StageMap) -> tuple[int, Action] | None:
    """Who a send or receive meets, and that one's action; None where the model begins or ends, or both are one rank."""
    there = route.hop(rank, action.chunk, step_of(action.kind))
    if there is None or there[0] == rank:
        return None
    kind = ("R" if action.kind[0] == "S" else "S") + action.kind[1]
    return there[0], Action(kind, action.microbatch, there[1])


def channel_of(rank: int, action: Action, route: StageMap) -> Channel:
    """The communicator that a send or receive uses: one per edge and direction."""
    if action.kind not in ("SF", "SB", "RF", "RB"):
        raise ValueError(f"{action} uses no channel")
    stage = route.stage(rank, action.chunk)
    behind = stage if step_of(action.kind) == 1 else stage - 1
    return route.edge(behind), "forward" if action.kind in ("SF", "RF") else "backward"
