"""Optimizers that are not elementwise: every plan updates whole parameters as one process does."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from autoptd.layout.mesh import Mesh
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from tests.pairwise import pairwise
from tests.runtime import tiny_model as tiny
from tests.runtime.optimizers.whole_optimizers import Orthogonal
from tests.runtime.test_trainer import batches, build, check, share, train

MESHES = [Mesh(1), Mesh(dp=4), Mesh(1, 2), Mesh(2, 2, 2), Mesh(3, 1, 2), Mesh(1, 2, 4), Mesh(4, 1, 2, 2)]
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "orthogonal": (Orthogonal, {"lr": 0.05}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.05, "weight_decay": 0.1}),
}


@pytest.mark.parametrize(
    ("mesh", "zero", "name", "clip"), pairwise(product(MESHES, range(4), OPTIMIZERS, (None, 0.05))), ids=str
)
def test_parity(mesh: Mesh, zero: int, name: str, clip: float | None) -> None:
    made, options = OPTIMIZERS[name]
    reference = tiny.train_plain(made, batches(mesh, 8), clip=clip, **options)
    kind = "interleaved" if mesh.virtual > 1 else "1f1b"
    layout = tiny.layout(mesh, microbatches=4, zero=zero, schedule=kind)
    results = run_lockstep(mesh, lambda c: train(c, layout, 8, optimizer=made, clip_norm=clip, **options))
    for result in results:
        result["gradients"] = reference.gradients if clip else result["gradients"]  # the reference's are not clipped
    check(results, reference, 1e-12)


@pytest.mark.parametrize(("zero", "shards"), [(1, 2), (2, 2), (3, 2)])
def test_replicated_shards(zero: int, shards: int) -> None:
    mesh = Mesh(4, 2)
    reference = tiny.train_plain(Orthogonal, batches(mesh), lr=0.05)
    layout = tiny.layout(mesh, zero=zero, shards=shards)
    check(run_lockstep(mesh, lambda c: train(c, layout, optimizer=Orthogonal, lr=0.05)), reference, 1e-12)


class Prepared(Orthogonal):
    """Makes its state when it is constructed, of the parameters' shapes."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["momentum"] = torch.zeros_like(p)


def test_between_steps_nothing_is_held() -> None:
    """An optimizer may look at shapes at construction; later a rank holds no whole copies of split parameters."""
    mesh = Mesh(2, 2)
    reference = tiny.train_plain(Prepared, batches(mesh), lr=0.05)
    check(run_lockstep(mesh, lambda c: train(c, tiny.layout(mesh), optimizer=Prepared, lr=0.05)), reference, 1e-12)

    def body(c: Communicators) -> int:
        trainer = build(c, tiny.layout(mesh), Prepared)
        trainer.train_step(share(tiny.batch(12, 0), c))
        whole = {u.name: u.param for u in trainer.update.updated if u.piece is None}
        split = [p.numel() for name, p in whole.items() if ".up." in name or ".down.w" in name]
        assert not any(split)
        return len(split)

    assert sum(run_lockstep(mesh, body)) == 2 * tiny.LAYERS
