"""The alternatives to the split of an op or parameter: each legal one, and what the whole model then costs.

An alternative is priced by solving the splits ILP again with that one choice fixed; all other choices may change.
Differences are relative to the plan, per microbatch and rank, over all layers (an op stands for all of its kind). If an
alternative is faster, the plan traded time for something else: bytes saved for backward, or a placement fixed by hand.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from autoptd.answers.reprice import sharding_query_of
from autoptd.compile.program import read_sharding
from autoptd.compile.traced import TracedModel
from autoptd.errors import PlanError, nearest
from autoptd.explain.tables import WIDTH, columns, gib, render, seconds, section, signed
from autoptd.passes.fold import Folded
from autoptd.passes.graph import module_path
from autoptd.passes.sharding.sharding import Sharding, ops_of, parameter_splits
from autoptd.plans.model import Plan
from autoptd.progress import Progress, Silent, counted
from autoptd.search.infeasible import InfeasibleSplit
from autoptd.search.sharding.tensors import Sharded, Tensors
from autoptd.text import fold_table

_MOST = 6  # ops explained at once
_NAMED = 2  # moved parameters named in a row


@dataclass(frozen=True)
class SplitNode:
    """A node of the splits problem: op `name` of a kind of segment, or one of its parameters."""

    kind: str
    name: str
    node: str  # name of the node in the problem
    position: int  # of an op among the nodes of the kind, of a parameter among its parameters
    is_op: bool
    chosen: str


@dataclass(frozen=True)
class Alternative:
    """The cost of the model with one choice, as differences from the plan; None if the choice is infeasible."""

    label: str
    chosen: bool
    own_s: float | None  # time of the op alone, forward and backward, over all of its kind; None for parameters
    compute_s: float | None
    communication_s: float | None
    kept_bytes: float | None
    moved: tuple[tuple[str, str], ...] = ()  # parameters that are placed differently, folded -> new placement

    @property
    def total_s(self) -> float | None:
        """Difference in the forward and backward pass of one microbatch through the whole model."""
        if self.compute_s is None or self.communication_s is None:
            return None
        return self.compute_s + self.communication_s

    def to_data(self) -> dict[str, Any]:
        """Return the alternative as JSON data, in seconds and bytes."""
        return {
            "choice": self.label,
            "chosen": self.chosen,
            "possible": self.total_s is not None,
            "own_s": self.own_s,
            "compute_s": self.compute_s,
            "communication_s": self.communication_s,
            "total_s": self.total_s,
            "kept_bytes": self.kept_bytes,
            "moved": dict(self.moved),
        }


@dataclass(frozen=True)
class OpAlternatives:
    """A slot with its alternatives, the plan's own first, then the cheapest first."""

    slot: SplitNode
    alternatives: tuple[Alternative, ...]

    def to_data(self) -> dict[str, Any]:
        """Return the slot and its alternatives as JSON data."""
        found = [alternative.to_data() for alternative in self.alternatives]
        return {"kind": self.slot.kind, "name": self.slot.name, "chosen": self.slot.chosen, "alternatives": found}


def op_alternatives(
    plan: Plan, traced: TracedModel, name: str, progress: Progress | None = None
) -> tuple[list[OpAlternatives], list[SplitNode]]:
    """Return the alternatives of the first few slots that `name` matches, and the slots omitted.

    name: a parameter or a module, by its path, a part of it (`mlp.c_fc`) or a pattern (`*.q_proj.weight`); an op as
    `explain --all` shows it (`linear_3`, `kind/linear_3`); a kind of segment. Raises PlanError if nothing has that
    name, PlanFileError for the plan of another model.
    """
    progress = progress or Silent()
    sharding = read_sharding(traced, plan)
    slots = find(traced.folded, sharding, name)
    tensors = traced.known.tensors(sharding_query_of(plan, traced))
    base = tensors.priced(sharding)
    slots = sorted(slots, key=lambda slot: -_chosen_s(tensors, slot))  # free ops such as views last
    found = []
    for slot in slots[:_MOST]:
        with progress.stage(f"try the alternatives of {slot.name}"):
            found.append(OpAlternatives(slot, _alternatives(tensors, base, slot)))
    return found, slots[_MOST:]


