"""Random networks of layers on random meshes: each trains as on one process, or is refused by an error of autoptd.

    python -m tests.fuzz.networks --count 400 --seed 0        print a table of the outcomes
    python -m tests.fuzz.networks --seed 17 --show            print one of them, its plan's constraints and its outcome
    python -m tests.fuzz.networks --pictures                  draw networks of pictures
    python -m tests.fuzz.networks --compiled                  run all ranks through torch.compile

A network is written from pieces (tests/fuzz/pieces.py) that are put together into one or two kinds of layers, which
read early tensors and hand tensors on; embeddings, heads or whole layers may be tied.
"""

from __future__ import annotations

import importlib.util
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.cost_models.cluster import Cluster
from autoptd.runtime import torch_compile
from tests.fuzz import habits
from tests.fuzz.pieces import EXPERTS, PICTURES, TOKENS, Family, Piece
from tests.fuzz.programs import compared, counted, options, tabulated
from tests.parity.parity_check import bulk

SAMPLES, _SEQ, _WIDTH, _VOCAB = 8, 8, 16, 12
_SIDE = 4  # of a picture, in pixels
_HEAD = f"""import math
import torch
import torch.nn.functional as F
from torch import nn

W, H, D, V, E, s, p = {_WIDTH}, 4, {_WIDTH // 4}, {_VOCAB}, 4, {_SEQ}, {_SIDE}
eye = torch.eye(s, dtype=torch.bool)
{habits.HEAD}"""


@dataclass
class _Body:
    """The lines of a module that is being written, and the tensors that the next piece may read."""

    rng: random.Random
    pool: list[str]
    layer: str  # the layer's number in the text
    init: list[str]
    forward: list[str]

    def add(self, pieces: Sequence[Piece], number: int) -> None:
        """Write a piece; what it makes is the newest tensor of the pool."""
        piece = self.rng.choice(pieces)
        x = self.pool[-1] if self.rng.random() < 0.8 else self.rng.choice(self.pool)
        names = {"n": str(number), "i": self.layer, "x": x, "y": self.rng.choice(self.pool[-4:]), "o": f"x{number}"}
        self.init += _filled(piece.init, names)
        self.forward += _filled(piece.forward, names)
        self.pool.append(f"x{number}")


def _filled(text: str, names: Mapping[str, str]) -> list[str]:
    for name, value in names.items():
        text = text.replace("{" + name + "}", value)
    return [line for line in text.split("\n") if line.strip()]


def _indented(lines: Sequence[str]) -> str:
    return "".join(f"        {line}\n" for line in lines)


def _block(rng: random.Random, family: Family, name: str) -> str:
    body = _Body(rng, ["early", "x"], "self.i", ["self.i = i"], [family.sizes])
    for number in range(rng.randint(1, 4)):
        body.add(rng.choices([family.mixers, family.norms, family.edges, habits.HABITS], [5, 2, 3, 2])[0], number)
    out = body.pool[-1]
    how = rng.random()
    returned = f"{out} + x" if how < 0.3 else f"({out}).tanh()" if how < 0.5 else out
    if rng.random() < 0.3:
        body.forward.append(f"memo = memo + {family.pooled.format(x=out)} * 0.1")
    return (
        f"\n\nclass {name}(nn.Module):\n    def __init__(self, i):\n        super().__init__()\n"
        f"{_indented(body.init)}\n"
        f"    def forward(self, x, early, side, memo, mask, {family.given}):\n{_indented(body.forward)}"
        f"        return {returned}, memo\n"
    )


