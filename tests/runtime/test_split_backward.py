"""B and W of modules of images in both memory formats give the gradients of a whole backward pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from autoptd.runtime.split_backward import backward_inputs

MODULES = {
    "group norm": nn.GroupNorm(4, 16),
    "batch norm": nn.BatchNorm2d(16),
    "instance norm": nn.InstanceNorm2d(16, affine=True),
    "layer norm": nn.LayerNorm(4),
    "convolution": nn.Conv2d(16, 8, 3),
    "depthwise": nn.Conv2d(16, 16, 3, groups=16),
    "transposed": nn.ConvTranspose2d(16, 8, 3),
    "prelu": nn.PReLU(16),
}


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["plain", "last"])
@pytest.mark.parametrize("name", MODULES)
def test_both_parts_are_a_whole_pass(name: str, memory_format: torch.memory_format) -> None:
    """Torch 2.13 ends with a segmentation fault where W computes a group norm's gradients of channels-last tensors."""
    module = MODULES[name].double()
    x = torch.randn(2, 16, 4, 4, dtype=torch.float64).to(memory_format=memory_format)

    def trained(split: bool) -> dict[str, Tensor]:
        module.zero_grad(set_to_none=True)
        received = x.clone().requires_grad_()
        out = module(received.sin())
        gradient = out.detach().cos()
        if split:
            backward_inputs([(get_gradient_edge(out), gradient)], [received])()
        else:
            out.backward(gradient)
        assert received.grad is not None
        return {"x": received.grad} | {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}

    whole, parts = trained(split=False), trained(split=True)
    assert parts.keys() == whole.keys() and len(whole) == 1 + len(list(module.parameters()))
    for part, grad in whole.items():
        torch.testing.assert_close(parts[part], grad, rtol=1e-12, atol=1e-12)


def test_an_output_that_nothing_received_leads_to_has_its_gradients() -> None:
    """The second of two towers may begin within a stage."""
    first, table, second = nn.Linear(4, 3).double(), nn.Embedding(5, 4).double(), nn.Linear(4, 2).double()
    parts = nn.ModuleList([first, table, second])
    x = torch.randn(6, 4, dtype=torch.float64)

    def trained(split: bool) -> dict[str, Tensor]:
        parts.zero_grad(set_to_none=True)
        received = x.clone().requires_grad_()
        begun = torch.tanh(second(table(torch.arange(6) % 5)))
        outs = [first(received), begun, begun]  # one of them sent twice
        edges, gradients = [get_gradient_edge(out) for out in outs], [out.detach().cos() for out in outs]
        if split:
            backward_inputs(list(zip(edges, gradients, strict=True)), [received])()
        else:
            torch.autograd.backward(edges, gradients)
        assert received.grad is not None
        return {"x": received.grad} | {n: p.grad.clone() for n, p in parts.named_parameters() if p.grad is not None}

    whole, split = trained(split=False), trained(split=True)
    assert split.keys() == whole.keys() and len(whole) == 6
    for part, grad in whole.items():
        torch.testing.assert_close(split[part], grad, rtol=1e-12, atol=1e-12)
