"""Values that a loss reads from outside itself, in all that people keep them in: a step is refused once they change."""

from __future__ import annotations

import enum
import functools
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.errors import InputsError, UnsupportedOp

X = {"input": torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)}


class Level(enum.Enum):
    LOW, HIGH = 1.0, 2.0


@dataclass
class Options:
    rate: float = 1.0
    inner: Any = None
    unread: int = 0


@dataclass
class Schedule:
    """A weight that decays as its owner steps; the calls are only counted."""

    step: int = 0
    calls: int = 0
    held: dict[str, float] = field(default_factory=lambda: {"rate": 1.0})

    def value(self) -> float:
        return 0.5**self.step

    @property
    def now(self) -> float:
        return self.value()

    def __call__(self) -> float:
        return self.value()

    def __getitem__(self, name: str) -> float:
        return self.held[name]


def decorated(function: Callable[[Any], float]) -> Callable[[Any], float]:
    @functools.wraps(function)
    def inner(self: Any) -> float:
        return function(self)

    return inner


def unnamed(function: Callable[[Any], float]) -> Callable[[Any], float]:
    return lambda self: function(self)


class Decorated:
    """Methods within others."""

    def __init__(self) -> None:
        self.rate = 1.0

    @decorated
    def of_another(self) -> float:
        return self.rate

    @unnamed
    def of_a_lambda(self) -> float:
        return self.rate

    @functools.cache  # noqa: B019
    def kept(self) -> float:
        return self.rate

    def change(self) -> None:
        self.rate = 0.5
        Decorated.kept.cache_clear()


class Slots:
    __slots__ = ("__weakref__", "rate")

    def __init__(self) -> None:
        self.rate = 1.0


class Cyclic:
    def __init__(self) -> None:
        self.rate, self.me, self.same, self.all = 1.0, self, self.one, [self]

    def one(self) -> float:
        return float(len(self.all))


class Shared:
    rate: ClassVar[float] = 1.0


def rates(lr: float = 1.0) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr), lambda n: 0.5**n)


def defaulted(held: Any) -> Callable[[], float]:
    return lambda held=held: held[0]


def keyword(held: Any) -> Callable[[], float]:
    def rate(*, held: Any = held) -> float:
        return float(held[0])

    return rate


def attributed(held: list[Any]) -> Callable[[], float]:
    def rate() -> float:
        return float(rate.now)  # type: ignore[attr-defined]

    rate.now = 1.0  # type: ignore[attr-defined]
    held.append(rate)
    return rate


def held_weakly(held: Any) -> Callable[[], float]:
    known = weakref.ref(held)
    return lambda: float(known().rate)  # type: ignore[union-attr]


def in_context(held: Any) -> ContextVar[Any]:
    made = ContextVar[Any]("held")
    made.set(held)
    return made


def cached(held: Any) -> Callable[[], float]:
    @functools.cache
    def rate() -> float:
        return float(held[0])

    held.append(rate)
    return lambda: rate()


