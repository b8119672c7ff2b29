"""The training objective: the scalar loss computed from a model's outputs and from targets that `forward` does not see.

    batch ─┬─ inputs ──► model ──► outputs ─┐
           └─ targets ──────────────────────┴─► loss ──► 0-dim tensor

The call form follows from the loss's signature and from the targets given:

    no loss                              the outputs are the loss, or contain it
    loss(outputs)                        the loss takes one argument
    loss(outputs, inputs)                the loss takes two, and no targets are given: `inputs` is the batch, a mapping
    loss(outputs, target)                `targets` is one tensor
    loss(outputs, **targets)             `targets` is a mapping whose keys are keywords of the loss
    loss(outputs, targets)               `targets` is any other mapping
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from enum import Enum
from keyword import iskeyword
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.errors import InputsError, nearest
from autoptd.layout.sample_rows import SHARED, SampleRows
from autoptd.nest import Nest, tensors_of
from autoptd.passes.kept.copies import shallow_copy
from autoptd.passes.kept.left_tensors import LeftTensors
from autoptd.passes.objectives.loss_modules import refuse_blank
from autoptd.passes.objectives.terms import LossTerms, NamedTerms, terms_of
from autoptd.passes.trace.unwrap import Originals, RegisteredTensors, unwrap

TARGET = "targets"  # the name of a single target in a batch

Targets = Tensor | Mapping[str, Any]


class LossArguments(Enum):
    """Arguments that a loss is called with besides the outputs."""

    OUTPUTS = "nothing"
    INPUTS = "the batch"
    TARGET = "one target"
    KEYWORDS = "targets by its own keywords"
    MAPPING = "targets as a mapping"


@dataclass(frozen=True)
class Objective:
    """A loss and its call form.

    `targets`: names of batch entries that are passed to the loss and not to `forward`. `child`: path, inside the model,
    of the module that is the loss or owns it as a method; None if that is no trained module. `outside`: the user's
    model does not contain that module; `joined` added it. `nest`: structures of the arguments of `forward` and the
    loss; batches and targets hold their tensors by flat name. `terms`: numbers that the loss returns beside the scalar;
    `bank`: path of the module that holds them. `fixed`: (input, dim) of sizes that are numbers in the graph.
    """

    loss: Callable[..., Tensor] | None = None
    form: LossArguments = LossArguments.OUTPUTS
    targets: tuple[str, ...] = ()
    child: str | None = None
    outside: bool = False
    nest: Nest = field(default_factory=Nest)
    terms: tuple[str, ...] = ()
    bank: str = ""
    fixed: frozenset[tuple[str, int]] = frozenset()

    def value(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of a batch. `model` is the one that `joined` returned. Raises InputsError if no scalar."""
        return self.of_outputs(model(**self.inputs_of(batch)), batch, self.callable_of(model))

    def inputs_of(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the arguments of `forward`, made of a batch."""
        return self.nest.nested({name: x for name, x in batch.items() if name not in self.targets})

    def of_outputs(self, out: Any, batch: Mapping[str, Tensor], loss: Callable[..., Tensor] | None) -> Tensor:
        """Return the scalar to minimise, given the result of `forward`. Raises InputsError if there is none."""
        if loss is None:
            return _scalar_in(out)
        if _is_torchs(loss) and not isinstance(out, Tensor):
            raise InputsError(
                f"the model returns {_described(out)}, and {_name(loss)} takes a tensor",
                where="loss",
                fix=f"select the tensor: loss=lambda outputs, target: {_name(loss)}(outputs…, target)",
            )
        targets = self.nest.nested({name: batch[name] for name in self.targets}, fixed=False)
        match self.form:
            case LossArguments.OUTPUTS:
                return _scalar(loss(out), loss)
            case LossArguments.INPUTS:
                return _scalar(loss(out, self.nest.nested(batch)), loss)
            case LossArguments.TARGET:
                return _scalar(loss(out, *targets.values()), loss)
            case LossArguments.KEYWORDS:
                return _scalar(loss(out, **targets), loss)
            case LossArguments.MAPPING:
                return _scalar(loss(out, targets), loss)

    def callable_of(self, model: nn.Module) -> Callable[..., Tensor] | None:
        """Return the loss, bound to its module in `model` if it has one there; with terms, it keeps them in theirs."""
        loss = self.loss
        if self.child is not None:
            owner = model.get_submodule(self.child)
            loss = types.MethodType(loss.__func__, owner) if inspect.ismethod(loss) else owner
        bank = model.get_submodule(self.bank) if self.terms else None
        return bank.of(loss) if isinstance(bank, LossTerms) and loss is not None else loss

    def with_terms(self, names: tuple[str, ...], model: nn.Module) -> tuple[Objective, nn.Module]:
        """Return a model with a module for the terms of the loss as a child. `model` is not changed."""
        bank = "losses"
        while hasattr(model, bank):
            bank += "_"
        whole = shallow_copy(model)
        whole._modules = {**model._modules, bank: LossTerms(names)}
        return replace(self, terms=names, bank=bank), whole

    def joined(self, model: nn.Module) -> tuple[Objective, nn.Module]:
        """Return a model with the loss's module as a child, if that module has parameters. `model` is not changed.

        The loss is then trained and saved with the model, under the name `loss`, or `loss_` if that name is taken.
        """
        owner = self.loss.__self__ if inspect.ismethod(self.loss) else self.loss
        if not isinstance(owner, nn.Module) or self.child in dict(model.named_modules(remove_duplicate=False)):
            return self, model
        held = next((name for name, module in model.named_modules() if module is owner), None)
        if held is not None:
            return replace(self, child=held), model
        if not any(True for _ in owner.parameters()):
            refuse_blank(owner)
            return self, model
        child = self.child or "loss"
        while hasattr(model, child):
            child += "_"
        whole = shallow_copy(model)
        whole._modules = {**model._modules, child: owner}
        return replace(self, child=child, outside=True), whole

    def owns(self, name: str) -> bool:
        """Return whether a parameter or buffer belongs to the loss and not to the user's model."""
        return self.outside and name.startswith(f"{self.child}.")


class Loss(nn.Module):
    """Wrapper of a model that returns only the loss: logits, caches and output classes are dropped before planning.

    `original`: the user's parameters and buffers. `casts`: dtypes that inputs are cast to. `rows`: inputs whose samples
    are not in dim 0 for `forward`. `reads`: context of a pass, by both forms.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        original: Originals,
        casts: Mapping[str, torch.dtype],
        rows: Mapping[str, SampleRows],
        reads: Callable[..., AbstractContextManager[None]],
    ) -> None:
        super().__init__()
        self.model, self.objective, self.left = model, objective, LeftTensors()
        self.original, self.casts, self.rows, self.reads = original, casts, rows, reads
        if objective.child is None and isinstance(objective.loss, nn.Module):
            self.loss = objective.loss  # registers its constants as `loss.…`

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        given = {name: self.rows[name].joined(x) if name in self.rows else x for name, x in inputs.items()}
        model, loss = self.model, self.objective.callable_of(self.model)
        counted = [] if self.training else [x.shape[0] for n, x in inputs.items() if self.rows.get(n) != SHARED]
        for count in counted:  # metrics may read inputs apart, whose numbers of samples nothing else ties
            torch._check(count == counted[0])
        with RegisteredTensors(model, self.original), self.reads(inputs, given), self.left.of(model, loss, inputs):
            cast = {name: x.to(self.casts[name]) if name in self.casts else x for name, x in given.items()}
            return self.objective.of_outputs(model(**self.objective.inputs_of(cast)), given, loss)


def read_objective(
    loss: Callable[..., Tensor] | Objective | None,
    inputs: Mapping[str, Tensor],
    targets: Targets | None = None,
    nest: Nest | None = None,
) -> tuple[Objective, dict[str, Tensor]]:
    """Return the objective and the targets by flat name. Raises InputsError if loss, inputs and targets do not fit.

    inputs: by flat name as well. nest: the structures of inputs and targets; None: inputs have none.
    """
    if isinstance(loss, Objective):
        return loss, loss.nest.flat(name_targets(targets))
    nest = Nest.of(name_targets(targets)) if nest is None else nest
    if loss is None:
        if targets is not None:
            raise InputsError(
                "targets were given without a loss that takes them",
                where="targets",
                fix="pass loss=, such as loss=nn.CrossEntropyLoss(); arguments of forward belong in inputs=",
            )
        return Objective(nest=nest), {}
    if not callable(loss):
        raise InputsError(
            f"loss is of type {type(loss).__name__}", where="loss", fix="pass a function of the model's outputs"
        )
    loss = unwrap(loss) if isinstance(loss, nn.Module) else loss
    named = nest.flat(name_targets(targets))
    _check_targets(named, inputs, loss, single=isinstance(targets, Tensor))
    return Objective(loss, _form(loss, targets), tuple(named), nest=nest), named


def name_targets(targets: Targets | None) -> dict[str, Any]:
    """Return the targets by their names in a batch. Raises InputsError unless each is a tensor or holds some."""
    if targets is None:
        return {}
    named = {TARGET: targets} if isinstance(targets, Tensor) else targets
    if not isinstance(named, Mapping) or not named or not all(any(True for _ in tensors_of(x)) for x in named.values()):
        raise InputsError(
            f"targets is {_described(targets)}, neither a tensor nor a mapping of tensors",
            where=TARGET,
            fix="pass example tensors: targets=labels, or targets={'labels': labels, …} by the loss's keywords",
        )
    return dict(named)


# ---- call forms ----


def _form(loss: Callable[..., Tensor], targets: Targets | None) -> LossArguments:
    signature, out = _signature(loss), None
    tried: list[tuple[LossArguments, tuple[Any, ...], dict[str, Any]]]
    if isinstance(targets, Tensor):
        tried = [(LossArguments.TARGET, (out, targets), {})]
    elif targets is not None:
        tried = [(LossArguments.KEYWORDS, (out,), dict(targets))]
        tried += [] if _is_torchs(loss) else [(LossArguments.MAPPING, (out, targets), {})]
    else:
        tried = [(LossArguments.OUTPUTS, (out,), {})]
        tried += [] if _is_torchs(loss) else [(LossArguments.INPUTS, (out, {}), {})]
    for form, arguments, keywords in tried:
        if signature is None or _fits(signature, arguments, keywords):
            return form
    raise _misfit(loss, signature, targets)


def _signature(loss: Callable[..., Tensor]) -> inspect.Signature | None:
    """Return the signature of a loss; None for a torch function without one."""
    try:
        return inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except (TypeError, ValueError):
        return None


def _fits(signature: inspect.Signature, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    try:
        signature.bind(*arguments, **keywords)
    except TypeError:
        return False
    return True


def _misfit(loss: Callable[..., Tensor], signature: inspect.Signature | None, targets: Targets | None) -> InputsError:
    takes = f"{_name(loss)}{signature}"
    names = list(signature.parameters)[1:] if signature is not None else []
    if targets is None:
        return InputsError(
            f"the loss {takes} takes more than the outputs",
            where="loss",
            fix=f"pass targets=, example tensors for {', '.join(names)}"
            + ("" if _is_torchs(loss) else "; or pass a loss that takes (outputs) or (outputs, inputs)"),
        )
    if isinstance(targets, Tensor):
        fix = f"pass a mapping: targets={{{', '.join(f'{n!r}: …' for n in names)}}}; or a loss of two arguments"
        return InputsError(f"the loss {takes} cannot be called with outputs and one target", where="loss", fix=fix)
    unknown = [name for name in targets if name not in names]
    what = f"no {', '.join(map(repr, unknown))}" if unknown else f"more than {', '.join(map(repr, targets))}"
    fix = nearest(unknown[0], names) if unknown and names else f"name its arguments: {', '.join(names)}"
    return InputsError(f"the loss {takes} takes {what}", where=TARGET, fix=fix)


def _check_targets(
    named: Mapping[str, Tensor], inputs: Mapping[str, Tensor], loss: Callable[..., Tensor], *, single: bool
) -> None:
    if clash := [name for name in named if name in inputs]:
        signature = _signature(loss)
        names = list(signature.parameters)[1:] if signature is not None else []
        free = [n for n in (*names, "labels", "target") if n not in inputs]
        what = f"{clash[0]!r} names an input and a target of the batch"
        fix = f"rename the target: targets={{{free[0]!r}: …}}"
        if single:
            what = f"a single target is named {TARGET!r} in the batch, and an input has that name too"
        raise InputsError(what, where=TARGET, fix=fix)
    samples = next((x.shape[0] for x in inputs.values() if isinstance(x, Tensor) and x.ndim), None)
    for name, x in named.items():
        if not name.isidentifier() or iskeyword(name):
            raise InputsError(f"{name!r} is no valid name of a target", where=TARGET, fix="name it like an argument")
        may_be_shared = x.is_floating_point() and not single
        if not may_be_shared and (x.ndim == 0 or (samples is not None and x.shape[0] != samples)):
            counted = f"dim 0 of the inputs counts {samples} samples" if samples is not None else "dim 0 counts samples"
            raise InputsError(
                f"the target {name!r} is of shape {list(x.shape)}, but {counted}",
                where=TARGET,
                fix="give one row per sample; what all samples share is a floating-point tensor in a dict of targets",
            )


def _is_torchs(loss: Callable[..., Any]) -> bool:
    """Return whether a loss is one of torch's, which take only tensors."""
    while isinstance(loss, functools.partial):
        loss = loss.func
    module = getattr(type(loss) if isinstance(loss, nn.Module) else loss, "__module__", None)
    return (module or ("" if inspect.isfunction(loss) else "torch")).partition(".")[0] == "torch"  # C++ names none


def _name(loss: Callable[..., Any]) -> str:
    while isinstance(loss, functools.partial):
        loss = loss.func
    return getattr(loss, "__name__", type(loss).__name__)


# ---- values ----


def _scalar(value: Any, loss: Callable[..., Tensor]) -> Tensor:
    if isinstance(value, Tensor) and value.ndim == 0:
        return value
    if not isinstance(value, Tensor):
        if (terms := terms_of(value)) is not None:
            raise NamedTerms(tuple(terms))
        several = _several(value)
        fix = f"return their sum: {several}" if several else "return the scalar tensor to minimise"
    elif getattr(loss, "reduction", None) == "none":
        fix = f"reduce it: {_name(loss)}(reduction='mean')"
    else:
        fix = "reduce it, with .mean() or .sum()"
    kind = f"a tensor of {value.ndim} dims" if isinstance(value, Tensor) else _described(value)
    raise InputsError(f"the loss returned {kind}, not a scalar", where="loss", fix=fix)


def _scalar_in(out: Any) -> Tensor:
    """Return the loss among a model's outputs."""
    value: Tensor | None
    if isinstance(out, Tensor):
        value = out
    elif isinstance(out, Mapping) and "loss" in out:
        value = out["loss"]
    elif getattr(out, "loss", None) is not None:
        value = out.loss
    elif isinstance(out, (tuple, list)):
        scalars = [x for x in out if isinstance(x, Tensor) and x.ndim == 0 and x.is_floating_point()]
        value = scalars[0] if len(scalars) == 1 else None
    else:
        value = None
    if not isinstance(value, Tensor) or value.ndim != 0:
        kind = f"a tensor of {value.ndim} dims" if isinstance(value, Tensor) else _described(out)
        if several := _several(out):
            raise InputsError(
                f"the model returns several losses, {kind}",
                where="loss",
                fix=f"say what is minimised: loss=lambda losses: {several}, or a weighted sum",
            )
        raise InputsError(
            f"the model returns {kind}, which holds no scalar loss",
            fix="return a scalar, an object with .loss, or a mapping with 'loss'; or pass loss=lambda outputs: …, "
            "or loss=lambda outputs, target: … with targets=",
        )
    return value


def _several(value: Any) -> str:
    """Return the code that sums a mapping or sequence of scalar tensors called `losses`; "" for any other value."""
    values = list(value.values()) if isinstance(value, Mapping) else value
    if not isinstance(values, (list, tuple)) or not values:
        return ""
    if not all(isinstance(x, Tensor) and x.ndim == 0 and x.is_floating_point() for x in values):
        return ""
    return "sum(losses.values())" if isinstance(value, Mapping) else "sum(losses)"


def _described(value: Any) -> str:
    """Describe a value for an error: `ModelOutput with 'logits', 'states'`, `a tuple of 3`."""
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with {', '.join(map(repr, value))}" if value else "an empty mapping"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return type(value).__name__
