"""What differences of losses, norms, gradients and parameters say, where every line of the program is right.

gradients wrong          what was summed, over microbatches, ranks or tied stages
norm wrong               a parameter whose squares are counted too often, or not at all
parameters wrong         the update, or what was collected after it
a later step wrong       something that the step before left behind
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from autoptd.layout.layout import Layout
from autoptd.layout.placements import Split
from autoptd.ops.tp_axis import own_slice
from autoptd.verification.compare import Compared, Off
from autoptd.verification.plain import PlainStep
from autoptd.verification.ranks import RankRun

Place = tuple[str, str]


def explain(
    layout: Layout, found: Compared, runs: Sequence[RankRun], expected: Sequence[PlainStep], clip: float
) -> Iterator[Place]:
    """(where, what), first what comes first."""
    yield from ((name, "no rank holds it, or none updates it") for name in found.missing[:3])
    step = found.step or 0
    later = f" in step {step + 1}, though step {step} was right: step {step} left something behind" if step else ""
    wrong = {name: off for name, off in found.gradients.items() if off.rank is not None}
    for name, off in list(wrong.items())[:3]:
        yield (
            name,
            f"gradient {_by(off)}{_ratio(layout, runs, expected, step, name, off, clip)}{_on(layout, off)}{later}",
        )
    if found.norm.rank is not None and not wrong:
        yield "gradient norm", f"{_by(found.norm)}{_counted(runs, expected, step)}{_on(layout, found.norm)}{later}"
    for name, (a, b) in list(found.diverged.items())[:3]:
        yield name, f"after the steps ranks {a} and {b} hold different copies: {layout.parameters[name].placement}"
    moved = {name: off for name, off in found.state.items() if off.rank is not None}
    if not wrong:
        for name, off in list(moved.items())[:3]:
            yield name, f"after the step {_by(off)}{_on(layout, off)}, though its gradient was right{later}"
    if found.loss.rank is not None:
        yield "loss", f"{_by(found.loss)}{_on(layout, found.loss)}{later}"


def _by(off: Off) -> str:
    return f"off by {off.difference:.1e}"


def _on(layout: Layout, off: Off) -> str:
    assert off.rank is not None
    (pp, dp, tp), cp = layout.mesh.coordinates(off.rank), layout.mesh.cp_of(off.rank)
    cut = f", cp {cp}" if layout.mesh.cp > 1 else ""
    return f", first on rank {off.rank} (pp {pp}, dp {dp}{cut}, tp {tp})"


def _ratio(
    layout: Layout, runs: Sequence[RankRun], expected: Sequence[PlainStep], step: int, name: str, off: Off, clip: float
) -> str:
    """`: it is 2 × the right one`, where it is a multiple; `clip`: the norm to which gradients were clipped."""
    assert off.rank is not None
    spec, tp = layout.parameters[name], layout.mesh.tp
    for part in runs[off.rank].steps[step].parts:
        if part.name != name or name not in expected[step].gradients:
            continue
        full = expected[step].gradients[name]
        if isinstance(spec.placement, Split) and tp > 1:
            full = own_slice(full, spec.placement.dim, spec.placement.groups, tp, off.rank % tp)
        wanted = full.reshape(-1)[part.start : part.start + part.size]
        undone = max(1.0, (runs[off.rank].steps[step].norm + 1e-6) / clip)
        return _multiple(part.gradient * undone, wanted)
    return ""


def _multiple(found: Tensor, wanted: Tensor) -> str:
    square = float(wanted @ wanted)
    if not found.any():
        return ": there is none"
    if not square:
        return ""
    factor = float(found @ wanted) / square
    if float((found - factor * wanted).norm()) > 1e-6 * float(found.norm()):
        return ""
    return f": it is {factor:.4g} × the right one"


def _counted(runs: Sequence[RankRun], expected: Sequence[PlainStep], step: int) -> str:
    """Which one parameter's squares explain a norm that is too large or too small."""
    extra = runs[0].steps[step].norm ** 2 - expected[step].norm ** 2
    for name, gradient in expected[step].gradients.items():
        square = float(gradient.norm()) ** 2
        times = extra / square if square else 0.0
        if round(times) and abs(times - round(times)) < 1e-6:
            word = f"{round(times) + 1} times" if times > 0 else "not at all"
            return f": as if {name} were counted {word}"
    return ""
