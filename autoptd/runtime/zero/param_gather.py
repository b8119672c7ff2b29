"""Parameters that are whole only while a module that reads them runs (ZeRO 3; as Zhao et al. 2023, PyTorch FSDP).

    forward    a block's parameters are gathered before it runs and freed after; the stage's own ones, which no block
               holds, stay for the pass through the stage
    backward   gathered when the gradient of a block's output is there, freed when every node of the block is done;
               recomputation falls in between

A parameter keeps its shape while its storage is gone, so what autograd saved of it (views of the same storage) is there
again after the next gather. Every node of a block is done when a gradient arrives at what the block was given: autograd
runs nodes that were made later first, and the views of the inputs are made before any other node of the block.

All dp ranks gather the same in the same order, since all run the same modules.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.ops.group import Handle
from autoptd.runtime.zero.grad_reduce import Live


@dataclass(eq=False)
class GatherUnit:
    """Buckets that are gathered together: those that a module reads."""

    lives: tuple[Live, ...]


@dataclass(eq=False)
class _Pass:
    """The units that one kind of pass gathers, in order: learnt in its first, asked for early afterwards."""

    order: list[GatherUnit] = field(default_factory=list)
    known: bool = False
    at: int = 0


class Gathering:
    """Who holds which buckets whole on a rank."""

    def __init__(self, *, ahead: bool) -> None:
        """`ahead`: gather the next block's parameters while one computes."""
        self._ahead = ahead
        self._holders: dict[Live, set[GatherUnit]] = {}
        self._coming: dict[Live, Handle] = {}
        self._roots: dict[int, GatherUnit] = {}  # by chunk
        self._root = GatherUnit(())  # of the chunk that runs
        self._unit_of: dict[Live, GatherUnit] = {}
        self._passes: dict[Hashable, _Pass] = {}
        self._pass: _Pass | None = None
        self._backward = False

    # ---- passes ----

    def watch_block(self, module: nn.Module, lives: Iterable[Live]) -> None:
        """Let a block's forward and backward passes find its parameters whole."""
        unit = self._unit(lives)
        if unit.lives:
            module.register_forward_pre_hook(lambda _, args, kwargs: self._enter(unit, args, kwargs), with_kwargs=True)
            module.register_forward_hook(lambda _, args, out: self._leave(unit, out))

    def watch_stage(self, stage: nn.Module, chunk: int, lives: Iterable[Live]) -> None:
        """The same of what a stage reads itself; its backward passes are announced."""
        self._roots[chunk] = self._unit(lives)
        stage.register_forward_pre_hook(lambda *_: self._begin(chunk, "forward"))
        stage.register_forward_hook(lambda *_: self.end())

    def _unit(self, lives: Iterable[Live]) -> GatherUnit:
        unit = GatherUnit(tuple(lives))
        self._unit_of |= dict.fromkeys(unit.lives, unit)
        return unit

    def begin_backward(self, chunk: int, what: str) -> None:
        """A backward pass of a chunk, or a half of one, begins."""
        self._begin(chunk, what)
        self._backward = True

    def _begin(self, chunk: int, what: str) -> None:
        self._pass = self._passes.setdefault((chunk, what, torch.is_grad_enabled()), _Pass())
        self._pass.at = 0
        self._root = self._roots[chunk]
        self.hold(self._root)

    def only(self, lives: Iterable[Live]) -> None:
        """In a second half of a backward pass, which runs node by node: hold the blocks of these alone."""
        wanted = list(dict.fromkeys(self._unit_of[live] for live in lives))
        for unit in {unit for held in self._holders.values() for unit in held} - {*wanted, self._root}:
            self.release(unit)
        for unit in wanted:
            self.hold(unit)

    def end(self) -> None:
        """The pass is over: nothing stays whole."""
        for handle in self._coming.values():
            handle.wait()
        for live in {*self._holders, *self._coming}:
            live.buffer.free(live.bucket)
        self._holders.clear()
        self._coming.clear()
        if self._pass is not None:
            self._pass.known = True
        self._backward, self._pass = False, None

    def _enter(self, unit: GatherUnit, args: Any, kwargs: Any) -> Any:
        self.hold(unit)
        if self._backward or not torch.is_grad_enabled():
            return None

        def watched(x: Any) -> Any:
            if not isinstance(x, Tensor) or isinstance(x, nn.Parameter) or not x.requires_grad:
                return x
            given = x.view_as(x)
            given.register_hook(lambda _: self.release(unit))
            return given

        return tuple(map(watched, args)), {name: watched(x) for name, x in kwargs.items()}

    def _leave(self, unit: GatherUnit, out: Any) -> None:
        if self._backward:
            return
        for x in out if isinstance(out, tuple) else (out,):
            if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
                x.register_hook(lambda _: self.hold(unit))
        self.release(unit)

    # ---- buckets ----

    @torch.no_grad()
    def hold(self, unit: GatherUnit) -> None:
        """Gather what of a unit is not whole; ask for the next one."""
        gathered = any(not self._holders.get(live) for live in unit.lives)
        self._ask(unit)
        for live in unit.lives:
            self._holders.setdefault(live, set()).add(unit)
            handle = self._coming.pop(live, None)
            if handle is not None:
                handle.wait()
        if gathered and self._pass is not None:
            self._follow(self._pass, unit)

    def _ask(self, unit: GatherUnit) -> None:
        for live in unit.lives:
            if not self._holders.get(live) and live not in self._coming:
                self._coming[live] = live.buffer.start_gather(live.bucket)

    def _follow(self, now: _Pass, unit: GatherUnit) -> None:
        """Note the order of a pass; once it is known, ask for what comes next."""
        if not now.known:
            now.order.append(unit)
        elif self._ahead and now.at < len(now.order) and now.order[now.at] is unit:
            now.at += 1
            if now.at < len(now.order):
                self._ask(now.order[now.at])

    def release(self, unit: GatherUnit) -> None:
        """Free what nobody else holds."""
        for live in unit.lives:
            holders = self._holders.get(live, set())
            holders.discard(unit)
            if not holders and live in self._holders:
                del self._holders[live]
                live.buffer.free(live.bucket)
