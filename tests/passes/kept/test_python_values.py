"""Python values that a model's code keeps from pass to pass: refused where every pass changes them; else left alone."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import os
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autoptd.errors import UnsupportedOp
from autoptd.passes.kept.python_values import is_users
from autoptd.passes.trace.trace import trace

Scale = Callable[[Tensor], Tensor | float]

STEP = 0
STEPS = [0]
COUNT = itertools.count(1)
STATE = types.SimpleNamespace(step=0)
DRAWS = np.random.default_rng(0)
OLD_DRAWS = np.random.RandomState(0)
MEMORY: Tensor | None = None
MASKS: dict[int, Tensor] = {}
FEATURES: list[Tensor] = []
LENGTH = 0
TREE: dict[str, list[object]] = {"children": []}
TREE["children"].append({"parent": TREE})


@dataclasses.dataclass
class Progress:
    """Numbers that a model keeps in an object."""

    step: int = 0


class Scaled(nn.Module):
    """A layer whose result is multiplied by what a function returns; its attributes hold numbers."""

    calls = 0

    def __init__(self, scale: Scale | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.progress, self.counts, self.phase = Progress(), {"step": 0, "of": [0]}, "even"
        self.array = np.zeros(2)
        self.scale = scale

    def factor(self, x: Tensor) -> Tensor | float:
        assert self.scale is not None
        return self.scale(x)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.factor(x)).square().mean()


def of_global(x: Tensor) -> float:
    global STEP
    STEP += 1
    return 1 / STEP


def of_list(x: Tensor) -> float:
    STEPS[0] += 1
    return 1 / STEPS[0]


def of_iterator(x: Tensor) -> float:
    return 1 / next(COUNT)


def of_namespace(x: Tensor) -> float:
    STATE.step += 1
    return 1 / STATE.step


def of_generator(x: Tensor) -> float:
    return float(DRAWS.uniform(0.5, 1))


def numbers() -> Iterator[float]:
    n = 0
    while True:
        n += 1
        yield 1 / n


NUMBERS = numbers()


def of_python_generator(x: Tensor) -> float:
    return next(NUMBERS)


def of_random_state(x: Tensor) -> float:
    return float(OLD_DRAWS.uniform(0.5, 1))


def of_default(x: Tensor, counts: list[int] = [0]) -> float:  # noqa: B006
    counts[0] += 1
    return 1 / counts[0]


def of_attribute(x: Tensor) -> float:
    of_attribute.calls = getattr(of_attribute, "calls", 0) + 1  # type: ignore[attr-defined]
    return 1 / of_attribute.calls  # type: ignore[attr-defined,no-any-return]


of_attribute.calls = 0  # type: ignore[attr-defined]


def closure() -> Scale:
    step = 0

    def count(x: Tensor) -> float:
        nonlocal step
        step += 1
        return 1 / step

    return count


class OfClass(Scaled):
    def factor(self, x: Tensor) -> float:
        type(self).calls += 1
        return 1 / self.calls


class OfObject(Scaled):
    def factor(self, x: Tensor) -> float:
        self.progress.step += 1
        return 1 / self.progress.step


class OfNested(Scaled):
    def factor(self, x: Tensor) -> float:
        held = self.counts["of"]
        assert isinstance(held, list)
        held[0] += 1
        return 1 / held[0]


class OfArray(Scaled):
    def factor(self, x: Tensor) -> float:
        self.array[1] += 1
        return float(self.array[1])


class OfString(Scaled):
    def factor(self, x: Tensor) -> float:
        self.phase = "odd" if self.phase == "even" else "even"
        return 2.0 if self.phase == "even" else 1.0


class OfFunctions(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.now, self.next = (lambda: 2.0), (lambda: 1.0)

    def factor(self, x: Tensor) -> float:
        self.now, self.next = self.next, self.now
        return self.now()


class OfEnvironment(Scaled):
    def factor(self, x: Tensor) -> float:
        os.environ["STEP"] = str(int(os.environ.get("STEP", "0")) + 1)
        return 1 / int(os.environ["STEP"])


@pytest.mark.parametrize(
    ("make", "name"),
    [
        pytest.param(lambda: Scaled(of_global), "STEP of file", id="global"),
        pytest.param(lambda: Scaled(of_list), "STEPS of file", id="list"),
        pytest.param(lambda: Scaled(of_iterator), "COUNT of file", id="iterator"),
        pytest.param(lambda: Scaled(of_namespace), "step of object SimpleNamespace", id="namespace"),
        pytest.param(lambda: Scaled(of_generator), "DRAWS of file", id="NumPy's generator"),
        pytest.param(lambda: Scaled(of_random_state), "OLD_DRAWS of file", id="NumPy's old generator"),
        pytest.param(lambda: Scaled(of_python_generator), "NUMBERS of file", id="generator"),
        pytest.param(lambda: Scaled(of_default), "counts of function of_default", id="default argument"),
        pytest.param(lambda: Scaled(of_attribute), "calls of function of_attribute", id="function's attribute"),
        pytest.param(lambda: Scaled(closure()), "step of function closure.<locals>.count", id="closure"),
        pytest.param(lambda: Scaled(functools.partial(of_default, counts=[0])), "scale", id="partial"),
        pytest.param(OfClass, "calls of class", id="class"),
        pytest.param(OfObject, "step of object Progress", id="object"),
        pytest.param(OfNested, "counts", id="nested"),
        pytest.param(OfArray, "array", id="array"),
        pytest.param(OfString, "phase", id="string"),
        pytest.param(OfFunctions, "ne?(x|w|o)", id="functions"),
        pytest.param(OfEnvironment, "STEP of the environment", id="environment"),
    ],
)
def test_a_value_that_every_pass_changes_is_refused(
    make: Callable[[], nn.Module], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEP", "0")
    before = STEP, STEPS[0], Scaled.calls
    with pytest.raises(UnsupportedOp, match=f"changes {name}.*in every pass") as caught:
        trace(make(), {"x": torch.ones(2, 4)})
    assert re.match(name, caught.value.where)
    assert (STEP, STEPS[0], Scaled.calls) == before  # as the user had them


def of_memory(x: Tensor) -> Tensor | float:
    global MEMORY
    before, MEMORY = MEMORY, x.detach().mean()
    return 1.0 if before is None else before


def of_features(x: Tensor) -> Tensor:
    FEATURES.append(x.detach().mean())
    return torch.stack(FEATURES).sum()


def of_last_feature(x: Tensor) -> Tensor:
    FEATURES.append(x.detach().mean())
    return FEATURES.pop()


@pytest.mark.parametrize(("scale", "name"), [(of_memory, "MEMORY"), (of_features, "FEATURES")])
def test_a_tensor_of_the_pass_before_in_a_global_is_refused(scale: Scale, name: str) -> None:
    with pytest.raises(UnsupportedOp, match=f"reads {name} of file .* of the pass before"):
        trace(Scaled(scale), {"x": torch.ones(2, 4)})
    assert MEMORY is None and not FEATURES


class Warm(Scaled):
    """A model that does something else in its first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.started = nn.BatchNorm1d(4), False

    def factor(self, x: Tensor) -> Tensor | float:
        started, self.started = self.started, True
        return 1.0 if started else 0.5