Case = tuple[Callable[[], Any], Callable[[Any], Callable[[], Any]], Callable[[Any], object]]
CASES: dict[str, Case] = {  # what is held, the weight that the loss reads of it, and a change
    "a dict in a dict": (lambda: {"a": {"b": 1.0}}, lambda h: lambda: h["a"]["b"], lambda h: h["a"].update(b=0.5)),
    "an object in one": (
        lambda: Options(inner=Options()),
        lambda h: lambda: h.inner.rate,
        lambda h: setattr(h.inner, "rate", 0.5),
    ),
    "another dict in its place": (
        lambda: {"a": {"b": 1.0}},
        lambda h: lambda: h["a"]["b"],
        lambda h: h.update(a={"b": 0.5}),
    ),
    "another object in its place": (
        lambda: Options(inner=Options()),
        lambda h: lambda: h.inner.rate,
        lambda h: setattr(h, "inner", Options(0.5)),
    ),
    "an object that holds itself": (Cyclic, lambda h: lambda: h.same() * h.me.rate, lambda h: setattr(h, "rate", 0.5)),
    "a pair in a list": (lambda: [("a", 1.0)], lambda h: lambda: h[0][1], lambda h: h.__setitem__(0, ("a", 0.5))),
    "one more of them": (lambda: [("a", 1.0)], lambda h: lambda: sum(x for _, x in h), lambda h: h.append(("b", 1.0))),
    "values of a dict": (lambda: {"a": 1.0}, lambda h: lambda: sum(h.values()), lambda h: h.update(a=0.5)),
    "one more value": (lambda: {"a": 1.0}, lambda h: lambda: sum(h.values()), lambda h: h.update(b=0.5)),
    "a set": (lambda: {1, 2}, lambda h: lambda: 2.0 if 1 in h else 1.0, lambda h: h.discard(1)),
    "a deque": (lambda: deque([1.0]), lambda h: lambda: h[-1], lambda h: h.append(0.5)),
    "a number of numpy": (lambda: {"a": np.float64(1)}, lambda h: lambda: h["a"], lambda h: h.update(a=np.float64(2))),
    "an array of numpy": (lambda: np.ones(3), lambda h: lambda: float(h[0]), lambda h: h.__setitem__(0, 0.5)),
    "an enum": (lambda: {"a": Level.LOW}, lambda h: lambda: h["a"].value, lambda h: h.update(a=Level.HIGH)),
    "a default": (lambda: [1.0], defaulted, lambda h: h.__setitem__(0, 0.5)),
    "a keyword": (lambda: [1.0], keyword, lambda h: h.__setitem__(0, 0.5)),
    "an attribute of a function": (list, attributed, lambda h: setattr(h[0], "now", 0.5)),
    "a method": (Schedule, lambda h: lambda: h.value(), lambda h: setattr(h, "step", 1)),
    "a bound method": (Schedule, lambda h: h.value, lambda h: setattr(h, "step", 1)),
    "a property": (Schedule, lambda h: lambda: h.now, lambda h: setattr(h, "step", 1)),
    "a call": (Schedule, lambda h: h, lambda h: setattr(h, "step", 1)),
    "an item": (Schedule, lambda h: lambda: h["rate"], lambda h: h.held.update(rate=0.5)),
    "a decorated method": (Decorated, lambda h: h.of_another, lambda h: h.change()),
    "one without its name": (Decorated, lambda h: h.of_a_lambda, lambda h: h.change()),
    "its call": (Decorated, lambda h: lambda: h.of_a_lambda(), lambda h: h.change()),
    "a method that keeps its results": (Decorated, lambda h: h.kept, lambda h: h.change()),
    "one that is called": (Decorated, lambda h: lambda: h.kept() * h.of_another(), lambda h: h.change()),
    "a slot": (Slots, lambda h: lambda: h.rate, lambda h: setattr(h, "rate", 0.5)),
    "a class": (lambda: Shared, lambda h: lambda: h.rate, lambda h: setattr(h, "rate", 0.5)),
    "a class of an object": (Shared, lambda h: lambda: h.rate, lambda h: setattr(type(h), "rate", 0.5)),
    "one that comes later": (SimpleNamespace, lambda h: lambda: getattr(h, "a", 1.0), lambda h: setattr(h, "a", 0.5)),
    "a list that comes later": (
        SimpleNamespace,
        lambda h: lambda: len(getattr(h, "more", [])) + 1.0,
        lambda h: setattr(h, "more", [object()]),
    ),
    "a key that comes later": (dict, lambda h: lambda: h.get("rate", 1.0), lambda h: h.update(rate=0.5)),
    "an object that is held weakly": (Slots, lambda h: held_weakly(h), lambda h: setattr(h, "rate", 0.5)),
    "a partial function": (
        lambda: SimpleNamespace(rate=1.0),
        lambda h: functools.partial(lambda h: h.rate, h),
        lambda h: setattr(h, "rate", 0.5),
    ),
    "a learning rate": (rates, lambda h: lambda: h.get_last_lr()[0], lambda h: (h.optimizer.step(), h.step())),
    "a context variable": (
        lambda: ContextVar("rate", default=1.0),
        lambda h: lambda: h.get(),
        lambda h: h.set(0.5),
    ),
    "one that is set later": (lambda: ContextVar("later"), lambda h: lambda: h.get(1.0), lambda h: h.set(0.5)),
    "an object in a context variable": (
        lambda: in_context(SimpleNamespace(rate=1.0)),
        lambda h: lambda: h.get().rate,
        lambda h: h.set(SimpleNamespace(rate=0.5)),
    ),
    "a thread's own": (threading.local, lambda h: lambda: getattr(h, "a", 1.0), lambda h: setattr(h, "a", 0.5)),
    "a function that keeps its results": (
        lambda: [1.0],
        cached,
        lambda h: (h.__setitem__(0, 0.5), h[1].cache_clear()),
    ),
    "the environment": (
        lambda: os.environ.setdefault("LOSS_WEIGHT", "1"),
        lambda h: lambda: float(os.environ["LOSS_WEIGHT"]),
        lambda h: os.environ.update(LOSS_WEIGHT="2"),
    ),
}


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shared, "rate", 1.0)
    monkeypatch.setenv("LOSS_WEIGHT", "1")


def made(rate: Callable[[], Any], model: nn.Module | None = None) -> autoptd.Parallel:
    def loss(out: Tensor) -> Tensor:
        return out.square().mean() * rate()

    model = nn.Linear(4, 4).double() if model is None else model
    return autoptd.parallelize(model, world=1, batch=4, inputs=X, loss=loss, precision="fp64")


@pytest.mark.fault("a changed model")
@pytest.mark.parametrize("name", CASES)
def test_a_change_is_refused(name: str) -> None:
    make, weight, change = CASES[name]
    held = make()
    parallel = made(weight(held))
    parallel.train_step(X)
    change(held)
    with pytest.raises(InputsError, match=r" of the model was .* now; the program would go on with"):
        parallel.train_step(X)


