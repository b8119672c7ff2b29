"""Losses that hold the model, or values of it, read what its forward has left there in the same pass."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.api import Parallel
from autoptd.errors import InputsError, UnsupportedOp
from autoptd.testing.parity import train_in_lockstep
from autoptd.verification.verdict import verify_plan

X = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).double()
Y = torch.arange(8) % 4
Loss = Callable[[Tensor, Tensor], Any]


class Auxiliary(nn.Module):
    """Leaves terms of the loss on itself, in a list and in a dictionary, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.head = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.register_buffer("prior", torch.arange(4.0) * 0.3)
        self.aux: Any = 0.0
        self.terms: list[Tensor] = []
        self.found: dict[str, Any] = {"aux": 0.0}
        self.frozen_prior = [self.prior]
        self.criteria: list[Any] = []
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.norm(self.up(x)))
        self.aux = z.square().mean()
        self.terms.clear()
        self.terms.append(z.abs().mean())
        self.found["aux"] = self.aux + z.mean()
        if self.training:
            self.prior.mul_(0.9)
        for criterion in self.criteria:
            criterion.term = z.abs().mean()
        return self.head(z)


@dataclass(slots=True)
class Slots:
    aux: Any = 0.0


class Spaced(Auxiliary):
    """Leaves a term in a namespace, and one in an object with slots."""

    def __init__(self) -> None:
        super().__init__()
        self.space, self.slots = SimpleNamespace(aux=0.0), Slots()

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.space.aux = out.square().mean()
        self.slots.aux = out.abs().mean()
        return out


LEFT = ("aux", "terms", "found", "space", "slots")  # attributes where a pass leaves something
TERMS: list[Tensor] = []


class Global(Auxiliary):
    """Leaves a term in a list of this file, which it holds as well."""

    def __init__(self) -> None:
        super().__init__()
        self.globals = TERMS

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        TERMS.clear()
        self.globals.append(out.square().mean())
        return out


class Replaces(Auxiliary):
    """Puts another tensor in the place of a buffer."""

    def forward(self, x: Tensor) -> Tensor:
        self.prior = self.prior * 0.9
        return super().forward(x)


def penalty(out: Tensor, targets: Tensor, *, model: Auxiliary) -> Tensor:
    return F.cross_entropy(out, targets) + model.aux


