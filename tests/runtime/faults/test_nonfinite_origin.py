"""After a step that is not finite, every rank names the rank, stage, action, microbatch and module of its origin."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import autoptd
from autoptd.errors import RuntimeFault
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.runtime.faults.nonfinite_origin import NOWHERE

SIZES = GPTSizes(vocab=16, max_seq=8, width=16, layers=4, heads=2, dropout=0.1)
Spoil = Callable[[autoptd.Parallel], None]


def told(spoil: Spoil, **fix: Any) -> list[str]:
    """Return the error of each rank."""
    torch.manual_seed(0)
    asked = {"batch": 8, "seq": 8, "precision": "fp32", "fix": {"micro": 2, "cp": 1, "virtual": 1, **fix}}
    parallel = autoptd.parallelize(NanoGPT(SIZES), world=4, **asked)  # type: ignore[arg-type]
    values = parallel.initial_values()

    def body(c: Communicators) -> str:
        mine = copy.copy(parallel)
        mine.start(c, values)
        drawn = torch.randint(16, (8, 9), generator=torch.Generator().manual_seed(1))
        share = drawn.chunk(mine.dp_size)[mine.dp_rank]
        spoil(mine)
        with pytest.raises(RuntimeFault) as error:
            mine.train_step({"idx": share[:, :-1], "targets": share[:, 1:]})
        return str(error.value)

    return run_lockstep(parallel.layout.mesh, body)


def spoiled(rank: int, name: str) -> Spoil:
    def spoil(par: autoptd.Parallel) -> None:
        if par.rank == rank:
            dict(par.local_tensors())[name].data.fill_(float("nan"))

    return spoil


def test_a_parameter_of_one_rank() -> None:
    every = told(spoiled(3, "blocks.2.up.weight"), dp=2, pp=2, tp=1, zero=1)
    for text in every:
        assert "step 0 is not finite: loss nan" in text
        assert "first in rank 3, stage 1, action F0, microbatch 0, module blocks.2" in text, text


def test_ranks_that_share_a_tensor_are_reported_together() -> None:
    every = told(spoiled(0, "blocks.0.up.weight"), dp=1, pp=2, tp=2)
    assert all("first in ranks 0, 1, stage 0, action F0, microbatch 0, module blocks.0" in text for text in every)


def test_what_a_backward_pass_made(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = torch.autograd.backward

    def spoil(edges: Any, grads: Any = None, **named: Any) -> None:
        made = [edge.node._input_metadata[edge.output_nr] for edge in edges]
        backward(edges, [torch.full(tuple(x.shape), float("nan"), dtype=x.dtype) for x in made], **named)

    monkeypatch.setattr(torch.autograd, "backward", spoil)
    every = told(lambda par: None, dp=2, pp=2, tp=1, zero=0)
    assert all(NOWHERE in text and "gradients of " in text for text in every)
