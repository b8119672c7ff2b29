"""More silent faults, planted one by one in small programs: see `faults`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from autoptd.errors import RuntimeFault
from autoptd.layout.layout import Layout, TensorSpec
from autoptd.layout.mesh import Mesh
from autoptd.layout.placements import BP, B
from autoptd.ops.library import element_count
from autoptd.ops.stage import Stage, parameter
from autoptd.ops.tp_axis import Axis
from autoptd.runtime import executor, trainer
from autoptd.runtime.comm import interfaces as comm
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.runtime.trainer import Trainer
from autoptd.runtime.zero import flat_buffer as storage
from autoptd.runtime.zero import grad_reduce as reduction
from tests.runtime import test_executor, test_trainer
from tests.runtime import tiny_model as tiny

Patch = pytest.MonkeyPatch
MISTAKES = (AttributeError, NameError, TypeError, KeyError)  # bugs of the test itself, not detections of the fault


def seen(check: Callable[[], None]) -> bool:
    """Return whether `check` fails because of the planted fault."""
    try:
        check()
    except (AssertionError, RuntimeFault) as error:
        assert not isinstance(error.__cause__, MISTAKES), error.__cause__
        return True
    return False


# ---- the loss ----

ODD = Mesh(dp=3)


def odd_parity() -> None:
    """Three data-parallel ranks, five samples each in ragged microbatches of two; one has no valid label."""
    batches = [tiny.batch(15, 1)]
    batches[0]["labels"][6:8] = -100
    reference = tiny.train_plain(torch.optim.SGD, batches, lr=0.1)

    def body(c: Communicators) -> dict[str, Any]:
        made = test_trainer.build(c, tiny.layout(ODD, micro=2, microbatches=3), lr=0.1)
        losses = [float(made.train_step(test_trainer.share(batches[0], c)))]
        return {
            "losses": losses,
            "norms": [float(made.grad_norm)],  # type: ignore[arg-type]
            "gradients": made.gradients(),
            "weights": made.state_dict(),
        }

    test_trainer.check(run_lockstep(ODD, body), reference)


class Ones(Stage):
    """The mean of x·w over all elements of x: with x all ones, every gradient is exactly 1/width; b is Bp."""

    inputs = ("x",)
    is_last = True
    count_inputs = ("x",)

    @staticmethod
    def loss_counts(**inputs: Tensor) -> tuple[Tensor, ...]:
        return (element_count(inputs["x"].numel()),)

    def forward(self, x: Tensor, counts: tuple[Tensor, ...]) -> Tensor:
        own = (x * self.b).chunk(self.tp.size, 1)[self.tp.rank] if self.tp.size > 1 else x * self.b
        return ((x * self.w).sum() + self.tp.all_reduce(own.sum())) / counts[0]


def closed_form() -> None:
    """Sizes that are not powers of two: a factor that is applied twice, or never, is not hidden by rounding."""
    mesh, width, per_rank = Mesh(dp=3, tp=2), 6, 5
    specs = {"w": TensorSpec(B, (width,)), "b": TensorSpec(BP, (width,))}
    layout = Layout(mesh, 1, per_rank, ("x",), specs, precision="fp64")

    def body(c: Communicators) -> dict[str, Tensor]:
        stage = Ones(Axis(c.tp))
        for name in specs:
            parameter(stage, name, (width,), torch.float64)
        made = Trainer(stage, layout, c, "sgd", lr=float(width))
        made.load_parameters({name: torch.ones(width) for name in specs})
        made.train_step({"x": torch.ones(per_rank, width, dtype=torch.float64)})
        return made.state_dict()

    for state in run_lockstep(mesh, body):
        for name in specs:
            torch.testing.assert_close(state[name], torch.zeros(width, dtype=torch.float64), rtol=0, atol=1e-14)


def mean_over_microbatches(patch: Patch) -> None:
    """Count each microbatch's own tokens, and average over the m microbatches."""
    whole = executor._StepState.forward

    def forward(self: Any, action: Any) -> None:
        stage = self.chunks[action.chunk].stage
        if stage.is_last:
            microbatch = self.microbatches[action.microbatch]
            (count,) = stage.loss_counts(**{name: microbatch[name] for name in stage.count_inputs})
            self.counts = lambda: (count.clamp(min=1) * len(self.microbatches) * self.comm.mesh.dp,)
        whole(self, action)

    patch.setattr(executor._StepState, "forward", forward)


