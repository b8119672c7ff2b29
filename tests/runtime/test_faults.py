"""Silent faults of distributed training, planted one by one: each must break parity or be refused."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autoptd.errors import RuntimeFault
from autoptd.layout import packing as flat
from autoptd.layout.mesh import Mesh
from autoptd.ops.group import SingleRankGroup
from autoptd.runtime import executor, messages, trainer
from autoptd.runtime.comm import interfaces as comm
from autoptd.runtime.comm import threaded as lockstep
from autoptd.runtime.zero import flat_buffer as storage
from autoptd.runtime.zero import grad_reduce as reduction
from autoptd.runtime.zero import param_buffers as buffers
from tests.runtime import test_trainer
from tests.runtime import tiny_model as tiny

MESH = Mesh(2, 2, 2)
Patch = pytest.MonkeyPatch


def parity(zero: int = 1, **kwargs: Any) -> None:
    options = {"lr": 0.1} | kwargs
    reference = tiny.train_plain(torch.optim.SGD, test_trainer.batches(MESH), **options)
    layout = tiny.layout(MESH, zero=zero)
    test_trainer.check(lockstep.run_lockstep(MESH, lambda c: test_trainer.train(c, layout, **options)), reference)


def mean_of_means(patch: Patch) -> None:
    """Divide each microbatch by its own valid tokens, then by the number of microbatches."""
    whole = executor._StepState.forward

    def forward(self: Any, action: Any) -> None:
        stage = self.chunks[action.chunk].stage
        if stage.is_last:
            (count,) = stage.loss_counts(labels=self.microbatches[action.microbatch]["labels"])
            self.counts = lambda: (count.clamp(min=1) * len(self.microbatches) * self.comm.mesh.dp,)
        whole(self, action)

    patch.setattr(executor._StepState, "forward", forward)


def count_of_one_rank(patch: Patch) -> None:
    """Use the valid tokens of this dp rank instead of those of the global batch."""
    whole = trainer.Trainer._global_counts

    def counts(self: Any, microbatches: Any) -> Any:
        kept = self.communicators
        object.__setattr__(self, "communicators", comm.Communicators(**{**vars(kept), "dp": SingleRankGroup()}))
        try:
            return whole(self, microbatches)
        finally:
            object.__setattr__(self, "communicators", kept)

    patch.setattr(trainer.Trainer, "_global_counts", counts)


def average_over_dp(patch: Patch) -> None:
    """Apply a factor twice: the loss divides by the global count, the reduction by dp as well."""
    whole = buffers.Buffers.finish_reduction

    def finish(self: Any) -> None:
        whole(self)
        self.scale_gradients(1 / MESH.dp)

    patch.setattr(buffers.Buffers, "finish_reduction", finish)


def norm_of(rule: Callable[[Any, int, int, int], bool]) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        def pieces(self: Any, stage: int) -> list[storage.ParameterShard]:
            counts = [rule(b, stage, b.sharing.replica_group.rank, self._tp.rank) for b in self._buffers]
            return [p for b, mine in zip(self._buffers, counts, strict=True) for p in b.pieces(mine)]

        patch.setattr(buffers.Buffers, "pieces", pieces)

    return plant


def no_reduction_of_partial_gradients(patch: Patch) -> None:
    """Leave sequence-parallel scales and biases with their own partial value."""
    whole = buffers.Buffer.allocate

    def allocate(self: Any, *args: Any) -> None:
        whole(self, *args)
        self.partial_over_tp = False

    patch.setattr(buffers.Buffer, "allocate", allocate)


def no_sum_over_tied_stages(patch: Patch) -> None:
    whole = comm.Communicators.over_stages

    def over_stages(self: Any, stages: tuple[int, ...]) -> Any:
        return SingleRankGroup() if whole(self, stages) is not None else None

    patch.setattr(comm.Communicators, "over_stages", over_stages)


def stale_gradients(patch: Patch) -> None:
    """Never overwrite the flat gradient: steps accumulate."""
    whole = buffers.Buffers.start_step

    def start_step(self: buffers.Buffers) -> None:
        kept = [(p, p.grad) for p in self.parameters.values()]
        whole(self)
        for p, gradient in kept:
            p.grad = gradient

    patch.setattr(buffers.Buffers, "start_step", start_step)


def lost_flat_view(patch: Patch) -> None:
    """Give the optimizer a copy of the gradient from before the reduction."""
    whole = buffers.Buffer.pieces

    def pieces(self: Any, counts: bool) -> list[storage.ParameterShard]:
        return [storage.ParameterShard(p.name, p.param, p.grad.clone(), p.counts) for p in whole(self, counts)]

    patch.setattr(buffers.Buffer, "pieces", pieces)


def last_microbatch_only(patch: Patch) -> None:
    """Overwrite the gradient of the previous microbatch."""
    whole = reduction.Reduction.expect

    def expect(self: Any, chunk: int) -> None:
        for view in (view for live in self._states for view in live.views.values()):
            view.zero_()
        whole(self, chunk)

    patch.setattr(reduction.Reduction, "expect", expect)


def reduced_too_early(patch: Patch) -> None:
    """Count readiness from the first microbatch on."""
    whole = buffers.Buffers.before_backward

    def before_backward(self: buffers.Buffers, chunk: int, half: str) -> None:
        self.start_sum(chunk)
        whole(self, chunk, half)

    patch.setattr(buffers.Buffers, "before_backward", before_backward)


def no_gather(patch: Patch) -> None:
    patch.setattr(buffers.Buffers, "gather_parameters", lambda self: None)


def gather_into_gradients(patch: Patch) -> None:
    """Gather into the gradient buffer."""

    def start_gather(self: Any, bucket: flat.Bucket) -> Any:
        target = self.grad[bucket.start : bucket.stop]
        return self.group.all_gather_later(target, self.data[self.own(bucket)])

    patch.setattr(buffers.Buffer, "start_gather", start_gather)


def shards_of_the_wrong_group(patch: Patch) -> None:
    """Cut shards for twice as many ranks: half of the elements are never updated."""
    whole = flat.Bucket.shard
    patch.setattr(flat.Bucket, "shard", lambda self, rank, ranks: whole(self, rank, 2 * ranks))


def swapped_receives(patch: Patch) -> None:
    post = messages.Inbox._post

    def swapped(self: Any) -> None:
        if len(self.expected) > 1:
            self.expected[0], self.expected[1] = self.expected[1], self.expected[0]
        post(self)

    patch.setattr(messages.Inbox, "_post", swapped)


def clipped_by_its_own_norm(patch: Patch) -> None:
    """Clip by the rank's norm instead of the global norm."""
    whole = trainer.squared_norm
    patch.setattr(trainer, "squared_norm", lambda pieces: whole(pieces) * MESH.world)


