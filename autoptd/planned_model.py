"""The user's model as it was planned: its numbers, values, structure and hooks, which a program does not follow."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake  # private; seen in 2.13.0

from autoptd.errors import InputsError
from autoptd.old_values import LOADED, OldValues, level_outside, old_values_of
from autoptd.passes.kept.copies import one_at_a_time
from autoptd.planned_reads import Reader, functions_of, methods_of, names_in
from autoptd.read_values import ReadValue, TensorValue, sampled_bytes, some_bytes

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_AT_FIRST_CALL = "transformers.utils.output_capturing"  # puts hooks on models when they are first called
_ANNEAL = (
    "pass what changes in many steps as an input of forward, a number per sample, or count in a buffer; call "
    "parallelize again for what changes once; keep what forward does not read, such as a count, outside the model or "
    "under a name that begins with _; in eval_step the program is in evaluation mode by itself"
)
_VALUES = (
    "the program trains tensors of its own, so load weights before parallelize, or with par.load; read them with "
    "par.state_dict(); what changes in every step belongs in forward, in its inputs, or in the step of an optimizer "
    "of your own (optimizer=)"
)
_OUTSIDE = (
    "the program keeps the values that it was planned with; pass what changes as an input or a target of each batch, "
    "such as a teacher's outputs; average parameters in buffers that forward updates; or call parallelize again"
)
_TWICE = (
    "each program has values of its own: train one module that has both models and adds their losses, where a number "
    "of each batch may turn one off; or give each a copy, copy.deepcopy(model), if they are to be independent"
)
_BEGINS_AGAIN = "the model has the values that its training began with, from which this one begins again"
Slot = tuple[str, Callable[[], Tensor | None]]  # the name of a tensor, and what reads it
_AGAIN = "change the model before parallelize, or call parallelize again"


class PlannedModel:
    """A model and its loss as they were planned.

        model.beta = args.beta = 0.5           annealed in the training loop
        model.requires_grad_(False)            frozen after some steps
        model.eval()                           dropout off
        model.load_state_dict(…), p.clamp_()   other values, in tensors that are not those that are trained
        model.head = …, p.register_hook(…)     another structure, another backward pass

        teacher.load_state_dict(…)             other values of what forward or the loss reads from outside
        critic_par.train_step(…)               the same, in tensors of another program

    Nothing of this reaches a program, so a step fails once it has changed.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: object,
        outside: Mapping[str, Tensor] | None = None,
        left: Collection[tuple[str, str]] = (),
    ) -> None:
        """Note what a model's modules hold, those of a loss that is a module, and what the code of both reads.

        `outside`: tensors of neither that the program holds, by a description of each. `left`: (module or other holder,
        name) of values where a pass leaves a tensor, and no pass reads that of the one before: they may differ.
        """
        roots = [root for root in (model, loss) if isinstance(root, nn.Module)]
        found = [(name, module) for root in roots for name, module in root.named_modules()]
        outside = outside or {}
        read, others = _read_by(found, loss, outside)
        names = {f"{holder}.{name}".lstrip(".") for holder, name in left if " " not in holder}
        names |= {name for holder, name in left if holder.startswith(("file ", "function "))}
        self._read = [each for each in read if each.name.partition("[")[0] not in names]
        self._modules = [(name, module, _structure(module), _hooks(module)) for name, module in found + others]
        trained = [(name, p) for root in roots for name, p in root.named_parameters()]
        self._trained = [(name, p, p.requires_grad, _tensor_hooks(p)) for name, p in trained]
        self._values = _NotedTensors(_slots(found))
        self._outside = _NotedTensors(_slots(others) + [(name, partial(outside.get, name)) for name in outside])
        self._others = [(name, p) for name, module in others for p in module.parameters(recurse=False)]
        self._given: Mapping[str, Tensor] = {}
        self._ahead = 0  # how often the values were noted when the last step was taken
        self._is_trial = False
        changing = [p for _, p in trained if p.requires_grad]
        before = {old for old in map(old_values_of, changing) if old is not None}
        self._begins_again = any(old.is_behind() for old in before)
        if self._begins_again:
            warnings.warn(f"{_BEGINS_AGAIN}: to go on, call {LOADED}", stacklevel=level_outside())
        self._old = OldValues([module for _, module in found], changing, self._are_behind)

    def gave(self, state: Mapping[str, Tensor]) -> None:
        """Note trained tensors that were given to the user, who may load them into the model to evaluate it."""
        self._given = self._values.as_given(state)

    def check_step(self, *, first: bool, step: int) -> None:
        """Check the model before a step, after which its own tensors are no longer those that are trained.

        `first`: it is the first one of a program that started at a step, 0 if it has loaded nothing.
        """
        with one_at_a_time:
            self._check(modes=True)
            if self._is_trial:
                return
            p, is_twin = self._old.overtaken()
            if p is not None and not first:
                name = next(name for name, q, *_ in self._trained if q is p)
                if not is_twin:
                    raise _other(name, "was trained by another program, and has other values there than", _TWICE)
                text = f"another program of this model has trained {name} since this one did"
                warnings.warn(f"{text}: each has values of its own", stacklevel=level_outside())
            if p is not None and step == 0 and first and not self._begins_again:
                warnings.warn(f"{_BEGINS_AGAIN}: to go on, call {LOADED}", stacklevel=level_outside())
            self._ahead = self._values.times
            self._old.watch()

    def only_tries(self) -> None:
        """Say that the trained values are thrown away, as those of a verification: the model is not behind them."""
        self._is_trial = True

    def _are_behind(self) -> bool:
        """Return whether steps were taken since the user wrote to the model's tensors last."""
        return self._ahead == self._values.times and self._values.are_as_noted

    def check(self, *, modes: bool = True) -> None:
        """Raise InputsError naming the first thing that has changed; `modes`: be it train or eval mode."""
        with one_at_a_time:
            self._check(modes)

    def _check(self, modes: bool) -> None:
        own = set() if modes else {id(vars(module)) for _, module, *_ in self._modules}
        for each in self._read:
            is_mode = each.key == "training" and id(each.holder) in own
            if not is_mode and each.differs():
                if isinstance(each.value, TensorValue):
                    raise _other(each.name, "has other values than", _OUTSIDE)
                if isinstance(each.value, nn.Module):
                    raise _other(each.name, "is another object than", _AGAIN)
                raise _changed(each.name, each.value, each.now())
        for name, module, structure, hooks in self._modules:
            if (now := _structure(module)) != structure:
                before, after = dict(structure), dict(now)
                key = next(key for key in {**before, **after} if before.get(key) != after.get(key))
                raise _other(f"{name}.{key}".lstrip("."), "is another object than", _AGAIN)
            if _hooks(module) != hooks:
                raise _other(name or "the model", "has other hooks than", _AGAIN)
        for name, p, trained, registered in self._trained:
            if p.requires_grad != trained:
                raise _changed(f"{name}.requires_grad", trained, p.requires_grad)
            if _tensor_hooks(p) != registered:
                raise _other(name, "has other hooks than", _AGAIN)
        if name := self._values.changed(self._given):
            raise _other(name, "has other values than", _VALUES)
        if name := self._outside.changed({}):
            raise _other(name, "has other values than", _OUTSIDE)
        for name, by in [(name, old_values_of(p)) for name, p in self._others]:
            if by is not None and by is not self._old and by.is_behind():
                raise _other(name, "is trained by another program, and has other values than", _OUTSIDE)


