"""Parity of dp × tp × pp in lockstep with one process: loss, gradients, norm, parameters after several steps."""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from autoptd.errors import InputsError, PlanError, RuntimeFault
from autoptd.layout.layout import Layout, TensorSpec
from autoptd.layout.mesh import Mesh
from autoptd.layout.placements import B, Split
from autoptd.ops.stage import Stage, buffer, parameter
from autoptd.ops.tp_axis import Axis
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.runtime.trainer import Trainer
from tests.pairwise import pairwise
from tests.runtime import tiny_model as tiny

MESHES = [Mesh(dp, tp, pp) for dp in (1, 2, 4, 8) for tp in (1, 2) for pp in (1, 2, 4) if dp * tp * pp in (1, 2, 4, 8)]
STEPS = 3


def build(c: Communicators, layout: tiny.Layout, optimizer: Any = "sgd", **kwargs: Any) -> Trainer:
    mesh = layout.mesh
    stages = [tiny.make_stage(Axis(c.tp), mesh.stages, index) for index in mesh.stages_of(c.stage)]
    trainer = Trainer(stages, layout, c, optimizer, **kwargs)
    trainer.load_parameters(tiny.weights())
    return trainer


def share(whole: dict[str, Tensor], c: Communicators) -> dict[str, Tensor]:
    """Return this dp rank's samples."""
    return {name: x.chunk(c.mesh.dp)[c.dp.rank] for name, x in whole.items()}


def batches(mesh: Mesh, per_rank: int = 6) -> list[dict[str, Tensor]]:
    return [tiny.batch(mesh.dp * per_rank, seed) for seed in range(STEPS)]


def train(c: Communicators, layout: tiny.Layout, per_rank: int = 6, **kwargs: Any) -> dict[str, Any]:
    trainer = build(c, layout, **kwargs)
    losses, norms, gradients = [], [], None
    for whole in batches(c.mesh, per_rank):
        losses.append(float(trainer.train_step(share(whole, c))))
        assert trainer.grad_norm is not None
        norms.append(float(trainer.grad_norm))
        gradients = gradients or {name: x.clone() for name, x in trainer.gradients().items()}
    local = {name: x.detach().clone() for name, x in trainer.local_tensors().items()}
    return {
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "weights": trainer.state_dict(),
        "local": local,
    }


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-300))


def check(results: list[dict[str, Any]], reference: tiny.Reference, tolerance: float = 1e-12) -> None:
    for result in results:
        assert result["losses"] == results[0]["losses"] and result["norms"] == results[0]["norms"]
        assert result["losses"] == pytest.approx(reference.losses, rel=tolerance)
        assert result["norms"] == pytest.approx(reference.norms, rel=tolerance)
        assert result["weights"].keys() == reference.weights.keys()
        assert result["gradients"].keys() == reference.gradients.keys()
        for kind in ("gradients", "weights"):
            expected = getattr(reference, kind)
            for name, value in result[kind].items():
                assert difference(value, expected[name]) <= tolerance, (kind, name)


