"""Changes of a model between steps, which the program does not see: a step is refused."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.errors import InputsError, RuntimeFault
from autoptd.parallel import Parallel
from autoptd.testing.parity import train_in_lockstep


class Annealed(nn.Module):
    """A loss with a weight that training loops change."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.beta = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 4)), 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        return y.square().mean() + self.beta * y.abs().mean()


def weight(model: Annealed) -> None:
    model.beta = 0.5


def rate(model: Annealed) -> None:
    model.layers[1].p = 0.5  # type: ignore[union-attr]


def frozen(model: Annealed) -> None:
    model.layers[0].requires_grad_(False)


CHANGES: dict[str, Callable[[Annealed], object]] = {
    "beta": weight,
    "layers.1.p": rate,
    "layers.0.weight.requires_grad": frozen,
    "training": lambda model: model.eval(),
}


def scaled(x: Tensor) -> Tensor:
    return x * SETTINGS["scale"] * OPTIONS.scale


SETTINGS, OPTIONS = {"scale": 1.0, "step": 0}, SimpleNamespace(scale=1.0, step=0)
power = 0  # named as what a model reads of its configuration


class Reading(nn.Module):
    """A model that reads what is no number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("temperature", torch.tensor(1.0))
        self.weights, self.config, self._rate = [1.0, 2.0], SimpleNamespace(power=2, unread=0), 1.0
        self.mask, self.seen = torch.ones(4), list[float]()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.inner(x) * self.mask) * self.temperature * self._rate
        return scaled(y.pow(self.config.power) * self.weights[1]).mean()

    def note(self, loss: Tensor) -> None:
        self.seen.append(float(loss))


def given(change: Callable[[Reading], object]) -> tuple[Reading, Parallel, dict[str, Tensor]]:
    """Plan the model for two ranks, then change it."""
    torch.manual_seed(0)
    model, batch = Reading().double(), {"x": torch.randn(4, 4, dtype=torch.float64)}
    parallel = autoptd.parallelize(
        model, world=2, cluster="dgx-h100", batch=4, inputs={"x": batch["x"]}, precision="fp64", fix={"dp": 2}
    )
    change(model)
    return model, parallel, batch


def clamp(model: Reading) -> None:
    with torch.no_grad():
        model.inner.weight.clamp_(-0.1, 0.1)


def replaced(model: Reading) -> None:
    model.inner = nn.Linear(4, 4)


def halved(model: Reading) -> None:
    model._rate = 0.5


def head(model: Reading) -> None:
    model.inner.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))


VALUES, OTHER_HOOKS = "has other values than when", "has other hooks than when"
UNSEEN: dict[str, tuple[Callable[[Reading], object], str]] = {
    "a weight in place": (clamp, f"inner.weight {VALUES}"),
    "a weight by .data": (lambda m: m.inner.weight.data.mul_(0.9), f"inner.weight {VALUES}"),
    "another weight": (head, f"inner.weight {VALUES}"),
    "weights loaded": (lambda m: m.load_state_dict({**m.state_dict(), "inner.bias": torch.ones(4)}), VALUES),
    "a buffer": (lambda m: m.temperature.fill_(0.5), f"temperature {VALUES}"),
    "a tensor": (lambda m: m.mask.zero_(), f"mask {VALUES}"),
    "a number in a list": (lambda m: m.weights.__setitem__(1, 0.5), "weights of the model was"),
    "a number in an object": (lambda m: setattr(m.config, "power", 4), "config.power of the model was 2"),
    "a private number": (halved, "_rate of the model was 1.0"),
    "a number in a dict": (lambda m: SETTINGS.update(scale=0.5), "SETTINGS.'scale'. of the model was 1.0"),
    "a global option": (lambda m: setattr(OPTIONS, "scale", 0.5), "OPTIONS.scale of the model was 1.0"),
    "a module": (replaced, "inner is another object than when"),
    "a hook of a module": (lambda m: m.inner.register_forward_hook(lambda *_: None), f"inner {OTHER_HOOKS}"),
    "a hook of backward": (lambda m: m.register_full_backward_hook(lambda *_: None), f"the model {OTHER_HOOKS}"),
    "a hook of a weight": (lambda m: m.inner.weight.register_hook(lambda g: g * 2), f"inner.weight {OTHER_HOOKS}"),
}


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    yield
    SETTINGS.update(scale=1.0, step=0)
    vars(OPTIONS).update(scale=1.0, step=0)


@pytest.mark.fault("a changed model")
@pytest.mark.parametrize("name", UNSEEN)
def test_a_change_that_no_step_would_see_is_refused(name: str) -> None:
    change, said = UNSEEN[name]
    _, parallel, batch = given(change)
    with pytest.raises(RuntimeFault, match=f"InputsError: .*{said}"):
        train_in_lockstep(parallel, [batch])


def test_numbers_that_a_loss_closes_over_are_noted() -> None:
    model, rate = nn.Linear(4, 4).double(), 1.0

    def loss(out: Tensor) -> Tensor:
        return out.square().mean() * rate

    batch = {"input": torch.ones(4, 4, dtype=torch.float64)}
    parallel = autoptd.parallelize(model, world=1, batch=4, inputs=batch, loss=loss, precision="fp64")
    parallel.train_step(batch)
    rate = 0.5
    with pytest.raises(InputsError, match=r"rate of the model was 1\.0"):
        parallel.train_step(batch)


class Student(nn.Module):
    """A model whose teacher is registered nowhere."""

    def __init__(self, teacher: nn.Module, place: str) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        kept: dict[str, object] = {"a list": [teacher], "a dict": {"it": teacher}, "an attribute": teacher}
        vars(self)["teacher"] = kept[place]

    def forward(self, input: Tensor) -> Tensor:
        teacher = vars(self)["teacher"]
        teacher = teacher[0] if isinstance(teacher, list) else teacher["it"] if isinstance(teacher, dict) else teacher
        return (self.inner(input) - teacher(input)).square().mean()


class Distance:
    """A loss with a method that is no module's."""

    def __init__(self, teacher: nn.Module) -> None:
        self.teachers = (teacher,)

    def __call__(self, out: Tensor) -> Tensor:
        return (out - self.teachers[0](out.detach())).square().mean()


