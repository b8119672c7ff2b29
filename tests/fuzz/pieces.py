# ruff: noqa: E501  lines of pieces
"""Pieces of random models, as text: lines of `__init__`, and lines of `forward` that make {o} from {x} and {y}.

All three are (b, s, W) tensors. {n} is a number of the piece's own, {i} the layer's; `mask` is (b, s) and bool, `side`
is (b, s, W) and comes from before the layers. W = H · D features, H heads.
"""

from __future__ import annotations

from typing import NamedTuple


class Piece(NamedTuple):
    """A computation: what it needs in `__init__`, and how it makes {o}."""

    init: str
    forward: str


_ATTENTION = "self.q{n}, self.k{n}, self.v{n}, self.p{n} = (nn.Linear(W, W, bias=k % 2 == 0) for k in range(4))"
_PACKED = "self.qkv{n}, self.p{n} = nn.Linear(W, 3 * W), nn.Linear(W, W)"
_HEADS = """
q, k, v = (f({x}).view(b, s, H, D).transpose(1, 2) for f in (self.q{n}, self.k{n}, self.v{n}))
"""
_MERGE = "{o} = {x} + self.p{n}(a.transpose(1, 2).reshape(b, s, W))"

MIXERS = [  # of tokens and features
    Piece(_ATTENTION, _HEADS + "a = F.scaled_dot_product_attention(q, k, v, is_causal=True)\n" + _MERGE),
    Piece(_ATTENTION, _HEADS + "a = F.scaled_dot_product_attention(q, k, v)\n" + _MERGE),
    Piece(
        _ATTENTION,
        _HEADS
        + "a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :] | eye[:s, :s])\n"
        + _MERGE,
    ),
    Piece(
        _ATTENTION + "\nself.slope{n} = nn.Parameter(torch.rand(H, 1, 1))",
        _HEADS
        + """
scores = q @ k.transpose(-1, -2) / math.sqrt(D)
far = torch.arange(s)[None, :] - torch.arange(s)[:, None]
scores = (scores - self.slope{n} * far.abs()).masked_fill(far > 0, float("-inf"))
a = scores.softmax(-1) @ v
"""
        + _MERGE,
    ),
    Piece(
        _PACKED,
        """
q, k, v = self.qkv{n}({x}).chunk(3, dim=-1)
q, k, v = (z.reshape(b, s, H, D).permute(0, 2, 1, 3) for z in (q, k, v))
a = torch.einsum("bhst,bhtd->bhsd", torch.einsum("bhsd,bhtd->bhst", q, k).mul(D**-0.5).tanh(), v)
"""
        + _MERGE,
    ),
    Piece(
        _PACKED,
        """
q, k, v = self.qkv{n}({x}).view(b, s, 3, H, D).unbind(2)
q, k = (F.normalize(z, dim=-1) for z in (q, k))
w = torch.einsum("bshd,bthd->bhst", q, k).exp()
w = w / w.sum(-1, keepdim=True)
{o} = {x} + self.p{n}(torch.einsum("bhst,bthd->bshd", w, v).flatten(2))
""",
    ),
    Piece(
        "self.q{n}, self.kv{n}, self.p{n} = nn.Linear(W, W), nn.Linear(W, 2 * D), nn.Linear(W, W)",
        """
q = self.q{n}({x}).unflatten(-1, (H, D)).transpose(1, 2)
k, v = self.kv{n}({y}).split(D, dim=-1)
k, v = (z[:, None].expand(b, H, s, D) for z in (k, v))
a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
"""
        + _MERGE,
    ),
    Piece(
        "self.q{n}, self.k{n}, self.v{n} = nn.Linear(W, W), nn.Linear(W, W // 2), nn.Linear(W, W // 2)",
        """
q = self.q{n}({x}).view(b, s, H, D).transpose(1, 2)
k, v = (f({x}).view(b, s, H // 2, D).transpose(1, 2).repeat_interleave(2, dim=1) for f in (self.k{n}, self.v{n}))
angle = torch.arange(s, dtype={x}.dtype)[:, None] / 10 ** (torch.arange(D // 2) / D)
q, k = (torch.cat((z[..., : D // 2] * angle.cos() - z[..., D // 2 :] * angle.sin(),
                   z[..., D // 2 :] * angle.cos() + z[..., : D // 2] * angle.sin()), -1) for z in (q, k))
a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
{o} = {x} + a.transpose(1, 2).reshape(b, s, W)
""",
    ),
    Piece(
        "self.m{n} = nn.MultiheadAttention(W, H, batch_first=True)",
        "a, w = self.m{n}({x}, {y}, {y}, need_weights=False)\n{o} = {x} + a",
    ),
    Piece("self.c{n} = nn.Conv1d(W, W, 3, padding=1)", "{o} = {x} + self.c{n}({y}.transpose(1, 2)).transpose(1, 2)"),
    Piece(
        "self.c{n} = nn.Conv1d(W, W, 3, groups=W, padding=2)",
        "{o} = {x} * self.c{n}({y}.transpose(1, 2))[..., :s].transpose(1, 2).sigmoid()",
    ),
    Piece(
        "self.u{n}, self.d{n} = nn.Linear(W, 2 * W), nn.Linear(2 * W, W)",
        "{o} = {x} + self.d{n}(F.gelu(self.u{n}({y})))",
    ),
    Piece(
        "self.u{n}, self.g{n}, self.d{n} = nn.Linear(W, 2 * W), nn.Linear(W, 2 * W, bias=False), nn.Linear(2 * W, W)",
        "{o} = {x} + self.d{n}(F.silu(self.g{n}({x})) * self.u{n}({y}))",
    ),
    Piece(
        "self.u{n}, self.d{n} = nn.Linear(W, 4 * W), nn.Linear(2 * W, W)",
        "a, g = self.u{n}({x}).chunk(2, -1)\n{o} = {y} + self.d{n}(a * g.relu())",
    ),
    Piece("self.w{n} = nn.Parameter(torch.randn(W, W) / W)", "{o} = {x} @ self.w{n} + {y} @ self.w{n}.t()"),
    Piece("self.w{n} = nn.Parameter(torch.randn(s, s) / s)", "{o} = {x} + torch.einsum('bsw,st->btw', {y}, self.w{n})"),
    Piece(
        "self.w{n} = nn.Parameter(torch.randn(H, D, D) / D)",
        "{o} = {x} + torch.einsum('bshd,hde->bshe', {y}.view(b, s, H, D), self.w{n}).reshape(b, s, W)",
    ),
    Piece(
        "self.e{n} = nn.Parameter(torch.randn(4, W, W) / W)\nself.r{n} = nn.Linear(W, 4)",
        """
g = self.r{n}({x}).softmax(-1)
{o} = {x} + torch.einsum('bsw,ewv,bse->bsv', {y}, self.e{n}, g)
""",
    ),
    Piece(
        "self.e{n} = nn.ModuleList(nn.Linear(W, W) for _ in range(3))\nself.r{n} = nn.Linear(W, 3)",
        """
g = self.r{n}({x}).softmax(-1)
{o} = {x} + sum(f({y}) * g[..., k, None] for k, f in enumerate(self.e{n}))
""",
    ),
    Piece(
        "self.e{n} = nn.Parameter(torch.randn(4, W, W) / W)\nself.r{n} = nn.Linear(W, 4)",
        """
g, at = self.r{n}({x}).softmax(-1).topk(2, dim=-1)
a = torch.einsum('bsw,bskwv->bskv', {y}, self.e{n}[at])
{o} = {x} + (a * g[..., None]).sum(2)
""",
    ),
    Piece("self.f{n} = nn.Linear(W, W)", "{o} = {x} + self.f{n}({y}).cumsum(1) / s"),
    Piece("self.f{n} = nn.Linear(W, W)", "h = self.f{n}({x})\n{o} = {y} + h * h.mean(1, keepdim=True)"),
    Piece("self.f{n} = nn.Linear(W, W)", "{o} = {x} + self.f{n}({y}.amax(1))[:, None]"),
    Piece("self.f{n} = nn.Linear(2 * W, W)", "{o} = {x} + self.f{n}(torch.cat([{x}, {y}], -1)).tanh()"),
    Piece("self.f{n} = nn.Linear(W, W)", "{o} = {x} + self.f{n}({y}.roll(1, 1))"),
    Piece("self.f{n} = nn.Linear(W, W)", "{o} = {x} + self.f{n}(F.pad({y}, (0, 0, 1, 0))[:, :-1])"),
    Piece("self.f{n} = nn.Linear(W, W)", "{o} = torch.stack([{x}, self.f{n}({y})]).logsumexp(0)"),
    Piece("self.f{n} = nn.Linear(W, W)", "{o} = torch.cat([{x}[:, :2], {x}[:, 2:] + self.f{n}({y}[:, :-2])], 1)"),
    Piece(
        "self.f{n} = nn.Linear(W // 2, W // 2)",
        "l, r = {x}.split(W // 2, -1)\n{o} = torch.cat([l + self.f{n}(r), r], -1) + 0.1 * {y}",
    ),
    Piece(
        "self.f{n} = nn.Linear(W, W)",
        "h = torch.zeros(b, W, dtype={x}.dtype)\nkept = []\nfor t in range(s):\n    h = (0.5 * h + self.f{n}({x}[:, t])).tanh()\n"
        "    kept.append(h)\n{o} = {y} + torch.stack(kept, 1)",
    ),
    Piece("self.f{n} = nn.GRU(W, W, batch_first=True)", "{o} = {x} + self.f{n}({y})[0]"),
    Piece(
        "self.u{n} = nn.Parameter(torch.randn(W, 2))\nself.d{n} = nn.Parameter(torch.randn(2, W))\nself.f{n} = nn.Linear(W, W)",
        "{o} = {x} + F.linear({y}, self.f{n}.weight + 0.1 * (self.u{n} @ self.d{n}), self.f{n}.bias)",
    ),
    Piece(
        "self.f{n} = nn.utils.parametrizations.weight_norm(nn.Linear(W, W))",
        "{o} = {x} + self.f{n}({y})",
    ),
    Piece(
        "self.f{n} = nn.Linear(W, W)",
        "m = self.f{n}.weight\n{o} = {x} + F.linear({y}, m / m.norm(dim=1, keepdim=True)) * m.std()",
    ),
    Piece("self.f{n} = nn.Bilinear(W, W, W)", "{o} = {x} + 0.1 * self.f{n}({x}, {y})"),
    Piece(
        "self.f{n} = nn.Linear(W, W)",
        "w = ({x} @ {y}.transpose(1, 2) / W).softmax(1)\n{o} = {x} + torch.bmm(w, self.f{n}({y}))",
    ),
    Piece(
        "self.keys{n} = nn.Parameter(torch.randn(6, W))",
        "w = F.softmax({x} @ self.keys{n}.T, -1)\n{o} = {y} + w @ self.keys{n}",
    ),
    Piece(
        "self.lat{n} = nn.Parameter(torch.randn(4, W))",
        """
z = F.scaled_dot_product_attention(self.lat{n}.expand(b, -1, -1), {x}, {x})
{o} = {y} + F.scaled_dot_product_attention({x}, z, z)
""",
    ),
]

