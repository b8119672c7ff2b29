# ruff: noqa: E501  lines of pieces
"""Pieces of random models, as text: lines of `__init__`, and lines of `forward` that make {o} from {x} and {y}.

{x}, {y} and {o} are tensors of one shape: (b, s, W) in a model of tokens, (b, W, p, p) in one of pictures. {n} is a
number of the piece's own, {i} the layer's. `side` has their shape too and comes from before the layers; `mask` is bool
and has no features. W = H · D features, H heads, E experts, L layers.
"""

from __future__ import annotations

from typing import NamedTuple

EXPERTS = "self.experts{n} = nn.ModuleList("  # how lists of experts begin


class Piece(NamedTuple):
    """A computation: what it needs in `__init__`, and how it makes {o}."""

    init: str
    forward: str


class Family(NamedTuple):
    """The pieces of a sort of models, and the lines around their layers.

    given: the first input, also of every layer. sizes: the line that reads sizes from it. init, begin: lines that make
    the modules around the layers, and x before them. pooled, spread: a mean over places, and memo as wide as x.
    """

    given: str
    sizes: str
    init: tuple[str, ...]
    begin: str
    pooled: str
    spread: str
    mixers: list[Piece]
    norms: list[Piece]
    edges: list[Piece]
    losses: list[str]
    terms: list[str]


_ATTENTION = "self.q{n}, self.k{n}, self.v{n}, self.p{n} = (nn.Linear(W, W, bias=k % 2 == 0) for k in range(4))"
_PACKED = "self.qkv{n}, self.p{n} = nn.Linear(W, 3 * W), nn.Linear(W, W)"
_HEADS = """
q, k, v = (f({x}).view(b, s, H, D).transpose(1, 2) for f in (self.q{n}, self.k{n}, self.v{n}))
"""
_MERGE = "{o} = {x} + self.p{n}(a.transpose(1, 2).reshape(b, s, W))"

