"""Random losses of a small model on random meshes: each trains as on one process, or is refused by an error of autoptd.

    python -m tests.fuzz.losses --count 2000 --seed 0        print a table of the outcomes
    python -m tests.fuzz.losses --seed 17 --show             print one of them, its plan's constraints and its outcome

A loss is an expression that is drawn from the outside in: every value has some of the dims b (samples), s (tokens) and
c (classes), and is read from one with more of them, by a sum, a mean, a maximum …, or combined with one with fewer. So
samples, tokens and the whole batch are averaged, weighed, compared and masked within each other in any order.
"""

from __future__ import annotations

import random
import re
import sys

import torch

from tests.fuzz.programs import CLASSES, WIDTH, Program, counted, options, outcome, tabulated

_ALL = "bsc"
_DIMS = ("", "b", "s", "c", "bs", "bc", "sc", "bsc")
_GIVEN = {  # dims -> values that are there
    "bsc": ["z", "z.softmax(-1)", "z.log_softmax(-1)", "z.detach()", "F.one_hot(y, C).to(z.dtype)", "z.sigmoid()"],
    "bs": [
        "z[..., 0]", "z[..., 1].sigmoid()", "mask", "(labels >= 0).to(z.dtype)", "z.amax(-1)",
        "F.cross_entropy(z.transpose(1, 2), labels, reduction='none')", "(z.argmax(-1) == labels).to(z.dtype)",
        "z.gather(-1, y[..., None])[..., 0]",
    ],
    "b": ["mask[:, 0]", "z[:, 0, 0]", "mask.sum(1)", "z[:, -1, 2]", "(labels >= 0).sum(1).to(z.dtype)", "x[:, 0, 0]"],
    "bc": ["z[:, 0]", "z[:, -1].softmax(-1)", "F.one_hot(y[:, 0], C).to(z.dtype)"],
    "s": ["torch.arange(z.shape[1], dtype=z.dtype)"],
    "c": ["self.weights", "self.bias"],
    "sc": ["self.bias * torch.arange(z.shape[1], dtype=z.dtype)[:, None]"],
    "": ["self.scale", "self.scale.exp()", "self.weights[1]"],
}  # fmt: skip
_WEIGHTS = {"bsc": [2, 4], "bs": [2, 3, 5, 6], "b": [0, 2, 4], "bc": [2]}  # of these, masks and weights
_UNARY = [
    "({a}).tanh()", "({a}).sigmoid()", "({a}).tanh().exp()", "({a}).square()", "({a}).abs()", "({a}).abs().log1p()",
    "({a}).detach()", "(1 + ({a}).square()).sqrt()", "({a}).relu()", "-({a})", "0.5 * ({a})", "({a}) + 0.1",
    "({a}).clamp(-1, 1)", "F.softplus({a})",
]  # fmt: skip
_BINARY = [
    "({a}) + {b}", "({a}) - {b}", "({a}) * {b}", "({a}) / (1 + {b}.abs())", "torch.where(({a}) > {b}, {a}, 0.5 * {b})",
    "torch.maximum({a}, {b})", "({a}) * ({b} > 0.137).to(z.dtype)", "({a}).lerp({b}, 0.3)", "({a}) * {b}.detach()",
    "({a}).masked_fill({b} > 0.137, 0.0)", "torch.hypot({a}, 1 + {b}.abs())",
]  # fmt: skip
_ALONG = [
    "({a}).cumsum({d})", "({a}).softmax({d})", "({a}).sort({d})[0]", "({a}).flip({d})", "({a}).roll(1, {d})",
    "({a}) - ({a}).mean({d}, keepdim=True)", "({a}) / (1e-3 + ({a}).norm(dim={d}, keepdim=True))",
    "F.normalize({a}, dim={d})", "({a}) / ({a}).detach().abs().amax({d}, keepdim=True).clamp(min=0.1)",
    "({a}).log_softmax({d})", "F.pad({a}, (1, 0))[..., :-1]",
]  # fmt: skip
_WEIGHED = [
    "(({a}) * ({m})).sum({d}) / ({m}).abs().sum({d}).clamp(min=1)",
    "(({a}) * ({m})).sum({d}) / (({m}).sum({d}) + 1e-3)",
    "(({a}) * ({m})).mean({d}) / ({m}).abs().mean({d}).clamp(min=1e-3)",
    "(({a}) * (({m}) / (0.1 + ({m}).abs().sum({d}, keepdim=True)))).sum({d})",
    "torch.where(({m}) > 0.31, {a}, 0.0).sum({d}) / (1 + (({m}) > 0.31).sum({d}))",
]  # fmt: skip
_REDUCED = [
    "({a}).amax({d})", "({a}).logsumexp({d})", "(1e-3 + ({a}).square().mean({d})).sqrt()", "({a}).norm(dim={d})",
    "({a}).amin({d})", "({a}).var({d})", "({a}).tanh().exp().mean({d}).log()", "({a}).std({d})",
    "(3 * (({a}) > 0.137).sum({d}) - 2).to(z.dtype)", "((({a}) > 0.137).sum({d}) // 2).to(z.dtype)",
    "(1 + (({a}) > 0.137).sum({d})).to(z.dtype)", "(({a}) > 0.937).any({d}).to(z.dtype)",
    "({a}).nanmean({d})",
]  # fmt: skip
_OF_SEVERAL = {  # dims -> values of others with all dims, {f}, and of samples and tokens, {t}
    "bsc": [
        "F.conv1d(({f}).transpose(1, 2), torch.ones(C, 1, 3, dtype=z.dtype), padding=1, groups=C).transpose(1, 2)",
        "torch.baddbmm({f}, ({f}) @ ({f}).transpose(1, 2), {f}, alpha=0.05)", "torch.stack([{f}, z], -1).amax(-1)",
        "torch.cat([{f}, z], 1)[:, :z.shape[1]]", "F.layer_norm({f}, (C,))", "({f}).logcumsumexp(1)",
    ],
    "bs": [
        "torch.cdist({f}, ({f}) + 0.5).mean(-1)", "F.cosine_similarity({f}, z + 0.1, dim=-1)",
        "F.pairwise_distance({f}, z)", "({f}).topk(2, -1)[0].mean(-1)", "({f}).median(-1)[0]", "({t}).cumprod(1)",
        "F.nll_loss(({f}).log_softmax(-1).transpose(1, 2), labels, reduction='none')",
        "F.kl_div(({f}).log_softmax(-1), z.softmax(-1), reduction='none').sum(-1)",
        "F.binary_cross_entropy_with_logits({t}, mask, reduction='none')",
        "F.smooth_l1_loss({t}, mask, reduction='none')",
    ],
    "c": [
        "({f}).flatten(0, 1)[labels.flatten() >= 0].mean(0)", "({f})[mask > 0].sum(0)",
        "torch.einsum('bsc,bs->c', {f}, {t})",
        "torch.zeros(C, dtype=z.dtype).index_add(0, y.flatten(), ({t}).flatten())",
        "torch.bincount(y.flatten(), minlength=C).to(z.dtype)",
        "torch.zeros(C, dtype=z.dtype).scatter_add(0, y.flatten(), ({t}).flatten())",
    ],
    "": [
        "F.cross_entropy(({f}).flatten(0, 1), labels.flatten())", "({t})[mask > 0].mean()", "F.mse_loss({t}, mask)",
        "F.cross_entropy(({f}).flatten(0, 1), labels.flatten(), reduction='sum') / (labels >= 0).sum()",
        "({t}).masked_select(labels >= 0).sum() / mask.sum()", "F.l1_loss({t}, mask.roll(1, 1))",
        "F.cross_entropy(({f}).transpose(1, 2), labels, weight=self.weights)",
        "(({t}) * mask).sum() / mask.count_nonzero()", "F.binary_cross_entropy(({t}).sigmoid(), mask, weight=1 + mask)",
        "F.nll_loss(({f}).log_softmax(-1)[labels >= 0], labels[labels >= 0])",
        "F.gaussian_nll_loss({t}, mask, 1 + ({t}).square())",
        "F.margin_ranking_loss({t}, z[..., 2], mask * 2 - 1, margin=0.1)",
        "F.triplet_margin_loss(({f})[:, 0], ({f})[:, 1], z[:, 2])",
        "torch.dot(({t}).flatten(), mask.flatten()) / x.shape[0]",
        "F.mse_loss(F.normalize(({f})[:, 0], dim=-1) @ ({f})[:, 1].t(), mask @ mask.t())",
        "(({f}).flatten(0, 1).t() @ ({f}).flatten(0, 1) / mask.numel() - torch.eye(C, dtype=z.dtype)).square().sum()",
    ],
}  # fmt: skip


