"""A step ended by an interrupt: it is taken again as if nothing had happened, or nothing is done with its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autoptd
from autoptd.errors import RuntimeFault

STEPS = 4
BATCHES = [{"input": torch.randn(4, 6, generator=torch.Generator().manual_seed(i)).double()} for i in range(STEPS)]


def made() -> autoptd.Parallel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 1)).double()
    options: dict[str, Any] = {"world": 1, "batch": 4, "precision": "fp64", "optimizer": "adamw", "fix": {"micro": 4}}
    return autoptd.parallelize(model, inputs=BATCHES[0], loss=lambda out: out.square().mean(), **options)


def train(parallel: autoptd.Parallel) -> Mapping[str, Tensor]:
    """Take the steps that are left; return the parameters and buffers after them."""
    for batch in BATCHES[parallel.step :]:
        parallel.train_step(batch)
    return parallel.state_dict()


class Interrupt(TorchDispatchMode):
    """Counts ops, and interrupts before number `at` of them."""

    def __init__(self, at: float = float("inf")) -> None:
        super().__init__()
        self.at, self.ops = at, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.ops += 1
        if self.ops == self.at:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


def test_a_step_is_taken_again_or_refused_wherever_it_was_interrupted(tmp_path: Path) -> None:
    expected, kept = train(made()), made()
    kept.train_step(BATCHES[0])
    with Interrupt() as counter:
        kept.train_step(BATCHES[1])
    ends = []
    for at in range(1, counter.ops + 1, 7):
        parallel = made()
        parallel.train_step(BATCHES[0])
        parallel.save(tmp_path / str(at))
        with pytest.raises(KeyboardInterrupt), Interrupt(at):
            parallel.train_step(BATCHES[1])
        try:
            found = train(parallel)
        except RuntimeFault:
            parallel.load(tmp_path / str(at))
            found, at = train(parallel), -at
        ends.append(at)
        assert all(torch.equal(x, found[name]) for name, x in expected.items()), at
    assert max(ends) > 50 and min(ends) < 0  # some of either kind


def test_no_state_of_a_half_taken_update_is_used(tmp_path: Path) -> None:
    parallel, update = made(), torch.optim.AdamW.step

    def half(self: torch.optim.Optimizer, *args: Any) -> None:
        update(self, *args)
        raise KeyboardInterrupt

    parallel.train_step(BATCHES[0])
    parallel.save(tmp_path)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(parallel.optimizer, "step", half.__get__(parallel.optimizer))
        parallel.train_step(BATCHES[1])
    uses: Sequence[Callable[[], Any]] = (
        lambda: parallel.save(tmp_path),
        lambda: parallel.train_step(BATCHES[1]),
        lambda: parallel.eval_step(BATCHES[1]),
        parallel.state_dict,
        parallel.local_tensors,
        lambda: parallel.export_weights(tmp_path / "weights"),
    )
    for use in uses:
        with pytest.raises(RuntimeFault, match="step 2 was ended while it changed parameters"):
            use()
    parallel.load(tmp_path, optimizer=False)
    with pytest.raises(RuntimeFault, match="step 2 was ended"):
        parallel.train_step(BATCHES[1])
    parallel.load(tmp_path)
    assert parallel.step == 1
    train(parallel)
