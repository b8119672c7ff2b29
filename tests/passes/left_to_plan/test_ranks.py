"""Questions of a model to torch.distributed: no group of ranks exists in a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import get_world_size, is_initialized

from autoptd.errors import UnsupportedOp
from autoptd.passes.left_to_plan.ranks import as_one_process
from autoptd.passes.trace.trace import trace

Body = Callable[[Tensor], Tensor]


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Yield a group of one rank, beside the group of all ranks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.new_group([0])
    finally:
        dist.destroy_process_group()


class Net(nn.Module):
    """A layer whose result `body` changes."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.layer, self.body = nn.Linear(4, 4), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.layer(x)).square().mean()


def ops_of(body: Body) -> list[str]:
    return [str(node.target) for node in trace(Net(body), {"x": torch.ones(2, 4)}).graph.graph.nodes]


def test_a_model_that_asks_first_is_traced_as_in_one_process(group: dist.ProcessGroup) -> None:
    def gathered(x: Tensor) -> Tensor:
        return x.exp() / dist.get_world_size() if is_initialized() else x

    assert ops_of(gathered) == ops_of(lambda x: x)
    assert dist.is_initialized()


def test_another_thread_has_its_group(group: dist.ProcessGroup) -> None:
    with as_one_process(), ThreadPoolExecutor() as threads:
        assert not dist.is_initialized() and threads.submit(dist.is_initialized).result()


def test_a_model_that_asks_for_ranks_is_refused(group: dist.ProcessGroup) -> None:
    with pytest.raises(UnsupportedOp, match="for its ranks") as caught:
        ops_of(lambda x: x / get_world_size())
    assert "is_initialized() is False" in caught.value.fix


def test_a_collective_of_the_model_is_refused(group: dist.ProcessGroup) -> None:
    def summed(x: Tensor) -> Tensor:
        mean = x.detach().mean()
        dist.all_reduce(mean, group=group)
        return x - mean

    with pytest.raises(UnsupportedOp, match=r"communicates between processes \(all_?reduce\)"):
        ops_of(summed)
