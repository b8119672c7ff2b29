"""Calls of torch.utils.checkpoint: traced as if without where nothing but memory differs, else refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

from autoptd.errors import UnsupportedOp
from autoptd.passes.trace.trace import trace

Body = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """A layer that `body` runs, between two others; `count` is a buffer."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.first, self.layer, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.norm, self.body = nn.BatchNorm1d(4), body
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self, self.first(x))).square().mean()

    def normed(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)).relu()

    def counted(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return self.layer(x).relu()

    def recounted(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return self.layer(x).relu()

    def written(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y[:, 0] = y[:, 1]
        return y.mul_(2).relu() + self.count


def without_gradients(net: Net, x: Tensor) -> Tensor:

    with torch.no_grad():
        return checkpoint(net.layer, x, use_reentrant=True)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    ("method", "module"), [("normed", "norm"), ("counted", "the model"), ("recounted", "the model")]
)
def test_a_checkpoint_around_an_updated_buffer_is_refused(method: str, module: str, reentrant: bool) -> None:
    net = Net(lambda net, x: checkpoint(getattr(net, method), x, use_reentrant=reentrant))
    with pytest.raises(UnsupportedOp, match=f"updates buffers of {module} twice") as caught:
        trace(net, {"x": torch.ones(2, 4)})
    assert "use_reentrant=reentrant" in caught.value.where


def test_a_reentrant_checkpoint_that_loses_gradients_is_refused() -> None:
    net = Net(lambda net, x: x + checkpoint(lambda y: net.layer(y), torch.ones(4), use_reentrant=True))
    with pytest.raises(UnsupportedOp, match="gives no gradient to the parameters of what it runs"):
        trace(net, {"x": torch.ones(2, 4)})


@pytest.mark.parametrize(
    "body",
    [
        lambda net, x: checkpoint(net.written, x, use_reentrant=True),
        lambda net, x: checkpoint(net.written, x, use_reentrant=False),
        lambda net, x: checkpoint_sequential([net.layer, nn.ReLU()], 2, x, use_reentrant=False),
        lambda net, x: checkpoint(
            net.layer,
            x,
            use_reentrant=False,
            context_fn=partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]),
        ),
        lambda net, x: x + checkpoint(torch.sin, torch.ones(4), use_reentrant=True),
        without_gradients,
    ],
    ids=["reentrant", "not reentrant", "sequential", "selective", "without parameters", "without gradients"],
)
def test_other_checkpoints_are_as_nothing(body: Body) -> None:
    trace(Net(body), {"x": torch.ones(2, 4)})


def test_a_buffer_updated_outside_of_a_checkpoint_is_allowed() -> None:
    net = Net(lambda net, x: net.normed(checkpoint(net.layer, net.counted(x), use_reentrant=False)))
    trace(net, {"x": torch.ones(2, 4)})