def network_text(rng: random.Random, family: Family = TOKENS) -> str:
    """Write a module `Net` whose forward takes the family's input, labels, mask and targets, and returns a loss."""
    layers = rng.randint(2, 5)
    kinds = rng.choice([1, 1, 1, 2])
    blocks = "".join(_block(rng, family, f"Block{kind}") for kind in range(kinds))
    front = _Body(rng, ["side", "x"], "0", [], [])
    for number in range(rng.choice([0, 0, 1, 2])):
        front.add(rng.choice([family.mixers, family.edges]), number)
    init = [
        *family.init,
        f"self.layers = nn.ModuleList(Block0(i) if i % {kinds} == 0 else Block{kinds - 1}(i) for i in range({layers}))",
        "self.head = nn.Linear(W, V, bias=False)",
        *(["self.norm = nn.Identity()"] if rng.random() < 0.4 else []),
        *(["self.head.weight = self.table.weight"] if family is TOKENS and rng.random() < 0.4 else []),
        *(["self.layers[-1] = self.layers[0]"] if rng.random() < 0.07 else []),
        *(["self.before = nn.Tanh()"] if rng.random() < 0.5 else []),
    ]
    early = rng.choice(["first", "first", "x", "kept[0]", "kept[-1]", "side"])
    terms = [f" + {term}" for term in rng.sample(family.terms, rng.choice([0, 0, 1, 2]))]
    lines = [
        family.sizes,
        family.begin,
        "side = self.before(x)" if rng.random() < 0.5 else "side = self.before(torch.sin(targets))",
        "memo = torch.zeros(b, W, dtype=x.dtype)",
        *front.forward,
        f"first = x = {front.pool[-1]}",
        "kept = [x]",
        "for layer in self.layers:",
        f"    x, memo = layer(x, {early}, side, memo, mask, {family.given})",
        "    kept.append(x)",
        *(["x = torch.stack(kept).mean(0)"] if rng.random() < 0.15 else []),
        *([f"x = x + {family.spread}"] if rng.random() < 0.3 else []),
        "x = self.norm(x)",
        *(["logits = self.head(x)"] if family is TOKENS else []),
        f"return {rng.choice(family.losses)}{''.join(terms)}",
    ]
    return (
        f"{_HEAD}L = {layers}\n{blocks}\n\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"{_indented([*front.init, *init])}\n"
        f"    def forward(self, {family.given}, labels, mask, targets):\n{_indented(lines)}"
    )


def random_fix(rng: random.Random, text: str, family: Family = TOKENS) -> dict[str, Any]:
    """Return constraints of a network's plan, which may have none."""
    cuts = [1, 1, 1, 1]
    for _ in range(rng.randint(1, 3)):
        cuts[rng.choice([0, 1, 1, 2, 2, *([3] if family is TOKENS else [])])] *= 2
    dp, tp, pp, cp = cuts
    fix: dict[str, Any] = {"dp": dp, "tp": tp, "pp": pp, "cp": cp}
    fix["micro"] = rng.choice([1, 2, 2, 4, SAMPLES]) if rng.random() < 0.8 else SAMPLES // dp
    if dp * cp > 1 and rng.random() < 0.7:
        fix["zero"] = rng.choice([0, 1, 2, 3])
    if rng.random() < 0.6:
        fix["recompute"] = rng.choice(["none", "full", "selective"])
    if pp > 1 and rng.random() < 0.6:
        fix["schedule"] = rng.choice(["1f1b", "gpipe", "zero-bubble", "interleaved", "zero-bubble-v"])
        if fix["schedule"] in ("interleaved", "zero-bubble-v"):
            fix["virtual"] = 2
    if rng.random() < 0.3:
        fix["sequence_parallel"] = rng.random() < 0.5
    if dp > 1 and re.search(EXPERTS.replace("{n}", "[0-9]+").replace("(", r"\("), text) and rng.random() < 0.7:
        fix["ep"] = 2
    return fix


