# ruff: noqa: E501  lines of drawn programs
"""Random small models on random meshes: each trains as on one process, or is refused by an error of autoptd.

    python -m tests.fuzz.programs --count 2000 --seed 0        print a table of the outcomes
    python -m tests.fuzz.programs --seed 1234 --show           print one of them as a readable program
    python -m tests.fuzz.programs --updates                    draw programs whose forward updates buffers

A program is drawn line by line: each line reads tensors made before it and makes a new one, by an op of the rule
table, a move by indices, or a reduction, over samples too. Its last lines are a loss. Programs that mix samples are
not left out: they must be refused. With updates, lines that write to three buffers, and lines that read them, are drawn
between the others, and buffers are compared after three steps.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoptd
from autoptd.cost_models.cluster import Cluster
from autoptd.errors import AutoptdError, RuntimeFault
from autoptd.testing.parity import Trained, differences, train_alone, train_in_lockstep

SAMPLES, TOKENS, WIDTH, CLASSES = 6, 4, 8, 5
TOLERANCE = 1e-9
_UNARY = "tanh sigmoid relu gelu silu exp square abs sin softplus log1p_abs"
_KEEPING = [  # [b, s, d] -> [b, s, d]
    "{x}.softmax(-1)", "{x}.softmax(1)", "{x}.cumsum(1)", "{x}.flip(1)", "{x}.roll(1, 1)", "{x} - {x}.mean(-1, keepdim=True)",
    "{x} * mask[..., None]", "{x}.masked_fill(mask[..., None] == 0, 0.0)", "{x}.transpose(1, 2).contiguous().transpose(1, 2)",
    "{x}.flatten(0, 1).view({x}.shape)", "{x}.flatten(1).unflatten(1, (4, 8))", "torch.cat(({x}[:, 1:], {x}[:, :1]), 1)",
    "torch.cat({x}.chunk(2, -1)[::-1], -1)", "{x} @ {y}.transpose(1, 2) @ {x} * 0.1", "{x} + {y}", "{x} * {y}", "{x} - 0.5 * {y}",
    "torch.where({x} > 0, {x}, {y})", "torch.maximum({x}, {y})", "{x} / (1 + {y}.abs())", "F.normalize({x}, dim=-1)",
    "F.layer_norm({x}, (8,))", "F.rms_norm({x}, (8,))", "{x}.gather(1, {x}.argsort(1))", "{x}.sort(1)[0]",
    "{x}[torch.arange({x}.shape[0])]", "{x}[torch.arange({x}.shape[0])[:, None], ids % 4]",
    "torch.take_along_dim({x}, (ids % 4)[..., None], 1)", "F.scaled_dot_product_attention({x}, {y}, {x})",
    "F.scaled_dot_product_attention({x}, {y}, {x}, is_causal=True)", "torch.einsum('bsd,bsd->bs', {x}, {y})[..., None] * {x} * 0.1",
    "{x} + {x}.mean((1, 2), keepdim=True)", "{x} + {x}[:, :1]", "{x}.repeat_interleave(2, 1)[:, ::2]",
    "{x} + F.one_hot(ids % 8, 8).to({x}.dtype)", "{x}.index_select(1, torch.tensor([1, 0, 3, 2]))",
    "{x} / {x}.shape[0]", "{x} * mask.mean()", "{x} - x.mean()",
]  # fmt: skip
_MIXING = [
    "{x} - {x}.mean(0, keepdim=True)", "{x}.softmax(0)", "{x}.roll(1, 0)", "{x}.flip(0)", "{x}[torch.arange({x}.shape[0]) - 1]",
    "{x} + {x}[0]", "{x}.cumsum(0)", "{x}.flatten(0, 1).cumsum(0).view({x}.shape)", "{x}[ids[:, 0].argsort()]", "{x}.sort(0)[0]",
    "{x}.flatten(0, 1)[{x}.sum(-1).flatten().argsort()].view({x}.shape)", "{x} + {x}.amax(0)",
    "{x} * torch.arange({x}.shape[0]).view(-1, 1, 1)", "torch.zeros_like({x}).index_add(0, ids[:, 0] % {x}.shape[0], {x})",
    "{x} + ({x}[:, 0] @ {x}[:, 0].t()).mean(1)[:, None, None]", "{x} + F.one_hot(ids % 8, 8).sum(0).to({x}.dtype)",
]  # fmt: skip
_LOSSES = [
    "F.cross_entropy({z}.flatten(0, 1), labels.flatten())",
    "F.cross_entropy({z}.flatten(0, 1), labels.flatten(), weight=self.weights)",
    "F.cross_entropy({z}.flatten(0, 1), labels.flatten(), label_smoothing=0.1, weight=self.weights)",
    "F.cross_entropy({z}.transpose(1, 2), labels, reduction='sum') / (labels >= 0).sum().clamp(min=1)",
    "F.cross_entropy({z}.flatten(0, 1), {z}.softmax(-1).flatten(0, 1).detach())",
    "F.mse_loss({z}[..., 0], mask)", "F.smooth_l1_loss({z}[..., 0], mask)", "F.binary_cross_entropy_with_logits({z}[..., 0], mask)",
    "({z}.square().mean(-1) * mask).sum() / (mask.sum() + 1e-4)", "({z}.square().mean(-1) * mask).mean() / mask.mean().clamp(min=1e-6)",
    "({z}.mean(-1) * self.weights[labels.clamp(min=0)]).sum() / self.weights[labels.clamp(min=0)].sum()",
    "F.mse_loss({z}[..., 0], mask).sqrt()", "{z}.square().mean().exp()", "{z}.norm()", "{z}.exp().mean().log()",
    "1 - (2 * ({z}[..., 0].sigmoid() * mask).sum() + 1) / ({z}[..., 0].sigmoid().sum() + mask.sum() + 1)",
    "({z}.softmax(-1).mean((0, 1)) * F.one_hot({z}.argmax(-1), 5).to({z}.dtype).mean((0, 1))).sum() * 5",
    "{z}.mean((0, 1)).square().sum()", "{z}.var()", "({z}[..., 0] * {z}[..., 1].sigmoid()).sum() / {z}[..., 1].sigmoid().sum()",
    "({z}.softmax(-1).mean((0, 1)) * {z}.softmax(-1).mean((0, 1)).log()).sum()", "{z}.max()", "{z}.median()", "{z}[0].mean()",
    "{z}.logsumexp((0, 1)).sum()", "1 - F.cosine_similarity({z}[:, 0], {z}[:, 1], dim=-1).mean()",
    "F.triplet_margin_loss({z}[:, 0], {z}[:, 1], {z}[:, 2])", "F.kl_div({z}.log_softmax(-1), {z}.softmax(-1).detach(), reduction='batchmean')",
    "({z}[:, 0] @ {z}[:, 0].t()).diagonal().mean()", "F.cross_entropy({z}[:, 0] @ {z}[:, 1].t(), torch.arange({z}.shape[0]))",
    "({z} - {z}.mean(0)).square().mean()", "{z}.amax(1).mean()", "(self.scale.exp() * {z}.square().mean() + self.scale)",
]  # fmt: skip

_UPDATES = [
    "self.mean.lerp_({x}.mean((0, 1)), 0.3)", "self.mean = 0.9 * self.mean + 0.1 * {x}.detach().mean((0, 1))",
    "self.mean.copy_({x}.var((0, 1)) + self.mean)", "self.seen += ({x} > 0.1).sum((0, 1))",
    "self.seen.add_(F.one_hot(ids % 8, 8).sum((0, 1)))", "self.seen += torch.bincount({x}.argmax(-1).flatten(), minlength=8)",
    "self.mean.add_(1e-2 * torch.sign(self.seen.double().mean() - self.seen))", "self.steps += 1", "self.steps += x.shape[0]",
    "self.mean.index_add_(0, {x}.argmin(-1).flatten(), mask.flatten())", "self.seen.zero_()", "self.mean.sub_(self.mean.mean())",
    "self.mean[2:5] += {x}.sum((0, 1))[2:5] / mask.sum()", "self.mean.mul_(0.5).add_({x}.flatten(0, 1).std(0), alpha=0.1)",
    "self.mean.copy_({x}[..., 0].sum().expand(8))", "self.mean.copy_(torch.histc({x}.argmax(-1).to({x}), 8, 0, 7))",
    "self.mean.add_(({x}.softmax(-1) * mask[..., None]).sum((0, 1)) / (mask.sum() + 1))", "self.mean.clamp_(-1, 1)",
    "self.mean.copy_(torch.where({x}.sum((0, 1)) > 0, self.mean, -self.mean))", "self.mean.add_({x}.sum(0).sum(0), alpha=1e-3)",
    "self.mean.div_(1 + self.steps)", "self.mean += {x}.transpose(0, 1).flatten(0, 1).sum(0).flip(0) * 1e-2",
    "self.mean.lerp_({x}.norm(dim=(0, 1)), 0.1)", "self.mean.add_({x}.square().mean().sqrt())", "self.mean = self.mean.roll(1) + {x}.mean() * 0.1",
    "self.mean.copy_({x}.amax((0, 1)))", "self.mean.copy_({x}[-1, -1])", "self.mean.copy_({x}[ids[:, 0].argsort()][0, 0])",
]  # fmt: skip
_READS = [
    "{x} + self.mean", "{x} * (1 + 0.1 * self.mean.sigmoid())", "{x} + 1e-3 * self.seen", "{x} / (1 + self.steps)",
    "{x} + 0.1 * torch.sign(self.mean)",
]  # fmt: skip
_BUFFERS = ["mean', torch.linspace(-0.3, 0.4, 8)", "seen', torch.zeros(8, dtype=torch.long)", "steps', torch.zeros(())"]


@dataclass
class Program:
    """Forward pass over x [b, s, d], ids [b, s], labels [b, s] and mask [b, s], and the way it is trained."""

    seed: int
    lines: list[str] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)  # statements of __init__
    fix: dict[str, object] = field(default_factory=dict)
    updates: bool = False

    def __str__(self) -> str:
        head = [f"# {self.fix}", *(f"self.{line}" for line in self.layers)]
        return "\n".join([*head, "def forward(self, x, ids, labels, mask):", *(f"    {line}" for line in self.lines)])


def draw(seed: int) -> Program:
    """Draw the program of a seed."""
    rng, program = random.Random(seed), Program(seed)
    names = ["x"]
    for i in range(rng.randint(2, 7)):
        x, y = rng.choice(names[-2:]), rng.choice(names)
        kind = rng.random()
        if kind < 0.4:
            program.layers.append(f"f{i} = nn.Linear({WIDTH}, {WIDTH}, bias={rng.random() < 0.5})")
            text = f"self.f{i}({x})" + (f".{rng.choice(['tanh', 'sigmoid', 'relu'])}()" if rng.random() < 0.5 else "")
        elif kind < 0.5:
            program.layers.append(f"f{i} = nn.Embedding(16, {WIDTH})")
            text = f"{x} + self.f{i}(ids)"
        elif kind < 0.58:
            program.layers.append(f"f{i} = nn.LayerNorm({WIDTH})")
            text = f"self.f{i}({x})"
        elif kind < 0.68:
            op = rng.choice(_UNARY.split())
            text = (
                f"{x}.abs().log1p()"
                if op == "log1p_abs"
                else f"F.{op}({x})"
                if op in ("gelu", "silu", "softplus")
                else f"{x}.{op}()"
            )
        elif kind < 0.95:
            text = rng.choice(_KEEPING).format(x=x, y=y)
        else:
            text = rng.choice(_MIXING).format(x=x, y=y)
        names.append(f"h{i}")
        program.lines.append(f"h{i} = {text}")
    program.layers += [f"head = nn.Linear({WIDTH}, {CLASSES})", "scale = nn.Parameter(torch.tensor(0.3))"]
    program.lines.append(f"z = self.head({names[-1]})")
    terms = [rng.choice(_LOSSES).format(z="z") for _ in range(rng.choice([1, 1, 1, 2]))]
    program.lines.append(f"return {' + 0.3 * '.join(f'({t})' if len(terms) > 1 else t for t in terms)}")
    program.fix = _mesh(rng)
    return program


def with_updates(program: Program) -> Program:
    """Draw updates of buffers into a program, and lines that read them."""
    rng, lines, names = random.Random(program.seed + 10**6), list[str](), ["x"]
    if rng.random() < 0.6:
        lines.append(f"x = {rng.choice(_READS).format(x='x')}")
    for line in program.lines[:-2]:
        names.append(line.split(" = ")[0])
        lines.append(line)
        while rng.random() < 0.4:
            lines += ["with torch.no_grad():", f"    {rng.choice(_UPDATES).format(x=rng.choice(names))}"]
        if rng.random() < 0.3:
            lines.append(f"{names[-1]} = {rng.choice(_READS).format(x=names[-1])}")
    layers = [*program.layers, *(f"register_buffer('{text})" for text in _BUFFERS)]
    fix = {**program.fix, **({"cp": 2} if rng.random() < 0.3 else {})}
    return replace(program, lines=[*lines, *program.lines[-2:]], layers=layers, fix=fix, updates=True)


def _mesh(rng: random.Random) -> dict[str, object]:
    dp, tp, pp = rng.choice([1, 2]), rng.choice([1, 1, 2]), rng.choice([1, 1, 2])
    fix: dict[str, object] = {
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "micro": rng.choice([1, 2]),
        "recompute": rng.choice(["none", "full"]),
    }
    fix["zero"] = rng.choice([0, 1, 2, 3]) if dp > 1 else 1
    if pp > 1:
        fix["schedule"] = rng.choice(["1f1b", "gpipe", "zero-bubble"])
    return fix


def model_of(program: Program) -> nn.Module:
    """Build the module from the program's lines."""
    layers = "\n".join(f"        self.{line}" for line in program.layers)
    body = "\n".join(f"        {line}" for line in program.lines)
    text = (
        "class Drawn(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"{layers}\n        self.register_buffer('weights', torch.linspace(0.5, 2.0, {CLASSES}))\n"
        f"    def forward(self, x, ids, labels, mask):\n{body}\n"
    )
    space: dict[str, object] = {"nn": nn, "torch": torch, "F": F}
    exec(compile(text, f"<program {program.seed}>", "exec"), space)
    torch.manual_seed(program.seed)
    made = space["Drawn"]().double()  # type: ignore[operator]
    assert isinstance(made, nn.Module)
    return made