def parameter_reasons(plan: Plan, traced: TracedModel, progress: Progress | None = None) -> dict[str, str]:
    """Return, for each parameter, what its other placements on the tp axis would cost, in words; empty with tp 1.

    Raises PlanFileError for the plan of another model."""
    if plan.mesh.tp == 1:
        return {}
    folded, sharding = traced.folded, read_sharding(traced, plan)
    tensors = traced.known.tensors(sharding_query_of(plan, traced))
    base = tensors.priced(sharding)
    slots = list(dict.fromkeys(_parameters(folded, sharding, "*")))
    found: dict[str, str] = {}
    for slot in counted(progress or Silent(), "try the alternatives of each parameter", slots):
        alternatives = [_reason(row) for row in _alternatives(tensors, base, slot) if not row.chosen]
        text = "; ".join(alternatives) or "no other placement is possible"
        found |= dict.fromkeys(_layers(folded, slot), text)
    return found


def _reason(row: Alternative) -> str:
    """Return `B: +1.2 ms, +3.4 GiB saved for backward`."""
    if row.total_s is None:
        return f"{row.label}: not with its neighbours"
    saved = f", {_bytes(row.kept_bytes)} saved for backward" if row.kept_bytes else ""
    return f"{row.label}: {_time(row.total_s)}{saved}"


# --- names --------------------------------------------------------------------------------------------------------


def find(folded: Folded, sharding: Sharding, name: str) -> list[SplitNode]:
    """Return the slots that a name matches, each kind of segment once. Raises PlanError with the nearest names."""
    slots = list(dict.fromkeys(_parameters(folded, sharding, name))) or list(
        dict.fromkeys(_ops(folded, sharding, name))
    )
    if slots:
        return slots
    known = {path for segment in folded.segments for node in segment.nodes if (path := module_path(node))}
    known |= {folded.traced.parameters[p.name] for segment in folded.segments for p in segment.parameters}
    known |= {node.name for segment in folded.representatives.values() for _, node in ops_of(segment)}
    known |= {path.rpartition(".")[2] for path in known}
    close = nearest(name, known).partition("known:")[0].removesuffix("; ").strip()
    advice = "`autoptd explain PLAN --all` lists ops; modules and parameters go by their names in the model"
    raise PlanError(
        f"nothing is called {name!r}: no parameter, module or op", where="--op", fix=f"{close} {advice}".strip()
    )


def _parameters(folded: Folded, sharding: Sharding, name: str) -> Iterator[SplitNode]:
    for segment in folded.segments:
        for i, node in enumerate(segment.parameters):
            own = folded.traced.parameters[node.name]
            if _is_named(own, name) or fnmatch.fnmatchcase(own, name):
                first = folded.representatives[segment.kind].parameters[i]
                shown = folded.traced.parameters[first.name]
                chosen = str(sharding.kinds[segment.kind].parameters[i])
                yield SplitNode(segment.kind, shown, f"{segment.kind}/parameter:{i}", i, False, chosen)


def _ops(folded: Folded, sharding: Sharding, name: str) -> Iterator[SplitNode]:
    for segment in folded.segments:
        first = folded.representatives[segment.kind]
        for i, node in ops_of(segment):
            shown = first.nodes[i].name
            if _is_named(module_path(node), name) or name in (shown, f"{segment.kind}/{shown}", segment.kind):
                chosen = str(sharding.kinds[segment.kind].strategies[i])
                yield SplitNode(segment.kind, shown, f"{segment.kind}/{shown}", i, True, chosen)


def _is_named(path: str, name: str) -> bool:
    """Return whether a dotted name is a path or consecutive parts of it: `mlp.c_fc` of `h.0.mlp.c_fc`."""
    return f".{name}." in f".{path}."


# --- prices -------------------------------------------------------------------------------------------------------


def _alternatives(tensors: Tensors, base: Sharded, slot: SplitNode) -> tuple[Alternative, ...]:
    labels = next([c.label for c in n.choices] for n in tensors.problem.nodes if n.name == slot.node)
    found = [_alternative(tensors, base, slot, label) for label in labels]
    return tuple(sorted(found, key=lambda a: (not a.chosen, a.total_s is None, a.total_s or 0.0)))