def random_batch(rng: random.Random, family: Family = TOKENS) -> dict[str, Tensor]:
    """Return the inputs of SAMPLES samples; a picture has as many places as a sequence has tokens."""
    made = torch.Generator().manual_seed(rng.randrange(1 << 30))
    places = _SEQ if family is TOKENS else _SIDE * _SIDE
    labels = torch.randint(_VOCAB, (SAMPLES, places), generator=made)
    labels[torch.rand(SAMPLES, places, generator=made) < 0.3] = -100
    mask = torch.rand(SAMPLES, places, generator=made) < 0.6
    targets = torch.randn(SAMPLES, places, _WIDTH, generator=made, dtype=torch.float64)
    if family is TOKENS:
        ids = torch.randint(_VOCAB, (SAMPLES, places), generator=made)
        return {"ids": ids, "labels": labels, "mask": mask, "targets": targets}
    image = torch.randn(SAMPLES, 3, _SIDE, _SIDE, generator=made, dtype=torch.float64)
    shape = _SIDE, _SIDE
    targets = targets.transpose(1, 2).unflatten(2, shape).contiguous()
    return {"image": image, "labels": labels, "mask": mask.unflatten(1, shape), "targets": targets}


def loaded(text: str, folder: Path, seed: int) -> nn.Module:
    """Return a Net of the text, in fp64, whose parameters are all random."""
    path = folder / f"net{seed}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"net{seed}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    torch.manual_seed(seed)
    spec.loader.exec_module(module)
    net: nn.Module = module.Net().double()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn_like(p), alpha=0.05)
    return net


def outcome(seed: int, folder: Path, family: Family = TOKENS, compile: str | None = None) -> str:
    """Train a network both ways; see `compared`."""
    rng = random.Random(seed)
    text = network_text(rng, family)
    fix = random_fix(rng, text, family)
    batches, optimizer = [random_batch(rng, family) for _ in range(2)], rng.choice(["sgd", "adamw"])
    cluster = Cluster.load("dgx-h100")
    given = bulk(cluster) if rng.random() < 0.8 else cluster  # without latencies, small tensors are split as well
    return compared(
        loaded(text, folder, seed), batches, fix, SAMPLES, optimizer=optimizer, cluster=given, compile=compile
    )


def compiled_outcome(seed: int, folder: Path, family: Family = TOKENS) -> str:
    """Train a network both ways, all ranks through torch.compile without code generation; see `compared`."""
    torch.compiler.reset()  # forgets the graphs of the network before
    torch_compile._compiled.cache_clear()
    return outcome(seed, folder, family, "aot_eager")


Judge = Callable[[int, Path, Family], str]


def run(
    seeds: Sequence[int], say: Callable[[str], object] = print, family: Family = TOKENS, judge: Judge = outcome
) -> Counter[str]:
    """Return counts by outcome of what is drawn from these seeds; faults are reported as they are found."""
    with tempfile.TemporaryDirectory() as folder:
        return counted(seeds, lambda seed: judge(seed, Path(folder), family), say)


def command(
    module: str,
    description: str,
    shown: Callable[[random.Random, Family], object],
    judge: Judge,
    compiled: Judge | None = None,
) -> int:
    """Run a command that draws networks, and return its exit code.

    shown: the text of what is drawn. compiled: the judge with `--compiled`; None: there is no such option.
    """
    parser = options(module, description)
    parser.add_argument("--pictures", action="store_true", help="draw networks of pictures instead of tokens")
    if compiled is not None:
        parser.add_argument("--compiled", action="store_true", help="run all ranks through torch.compile")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    judge = compiled if compiled is not None and arguments.compiled else judge
    family = PICTURES if arguments.pictures else TOKENS
    if arguments.show:
        print(shown(random.Random(arguments.seed), family))
        with tempfile.TemporaryDirectory() as folder:
            print(judge(arguments.seed, Path(folder), family))
        return 0
    return tabulated(arguments, lambda seeds: run(seeds, family=family, judge=judge))


def _shown(rng: random.Random, family: Family) -> str:
    text = network_text(rng, family)
    return f"{text}\n# {random_fix(rng, text, family)}"


if __name__ == "__main__":
    sys.exit(command("tests.fuzz.networks", __doc__.splitlines()[0], _shown, outcome, compiled_outcome))