def draw(seed: int) -> Program:
    """Draw the loss and the mesh of a seed."""
    rng = random.Random(seed)
    for _ in range(50):
        text = _value(rng, "", rng.choice([3, 4, 4, 5]))
        if len(text) < 700 and re.search(r"\bz\b(?!\.(dtype|shape|detach))", text):
            break
    if rng.random() < 0.3:
        text += f" + 0.5 * ({_value(rng, '', 3)})"
    layers = [
        f"f = nn.Linear({WIDTH}, {WIDTH})", f"e = nn.Embedding(16, {WIDTH})", f"head = nn.Linear({WIDTH}, {CLASSES})",
        "scale = nn.Parameter(torch.tensor(0.3))", f"bias = nn.Parameter(torch.linspace(-0.3, 0.4, {CLASSES}))",
    ]  # fmt: skip
    lines = [
        f"C, y = {CLASSES}, labels.clamp(min=0)",
        "z = self.head(torch.tanh(self.f(x) + self.e(ids)))",
        f"return {text}",
    ]
    return Program(seed, lines, layers, _mesh(rng))


def _value(rng: random.Random, dims: str, depth: int) -> str:
    """Return an expression with these dims."""
    if depth <= 0 or rng.random() < 0.1:
        return rng.choice(_GIVEN[dims])
    if dims in _OF_SEVERAL and rng.random() < 0.25:
        text = rng.choice(_OF_SEVERAL[dims])
        for name, inner in (("{f}", "bsc"), ("{t}", "bs")):
            if name in text:
                text = text.replace(name, _value(rng, inner, depth - 1 - (dims == inner)))
        return text
    how = rng.random()
    if how < 0.2:
        return rng.choice(_UNARY).format(a=_value(rng, dims, depth - 1))
    if dims and how < 0.3:
        d = rng.randrange(len(dims)) if len(dims) == 1 or rng.random() < 0.3 else len(dims) - 1
        return rng.choice(_ALONG).format(a=_value(rng, dims, depth - 1), d=d)
    if how < 0.5 or dims == _ALL:
        fewer = rng.choice([few for few in _DIMS if set(few) <= set(dims)])
        b = _expanded(_value(rng, fewer, depth - 1), fewer, dims)
        return rng.choice(_BINARY).format(a=_value(rng, dims, depth - 1), b=b)
    return _reduced(rng, dims, depth)