NORMS = [
    Piece("self.n{n} = nn.LayerNorm(W)", "{o} = self.n{n}({x})"),
    Piece("self.n{n} = nn.LayerNorm(W, elementwise_affine=False)", "{o} = self.n{n}({x}) + 0.1 * {y}"),
    Piece("self.n{n} = nn.RMSNorm(W)", "{o} = self.n{n}({x})"),
    Piece("self.n{n} = nn.GroupNorm(2, W)", "{o} = self.n{n}({x}.transpose(1, 2)).transpose(1, 2)"),
    Piece("self.n{n} = nn.LayerNorm((s, W))", "{o} = self.n{n}({x})"),
    Piece("self.n{n} = nn.BatchNorm1d(W)", "{o} = self.n{n}({x}.transpose(1, 2)).transpose(1, 2)"),
    Piece("self.n{n} = nn.BatchNorm1d(W)", "{o} = self.n{n}({x}.reshape(b * s, W)).view(b, s, W)"),
    Piece("self.n{n} = nn.BatchNorm1d(W, affine=False)", "{o} = {x} + self.n{n}({y}.mean(1))[:, None]"),
    Piece(
        "self.g{n} = nn.Parameter(torch.ones(W))",
        "{o} = {x} * torch.rsqrt({x}.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.g{n})",
    ),
    Piece(
        "self.g{n} = nn.Parameter(torch.ones(H, 1, D))",
        "h = {x}.view(b, s, H, D).transpose(1, 2)\n"
        "{o} = ((h - h.mean((2, 3), keepdim=True)) * self.g{n}).transpose(1, 2).flatten(2)",
    ),
    Piece(
        "self.g{n} = nn.Parameter(torch.ones(1))\nself.register_buffer('ema{n}', torch.ones(W))",
        "with torch.no_grad():\n    self.ema{n}.mul_(0.9).add_({x}.detach().abs().mean((0, 1)), alpha=0.1)\n"
        "{o} = {x} / self.ema{n} * self.g{n}",
    ),
    Piece("self.g{n} = nn.Parameter(torch.zeros(W))", "{o} = torch.tanh(self.g{n} + {x})"),
]

