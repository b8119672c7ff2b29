"""Parameters and gradients in contiguous buffers, sharded over the data-parallel ranks (ZeRO 0 to 3).

A buffer (`flat_buffer.py`) holds the trainable parameters, or with ZeRO 3 the frozen ones, of one (dtype, gradient
class over tp, pipeline ranks), in reverse forward order; experts on ranks of their own have buffers of their own, over
edp instead of dp. The model's parameters are views of it. Gradients are summed in float32 or wider (or in the
parameters' dtype, if the plan says so), by a hook or by autograd itself. Per step and bucket of trainable parameters:

    backward  gradients complete → reduce-scatter over dp (all-reduce with ZeRO 0): once per step, or with ZeRO 2 and 3
              in each backward pass (`grad_reduce.py`)
    REDUCE    start the remaining reductions and wait; sum shards of `Bp` parameters over tp, those of tied parameters
              over the tied stages
    STEP      the optimizer updates one piece per (parameter, this rank's shard): a view of `data`, or of `main` if
              parameters are narrower than float32 or sharded
    GATHER    all-gather over dp; as the first action of the next step, the first module of its forward passes that
              reads a bucket waits for it; with ZeRO 3 every pass gathers on demand (`param_gather.py`)

A GATHER of the next step is queued behind the counts of its batch. On the communicator that both share, counts behind
all parameters would let the last stage's first forward pass wait for all of them.

All scaling factors are in the loss, so every reduction is a plain sum. Tied copies have buffers of equal layout on
every stage, hence the same shards, sums and updates, and stay bitwise equal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from autoptd.layout.layout import Layout, TensorSpec
from autoptd.layout.packing import Slot
from autoptd.layout.placements import kind as kind_of
from autoptd.ops.group import Group, Handle, SingleRankGroup, on_device
from autoptd.ops.stage import Stage
from autoptd.runtime.zero.flat_buffer import Buffer, ParameterShard, Sharing
from autoptd.runtime.zero.grad_reduce import BucketState, Reduction
from autoptd.runtime.zero.param_gather import Gathering, GatherUnit


class Buffers:
    """The flat buffers of a pipeline rank: all trainable parameters, and with ZeRO 3 the frozen ones.

    `parameters`: views of the buffers, which replace the modules' parameters. `owed`: whether pieces have been updated
    that the parameters were not gathered from yet.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layout: Layout,
        device: torch.device,
        tp: Group,
        sharing: Sharing,
        tied: Mapping[tuple[int, ...], Group],
        holders: Sequence[Collection[str]] = (),
        experts: Sharing | None = None,
        offload: float = 0.0,
    ) -> None:
        """`holders`: parameter names of each chunk, by default of one chunk. `tied`: groups by pipeline ranks.
        `experts`: the sharing of parameters that are split over ep ranks. `offload`: share of the optimizer state in
        host memory."""
        self._tp = tp
        self._gather_later = "GATHER" in layout.early
        self._of_stages = {name for name, spec in layout.parameters.items() if not spec.block}  # or of several blocks
        self.owed = False
        self._gathering: dict[tuple[Slot, ...], Handle] = {}  # by bucket
        self._buffers = _build(parameters, layout, device, sharing, tied, experts or sharing, offload)
        self._buffer_of = {name: buffer for buffer in self._buffers for name in buffer.slots}
        order = {name: i for i, name in enumerate(layout.parameters)}
        self._states = [
            BucketState(bucket, buffer, min(order[slot.name] for slot in bucket.slots))
            for buffer in self._buffers
            for bucket in buffer.buckets
        ]
        self._states.sort(key=lambda state: -state.priority)
        self._state_of = {name: state for state in self._states for name in state.names}
        idle = {name for name, spec in layout.parameters.items() if spec.idle}
        reached = [frozenset(held) - idle for held in holders or (set(parameters),)]
        self._reduction = Reduction(self._summed(), reached, layout.overlap, layout.zero)
        self._zero3 = Gathering(ahead=layout.overlap) if layout.zero == 3 else None
        # `.data` has its own version counter: gathering one bucket must not invalidate what autograd saved of another
        self.parameters = {
            name: nn.Parameter(self._view(name).data, not buffer.frozen) for name, buffer in self._buffer_of.items()
        }
        self._name_of = {id(parameter): name for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                take = partial(self._reduction.take, self._state_of[name], name)
                parameter.register_post_accumulate_grad_hook(take)

    def _view(self, name: str) -> Tensor:
        state = self._state_of[name]
        whole = state.buffer.whole(state.bucket)
        if self._zero3 is None:
            return state.buffer.view(whole, state.bucket, name)
        whole.untyped_storage().resize_(whole.numel() * whole.itemsize)  # a view needs storage when it is made
        view = state.buffer.view(whole, state.bucket, name)
        state.buffer.free(state.bucket)
        return view

    def pieces(self, pipeline_rank: int) -> list[ParameterShard]:
        """Return the pieces that this rank's optimizer updates."""
        return self._pieces(pipeline_rank, frozen=False)

    def frozen_pieces(self, pipeline_rank: int) -> list[ParameterShard]:
        """Return this rank's elements of the sharded frozen parameters."""
        return self._pieces(pipeline_rank, frozen=True)

    def _pieces(self, pipeline_rank: int, *, frozen: bool) -> list[ParameterShard]:
        result = []
        for buffer in self._buffers:
            if buffer.frozen == frozen:
                counts = buffer.counts(self._tp.rank) and buffer.first_rank == pipeline_rank
                result += buffer.pieces(counts and buffer.sharing.replica_group.rank == 0)
        return result

    # ---- gradients ----

    def start_step(self) -> None:
        """Discard the last step's gradients (the first gradient of this step overwrites)."""
        for parameter in self.parameters.values():
            parameter.grad = None
        for buffer in self._buffers:
            buffer.start_step()
        self._reduction.start_step()

    def finish_reduction(self) -> None:
        """Wait for all reductions over dp; sum gradients that are partial over tp or tied stages."""
        self._reduction.finish()
        for state in self._summed():
            if state.buffer.partial_over_tp and self._tp.size > 1:
                self._tp.all_reduce(state.shard)
            if state.buffer.tied.size > 1:
                state.buffer.tied.all_reduce(state.shard)
        for buffer in self._buffers:
            buffer.start_update()

    def used(self) -> set[str]:
        """Return the names of parameters that got a gradient on this rank in this step."""
        return self._reduction.used

    def _summed(self) -> list[BucketState]:
        return [state for state in self._states if not state.buffer.frozen]

    def scale_gradients(self, factor: float) -> None:
        for buffer in self._buffers:
            if not buffer.frozen:
                buffer.scale_gradients(factor)

    def end_step(self) -> None:
        """Free what only the optimizer step needed."""
        for buffer in self._buffers:
            buffer.end_update()

    def gradients(self) -> dict[str, Tensor]:
        """Return the step's reduced gradients of this rank's parameters, gathered over dp. A collective over dp."""
        trained = (buffer for buffer in self._buffers if not buffer.frozen)
        return {name: x for buffer in trained for name, x in buffer.gradients().items()}

    # ---- parameters ----

    def gather_parameters(self) -> None:
        """All-gather every bucket, in forward order, if this is owed; wait now, or in the modules that read them."""
        owed, self.owed = self.owed, False
        if not owed or self._zero3 is not None:
            return
        for state in reversed(self._states):
            self._gathering[state.bucket.slots] = state.buffer.start_gather(state.bucket)
        if not self._gather_later:
            self.finish_gathers()

    def finish_gathers(self, names: Iterable[str] | None = None) -> None:
        """Wait until these parameters are gathered, by default all. A collective over dp if a gather is owed."""
        if self.owed:
            self.gather_parameters()
        if not self._gathering:
            return
        for state in self._states if names is None else self._states_of(names):
            handle = self._gathering.pop(state.bucket.slots, None)
            if handle is not None:
                handle.wait()

    def _states_of(self, names: Iterable[str]) -> list[BucketState]:
        """Return the buckets of the named parameters; names outside all buckets are ignored."""
        return list(dict.fromkeys(self._state_of[name] for name in names if name in self._state_of))

    def gather_before(self, module: nn.Module, names: Sequence[str]) -> None:
        """Make a module's forward passes wait for the parameters that they read."""
        if self._gather_later and self._zero3 is None:
            module.register_forward_pre_hook(lambda *_: self.finish_gathers(names))

    def attach(self, stage: Stage, chunk: int) -> None:
        """Register hooks that gather or await parameters: per block, and on the stage for those outside blocks."""
        inside: set[str] = set()
        for path, module in stage.named_modules():
            nested = any(path.startswith(f"{block}.") for block in inside)
            if module is not stage and type(module) is not nn.Module and not nested:
                inside.add(path)
                names = [f"{path}.{name}" for name, _ in module.named_parameters()]
                names = [name for name in names if name not in self._of_stages]
                self.gather_before(module, names)
                if self._zero3 is not None:
                    self._zero3.watch_block(module, self._states_of(names))
        every = [name for name, _ in stage.named_parameters()]
        blocks = tuple(f"{path}." for path in inside)
        own = [name for name in every if name in self._of_stages or not name.startswith(blocks)]
        self.gather_before(stage, own)
        if self._zero3 is not None:
            self._zero3.watch_stage(stage, chunk, self._states_of(own))

    @contextmanager
    def whole(self, names: Iterable[str]) -> Iterator[None]:
        """Gather these parameters for the duration of the block. A collective over dp."""
        self.finish_gathers()
        unit = GatherUnit(tuple(self._states_of(names)))
        if self._zero3 is not None:
            self._zero3.hold(unit)
        yield
        if self._zero3 is not None:
            self._zero3.release(unit)

    def write(self, name: str, value: Tensor) -> None:
        """Set a parameter of a bucket to a value of its local shape."""
        state = self._state_of[name]
        state.buffer.write(state.bucket, name, value)

    # ---- backward hooks, called by the executor ----

    def start_sum(self, chunk: int) -> None:
        self._reduction.start_sum(chunk)

    def before_backward(self, chunk: int, half: str) -> None:
        self._reduction.expect(chunk)
        if self._zero3 is not None:
            self._zero3.begin_backward(chunk, half)

    def before_weights(self, parameters: Sequence[Tensor]) -> None:
        if self._zero3 is not None:
            names = [name for p in parameters if (name := self._name_of.get(id(p))) is not None]
            self._zero3.hold_only(self._states_of(names))

    def after_backward(self, chunk: int, whole: bool) -> None:
        if self._zero3 is not None:
            self._zero3.end()
        if whole:
            self._reduction.end_backward(chunk)


def _build(
    parameters: Mapping[str, nn.Parameter],
    layout: Layout,
    device: torch.device,
    sharing: Sharing,
    tied: Mapping[tuple[int, ...], Group],
    experts: Sharing,
    offload: float,
) -> list[Buffer]:
    """Build one buffer per (trainable, dtype, gradient class over tp, pipeline ranks, experts), in the model's order.

    The order is the same on all ranks that share a buffer.
    """
    classes: dict[tuple[bool, torch.dtype, str, tuple[int, ...], bool], dict[str, TensorSpec]] = {}
    for name, spec in layout.parameters.items():
        if name in parameters and (spec.trainable or layout.zero == 3):
            kind, ranks = kind_of(spec.placement), layout.mesh.holders(spec.stages)
            key = spec.trainable, parameters[name].dtype, kind, ranks, spec.ep > 1
            classes.setdefault(key, {})[name] = spec
    buffers = []
    for (_, dtype, _, ranks, of_experts), specs in classes.items():
        shapes = {name: parameters[name].shape for name in specs}
        shared = experts if of_experts else sharing
        buffer = Buffer(specs, shapes, layout, shared, tied[ranks] if len(ranks) > 1 else SingleRankGroup(), offload)
        buffer.allocate(dtype, device)
        buffers.append(buffer)
    return buffers


def squared_norm(pieces: Sequence[ParameterShard]) -> Tensor:
    """Return Σ g² over the pieces that count on this rank, 0-dim float64."""
    grads = [piece.grad for piece in pieces if piece.counts]
    return nn.utils.get_total_norm(grads).to(torch.float64) ** 2


class TrainedNames:
    """Names of the trainable parameters, and which of them have a gradient in a step.

    Some only the rows of a mask read, in a Python branch on whether there are any (`TensorSpec.rows`). Without rows one
    process skips the branch, so that they have no gradient, and no optimizer changes them. The program takes it, with
    gradients of zero, and counts the rows.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.names = [name for name, spec in layout.parameters.items() if spec.trainable]
        self._rows = {name: rows for name in self.names if (rows := layout.parameters[name].rows)}
        self._counts = sorted({i for rows in self._rows.values() for i in rows})
        self._places = torch.tensor(self._counts, dtype=torch.int64, device=device)

    def flags(self, used: Collection[str], device: torch.device) -> Tensor:
        """Return for each name whether it is in `used`, float64."""
        return on_device([name in used for name in self.names], torch.float64, device)

    def counts(self, sums: Tensor) -> Tensor:
        """Return the numbers of rows among the sums over the batch."""
        return sums[self._places]

    def used(self, numbers: Sequence[float]) -> set[str]:
        """Return the names with a gradient, by the sums of `flags` over all ranks, followed by `counts`."""
        found = {name for name, n in zip(self.names, numbers, strict=False) if n}
        some = {place for place, n in zip(self._counts, numbers[len(self.names) :], strict=True) if n}
        return {name for name in found if name not in self._rows or not some.isdisjoint(self._rows[name])}