def _read_by(
    found: Sequence[tuple[str, nn.Module]], loss: object, outside: Mapping[str, Tensor]
) -> tuple[list[ReadValue], list[tuple[str, nn.Module]]]:
    """Return the values that the code of some modules and of a loss reads, and the modules outside of these.

    Modules outside whose tensors the program does not hold are left out: the traced pass has not read them. A trace
    may have copies of them, which have the same values.
    """
    held = {_contents(x) for x in outside.values()}

    def traced(module: nn.Module) -> bool:
        tensors = [*module.parameters(), *module.buffers()]
        return not tensors or any(_contents(x) in held for x in tensors)

    known, functions = {id(module): (name, module) for name, module in found}, functions_of(loss)
    while True:  # until there are no further modules and functions
        methods = methods_of(module for _, module in known.values())
        names, reader = names_in((*methods, *functions)), Reader((*methods, *functions))
        every = [each for name, module in known.values() for each in reader.of_module(name, module, names)]
        read = {each.place: each for each in (*every, *reader.of_functions(loss))}
        modules = [(each.name, each.value) for each in read.values() if isinstance(each.value, nn.Module)]
        more = {
            id(m): (f"{name}.{n}".rstrip("."), m)
            for name, root in modules
            if traced(root)
            for n, m in root.named_modules()
            if id(m) not in known
        }
        if not more and len(functions) == len(reader.functions):
            break
        known, functions = known | more, [*reader.functions.values()]
    others = [(name, m) for name, m in known.values() if not any(m is own for _, own in found)]
    apart = {id(m) for _, m in others}
    return [each for each in read.values() if not isinstance(each.value, nn.Module) or id(each.value) in apart], others