def _expanded(text: str, dims: str, to: str) -> str:
    return f"({text})[{', '.join(':' if d in dims else 'None' for d in to)}]" if dims not in ("", to) else f"({text})"


def _reduced(rng: random.Random, dims: str, depth: int) -> str:
    wide = rng.choice([more for more in _DIMS if set(more) > set(dims)])
    a, over = _value(rng, wide, depth - 1), [i for i, d in enumerate(wide) if d not in dims]
    d = over[0] if len(over) == 1 else tuple(over)
    how = rng.random()
    if how < 0.5:
        return f"({a}).{'mean' if how < 0.3 else 'sum'}({d})"
    if how < 0.75:
        own = rng.random() < 0.3 or wide not in _WEIGHTS
        m = _value(rng, wide, depth - 2) if own else _GIVEN[wide][rng.choice(_WEIGHTS[wide])]
        return rng.choice(_WEIGHED).format(a=a, m=m, d=d)
    return rng.choice(_REDUCED).format(a=a, d=d)


def _mesh(rng: random.Random) -> dict[str, object]:
    dp, tp, pp = rng.choice([1, 2, 2]), rng.choice([1, 1, 2]), rng.choice([1, 1, 2])
    fix: dict[str, object] = {"dp": dp, "tp": tp, "pp": pp, "cp": 1 if dp * tp * pp > 2 else rng.choice([1, 1, 1, 2])}
    fix |= {"micro": rng.choice([1, 2, 4]), "recompute": rng.choice(["none", "full"])}
    fix["zero"] = rng.choice([0, 1, 2, 3]) if dp > 1 else 1
    return fix | ({"schedule": rng.choice(["1f1b", "gpipe", "zero-bubble"])} if pp > 1 else {})


def main() -> int:
    arguments = options("tests.fuzz.losses", (__doc__ or "").splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    if arguments.show:
        print(program := draw(arguments.seed), outcome(program), sep="\n")
        return 0
    return tabulated(arguments, lambda seeds: counted(seeds, lambda seed: outcome(draw(seed)), print))


if __name__ == "__main__":
    sys.exit(main())