OPTIMIZERS: dict[str, tuple[Any, dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
}


@pytest.mark.parametrize(("mesh", "zero", "name"), pairwise(product(MESHES, (0, 1), OPTIMIZERS)), ids=str)
def test_parity(mesh: Mesh, zero: int, name: str) -> None:
    plain, options = OPTIMIZERS[name]
    reference = tiny.train_plain(plain, batches(mesh), **options)
    layout = tiny.layout(mesh, zero=zero)
    check(run_lockstep(mesh, lambda c: train(c, layout, optimizer=name, **options)), reference, 1e-11)


@pytest.mark.parametrize(("zero", "shards"), [(2, 0), (3, 0), (1, 2), (2, 2), (3, 2)])
@pytest.mark.parametrize("mesh", [Mesh(dp=4), Mesh(2, 2, 2), Mesh(4, 1, 2, 2)], ids=str)
def test_parity_of_shards(mesh: Mesh, zero: int, shards: int) -> None:
    reference = tiny.train_plain(torch.optim.AdamW, batches(mesh, 8), lr=0.01, weight_decay=0.1)
    kind = "interleaved" if mesh.virtual > 1 else "zero-bubble"
    layout = tiny.layout(mesh, microbatches=4, zero=zero, shards=shards, schedule=kind)
    options = {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1}
    check(run_lockstep(mesh, lambda c: train(c, layout, 8, **options)), reference, 1e-11)


def test_clipping() -> None:
    mesh = Mesh(2, 2, 2)
    reference = tiny.train_plain(torch.optim.SGD, batches(mesh), clip=0.05, lr=0.5)
    assert min(reference.norms) > 0.05
    results = run_lockstep(mesh, lambda c: train(c, tiny.layout(mesh), clip_norm=0.05, lr=0.5))
    for result in results:
        assert result["norms"] == pytest.approx(reference.norms, rel=1e-12)
        for name, value in result["weights"].items():
            assert difference(value, reference.weights[name]) < 1e-12


@pytest.mark.parametrize("per_rank", [5, 1, 2])
def test_ragged_last_microbatch_and_fewer_microbatches_than_stages(per_rank: int) -> None:
    mesh = Mesh(dp=2, pp=4)
    layout = tiny.layout(mesh, micro=2, microbatches=-(-per_rank // 2))
    reference = tiny.train_plain(torch.optim.SGD, batches(mesh, per_rank), lr=0.1)
    check(run_lockstep(mesh, lambda c: train(c, layout, per_rank, lr=0.1)), reference)


def test_data_parallel_size_that_is_not_a_power_of_two() -> None:
    mesh = Mesh(dp=3)
    reference = tiny.train_plain(torch.optim.SGD, batches(mesh, 5), lr=0.1)
    layout = tiny.layout(mesh, micro=2, microbatches=3)
    check(run_lockstep(mesh, lambda c: train(c, layout, 5, lr=0.1)), reference)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_overlap_changes_no_bit_and_runs_repeat(zero: int) -> None:
    mesh = Mesh(2, 2, 2)
    runs = [
        run_lockstep(mesh, lambda c, on=on: train(c, tiny.layout(mesh, zero=zero, overlap=on), lr=0.1))  # type: ignore[misc]
        for on in (True, False, True)
    ]
    for run in runs[1:]:
        for a, b in zip(run, runs[0], strict=True):
            assert a["losses"] == b["losses"] and a["norms"] == b["norms"]
            for name in a["weights"]:
                assert torch.equal(a["weights"][name], b["weights"][name])


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_tied_copies_stay_bitwise_equal(pp: int) -> None:
    mesh = Mesh(dp=2, pp=pp)
    results = run_lockstep(mesh, lambda c: train(c, tiny.layout(mesh), optimizer="adamw", lr=0.01))
    copies = [r["local"]["embed.weight"] for r in results if "embed.weight" in r["local"]]
    assert len(copies) == mesh.dp * len({0, pp - 1})
    assert all(torch.equal(copy, copies[0]) for copy in copies)


def test_every_parameter_but_idle_and_frozen_changes() -> None:
    mesh = Mesh(2, 2, 2)
    (result, *_) = run_lockstep(
        mesh, lambda c: train(c, tiny.layout(mesh), optimizer="adamw", lr=0.01, weight_decay=0.5)
    )
    before = tiny.weights()
    same = [name for name, value in result["weights"].items() if torch.equal(value, before[name])]
    assert same == ["gain", "idle"]


def test_dp_ranks_that_evaluate_different_numbers_of_samples() -> None:
    """No rank may stop earlier than the others if parameters are gathered for each microbatch."""
    mesh = Mesh(2, 1, 2)
    whole = tiny.batch(8, 3)
    expected = float(tiny.plain_loss(tiny.weights(), **whole))

    def body(c: Communicators) -> float:
        own = slice(0, 7) if c.dp.rank == 0 else slice(7, 8)
        return float(build(c, tiny.layout(mesh, zero=3)).eval_step({name: x[own] for name, x in whole.items()}))

    assert run_lockstep(mesh, body) == pytest.approx([expected] * 4, rel=1e-12)


def test_eval_step_is_the_loss_and_changes_nothing() -> None:
    mesh = Mesh(2, 2, 2)
    whole = tiny.batch(14, 3)  # 7 per rank: another number of microbatches than in training, the last one ragged
    expected = float(tiny.plain_loss(tiny.weights(), **whole))

    def body(c: Communicators) -> tuple[float, dict[str, Tensor]]:
        trainer = build(c, tiny.layout(mesh))
        loss = float(trainer.eval_step(share(whole, c)))
        assert float(trainer.train_step(share(tiny.batch(12, 0), c))) > 0
        assert float(trainer.eval_step(share(whole, c))) != loss
        return loss, build(c, tiny.layout(mesh)).state_dict()

    for loss, weights in run_lockstep(mesh, body):
        assert loss == pytest.approx(expected, rel=1e-12)
        assert all(torch.equal(weights[name], value) for name, value in tiny.weights().items())


def test_padding_never_counts() -> None:
    """NaN in the padding of every flat buffer leaves loss, norm and parameters as they are."""
    mesh = Mesh(2, 2, 2)

    def body(c: Communicators) -> dict[str, Any]:
        trainer = build(c, tiny.layout(mesh), lr=0.1, clip_norm=0.1)
        whole = batches(mesh)[0]
        for flat in trainer._buffers._buffers:
            inside = torch.zeros(flat.data.shape, dtype=torch.bool)
            for slot in flat.slots.values():
                inside[slot.start : slot.stop] = True
            assert not inside.all()
            flat.grad[~inside] = torch.nan
            flat.data[~inside] = torch.nan
        losses = [float(trainer.train_step(share(whole, c))) for _ in range(2)]
        return {"losses": losses, "norm": float(trainer.grad_norm), "weights": trainer.state_dict()}

    reference = tiny.train_plain(torch.optim.SGD, [batches(mesh)[0]] * 2, clip=0.1, lr=0.1)
    for result in run_lockstep(mesh, body):
        assert result["losses"] == pytest.approx(reference.losses, rel=1e-12)
        assert result["norm"] == pytest.approx(reference.norms[1], rel=1e-12)
        for name, value in result["weights"].items():
            assert difference(value, reference.weights[name]) < 1e-12


@pytest.mark.parametrize(("zero", "shards"), [(0, 0), (1, 0), (3, 0), (2, 2)])
@pytest.mark.parametrize("mesh", [Mesh(2, 1, 1), Mesh(2, 2, 2), Mesh(4, 1, 2)], ids=str)
def test_each_logical_element_is_counted_once_and_updated_by_its_ranks(mesh: Mesh, zero: int, shards: int) -> None:
    """Collect (parameter, local index range) of the norm and of the update over all ranks."""

    def body(c: Communicators) -> list[tuple[str, bool, int]]:
        pieces = build(c, tiny.layout(mesh, zero=zero, shards=shards))._pieces
        return [(p.name, p.counts, p.param.numel()) for p in pieces]

    counted: dict[str, int] = {}
    updated: dict[str, int] = {}
    for name, counts, elements in [item for rank in run_lockstep(mesh, body) for item in rank]:
        counted[name] = counted.get(name, 0) + elements * counts
        updated[name] = updated.get(name, 0) + elements
    for name, spec in tiny.specs(mesh.pp).items():
        if not spec.trainable:
            assert name not in updated
            continue
        elements = torch.Size(spec.shape).numel()
        assert counted[name] == elements, name
        local = torch.Size(spec.local_shape(mesh.tp)).numel()
        copies = mesh.tp * len(spec.stages) * (mesh.dp // (shards or mesh.dp) if zero else mesh.dp)
        assert updated[name] == local * copies, name


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_parameter_used_by_some_steps_and_some_ranks_only(zero: int) -> None:
    """A gate is used by dp rank 0 only, in one microbatch, and not in the second step, in which AdamW's state for it
    must not change."""
    mesh = Mesh(dp=2)
    spec = {"w": TensorSpec(B, (3,)), "gate": TensorSpec(B, (3,))}
    layout = Layout(mesh, 2, 2, ("x",), spec, precision="fp64", bucket_elements=2, zero=zero)

    class Gated(Stage):
        inputs = ("x",)
        is_last = True

        def forward(self, x: Tensor, counts: tuple[Tensor, ...]) -> Tensor:
            loss = ((x @ self.w) ** 2).sum()
            return loss + (x @ self.gate).sum() if float(x.sum()) > 0 else loss

    ones = torch.ones(4, 3, dtype=torch.float64)
    half = torch.cat((ones[:2], -ones[2:]))
    steps = [torch.cat((half, -ones)), -torch.cat((ones, ones)), torch.cat((-half, -ones))]

    def body(c: Communicators) -> dict[str, Tensor]:
        stage = Gated(Axis(c.tp))
        for name in spec:
            parameter(stage, name, (3,), torch.float64)
        trainer = Trainer(stage, layout, c, lr=0.1, weight_decay=0.3)
        trainer.load_parameters({"w": torch.ones(3), "gate": torch.ones(3)})
        for x in steps:
            trainer.train_step(share({"x": x}, c))
        return trainer.state_dict()

    w, gate = (torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    optimizer = torch.optim.AdamW([w, gate], lr=0.1, weight_decay=0.3)
    for x in steps:
        optimizer.zero_grad()
        positive = x[x.sum(1) > 0]
        (((x @ w) ** 2).sum() + ((positive @ gate).sum() if len(positive) else 0)).backward()
        optimizer.step()
    for result in run_lockstep(mesh, body):
        torch.testing.assert_close(result["w"], w.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(result["gate"], gate.detach(), rtol=1e-12, atol=0)


def test_a_batch_without_any_valid_label_is_no_step() -> None:
    """The loss is NaN, as in torch."""
    mesh = Mesh(2, 1, 2)

    def body(c: Communicators) -> None:
        trainer = build(c, tiny.layout(mesh))
        whole = tiny.batch(12, 0)
        trainer.train_step(share(whole | {"labels": torch.full_like(whole["labels"], -100)}, c))

    with pytest.raises(RuntimeFault, match="step 0 is not finite: loss nan"):
        run_lockstep(mesh, body)


def test_an_error_in_counting_labels_is_one_of_an_action() -> None:
    """So that the watchdog ends the job: other ranks already wait for the counts."""

    def body(c: Communicators) -> None:
        trainer = build(c, tiny.layout(Mesh()))
        trainer.stage.loss_counts = lambda **_: [][0]  # type: ignore[attr-defined]
        with pytest.raises(IndexError):
            trainer.train_step(tiny.batch(6, 0))
        assert c.watch.status.snapshot().action == "counts"

    run_lockstep(Mesh(), body)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: {"ids": b["ids"]}, r"lacks \['labels'\]"),
        (lambda b: b | {"attention_mask": b["ids"]}, "attention_mask"),
        (lambda b: {k: v[:0] for k, v in b.items()}, "the batch is empty"),
        (lambda b: {k: v[:2] for k, v in b.items()}, "2 samples is 1 microbatches of up to 2, but the plan runs 3"),
        (lambda b: b | {"ids": b["ids"][:3]}, "different numbers of samples"),
        (lambda b: b | {"ids": torch.tensor(1)}, "dim 0 counts samples"),
    ],
)
def test_wrong_batches(change: Any, message: str) -> None:
    mesh = Mesh(pp=2)

    def body(c: Communicators) -> None:
        trainer = build(c, tiny.layout(mesh))
        with pytest.raises(InputsError, match=message):
            trainer.train_step(change(tiny.batch(6, 0)))

    run_lockstep(mesh, body)


def test_stage_and_layout_that_do_not_fit() -> None:
    mesh = Mesh()

    def body(c: Communicators) -> None:
        layout = tiny.layout(mesh)
        missing = {name: spec for name, spec in layout.parameters.items() if name != "idle"}
        stage = tiny.make_stage(Axis(c.tp), 1, 0)
        with pytest.raises(PlanError, match="parameter idle: in the stage, not in the plan"):
            Trainer(stage, dataclasses.replace(layout, parameters=missing), c)
        trainer = Trainer(stage, layout, c)
        with pytest.raises(RuntimeFault, match="no values yet"):
            trainer.train_step(tiny.batch(6, 0))
        with pytest.raises(PlanError, match=r"positions: \[1\] instead of \[4, 6\]"):
            trainer.load_parameters(tiny.weights() | {"positions": torch.zeros(1)})

    run_lockstep(mesh, body)


def test_schedulers() -> None:
    mesh = Mesh(dp=2)

    def body(c: Communicators) -> None:
        layout = tiny.layout(mesh)
        trainer = build(c, layout, lambda params: torch.optim.RMSprop(params, lr=0.01))
        scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1, 0.5)
        trainer.train_step(share(tiny.batch(12, 0), c))
        scheduler.step()
        assert trainer.optimizer.param_groups[0]["lr"] == 0.005

    run_lockstep(mesh, body)


@pytest.mark.fault("another type of equal size")
def test_neighbours_that_disagree_are_refused_before_anything_is_sent() -> None:
    """One neighbour sends as many bytes, in another dtype."""
    mesh = Mesh(pp=2)

    def body(c: Communicators) -> None:
        stage = tiny.make_stage(Axis(c.tp), mesh.stages, c.stage)
        if c.stage == 1:
            wrong = dataclasses.replace(stage.receives[0], dtype=torch.int64)
            type(stage).receives = (wrong,)
        trainer = Trainer(stage, tiny.layout(mesh), c, "sgd")
        trainer.load_parameters(tiny.weights())
        trainer.train_step(tiny.batch(6, 0))

    message = (
        r"sends \w+ edge 0 microbatch 0: x torch.(float64 .*, the other expects .* torch.int64|int64 .* torch.float64)"
    )
    with pytest.raises(RuntimeFault, match=message):
        run_lockstep(mesh, body)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_narrow_parameters_have_full_precision_copies(dtype: str) -> None:
    """Steps smaller than a bf16 ulp accumulate in the main parameters."""
    mesh = Mesh(dp=2)
    layout = Layout(mesh, 1, 1, ("x",), {"w": TensorSpec(B, (3,))}, precision=dtype)

    class Linear(Stage):
        inputs = ("x",)
        is_last = True

        def forward(self, x: Tensor, counts: tuple[Tensor, ...]) -> Tensor:
            return (x.to(self.w.dtype) @ self.w).sum()

    def body(c: Communicators) -> Tensor:
        stage = Linear(Axis(c.tp))
        parameter(stage, "w", (3,), layout.dtype)
        trainer = Trainer(stage, layout, c, "sgd", lr=2.0**-11)
        trainer.load_parameters({"w": torch.ones(3)})
        for _ in range(16):  # 16 steps of 2 * 2**-11; one ulp of bf16 at 1 is 2**-7
            trainer.train_step({"x": torch.ones(1, 3)})
        assert stage.w.dtype == layout.dtype
        return trainer.state_dict()["w"]

    for w in run_lockstep(mesh, body):
        assert torch.equal(w, torch.full((3,), 1 - 2.0**-6, dtype=layout.dtype))


def test_full_tensors_survive_any_placement() -> None:
    """Run load_parameters, then state_dict, with grouped splits, another dtype, and a split buffer."""
    mesh = Mesh(dp=2, tp=2, pp=2)
    specs = {
        "qkv": TensorSpec(Split(1, 3), (2, 12), (0,)),
        "table": TensorSpec(Split(0, 2), (8, 3), (0, 1)),
        "wide": TensorSpec(Split(0), (4,), (1,), dtype=torch.float64),
        "whole": TensorSpec(B, (5,), (1,)),
    }
    layout = Layout(mesh, 1, 1, ("x",), specs, {"mask": TensorSpec(Split(1), (2, 4), (1,))}, precision="bf16")
    full = {
        name: torch.arange(torch.Size(spec.shape).numel()).view(spec.shape).double() for name, spec in specs.items()
    }

    def body(c: Communicators) -> tuple[dict[str, Tensor], Tensor]:
        stage = Stage(Axis(c.tp))
        for name, spec in specs.items():
            if c.stage in spec.stages:
                parameter(stage, name, spec.local_shape(2), spec.dtype or torch.bfloat16)
        if c.stage == 1:
            buffer(stage, "mask", (2, 2))
        trainer = Trainer(stage, layout, c)
        trainer.load_parameters(full | {"mask": torch.arange(8.0).view(2, 4)})
        return trainer.state_dict(), c.pp.broadcast(getattr(stage, "mask", torch.zeros(2, 2)).clone(), 1)

    for rank, (state, mask) in enumerate(run_lockstep(mesh, body)):
        assert list(state) == list(specs)
        for name, value in state.items():
            assert value.dtype == (specs[name].dtype or torch.bfloat16)
            assert torch.equal(value.double(), full[name]), name
        assert torch.equal(mask, torch.arange(8.0).view(2, 4)[:, rank % 2 * 2 :][:, :2])
