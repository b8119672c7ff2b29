"""The layout of a training program over its ranks: the part of a plan that the runtime reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from autoptd.errors import PlanError, nearest
from autoptd.layout.mesh import Mesh
from autoptd.layout.placements import Placement, Split
from autoptd.layout.sample_rows import PLAIN, SHARED, SampleRows
from autoptd.layout.size_conditions import EqualParts, SizeCondition
from autoptd.nest import Nest
from autoptd.schedule import RUNNABLE, row_of

PRECISIONS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class TensorSpec:
    """One parameter or buffer of the model: its placement on tp, global shape, and the stages that hold it."""

    placement: Placement  # B, Bp or Split; Bp: each rank's gradient is a partial value
    shape: tuple[int, ...]
    stages: tuple[int, ...] = (0,)  # ascending; more than one: tied, every stage holds a copy
    trainable: bool = True
    dtype: torch.dtype | None = None  # None: the layout's
    recomputed: bool = False  # read by a block that is recomputed in the backward pass
    block: str = ""  # path of the only emitted block that reads it; "": the stage itself does
    idle: bool = False  # no gradient reaches it
    skipped: tuple[tuple[str, float], ...] = ()  # key and rate of the masks of layers that alone read it
    rows: tuple[int, ...] = ()  # sums that count the rows which alone read it; without any it has no gradient
    ep: int = 1  # ranks of the expert mesh that dim 0, the experts, is split over; outside a split on tp
    updated: bool = False  # a buffer that gets a new value in each step
    hidden: bool = False  # a matrix between embedding and head
    over_tp: bool = False  # of experts that no tp ranks share: ep and its copies extend over tp

    @property
    def unit(self) -> tuple[str, tuple[int, ...]]:
        """Block and stages that parameters must share to be gathered together under ZeRO 3."""
        return self.block, self.stages

    def part(self, mesh: Mesh, rank: int) -> tuple[int, int]:
        """Return which part of the tensor a rank holds: its position on ep and that on tp, 0 where it is not split."""
        expert = mesh.group_of(rank, "ep").index(rank) if self.ep > 1 else 0
        return expert, rank % mesh.tp if isinstance(self.placement, Split) else 0

    def parts(self, tp: int) -> int:
        """Return the number of different parts of the tensor."""
        return self.ep * (tp if isinstance(self.placement, Split) else 1)

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """Return the shape on each of `tp` ranks (of each of `ep`)."""
        shape = (self.shape[0] // self.ep, *self.shape[1:]) if self.ep > 1 else self.shape
        if not isinstance(self.placement, Split):
            return shape
        dim = self.placement.dim
        return (*shape[:dim], shape[dim] // tp, *shape[dim + 1 :])


@dataclass(frozen=True)
class InputSpec:
    """One input of the model: its planned dims after the samples, if it has any.

    `symbols`: the symbol of each dim, "" if it is fixed.
    """

    dtype: torch.dtype
    sizes: tuple[int, ...]
    symbols: tuple[str, ...]
    rows: SampleRows = PLAIN  # of the user's tensor, from which the program's is made
    value: tuple[int, ...] = ()  # numbers of every sample that the program is made for; (): any
    written: bool = False  # forward writes to it, the program to a copy of it

    @property
    def text(self) -> str:
        """Text such as `[samples, s up to 1024] of torch.int64`."""
        dims = [f"{symbol} up to {n}" if symbol else str(n) for symbol, n in zip(self.symbols, self.sizes, strict=True)]
        return f"[{', '.join(['samples'] * self.lead + dims)}] of {self.dtype}"

    @property
    def lead(self) -> int:
        """Number of dims before the planned ones: that of the samples, or none."""
        return 0 if self.rows == SHARED else 1


# of the whole batch, which samples are normalised by, and what stands in for them in evaluation: running ones, those of
# the evaluated batch, or unknown
Statistics = Literal["none", "running", "batch", "unknown"]


@dataclass(frozen=True)
class Layout:
    """Mesh, microbatches, and the placement of each tensor of the model. Identical on every rank.

    `parameters` is in the model's forward order. Raises PlanError for a layout that the runtime cannot run.
    """

    mesh: Mesh
    micro: int  # samples per microbatch per dp rank; the last one may hold fewer
    microbatches: int  # per step
    inputs: tuple[str, ...]  # all that any stage reads; those that all samples share last
    parameters: Mapping[str, TensorSpec]
    buffers: Mapping[str, TensorSpec] = field(default_factory=dict)
    zero: int = 1  # sharded over dp: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too
    shards: int = 0  # neighbouring dp ranks that share one copy of sharded state; 0: all of them
    precision: str = "fp32"
    schedule: str = "1f1b"
    overlap: bool = True  # reduce gradients while the last microbatch's backward runs
    sums_over_dp: bool = (
        False  # forward passes sum over dp ranks: for terms of the loss that are no sums, or statistics
    )
    statistics: Statistics = "none"
    sums: int = 0  # numbers of the whole batch that new values of buffers are computed from
    sums_ahead: bool = False  # run the batch's forward passes first, for the sums that the loss is a function of
    one_microbatch: bool = False  # the loss is only defined for one microbatch on one dp rank
    gather_later: bool = False  # all-gather updated parameters while the next step begins
    rings: bool = False  # passes multiply around the ring of tp
    zigzag: bool = False  # each cp rank holds an early and a late chunk of tokens: see `ops/cp_axis.py`
    multiples: Mapping[tuple[str, int], int] = field(default_factory=dict)  # (input, dim) -> divisor of its size
    parts: tuple[EqualParts, ...] = ()  # sizes of a batch that tp splits
    conditions: tuple[SizeCondition, ...] = ()  # on the sizes of a batch, for the program to be the model's
    samples: int = 0  # of a step, over all ranks; may be read where there are conditions
    specs: Mapping[str, InputSpec] = field(default_factory=dict)  # of `inputs` that a batch is checked against
    nest: Nest = field(default_factory=Nest)  # the structures that a batch may hold them in
    slices: bool = False  # scatter-gather P2P: each tp rank sends a slice of replicated tensors, receivers gather
    modules: tuple[str, ...] = ()  # names of each stage's modules, for a profiler
    gradients: str = "main"  # type of gradient accumulation and reduction: "main", or "compute", the parameters'
    offload: tuple[float, ...] = ()  # share of the optimizer state in host memory, by pipeline rank; (): none
    bucket_elements: int = 32 * 1024 * 1024  # a bucket closes when it holds this many gradient elements

    def __post_init__(self) -> None:
        if self.zero not in (0, 1, 2, 3):
            raise PlanError(f"zero={self.zero} is not supported by the runtime", fix="use zero 0, 1, 2 or 3")
        if any(self.offload) and self.zero == 3:
            raise PlanError("parameters that ZeRO 3 shards are not offloaded", fix="use zero 0, 1 or 2, or no offload")
        if self.shards and self.mesh.copies % self.shards:
            raise PlanError(
                f"shards of {self.shards} ranks do not divide dp × cp {self.mesh.copies}",
                fix="use a divisor of it, or 0 for all",
            )
        if self.shards and self.mesh.ep > 1:
            raise PlanError("experts on ranks of their own are not sharded in groups", fix="leave out shards or ep")
        shape = row_of(self.schedule, self.mesh.virtual).shape
        if shape != self.mesh.stage_order:
            raise PlanError(f"the schedule {self.schedule} needs a {shape} of stages, not a {self.mesh.stage_order}")
        if self.schedule not in RUNNABLE:
            raise PlanError(
                f"the runtime cannot run the schedule {self.schedule!r}", fix=f"use {' or '.join(RUNNABLE)}"
            )
        if self.precision not in PRECISIONS:
            raise PlanError(f"unknown precision {self.precision!r}", fix=nearest(self.precision, PRECISIONS))

    @property
    def early(self) -> tuple[str, ...]:
        """Return what a step's action lists have early (`autoptd.schedule.with_step_end`).

        ZeRO 2 and 3 reduce in every backward pass, and ZeRO 3 gathers in every pass, without an action of their own.
        """
        sums = ("SUM",) * (self.overlap and self.zero < 2)
        return sums + ("GATHER",) * (self.gather_later and self.zero < 3)

    @property
    def shared(self) -> list[str]:
        """Names of the inputs that all samples share."""
        return [name for name, spec in self.specs.items() if spec.rows == SHARED]

    @property
    def sharing(self) -> int:
        """Number of dp ranks that share one copy of sharded state; 1 without ZeRO."""
        return (self.shards or self.mesh.copies) if self.zero else 1

    def spec(self, name: str) -> TensorSpec:
        """Return the spec of a parameter or buffer."""
        return self.parameters.get(name) or self.buffers[name]

    def copies(self, spec: TensorSpec) -> int:
        """Return the number of ranks that hold the same part of a tensor: of dp × cp, for experts of edp."""
        return self.mesh.copies * (self.mesh.tp if spec.over_tp else 1) // spec.ep

    def sharing_of(self, spec: TensorSpec) -> int:
        """Return the number of these ranks that share one copy of its sharded state."""
        return self.sharing if spec.ep == 1 else self.copies(spec) if self.zero else 1

    def counts(self, spec: TensorSpec, tp_rank: int) -> bool:
        """Return whether a tp rank's part of a tensor is not another's too, which counts in its stead."""
        return tp_rank == 0 or isinstance(spec.placement, Split) or spec.over_tp

    @property
    def dtype(self) -> torch.dtype:
        """Type of parameters and activations."""
        return PRECISIONS[self.precision]

    @property
    def main_dtype(self) -> torch.dtype:
        """Type of the parameters that the optimizer updates: float32 at least."""
        return torch.promote_types(self.dtype, torch.float32)