class Held(nn.Module):
    """A loss that is a module without parameters, and holds the model."""

    def __init__(self, model: Auxiliary) -> None:
        super().__init__()
        self.models = [model]

    def forward(self, out: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(out, targets) + self.models[0].aux + self.models[0].up.weight.square().mean()


class Registered(nn.Module):
    """A loss that is a module, and has the model as a child."""

    def __init__(self, model: Auxiliary) -> None:
        super().__init__()
        self.model = model

    def forward(self, out: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(out, targets) + self.model.aux + self.model.up.weight.square().mean()


class Hooked(nn.Module):
    """A loss that is a module, and reads what its hook of the model has taken."""

    def __init__(self, model: Auxiliary) -> None:
        super().__init__()
        self.taken: list[Tensor] = []
        model.norm.register_forward_hook(self.take)

    def take(self, module: nn.Module, given: Any, out: Tensor) -> None:
        self.taken.append(out)

    def forward(self, out: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(out, targets) + self.taken.pop().square().mean()


class Observing(Hooked):
    """One that keeps it as an attribute, and has a constant in another type."""

    def __init__(self, model: Auxiliary) -> None:
        super().__init__(model)
        self.seen: Any = 0.0
        self.register_buffer("weight", torch.arange(4.0) + 1)

    def take(self, module: nn.Module, given: Any, out: Tensor) -> None:
        self.seen = out.square().mean()

    def forward(self, out: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(out, targets, self.weight.to(out.dtype)) + self.seen


class Receiving(nn.Module):
    """A loss that is a module, on which the model leaves a term."""

    def __init__(self, model: Auxiliary) -> None:
        super().__init__()
        self.term: Any = 0.0
        model.criteria = [self]

    def forward(self, out: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(out, targets) + self.term


class Called:
    def __init__(self, model: Auxiliary) -> None:
        self.model = model

    def __call__(self, out: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(out, targets) + self.model.aux


def of_terms(terms: list[Tensor], found: dict[str, Any]) -> Loss:
    def loss(out: Tensor, targets: Tensor) -> Tensor:
        value = F.cross_entropy(out, targets) + sum(terms) + found["aux"]
        terms.clear()
        return value

    return loss


def of_space(space: SimpleNamespace | Slots) -> Loss:
    """Return a loss that holds such an object itself: unlike others', its attributes cannot be another's."""
    return lambda out, targets: F.cross_entropy(out, targets) + space.aux


def of_prior(prior: Tensor) -> Loss:
    return lambda out, targets: F.cross_entropy(out + prior, targets)


def of_parameters(parameters: list[nn.Parameter]) -> Loss:
    return lambda out, targets: F.cross_entropy(out, targets) + sum(p.abs().mean() for p in parameters)


def of_first_values(model: Auxiliary) -> Loss:
    """Return a loss that keeps parameters near what they were."""
    first = {name: p.detach() + 0.1 for name, p in model.named_parameters()}
    return lambda out, targets: (
        F.cross_entropy(out, targets) + sum((p - first[name]).square().sum() for name, p in model.named_parameters())
    )


def of_layer(layer: nn.Linear) -> Loss:
    return lambda out, targets: F.cross_entropy(out, targets) + (layer.bias @ layer.weight).square().mean()


def named(model: Auxiliary) -> Loss:
    return lambda out, targets: {"loss": F.cross_entropy(out, targets) + model.aux, "aux": model.aux}


LOSSES: dict[str, Callable[[Auxiliary], Any]] = {
    "an attribute": lambda m: lambda out, targets: F.cross_entropy(out, targets) + m.aux,
    "a list of the model": lambda m: lambda out, targets: F.cross_entropy(out, targets) + sum(m.terms),
    "a list by itself": lambda m: of_terms(m.terms, m.found),
    "a namespace by itself": lambda m: of_space(m.space),
    "slots by themselves": lambda m: of_space(m.slots),
    "a keyword": lambda m: functools.partial(penalty, model=m),
    "an object": Called,
    "a module": Held,
    "a module with a child": Registered,
    "a module with a hook": Hooked,
    "a module that a hook writes to": Observing,
    "a module that forward writes to": Receiving,
    "terms": named,
    "all parameters": lambda m: (
        lambda out, targets: F.cross_entropy(out, targets) + 0.01 * sum(p.square().sum() for p in m.parameters())
    ),
    "a vector of them": lambda m: (
        lambda out, targets: (
            F.cross_entropy(out, targets) + 0.01 * nn.utils.parameters_to_vector(m.parameters()).abs().sum()
        )
    ),
    "parameters in a list": lambda m: of_parameters([*m.parameters()]),
    "their first values": of_first_values,
    "a layer": lambda m: of_layer(m.head),
    "a buffer": lambda m: lambda out, targets: F.cross_entropy(out + m.prior, targets),
    "a buffer by itself": lambda m: of_prior(m.prior),
    "a buffer in a list": lambda m: lambda out, targets: F.cross_entropy(out + m.frozen_prior[0], targets),
    "another pass": lambda m: (
        lambda out, targets: F.cross_entropy(out, targets) + m(out @ m.head.weight @ m.up.weight).square().mean()
    ),
}


def made(model: nn.Module, loss: Any, world: int = 1, **fix: Any) -> Parallel:
    given = {"inputs": {"x": X}, "targets": Y, "loss": loss, "world": world, "batch": 8, "precision": "fp64"}
    return autoptd.parallelize(model, optimizer="sgd", optimizer_options={"lr": 0.1}, fix=fix, **given)


def alone(model: nn.Module, loss: Any, steps: int = 3) -> dict[str, Tensor]:
    """Train the model itself; return its state."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(model(X), Y)
        (value["loss"] if isinstance(value, dict) else value).backward()
        optimizer.step()
    return {name: x.detach().clone() for name, x in model.state_dict().items()}


def are_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return max(float((found[name] - x).abs().max()) for name, x in wanted.items()) < 1e-12


@pytest.mark.fault("a loss that holds the model")
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_reads_what_forward_has_left(name: str) -> None:
    torch.manual_seed(0)
    model = Spaced()
    before = copy.deepcopy((model.state_dict(), [*vars(model)], *(getattr(model, name) for name in LEFT)))
    loss = LOSSES[name](model)
    loss_before = str(vars(loss))
    parallels = [made(model, loss), made(model, loss, 2, dp=1, tp=1, pp=2), made(model, loss, 2, dp=2, tp=1, pp=1)]
    after = model.state_dict(), [*vars(model)], *(getattr(model, name) for name in LEFT)
    assert str(before) == str(after), "planning leaves the model as it was"
    assert str(vars(loss)) == loss_before
    batch = {"x": X, "targets": Y}
    for _ in range(3):
        parallels[0].train_step(batch)
    states = [parallels[0].state_dict(), *(train_in_lockstep(each, [batch] * 3).state for each in parallels[1:])]
    if name == "a list by itself":
        model.terms.clear()
    wanted = alone(model, loss)
    assert all(are_equal(state, wanted) for state in states)


@pytest.mark.fault("a loss that holds the model")
@pytest.mark.parametrize("held", [True, False])
def test_a_list_of_a_file_is_one_list(held: bool) -> None:
    """The model and its code hold one list, which a copy of the model must not part."""
    torch.manual_seed(0)
    TERMS.clear()
    model = Global()
    par = made(model, lambda out, y: F.cross_entropy(out, y) + sum(model.globals if held else TERMS))
    assert not TERMS
    for _ in range(3):
        par.train_step({"x": X, "targets": Y})
    wanted = alone(model, lambda out, y: F.cross_entropy(out, y) + sum(TERMS))
    assert are_equal(par.state_dict(), wanted)


@pytest.mark.parametrize("name", ["an attribute", "a list by itself", "terms", "another pass", "a module with a hook"])
def test_a_verification_reads_it_too(name: str) -> None:
    torch.manual_seed(0)
    model = Auxiliary()
    loss = LOSSES[name](model)
    plan = made(model, loss, 2, dp=2, tp=1, pp=1).plan
    assert verify_plan(plan, model, inputs={"x": X}, targets=Y, loss=loss).agrees


def test_metrics_read_the_trained_parameters() -> None:
    torch.manual_seed(0)
    model = Auxiliary()
    par = made(model, F.cross_entropy)
    par.train_step({"x": X, "targets": Y})
    metrics = {"held": lambda out, batch: (out * model.head.bias).sum(1) + model.prior.sum()}
    found = par.evaluate([{"x": X, "targets": Y}], metrics)["held"]
    model.load_state_dict(par.state_dict())
    model.eval()
    with torch.no_grad():
        assert float(found) == pytest.approx(float(metrics["held"](model(X), {}).mean()), rel=1e-12)


def test_a_model_that_is_called_between_the_steps_is_as_planned() -> None:
    model = Auxiliary()
    par = made(model, LOSSES["an attribute"](model))
    batch = {"x": X, "targets": Y}
    par.train_step(batch)
    model.load_state_dict(par.state_dict())
    model.eval()(X)
    assert isinstance(model.aux, Tensor)
    model.train()
    par.train_step(batch)


@pytest.mark.parametrize("held", [True, False])
def test_a_buffer_that_forward_replaces_is_not_read_by_itself(held: bool) -> None:
    """Code that holds the first tensor does not see the new one, and code that holds the model does."""
    torch.manual_seed(0)
    model = Replaces()
    loss = LOSSES["a buffer by itself" if held else "a buffer"](model)
    if held:
        with pytest.raises(InputsError, match="another tensor in the place of prior") as caught:
            made(model, loss)
        assert caught.value.where == "prior" and "copy_" in caught.value.fix
        return
    par = made(model, loss)
    for _ in range(3):
        par.train_step({"x": X, "targets": Y})
    assert are_equal(par.state_dict(), alone(model, loss))


class Criterion(nn.Module):
    """A loss that is a module, which a function holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4).double())
        self.calls = 0

    def forward(self, out: Tensor, targets: Tensor) -> Tensor:
        self.last = out.detach().mean()
        return F.cross_entropy(out, targets)


class Counting(Criterion):
    def forward(self, out: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(out * self.calls, targets)


class Averaging(Criterion):
    def forward(self, out: Tensor, targets: Tensor) -> Tensor:
        value = super().forward(out + self.mean, targets)
        self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
        return value


@pytest.mark.fault("a loss that holds the model")
@pytest.mark.parametrize(
    ("criterion", "says"),
    [
        (Counting(), "forward changes calls of module Counting, a Python value, in every pass"),
        (Averaging(), "mean of buffers of Averaging of the pass before"),
    ],
    ids=["counting", "averaging"],
)
def test_a_module_that_a_function_holds_keeps_nothing(criterion: Criterion, says: str) -> None:
    with pytest.raises(UnsupportedOp, match=says):
        made(Auxiliary(), lambda out, targets: criterion(out, targets))
    assert criterion.calls == 0 and type(criterion.mean) is Tensor and not hasattr(criterion, "last")


def test_a_module_that_a_function_holds_may_note_what_it_computes() -> None:
    criterion, model = Criterion(), Auxiliary()
    par = made(model, lambda out, targets: criterion(out, targets))
    par.train_step({"x": X, "targets": Y})
    model.eval()
    criterion(model(X), Y)
    model.train()
    par.train_step({"x": X, "targets": Y})


class Adds(nn.Module):
    """A layer that adds to a term of the module around it."""

    def __init__(self, around: nn.Module) -> None:
        super().__init__()
        self.layer, self.around = nn.Linear(16, 16).double(), weakref.ref(around)

    def forward(self, x: Tensor) -> Tensor:
        around: Any = self.around()
        around.aux = around.aux + x.abs().mean()
        return x + torch.tanh(self.layer(x)) * around.scale


class Around(nn.Module):
    """Layers that hold the module around them: no copy of it has them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(8, 16).double(), nn.Linear(16, 4).double()
        self.scale, self.aux = nn.Parameter(torch.tensor(1.3).double()), 0.0
        self.layers = nn.ModuleList(Adds(self) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        self.aux, x = 0.0, torch.tanh(self.up(x))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_layers_that_hold_the_module_around_them() -> None:
    torch.manual_seed(0)
    model = Around()
    loss = LOSSES["an attribute"](model)
    parallel = made(model, loss, 2, dp=1, tp=1, pp=2)
    found = train_in_lockstep(parallel, [{"x": X, "targets": Y}] * 3).state
    assert are_equal(found, alone(model, loss))


class Margin(nn.Module):
    """A loss with a parameter, which is trained as a child of a copy of the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.scale, self.models = nn.Parameter(torch.ones(()).double()), [model]

    def forward(self, out: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.scale * out, targets) + self.models[0].aux


def test_hooks_of_a_model_that_a_trained_loss_holds_stay_its_own() -> None:
    model = Auxiliary()
    hook = functools.partial(lambda held, module, args, out: out * len(held.found), model)
    model.register_forward_hook(hook)
    made(model, Margin(model)).train_step({"x": X, "targets": Y})
    assert hook in model._forward_hooks.values()
