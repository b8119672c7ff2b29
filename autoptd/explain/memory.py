"""A plan's memory as formulas: the report of `autoptd explain PLAN --memory`.

State in n, d, u and r (`cost_models/memory.py`). Activations of each block in b, s, t, with cp also c, and, if the
model has a configuration with its widths, in h, a, f and v (`passes/analysis/activations.py`). The memory peak of each
block (`passes/analysis/liveness.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

import sympy
import torch
from rich.padding import Padding
from rich.text import Text
from torch import fx

from autoptd.compile.traced import TracedModel
from autoptd.cost_models.memory import D, K, N, U, alive, formulas
from autoptd.explain.plan import WIDTH, headline, render
from autoptd.explain.tables import columns
from autoptd.passes.analysis.activations import nbytes, symbolic_bytes
from autoptd.passes.analysis.dataflow import CONVERTED, RANKS
from autoptd.passes.blocks import find_blocks
from autoptd.passes.fold import Segment
from autoptd.passes.opcall import Sizes
from autoptd.passes.sharding.sharding import Sharding
from autoptd.passes.sharding.shared_masks import converting, shared_masks
from autoptd.passes.trace.traced import BATCH, SEQUENCE
from autoptd.plans.model import Plan
from autoptd.search.sharding.op_table import Workbook

_MIB = 2**20
_TOKEN_RANKS = sympy.Symbol("c", integer=True, positive=True)  # ranks of the cp axis
_WIDTHS = (  # symbol, and its names in Hugging Face configurations
    ("h", ("hidden_size", "n_embd", "d_model")),
    ("f", ("intermediate_size", "n_inner", "ffn_dim")),
    ("v", ("vocab_size",)),
    ("a", ("num_attention_heads", "n_head")),
)


def size_names(config: Any) -> dict[int, sympy.Expr]:
    """Return symbols for the sizes in a model's configuration: hidden h, MLP f, vocabulary v, heads a. {} for None."""
    found: dict[int, sympy.Expr] = {}
    values: dict[str, int] = {}
    for symbol, attributes in _WIDTHS:
        value = next((v for a in attributes if isinstance(v := getattr(config, a, None), int) and v > 1), None)
        if value is not None and value not in found:
            values[symbol] = value
            found[value] = sympy.Symbol(symbol, integer=True, positive=True)
    if "h" in values and "a" in values and values["h"] % values["a"] == 0:
        found.setdefault(values["h"] // values["a"], found[values["h"]] / found[values["a"]])
    return found


def memory_data(plan: Plan, source: TracedModel, sharding: Sharding) -> dict[str, Any]:
    """Return the formulas, and their values at the plan's sizes, in bytes."""
    names = size_names(getattr(source.model, "config", None))
    state = formulas(
        precision=plan.precision,
        optimizer=plan.optimizer,
        zero=plan.zero,
        gradients=plan.method.gradients,
    )
    held = {i: policy for stage in plan.stages for i, policy in plan.policies(stage).items()}
    number = _number(plan, source)
    blocks, workbook = (
        [],
        Workbook(source.folded, plan.method.kernels, fast_dropout=plan.method.drops_fast(plan.mesh.cp)),
    )
    masks = shared_masks(source.folded, sharding, number) if plan.mesh.cp == 1 else {}
    for segments in _blocks(source):
        policy = next((held[s.index] for s in segments if s.index in held), "none")
        blocks.append(_block(segments, sharding, workbook, policy, names, number, plan, masks))
    stages, schedule = plan.mesh.pp, plan.schedule
    counts = [alive(i, stages, schedule.microbatches, schedule.kind, schedule.virtual) for i in range(stages)]
    waiting = [max(sum(row[i == 0 :]) for row in each.waiting) for i, each in enumerate(counts) if each.waiting]
    return {
        "state": {name: str(text) for name, text in state.items()},
        "blocks": blocks,
        "sizes": {str(symbol): size for size, symbol in names.items() if symbol.is_Symbol}
        | {str(RANKS): sharding.ranks}
        | ({str(_TOKEN_RANKS): plan.mesh.cp} if plan.mesh.cp > 1 else {}),
        "in_flight": [each.chunks for each in counts],
    } | ({"waiting": waiting} if waiting else {})


def _block(
    segments: tuple[Segment, ...],
    sharding: Sharding,
    workbook: Workbook,
    policy: str,
    names: Mapping[int, sympy.Expr],
    number: Sizes,
    plan: Plan,
    masks: Mapping[fx.Node, torch.dtype],
) -> dict[str, Any]:
    cp, regather, in_place = plan.mesh.cp, plan.method.gathers == "again", plan.method.loss == "in_place"
    moments = workbook.walk(segments, sharding.kinds, policy, regather=regather, in_place_loss=in_place)
    found = moments.kept
    shared = {f"{n.name}{CONVERTED}" for s in segments for n in converting(s, masks)}  # by all blocks of a stage
    found = tuple(k for k in found if k.storage.name not in shared)
    if cp > 1 and plan.method.context == "ring":  # which saves no converted masks
        found = tuple(k for k in found if not k.storage.name.endswith(CONVERTED))
    where, peak = moments.fullest(number, sharding.ranks, cp)[0], moments.peak(number, sharding.ranks, cp)
    formula = symbolic_bytes(found, names)
    if cp > 1:  # a rank has the rows of its own tokens, of attention scores too
        terms = sympy.Add.make_args(formula)
        formula = sympy.Add(*(term / _TOKEN_RANKS if term.has(SEQUENCE) else term for term in terms))
    return {
        "block": _common([s.kind for s in segments]),
        "recompute": policy,
        "kept": str(sympy.collect(formula, [BATCH * RANKS**-1, BATCH])),
        "kept_bytes": nbytes(found, number, sharding.ranks, cp),
        "temporary_bytes": peak.temporary,
        "waiting_bytes": peak.waiting,
        "fullest": where,
    }


def _common(names: list[str]) -> str:
    """Return the common prefix of the names of a block's segments."""
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    return "".join(letters[0] for letters in alike).rstrip(".{") or names[0]


def _blocks(source: TracedModel) -> list[tuple[Segment, ...]]:
    """Return the segments of the first of equal blocks, in order."""
    return [block.segments(source.folded) for block in find_blocks(source.folded) if block.like == block.first]


def _number(plan: Plan, source: TracedModel) -> Sizes:
    """Return the sizes of one cp rank."""
    by_name = {str(symbol): symbol for symbol in source.folded.traced.sizes}
    values = {by_name[n]: v for n, v in plan.sizes.items() if n in by_name}
    return Sizes(values | {s: v // plan.mesh.cp for s, v in values.items() if s == SEQUENCE}, BATCH)


def explain_memory(plan: Plan, source: TracedModel, sharding: Sharding, width: int = WIDTH) -> str:
    """Return the formulas as text of at most `width` columns."""
    data = memory_data(plan, source, sharding)
    legend = (
        f"{N}: elements of a rank's parameters, padding included; {D}: ranks over which ZeRO shards; "
        f"{U}: elements of the largest block"
    )
    legend += f"; {K}: optimizer state per element, on average" if plan.whole else ""
    sizes = ", ".join(f"{name} = {value}" for name, value in data["sizes"].items())
    state = columns("part", "bytes", gap=1)
    for name, text in data["state"].items():
        state.add_row(name, _readable(text))
    waits = {"waiting_bytes": "from B to W, MiB"} if "waiting" in data else {}
    amounts = {"kept_bytes": "MiB", **waits, "temporary_bytes": "temporary peak, MiB"}
    blocks = columns("block", "saved per microbatch, bytes", *amounts.values(), "at", gap=1)
    for row in data["blocks"]:
        policy = "" if row["recompute"] == "none" else f" ({row['recompute']} recompute)"
        cells = [f"{row[key] / _MIB:,.1f}" for key in amounts]
        blocks.add_row(f"{row['block']}{policy}", _readable(row["kept"]), *cells, row["fullest"])
    flying = f"In-flight microbatches, by stage: {', '.join(map(str, data['in_flight']))}"
    if waits:
        flying += f"; of them between B and W: {', '.join(map(str, data['waiting']))}"
    return render(
        [
            Text(headline(plan)),
            Text(""),
            Text("State of a rank"),
            Padding(state, (0, 0, 0, 2)),
            Padding(Text(legend), (0, 0, 0, 2)),
            Text(""),
            Text(f"Activations of a rank: {sizes}"),
            Padding(blocks, (0, 0, 0, 2)),
            Text(""),
            Text(flying),
        ],
        width,
    )


def _readable(text: str) -> str:
    return text.replace("**2", "²").replace("*", " ")