tied_copies_in_the_norm = norm_of(lambda b, stage, dp, tp: b.counts(tp))
replicas_in_the_norm = norm_of(lambda b, stage, dp, tp: b.first_rank == stage)
shards_out_of_the_norm = norm_of(lambda b, stage, dp, tp: tp == 0 and b.first_rank == stage)


def test_without_any_fault_all_is_well() -> None:
    parity()


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(mean_of_means, marks=pytest.mark.fault("mean of means")),
        pytest.param(count_of_one_rank, marks=pytest.mark.fault("one rank's count")),
        pytest.param(average_over_dp, marks=pytest.mark.fault("divided twice")),
        pytest.param(tied_copies_in_the_norm, marks=pytest.mark.fault("tied copies in the norm")),
        pytest.param(replicas_in_the_norm, marks=pytest.mark.fault("replicas in the norm")),
        pytest.param(shards_out_of_the_norm, marks=pytest.mark.fault("shards out of the norm")),
        pytest.param(no_reduction_of_partial_gradients, marks=pytest.mark.fault("a norm's gradient not summed")),
        pytest.param(no_sum_over_tied_stages, marks=pytest.mark.fault("tied gradients apart")),
        pytest.param(stale_gradients, marks=pytest.mark.fault("stale gradients")),
        pytest.param(lost_flat_view, marks=pytest.mark.fault("a lost view")),
        pytest.param(last_microbatch_only, marks=pytest.mark.fault("last microbatch alone")),
        pytest.param(reduced_too_early, marks=pytest.mark.fault("reduced too early")),
        pytest.param(no_gather, marks=pytest.mark.fault("no gather")),
        pytest.param(gather_into_gradients, marks=pytest.mark.fault("gather into gradients")),
        pytest.param(shards_of_the_wrong_group, marks=pytest.mark.fault("shards of another group")),
        pytest.param(swapped_receives, marks=pytest.mark.fault("swapped receives")),
        pytest.param(clipped_by_its_own_norm, marks=pytest.mark.fault("a rank's own norm")),
    ],
)
def test_planted_fault_is_caught(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeFault)) as caught:
        parity()
    mistakes = (AttributeError, NameError, TypeError)  # bugs of the test itself, not detections of the fault
    assert not isinstance(caught.value.__cause__, mistakes), caught.value.__cause__


