"""A step that runs out of memory reports the category that exceeds its prediction, and a change that would fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import autoptd
from autoptd.errors import OutOfMemory
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.out_of_memory import OUTSIDE, WORKING, Account, account_of, categories, is_out_of_memory, what_would_fit

SIZES = GPTSizes(vocab=64, max_seq=32, width=32, layers=4, heads=4)


def made(world: int = 1, **fix: Any) -> autoptd.Parallel:
    torch.manual_seed(0)
    return autoptd.parallelize(NanoGPT(SIZES), world=world, batch=16, seq=32, precision="fp32", fix=fix)


def tokens() -> dict[str, Tensor]:
    drawn = torch.randint(64, (16, 33))
    return {"idx": drawn[:, :-1], "targets": drawn[:, 1:]}


class Full(TorchFunctionMode):
    """A device without memory for a second linear map."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error, self.calls = error, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is nn.functional.linear
        if func is nn.functional.linear and self.calls >= 2:
            raise self.error
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 KiB. GPU 0 has ..."),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp] . DefaultCPUAllocator: can't allocate memory: you tried to"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_step_that_runs_out_says_what_and_the_way_out(error: Exception) -> None:
    par = made(micro=4, recompute="none")
    par._running  # noqa: B018
    par._resident -= 64 * 2**20  # as if the process had grown by so much since
    with pytest.raises(OutOfMemory) as told, Full(error):
        par.train_step(tokens())
    text = str(told.value)
    assert "out of memory: activations and temporary are more than predicted" in text
    assert "F0 of stage 0" in text or isinstance(error, MemoryError)
    assert "parameters: " in text and ", predicted " in text
    assert "would fit: fix={'recompute': " in text


def test_another_error_goes_its_way() -> None:
    par = made(micro=4)
    with pytest.raises(RuntimeError, match="no such kernel"), Full(RuntimeError("no such kernel")):
        par.train_step(tokens())
    assert not is_out_of_memory(ValueError("memory"))


def test_an_optimizer_that_keeps_more_is_named() -> None:
    par = made(micro=4)
    par.train_step(tokens())
    par._trainer.optimizer.state[par._trainer.pieces[0].param]["more"] = torch.zeros(2**24)  # type: ignore[union-attr]
    account = account_of(par._trainer, par.plan, 2**62)  # type: ignore[arg-type]
    assert account.worst == "optimizer"
    assert account.found["optimizer"] - account.predicted["optimizer"] == pytest.approx(2**26, rel=0.01)


@pytest.mark.parametrize(
    ("worst", "missing", "change"),
    [(WORKING, 1, "{'recompute': "), (WORKING, 2**60, "no single change"), ("optimizer", 2**10, "{'zero': 1}")],
)
def test_the_first_change_that_frees_enough(worst: str, missing: int, change: str) -> None:
    par = made(4, dp=4, tp=1, pp=1, zero=0, micro=1, recompute="full" if worst == "optimizer" else "none")
    predicted = categories(par.plan.predicted.memory[0])
    account = Account(predicted, {**predicted, worst: predicted[worst] * 2})
    assert account.worst == worst
    assert change in what_would_fit(par.plan, par._source, account, 0, missing)


def test_no_category_is_blamed_where_none_is_more() -> None:
    predicted = dict.fromkeys(("parameters", WORKING, OUTSIDE), 10)
    assert Account(predicted, predicted).worst == ""
    assert replace(Account(predicted, predicted), found={**predicted, OUTSIDE: 11}).worst == OUTSIDE
