"""Runs of straight-line statements: what is split off, and that the function still computes the same."""

from __future__ import annotations

import ast
import textwrap
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from autoptd.runtime.straight_line import PART, inline, split

FORWARD = """
def forward(self, x, labels):
    b = x.size(0)
    x = F.gelu(x)
    other = torch.tanh(x) + b
    y = x * other
    for block in self.blocks:
        x = block(x)
    z = ops.outside(x)
    x = torch.exp(z)
    x, unused = x.chunk(2, 1)
    labels = labels + 1
    return (x * y[:, :2]).sum() + labels.sum()
"""


def compiles(call: ast.Call) -> bool:
    return ast.unparse(call.func) != "ops.outside"


def made(source: str, **names: Any) -> tuple[Any, list[str]]:
    """Return an object with the split forward and its parts as methods, and the parts' sources."""
    tree = ast.parse(textwrap.dedent(source))
    (function,) = tree.body
    assert isinstance(function, ast.FunctionDef)
    parts = split(function, compiles)
    tree.body += parts
    found: dict[str, Any] = {"F": F, "torch": torch, **names}
    exec(compile(ast.fix_missing_locations(tree), "split", "exec"), found)
    this = SimpleNamespace()
    for index in range(len(parts)):
        setattr(this, f"{PART}{index}", lambda *args, f=found[f"part_{index}"]: f(this, *args))
    this.forward = lambda *args: found["forward"](this, *args)
    return this, [ast.unparse(part) for part in parts]


def test_the_same_is_computed() -> None:
    names: dict[str, Any] = {"ops": SimpleNamespace(outside=lambda x: x + 3)}
    this, parts = made(FORWARD, **names)
    this.blocks = [torch.sin, torch.cos]
    x, labels = torch.randn(3, 4), torch.arange(3)
    plain: dict[str, Any] = {"F": F, "torch": torch, **names}
    exec(FORWARD, plain)
    assert torch.equal(this.forward(x, labels), plain["forward"](this, x, labels))
    assert len(parts) == 2


def test_names_go_in_and_out() -> None:
    """A part is given what it reads first, and returns what is read later, which `other` and `unused` are not."""
    _, (before, after) = made(FORWARD, ops=None)
    assert before.startswith("def part_0(self, x, b):") and before.endswith("return (x, y)")
    assert after.startswith("def part_1(self, z, labels, y):") and after.endswith("labels.sum()")


def test_deleted_variables_leave_their_parts_and_the_caller() -> None:
    source = """
    def forward(self, x, y):
        x = F.gelu(x)
        wide = torch.cat([x, y])
        del y
        z = torch.tanh(wide)
        del wide, x
        for block in self.blocks:
            z = block(z)
        x = torch.exp(z)
        return torch.sum(x)
    """
    this, (before, after) = made(source)
    this.blocks = [torch.sin]
    assert before.endswith("return (z,)") and "del" not in before + after
    plain: dict[str, Any] = {"F": F, "torch": torch}
    exec(textwrap.dedent(source), plain)
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    assert torch.equal(this.forward(x, y), plain["forward"](this, x, y))


def test_variables_of_a_part_alone_are_deleted_in_it_alone() -> None:
    """A statement that stays, without a call, comes before their `del`."""
    source = """
    def forward(self, x, y):
        x = torch.sin(x)
        turned = x.t()
        wide = turned.abs()
        for block in self.blocks:
            y = block(y)
        z = wide + y
        del x, turned, wide, y
        for block in self.blocks:
            z = block(z)
        return z
    """
    this, (part,) = made(source)
    this.blocks = [torch.cos]
    assert part.endswith("return (wide,)")
    plain: dict[str, Any] = {"F": F, "torch": torch}
    exec(textwrap.dedent(source), plain)
    x, y = torch.randn(3, 4), torch.randn(4, 3)
    assert torch.equal(this.forward(x, y), plain["forward"](this, x, y))
    (function,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(function, ast.FunctionDef)
    split(function, compiles)
    dels = [ast.unparse(statement) for statement in function.body if isinstance(statement, ast.Delete)]
    assert dels == ["del x", "del wide, y"]  # the argument, which the part replaces, right after it


@pytest.mark.parametrize(
    "statement",
    [
        "y = self.block(x)",
        "y = block(x)",
        "y = x.size(0)",
        "y = torch.arange(x.shape[0])",
        "y = x.new_zeros(x.shape)",
        "y = int(x.item())",
        "y = ops.outside(x)",
        "y = ep.gather(x, x)",
        "y = recompute(lambda: torch.sin(x))",
        "x.add_(1)",
        "y = ops.outside(torch.sin(x)) * 2",
    ],
)
def test_other_statements_stay(statement: str) -> None:
    _, parts = made(f"def forward(self, x):\n    {statement}\n    return x + y\n")
    assert not parts


def test_a_part_without_calls_stays() -> None:
    assert not made("def forward(self, x):\n    y = x + 1\n    return y\n")[1]


WHOLE = """
def forward(self, x):
    rows = x.size(0)
    one, two = self._parts
    x, y = one(x, rows)
    x = two(x, y)
    return x
"""
ONE = """
def forward(self, x, rows):
    scale = self.scale
    def core(y):
        return y * scale + rows
    x = core(x)
    return (x, later(core))
"""
TWO = """
def forward(self, x, core):
    scale = self.scale
    return scale * x + core(x)
"""


def test_methods_are_written_into_the_caller_with_variables_of_their_own() -> None:
    """A nested function of one keeps its variables where the other has such names: recomputation runs it later."""
    one, two = SimpleNamespace(scale=3.0), SimpleNamespace(scale=5.0)
    plain = {"later": lambda core: core}
    methods = {}
    for name, source, this in (("one", ONE, one), ("two", TWO, two)):
        found: dict[str, Any] = dict(plain)
        exec(source, found)
        methods[name] = partial(found["forward"], this)
    whole: dict[str, Any] = dict(plain)
    exec(WHOLE, whole)
    x = torch.randn(2, 3)
    wanted = whole["forward"](SimpleNamespace(_parts=(methods["one"], methods["two"])), x)

    trees = {name: ast.parse(source).body[0] for name, source in (("whole", WHOLE), ("one", ONE), ("two", TWO))}
    function = trees.pop("whole")
    inline(function, trees)  # type: ignore[arg-type]
    written: dict[str, Any] = dict(plain)
    exec(compile(ast.fix_missing_locations(ast.Module([function], [])), "inlined", "exec"), written)
    assert torch.equal(written["forward"](SimpleNamespace(_parts=(one, two)), x), wanted)
    assert "one(" not in ast.unparse(function).replace("_one(", "")
