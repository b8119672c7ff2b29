"""The mesh of ranks: tp fastest, then cp, dp, pp, so that a tensor-parallel group is inside a node.

    rank = ((pp_i * dp + dp_i) * cp + cp_i) * tp + tp_i

16 ranks with tp 2, pp 4 (hence dp 2): tp [0, 1] …, dp [0, 2] …, pp [0, 4, 8, 12] …, as in Megatron-LM.

Ranks of one cp group process the same samples and split their tokens. Parameters are replicated over dp and cp
together, which is the axis `data` of gradients and ZeRO shards.

Experts have a mesh of their own over the ranks of a stage: edp × ep × etp, etp fastest, folded over dp, cp and tp (Liu
et al. 2025, MoE Parallel Folding). ep ranks hold different experts, edp ranks the same; etp ranks, which are all of tp
or one, share each expert.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from autoptd.schedule.stage_map import Shape, StageMap

AxisName: TypeAlias = Literal["pp", "dp", "cp", "tp", "data", "ep", "edp"]
AXES: tuple[AxisName, ...] = ("pp", "dp", "cp", "tp")  # slowest first


@dataclass(frozen=True)
class Mesh:
    """Sizes of the axes, the chunks of the model per pipeline rank, and where its stages are: in a "loop" over the
    ranks, or down and up again as a "v" (`autoptd.schedule.stage_map`).
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    virtual: int = 1
    stage_order: Shape = "loop"
    cp: int = 1
    ep: int = 1
    etp: int = 0  # 0: all of tp

    def __post_init__(self) -> None:
        assert min(self.dp, self.tp, self.pp, self.virtual, self.cp, self.ep) >= 1, self
        assert self.etp in (0, 1, self.tp), self
        assert self.copies * self.tp % (self.ep * self.sharers) == 0, self

    @property
    def world(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes in the order of `AXES`."""
        return self.pp, self.dp, self.cp, self.tp

    @property
    def copies(self) -> int:
        """Number of ranks that hold the same parameters: dp × cp."""
        return self.dp * self.cp

    @property
    def sharers(self) -> int:
        """Number of ranks that share each expert."""
        return self.etp or self.tp

    @property
    def stages(self) -> int:
        """Number of stages: the chunks of all pipeline ranks."""
        return self.pp * self.virtual

    @cached_property
    def route(self) -> StageMap:
        """Placement of the stages on pipeline ranks."""
        return StageMap(self.pp, self.virtual, self.stage_order)

    def stages_of(self, pp: int) -> tuple[int, ...]:
        return self.route.stages_of(pp)

    def holder(self, stage: int) -> int:
        return self.route.holder(stage)

    def holders(self, stages: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted({self.holder(stage) for stage in stages}))

    def rank(self, pp: int, dp: int, tp: int, cp: int = 0) -> int:
        return ((pp * self.dp + dp) * self.cp + cp) * self.tp + tp

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Return (pp, dp, tp) of a rank; `cp_of` is the fourth coordinate."""
        sample = rank // (self.cp * self.tp)
        return sample // self.dp, sample % self.dp, rank % self.tp

    def cp_of(self, rank: int) -> int:
        """Return the index of a rank in its cp group."""
        return rank // self.tp % self.cp

    def place_in_share(self, rank: int) -> int:
        """Return the index of a rank among those of its dp index, which take the same samples."""
        (pp, _, tp), cp = self.coordinates(rank), self.cp_of(rank)
        return (pp * self.cp + cp) * self.tp + tp

    def group_of(self, rank: int, axis: AxisName) -> range:
        """Return the ranks that differ from `rank` in `axis` only, including itself, ascending."""
        (pp, dp, tp), cp = self.coordinates(rank), self.cp_of(rank)
        match axis:
            case "pp":
                return _spaced(self.rank(0, dp, tp, cp), self.pp, self.copies * self.tp)
            case "dp":
                return _spaced(self.rank(pp, 0, tp, cp), self.dp, self.cp * self.tp)
            case "cp":
                return _spaced(self.rank(pp, dp, tp, 0), self.cp, self.tp)
            case "tp":
                return _spaced(self.rank(pp, dp, 0, cp), self.tp, 1)
            case "data":
                return _spaced(self.rank(pp, 0, tp), self.copies, self.tp)
            case "ep" | "edp":
                first = self.rank(pp, 0, 0)
                alike = _spaced(
                    first + (rank - first) % self.sharers, self.copies * self.tp // self.sharers, self.sharers
                )
                here = (rank - first) // self.sharers
                start = here - here % self.ep
                return alike[start : start + self.ep] if axis == "ep" else alike[here % self.ep :: self.ep]

    def stage_ranks(self, pp: int) -> range:
        """Return all ranks of a pipeline index."""
        return _spaced(self.rank(pp, 0, 0), self.copies * self.tp, 1)

    def channels_of(self, rank: int) -> list[tuple[int, str, int, int]]:
        """Return the channels of a rank as (edge, direction, source, target), in the order in which ranks make them.

        Even edges come first, so that neighbours make theirs at the same time, not one after the other.
        """
        pp, column, found = self.coordinates(rank)[0], self.group_of(rank, "pp"), []
        for edge, ends in sorted(self.route.edges().items(), key=lambda row: (row[0] % 2, row[0])):
            if pp in ends:
                below, above = (column[end] for end in ends)
                found += [(edge, "forward", below, above), (edge, "backward", above, below)]
        return found

    def __str__(self) -> str:
        turned = " as a V" if self.stage_order == "v" else ""
        chunks = f" × {self.virtual} chunks{turned}" if self.virtual > 1 else ""
        tokens = f" × cp{self.cp}" if self.cp > 1 else ""
        experts = f" × ep{self.ep}" if self.ep > 1 else ""
        experts += f" × etp{self.etp}" if self.sharers < self.tp else ""
        return f"dp{self.dp} × tp{self.tp} × pp{self.pp}{tokens}{experts}{chunks}"


def _spaced(first: int, count: int, step: int) -> range:
    return range(first, first + count * step, step)
