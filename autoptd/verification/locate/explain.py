"""Causes of wrong losses, norms, gradients and parameters when every line of the program is right.

wrong                    cause
gradients                a sum over microbatches, ranks or tied stages
norm                     a parameter whose squares are counted several times, or not at all
parameters               the update, or the all-gather after it
a later step             state left by the step before
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from autoptd.layout.layout import Layout
from autoptd.runtime.lazy_tensor import own_part
from autoptd.verification.compare import Compared, Deviation
from autoptd.verification.plain import PlainStep
from autoptd.verification.ranks import RankRun, RankStep

Place = tuple[str, str]


def explain(
    layout: Layout, found: Compared, runs: Sequence[RankRun], expected: Sequence[PlainStep], clip: float
) -> Iterator[Place]:
    """Yield (where, what) of each difference, causes before effects."""
    yield from ((name, "no rank holds it, or none updates it") for name in found.missing[:3])
    step = found.step or 0
    later = f" in step {step + 1}, though step {step} was right: stale state of step {step}" if step else ""
    wrong = {name: off for name, off in found.gradients.items() if off.rank is not None}
    mine = [run.steps[step] for run in runs]
    for name, off in list(wrong.items())[:3]:
        ratio = _ratio(layout, mine, expected[step], name, off, clip)
        yield name, f"gradient {_by(off)}{ratio}{_on(layout, off)}{later}"
    if found.norm.rank is not None and not wrong:
        yield "gradient norm", f"{_by(found.norm)}{_counted(runs, expected, step)}{_on(layout, found.norm)}{later}"
    for name, (a, b) in list(found.diverged.items())[:3]:
        yield name, f"after the steps ranks {a} and {b} hold different copies: {layout.spec(name).placement}"
    moved = {name: off for name, off in found.state.items() if off.rank is not None}
    if not wrong:
        for name, off in list(moved.items())[:3]:
            yield name, f"after the step {_by(off)}{_on(layout, off)}, though its gradient was right{later}"
    if found.loss.rank is not None:
        yield "loss", f"{_by(found.loss)}{_on(layout, found.loss)}{later}"


def _by(off: Deviation) -> str:
    return f"off by {off.difference:.1e}"


def _on(layout: Layout, off: Deviation) -> str:
    assert off.rank is not None
    (pp, dp, tp), cp = layout.mesh.coordinates(off.rank), layout.mesh.cp_of(off.rank)
    cut = f", cp {cp}" if layout.mesh.cp > 1 else ""
    return f", first on rank {off.rank} (pp {pp}, dp {dp}{cut}, tp {tp})"


def _ratio(layout: Layout, mine: Sequence[RankStep], right: PlainStep, name: str, off: Deviation, clip: float) -> str:
    """Return `: it is 2 × the right one` if the gradient is a multiple of the right one. `clip`: the clipping norm."""
    assert off.rank is not None
    for part in mine[off.rank].parts:
        if part.name != name or name not in right.gradients:
            continue
        full = own_part(right.gradients[name], layout.parameters[name], layout.mesh, off.rank)
        wanted = full.reshape(-1)[part.start : part.start + part.size]
        undone = max(1.0, (mine[off.rank].norm + 1e-6) / clip)
        return _multiple(part.gradient * undone, wanted)
    return ""


def _multiple(found: Tensor, wanted: Tensor) -> str:
    square = float(wanted @ wanted)
    if not found.any():
        return ": it is zero"
    if not square:
        return ""
    factor = float(found @ wanted) / square
    if float((found - factor * wanted).norm()) > 1e-6 * float(found.norm()):
        return ""
    return f": it is {factor:.4g} × the right one"


def _counted(runs: Sequence[RankRun], expected: Sequence[PlainStep], step: int) -> str:
    """Return the one parameter whose squares, counted too often or not at all, explain a wrong norm."""
    extra = runs[0].steps[step].norm ** 2 - expected[step].norm ** 2
    for name, gradient in expected[step].gradients.items():
        square = float(gradient.norm()) ** 2
        times = extra / square if square else 0.0
        if round(times) and abs(times - round(times)) < 1e-6:
            word = f"{round(times) + 1} times" if times > 0 else "not at all"
            return f": as if {name} were counted {word}"
    return ""