def _contents(x: Tensor) -> tuple[torch.Size, torch.dtype, bytes]:
    return x.shape, x.dtype, bytes(sampled_bytes(x).tolist())


def _slots(modules: Sequence[tuple[str, nn.Module]]) -> list[Slot]:
    """Return the places of modules' parameters and buffers that have values."""
    held = [
        (f"{name}.{key}".lstrip("."), partial(_tensor_at, vars(module), kind, key))
        for name, module in modules
        for kind in ("_parameters", "_buffers")
        for key in vars(module)[kind]
    ]
    return [(name, read) for name, read in held if (x := read()) is not None and not x.is_meta]


def _tensor_at(attributes: Mapping[str, Any], kind: str, key: str) -> Tensor | None:
    found: Tensor | None = attributes[kind].get(key)
    return found


class _NotedTensors:
    """The values of some tensors, such as a model's parameters and buffers."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots, self.times = slots, 0  # how often the values were noted
        self._note()

    def _note(self) -> None:
        self.times += 1
        self._noted = [TensorValue(x) for x in self._tensors()]
        self._states = [_state(x) for x in self._tensors()]
        self._bytes = [sampled_bytes(x) for x in self._tensors()]  # views, which change with the tensors
        self._joined = torch.cat([torch.empty(0, dtype=torch.uint8), *self._bytes])

    def _tensors(self) -> list[Any]:
        return [read() for _, read in self._slots]

    def as_given(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return some bytes of each tensor of a state, in the types that the model has."""
        pairs = zip(self._slots, self._tensors(), strict=True)
        known = [(name, x) for (name, _), x in pairs if x is not None and name in state and x.numel()]
        return {name: some_bytes(state[name].to(x.dtype).contiguous()).cpu().clone() for name, x in known}

    @property
    def are_as_noted(self) -> bool:
        """True if no tensor was replaced or written to by torch's ops."""
        return [_state(x) for x in self._tensors()] == self._states

    def changed(self, given: Mapping[str, Tensor]) -> str:
        """Return the name of a tensor with other values than noted, and than given to the user; "" if there is none.

        All are compared at once, as long as none was written to.
        """
        tensors = self._tensors()
        if self.are_as_noted:
            now = torch.cat([torch.empty(0, dtype=torch.uint8), *self._bytes])
            if torch.equal(now, self._joined):
                return ""
        for (name, _), noted, x in zip(self._slots, self._noted, tensors, strict=True):
            if noted.differs(x) and not (isinstance(x, Tensor) and name in given and _loaded(x, given[name])):
                return name
        self._note()
        return ""


def _loaded(x: Tensor, given: Tensor) -> bool:
    """Return whether a model's tensor has the given bytes, as far as it is in host memory."""
    mine = sampled_bytes(x)
    return not len(mine) or torch.equal(mine, given)


def _state(x: Tensor | None) -> tuple[int, int, int]:
    """Return numbers that stay the same while a tensor is neither replaced nor written to by torch's ops."""
    if x is None:
        return 0, 0, 0
    if type(x) not in (Tensor, nn.Parameter, nn.Buffer) or x.layout != torch.strided or is_fake(x):
        return id(x), 0, 0
    return id(x), 0 if x.is_inference() else x._version, x.data_ptr()


def _structure(module: nn.Module) -> list[tuple[str, int]]:
    """Return the identities of submodules by name, and of a replaced `forward`, and the names of parameters."""
    parts = [*module._modules.items(), ("forward", vars(module).get("forward"))]
    found = [(key, id(part)) for key, part in parts if part is not None]
    return found + [(key, 0) for key in module._parameters if module._parameters.get(key) is not None]


def _hooks(module: nn.Module) -> list[int]:
    every = ((key, hook) for kind in _HOOKS for key, hook in getattr(module, kind).items())
    return [key for key, hook in every if getattr(hook, "__module__", "") != _AT_FIRST_CALL]


def _tensor_hooks(p: Tensor) -> list[int]:
    return [key for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks) for key in hooks or ()]  # type: ignore[attr-defined]


def _changed(name: str, planned: object, now: object) -> InputsError:
    return InputsError(
        f"{name} of the model was {planned!r} when it was planned and is {now!r} now; the program would go on with "
        f"{planned!r}",
        where=name,
        fix=_ANNEAL,
    )


def _other(name: str, differs: str, fix: str) -> InputsError:
    return InputsError(f"{name} {differs} when the model was planned, which no step would notice", where=name, fix=fix)