@pytest.mark.parametrize("name", CASES)
def test_a_metric_reads_the_values_of_now(name: str) -> None:
    make, weight, change = CASES[name]
    held, parallel = make(), made(lambda: 1.0)
    rate, found = weight(held), []

    def evaluated() -> float:
        metric = lambda out, batch: torch.ones_like(out[:, 0]) * rate()  # noqa: E731, one for each epoch
        return float(parallel.evaluate([X], {"rate": metric})["rate"])

    for _ in range(2):
        found += [evaluated(), evaluated()]
        assert found[-1] == float(rate())
        change(held)
    assert found[0] == found[1] and found[2] == found[3]
    assert len(parallel._evaluators) == len({*found})


@pytest.mark.parametrize(
    ("make", "weight", "change"),
    [
        (Schedule, lambda h: lambda: h.value(), lambda h: setattr(h, "calls", 3)),
        (Options, lambda h: lambda: h.rate, lambda h: setattr(h, "unread", 3)),
        (lambda: {"a": Options()}, lambda h: lambda: h["a"].rate, lambda h: h.update(a=Options(unread=3))),
        (lambda: {"rate": 1.0, "step": 0}, lambda h: lambda: h["rate"], lambda h: h.update(step=1, more=2)),
    ],
)
def test_what_is_not_read_may_change(make: Any, weight: Any, change: Any) -> None:
    held = make()
    parallel = made(weight(held))
    parallel.train_step(X)
    change(held)
    parallel.train_step(X)


def weighted(held: Any, x: Tensor) -> Tensor:
    return x * held["rate"]


Change = Callable[[nn.Linear, dict[str, float]], object]


def instance_forward(model: nn.Linear, held: dict[str, float]) -> None:
    forward = model.forward
    model.forward = lambda input: forward(input) * held["rate"]  # type: ignore[method-assign]


class Listed(nn.Linear):
    """A model that calls what it holds in a list, or by a key that is no constant."""

    key = "first"

    def forward(self, input: Tensor) -> Tensor:
        out = super().forward(input)
        for function in getattr(self, "functions", ()):
            out = function(out)
        table = vars(self).get("table", {"first": lambda x: x})
        return table[self.key](out)  # type: ignore[no-any-return]


IN_FORWARD: dict[str, Change] = {
    "a hook": lambda m, h: m.register_forward_hook(lambda module, given, out: out * h["rate"]),
    "a hook of a partial function": lambda m, h: m.register_forward_hook(
        functools.partial(lambda h, module, given, out: out * h["rate"], h)
    ),
    "a hook before": lambda m, h: m.register_forward_pre_hook(
        lambda module, args, given: (args, {"input": given["input"] * h["rate"]}), with_kwargs=True
    ),
    "a forward of its own": instance_forward,
    "a function in a list": lambda m, h: setattr(m, "functions", [lambda x: x * h["rate"]]),
    "a partial function": lambda m, h: setattr(m, "functions", [functools.partial(weighted, h)]),
    "a table": lambda m, h: setattr(m, "table", {"first": lambda x: x * h["rate"]}),
}


@pytest.mark.fault("a changed model")
@pytest.mark.parametrize("name", IN_FORWARD)
def test_what_hooks_and_functions_of_the_model_read(name: str) -> None:
    model, held = Listed(4, 4).double(), {"rate": 1.0}
    IN_FORWARD[name](model, held)
    parallel = made(lambda: 1.0, model)
    parallel.train_step(X)
    held["rate"] = 0.5
    with pytest.raises(InputsError, match=r"of the model was 1\.0 when it was planned and is 0\.5 now"):
        parallel.train_step(X)


def test_another_function_in_a_table_that_is_read_by_any_key() -> None:
    model = Listed(4, 4).double()
    vars(model)["table"] = {"first": lambda x: x, "second": lambda x: x * 0.5}
    parallel = made(lambda: 1.0, model)
    parallel.train_step(X)
    model.table["first"] = model.table["second"]
    with pytest.raises(InputsError, match="the program would go on with"):
        parallel.train_step(X)


class Scaled(nn.Linear):
    scale: ClassVar[float] = 1.0

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale


def test_an_attribute_of_the_models_class(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = made(lambda: 1.0, Scaled(4, 4).double())
    parallel.train_step(X)
    monkeypatch.setattr(Scaled, "scale", 0.5)
    with pytest.raises(InputsError, match=r"scale of the model was 1\.0"):
        parallel.train_step(X)


def test_a_teacher_that_only_the_loss_reads() -> None:
    """It is an attribute of the model, which forward does not name."""
    model, teacher = nn.Linear(4, 4).double(), nn.Linear(4, 4).double().requires_grad_(False)
    vars(model)["teacher"] = teacher
    parallel = made(lambda: (model.weight - model.teacher.weight).square().sum(), model)
    parallel.train_step(X)
    with torch.no_grad():
        teacher.weight.mul_(0.9)
    with pytest.raises(InputsError, match=r"teacher\.weight has other values"):
        parallel.train_step(X)


@pytest.mark.parametrize(
    "make", [lambda: iter([1.0, 0.5]), lambda: itertools.cycle([1.0, 0.5]), lambda: iter(range(9))]
)
def test_an_iterator_that_a_loss_takes_from(make: Callable[[], Any]) -> None:
    held = make()
    with pytest.raises(UnsupportedOp, match="forward changes held of function"):
        made(lambda: next(held))
