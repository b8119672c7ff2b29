"""Check an exported torch program on fake tensors: its stages, and what a tp rank runs.

A stage is the model without the modules of all other stages. That holds for a model whose code between these modules
hands one tensor on as it is: what it does besides, every stage would do again. The model runs with the ops outside of
the modules seen, then each stage by itself.

A tp rank runs the model's code on a part of the heads. Code that names the number of heads takes other dims of a tensor
apart; with a length and a number of samples that share no factor with tp, its reshapes fail.

    stream   the tensor that is handed on: the model's input, then the result of the module before
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from autoptd.errors import PlanError
from autoptd.export.torch_body import cut_stage, present
from autoptd.models.own_code import USER_ERRORS, first_line

_FIX = "plan with pp=1, run the program that autoptd emits, or move that code into a module of one stage"


@contextmanager
def _fake_tensors() -> Iterator[None]:
    """Make tensors fake, without gradients, and keep torch's log of ops that fail."""
    log = logging.getLogger(torch._subclasses.fake_tensor.__name__)
    before, log.disabled = log.disabled, True
    try:
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        log.disabled = before


def check_stages(model: nn.Module, stages: Sequence[Sequence[str]], shape: Sequence[int], dtype: torch.dtype) -> str:
    """Raise PlanError if stages that run one after another would not compute what the model computes.

    Returns why that could not be checked, or "".
    `shape`, `dtype`: of an example of its input.
    """
    names = [name for stage in stages for name in stage]
    with _fake_tensors():
        inputs = torch.zeros(*shape, dtype=dtype, device="cpu")
        try:
            given = _Stream(_faked(model), names).run(inputs)
        except PlanError:
            raise
        except USER_ERRORS as error:
            return f"the stages were not checked: {_unchecked(error)}"
        for k in range(len(stages)):
            part = cut_stage(_faked(model), k, stages)
            try:
                inputs = _tensor_of(part(inputs))
            except USER_ERRORS as error:
                what = f"stage {k} does not run without the modules of other stages: {first_line(error)}"
                raise PlanError(what, where=f"stages[{k}]", fix=_FIX) from error
    if inputs.shape != given.shape:
        what = f"the stages return a tensor of shape {list(inputs.shape)}, and the model one of {list(given.shape)}"
        raise PlanError(what, where="stages", fix=_FIX)
    return ""


def check_split(model: nn.Module, styles: Mapping[str, str], tp: int, shape: Sequence[int], dtype: torch.dtype) -> str:
    """Raise PlanError if the model's code does not run on the parts of its products that a tp rank has.

    `styles`: by pattern of module names. Returns why that could not be checked, or "".
    """
    with _fake_tensors():
        tokens = len(shape) == 2 and not dtype.is_floating_point
        inputs = torch.zeros(*((2 * tp + 1,) * 2 if tokens else shape), dtype=dtype, device="cpu")
        try:
            _faked(model)(inputs)
        except USER_ERRORS as error:
            return f"the parts of tp were not checked: {_unchecked(error)}"
        part = _faked(model)
        for pattern, style in styles.items():
            for name in present(part, (pattern,)):
                _narrow(part.get_submodule(name), style, tp)
        try:
            part(inputs)
        except USER_ERRORS as error:
            raise PlanError(
                f"the model does not run on a part of its heads: {first_line(error)}",
                where="mesh.tp",
                fix="plan with tp=1, run the program that autoptd emits, or write -1 for the number of heads in "
                "reshapes",
            ) from error
    return ""


def _narrow(module: nn.Module, style: str, tp: int) -> None:
    """Leave a linear module the rows and columns that a rank has."""
    if not isinstance(module, nn.Linear):
        return
    kind, _, layouts = style.partition("(")
    rows, columns = module.weight.shape
    if kind == "ColwiseParallel" and "output_layouts" not in layouts:
        rows = -(-rows // tp)
        module.bias = None if module.bias is None else nn.Parameter(module.bias[:rows])
    if "input_layouts=Shard(-1)" in layouts or (kind == "RowwiseParallel" and "input_layouts" not in layouts):
        columns = -(-columns // tp)
    module.weight = nn.Parameter(module.weight[:rows, :columns])
    module.in_features, module.out_features = columns, rows


def _unchecked(error: Exception) -> str:
    return f"the model raises {type(error).__name__} with one fake tensor alone"


def _faked(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose parameters and buffers are fake."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="cpu"), p.requires_grad)
    for b in model.buffers():
        memo[id(b)] = torch.empty_like(b, device="cpu")
    return copy.deepcopy(model, memo)


def _tensor_of(output: Any) -> Tensor:
    found: Tensor = output if isinstance(output, Tensor) else output.logits
    return found


class _Stream(TorchDispatchMode):
    """Follows the stream through a model, and what ops outside of its stages' modules make of it."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.inside = model, 0
        self.held: list[Tensor] = []  # so that no other tensor gets the id of one
        self.stream: dict[int, bool] = {}  # id -> whether it is the result of embeddings alone
        self.changed: dict[int, str] = {}  # id -> what was done to the stream
        for name in names:
            module = model.get_submodule(name)
            module.register_forward_pre_hook(lambda m, args, name=name: self._enter(name, m, args))
            module.register_forward_hook(lambda m, args, out, name=name: self._leave(name, m, out))

    def run(self, inputs: Tensor) -> Tensor:
        self._note(inputs, False)
        with self:
            found = _tensor_of(self.model(inputs))
        self._check(found, "the model's result")
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, Tensor)]
        followed = [x for x in read if id(x) in self.stream or id(x) in self.changed]
        if self.inside or not followed:
            return out
        name = func.overloadpacket.__name__.rstrip("_")
        before = next((self.changed[id(x)] for x in followed if id(x) in self.changed), None)
        summed = name == "add" and all(self.stream.get(id(x), False) for x in read)
        same = name in _SAME and all(x.shape == followed[0].shape for x in made)
        for x in made:
            if before is None and (summed or same):
                self._note(x, self.stream[id(followed[0])])
            else:
                self.held.append(x)
                self.stream.pop(id(x), None)  # of an op in place
                self.changed[id(x)] = before or name
        return out

    def _note(self, x: Tensor, embedded: bool) -> None:
        self.held.append(x)
        self.stream[id(x)] = embedded

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self.inside and not isinstance(module, nn.Embedding):
            self._check(args[0] if args else None, f"what {name} reads first")
        self.inside += 1

    def _leave(self, name: str, module: nn.Module, out: Any) -> None:
        self.inside -= 1
        if self.inside:
            return
        if not isinstance(out, Tensor):
            what = f"{name} returns a {type(out).__name__}, not one tensor: a stage without it would take it apart"
            raise PlanError(what, where=name, fix=_FIX)
        self._note(out, isinstance(module, nn.Embedding))

    def _check(self, x: Any, what: str) -> None:
        if not isinstance(x, Tensor) or id(x) not in self.stream:
            done = self.changed.get(id(x))
            how = f"was changed between modules, by {done}: every stage would do it again" if done else "is not"
            how += "" if done else " the result of the module before"
            raise PlanError(f"{what} {how}", where="stages", fix=_FIX)


_SAME = ("view", "_unsafe_view", "reshape", "alias", "detach", "clone", "_to_copy", "slice", "contiguous", "expand")
