"""Variables that emitted functions delete: the bytes alive in a step are those that the plan counts."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.codegen import block, stage
from autoptd.codegen.freeing import Holding, with_deletes
from autoptd.passes.analysis.storages import StorageWatch
from autoptd.runtime.batch import share_of
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.testing.parity import differences, train_alone, train_in_lockstep


class Adapted(nn.Module):
    """A frozen product with a trained one of low rank beside it."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, out).requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(width, 4, bias=False), nn.Linear(4, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x)) * 2.0


class Layer(nn.Module):
    def __init__(self, width: int, adapted: bool) -> None:
        super().__init__()
        make: Callable[[int, int], nn.Module] = Adapted if adapted else nn.Linear
        self.norm_1, self.norm_2 = (nn.LayerNorm(width).requires_grad_(not adapted) for _ in range(2))
        self.qkv, self.up = make(width, 3 * width), make(width, 4 * width)
        self.out, self.down = nn.Linear(width, width), nn.Linear(4 * width, width)
        for other in (self.out, self.down):
            other.requires_grad_(not adapted)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm_1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Decoder(nn.Module):
    def __init__(self, adapted: bool, width: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, width).requires_grad_(not adapted)
        self.layers = nn.ModuleList(Layer(width, adapted) for _ in range(3))
        self.head = nn.Linear(width, 32, bias=False).requires_grad_(not adapted)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(16), nn.Linear(16, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.norm(self.second(F.relu(self.first(x)))))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


IDS = {"ids": torch.arange(512).view(4, 128) * 7 % 32, "labels": torch.arange(512).view(4, 128) * 5 % 32}
PICTURES = {"x": torch.linspace(-1, 1, 4 * 3 * 32 * 32).view(4, 3, 32, 32), "labels": torch.arange(4)}
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor], str]] = {
    "adapted": (lambda: Decoder(adapted=True), IDS, "none"),
    "adapted, recomputed": (lambda: Decoder(adapted=True), IDS, "full"),
    "pictures": (Pictures, PICTURES, "none"),
}


def planned(case: str, batch: dict[str, Tensor], precision: str = "bf16", **fix: Any) -> Any:
    torch.manual_seed(0)
    make, _, recompute = CASES[case]
    fix = {"micro": 4, "recompute": recompute, "kernels": "eager", "headroom": 0} | fix
    model = autoptd.trace(make(), inputs=batch, precision=precision)
    plan = autoptd.plan(model, world=1, cluster="dgx-h100", batch=4, fix=fix)
    return autoptd.parallelize(model, plan=plan, compile=False)


def held(parallel: Any, batch: dict[str, Tensor]) -> float:
    """Return the most bytes that ops of a step's passes made and that are alive, relative to those planned."""

    def body(communicators: Communicators) -> int:
        mine = copy.copy(parallel)
        mine.start(communicators, parallel.initial_values())
        share = share_of(parallel.layout.nest.flat(batch), parallel.layout.specs, 0, 1)
        with StorageWatch() as before:
            mine.train_step(share)
        state = {i for i, (storage, _, _) in before.made.items() if not storage.expired()}
        with StorageWatch() as watch:
            mine.train_step(share)
        return sum(shape.numel() * dtype.itemsize for shape, dtype in watch.fullest(state))

    (memory,) = parallel.plan.predicted.memory
    (found,) = run_lockstep(parallel.layout.mesh, body)
    return found / (memory["activations"] + memory["temporary"])


@pytest.mark.parametrize("case", CASES)
def test_no_more_is_alive_than_planned(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = CASES[case][1]
    parallel = planned(case, batch)
    assert "    del " in "".join(parallel.program.files.values())
    assert held(parallel, batch) < 1.03
    for module in (block, stage):
        monkeypatch.setattr(module, "free_early", lambda *given: list(given[4]))
    assert held(planned(case, batch), batch) > 1.15


def test_a_program_that_is_fullest_in_backward_deletes_nothing() -> None:
    model = autoptd.trace(Decoder(adapted=False), inputs=IDS, precision="bf16")
    fix = {"micro": 4, "recompute": "none", "kernels": "eager"}
    parallel = autoptd.parallelize(model, world=1, cluster="dgx-h100", batch=4, fix=fix)
    assert "    del " not in "".join(parallel.program.files.values())


@pytest.mark.parametrize("case", CASES)
def test_the_same_is_computed(case: str) -> None:
    make, batch, _ = CASES[case]
    batch = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
    parallel = planned(case, batch, "fp64")
    assert "    del " in "".join(parallel.program.files.values())
    torch.manual_seed(0)
    alone, found = train_alone(make().double(), [batch]), train_in_lockstep(parallel, [batch])
    assert max(differences(found.gradients, alone.gradients).values()) < 1e-10


def lines_of(text: str, holders: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return the lines that `with_deletes` adds to, given (line that begins so, variable, storage)."""
    lines = text.strip().splitlines()
    return with_deletes(lines, [Holding(_line(lines, start), name, storage) for start, name, storage in holders])


def _line(lines: Sequence[str], start: str) -> int:
    return next(i for i, line in enumerate(lines) if line.startswith(start))


def test_a_storage_is_freed_with_the_last_of_its_views() -> None:
    text = "a = f(x)\nv = a.view(2)\nb = g(a)\nc = h(v)\nd = c + b"
    found = lines_of(text, [("a =", "a", "a"), ("v =", "v", "a"), ("b =", "b", "b"), ("d =", "d", "d")])
    assert found == ["a = f(x)", "v = a.view(2)", "b = g(a)", "c = h(v)", "del a, v", "d = c + b"]


def test_a_variable_that_is_assigned_anew_is_not_deleted() -> None:
    text = "a = f(x)\na = g(a)\nfor block in self.blocks:\n    a = block(a)\nb = h(a)\nc = b + 1"
    found = lines_of(text, [("a = f", "a", "1"), ("a = g", "a", "2"), ("    a =", "a", "3")])
    assert found == [*text.splitlines()[:-1], "del a", "c = b + 1"]


def test_recomputed_functions_keep_what_they_read() -> None:
    text = "q = f(x)\nw = g(x)\n\ndef core(q):\n    return q * w\n\ny = recompute(core, q)\nz = y + 1\nlast = z * 2"
    found = lines_of(text, [("q =", "q", "q"), ("w =", "w", "w"), ("y =", "y", "y")])
    assert [line for line in found if line.startswith("del")] == ["del q", "del y"]
    assert found.index("del q") == found.index("y = recompute(core, q)") + 1
    assert ast.parse("\n".join(found))