EDGES = [  # cheap ops between the others, some with their own parameters
    Piece("", "{o} = {x} + {y}"),
    Piece("", "{o} = ({x} * 0.5).sub({y}, alpha=0.3)"),
    Piece("self.a{n} = nn.Parameter(torch.tensor(0.3))", "{o} = {x} + self.a{n} * {y}"),
    Piece("self.a{n} = nn.Parameter(torch.rand(W))", "{o} = torch.lerp({x}, {y}, self.a{n}.sigmoid())"),
    Piece("self.a{n} = nn.Parameter(torch.rand(s, 1))", "{o} = {x} * self.a{n} + {y} * (1 - self.a{n})"),
    Piece("self.a{n} = nn.Parameter(torch.rand(3))", "{o} = {x} * self.a{n}[0] + {y} * self.a{n}[1:].sum()"),
    Piece("self.a{n} = nn.Parameter(torch.rand(L, W))", "{o} = {x} + self.a{n}[{i}] * {y}"),
    Piece("self.a{n} = nn.Embedding(16, W)", "{o} = {x} + self.a{n}(torch.arange(s))"),
    Piece("self.a{n} = nn.Embedding(V, W)", "{o} = {x} + self.a{n}(ids)"),
    Piece("self.a{n} = nn.PReLU(W)", "{o} = {y} + self.a{n}({x}.transpose(1, 2)).transpose(1, 2)"),
    Piece("self.register_buffer('t{n}', torch.randn(16, W))", "{o} = {x} + self.t{n}[:s]"),
    Piece("self.register_buffer('t{n}', torch.randn(V))", "{o} = {x} * self.t{n}[ids][..., None].cos() + 0.1 * {y}"),
    Piece("", "{o} = torch.where(mask[..., None], {x}, {y})"),
    Piece("", "{o} = {x}.masked_fill(~mask[..., None], 0.0) + 0.1 * {y}"),
    Piece("", "{o} = torch.where({x} > {y}, {x}, 0.1 * {y})"),
    Piece("", "{o} = torch.maximum({x}, {y}.neg()).clamp(max=3.0)"),
    Piece("", "{o} = {x} * {y}.softmax(1)"),
    Piece("", "{o} = {x} + side"),
    Piece("", "{o} = {x} + {y}.detach()"),
    Piece("", "with torch.no_grad():\n    z = {y}.tanh()\n{o} = {x} * z + 0.5 * {x}"),
    Piece("", "z = {x}.clone()\nz[:, 0] = {y}[:, -1]\n{o} = z"),
    Piece("", "z = {x} * 1.0\nz.mul_(0.5).add_({y})\n{o} = z"),
    Piece("", "z = {x}.clone()\nz[..., : W // 2] += {y}[..., W // 2 :]\n{o} = z"),
    Piece("", "z = {x}.clone()\nz[mask] = 0.5\n{o} = z + 0.1 * {y}"),
    Piece("", "at = {x}.argsort(1)\n{o} = {y} + {x}.gather(1, at)"),
    Piece("", "at = {x}.mean(-1).argmax(1)\n{o} = {y} + {x}[torch.arange(b), at][:, None]"),
    Piece("", "v, at = {x}.norm(dim=-1).sort(dim=1)\n{o} = {y} + {x}.take_along_dim(at[..., None], 1) * v[..., None]"),
    Piece("", "{o} = {x} + {y}[:, torch.arange(s - 1, -1, -1)]"),
    Piece("", "{o} = {x} + {y}.flip(1)"),
    Piece("", "{o} = ({x}.reshape(b, s // 2, 2, W) + {y}.view(b, s // 2, 2, W).flip(2)).reshape(b, s, W)"),
    Piece("", "{o} = {x} + F.interpolate(F.avg_pool1d({y}.transpose(1, 2), 2), scale_factor=2).transpose(1, 2)"),
    Piece("", "{o} = {x} + {y}.view(b, s, H, D).transpose(2, 3).reshape(b, s, W)"),
    Piece("", "{o} = {x} + {y}.view(b, s, H, D).softmax(2).flatten(2)"),
    Piece("", "{o} = {x} + {y}.permute(1, 0, 2).cumsum(0).permute(1, 0, 2) / s"),
    Piece("", "{o} = {x} / (1 + {y}.pow(2).sum(-1, keepdim=True)).sqrt()"),
    Piece("", "{o} = {x} + torch.outer(mask.to({x}.dtype).sum(1), {y}.sum((0, 1)) * 0 + 1)[:, None] * 0.01"),
    Piece("", "n = mask.sum(1, keepdim=True).clamp(min=1)\n{o} = {x} + (({y} * mask[..., None]).sum(1) / n)[:, None]"),
    Piece("", "{o} = {x} + {y} * ids.remainder(3).eq(0).unsqueeze(-1)"),
    Piece("", "{o} = {x} + F.one_hot(ids % W, W) * {y}.sigmoid()"),
    Piece("", "{o} = torch.stack([{x}, {y}], 2).mean(2)"),
    Piece("", "l, *r = {x}.unbind(-1)\n{o} = torch.stack([*r, l], -1) + 0.1 * {y}"),
    Piece("", "{o} = {x} + 0.01 * torch.einsum('bsw,btw->bst', {x}, {y}).diagonal(dim1=1, dim2=2)[..., None]"),
    Piece("", "{o} = {x} + torch.linalg.vector_norm({y}, dim=(1, 2), keepdim=True)"),
    Piece("", "{o} = {x} + {y}.std(1, keepdim=True)"),
    Piece("", "{o} = {x}.index_add(1, torch.tensor([0, 2]), {y}[:, :2])"),
    Piece(
        "",
        "{o} = {x} + torch.zeros(b, 4, W, dtype={y}.dtype).scatter_add(1, (ids % 4)[..., None].expand(b, s, W), {y}).mean(1)[:, None]",
    ),
]