def scaled(factor: float) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        whole = trainer.Trainer._finish

        def finish(self: Any, share: Tensor, sums: Any) -> Tensor:
            self._buffers.scale_gradients(factor)
            return whole(self, share, sums)

        patch.setattr(trainer.Trainer, "_finish", finish)

    return plant


divided_by_dp, multiplied_by_microbatches = scaled(1 / 3), scaled(5)


def own_share_reported(patch: Patch) -> None:
    whole = trainer.Trainer._finish

    def finish(self: Any, share: Tensor, sums: Any) -> Tensor:
        whole(self, share, sums)
        return share

    patch.setattr(trainer.Trainer, "_finish", finish)


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        pytest.param(mean_over_microbatches, odd_parity, marks=pytest.mark.fault("mean of means")),
        pytest.param(own_share_reported, odd_parity, marks=pytest.mark.fault("another loss reported")),
        pytest.param(divided_by_dp, closed_form, marks=pytest.mark.fault("divided twice")),
        pytest.param(multiplied_by_microbatches, closed_form, marks=pytest.mark.fault("a factor too many")),
    ],
)
def test_faults_of_the_loss(plant: Callable[[Patch], None], check: Callable[[], None], monkeypatch: Patch) -> None:
    check()
    plant(monkeypatch)
    assert seen(check)


# ---- buffers and ties ----

MESH = Mesh(2, 1, 2)


def parity(mesh: Mesh = MESH, after: Callable[[Trainer], None] = lambda _: None, **options: Any) -> None:
    """Run three steps of SGD with momentum and compare; `after` each, change the trainer."""
    batches = test_trainer.batches(mesh)
    reference = tiny.train_plain(torch.optim.SGD, batches, lr=0.1, momentum=0.9)

    def body(c: Communicators) -> tuple[list[float], dict[str, Tensor], bytes]:
        made = test_trainer.build(c, tiny.layout(mesh, **options), lr=0.1, momentum=0.9)
        losses = []
        for whole in batches:
            losses.append(float(made.train_step(test_trainer.share(whole, c))))
            after(made)
        return losses, made.state_dict(), b""

    for losses, weights, _ in run_lockstep(mesh, body):
        assert losses == pytest.approx(reference.losses, rel=1e-12)
        for name, value in weights.items():
            assert test_trainer.difference(value, reference.weights[name]) <= 1e-12, name


def zero_grads(made: Trainer) -> None:
    made.optimizer.zero_grad(set_to_none=True)
    for stage in made.stages:
        stage.zero_grad(set_to_none=True)


def forgotten_with_grad(patch: Patch) -> None:
    """Read a piece's gradient from `.grad`, which zero_grad sets to None."""

    class Held(storage.ParameterShard):
        @property
        def grad(self) -> Tensor:  # type: ignore[override]
            return torch.zeros_like(self.param) if self.param.grad is None else self.param.grad

        @grad.setter
        def grad(self, value: Tensor) -> None:
            self.param.grad = value

    patch.setattr(storage, "ParameterShard", Held)


def heard_twice(patch: Patch) -> None:
    """Register every gradient hook twice."""
    whole = torch.Tensor.register_post_accumulate_grad_hook

    def register(self: Tensor, hook: Callable[[Tensor], None]) -> Any:
        def twice(parameter: Tensor) -> None:
            kept = parameter.grad
            hook(parameter)
            parameter.grad = kept
            hook(parameter)

        return whole(self, twice)

    patch.setattr(torch.nn.Parameter, "register_post_accumulate_grad_hook", register, raising=False)


class Shifted:
    """A group of tied stages in which the second rank is off by one element."""

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.size = group, group.rank, group.size

    def all_reduce(self, x: Tensor) -> Tensor:
        mine = x.roll(1) if self.rank else x.clone()
        return x.copy_(self.group.all_reduce(mine.contiguous()).roll(-1 if self.rank else 0))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)


def tied_shards_apart(patch: Patch) -> None:
    whole = comm.Communicators.over_stages

    def over_stages(self: Any, stages: tuple[int, ...]) -> Any:
        made = whole(self, stages)
        return Shifted(made) if made is not None and len(stages) > 1 else made

    patch.setattr(comm.Communicators, "over_stages", over_stages)


def never_ready(patch: Patch) -> None:
    """Wait forever for the gradient of an unused parameter, in its bucket and those after it."""
    whole = reduction._Round.take
    patch.setattr(reduction._Round, "take", lambda self, *, all: whole(self, all=False))


