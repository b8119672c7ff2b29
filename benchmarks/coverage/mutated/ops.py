"""Ops that keep a tensor's shape [b, s, d], put between the layers of a model.

Most keep samples apart. `MIXING` ones do not: they must be refused, or computed over the whole batch. `PYTHON` ones
read numbers from tensors, loop over samples or branch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.coverage.mutated.draw import Draw

Op = Callable[[Tensor], Tensor]


class Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, op: Op) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x)


def shifted_windows(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 1, 1)).unfold(1, 3, 1).mean(-1)


def interleaved(x: Tensor) -> Tensor:
    return torch.stack((x, x.roll(1, 1)), 2).flatten(1, 2)[:, ::2] + x


def halves_swapped(x: Tensor) -> Tensor:
    n = x.size(-1) // 2
    return torch.cat((x[..., n:], x[..., :n]), -1)


def chunks_reversed(x: Tensor) -> Tensor:
    return torch.cat(x.chunk(3, -1)[::-1], -1)


def best_only(x: Tensor) -> Tensor:
    values, where = x.topk(max(1, x.size(-1) // 2), -1)
    return torch.zeros_like(x).scatter(-1, where, values)


def best_tokens(x: Tensor) -> Tensor:
    where = x.norm(dim=-1).topk(max(1, x.size(1) // 2), 1)[1][..., None].expand(-1, -1, x.size(-1))
    return x.scatter_add(1, where, x.gather(1, where) * 0.5)


def written_back(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1:] += 0.5 * x[:, :-1]
    y[..., ::2] *= 2
    return y


def filled(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y[:, :, 0] = x[:, :, -1]
    y[:, :, 1:] = x[:, :, :-1].tanh()
    return y


def chain_in_place(x: Tensor) -> Tensor:
    return (x + 0).mul_(0.5).add_(1).clamp_(-2, 2).transpose_(1, 2).transpose_(1, 2)


def masked_in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y[y < -1] = -1.0
    return y


def turned(x: Tensor) -> Tensor:
    """Rotate pairs of features by complex numbers."""
    even = x.size(-1) // 2 * 2
    pairs = torch.view_as_complex(x[..., :even].reshape(*x.shape[:-1], -1, 2).contiguous())
    angle = torch.arange(x.size(1), dtype=x.dtype)[:, None] * torch.linspace(1, 0.1, even // 2, dtype=x.dtype)
    return torch.cat(
        (torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2), x[..., even:]), -1
    )


def filtered(x: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x, dim=1) * 0.9, n=x.size(1), dim=1)


def bent(x: Tensor) -> Tensor:
    s, d = x.shape[1:]
    return x.reshape(-1, d, s).tanh().reshape(x.shape)


def straight_through(x: Tensor) -> Tensor:
    return x + (x.sign() - x).detach()


def no_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-3)
    return x / scale


def rounded(x: Tensor) -> Tensor:
    scale = x.detach().abs().amax((1, 2), keepdim=True) / 7 + 1e-6
    return (x / scale + ((x / scale).round() - x / scale).detach()) * scale


def in_float32(x: Tensor) -> Tensor:
    return x.float().softmax(-1).to(x.dtype) + x


def by_bucket(x: Tensor) -> Tensor:
    kind = torch.bucketize(x.mean(-1), torch.tensor([-0.5, 0.0, 0.5], dtype=x.dtype))
    return x + F.one_hot(kind, 4).to(x.dtype).sum(-1, keepdim=True) * kind[..., None]


def by_einsum(x: Tensor) -> Tensor:
    return torch.einsum("bsd,btd,bte->bse", x, x, x) / x.size(1) / x.size(2)


def by_bmm(x: Tensor) -> Tensor:
    return torch.bmm(torch.softmax(torch.bmm(x, x.mT) / math.sqrt(x.size(-1)), 1), x)


def by_distance(x: Tensor) -> Tensor:
    return (-torch.cdist(x.contiguous(), x.detach() + 0.1)).softmax(-1) @ x


def rows_stacked(x: Tensor) -> Tensor:
    return torch.stack([t.tanh() for t in x.unbind(1)], 1)


def by_vmap(x: Tensor) -> Tensor:
    return torch.vmap(lambda row: row - row.mean(0))(x)


def by_index_copy(x: Tensor) -> Tensor:
    where = torch.arange(x.size(1) - 1, -1, -1)
    return torch.zeros_like(x).index_copy(1, where, x) + x.index_select(1, where)


def by_put(x: Tensor) -> Tensor:
    rows = torch.arange(x.size(0))[:, None]
    columns = x.sum(-1).argsort(1)
    y = torch.zeros_like(x)
    y[rows, columns] = x
    return y


def pooled(x: Tensor) -> Tensor:
    return F.avg_pool1d(x.mT, 3, 1, 1).mT + F.max_pool1d(x.mT, 3, 1, 1).mT


def stretched(x: Tensor) -> Tensor:
    return F.interpolate(x.mT, scale_factor=2.0, mode="linear").mT[:, ::2]


KEEPING: Mapping[str, Op] = {
    "relu in place": lambda x: F.relu(x + 0, inplace=True),
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "mish": F.mish,
    "hardswish": F.hardswish,
    "prelu": lambda x: F.prelu(x, torch.tensor([0.2], dtype=x.dtype)),
    "glu": lambda x: F.glu(torch.cat((x, x), -1), -1),
    "squared relu": lambda x: x.relu().square(),
    "sine": lambda x: x + (3 * x).sin().square() / 3,
    "softmax features": lambda x: x.softmax(-1),
    "softmax tokens": lambda x: x.softmax(1),
    "log softmax tokens": lambda x: x.log_softmax(1),
    "cumsum tokens": lambda x: x.cumsum(1) / 3,
    "cumsum features": lambda x: x.cumsum(2) / 3,
    "reverse cumsum": lambda x: x.flip(1).cumsum(1).flip(1) / 3,
    "cumprod": lambda x: x.sigmoid().cumprod(1),
    "cummax": lambda x: x.cummax(1)[0],
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "flip features": lambda x: x.flip(-1),
    "roll tokens": lambda x: x.roll(1, 1),
    "roll both": lambda x: x.roll((1, -2), (1, 2)),
    "sort tokens": lambda x: x.sort(1)[0],
    "sort features": lambda x: x.sort(-1, descending=True)[0],
    "median": lambda x: x - x.median(-1, keepdim=True)[0],
    "quantile": lambda x: x - x.quantile(0.5, dim=-1, keepdim=True),
    "kthvalue": lambda x: x - x.kthvalue(1, dim=1, keepdim=True)[0],
    "amax tokens": lambda x: x - x.amax(1, keepdim=True),
    "aminmax": lambda x: x - x.aminmax(dim=-1, keepdim=True)[0],
    "var both": lambda x: x / (1e-3 + x.var((1, 2), keepdim=True)).sqrt(),
    "std tokens": lambda x: x / (1 + x.std(1, keepdim=True, correction=0)),
    "normalize tokens": lambda x: F.normalize(x, dim=1),
    "norm by hand": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "logsumexp": lambda x: x - x.logsumexp((1, 2), keepdim=True),
    "layer norm of both": lambda x: F.layer_norm(x, x.shape[1:]),
    "instance norm": lambda x: F.instance_norm(x) if x.size(-1) > 1 else x,
    "windows": shifted_windows,
    "interleave": interleaved,
    "halves": halves_swapped,
    "chunks": chunks_reversed,
    "top features": best_only,
    "top tokens": best_tokens,
    "slices written": written_back,
    "filled": filled,
    "in place": chain_in_place,
    "mask written": masked_in_place,
    "complex": turned,
    "fft": filtered,
    "bent view": bent,
    "straight-through": straight_through,
    "scale without gradient": no_gradient,
    "fake quantised": rounded,
    "float32": in_float32,
    "buckets": by_bucket,
    "einsum": by_einsum,
    "bmm": by_bmm,
    "cdist": by_distance,
    "unbind": rows_stacked,
    "vmap": by_vmap,
    "index copy": by_index_copy,
    "index put": by_put,
    "pool": pooled,
    "interpolate": stretched,
    "tril": lambda x: x.tril() + x.triu(1) * 0.5,
    "outer": lambda x: (x.unsqueeze(-1) * x.unsqueeze(-2)).mean(-1),
    "addcmul": lambda x: torch.addcmul(x, x, x.tanh(), value=0.3),
    "lerp": lambda x: x.lerp(x.roll(1, 1), 0.3),
    "where": lambda x: torch.where(x > x.mean((1, 2), keepdim=True), x, 0.1 * x),
    "baddbmm": lambda x: torch.baddbmm(x, x @ x.mT, x, beta=0.5, alpha=0.02),
    "repeat interleave": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "tile": lambda x: x.tile(1, 2, 1)[:, x.size(1) // 2 :][:, : x.size(1)],
    "permute": lambda x: x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "movedim": lambda x: x.movedim(0, 2).tanh().movedim(2, 0),
    "flat": lambda x: x.flatten().view_as(x).sin(),
    "merged": lambda x: x.reshape(-1, x.size(-1)).softmax(-1).view(x.shape),
    "dropout 1d": lambda x: F.dropout1d(x, 0.2),
    "dropout": lambda x: F.dropout(x, 0.3),
    "noise": lambda x: x + 0.1 * torch.randn_like(x),
    "random mask": lambda x: x * (torch.rand(x.shape[:2], dtype=x.dtype) > 0.1).unsqueeze(-1),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.8)),
    "checkerboard": lambda x: x * (torch.arange(x.size(1))[:, None] + torch.arange(x.size(2)) & 1),
    "diff": lambda x: torch.diff(x, dim=1, prepend=x[:, :1]),
    "empty branch": lambda x: torch.cat((x, x[..., :0]), -1) + x[:, :0].sum(),
    "scatter reduce": lambda x: torch.zeros_like(x).scatter_reduce(1, x.argsort(1), x, "amax", include_self=False),
    "nan to num": lambda x: (x / x.relu()).nan_to_num(0.0, 0.0, 0.0) + x,
    "hook": lambda x: _scaled_gradient(x + 0),
}
MIXING: Mapping[str, Op] = {
    "softmax samples": lambda x: x.softmax(0),
    "centred": lambda x: x - x.mean(0),
    "standardised": lambda x: (x - x.mean(0, keepdim=True)) / (x.std(0, keepdim=True) + 1e-3),
    "batch norm": lambda x: F.batch_norm(x.mT, None, None, training=True).mT,
    "roll samples": lambda x: x + 0.1 * x.roll(1, 0),
    "flip samples": lambda x: x.flip(0),
    "cumsum samples": lambda x: x.cumsum(0),
    "sort samples": lambda x: x.sort(0)[0],
    "attend samples": lambda x: F.scaled_dot_product_attention(*(x.transpose(0, 1),) * 3).transpose(0, 1),
    "largest": lambda x: x / x.abs().max(),
    "first sample": lambda x: x - x[0],
    "flat cumsum": lambda x: x.flatten(0, 1).cumsum(0).view_as(x),
    "flat windows": lambda x: x.reshape(-1, 2, x.size(-1)).flip(1).reshape(x.shape) if x.size(1) % 2 else x.softmax(0),
    "by samples": lambda x: x * len(x),
    "bent batch": lambda x: x.reshape(x.size(1), x.size(0), -1).softmax(-1).view_as(x),
}
PYTHON: Mapping[str, Op] = {
    "item": lambda x: x / (1 + x.abs().max().item()),
    "branch": lambda x: x.relu() if x.mean() > 0 else x.tanh(),
    "loop over samples": lambda x: torch.stack([row - row.mean(0) for row in x]),
    "loop by index": lambda x: torch.cat([x[i : i + 1].softmax(1) for i in range(x.shape[0])]),
    "list": lambda x: x * (len(x.tolist()) / 8),
    "nonzero": lambda x: x + x[x > 0].mean(),
    "assertion": lambda x: _checked(x),
    "numpy": lambda x: x + torch.from_numpy(x.detach().numpy().mean(-1, keepdims=True)),
    "gradient within": lambda x: _gradient(x),
    "unique": lambda x: x + x.argmax(-1).unique().numel(),
    "size as number": lambda x: x * math.sqrt(x.shape[-1]) / (1.0 + x.shape[1]),
    "split by list": lambda x: torch.cat(x.split([1] * x.size(1), 1)[::-1], 1),
}


def _scaled_gradient(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda g: g * 0.5)
    return x


def _checked(x: Tensor) -> Tensor:
    assert x.isfinite().all(), "not finite"
    return x


def _gradient(x: Tensor) -> Tensor:
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(y.square().tanh().sum(), y)
    return x - 0.1 * slope


def drawn_op(draw: Draw) -> nn.Module:
    """Return a layer that applies one op: mostly one that keeps samples apart."""
    kind = draw.random.random()
    table = KEEPING if kind < 0.86 else PYTHON if kind < 0.94 else MIXING
    return Apply(draw.named(table, "op "))