def _alternative(tensors: Tensors, base: Sharded, slot: SplitNode, label: str) -> Alternative:
    itself = _own_s(tensors, slot, label)
    if label == slot.chosen:
        return Alternative(label, True, itself, 0.0, 0.0, 0.0)
    try:
        solved = tensors.solve(fixed={slot.node: label})
    except (InfeasibleSplit, PlanError):
        return Alternative(label, False, itself, None, None, None)
    compute = solved.compute_seconds - base.compute_seconds
    communication = (solved.seconds - solved.compute_seconds) - (base.seconds - base.compute_seconds)
    before, after = (parameter_splits(tensors.folded, s.sharding) for s in (base, solved))
    own = set() if slot.is_op else _layers(tensors.folded, slot)
    moved = tuple(fold_table((n, text) for n, text in after.items() if before[n] != text and n not in own))
    return Alternative(
        label, False, itself, compute, communication, _kept(tensors, solved) - _kept(tensors, base), moved
    )


def _layers(folded: Folded, slot: SplitNode) -> set[str]:
    """Return the names of a parameter in all segments of its kind."""
    alike = [segment for segment in folded.segments if segment.kind == slot.kind]
    return {folded.traced.parameters[segment.parameters[slot.position].name] for segment in alike}


def _chosen_s(tensors: Tensors, slot: SplitNode) -> float:
    return _own_s(tensors, slot, slot.chosen) or 0.0


def _own_s(tensors: Tensors, slot: SplitNode, label: str) -> float | None:
    if not slot.is_op:
        return None
    node = tensors.folded.representatives[slot.kind].nodes[slot.position]
    strategy = next(s for s in tensors.legal[slot.kind][slot.position] if str(s) == label)
    return tensors.folded.multiplicity(slot.kind) * sum(tensors.op_seconds(node, strategy))


def _kept(tensors: Tensors, sharded: Sharded) -> float:
    """Return the bytes of activations that a microbatch saves for backward, over all segments."""
    return sum(tensors.folded.multiplicity(kind) * cost.activation_bytes for kind, cost in sharded.costs.items())


# --- text ---------------------------------------------------------------------------------------------------------


def op_alternatives_text(
    plan: Plan, found: Sequence[OpAlternatives], omitted: Sequence[SplitNode], width: int = WIDTH
) -> str:
    """Return a table per op or parameter with the cost of each alternative relative to the plan."""
    parts: list[Any] = []
    if plan.mesh.tp == 1:
        parts.append("tp is 1: nothing is split, so no op has an alternative")
    for one in found:
        title = f"{one.slot.name} in {one.slot.kind}" if one.slot.is_op else one.slot.name
        parts += section(f"{title}: {one.slot.chosen}", _table(one, width))
    if omitted:
        names = ", ".join(slot.name for slot in omitted)
        parts += ["", f"and {len(omitted)} more: {names}; name one of them"]
    legend = (
        "choice: placements of the operands -> of the results; op itself: its time in all blocks of its kind; the "
        "other columns: differences from the plan, for one microbatch through the whole model, with all other splits "
        "chosen anew; saved: bytes saved for backward; also: parameters that are then placed differently"
    )
    return render([*parts, "", Text(legend)], width).lstrip("\n")


def _table(one: OpAlternatives, width: int) -> Any:
    ops = one.slot.is_op
    heads = ["op itself>"] if ops else []
    table = columns(
        "choice", *heads, "compute>", "comm>", "total>", "saved>", "also", gap=1 if width < WIDTH else 2, whole=True
    )
    for row in one.alternatives:
        own = [seconds(row.own_s) if row.own_s is not None else ""] if ops else []
        if row.total_s is None:
            table.add_row(row.label, *own, "–", "–", "–", "–", "infeasible with its neighbours")
            continue
        times = [_time(row.compute_s), _time(row.communication_s), _time(row.total_s)]
        cells = ["", "", "plan", ""] if row.chosen else [*times, _bytes(row.kept_bytes)]
        table.add_row(row.label, *own, *cells, _moved(row.moved))
    return table


def _time(value: float | None) -> str:
    return "same" if not value or abs(value) < 1e-9 else signed(value, seconds(value))


def _bytes(value: float | None) -> str:
    return "same" if not value else signed(value, gib(value))


def _moved(moved: Sequence[tuple[str, str]]) -> str:
    """Return the moved parameters as `attn.c_proj.weight → S1`, by the last parts of their names."""
    ends = list(dict.fromkeys(f"{'.'.join(name.split('.')[-3:])} → {text}" for name, text in moved))
    more = f" and {len(ends) - _NAMED} more" if len(ends) > _NAMED else ""
    return ", ".join(ends[:_NAMED]) + more