def as_they_come(patch: Patch) -> None:
    """Sum buckets in the order in which they become ready on each rank."""

    def take(self: Any, *, all: bool) -> Iterator[Any]:
        pending = self._pending
        for live in [live for live, awaited in pending.items() if awaited is not None and (all or not awaited)]:
            pending[live] = None
            yield live

    def completed_by(self: Any, live: Any, name: str, chunk: int) -> bool:
        awaited = self._pending[live]
        if awaited is not None:
            awaited.discard((name, chunk))
        return not awaited

    patch.setattr(reduction._Round, "take", take)
    patch.setattr(reduction._Round, "completed_by", completed_by)


ROUND = Mesh(dp=2, virtual=2)


def round_parity() -> None:
    """Embedding and head are one tensor on two chunks of a rank."""
    parity(ROUND, schedule="interleaved", microbatches=3)


def untied(patch: Patch) -> None:
    """Make the last chunk's copy a separate tensor, as after `to_empty`."""
    whole = trainer.Trainer.__init__

    def init(self: Any, stages: Any, *args: Any, **named: Any) -> None:
        whole(self, stages, *args, **named)
        last = self.stages[-1].embed
        last._parameters["weight"] = torch.nn.Parameter(last.weight.detach().clone())

    patch.setattr(trainer.Trainer, "__init__", init)


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        pytest.param(
            forgotten_with_grad, lambda: parity(after=zero_grads), marks=pytest.mark.fault("gradients set to None")
        ),
        pytest.param(heard_twice, parity, marks=pytest.mark.fault("a gradient heard twice")),
        pytest.param(tied_shards_apart, parity, marks=pytest.mark.fault("tied shards apart")),
        pytest.param(untied, round_parity, marks=pytest.mark.fault("ties cut")),
        pytest.param(never_ready, parity, marks=pytest.mark.fault("a bucket never ready")),
        pytest.param(
            as_they_come,
            lambda: test_trainer.test_a_parameter_used_by_some_steps_and_some_ranks_only(1),
            marks=pytest.mark.fault("buckets in another order"),
        ),
    ],
)
def test_faults_of_buffers(plant: Callable[[Patch], None], check: Callable[[], None], monkeypatch: Patch) -> None:
    check()
    plant(monkeypatch)
    assert seen(check)


# ---- the pipeline ----


def ragged() -> None:
    test_trainer.test_ragged_last_microbatch_and_fewer_microbatches_than_stages(5)


def wires() -> None:
    test_executor.test_all_kinds_of_wires((), 5)


def sized_by_the_first(patch: Patch) -> None:
    """Size receive buffers by the first microbatch."""
    whole, first = executor._sizes, dict[int, Any]()
    patch.setattr(executor, "_sizes", lambda stage, mb: first.setdefault(id(stage), whole(stage, mb)))


def relay_without_gradient(patch: Patch) -> None:
    """Do not pass on the gradient of a tensor that is relayed through a stage."""
    whole = executor._StepState._returned

    def returned(self: Any, i: int, chunk: int) -> tuple[Tensor, ...]:
        found = whole(self, i, chunk)
        return (torch.zeros_like(found[0]), *found[1:]) if self.comm.stage == 1 else found

    patch.setattr(executor._StepState, "_returned", returned)


def gradients_of_integers(patch: Patch) -> None:
    """Treat every tensor of an edge as requiring a gradient."""
    whole = test_executor.WIRES
    every = tuple(dataclasses.replace(wire, requires_grad=True) for wire in whole)
    for stage in (test_executor.First, test_executor.Middle):
        patch.setattr(stage, "sends", every)
    for stage in (test_executor.Middle, test_executor.Last):
        patch.setattr(stage, "receives", every)


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        pytest.param(sized_by_the_first, ragged, marks=pytest.mark.fault("sized by the first microbatch")),
        pytest.param(relay_without_gradient, wires, marks=pytest.mark.fault("a relay's gradient lost")),
        pytest.param(gradients_of_integers, wires, marks=pytest.mark.fault("gradients of integers")),
    ],
)
def test_faults_of_the_pipeline(plant: Callable[[Patch], None], check: Callable[[], None], monkeypatch: Patch) -> None:
    check()
    plant(monkeypatch)
    assert seen(check)


@pytest.mark.fault("communicators in another order")
def test_communicators_that_come_up_in_another_order_are_caught() -> None:
    def body(c: Communicators) -> None:
        pairs = [(0, 1), (0, 1, 2)] if c.rank % 2 else [(0, 1, 2), (0, 1)]
        for ranks in pairs:
            if c.rank in ranks:
                c.make_group("test", ranks)

    with pytest.raises(RuntimeFault, match=r"deadlock|disagree"):
        run_lockstep(Mesh(dp=3), body)