_ROUTER = "self.r{n} = nn.Linear(W, E, bias=False)\n"
_LISTED = _ROUTER + EXPERTS + "nn.Sequential(nn.Linear(W, W), nn.SiLU(), nn.Linear(W, W)) for k in range(E))"
_ROUTED = """
z = {y}.reshape(-1, W)
g, at = self.r{n}(z).softmax(-1).topk(2, -1)
a = torch.zeros_like(z)
"""
_EXPERTS = [
    Piece(
        _LISTED,
        _ROUTED
        + """
for e, expert in enumerate(self.experts{n}):
    t, k = torch.where(at == e)
    a.index_add_(0, t, expert(z[t]) * g[t, k, None])
{o} = {x} + a.view(b, s, W)
""",
    ),
    Piece(
        _LISTED,
        _ROUTED
        + """
g = g / g.sum(-1, keepdim=True)
for e, expert in enumerate(self.experts{n}):
    hit = (at == e).any(-1)
    a[hit] = a[hit] + expert(z[hit]) * (g * (at == e)).sum(-1)[hit][:, None]
{o} = {x} + a.view(b, s, W)
""",
    ),
    Piece(
        _LISTED,
        _ROUTED
        + """
for e in range(E):
    t = (at[:, 0] == e).nonzero().squeeze(-1)
    a[t] += self.experts{n}[e](z[t]) * g[t, :1]
{o} = {x} + a.reshape({x}.shape)
memo = memo + (torch.zeros(b * s, E, dtype=z.dtype).scatter(1, at, g).view(b, s, E).mean(1) ** 2).sum(-1, keepdim=True)
""",
    ),
    Piece(
        _ROUTER
        + "self.u{n}, self.d{n} = nn.Parameter(torch.randn(E, W, W) / 4), nn.Parameter(torch.randn(E, W, W) / 4)",
        _ROUTED
        + """
g = torch.zeros(b * s, E, dtype=z.dtype).scatter(1, at, g)
h = F.silu(torch.einsum("tw,ewd->etd", z, self.u{n}))
{o} = {x} + (torch.einsum("etd,edw->etw", h, self.d{n}) * g.t()[..., None]).sum(0).view(b, s, W)
""",
    ),
]
_MIXERS = [  # of tokens and features
    *_EXPERTS,
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

_NORMS = [
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

_EDGES = [  # cheap ops between the others, some with their own parameters
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

_LOSSES = [  # of logits (b, s, V), x (b, s, W), labels (b, s) with -100 where ignored, and targets (b, s, W)
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

_TERMS = [  # added to a loss
    "0.01 * self.table.weight.pow(2).sum()",
    "0.1 * x.pow(2).mean()",
    "0.1 * (first - x).abs().mean()",
    "0.01 * torch.logsumexp(logits, -1).square().mean()",
    "0.1 * x.mean((0, 1)).pow(2).sum()",
    "0.1 * memo.sum() / b",
]

TOKENS = Family(
    "ids",
    "b, s = ids.shape",
    (
        "self.table, self.places = nn.Embedding(V, W), nn.Embedding(s, W)",
        "self.norm, self.before = nn.LayerNorm(W), nn.Linear(W, W)",
    ),
    "x = self.table(ids) + self.places(torch.arange(s))",  # equal tokens would be ties of sorts
    "{x}.mean(1)",
    "memo[:, None]",
    _MIXERS,
    _NORMS,
    _EDGES,
    _LOSSES,
    _TERMS,
)

_CONVOLUTIONS = [
    Piece("self.c{n} = nn.Conv2d(W, W, 3, padding=1)", "{o} = {x} + self.c{n}({y})"),
    Piece("self.c{n} = nn.Conv2d(W, W, 3, padding='same', bias=False)", "{o} = F.relu(self.c{n}({x})) + {y}"),
    Piece("self.c{n} = nn.Conv2d(W, W, 3, padding=2, dilation=2, groups=4)", "{o} = {x} + self.c{n}({y})"),
    Piece("self.c{n} = nn.Conv2d(W, W, 1)", "{o} = {y} + F.hardswish(self.c{n}({x}))"),
    Piece(
        "self.c{n}, self.d{n} = nn.Conv2d(W, 2 * W, 2, stride=2), nn.ConvTranspose2d(2 * W, W, 2, stride=2)",
        "{o} = {x} + self.d{n}(F.gelu(self.c{n}({y})))",
    ),
    Piece(
        "self.c{n}, self.d{n} = nn.Conv2d(W, 2 * W, 3, stride=2, padding=1), nn.Conv2d(3 * W, W, 3, padding=1)",
        "h = F.interpolate(self.c{n}({x}), scale_factor=2, mode='nearest')\n{o} = self.d{n}(torch.cat([h, {y}], 1))",
    ),
    Piece(
        "self.c{n}, self.d{n} = nn.Conv2d(W, W, 3, padding=1, groups=W), nn.Conv2d(W, W, 1)",
        "{o} = {x} + self.d{n}(F.silu(self.c{n}({y})))",
    ),
    Piece(
        "self.c{n}, self.d{n} = nn.Linear(W, 4), nn.Linear(4, W)",
        "{o} = {x} * self.d{n}(F.relu(self.c{n}({y}.mean((2, 3))))).sigmoid()[:, :, None, None]",
    ),
    Piece(
        "self.c{n} = nn.Conv2d(W, 4 * W, 1)",
        "{o} = {x} + F.max_pool2d(F.pixel_shuffle(self.c{n}({y}), 2), 2)",
    ),
    Piece(
        "self.c{n} = nn.Conv2d(4 * W, W, 3, padding=1)",
        "{o} = {x} + F.interpolate(self.c{n}(F.pixel_unshuffle({y}, 2)), size=(p, p), mode='bilinear', align_corners=False)",
    ),
    Piece(
        "self.q{n}, self.p{n} = nn.Linear(W, 3 * W), nn.Linear(W, W)",
        """
h = {x}.flatten(2).transpose(1, 2)
q, k, v = self.q{n}(h).view(b, p * p, 3, H, D).permute(2, 0, 3, 1, 4)
a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, p * p, W)
{o} = {y} + self.p{n}(a).transpose(1, 2).view(b, W, p, p)
""",
    ),
    Piece(
        "self.q{n}, self.t{n} = nn.Conv2d(W, 3 * W, 1), nn.Parameter(torch.randn(9, H))",
        """
z = self.q{n}({x}).view(b, 3, H, D, p // 2, 2, p // 2, 2).permute(1, 0, 4, 6, 2, 5, 7, 3).reshape(3, b * (p // 2) ** 2, H, 4, D)
at = torch.arange(2)[:, None] - torch.arange(2)[None, :] + 1
at = (3 * at[:, None, :, None] + at[None, :, None, :]).reshape(16)
a = (z[0] @ z[1].transpose(-1, -2) / D**0.5 + self.t{n}[at].view(4, 4, H).permute(2, 0, 1)).softmax(-1) @ z[2]
a = a.view(b, p // 2, p // 2, H, 2, 2, D).permute(0, 3, 6, 1, 4, 2, 5).reshape(b, W, p, p)
{o} = {x} + a + 0.1 * {y}
""",
    ),
    Piece("self.l{n} = nn.Linear(p, p)", "{o} = {x} + self.l{n}({y}).transpose(2, 3)"),
    Piece("self.l{n} = nn.Linear(p * p, p * p)", "{o} = {x} + self.l{n}({y}.flatten(2)).view(b, W, p, p).tanh()"),
    Piece("self.l{n} = nn.Linear(W, W)", "{o} = {y} + self.l{n}({x}.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)"),
    Piece("self.k{n} = nn.Parameter(torch.randn(W, W, 3, 3) / W)", "w = self.k{n}\n{o} = {x} + F.conv2d({y}, w / w.flatten(1).norm(dim=1)[:, None, None, None], padding=1)"),
    Piece("", "z = F.unfold({y}, 2, stride=2).view(b, W, 4, (p // 2) ** 2).mean(2)\n{o} = {x} + F.interpolate(z.view(b, W, p // 2, p // 2), scale_factor=2)"),
]  # fmt: skip
_CHANNEL_NORMS = [
    Piece("self.n{n} = nn.BatchNorm2d(W)", "{o} = self.n{n}({x})"),
    Piece("self.n{n} = nn.GroupNorm(4, W)", "{o} = self.n{n}({x})"),
    Piece("self.n{n} = nn.InstanceNorm2d(W, affine=True)", "{o} = self.n{n}({x})"),
    Piece("self.n{n} = nn.LayerNorm([W, p, p])", "{o} = self.n{n}({x}) + 0.1 * {y}"),
    Piece("self.n{n} = nn.LayerNorm(W)", "{o} = self.n{n}({x}.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)"),
    Piece("self.g{n} = nn.Parameter(torch.full((W, 1, 1), 0.1))", "{o} = {x} + self.g{n} * {y}"),
    Piece("", "{o} = F.local_response_norm({x}, 3) + {y}"),
]
_PLACES = [
    Piece("", "{o} = {x} + {y}"),
    Piece("", "{o} = {x} + {y}.flip(3)"),
    Piece("", "{o} = {x} + torch.roll({y}, (1, -1), (2, 3))"),
    Piece("", "{o} = F.avg_pool2d({x}, 3, 1, 1) + {y}"),
    Piece("", "{o} = {x} + F.max_pool2d({y}, 3, 1, 1)"),
    Piece("", "{o} = {x} * F.adaptive_avg_pool2d({y}, 1)"),
    Piece("", "{o} = {x} + F.adaptive_max_pool2d({y}, (2, 1)).repeat_interleave(p // 2, 2)"),
    Piece("", "{o} = {x} * mask[:, None] + {y}.transpose(2, 3)"),
    Piece("", "{o} = torch.where(mask[:, None], {x}, {y})"),
    Piece("", "{o} = {x}.view(b, H, D, p, p).transpose(1, 2).reshape(b, W, p, p) + 0.1 * {y}"),
    Piece("", "{o} = F.pad({x}, (1, 1, 1, 1), mode='reflect')[:, :, 1:-1, 2:] + 0.1 * {y}"),
    Piece("", "{o} = torch.cat([{x}[:, : W // 2], {y}[:, W // 2 :].relu()], 1)"),
    Piece("", "{o} = {x} + {y}.flatten(2).softmax(-1).view(b, W, p, p)"),
    Piece("", "{o} = {x} + F.grid_sample({y}, F.affine_grid(torch.eye(2, 3, dtype={x}.dtype).expand(b, 2, 3) * 0.7, {x}.shape, align_corners=False), align_corners=False)"),
    Piece("self.a{n} = nn.Parameter(torch.rand(1, W, p, p))", "{o} = {x} * self.a{n} + {y}"),
    Piece("self.a{n} = nn.PReLU(W)", "{o} = self.a{n}({x}) + 0.1 * {y}"),
    Piece("", "{o} = {x} + side.detach()"),
    Piece("", "z = {x} * 1.0\nz[:, :, 0] = {y}[:, :, -1]\n{o} = z"),
]  # fmt: skip
_OF_PICTURES = [
    "F.cross_entropy(self.head(x.mean((2, 3))), labels[:, 0].clamp(min=0))",
    "F.cross_entropy(self.head(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), labels.view(b, p, p), ignore_index=-100)",
    "F.cross_entropy(self.head(x.amax((2, 3))), labels[:, 0].clamp(min=0), label_smoothing=0.1)",
    "F.mse_loss(x, targets)",
    "((x - targets).abs() * mask[:, None]).sum() / (mask.sum() * W)",
    "F.binary_cross_entropy_with_logits(self.head(x.permute(0, 2, 3, 1))[..., 0], mask.to(x.dtype), reduction='sum') / b",
    "1 - (2 * (x.sigmoid().mean(1) * mask).sum((1, 2)) / (x.sigmoid().mean(1).sum((1, 2)) + mask.sum((1, 2)) + 1)).mean()",
    "F.l1_loss(F.interpolate(x, scale_factor=0.5), F.avg_pool2d(targets, 2))",
    "(F.mse_loss(x, targets, reduction='none').flatten(1).mean(1) + 1e-3).sqrt().mean()",
    "F.cross_entropy(self.head(x.flatten(2).transpose(1, 2)).transpose(1, 2), labels, ignore_index=-100)",
]  # fmt: skip
PICTURES = Family(
    "image",
    "b = image.shape[0]",
    ("self.table = nn.Conv2d(3, W, 3, padding=1)", "self.norm, self.before = nn.GroupNorm(1, W), nn.Conv2d(W, W, 1)"),
    "x = self.table(image)",
    "{x}.mean((2, 3))",
    "memo[:, :, None, None]",
    _CONVOLUTIONS,
    _CHANNEL_NORMS,
    _PLACES,
    _OF_PICTURES,
    ["0.1 * x.pow(2).mean()", "0.1 * (first - x).abs().mean()", "0.1 * memo.sum() / b", "0.01 * self.table.weight.pow(2).sum()"],
)  # fmt: skip
