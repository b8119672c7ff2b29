# ruff: noqa: E501  lines of pieces
"""Pieces that do to {x} and {y} what people write around layers, in models of tokens and of pictures.

They look at tensors without gradients, write to what others alias, leave hooks, recompute, ask for ranks, update
buffers and keep what they have seen. See tests/fuzz/pieces.py for the names.
"""

from __future__ import annotations

from tests.fuzz.pieces import Piece

HEAD = """from torch.utils.checkpoint import checkpoint


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(y)
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        y, = ctx.saved_tensors
        return grad * 0.5, grad * y.cos()


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -0.3 * grad


@torch.no_grad()
def looked(x):
    return x.view_as(x)


def keep(module, given, out):
    module.seen = out
"""

_LOOKS = [
    Piece("", "with torch.no_grad():\n    z = F.dropout({x}, 0.0)\n{o} = {x} + 0.1 * z * {y}"),
    Piece("", "with torch.no_grad():\n    z = {x}.flatten(1, 1)\n{o} = {x} + 0.1 * z * {y}"),
    Piece("", "with torch.no_grad():\n    z = {x}.contiguous().to({x}.dtype)\n{o} = {x} * z.tanh() + {x}"),
    Piece("", "with torch.no_grad():\n    z = {x}.expand_as({x}).reshape({x}.shape)\n{o} = z + {x} * {y}"),
    Piece("", "with torch.no_grad():\n    e = F.mse_loss({x}, {y}, reduction='none')\n{o} = {x} * (1 + e).rsqrt() + {y}"),
    Piece("", "with torch.no_grad():\n    z = {x} * 2\n    with torch.enable_grad():\n        h = {x}.tanh()\n{o} = h * z"),
    Piece("", "with torch.inference_mode():\n    n = {x}.shape[1]\n{o} = {x} / n + {y}"),
    Piece("", "with torch.set_grad_enabled(self.training):\n    h = {x}.tanh()\n{o} = h + {y}"),
    Piece("", "with torch.autocast('cpu', enabled=False):\n    h = {x}.tanh()\n{o} = h + {y}"),
    Piece("", "with torch.profiler.record_function('piece'):\n    h = {x}.sin()\n{o} = h + {y}"),
    Piece("", "{o} = looked({x}) * {y}.tanh() + {x}"),
    Piece("", "z = {x}.detach()\nz = z / (1 + z.abs().mean())\n{o} = {x} + 0.1 * z * {y}"),
    Piece("", "z = {x}.data * 0.5\n{o} = {y} + z"),
    Piece("", "{o} = {x} + ({x}.round() - {x}).detach()"),
    Piece("", "h = {x} if torch.is_grad_enabled() or {x}.requires_grad else {x} * 1.0\n{o} = h + 0.5 * {y}"),
]  # fmt: skip
_WRITES = [
    Piece("", "h = {x} * 1.0\nz = F.dropout(h, 0.0)\nz.mul_(0.5)\n{o} = h + z * {y}"),
    Piece("self.d{n} = nn.Dropout(0.0)", "h = {x} * 1.0\nz = self.d{n}(h)\nz += {y}\n{o} = h - 0.3 * z.sin()"),
    Piece("self.f{n} = nn.Identity()", "h = {x} + 0.1 * {y}\nz = self.f{n}(h)\nz.clamp_(-2, 2)\n{o} = h"),
    Piece("", "h = {x} * 1.0\nv = h.view(b, -1)\nv[:, 0] = 0\n{o} = h + {y}"),
    Piece("", "h = {x} * 1.0\nh.view(b, -1).mul_({y}.reshape(b, -1).sigmoid())\n{o} = h"),
    Piece("", "h = {x}.clone()\nv = h[:, 0]\nh.unsqueeze_(1)\nv.mul_(0.5)\n{o} = h.squeeze(1) + {y}"),
    Piece("", "h = {x}.clone()\nv = h[:, :1]\nh.transpose_(1, 2)\nv.add_(1.0)\n{o} = h.transpose(1, 2) + {y}"),
    Piece("", "h = {x}.clone()\ng = h\ng += {y}\n{o} = h * 0.7"),
    Piece("", "h = torch.empty_like({x})\nh.copy_({x})\nh.sub_({y}, alpha=0.5)\n{o} = h"),
    Piece("", "h = torch.zeros_like({x})\nh[:, 1:] = {y}[:, :-1]\nh[:, :1] += {x}[:, -1:]\n{o} = h + {x}"),
    Piece("", "h = {x}.new_zeros({x}.shape)\nh += {x}\nh.masked_fill_({y} > 1, 0.0)\n{o} = h"),
    Piece("self.f{n} = nn.ReLU(inplace=True)", "{o} = self.f{n}({x} + {y}) + 0.1 * {x}"),
    Piece("", "h = {x} + {y}\nF.relu(h, inplace=True)\n{o} = h + 0.1 * {x}"),
    Piece("", "h = {x} * 1.0\nwith torch.no_grad():\n    h.mul_(0.5)\n{o} = h + {y}"),
    Piece("", "h = {x}.detach().clone()\nh += 1\nh[:, 0] *= 2\n{o} = {x} + h * {y}"),
    Piece("", "h = {x}.clone()\nh[:, 0], h[:, 1] = {y}[:, 1], {x}[:, 0]\n{o} = h"),
    Piece("", "h = {x}.clone()\nh[h > 1] = 1.0\n{o} = h + 0.1 * {y}"),
    Piece("", "h = {x}.clone()\nh.index_copy_(1, torch.tensor([0, 2]), {y}[:, :2])\n{o} = h"),
    Piece("", "kept = [{x}, {y}]\nkept[0] = kept[0] + kept.pop()\n{o} = torch.stack(kept + [{x}]).sum(0) * 0.5"),
    Piece("", "h = {x}.clone()\nv = h.transpose(1, 2)[:, 0]\nv.zero_()\nh.add_({y})\n{o} = h + v.reshape(b, -1).mean(-1).view(b, *[1] * (h.dim() - 1))"),
]  # fmt: skip
_HOOKS = [
    Piece("", "h = {x} * 1.0\nif h.requires_grad:\n    h.register_hook(lambda grad: grad * 0.5)\n{o} = h + {y}"),
    Piece("", "h = {x}.tanh()\nif h.requires_grad:\n    h.register_hook(lambda grad: grad.clamp(-1e-2, 1e-2))\n{o} = h + {y}"),
    Piece("", "h = {x}.tanh()\nif h.requires_grad:\n    h.retain_grad()\n{o} = h + {y}"),
    Piece("self.f{n} = nn.Tanh()\nself.f{n}.register_forward_hook(lambda module, given, out: out * 0.5)", "{o} = self.f{n}({x}) + {y}"),
    Piece("self.f{n} = nn.Tanh()\nself.f{n}.register_forward_pre_hook(lambda module, given: (given[0] * 0.5,))", "{o} = self.f{n}({x}) + {y}"),
    Piece("self.f{n} = nn.Tanh()\nself.f{n}.register_full_backward_hook(lambda module, grads, _: (grads[0] * 0.5,))", "{o} = self.f{n}({x}) + {y}"),
    Piece("self.f{n} = nn.Tanh()\nself.f{n}.register_forward_hook(keep)", "self.f{n}({x})\n{o} = self.f{n}.seen + {y}\ndel self.f{n}.seen"),
    Piece("", "{o} = Halved.apply({x}, {y})"),
    Piece("", "{o} = {x} + Reversed.apply({y})"),
    Piece("", "{o} = Halved.apply({x}, Reversed.apply({x})) + {y}"),
    Piece("", "{o} = checkpoint(lambda t, u: t.tanh() + u.sin(), {x}, {y}, use_reentrant=False)"),
    Piece("self.a{n} = nn.Parameter(torch.rand(1))", "{o} = checkpoint(lambda t: t.tanh() * self.a{n}, {x}, use_reentrant=False) + {y}"),
    Piece("", "{o} = checkpoint(lambda t, u: t.tanh() * u, {x}, {y}, use_reentrant=True) + {x}"),
    Piece("", "h = {x} * 1.0\n{o} = {y} + checkpoint(lambda t: checkpoint(torch.sin, t, use_reentrant=False).cos(), h, use_reentrant=False)"),
    Piece("", "{o} = torch.func.vmap(lambda t, u: t.tanh() + u)({x}, {y})"),
]  # fmt: skip
_KEPT = [
    Piece("", "d = torch.distributed\nn = d.get_world_size() if d.is_available() and d.is_initialized() else 1\n{o} = {x} * (1 + n) + {y}"),
    Piece("self.register_buffer('n{n}', torch.zeros(()))", "if self.training:\n    self.n{n} += 1\n{o} = {x} + 0.01 * self.n{n} * {y}"),
    Piece("self.register_buffer('n{n}', torch.zeros((), dtype=torch.long))", "if self.training:\n    self.n{n}.add_(1)\n{o} = {x} + {y} * 0.9 ** self.n{n}"),
    Piece("self.register_buffer('n{n}', torch.ones(3))", "{o} = {x} + {y}"),
    Piece("self.register_buffer('n{n}', torch.ones(3), persistent=False)", "{o} = {x} + {y} * self.n{n}.sum()"),
    Piece("self.register_buffer('n{n}', torch.zeros(()))", "{o} = {x} + self.n{n}\nif self.training:\n    self.n{n}.copy_({y}.detach().square().mean())"),
    Piece("self.register_buffer('n{n}', torch.zeros(()))", "if self.training:\n    with torch.no_grad():\n        self.n{n} = 0.5 * self.n{n} + 0.5 * {y}.abs().mean()\n{o} = {x} + self.n{n}"),
    Piece("self.register_buffer('n{n}', torch.zeros(2, 3))", "if self.training:\n    self.n{n}[1] += {y}.detach().mean()\n{o} = {x} * (1 + self.n{n}.sum())"),
    Piece("self.seen{n} = None", "self.seen{n} = {x}.detach()\n{o} = {x} + {y}"),
    Piece("self.a{n} = nn.Parameter(torch.rand(1))", "with torch.no_grad():\n    self.a{n}.clamp_(0.0, 0.5)\n{o} = {x} + self.a{n} * {y}"),
    Piece("self.a{n} = nn.ParameterDict({'w': nn.Parameter(torch.rand(1))})", "{o} = {x} + sum(self.a{n}.values()) * {y}"),
    Piece("self.a{n} = nn.ParameterList([nn.Parameter(torch.rand(1)) for _ in range(3)])", "for a in self.a{n}[::2]:\n    {x} = {x} + a * {y}\n{o} = {x}"),
    Piece("self.a{n} = nn.Parameter(torch.rand(1))\nself.t{n} = [self.a{n}]", "{o} = {x} + self.t{n}[0] * {y}"),
    Piece("self.a{n} = nn.Parameter(torch.rand(2), requires_grad=False)", "{o} = {x} + self.a{n}[0] * {y}"),
    Piece("self.a{n} = nn.Parameter(torch.rand(2))", "{o} = {x} + self.a{n}.detach()[0] * {y}"),
    Piece("self.a{n} = nn.Parameter(torch.rand(2))", "{o} = {x} + {y}"),
    Piece("self.a{n} = nn.Parameter(torch.rand(2))", "w = F.normalize(self.a{n}, dim=0)\nself.w{n} = w\n{o} = {x} * w[0] + self.w{n}[1] * {y}\ndel self.w{n}"),
]  # fmt: skip

HABITS = [*_LOOKS, *_WRITES, *_HOOKS, *_KEPT]
