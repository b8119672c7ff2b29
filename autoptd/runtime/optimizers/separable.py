"""Trials of an unknown optimizer: that it updates each parameter by itself, as updates at different ranks need.

The optimizer takes some steps on two small matrices, with large and with small gradients. The first one's values must
not change if the second one has other values and other gradients, or none, or comes first, or is at another rank, and
vice versa. Nor may they depend on the values that parameters have when the optimizer is constructed, since these are
loaded later. An optimizer that draws random numbers fails, as it would draw others on each rank. A class that says it
is elementwise must also update a matrix as the vector of its elements, and pieces of that as the whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autoptd.errors import PlanError

Build = Callable[[list[nn.Parameter]], Optimizer]
_ONE_AT_A_TIME = threading.Lock()  # ranks can be threads of one process, which share torch's generator
_SHAPES = ((12, 8), (8, 20))
_MATRIX, _PIECES = (12, 8), (37, 59)
_STEPS = 12  # rules often begin late: RAdam rectifies from step 6 on, slow weights are read every 5 or 6 steps
_SCALES = (1e-3, 1.0, 1e3)
_EQUAL = 1e-5  # of the whole change; equal runs are bitwise equal but for libraries that choose kernels by alignment
_FIX = (
    "use an optimizer whose step() takes no closure and updates each parameter by itself; "
    "limit the global gradient norm by clip_norm="
)
_PLACE_FIX = (
    "give each rule a group of its own, by names: parameter_groups=[{'names': [...], 'lr': ...}]; a rank's optimizer "
    "holds the parameters of that rank only"
)


def check_separable(build: Build, name: str) -> None:
    """Raise PlanError if the optimizer that `build` makes couples parameters or cannot step without a closure."""
    with _trial(name) as draw:
        values, others = ([torch.randn(shape, generator=draw) for shape in _SHAPES] for _ in range(2))
        for gradients in _gradients(_SHAPES, draw):
            _check(build, name, values, others, gradients)


def check_elementwise(build: Build, name: str) -> None:
    """Raise PlanError if flat pieces of a matrix are not updated as the whole of it, for a class that claims so."""
    with _trial(name) as draw:
        value = torch.randn(_MATRIX, generator=draw)
        for gradients in _gradients([_MATRIX], draw):
            whole = _run(build, [value], gradients)[0]
            pieces = [list(step[0].flatten().split(_PIECES)) for step in gradients]
            found = torch.cat(_run(build, value.flatten().split(_PIECES), pieces)).view(_MATRIX)
            if not _equal(found, whole, value):
                what = f"{name} says that it is elementwise, but updates pieces of a parameter otherwise than all of it"
                raise PlanError(what, where="optimizer", fix="remove `elementwise = True` from its class")


@contextmanager
def _trial(name: str) -> Iterator[torch.Generator]:
    """Keep torch's own generator as it is; raise what the user's optimizer raises as PlanError."""
    try:
        with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
            yield torch.Generator().manual_seed(0)
    except PlanError:
        raise
    except Exception as error:
        what = f"{name} cannot step on a trial of two parameters: {type(error).__name__}: {error}"
        raise PlanError(what, where="optimizer", fix=_FIX) from error


def _gradients(shapes: Sequence[tuple[int, ...]], draw: torch.Generator) -> Iterator[list[list[Tensor]]]:
    """Yield the gradients of all steps at each scale."""
    drawn = [[torch.randn(shape, generator=draw) for shape in shapes] for _ in range(_STEPS)]
    for scale in _SCALES:
        yield [[scale * gradient for gradient in step] for step in drawn]


def _check(
    build: Build,
    name: str,
    values: Sequence[Tensor],
    others: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
) -> None:
    expected = _run(build, values, gradients)
    late = _run(build, values, gradients, late=True)
    if not all(map(_equal, late, expected, values)):
        what = f"{name} reads the values of parameters when it is constructed, before they are loaded"
        raise PlanError(what, where="optimizer", fix="make its state in the first step, as torch's optimizers do")
    for mine, other in ((0, 1), (1, 0)):
        held = [values[i] if i == mine else others[i] for i in (0, 1)]
        changed = [[step[i] if i == mine else -9 * step[i] for i in (0, 1)] for step in gradients]
        alone = [[step[i] if i == mine else None for i in (0, 1)] for step in gradients]
        for given in (changed, alone):
            if not _equal(_run(build, held, given)[mine], expected[mine], values[mine]):
                what = f"{name} does not update each parameter by itself: gradients of {other} change parameter {mine}"
                raise PlanError(f"{what} of two", where="optimizer", fix=_FIX)
        for order in ([other, mine], [mine]):
            placed = _run(build, [values[i] for i in order], [[step[i] for i in order] for step in gradients])[-1]
            if not _equal(placed, expected[mine], values[mine]):
                what = f"{name} updates a parameter by its place among the parameters of its group, or by their number"
                raise PlanError(what, where="optimizer", fix=_PLACE_FIX)


def _run(
    build: Build, values: Sequence[Tensor], gradients: Sequence[Sequence[Tensor | None]], late: bool = False
) -> list[Tensor]:
    """Return the parameters after all steps. `late`: set their values after the optimizer is constructed."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    parameters = [nn.Parameter((torch.zeros_like(x) if late else x.clone()).to(device)) for x in values]
    optimizer = build(parameters)
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = None if gradient is None else gradient.clone().to(device)
        optimizer.step()
    return [parameter.detach().cpu() for parameter in parameters]


def _equal(found: Tensor, expected: Tensor, start: Tensor) -> bool:
    """Return whether two results of updates from `start` are the same."""
    if not (found.isfinite().all() and expected.isfinite().all()):
        return torch.equal(found, expected)
    return bool((found - expected).norm() <= _EQUAL * (expected - start).norm())
