"""Gradients that no other rank has a part of: one copy of each is alive, and none while a step begins."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import test_trainer
import tiny_model as tiny
import torch
from torch import Tensor

from autoptd.runtime.comm import Communicators
from autoptd.runtime.lockstep import run_lockstep
from autoptd.runtime.mesh import Mesh


def test_gradients_of_a_step_are_gone_when_the_next_begins() -> None:
    """Whoever has looked at them: the optimizer, its pieces, the module."""
    alive = []

    def body(c: Communicators) -> None:
        trainer = test_trainer.build(c, tiny.layout(Mesh(1, 1, 1)), "adamw", lr=0.05)
        last: dict[str, weakref.ref[torch.UntypedStorage]] = {}
        inner = trainer._executor.run

        def run(*args: object, **named: object) -> None:
            alive.append([name for name, storage in last.items() if storage() is not None])
            inner(*args, **named)  # type: ignore[arg-type]

        trainer._executor.run = run  # type: ignore[method-assign]
        for seed in range(3):
            trainer.train_step(test_trainer.share(tiny.batch(6, seed), c))
            last = stored({n: p.grad for n, p in trainer.stage.named_parameters() if p.grad is not None})
            assert len(last) > 10

    run_lockstep(Mesh(1, 1, 1), body)
    assert alive == [[], [], []]


def stored(tensors: Mapping[str, Tensor]) -> dict[str, weakref.ref[torch.UntypedStorage]]:
    return {name: weakref.ref(x.untyped_storage()) for name, x in tensors.items()}
