"""Check of a plan's derived fields against its decisions and the graph.

Besides the decisions that the program is made from, a plan holds names of segments, placements of every tensor and
collectives, for readers and tools. A plan file in which these contradict the decisions is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from autoptd.cost_models.complaints import brief, path_text
from autoptd.errors import PlanFileError, nearest
from autoptd.passes.analysis.collectives import count_collectives
from autoptd.passes.fold import Folded
from autoptd.passes.sharding.sharding import Sharding, activation_splits, parameter_splits, to_text
from autoptd.search.step_end.whole_updates import whole_updates

if TYPE_CHECKING:
    from autoptd.plans.model import Plan

_SHOWN = 8
_WHAT = "the plan contradicts itself"
_FIX = "plan again: these fields are derived from the others and cannot be edited"
Path = tuple[str | int, ...]


def check_sizes(plan: Plan, folded: Folded) -> None:
    """Raise PlanFileError unless the plan has a value for every symbolic size of the graph, and no others."""
    known = {"b", *(str(symbol) for symbol in folded.traced.sizes)}
    wrong = [f"{path_text(('sizes', name))}: missing, please add it" for name in sorted(known - set(plan.sizes))]
    wrong += [
        f"{path_text(('sizes', name))}: unknown key; {nearest(name, known)}" for name in sorted(set(plan.sizes) - known)
    ]
    _refuse(wrong, "the plan's sizes are not those of the model's inputs", "plan the model again")


def check_derived(plan: Plan, folded: Folded, sharding: Sharding) -> None:
    """Raise PlanFileError naming the fields that contradict the plan's decisions."""
    count, right = len(plan.segments), len(folded.segments)
    _refuse([f"segments: has {count} entries; it must have {right}"] * (count != right), _WHAT, _FIX)
    strategies, boundaries = to_text(folded, sharding)
    wanted = {
        "segments": [segment.name for segment in folded.segments],
        "statistics": folded.statistics.count,
        "updates": sorted(folded.traced.buffers[name] for name in folded.updates.values),
        "whole": sorted(whole_updates(folded, plan.optimizer).shapes),
        "stages": [{"modules": modules(folded, stage.first, stage.last)} for stage in plan.stages],
        "splits": {
            "parameters": parameter_splits(folded, sharding),
            "activations": activation_splits(folded, sharding),
        },
        "strategies": strategies,
        "boundaries": boundaries,
        "collectives": collectives(folded, sharding),
    }
    found: dict[str, Any] = {
        "segments": list(plan.segments),
        "statistics": plan.statistics,
        "updates": list(plan.updates),
        "whole": list(plan.whole),
        "stages": [{"modules": stage.modules} for stage in plan.stages],
        "splits": {"parameters": plan.splits.parameters, "activations": plan.splits.activations},
        "strategies": plan.strategies,
        "boundaries": {kind: list(placements) for kind, placements in plan.boundaries.items()},
        "collectives": {kind: traffic.model_dump() for kind, traffic in plan.collectives.items()},
    }
    _refuse(_differences(found, wanted), _WHAT, _FIX)


def modules(folded: Folded, first: int, last: int) -> str:
    """Return the name of a stage of the segments `first` to `last`."""
    a, b = folded.segments[first].name, folded.segments[last].name
    return a if first == last else f"{a} … {b}"


def collectives(folded: Folded, sharding: Sharding) -> dict[str, dict[str, Any]]:
    """Return the tp collectives of each kind of segment; kinds that do not communicate are left out."""
    return {
        kind: {
            "count": folded.multiplicity(kind),
            "forward": dict(traffic.forward),
            "backward": dict(traffic.backward),
        }
        for kind, traffic in count_collectives(folded, sharding).items()
        if traffic.forward or traffic.backward
    }


def _differences(found: Any, wanted: Any, path: Path = ()) -> Iterator[str]:
    if isinstance(wanted, Mapping):
        for key in [*wanted, *(key for key in found if key not in wanted)]:
            if key not in found:
                yield f"{path_text((*path, key))}: missing; it must be {_shown(wanted[key])}"
            elif key not in wanted:
                yield f"{path_text((*path, key))}: unknown key; {nearest(key, wanted) if wanted else 'none is known'}"
            else:
                yield from _differences(found[key], wanted[key], (*path, key))
    elif isinstance(wanted, list):
        if len(found) != len(wanted):
            yield f"{path_text(path)}: has {len(found)} entries; it must have {len(wanted)}"
        for i, (mine, right) in enumerate(zip(found, wanted, strict=False)):
            yield from _differences(mine, right, (*path, i))
    elif found != wanted:
        yield f"{path_text(path)}: is {_shown(found)}; it must be {_shown(wanted)}"


def _shown(value: Any) -> str:
    return brief(repr(value))


def _refuse(wrong: Iterable[str], what: str, fix: str) -> None:
    """Raise PlanFileError with the first lines of `wrong`, if there are any."""
    if first := list(islice(wrong, _SHOWN + 1)):
        lines = [line if len(line) < 300 else f"{line[:300]} …" for line in first[:_SHOWN]]
        raise PlanFileError(what, where="\n".join([*lines, *["and others"][: len(first) - _SHOWN]]), fix=fix)
