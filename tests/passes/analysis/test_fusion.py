"""The ops that share a kernel, and the bytes they move, by hand on a small block."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from autoptd.passes.analysis.fusion import MemoryTraffic, traffic
from autoptd.passes.graph import op_call
from autoptd.passes.normalise.normalise import normalise
from autoptd.passes.trace.trace import trace

ROWS, WIDTH, WIDE = 4, 8, 16
X, H = ROWS * WIDTH, ROWS * WIDE  # elements of the narrow and the wide tensors


class Block(nn.Module):
    """Norm, product, two pointwise ops, product, a residual and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDE, bias=False), nn.Linear(WIDE, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(F.gelu(self.up(self.norm(x * 2.0))) * 3.0) + x).square().sum()


@pytest.fixture(scope="module")
def nodes() -> list[fx.Node]:
    with torch.device("meta"):
        model, x = Block(), torch.empty(ROWS, WIDTH)
    found = normalise(trace(model, {"x": x}, precision="fp32")).graph.graph.nodes
    return [n for n in found if n.op == "call_function"]


def moved(nodes: list[fx.Node], kernels: str) -> dict[str, MemoryTraffic]:
    return {n.name: t for n, t in traffic(nodes, [nodes[-1]], kernels).items()}


def elements(nodes: list[fx.Node], found: dict[str, MemoryTraffic], name: str) -> int:
    """Return the elements that an op reads and writes in its forward pass."""
    call = op_call(next(n for n in nodes if n.name == name))

    def count(shape: tuple[object, ...]) -> int:
        return int(torch.Size([ROWS if not isinstance(n, int) else n for n in shape]).numel())

    reads = sum(count(call.operands[i].shape) for i in found[name].reads)
    return reads + sum(count(call.outputs[i].shape) for i in found[name].writes)


EAGER = {"mul": 2 * X, "layer_norm": 2 * X + 2 * WIDTH, "gelu": 2 * H, "mul_1": 2 * H, "add": 3 * X, "square": 2 * X}
FUSED = {"mul": X, "layer_norm": X + 2 * WIDTH, "gelu": H, "mul_1": H, "add": 2 * X, "square": 0}


@pytest.mark.parametrize(("kernels", "by_hand"), [("eager", EAGER), ("fused", FUSED), ("compiled", FUSED)])
def test_elements_moved_by_hand(nodes: list[fx.Node], kernels: str, by_hand: dict[str, int]) -> None:
    found = moved(nodes, kernels)
    assert {name: elements(nodes, found, name) for name in by_hand} == by_hand
    products = X + WIDTH * WIDE + H, H + WIDTH * WIDE + X  # a product reads and writes everything
    assert (elements(nodes, found, "linear"), elements(nodes, found, "linear_1")) == products


def test_a_group_is_one_launch(nodes: list[fx.Node]) -> None:
    eager, fused = moved(nodes, "eager"), moved(nodes, "fused")
    assert all(t.launches == 1 for t in eager.values())
    launched = {name for name, t in fused.items() if t.launches}
    assert {"mul", "linear", "gelu", "linear_1", "add"} <= launched
    assert not launched & {"layer_norm", "mul_1", "square"}


def test_only_a_norms_kernel_needs_rows(nodes: list[fx.Node]) -> None:
    fused = moved(nodes, "fused")
    assert fused["layer_norm"].rows and fused["mul"].rows and not fused["gelu"].rows and not fused["linear"].rows


def test_the_backward_pass_reads_what_is_kept(nodes: list[fx.Node]) -> None:
    eager, fused = moved(nodes, "eager"), moved(nodes, "fused")
    assert eager["gelu"].kept_operands == fused["gelu"].kept_operands == (0,)  # the product's result
    assert eager["gelu"].gradients_read == (0,) and fused["gelu"].gradients_read == ()  # within the kernel
    assert fused["gelu"].gradients_written == (0,) and fused["mul_1"].gradients_written == ()
    assert eager["mul"].backward_launches == 0, "nothing before the input is trained"


class Fork(nn.Module):
    """Two products read one tensor: their gradients are added."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.left, self.right = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return (self.left(h) * self.right(h)).sum()


def test_a_second_gradient_of_a_tensor_is_added() -> None:
    with torch.device("meta"):
        model, x = Fork(), torch.empty(ROWS, WIDTH)
    found = normalise(trace(model, {"x": x}, precision="fp32")).graph.graph.nodes
    ops = [n for n in found if n.op == "call_function"]
    sums = {name: dict(t.sums) for name, t in moved(ops, "eager").items() if t.sums}
    assert sums == {"linear_1": {0: 1}}


def test_unknown_kernels_are_refused(nodes: list[fx.Node]) -> None:
    with pytest.raises(ValueError, match="unknown kernels 'quick'"):
        traffic(nodes, [], "quick")


class Squared(nn.Module):
    """Squared relu: autograd would save its intermediate twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDE, bias=False), nn.Linear(WIDE, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(x)).sum()

    def act(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.up(x)).square()


class Gated(Squared):
    """SwiGLU: autograd saves the two products, made outside the kernel, and the result of silu."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDE, bias=False)

    def act(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.gate(x)) * self.up(x)


@pytest.mark.parametrize(
    ("model", "kernels", "read_again"),
    [
        # each kernel reads what it saves: relu its result, the square its operand, which is the same tensor
        (Squared, "eager", {"relu": ((), (0,)), "square": ((0,), ())}),
        # one kernel: everything else is recomputed from its inputs
        (Squared, "fused", {"relu": ((0,), ()), "square": ((), ())}),
        (Squared, "compiled", {"relu": ((0,), ()), "square": ((), ())}),
        (Gated, "eager", {"silu": ((0,), ()), "mul": ((0, 1), ())}),
        (Gated, "fused", {"silu": ((0,), ()), "mul": ((1,), ())}),
        (Gated, "compiled", {"silu": ((0,), ()), "mul": ((1,), ())}),
    ],
)
def test_a_kernel_computes_again_from_what_it_reads_once(
    model: type[nn.Module], kernels: str, read_again: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    with torch.device("meta"):
        made, x = model(), torch.empty(ROWS, WIDTH)
    found = normalise(trace(made, {"x": x}, precision="fp32")).graph.graph.nodes
    of = moved([n for n in found if n.op == "call_function"], kernels)
    assert {name: (of[name].kept_operands, of[name].kept_outputs) for name in read_again} == read_again
    assert not any(of[name].kept_extra for name in read_again)
