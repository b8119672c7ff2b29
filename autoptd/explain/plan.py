"""The text of a plan: the answer first, then its cost, then the placement of every parameter.

All is plain text from rich tables. The first screen holds the answer, the prediction, time and memory; the rest lists
the modules of each stage and the placement of each parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autoptd.cost_models.memory import CONFIDENCE, MOST_MEASURED
from autoptd.explain.choices import choices, offloaded, recompute_text
from autoptd.explain.costs import AS_STATED, CostQuestion, cost_lines
from autoptd.explain.tables import GIB, WIDTH, columns, part_name, render, seconds, section, words
from autoptd.plans.data import PlanData, StagePlan
from autoptd.text import fold_table, printable, ranges

_BAR = 24
SIGNIFICANT, MOST_TERMS = 0.05, 5  # share of the largest difference that is named; most terms in a sentence
_STAGES = 16  # most rows of a table with a row per stage
_HOST = "on host"  # bytes in a row of the memory table that are not of the device
_SHORT = {
    "activations": "acts",
    "communication": "comm",
    "gradients": "grads",
    "parameters": "params",
    "temporary": "temp",
}  # column heads if the page is narrower than WIDTH, or has many columns
_LEGEND = (
    ("S", "S<dim> split along dim"),
    ("S/", "S<dim>/<n> split within each of n fused parts"),
    ("B", "B replicated"),
    ("Bp", "Bp replicated, gradients summed over tp"),
)
_Row = TypeVar("_Row")


SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "interleaved 1F1B"}  # usual spellings
_GRADIENTS = {
    "main": "main gradients",
    "compute": "compute-type gradients",
    "both": "gradients in both types",
    "fused": "main gradients added by products",
}


def explain(plan: PlanData, width: int = WIDTH, all: bool = False, costs: CostQuestion = AS_STATED) -> str:
    """Return the plan as text of at most `width` columns; with `all`, every stage, activation and op.

    `costs`: a price or a run that is asked about.
    """
    parts: list[RenderableType] = [
        Text(headline(plan)),
        Text(steps(plan)),
        Text(prediction(plan)),
        *map(Text, cost_lines(costs.of(plan))),
        Text(fullest_rank(plan)),
        Text(method(plan)),
        *section("Time of one step", _time_table(plan)),
        *section("Memory of one rank in each stage, GiB", _memory_table(plan, width, all)),
        *section("Stages", _stage_table(plan, all)),
    ]
    if plan.mesh.tp > 1 or all:
        legend = "; ".join(text for start, text in _LEGEND if _is_used(plan, start))
        parts += section("Parameters on the tp axis", _parameter_table(plan))
        parts += [Padding(Text(legend), (0, 0, 0, 2))] if legend else []
    parts += section("Collectives of the tp axis, per microbatch", _collective_table(plan))
    if all:
        parts += section("Activations on the tp axis", _split_table(plan.splits.activations.items(), hide="B"))
        parts += section("Inputs of each segment", _boundary_table(plan))
        for kind, strategies in sorted(plan.strategies.items()):
            parts += section(f"Strategies in {kind}", _split_table(strategies.items()))
    parts += _notes(plan)
    return render(parts, width)


def headline(plan: PlanData) -> str:
    """Return the answer in one line: `gpt3-175b on 64 × dgx-h100: dp 1 × tp 8 × pp 8, ZeRO-1, recompute none`."""
    zero = f"ZeRO-{plan.zero}" if plan.zero else "no ZeRO"
    system = f", as {printable(plan.system, keep='')}" if plan.system else ""
    where = f"{plan.model} on {plan.world} × {plan.cluster.name}"
    changed = "; changed since it was predicted: times and memory are of other choices" if plan.was_changed else ""
    return f"{where}: {plan.mesh}, {zero}, recompute {recompute_text(plan)}{system}{changed}"


def brief(plan: PlanData) -> str:
    """Return the plan in a few words: `gpt2 on 8 × dgx-h100: dp 8 × tp 1 × pp 1, 31 ms/step, 2,110,000 tokens/s`."""
    predicted = plan.predicted
    rate = f"{seconds(predicted.step_time_s)}/step, {predicted.tokens_per_s:,.0f} {plan.unit}/s"
    return f"{plan.model} on {plan.world} × {plan.cluster.name}: {plan.mesh}, {rate}"


def steps(plan: PlanData) -> str:
    """Return the makeup of a step: `a step of 512 samples, s 2048: 512 microbatches of 1, 1F1B, bf16, adamw`."""
    count = plan.schedule.microbatches
    sizes = "".join(
        f", {printable(name, keep='')} {value}" for name, value in sorted(plan.sizes.items()) if name != "b"
    )
    microbatches = f"{count} {'microbatch' if count == 1 else 'microbatches'} of {plan.micro}"
    ranks = " per dp rank" if plan.mesh.dp > 1 else ""
    kind = SCHEDULES.get(plan.schedule.kind, plan.schedule.kind)
    return f"a step of {plan.batch} samples{sizes}: {microbatches}{ranks}, {kind}, {plan.precision}, {plan.optimizer}"


def prediction(plan: PlanData) -> str:
    """Return the prediction of the cost models in one line."""
    predicted = plan.predicted
    rate = f"{predicted.tokens_per_s:,.0f} {plan.unit}/s"
    return f"predicted {seconds(predicted.step_time_s)}/step, {rate}, MFU {predicted.mfu:.1%}"


def fullest_rank(plan: PlanData) -> str:
    """Return the memory that the fullest rank needs, with how sure that is."""
    needed = [sum(row.values()) for row in plan.predicted.memory]
    most = max(needed)
    capacity = plan.device_of(needed.index(most)).memory_bytes
    below = MOST_MEASURED * most
    return (
        f"memory {most / GIB:.1f} GiB on the fullest rank, with {CONFIDENCE:.0%} confidence below "
        f"{below / GIB:.1f} of {capacity / GIB:.1f} GiB{': it may not fit' * (below > capacity)}"
    )


def method(plan: PlanData) -> str:
    """Return the execution options; a second line names those that the runtime cannot run, if any."""
    options = plan.method
    overlap = f"{', '.join(options.overlap) or 'nothing'} overlapped with compute"
    parts = [f"{options.kernels} kernels", _GRADIENTS[options.gradients], overlap]
    if "logits" in plan.partial:
        parts.append("logits in chunks of the vocabulary")
    elif options.loss != "kept":
        parts.append("in-place loss")
    if options.attention != "torch":
        parts.append(f"{options.attention} attention")
    if plan.mesh.cp > 1:
        parts.append("ring attention" if options.context == "ring" else "Ulysses attention")
    if options.gathers == "again" and plan.mesh.tp > 1:
        parts.append("tp re-gather in backward")
    if any(options.offload):
        parts.append(f"{offloaded(options)} of the optimizer state in host memory")
    if options.bucket_bytes:
        parts.append(f"buckets of {options.bucket_bytes / 1e6:.0f} MB")
    if plan.schedule.virtual > 1:
        turned = " as a V" if plan.route.shape == "v" else ""
        parts.append(f"{plan.schedule.virtual} chunks per rank{turned}")
    if options.shards:
        parts.append(f"shards of {options.shards} ranks")
    if options.sends == "slices":
        parts.append("scatter-gather P2P")
    if options.sums == "ahead":
        parts.append("an extra forward pass over the batch for the sums in the loss")
    elif options.sums == "held":
        parts.append("sums in the loss added up before the first backward pass")
    if plan.loss_averaging != "global":
        over = " over all dp ranks" if plan.loss_averaging == "per-microbatch-over-dp" else " and dp rank"
        parts.append(f"terms of the loss that are no sums averaged over microbatches, each from one microbatch{over}")
    if plan.statistics:
        parts.append(f"{plan.statistics:,} sums over the batch within each pass, over dp {plan.mesh.dp}")
    if plan.updates:
        parts.append("buffers updated at the end of a step")
    if plan.whole:
        parts.append(f"{len(plan.whole):,} parameters updated as whole tensors at their owners")
    text = f"execution: {', '.join(parts)}"
    return f"{text}\npredicted only: {'; '.join(plan.not_runnable)}" if plan.not_runnable else text


# --- tables of one plan -------------------------------------------------------------------------------------------


def _time_table(plan: PlanData) -> Table | None:
    table = columns("part", "time>", "share>", "")
    whole = plan.predicted.step_time_s
    for name, value in sorted(plan.predicted.time_s.items(), key=lambda item: (-item[1], item[0])):
        share = value / whole if whole else 0.0
        if share >= 0.0005:  # smaller ones would print as 0.0%
            table.add_row(part_name(name, plan), seconds(value), f"{share:.1%}", "█" * round(min(share, 1.0) * _BAR))
    return table if table.row_count else None


def _memory_table(plan: PlanData, width: int, all: bool) -> Table:
    rows, host = plan.predicted.memory, plan.predicted.host or (0,) * len(plan.predicted.memory)
    peak = {name: max(row.get(name, 0) for row in rows) for name in sorted(set().union(*rows))}
    categories = sorted((name for name in peak if peak[name]), key=lambda name: -peak[name])
    long = width >= WIDTH and len(categories) <= 6
    heads = [words(name if long else _SHORT.get(name, name)) for name in categories]
    there = ["on host>"] * any(host)
    table = columns("stage", *(f"{head}>" for head in heads), "needs>", "of device>", *there, gap=1)
    runs = _runs([{**row, _HOST: nbytes} for row, nbytes in zip(rows, host, strict=True)])
    for first, last, row in _first_rows(runs, all):
        total = sum(row.values()) - row[_HOST]
        cells = [f"{row.get(name, 0) / GIB:.2f}" for name in categories]
        table.add_row(
            ranges(range(first, last + 1)),
            *cells,
            f"{total / GIB:.2f}",
            f"{total / plan.device_of(first).memory_bytes:.0%}",
            *(f"{row[_HOST] / GIB:.2f}" for _ in there),
        )
    if len(_first_rows(runs, all)) < len(runs):
        table.add_row("…")
    return table


def _policies_text(plan: PlanData, stage: StagePlan, all: bool) -> str:
    """Return `12`, `12 + 4 offloaded` or `-`; or which segments these are, if `all`."""
    found = plan.policies(stage)
    apart = ([i for i, policy in found.items() if (policy == "offload") == moved] for moved in (False, True))
    texts = [(ranges(each) if all else str(len(each))) if each else "" for each in apart]
    return " + ".join(filter(None, (texts[0], texts[1] and f"{texts[1]} offloaded"))) or "-"


def _stage_table(plan: PlanData, all: bool) -> Table:
    several = bool(plan.cluster.others)
    table = columns("stage", *["device"] * several, "segments>", "recomputed>", "modules")
    stages = list(enumerate(plan.stages))
    for i, stage in _first_rows(stages, all):
        recomputed = _policies_text(plan, stage, all)
        device = [stage.device] * several
        table.add_row(str(i), *device, str(stage.last - stage.first + 1), recomputed, stage.modules)
    if len(_first_rows(stages, all)) < len(stages):
        table.add_row("…")
    return table


def _first_rows(rows: Sequence[_Row], all: bool) -> Sequence[_Row]:
    """Return the first rows if there are very many, unless all are wanted."""
    return rows if all or len(rows) <= _STAGES else rows[: _STAGES - 1]


def _parameter_table(plan: PlanData) -> Table | None:
    """Return the table of parameters: layers folded into ranges, equally placed tensors of a module into one row."""
    groups: dict[tuple[str, str], list[str]] = {}
    for line, text in fold_table(plan.splits.parameters.items()):
        module, _, leaf = line.rpartition(".")
        groups.setdefault((module, text), []).append(leaf)
    table = columns("name", "placement")
    for (module, text), leaves in groups.items():
        leaf = leaves[0] if len(leaves) == 1 else "{" + ",".join(leaves) + "}"
        table.add_row(f"{module}.{leaf}" if module else leaf, text)
    return table if table.row_count else None


def _is_used(plan: PlanData, start: str) -> bool:
    texts = plan.splits.parameters.values()
    return any(
        "/" in text if start == "S/" else text.startswith("S") if start == "S" else text == start for text in texts
    )


def _collective_table(plan: PlanData) -> Table | None:
    """Return the table of collectives: one row per repeated block, which may consist of several kinds."""
    blocks: dict[tuple[str, int], tuple[Counter[str], Counter[str]]] = {}
    for kind, found in sorted(plan.collectives.items()):
        name = kind[: kind.rindex(".*") + 2] if ".*" in kind and found.count > 1 else kind
        forward, backward = blocks.setdefault((name, found.count), (Counter(), Counter()))
        forward.update(found.forward)
        backward.update(found.backward)
    table = columns("block", "blocks>", "forward", "backward")
    for (name, count), (forward, backward) in blocks.items():
        table.add_row(name, str(count), _counted(forward), _counted(backward))
    return table if table.row_count else None


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', '-')} {count}" for name, count in sorted(counts.items())) or "none"


def _notes(plan: PlanData) -> list[RenderableType]:
    table = columns("", "")
    table.show_header = False
    for note in plan.notes:
        table.add_row("note", note)
    return ["", table] if plan.notes else []


def _split_table(items: Iterable[tuple[str, str]], hide: str = "") -> Table | None:
    table = columns("name", "placement")
    for name, text in fold_table((name, text) for name, text in items if text != hide):
        table.add_row(name, text)
    return table if table.row_count else None


def _boundary_table(plan: PlanData) -> Table | None:
    table = columns("segment", "placements")
    for kind, placements in sorted(plan.boundaries.items()):
        if placements:
            table.add_row(kind, ", ".join(placements))
    return table if table.row_count else None


def _runs(rows: Sequence[Mapping[str, int]]) -> list[tuple[int, int, Mapping[str, int]]]:
    """Return `(first, last, row)` of each run of equal rows."""
    runs: list[tuple[int, int, Mapping[str, int]]] = []
    for i, row in enumerate(rows):
        if runs and runs[-1][2] == row:
            runs[-1] = (runs[-1][0], i, row)
        else:
            runs.append((i, i, row))
    return runs


# --- rows of two plans --------------------------------------------------------------------------------------------


def choice_lines(plan: PlanData) -> list[tuple[str, str]]:
    return [
        ("model", plan.model),
        ("graph", plan.graph_hash[:19] + "…"),
        ("world", str(plan.world)),
        ("cluster", plan.cluster.name),
        ("batch", str(plan.batch)),
        ("sizes", ", ".join(f"{name} {value}" for name, value in sorted(plan.sizes.items()) if name != "b")),
        ("precision", plan.precision),
        ("optimizer", plan.optimizer),
        *choices(plan).items(),
        ("MFU", f"{plan.predicted.mfu:.1%}"),
    ]