def batch_of(seed: int, samples: int = SAMPLES) -> dict[str, Tensor]:
    """Make a batch with ragged labels and masks."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (samples, TOKENS), generator=rng)
    labels[torch.rand(samples, TOKENS, generator=rng) < 0.3] = -100
    labels[0, 0] = 1
    mask = (torch.rand(samples, TOKENS, generator=rng) < torch.rand(samples, 1, generator=rng) + 0.1).double()
    mask[0, 0] = 1
    x = torch.randn(samples, TOKENS, WIDTH, generator=rng, dtype=torch.float64)
    return {"x": x, "ids": torch.randint(0, 16, (samples, TOKENS), generator=rng), "labels": labels, "mask": mask}


def outcome(program: Program) -> str:
    """Train a program both ways; see `compared`."""
    model, batch = model_of(program), batch_of(program.seed)
    batches = [batch, batch_of(program.seed + 7), batch] if program.updates else [batch]
    step = int(program.fix["dp"]) * int(program.fix["micro"])  # type: ignore[call-overload]
    return compared(model, batches, program.fix, -(-SAMPLES // step) * step, with_state=program.updates)


def compared(
    model: nn.Module,
    batches: Sequence[dict[str, Tensor]],
    fix: Mapping[str, Any],
    samples: int,
    *,
    optimizer: str = "sgd",
    cluster: str | Cluster = "dgx-h100",
    with_state: bool = True,
    compile: str | None = None,
) -> str:
    """Train both ways: `equal`, `refused: …`, `no …` (of the plain model), or a fault: `off by …` or `raw: …`.

    samples: of a step; the batches may have fewer. with_state: whether parameters and buffers are compared at the end.
    compile: backend of torch.compile for the program.
    """
    options = {"optimizer": optimizer, "optimizer_options": {"lr": 0.01}}
    try:
        alone = train_alone(model, batches, **options)  # type: ignore[arg-type]
    except RuntimeError as error:
        return f"no program: {str(error).splitlines()[0][:80]}"
    numbers = [*alone.losses, *(float(g.sum()) for g in alone.gradients.values())]
    if not all(abs(x) < 1e12 for x in numbers):  # also true of NaN
        return "no numbers"
    if alone.norms[0] < 1e-10:
        return "no gradient but rounding"
    world = math.prod(int(fix.get(axis, 1)) for axis in ("dp", "tp", "pp", "cp"))

    def off() -> dict[str, float]:
        made = autoptd.parallelize(
            model, world=world, cluster=cluster, batch=samples, precision="fp64",
            inputs={n: x[:2] for n, x in batches[0].items()}, fix=fix, compile=compile, **options,
        )  # fmt: skip
        longer = {"timeout_s": 300.0} if compile else {}  # the first step compiles
        found = train_in_lockstep(made, batches, **longer)
        return _differences(found, alone, with_state) | {f"copies of {name}": math.inf for name in found.diverged}

    return judged(off, lambda: _differences(train_alone(perturbed(model), batches, **options), alone, with_state))  # type: ignore[arg-type]


def judged(off: Callable[[], Mapping[str, float]], noise: Callable[[], Mapping[str, float]]) -> str:
    """Return the outcome of a training: see `compared`.

    off: runs it, and returns how far its numbers are from those of one process. noise: what rounding alone may do.
    """
    try:
        found = off()
    except AutoptdError as error:
        if isinstance(error, RuntimeFault) and "is not finite" not in error.what:  # a rank failed
            return f"raw: {error.what.splitlines()[0][:160]}"
        return f"refused: {re.sub(r'[0-9]+', 'N', error.what.splitlines()[0])[:90]}"
    except Exception as error:  # noqa: BLE001  what a user must never see
        return f"raw: {type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
    worst = max(found, key=lambda name: math.inf if found[name] != found[name] else found[name])
    if found[worst] <= TOLERANCE:
        return "equal"
    return f"off by {found[worst]:.1e} in {worst}" if found[worst] > 100 * max(noise().values()) else "no accuracy"


def _differences(found: Trained, alone: Trained, with_state: bool) -> dict[str, float]:
    losses = enumerate(zip(found.losses, alone.losses, strict=True))
    off = {f"loss {step}": abs(x - y) / max(abs(y), 1e-12) for step, (x, y) in losses}
    off |= {f"the gradient of {n}": error for n, error in differences(found.gradients, alone.gradients).items()}
    return off | (differences(found.state, alone.state) if with_state else {})


def perturbed(model: nn.Module) -> nn.Module:
    """Return a copy with the last bit of its parameters changed: what rounding alone may do to its numbers."""
    made = copy.deepcopy(model)
    with torch.no_grad():
        for p in made.parameters():
            p.mul_(1 + torch.finfo(p.dtype).eps * torch.randint(-1, 2, p.shape).to(p.dtype))
    return made


def run(seeds: Sequence[int], say: Callable[[str], object] = print, *, updates: bool = False) -> Counter[str]:
    """Return counts by outcome of the programs of these seeds; faults are reported as they are found."""
    return counted(seeds, lambda seed: outcome(with_updates(draw(seed)) if updates else draw(seed)), say)


def counted(seeds: Sequence[int], judge: Callable[[int], str], say: Callable[[str], object]) -> Counter[str]:
    """Return counts by outcome of what is drawn from these seeds; faults are reported as they are found."""
    found: Counter[str] = Counter()
    warnings.simplefilter("ignore")
    for seed in seeds:
        result = judge(seed)
        found[result if result.startswith(("equal", "refused", "no")) else result.split(":")[0].split(" ")[0]] += 1
        if result.startswith(("off", "raw")):
            say(f"seed {seed}: {result}")
    return found


def options(module: str, description: str) -> argparse.ArgumentParser:
    """Return the options that commands which draw from seeds have."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--show", action="store_true", help="print what is drawn from the seed, and what becomes of it")
    return parser


def tabulated(arguments: argparse.Namespace, run: Callable[[Sequence[int]], Counter[str]]) -> int:
    """Print the table of the outcomes of a command's seeds; return its exit code."""
    began = time.perf_counter()
    found = run(range(arguments.seed, arguments.seed + arguments.count))
    for what, count in found.most_common():
        print(f"{count:6}  {what}")
    print(f"{arguments.count} drawn, seeds from {arguments.seed}, {time.perf_counter() - began:.0f} s")
    return int(any(what.startswith(("off", "raw")) for what in found))


def main() -> int:
    parser = options("tests.fuzz.programs", __doc__.splitlines()[0])
    parser.add_argument("--updates", action="store_true", help="draw programs that update buffers")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.show:
        program = with_updates(draw(arguments.seed)) if arguments.updates else draw(arguments.seed)
        print(program, outcome(program), sep="\n")
        return 0
    return tabulated(arguments, lambda seeds: run(seeds, updates=arguments.updates))


if __name__ == "__main__":
    sys.exit(main())
