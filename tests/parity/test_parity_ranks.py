"""Real gloo processes compute what the threads of lockstep and one plain process do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from autoptd.codegen.emit import Program, load_stage
from autoptd.layout.layout import Layout
from autoptd.layout.mesh import Mesh
from autoptd.ops.stage import stage_axes
from autoptd.ops.tp_axis import Axis
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.trainer import Trainer
from autoptd.testing.parity import Trained, differences, train_in_lockstep
from autoptd.testing.process_pool import ProcessPool
from tests.parity.parity_check import OPTIONS, TOLERANCE, Variant, alone, batches, complaints, parallel, planned

pytestmark = pytest.mark.ranks

PAIRS = [
    ("gpt2", Mesh(2, 2, 2), Variant(bulk=True), "adamw"),
    ("llama_2_kv", Mesh(1, 8, 1), Variant(bulk=True), "adamw"),
    ("odd_mlp", Mesh(8, 1, 1), Variant(), "sgd"),
    ("skip_mlp", Mesh(1, 1, 8), Variant(), "adamw"),
    ("oddities", Mesh(2, 2, 2), Variant(bulk=True, recompute="full"), "adamw"),
    ("one_layer", Mesh(2, 1, 4), Variant(), "sgd"),
    ("llama", Mesh(2, 2, 2), Variant(bulk=True, schedule="interleaved", virtual=2, micro=1), "adamw"),
    ("gpt2", Mesh(1, 2, 4), Variant(bulk=True, schedule="zero-bubble", micro=1), "adamw"),
    ("gpt2", Mesh(2, 2, 2), Variant(bulk=True, schedule="zero-bubble-v", virtual=2, micro=1), "adamw"),
    ("nanogpt", Mesh(4, 1, 2), Variant(zero=2, shards=2, micro=1), "adamw"),
    ("gpt2", Mesh(2, 2, 2), Variant(zero=3, micro=1, recompute="full"), "sgd"),
    ("llama", Mesh(dp=2, tp=2, cp=2), Variant(bulk=True), "adamw"),
    ("bert", Mesh(pp=2, cp=4), Variant(recompute="full", clip_norm=0.7), "sgd"),
    ("mixtral", Mesh(dp=4, tp=2, ep=4), Variant(bulk=True), "adamw"),
    ("mixtral", Mesh(dp=2, pp=2, cp=2, ep=2), Variant(bulk=True, zero=3), "sgd"),
    ("mixtral", Mesh(2, 2, 2, ep=4, etp=1), Variant(bulk=True, zero=2, schedule="zero-bubble", micro=1), "sgd"),
    ("updating_bias", Mesh(dp=2, tp=2, cp=2, ep=4, etp=1), Variant(bulk=True, micro=2), "adamw"),
    ("normed_residual", Mesh(dp=4, pp=2), Variant(bulk=True, micro=4, recompute="full"), "sgd"),
    ("normed_tokens", Mesh(dp=2, tp=2, cp=2), Variant(bulk=True, micro=8, zero=3), "sgd"),
]
assert len(PAIRS) >= 8


def train_rank(
    communicators: Communicators,
    program: Program,
    layout: Layout,
    values: dict[str, Tensor],
    batches: Sequence[dict[str, Tensor]],
    optimizer: str,
    clip_norm: float | None,
) -> Trained:
    """Do what `Parallel` does, from files, layout and values only, so that no worker traces a model."""
    with torch.device("meta"):
        held = layout.mesh.stages_of(communicators.stage)
        cut = stage_axes(layout, communicators.cp, communicators.ep, communicators.dp)
        stages = [load_stage(program, index)(Axis(communicators.tp), **cut) for index in held]
    trainer = Trainer(stages, layout, communicators, optimizer, clip_norm=clip_norm, **OPTIONS[optimizer])
    trainer.load_parameters(values)
    losses, norms, gradients = [], [], {}
    for step, batch in enumerate(batches):
        share = {n: x.tensor_split(layout.mesh.dp)[communicators.dp.rank] for n, x in batch.items()}
        losses.append(float(trainer.train_step(share)))
        assert trainer.grad_norm is not None
        norms.append(float(trainer.grad_norm))
        if step == 0:
            gradients = trainer.gradients()
    return Trained(tuple(losses), tuple(norms), gradients, trainer.state_dict())


@pytest.mark.parametrize(
    ("name", "mesh", "variant", "optimizer"), PAIRS, ids=[f"{n}-{m}-{v.schedule}" for n, m, v, _ in PAIRS]
)
def test_processes_are_one_process(pool: ProcessPool, name: str, mesh: Mesh, variant: Variant, optimizer: str) -> None:
    made = parallel(name, planned(name, mesh, variant), optimizer, variant.clip_norm)
    job: tuple[Any, ...] = (made.program, made.layout, made.initial_values(), batches(name), optimizer)
    results = pool.run(made.layout.mesh, train_rank, *job, variant.clip_norm)
    lockstep = train_in_lockstep(made, batches(name))
    for rank, found in enumerate(results):
        assert found.losses == results[0].losses and found.norms == results[0].norms, rank
        assert max(differences(found.gradients, lockstep.gradients).values()) <= TOLERANCE, rank
        assert max(differences(found.state, {n: lockstep.state[n] for n in found.state}).values()) <= TOLERANCE, rank
    first = results[0]
    whole = replace(first, state=lockstep.state | first.state)  # other buffers do not change in a step
    assert not complaints(name, whole, alone(name, optimizer, variant.clip_norm))
