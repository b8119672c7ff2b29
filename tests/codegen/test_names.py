"""Variables are named as in the user's code, and never clash."""

from __future__ import annotations

import ast
import builtins
import keyword
import random
import re

import pytest
import sympy
import torch
from torch import Tensor, nn

from autoptd.codegen.expressions import size_text
from autoptd.codegen.lines import wrapped
from autoptd.codegen.names import Names
from autoptd.codegen.stage import _loop_over
from tests.codegen.programs import folded_of, program_of

WIDTH = 8


class Odd(nn.Module):
    """Assignments of every form, to names that emitted code must not use unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kept = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        ops = self.a(x).sin()
        tp = ops.cos() + 1
        input = tp.exp()
        first, second = input.sin(), input.cos()
        self.latest = first * second
        total = self.latest.tanh()
        total += self.b(first)
        total *= 2.0
        very_long_line = total.sin() + second.cos()
        device, counts = very_long_line.chunk(2, -1)
        nn_ = torch.cat((device, counts), dim=-1)
        typed: Tensor = nn_.sigmoid()
        return (typed == typed).double().mean() * typed.square().mean()


def source_of(model: nn.Module) -> str:
    found = folded_of(model, {"x": torch.ones(4, 6, WIDTH)})
    program = program_of(found, "odd", tp=2, pp=1, length=6)
    return "\n".join(program.files.values())


def test_odd_assignments() -> None:
    source = source_of(Odd())
    tree = ast.parse(source)
    (forward,) = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "forward"]
    stored = {n.id for n in ast.walk(forward) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    clash = stored & ({"F", "torch", "nn", "ops", "self", "counts"} | set(dir(builtins)) | set(keyword.kwlist))
    assert not clash
    assert {"first", "second", "total", "very_long_line", "typed", "latest"} <= {
        n.rstrip("_0123456789") for n in stored
    }
    assert {"ops_2", "input_2", "device_2", "counts_2"} <= stored


def test_names_are_given_once_until_released() -> None:
    names = Names()
    assert [names.fresh("x"), names.fresh("x"), names.fresh("for"), names.fresh("list"), names.fresh("3d")] == [
        "x",
        "x_2",
        "for_2",
        "list_2",
        "x_3d",
    ]
    names.release("x")
    assert names.fresh("x") == "x"
    assert names.fresh("a.b-c") == "a_b_c" and names.fresh("") == "x_3"


@pytest.mark.parametrize(
    "numbers", [(0, 1, 2), (9, 10), (3,), ("00", "01"), ("09", "10"), ("0", "07"), ("٣", "٤"), (0, 2, 4)]
)
@pytest.mark.parametrize("path", ["h.{}.attn", "{}", "h2.{}.b{{i}}", 'a".{}', "h{}.x.{}"])
def test_a_loop_over_layers_gives_their_very_names(path: str, numbers: tuple[object, ...]) -> None:
    paths = [path.format(number, number) for number in numbers]
    found = _loop_over(paths)
    if found is None:
        assert path == "h{}.x.{}" or not all(isinstance(number, int) for number in numbers)
    else:
        assert [eval(found[0], {"i": i}) for i in eval(found[1])] == paths


@pytest.mark.parametrize("seed", range(40))
def test_sizes_are_written_as_they_are(seed: int) -> None:
    rng = random.Random(seed)
    b, s = sympy.symbols("b s", integer=True, positive=True)
    numbers = [b, s, *(sympy.Integer(rng.randint(1, 9)) for _ in range(3))]

    def grow(depth: int) -> sympy.Expr:
        if depth == 0:
            return rng.choice(numbers)
        x, y = grow(depth - 1), grow(depth - 1)
        k = rng.randint(2, 7)
        return rng.choice([x + y, x * y, x - y, sympy.floor(x / k), sympy.ceiling(x / k), sympy.floor((x + 1) / 2) * y])

    expr = grow(3)
    for _ in range(5):
        values = {"b": rng.randint(1, 50), "s": rng.randint(1, 50)}
        wanted = int(expr.subs({b: values["b"], s: values["s"]}))
        assert eval(size_text(expr), {}, dict(values)) == wanted, (expr, size_text(expr))


@pytest.mark.parametrize("expr", ["s/2", "b*s/8", "s/2 + 1", "b*(s/4)", "(s + 2)/6", "t/2 + 1/2", "b*t/2 + b/2 + s"])
def test_exact_quotients(expr: str) -> None:
    """The number t is odd: no half of it is a size."""
    b, s, t = sympy.symbols("b s t", integer=True, positive=True)
    found = eval(size_text(sympy.sympify(expr, {"b": b, "s": s, "t": t})), {}, {"b": 3, "s": 16, "t": 15})
    assert isinstance(found, int) and found == eval(expr, {}, {"b": 3, "s": 16, "t": 15})


def test_long_lines_are_broken_at_arguments() -> None:
    call = "    x = f(" + ", ".join(f"argument_{i}(1, [2, 3])" for i in range(8)) + ")  # S0 -> B: all-gather"
    text = wrapped(call)
    assert max(map(len, text.splitlines())) <= 120
    assert text.splitlines()[0] == "    x = f(  # S0 -> B: all-gather"
    assert ast.dump(ast.parse(text.replace("    x", "x", 1).replace("\n    )", "\n)"))) == ast.dump(
        ast.parse(call.strip())
    )
    assert wrapped("short(1)") == "short(1)"


class Unknown(nn.Module):
    """Ops without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.special.erfcx(self.a(x).tanh())
        d = torch.cdist(h, self.b(h)) + torch.fft.rfft(h.float(), dim=-1).abs().mean(-1, keepdim=True)
        return d.square().mean()