def distance(teacher: nn.Module, out: Tensor) -> Tensor:
    return (out - teacher(out.detach())).square().mean()


def halve(teacher: nn.Module) -> None:
    for p in teacher.parameters():
        p.data.mul_(0.5)


def trained_beside(teacher: nn.Module, place: str) -> tuple[Parallel, dict[str, Tensor]]:
    """Plan a model that has a teacher, or whose loss has one."""
    losses: dict[str, Callable[[Tensor], Tensor]] = {
        "a closure": lambda out: distance(teacher, out),
        "a partial": functools.partial(distance, teacher),
        "an object": Distance(teacher),
        "a method": Distance(teacher).__call__,
    }
    batch = {"input": torch.randn(4, 4)}
    model = nn.Linear(4, 4) if place in losses else Student(teacher, place)
    loss = losses.get(place)
    return autoptd.parallelize(model, world=1, batch=4, inputs=batch, loss=loss, precision="fp32"), batch


PLACES = ["a closure", "a partial", "an object", "a method", "a list", "a dict", "an attribute"]
TEACHERS: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "averaged": (halve, "0.weight has other values than when"),
    "loaded": (lambda t: t.load_state_dict({n: x + 1 for n, x in t.state_dict().items()}), "0.weight has other values"),
    "put in eval mode": (lambda t: t.eval(), "training of the model was True"),
    "changed": (lambda t: t.__setitem__(0, nn.Linear(4, 4)), "0 is another object"),
}


@pytest.mark.fault("a changed model")
@pytest.mark.parametrize(("place", "change"), [(p, "averaged") for p in PLACES] + [(PLACES[0], c) for c in TEACHERS])
def test_a_teacher_that_changes_is_refused(place: str, change: str) -> None:
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)).requires_grad_(False)
    parallel, batch = trained_beside(teacher, place)
    parallel.train_step(batch)
    TEACHERS[change][0](teacher)
    with pytest.raises(InputsError, match=TEACHERS[change][1]) as caught:
        parallel.train_step(batch)
    if change == "averaged":
        assert "a teacher's outputs" in str(caught.value)