LOSSES = [  # of logits (b, s, V), x (b, s, W), labels (b, s) with -100 where ignored, and targets (b, s, W)
    "F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)",
    "F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100)",
    "F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), label_smoothing=0.1)",
    "F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction='sum') / b",
    "F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction='none').sum() / (labels != -100).sum()",
    "F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction='none').mean()",
    "F.mse_loss(x, targets)",
    "((x - targets) ** 2 * mask[..., None]).sum() / mask.sum()",
    "(F.smooth_l1_loss(x, targets, reduction='none').mean(-1) * mask).sum(1).mean()",
    "((F.mse_loss(x, targets, reduction='none').mean(-1) * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()",
    "F.binary_cross_entropy_with_logits(logits[..., 0], mask.to(logits.dtype))",
    "(1 - F.cosine_similarity(x, targets, dim=-1)).mean()",
    "F.kl_div(F.log_softmax(x, -1), F.softmax(targets, -1), reduction='batchmean')",
    "-torch.log_softmax(logits, -1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)[mask].mean()",
    "F.cross_entropy(logits[:, -1], labels[:, 0].clamp(min=0))",
    "F.cross_entropy(logits[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1), ignore_index=-100)",
    "F.cross_entropy(logits.mean(1), labels[:, 0].clamp(min=0), weight=torch.arange(1.0, V + 1, dtype=x.dtype))",
    "F.nll_loss(F.log_softmax(logits, -1).transpose(1, 2), labels, ignore_index=-100)",
    "torch.logsumexp(logits, -1).pow(2).mean() + F.mse_loss(x, targets)",
    "x.sub(targets).abs().amax(1).mean()",
    "F.huber_loss(x.mean(1), targets.sum(1))",
    "torch.sqrt(F.mse_loss(x, targets))",
    "F.softplus(-(x * targets).sum(-1)).mean(1).sum() / x.shape[0]",
]

TERMS = [  # added to a loss
    "0.01 * self.table.weight.pow(2).sum()",
    "0.1 * x.pow(2).mean()",
    "0.1 * (first - x).abs().mean()",
    "0.01 * torch.logsumexp(logits, -1).square().mean()",
    "0.1 * x.mean((0, 1)).pow(2).sum()",
    "0.1 * memo.sum() / b",
]