@pytest.mark.fault("dp replicas in the norm")
def test_norm_over_all_dp_ranks_without_sharding_is_caught(monkeypatch: Patch) -> None:
    parity(zero=0)
    norm_of(lambda b, stage, dp, tp: b.counts(tp) and b.first_rank == stage)(monkeypatch)
    with pytest.raises(AssertionError):
        parity(zero=0)


@pytest.mark.fault("padding in the norm")
def test_padding_in_the_norm_is_caught(monkeypatch: Patch) -> None:
    """One piece extends into the padding."""
    whole = buffers.Buffer.pieces

    def pieces(self: Any, counts: bool) -> list[storage.ParameterShard]:
        padding = [storage.ParameterShard("idle", torch.nn.Parameter(self.data[-1:]), self.grad[-1:], counts)]
        return whole(self, counts) + padding

    monkeypatch.setattr(buffers.Buffer, "pieces", pieces)
    with pytest.raises((AssertionError, RuntimeFault)):
        test_trainer.test_padding_never_counts()


@pytest.mark.fault("the unused stepped")
def test_stepping_unused_parameters_is_caught(monkeypatch: Patch) -> None:
    """Apply weight decay and moments to parameters that were not used."""
    monkeypatch.setattr(buffers.Buffers, "used", lambda self: set(self._buffer_of))
    with pytest.raises((AssertionError, RuntimeFault)):
        test_trainer.test_a_parameter_used_by_some_steps_and_some_ranks_only(1)


def test_stale_memory_of_missing_gradients_is_caught(monkeypatch: Patch) -> None:
    """A parameter not used in this backward pass gets stale memory as its gradient."""
    room, start = reduction.BucketState.allocate, reduction.BucketState.start_sum
    monkeypatch.setattr(reduction.BucketState, "allocate", lambda self: room(self) or self.total.fill_(torch.nan))
    test_trainer.test_a_parameter_used_by_some_steps_and_some_ranks_only(2)
    monkeypatch.setattr(reduction.BucketState, "start_sum", lambda self: self.unwritten.clear() or start(self))
    with pytest.raises((AssertionError, RuntimeFault), match=r"finite|Tensor-likes"):
        test_trainer.test_a_parameter_used_by_some_steps_and_some_ranks_only(2)


def test_padding_of_shards_in_the_norm_is_caught(monkeypatch: Patch) -> None:
    """One piece extends into the padding, where gradients and parameters are shards."""
    room, whole = reduction.BucketState.allocate, buffers.Buffer.pieces
    monkeypatch.setattr(reduction.BucketState, "allocate", lambda self: room(self) or self.total.fill_(torch.nan))
    parity(zero=3)

    def pieces(self: Any, counts: bool) -> list[storage.ParameterShard]:
        padding = [storage.ParameterShard("idle", torch.nn.Parameter(self.main[-1:]), self.grad[-1:], counts)]
        return whole(self, counts) + padding

    monkeypatch.setattr(buffers.Buffer, "pieces", pieces)
    with pytest.raises((AssertionError, RuntimeFault)):
        parity(zero=3)


def test_random_delays_change_no_bit(monkeypatch: Patch) -> None:
    def weights() -> list[dict[str, Tensor]]:
        return [r["weights"] for r in lockstep.run_lockstep(MESH, lambda c: test_trainer.train(c, tiny.layout(MESH)))]

    expected = weights()
    whole, dice = lockstep._World.meet, random.Random(0)

    def meet(self: Any, *args: Any) -> Any:
        time.sleep(dice.random() * 1e-3)
        return whole(self, *args)

    monkeypatch.setattr(lockstep._World, "meet", meet)
    for a, b in zip(weights(), expected, strict=True):
        assert all(torch.equal(a[name], value) for name, value in b.items())