def test_emitted_calls_of_unknown_ops_are_spelled_in_full() -> None:
    source = source_of(Unknown())
    assert re.search(r"torch\.ops\.aten\.special_erfcx\.default\(", source)
    assert re.search(r"torch\.ops\.aten\.\w*fft\w*\.\w+\(", source)


class Views(nn.Module):
    """A view that is read some ops after it is made: in its segment, and in the next."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside = inside
        self.a, self.b = nn.Parameter(torch.eye(WIDTH)), nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        first = ((x * self.a).sin() if self.inside else x @ self.a).transpose(1, 2)
        second = (x * self.b).sin() if self.inside else x @ self.b
        return (first.unsqueeze(1) * second.sum((1, 2))[:, None, None, None]).mean()


@pytest.mark.parametrize("inside", [True, False])
def test_a_name_is_taken_until_a_view_written_into_another_line_is_read(inside: bool) -> None:
    found = folded_of(Views(inside), {"x": torch.ones(4, WIDTH, WIDTH)})
    for node in found.traced.graph.graph.nodes:  # like those of a kernel's fallback: all on one line of no module
        node.meta.pop("stack_trace", None)
    lines = "\n".join(program_of(found, "views", tp=1, pp=1, length=WIDTH).files.values()).splitlines()
    (reader,) = [i for i, line in enumerate(lines) if ".transpose(1, 2).unsqueeze(1)" in line]
    base = re.search(r"(\w+)\.transpose", lines[reader])
    assert base
    assigned = [line for line in lines[:reader] if line.strip().startswith(f"{base[1]} = ")]
    assert len(assigned) == 1, assigned


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)


class _Assigned(_Layer):
    def forward(self, state: Tensor) -> Tensor:
        state = state + self.inner(state).tanh()
        return state  # noqa: RET504


class _Returned(_Layer):
    def forward(self, state: Tensor) -> Tensor:
        return state + self.inner(state).tanh()


class Stack(nn.Module):
    """Equal layers before a head."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.first(x)
        for layer in self.layers:
            embedded = layer(embedded)
        return self.head(embedded).square().mean()


@pytest.mark.parametrize(("layer", "name"), [(_Assigned, "state"), (_Returned, "x")])
def test_a_loop_over_layers_hands_on_one_variable(layer: type[nn.Module], name: str) -> None:
    """Blocks are given and return what the model's layers call it; `x` where they have no name for it."""
    source = source_of(Stack(layer))
    assert f"def forward(self, {name}: Tensor) -> Tensor:" in source
    assert re.search(rf"for block in self\.blocks:\n +{name}(?:_2)? = block\({name}(?:_2)?\)", source)
    assert not re.search(r"\bp_\w+", source)
