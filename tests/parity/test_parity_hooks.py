"""Forward hooks that are a part of forward: equal to one process up to rounding. Others are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from autoptd.errors import AutoptdError, UnsupportedOp
from autoptd.passes.custom_grad.hook_copies import copy_with_hooks
from autoptd.passes.trace import python_state
from tests.parity.parity_models import randomised
from tests.parity.test_parity_custom import batch, made, wrong

SEEN: list[Tensor] = []  # a global variable, which a copy of a model shares


class Student(nn.Module):
    """Layers whose hidden features are to be those of a frozen teacher, collected by hooks."""

    def __init__(self, register: Callable[[Student], object], tidy: Callable[[Student], object] | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 5)
        self.teacher = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.teacher.requires_grad_(False)
        self.features: Any = []
        self.tidy, self.read = tidy or Student.empty, Student.all
        register(self)

    def empty(self) -> None:
        self.features = []

    def all(self) -> list[Tensor]:
        return list(self.features.values()) if isinstance(self.features, dict) else self.features

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.tidy(self)
        h = self.first(x).tanh()
        with torch.no_grad():
            self.teacher(x)
        return F.cross_entropy(self.last(h), y) + sum(F.mse_loss(h, f) for f in self.read(self))


class Recorder:
    """A callable object with a list of its own."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.seen.append(out)


def by_lambda(model: Student) -> None:
    model.teacher[1].register_forward_hook(lambda module, args, out: model.features.append(out))


def by_every_layer(model: Student) -> None:
    """Collect from each layer, of which `read` uses the last."""
    for layer in model.teacher:
        layer.register_forward_hook(lambda module, args, out: model.features.append(out))
    model.read = lambda model: model.features[-1:]


def by_name(model: Student) -> None:
    model.features, model.tidy = {}, lambda model: None

    def save(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Tensor) -> None:
            model.features[name] = out

        return hook

    for name in ("1", "3"):
        model.teacher.get_submodule(name).register_forward_hook(save(name))


def by_pre_hook(model: Student) -> None:
    model.teacher[2].register_forward_pre_hook(lambda module, args: model.features.append(args[0]))


def by_keywords(model: Student) -> None:
    def hook(model: Student, module: nn.Module, args: Any, kwargs: Any, out: Tensor) -> None:
        model.features.append(out)

    model.teacher[3].register_forward_hook(partial(hook, model), with_kwargs=True)


def by_object(model: Student) -> None:
    recorder = Recorder()
    model.recorder, model.features = recorder, recorder.seen
    model.tidy = lambda model: model.features.clear()
    model.teacher[3].register_forward_hook(recorder)


def by_a_shared_list(model: Student) -> None:
    seen: list[Tensor] = []
    model.features, model.tidy = seen, lambda model: model.features.clear()
    model.teacher[3].register_forward_hook(lambda module, args, out: seen.append(out))


def that_writes(model: Student) -> None:
    """Collect a tensor, and double the layer's output in place."""

    def hook(module: nn.Module, args: Any, out: Tensor) -> None:
        model.features.append(out + 1)
        out.mul_(2)

    model.teacher[2].register_forward_hook(hook)
    by_lambda(model)


KEPT = [by_lambda, by_every_layer, by_name, by_pre_hook, by_keywords, by_object, by_a_shared_list, that_writes]


def student(register: Callable[[Student], object], tidy: Callable[[Student], object] | None = None) -> nn.Module:
    torch.manual_seed(0)
    return randomised(Student(register, tidy))


@pytest.mark.parametrize("register", KEPT, ids=lambda f: f.__name__)
def test_hooks_that_forward_reads_from(register: Callable[[Student], object]) -> None:
    model = student(register)
    assert not wrong(model, batch(), made(model, batch()))


def test_hooks_of_every_module() -> None:
    model = student(lambda model: None, lambda model: SEEN.clear())
    model.read = lambda model: SEEN
    handle = register_module_forward_hook(lambda module, *_: SEEN.extend(_[-1:] if type(module) is nn.Tanh else ()))
    try:
        assert not wrong(model, batch(), made(model, batch()))
    finally:
        handle.remove()


def test_a_copy_has_hooks_of_its_own() -> None:
    model = student(by_name)
    made = copy_with_hooks(model, {})
    made(**batch())
    assert not model.features and len(made.features) == 2
    assert not copy.deepcopy(model).features


# ---- refused ----


def looks(model: Student) -> None:
    norms: list[Tensor] = []
    model.teacher[1].register_forward_hook(lambda module, args, out: norms.append(out.norm()))


def looks_and_returns(model: Student) -> None:
    norms: list[Tensor] = []

    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        norms.append(out.norm())
        return out

    model.teacher[1].register_forward_hook(hook)


def counts(model: Student) -> None:
    calls = 0

    def hook(module: nn.Module, args: Any, out: Tensor) -> None:
        nonlocal calls
        calls += 1
        model.features.append(out)

    model.teacher[1].register_forward_hook(hook)


def counts_and_scales(model: Student) -> None:
    calls = {"number": 0}

    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        calls["number"] += 1
        return out * calls["number"]

    model.first.register_forward_hook(hook)


def keeps_the_first(model: Student) -> None:
    seen: list[Tensor] = []

    def hook(module: nn.Module, args: Any, out: Tensor) -> None:
        seen[1:] = [out]
        model.features.append(seen[0])

    model.teacher[1].register_forward_hook(hook)


REFUSED = {
    "looks": (looks, None, "only looks at tensors"),
    "looks_and_returns": (looks_and_returns, None, "only looks at tensors"),
    "counts": (counts, None, "keeps something from pass to pass"),
    "counts_and_scales": (counts_and_scales, None, "keeps something from pass to pass"),
    "keeps_the_first": (keeps_the_first, None, "keeps something from pass to pass"),
    "never_emptied": (by_lambda, lambda model: None, "keeps something from pass to pass"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    register, tidy, what = REFUSED[name]
    with pytest.raises(UnsupportedOp, match=what) as error:
        made(student(register, tidy), batch())
    assert any(place in error.value.where for place in ("teacher.1", "first", "features"))


def test_hooks_of_every_module_that_look_are_refused() -> None:
    handle = register_module_forward_hook(lambda module, args, out: None)
    try:
        with pytest.raises(UnsupportedOp, match="only looks at tensors") as error:
            made(student(by_lambda), batch())
    finally:
        handle.remove()
    assert "first: " in error.value.where and "last: " in error.value.where


# ---- planted ----


def planted(register: Callable[[Student], object]) -> list[str]:
    """Return the differences that parity finds, or the error of a program that fails."""
    model = student(register)
    try:
        return wrong(model, batch(), made(model, batch()))
    except AutoptdError as error:
        return [str(error)]


@pytest.mark.fault("a hook's state frozen")
def test_state_of_a_hook_that_is_not_compared_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second step scales by the number of calls that the trace has."""
    monkeypatch.setattr(python_state, "frozen", lambda value, known: None)
    monkeypatch.setattr(python_state, "equal_programs", lambda first, second: True)
    assert any(line.startswith("loss 1") for line in planted(counts_and_scales))
