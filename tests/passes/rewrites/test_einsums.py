"""Every einsum is a product of two, or a permutation and a sum; the graph still computes what the model does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.passes.interpret import assert_unchanged
from tests.passes.normalise.test_normalise import LENGTH, batch, model_of

Body = Callable[[nn.Module, Tensor], Tensor]


def patches(equation: str) -> Body:
    return lambda self, h: torch.einsum(equation, self.second(h).reshape(-1, LENGTH, 2, 4))


def outer(equation: str) -> Body:
    return lambda self, h: torch.einsum(equation, h, self.second.weight, self.table[:1], self.first.weight)


BODIES: dict[str, tuple[Body, str]] = {
    "permuted": (patches("bspc->bcps"), "permute"),
    "summed": (patches("bspc->cb"), "sum permute"),
    "whole sum": (patches("bspc->"), "sum"),
    "implicit": (patches("dcba"), "permute"),
    "dots": (patches("...pc -> ...cp"), "permute"),
    "implicit dots": (patches("b...c"), "permute"),
    "four": (outer("bsi,io,sj,jo->bso"), "einsum"),
    "four with dots": (outer("...i,io,...j,jo"), "einsum"),
    "one": (lambda self, h: torch.einsum("bsi,oi->bso", h, self.second.weight), "einsum"),
}


@pytest.mark.parametrize("name", BODIES)
def test_value_and_gradient_stay(name: str) -> None:
    body, ops = BODIES[name]
    traced = assert_unchanged(model_of(body), batch())
    found = [n for n in traced.graph.graph.nodes if n.op == "call_function"]
    assert set(ops.split()) <= {str(n.target).split(".")[1] for n in found if str(n.target).startswith("aten")}
    assert all(len(n.args[1]) == 2 for n in found if n.target is torch.ops.aten.einsum.default)