@pytest.mark.fault("a changed model")
@pytest.mark.parametrize("part", [False, True])
def test_a_critic_that_another_program_trains_is_refused(part: bool) -> None:
    """A generator and its critic: the generator's loss would go on with the critic's first values."""
    torch.manual_seed(0)
    makes, critic = nn.Linear(4, 4).double(), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    read = critic[0] if part else critic
    x = torch.randn(4, 4, dtype=torch.float64)
    given: dict[str, Any] = {"world": 1, "inputs": {"input": x}, "batch": 4, "precision": "fp64"}
    critic.requires_grad_(False)
    ours = autoptd.parallelize(makes, loss=lambda out: -read(out).mean(), **given)
    critic.requires_grad_(True)
    theirs = autoptd.parallelize(critic, loss=lambda out: out.square().mean(), **given)
    ours.train_step({"input": x})
    theirs.train_step({"input": x})
    with pytest.raises(InputsError, match="is trained by another program, and has other values"):
        ours.train_step({"input": x})


@pytest.mark.fault("a changed model")
def test_a_tensor_in_nested_lists_that_a_loss_reads_is_noted() -> None:
    scales, batch = {"all": [[[[[torch.ones(4)]]]]]}, {"input": torch.ones(4, 4)}

    def loss(out: Tensor) -> Tensor:
        return (out * scales["all"][0][0][0][0][0]).square().mean()

    parallel = autoptd.parallelize(nn.Linear(4, 4), world=1, batch=4, inputs=batch, loss=loss, precision="fp32")
    parallel.train_step(batch)
    scales["all"][0][0][0][0][0].mul_(2)
    with pytest.raises(InputsError, match=r"a tensor \[4\] from outside that the loss reads has other values"):
        parallel.train_step(batch)


