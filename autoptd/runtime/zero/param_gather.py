"""ZeRO 3: parameters are gathered only while a module that reads them runs (as Zhao et al. 2023, PyTorch FSDP).

    forward    a block's parameters are gathered before it runs and freed after it; those of the stage outside all
               blocks stay gathered during the pass through the stage
    backward   re-gathered when the gradient of a block's output arrives, freed when that of an earlier block's does, or
               the pass ends; recomputation runs in between

A parameter keeps its shape while its storage is freed, so tensors that autograd saved (views of the same storage) are
valid again after the next gather. All nodes of a block are done when the gradient of an earlier block's output arrives:
autograd runs nodes in reverse order of creation, and the block's were created after that output.

All dp ranks gather the same buckets in the same order, since all run the same modules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.ops.group import Handle
from autoptd.runtime.zero.grad_reduce import BucketState


@dataclass(eq=False)
class GatherUnit:
    """The buckets that a module reads, which are gathered together. `entered`: number of the module's latest call."""

    states: tuple[BucketState, ...]
    entered: int = 0


@dataclass(eq=False)
class _Pass:
    """The units that one kind of pass gathers, in order: recorded in the first pass, prefetched in later ones."""

    order: list[GatherUnit] = field(default_factory=list)
    known: bool = False
    at: int = 0


class Gathering:
    """The gathered buckets of a rank, and how many units hold each. No function of it needs a gradient."""

    def __init__(self, *, ahead: bool) -> None:
        """`ahead`: prefetch the next block's parameters while one computes."""
        self._ahead = ahead
        self._held: dict[GatherUnit, int] = {}  # with the number of the call whose backward pass needs it, or 0
        self._calls = 0  # of blocks so far
        self._holders: dict[BucketState, int] = {}  # above 0
        self._in_flight: dict[BucketState, Handle] = {}
        self._roots: dict[int, GatherUnit] = {}  # by chunk
        self._root = GatherUnit(())  # of the chunk that runs
        self._unit_of: dict[BucketState, GatherUnit] = {}
        self._passes: defaultdict[Hashable, _Pass] = defaultdict(_Pass)
        self._pass: _Pass | None = None
        self._backward = False

    # ---- passes ----

    def watch_block(self, module: nn.Module, states: Iterable[BucketState]) -> None:
        """Register hooks that gather a block's parameters for its forward and backward passes."""
        unit = self._unit(states)
        if unit.states:
            module.register_forward_pre_hook(lambda *_: self._enter(unit))
            module.register_forward_hook(lambda _, args, out: self._leave(unit, out))

    def watch_stage(self, stage: nn.Module, chunk: int, states: Iterable[BucketState]) -> None:
        """Register forward hooks for a stage's own parameters; the executor announces its backward passes."""
        self._roots[chunk] = self._unit(states)
        stage.register_forward_pre_hook(lambda *_: self._begin(chunk, "forward"))
        stage.register_forward_hook(lambda *_: self.end())

    def _unit(self, states: Iterable[BucketState]) -> GatherUnit:
        unit = GatherUnit(tuple(states))
        self._unit_of = dict.fromkeys(unit.states, unit) | self._unit_of  # W passes are those of training
        return unit

    def begin_backward(self, chunk: int, kind: str) -> None:
        """Start a B or W pass of a chunk."""
        self._begin(chunk, kind)
        self._backward = True

    def _begin(self, chunk: int, kind: str) -> None:
        self._pass = self._passes[chunk, kind, torch.is_grad_enabled()]
        self._pass.at = 0
        self._root = self._roots[chunk]
        self.hold(self._root)

    def hold_only(self, states: Iterable[BucketState]) -> None:
        """Keep only the blocks of these buckets gathered; a W pass, which runs node by node, calls it for each."""
        wanted = dict.fromkeys(self._unit_of[state] for state in states)
        for unit in self._held.keys() - {*wanted, self._root}:
            self.release(unit)
        for unit in wanted:
            self.hold(unit)

    def end(self) -> None:
        """End the pass and free all buckets."""
        for handle in self._in_flight.values():
            handle.wait()
        for state in {*self._holders, *self._in_flight}:
            state.buffer.free(state.bucket)
        self._held.clear()
        self._holders.clear()
        self._in_flight.clear()
        if self._pass is not None:
            self._pass.known = True
        self._backward, self._pass = False, None

    def _enter(self, unit: GatherUnit) -> None:
        self._calls += 1
        unit.entered = self._calls
        self.hold(unit)

    def _leave(self, unit: GatherUnit, out: Any) -> None:
        if self._backward:
            return
        if torch.is_grad_enabled():
            before = partial(self._return_to, unit, unit.entered, self._calls)
            for x in out if isinstance(out, tuple) else (out,):
                if isinstance(x, Tensor) and x.requires_grad:
                    _before_gradient(x, before)
        self.release(unit)

    def _return_to(self, unit: GatherUnit, call: int, last: int, _: Any) -> None:
        """Gather the parameters of a call for its backward pass; free those of calls after `last`, which are done."""
        for other, number in [*self._held.items()]:
            if number > last and other is not unit:
                self.release(other)
        self.hold(unit)
        self._held[unit] = call

    # ---- buckets ----

    def hold(self, unit: GatherUnit) -> None:
        """Gather the buckets of a unit that are not gathered yet; prefetch the next unit."""
        if unit in self._held:
            return
        self._held[unit] = 0
        gathered = self._request(unit)
        for state in unit.states:
            self._holders[state] = self._holders.get(state, 0) + 1
            handle = self._in_flight.pop(state, None)
            if handle is not None:
                handle.wait()
        if gathered and self._pass is not None:
            self._prefetch(self._pass, unit)

    def _request(self, unit: GatherUnit) -> bool:
        """Start to gather the buckets that no unit holds; return whether there are any."""
        gathered = False
        for state in unit.states:
            if state not in self._holders:
                gathered = True
                if state not in self._in_flight:
                    self._in_flight[state] = state.buffer.start_gather(state.bucket)
        return gathered

    def _prefetch(self, now: _Pass, unit: GatherUnit) -> None:
        """Record the order of a pass; once it is known, prefetch the next unit."""
        if not now.known:
            now.order.append(unit)
        elif self._ahead and now.at < len(now.order) and now.order[now.at] is unit:
            now.at += 1
            if now.at < len(now.order):
                self._request(now.order[now.at])

    def release(self, unit: GatherUnit) -> None:
        """Free the unit's buckets that no other unit holds."""
        if unit not in self._held:
            return
        del self._held[unit]
        for state in unit.states:
            if self._holders[state] > 1:
                self._holders[state] -= 1
            else:
                del self._holders[state]
                state.buffer.free(state.bucket)


def _before_gradient(x: Tensor, call: Callable[[Any], None]) -> None:
    """Have `call` called when the gradient of x is complete, before it is used.

    A hook of the node costs half of the tensor's, which besides notes how to remove it.
    """
    if x.grad_fn is None:
        x.register_hook(call)
    else:
        x.grad_fn.register_prehook(call)
