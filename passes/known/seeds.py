"""Code that seeds torch's generators, keeps their state or has its own, while a model is traced: refused.

    torch.manual_seed(0); noise = torch.randn(n)             the same noise in every step
    state = torch.get_rng_state(); … ; torch.set_rng_state(state)       the same mask twice
    torch.randn(n, generator=self.generator)

A program draws by sample, place and step, whatever the state of a generator is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from autoptd.errors import UnsupportedOp
from autoptd.passes.known.replace import files_of

_SEEDS: dict[Callable[..., Any], str] = {
    torch.random.manual_seed: "manual_seed",  # torch.manual_seed, which torch._dynamo wraps when it is imported
    torch.seed: "seed",
    torch.get_rng_state: "get_rng_state",
    torch.set_rng_state: "set_rng_state",
    torch.random.fork_rng: "random.fork_rng",
    torch.cuda.manual_seed: "cuda.manual_seed",
    torch.cuda.manual_seed_all: "cuda.manual_seed_all",
    torch.cuda.get_rng_state: "cuda.get_rng_state",
    torch.cuda.set_rng_state: "cuda.set_rng_state",
}
_ALLOWED = ("torch", "autoptd")  # checkpoints keep states, which their recomputation needs


@contextmanager
def refuse_seeds(model: nn.Module) -> Iterator[None]:
    """Refuse calls of torch's seeding functions, from the files of the model's classes or through torch, within."""
    with ExitStack() as replaced:
        for owner in (torch, torch.random, torch.cuda, torch.cuda.random, *files_of(model, bases=True)):
            for name, value in list(vars(owner).items()):
                if callable(value) and (seed := _seed(value)):
                    replaced.enter_context(patch.object(owner, name, _refusing(value, seed)))
        yield


def refuse_generators(given: Iterable[object]) -> None:
    """Raise UnsupportedOp if a generator is among the arguments of an op that code calls."""
    if any(isinstance(x, torch.Generator) for x in given):
        raise UnsupportedOp(
            "forward draws from a torch.Generator of its own: the program draws other numbers for every sample and "
            "step, whatever its state",
            fix="leave generator= out; draw what stays the same once, in __init__, into a buffer (register_buffer); "
            "or draw outside the model and pass it as an input",
        )


def _seed(value: Callable[..., Any]) -> str | None:
    """The name of the seeding function that value is, or wraps."""
    try:
        return _SEEDS.get(value) or _SEEDS.get(vars(value).get("__wrapped__", value))
    except TypeError:  # no hash, or no __dict__
        return None


def _refusing(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.partition(".")[0] in _ALLOWED:
            return function(*args, **kwargs)
        raise UnsupportedOp(
            f"forward calls torch.{name}: the program draws other numbers for every sample and step, whatever the seed",
            fix="draw what stays the same once, in __init__, into a buffer (register_buffer); to use a mask twice, "
            "draw it once: mask = F.dropout(torch.ones_like(x), p); x * mask",
        )

    return refuse