class Averaged(nn.Module):
    """A model that is evaluated with averages of its weights, which training does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.averages = [copy.deepcopy(self.inner)]

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner if self.training else self.averages[0])(x).square().mean()


def test_a_module_that_only_evaluation_reads_may_change() -> None:
    torch.manual_seed(0)
    model, batch = Averaged(), {"x": torch.randn(4, 4)}
    for p in model.averages[0].parameters():
        p.data.mul_(0.9)
    parallel = autoptd.parallelize(model, world=1, batch=4, inputs=batch, precision="fp32")
    parallel.train_step(batch)
    halve(model.averages[0])
    parallel.train_step(batch)


def test_a_parametrization_after_a_step_is_refused() -> None:
    model, batch = nn.Sequential(nn.Linear(4, 4)), {"input": torch.ones(4, 4)}
    parallel = autoptd.parallelize(model, world=1, batch=4, inputs=batch, loss=torch.mean, precision="fp32")
    parallel.train_step(batch)
    nn.utils.parametrizations.weight_norm(model[0])
    with pytest.raises(InputsError, match="is another object than when"):
        parallel.train_step(batch)


def harmless(model: Reading) -> None:
    """Change what neither forward nor the loss reads."""
    model.note(torch.ones(()))
    model.config.unread = 1
    SETTINGS["step"] += 1
    OPTIONS.step += 1
    globals()["power"] += 1
    model.to(torch.float64)


def test_what_no_code_reads_may_change() -> None:
    _, parallel, batch = given(harmless)
    train_in_lockstep(parallel, [batch])


@pytest.mark.parametrize("assign", [False, True])
def test_trained_weights_may_be_loaded_into_the_model(assign: bool) -> None:
    torch.manual_seed(0)
    model, batch = Annealed(), {"x": torch.randn(4, 4)}
    parallel = autoptd.parallelize(model, world=1, batch=4, inputs=batch, precision="fp32")
    for _ in range(3):
        parallel.train_step(batch)
        model.load_state_dict(parallel.state_dict(), assign=assign)
        model.eval()(batch["x"])
        model.train()
    with torch.no_grad():
        model.layers[2].weight.mul_(0.5)  # type: ignore[union-attr,operator]
    with pytest.raises(InputsError, match=f"layers.2.weight {VALUES}"):
        parallel.train_step(batch)


def _warned(act: Callable[[], object], text: str) -> bool:
    """Return whether an act warns with this text; all of its warnings point to this file."""
    with warnings.catch_warnings(record=True) as seen, torch.no_grad():
        warnings.simplefilter("always")
        act()
    assert all(each.filename == __file__ for each in seen)
    return any(text in str(each.message) for each in seen)


@pytest.mark.fault("a changed model")
def test_the_values_before_training_are_not_saved_unnoticed() -> None:
    torch.manual_seed(0)
    model, batch = Annealed(), {"x": torch.randn(4, 4)}
    parallel = autoptd.parallelize(model, world=1, batch=4, inputs=batch, precision="fp32")

    def warns(asked: nn.Module) -> bool:
        text = "values that training began with"
        whole = _warned(lambda: torch.save(asked, io.BytesIO()), text)
        assert whole == _warned(lambda: torch.save(asked.state_dict(), io.BytesIO()), text)
        return whole

    assert not warns(model)
    parallel.train_step(batch)
    assert warns(model) and not warns(copy.deepcopy(model))
    with pytest.warns(UserWarning, match="the model is saved with the values that training began with"):
        copied = pickle.loads(pickle.dumps(model))
    assert not warns(copied)
    trained = parallel.state_dict()
    model.load_state_dict(trained)
    assert not warns(model)
    parallel.train_step(batch)
    assert warns(model)


def test_a_trained_model_is_exported() -> None:
    model, batch = Annealed(), {"x": torch.randn(4, 4)}
    parallel = autoptd.parallelize(model, world=1, batch=4, inputs=batch, precision="fp32")
    parallel.train_step(batch)
    model.load_state_dict(parallel.state_dict())
    model.eval()
    found = torch.export.export(model, (batch["x"],)).module()(batch["x"])
    assert torch.equal(found, model(batch["x"]))
    assert torch.equal(torch.compile(model, backend="eager")(batch["x"]), found)


@pytest.mark.fault("a changed model")
def test_the_values_before_training_are_not_evaluated_unnoticed() -> None:
    torch.manual_seed(0)
    model, batch = Annealed(), {"x": torch.randn(4, 4)}
    parallel = autoptd.parallelize(model, world=1, batch=4, inputs=batch, precision="fp32")

    def warns(called: nn.Module) -> bool:
        return _warned(lambda: called(batch["x"]), "called with the values that training began with")

    assert not warns(model)
    parallel.train_step(batch)
    assert warns(model) and not warns(copy.deepcopy(model)) and not warns(pickle.loads(pickle.dumps(model)))
    parallel.eval_step(batch)
    model.load_state_dict(parallel.state_dict())
    assert not warns(model)
    other = autoptd.parallelize(model, world=1, batch=4, inputs=batch, precision="fp32")
    parallel.train_step(batch)  # beside another program of the same model
    other.train_step(batch)
    assert warns(model)


@pytest.mark.fault("a changed model")
def test_a_model_is_not_trained_from_its_old_values_unnoticed() -> None:
    torch.manual_seed(0)
    model, batch = Annealed(), {"x": torch.randn(4, 4)}

    def planned() -> Parallel:
        return autoptd.parallelize(model, world=1, batch=4, inputs=batch, precision="fp32")

    first = planned()
    first.train_step(batch)
    with pytest.warns(UserWarning, match="values that its training began with") as seen:
        planned()
    assert [each.filename for each in seen] == [__file__]
    model.load_state_dict(first.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planned()


def made(world: int) -> tuple[Annealed, Parallel, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, batch = Annealed().double(), {"x": torch.randn(4, 4, dtype=torch.float64)}
    fix, inputs = {"dp": world}, {"x": batch["x"][:2]}
    parallel = autoptd.parallelize(
        model, world=world, cluster="dgx-h100", batch=4, inputs=inputs, precision="fp64", fix=fix
    )
    return model, parallel, batch


@pytest.mark.fault("a changed model")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", CHANGES)
def test_a_step_with_a_changed_model_is_refused(name: str, world: int) -> None:
    model, parallel, batch = made(world)
    CHANGES[name](model)
    with pytest.raises(RuntimeFault, match=f"InputsError: {name} of the model was .* when it was planned") as caught:
        train_in_lockstep(parallel, [batch])
    assert "as an input of forward" in str(caught.value)


def test_a_model_that_is_as_it_was_planned_is_trained() -> None:
    model, parallel, batch = made(2)
    model.eval()
    model.train()
    model.note = object()  # type: ignore[assignment]
    train_in_lockstep(parallel, [batch])