class Frozen(Warm):
    def factor(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        self.norm.eval()
        return y


class FrozenAtOnce(Warm):
    def factor(self, x: Tensor) -> Tensor:
        self.norm.eval()
        return self.norm(x)


class CountingLoss(nn.Module):
    """A loss without parameters that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, y: Tensor) -> Tensor:
        self.calls += 1
        return y / self.calls


class PlainLoss:
    """A loss that is no module."""

    calls = 0

    def __call__(self, y: Tensor) -> Tensor:
        self.calls += 1
        return y / self.calls


@pytest.mark.parametrize(("kind", "name"), [(Warm, "started"), (Frozen, "norm.training")])
def test_a_second_pass_that_is_not_as_the_first_is_refused(kind: type[nn.Module], name: str) -> None:
    with pytest.raises(UnsupportedOp, match=f"else in its second pass than in its first, which changes .*{name}"):
        trace(kind(), {"x": torch.ones(2, 4)})


def test_what_the_first_pass_sets_before_it_computes_is_allowed() -> None:
    trace(FrozenAtOnce(), {"x": torch.ones(2, 4)})


@pytest.mark.parametrize("loss", [CountingLoss(), PlainLoss()], ids=["module", "object"])
def test_a_loss_that_every_call_changes_is_refused(loss: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(UnsupportedOp, match=r"changes (loss|calls of object PlainLoss).*in every pass"):
        trace(Scaled(lambda x: 1.0), {"x": torch.ones(2, 4)}, loss=loss)


def of_all(out: Tensor) -> Tensor:
    return out.mean() * of_global(out)


class Score:
    """A loss without attributes."""

    def __call__(self, out: Tensor) -> Tensor:
        return of_all(out)


def executed(text: str, **names: object) -> Any:
    """Return what the name `made` is after a run of code that is of no file."""
    found: dict[str, Any] = names
    exec(text, found)
    return found["made"]


COUNTS = """
def counts(out):
    global step
    step += 1
    return out.mean() * step
"""


def without_a_file() -> Callable[[Tensor], Tensor]:
    found: Callable[[Tensor], Tensor] = executed(f"{COUNTS}made = counts", step=0)
    return found


def that_calls_a_file() -> Callable[[Tensor], Tensor]:
    found: Callable[[Tensor], Tensor] = executed("def made(out): return out.mean() * scale(out)", scale=of_global)
    return found


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        pytest.param(of_all, "STEP of file ", id="function"),
        pytest.param(Score(), "STEP of file ", id="object"),
        pytest.param(without_a_file(), "step of globals of counts", id="exec"),
        pytest.param(that_calls_a_file(), "STEP of file ", id="exec and file"),
    ],
)
def test_globals_of_a_loss_are_looked_at_where_torch_has_the_model(loss: Callable[[Tensor], Tensor], name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(UnsupportedOp, match=f"forward changes {name}"):
        trace(model, {"input": torch.ones(2, 4)}, loss=loss)


def test_globals_of_a_class_without_a_file_are_looked_at() -> None:
    text = f"{COUNTS}class made(nn.Linear):\n    def forward(self, x): return counts(super().forward(x))"
    with pytest.raises(UnsupportedOp, match="forward changes step of globals of "):
        trace(executed(text, step=0, nn=nn)(4, 4), {"x": torch.ones(2, 4)})


def of_masks(x: Tensor) -> Tensor:
    if x.shape[1] not in MASKS:
        MASKS[x.shape[1]] = torch.ones(x.shape[1]).cumsum(0)
    return MASKS[x.shape[1]]


@functools.lru_cache
def made_once(n: int) -> Tensor:
    return torch.ones(n).cumsum(0)


def of_length(x: Tensor) -> float:
    global LENGTH
    LENGTH = max(LENGTH, 4)
    return float(LENGTH)


@pytest.fixture
def eager() -> Iterator[Tensor]:
    """Yield an input, for a model to run on in one process after its trace."""
    global LENGTH
    made_once.cache_clear()
    MASKS.clear()
    LENGTH = 0
    yield torch.ones(2, 4)
    made_once.cache_clear()
    MASKS.clear()


@pytest.mark.parametrize(
    "scale",
    [of_masks, lambda x: made_once(4), of_length, of_last_feature],
    ids=["dict", "lru_cache", "number", "popped"],
)
def test_a_cache_is_allowed_and_holds_nothing_of_the_trace(scale: Scale, eager: Tensor) -> None:
    model = Scaled(scale)
    trace(model, {"x": eager})
    assert not MASKS and made_once.cache_info().currsize == 0 and LENGTH == 0
    assert type(model(eager)) is Tensor


def test_containers_that_hold_themselves_are_looked_at_once() -> None:
    trace(Scaled(lambda x: 1.0 if TREE["children"] else 0.0), {"x": torch.ones(2, 4)})


class Uncounted(tuple[int, ...]):
    """A tuple whose length is another, or none, such as e3nn's of irreducible representations."""

    def __len__(self) -> int:
        raise NotImplementedError


def test_classes_may_refuse_to_be_counted() -> None:
    kinds = Uncounted((1, 2))
    trace(Scaled(lambda x: kinds[1] / 2), {"x": torch.ones(2, 4)})


def test_libraries_of_another_environment_are_not_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as those on PYTHONPATH, which hold any number of caches."""
    for name in ("written", "installed"):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.syspath_prepend(folder)
        (folder / f"{name}_elsewhere.py").touch()
        importlib.import_module(f"{name}_elsewhere")
    (tmp_path / "installed" / "it-1.0.dist-info").mkdir()
    assert is_users("written_elsewhere") and not is_users("installed_elsewhere")
